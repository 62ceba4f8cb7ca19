"""What the judge makes of broken kernels: the emulation with one thing wrong, in both 16-bit dtypes.

With `-rP` each fault prints its margin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import pad

from reference import emulation
from reference.emulation import Result as Registers

from .cases import Case
from .comparison import describe
from .scenes import TENSORS, Scene, scene

Broken = Callable[[Scene, pytest.MonkeyPatch], Registers]


@dataclass(frozen=True)
class Fault:
    """A broken kernel: the emulation with one thing wrong.

    Attributes:
        name: what is wrong.
        registers: what comes out; may patch the emulation.
        tensors: those that must be red, all of them,
        reference: by a rule against this; "emulation" where the oracle, which allows more, need not see it.
        causal: of the case.
    """

    name: str
    registers: Broken
    tensors: tuple[str, ...]
    reference: str = "oracle"
    causal: bool = True


def results(**changes: Callable[[Tensor, Scene], Tensor]) -> Broken:
    """The right results, then changed."""

    def registers(x: Scene, patch: pytest.MonkeyPatch) -> Registers:
        right = x.emulated()
        return right._replace(**{name: change(getattr(right, name), x) for name, change in changes.items()})

    return registers


def passes(names: str, change: Callable[..., tuple]) -> Broken:
    """Arguments of some of the emulation's passes changed."""

    def registers(x: Scene, patch: pytest.MonkeyPatch) -> Registers:
        for name in names.split():
            right = getattr(emulation, name)
            patch.setattr(emulation, name, lambda *args, right=right: right(*change(x, *args)))
        return x.emulated()

    return registers


def operations(name: str, change: Callable[..., Tensor]) -> Broken:
    """One of torch's operations changed wherever the emulation uses it."""

    def registers(x: Scene, patch: pytest.MonkeyPatch) -> Registers:
        right = getattr(Tensor, name)
        patch.setattr(Tensor, name, lambda *args, **options: change(right, x, *args, **options))
        return x.emulated()

    return registers


def toward_zero(x: Tensor, dtype: torch.dtype) -> Tensor:
    y = x.to(dtype)
    return (y.view(torch.int16) - (y.to(x.dtype).abs() > x.abs()).to(torch.int16)).view(dtype)


class Truncating(emulation._Arithmetic):
    def rounded(self, x: Tensor) -> Tensor:
        return toward_zero(x, self.operand).to(self.register)


def truncating(x: Scene, *args: Any) -> tuple:
    return tuple(Truncating(**vars(a)) if isinstance(a, emulation._Arithmetic) else a for a in args)


def in_rows(field: str, change: Callable[[Tensor, Scene], Tensor]) -> Broken:
    """q, dO, L2 or delta changed before both passes of the backward."""
    return passes("_dq _dk_dv", lambda x, rows, *rest: (
        rows._replace(**{field: change(getattr(rows, field), x)}), *rest
    ))  # fmt: skip


def diagonal(shift: int) -> Broken:
    class Shifted(emulation._Visible):
        def hidden(self, i0, i1, j0, j1, device, heads=1):
            mask = torch.ones(i1 - i0, j1 - j0, dtype=torch.bool)
            return mask.triu_(i0 + self.Sk - self.Sq + shift - j0 + 1).repeat(heads, 1)

    def registers(x: Scene, patch: pytest.MonkeyPatch) -> Registers:
        patch.setattr(emulation, "_Visible", Shifted)
        return x.emulated()

    return registers


def first_keys(number: Callable[[Case], int]) -> Broken:
    """Keys after the first few are not there; a number beyond the last adds keys of zeros."""

    def registers(x: Scene, patch: pytest.MonkeyPatch) -> Registers:
        more = number(x.case) - x.case.len_k
        got = x.emulated(**{name: pad(x.tensors[name], (0, 0, 0, more)) for name in "kv"})
        assert got.dk is not None and got.dv is not None
        return got._replace(dk=pad(got.dk, (0, 0, 0, -more)), dv=pad(got.dv, (0, 0, 0, -more)))

    return registers


def last_rows_stale(dq: Tensor, x: Scene) -> Tensor:
    return torch.cat([dq[:, :, :64], dq[:, :, 32:33]], dim=2)


def heads_interleaved(x: Scene, patch: pytest.MonkeyPatch) -> Registers:
    """Query head h reads KV head h % Hkv, not h // group."""
    order = [0, 2, 1, 3]
    got = x.emulated(**{name: x.tensors[name][:, order] for name in ("q", "d_out", "d_lse")})
    assert got.dq is not None
    return got._replace(out=got.out[:, order], lse=got.lse[:, order], dq=got.dq[:, order])


def to_dtype(t: Tensor, x: Scene) -> Tensor:
    return t.to(x.dtype).float()


FAULTS = [
    # arithmetic
    Fault("P truncated in the forward", passes("_forward", truncating), ("out",), "emulation"),
    Fault("P and dS truncated in dk and dv", passes("_dk_dv", truncating), ("dk", "dv")),
    Fault("dS truncated in dq", passes("_dq", truncating), ("dq",)),
    *(Fault(f"sums kept in bfloat16, seen by the {by}", operations("baddbmm_", lambda right, x, acc, a, b:
            acc.copy_(right(acc, a, b).bfloat16())), names, by)
      for by, names in (("oracle", ("dk", "dv")), ("emulation", ("out", "dq", "dk", "dv")))),
    Fault("sums kept in the dtype of the inputs", operations("baddbmm_", lambda right, x, acc, a, b:
          acc.copy_(to_dtype(right(acc, a, b), x))), ("out", "dq", "dk", "dv"), "emulation"),
    Fault("scores rounded", operations("__matmul__", lambda right, x, a, b:
          to_dtype(right(a, b), x)), ("lse",)),
    Fault("exponential good to 12 bits", operations("exp2_", lambda right, x, t:
          right(t).mul_(1 + 2**-12 * torch.sin(1e4 * t))), ("lse",)),
    Fault("l summed from the rounded P, not declared", operations("sum", lambda right, x, t, *a, **b:
          right(to_dtype(t, x), *a, **b)), ("lse",)),
    Fault("lse rounded", in_rows("L2", to_dtype), ("dq", "dk", "dv")),
    Fault("delta rounded", in_rows("delta", to_dtype), ("dq",), "emulation"),
    *(Fault(f"{name} stored by truncation",
            results(**{name: lambda t, x: toward_zero(t, x.dtype).float()}), (name,))
      for name in ("out", "dq", "dk", "dv")),
    Fault("scale off by 0.1 %", lambda x, _: x.emulated(scale=1.001 * x.case.effective_scale), ("lse",)),
    # formulas
    Fault("lse in base 2", results(lse=lambda t, x: t / np.log(2)), ("lse",)),
    *(Fault(f"sign of {name}", results(**{name: lambda t, x: -t}), (name,))
      for name in ("out", "dq", "dk", "dv")),
    Fault("sign of the scale", lambda x, _: x.emulated(scale=-x.case.effective_scale), TENSORS),
    Fault("dk without scale", results(dk=lambda t, x: t / x.case.effective_scale), ("dk",)),
    Fault("delta left out", in_rows("delta", lambda t, x: 0 * t), ("dq", "dk")),
    Fault("gradient of the lse left out", lambda x, _: x.emulated(d_lse=None), ("dq", "dk")),
    Fault("sign of the gradient of the lse",
          lambda x, _: x.emulated(d_lse=-x.tensors["d_lse"]), ("dq", "dk")),
    Fault("accumulator not rescaled", operations("mul_", lambda right, x, t, factor:
          t if isinstance(factor, Tensor) and t.shape[-1] == x.case.dim_v else right(t, factor)), ("out",)),
    # places
    Fault("< for <= on the diagonal", diagonal(-1), TENSORS),
    Fault("one key beyond the diagonal", diagonal(1), TENSORS),
    Fault("aligned at the top left", first_keys(lambda case: case.len_q), TENSORS),
    Fault("one key too few", first_keys(lambda case: case.len_k - 1), TENSORS, causal=False),
    Fault("one key too many, all zeros", first_keys(lambda case: case.len_k + 1), TENSORS, causal=False),
    Fault("two rows of V swapped", lambda x, _: x.emulated(
          v=x.tensors["v"][:, :, [1, 0, *range(2, x.case.len_k)]]), ("out", "dq", "dk")),
    Fault("two rows of K swapped", lambda x, _: x.emulated(
          k=x.tensors["k"][:, :, [1, 0, *range(2, x.case.len_k)]]), ("out", "dq", "dk", "dv")),
    Fault("dq without the last key tile, of one key", passes("_dq", lambda x, rows, k, *rest:
          (rows, pad(k[:, :-1], (0, 0, 0, 1)), *rest)), ("dq",), causal=False),
    Fault("dq stale in the last tile, of one row", results(dq=last_rows_stale), ("dq",)),
    Fault("dk and dv without the last head of a group", passes("_dk_dv", lambda x, rows, *rest:
          (type(rows)(*(t[:, :-1] for t in rows)), *rest)), ("dk", "dv")),
    Fault("heads interleaved in their groups", heads_interleaved, TENSORS),
]  # fmt: skip


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_planted_fault_is_found(fault: Fault, dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x = scene(Case(batch=2, heads_q=4, heads_kv=2, len_q=65, len_k=81, dim=32, dim_v=24, dtype=dtype,
                   causal=fault.causal, d_lse=True))  # fmt: skip
    with monkeypatch.context() as patch:
        stored = x.stored(fault.registers(x, patch))
    verdicts = [v for v in x.judged(stored) if v.reference == fault.reference]
    for name in fault.tensors:
        worst = max((v for v in verdicts if v.tensor == name), key=lambda v: v.margin)
        print(describe(worst))
        assert not worst.held, f"not seen; closest: {describe(worst)}"
