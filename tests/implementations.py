"""Implementations under test: where they come from, what they claim, how a case is run through them."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference.budget import Rounding
from reference.emulation import Tiles
from reports.records import Verdict

from .cases import DTYPES, Case
from .layouts import place
from .values import Inputs

OWN = "triton"
"""The default: this project's own kernels."""


OURS = Rounding()
"""Rounding where our own kernels do."""


class ImplementationError(Exception):
    """An `--impl` that cannot be used: what was given, and what it may be."""


@dataclass(frozen=True)
class Claims:
    """What an implementation says that it does; each claim is proved, the rest is not tested.

    The defaults are what is assumed of a function about which nothing is said.

    Attributes:
        dtypes: names.
        devices: of "cpu", "cuda".
        smallest_dim, largest_dim: head dimensions.
        equal_dims: D and Dv must be equal.
        gqa: Hq may be a multiple of Hkv.
        cross_lengths: Sq and Sk may differ.
        dead_rows: a query may see no key.
        empty: B, Sq or Sk may be 0.
        backward: it is differentiable.
        lse: it returns the lse, in natural logarithm.
        lse_grad: gradients flow through the lse.
        strided: inputs need not be contiguous.
        rounding: where it rounds.
    """

    dtypes: tuple[str, ...] = ("float16", "float32")
    devices: tuple[str, ...] = ("cpu", "cuda")
    smallest_dim: int = 16
    largest_dim: int = 256
    equal_dims: bool = True
    gqa: bool = False
    cross_lengths: bool = False
    dead_rows: bool = False
    empty: bool = False
    backward: bool = False
    lse: bool = False
    lse_grad: bool = False
    strided: bool = False
    rounding: Rounding = OURS

    def narrowed(self, case: Case) -> Case:
        """The case without the gradients that are not claimed: its forward is worth testing."""
        grad = case.grad if self.backward else "none"
        return replace(case, grad=grad, d_lse=case.d_lse and self.lse_grad and grad != "none")

    def refusal(self, case: Case) -> str:
        """Why a case lies outside of the claims; empty if it lies inside."""
        needs = {
            f"dtype {case.dtype}": case.dtype in self.dtypes,
            f"head dimension {case.dim}": self.smallest_dim <= case.dim <= self.largest_dim,
            f"head dimension {case.dim_v}": self.smallest_dim <= case.dim_v <= self.largest_dim,
            "Dv != D": case.dim == case.dim_v or not self.equal_dims,
            "several query heads a KV head": case.heads_q == case.heads_kv or self.gqa,
            "Sq != Sk": case.len_q == case.len_k or self.cross_lengths,
            "rows that see no key": not case.dead_rows or self.dead_rows,
            "empty inputs": bool(case.batch and case.len_q and case.len_k) or self.empty,
            "a backward": not case.backward or self.backward,
            "gradients through the lse": not case.d_lse or self.lse_grad,
            "inputs that are not contiguous": case.layout == "bhsd" or self.strided,
        }
        return ", ".join(what for what, claimed in needs.items() if not claimed)


@dataclass(frozen=True)
class Implementation:
    """An attention function of the native convention, that of `kernels.flash_attention`.

    Attributes:
        name: as given to --impl.
        function: takes q, k, v and, by keyword, causal, scale, return_lse.
        claims: what is tested.
        tiles: the tiles it uses for a case on a device, if known: it is then also compared with the
            emulation.
        path: names the code that runs on a device ("sm90", "sm80-override", "interpreter", ...).
    """

    name: str
    function: Callable[..., Any]
    claims: Claims
    path: Callable[[torch.device], str]
    tiles: Callable[[Case, torch.device], Tiles] | None = None


def load(spec: str) -> Implementation:
    """The implementation that `--impl` names.

    Args:
        spec: "triton", "module:callable" or "path/file.py:callable" (from the current folder).

    Raises:
        ImplementationError: if there is no such thing.
    """
    if spec == OWN:
        return _own()
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ImplementationError(
            f"--impl is {spec!r}; it may be {OWN!r}, 'module:callable' or 'path/file.py:callable'"
        )
    function = getattr(_module(source, spec), name, None)
    if not callable(function):
        was = "not there" if function is None else f"a {type(function).__name__}"
        raise ImplementationError(f"--impl is {spec!r}: {name!r} is {was}; it must be a callable")
    return Implementation(spec, function, Claims(), _foreign_path)


def _module(source: str, spec: str) -> Any:
    try:
        if not source.endswith(".py"):
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(source)
        path = Path(source).resolve()
        if not path.is_file():
            raise ImplementationError(f"--impl is {spec!r}: there is no file {path}")
        name = f"implementation_under_test_{path.stem}"
        sys.path.insert(0, str(path.parent))  # it may import its neighbours
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module  # @triton.jit looks its source up through here
        found.loader.exec_module(module)
        return module
    except ImplementationError:
        raise
    except (Exception, SystemExit) as error:  # a script may end with sys.exit
        raise ImplementationError(
            f"--impl is {spec!r}: importing {source} failed: {type(error).__name__}: {error}"
        ) from error


def _foreign_path(device: torch.device) -> str:
    if device.type == "cpu":
        return "cpu"
    if override := os.environ.get("TRITON_OVERRIDE_ARCH"):  # reaches Triton kernels, whosever they are
        return f"{override}-override"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def _own() -> Implementation:
    from kernels import effective_architecture, flash_attention
    from kernels.tiles import choose_tiles

    def path(device: torch.device) -> str:
        arch = effective_architecture(device)
        return f"{arch.name}-override" if arch.overridden else arch.name

    def tiles(case: Case, device: torch.device) -> Tiles:
        itemsize = getattr(torch, case.dtype).itemsize
        chosen = choose_tiles(effective_architecture(device), case.dim, case.dim_v, itemsize)
        return Tiles(**{
            kernel: (tile.BM, tile.BN)
            for kernel, tile in (
                ("forward", chosen.forward), ("dkdv", chosen.dkdv), ("dq", chosen.dq)
            )
        })  # fmt: skip

    everything = Claims(
        dtypes=DTYPES,
        equal_dims=False,
        gqa=True,
        cross_lengths=True,
        dead_rows=True,
        empty=True,
        backward=True,
        lse=True,
        lse_grad=True,
        strided=True,
    )
    return Implementation(OWN, flash_attention, everything, path, tiles)


# ---------------------------------------------------------------- running a case


def run(
    implementation: Implementation, case: Case, inputs: Inputs, device: torch.device
) -> tuple[dict[str, NDArray[np.float64]], list[Verdict]]:
    """The implementation's tensors for a case, in float64, and what it owes whatever their values are.

    Inputs are laid out as the case says; each tensor that must not change is compared with a copy.
    """
    placed = {name: place(name, t, case.layout, device) for name, t in vars(inputs).items() if t is not None}
    leaves = {name: placed[name].detach() for name in "qkv"}
    wanted = [name for name in "qkv" if case.backward and name in case.grad]
    for name in wanted:
        leaves[name].requires_grad_()

    returned = implementation.function(
        *leaves.values(),
        causal=case.causal,
        scale=case.scale,
        return_lse=implementation.claims.lse,
    )
    tensors: dict[str, Any] = {"out": returned}
    if implementation.claims.lse:
        pair = isinstance(returned, tuple | list) and len(returned) == 2
        tensors = dict(zip(("out", "lse"), returned if pair else (returned, None), strict=True))
    rows = tuple(inputs.q.shape[:3])
    verdicts = [_contract("out", tensors["out"], (*rows, case.dim_v), inputs.q.dtype, device)]
    if "lse" in tensors:
        verdicts.append(_contract("lse", tensors["lse"], rows, torch.float32, device))
    if wanted and all(verdict.held for verdict in verdicts):
        outputs, gradients = [tensors["out"]], [placed["d_out"]]
        if case.d_lse:
            outputs.append(tensors["lse"])
            gradients.append(placed["d_lse"])
        found = torch.autograd.grad(outputs, [leaves[name] for name in wanted], gradients, allow_unused=True)
        for name, gradient in zip(wanted, found, strict=True):
            x = leaves[name]
            verdicts.append(_contract(f"d{name}", gradient, tuple(x.shape), x.dtype, device))
            if isinstance(gradient, Tensor):
                tensors[f"d{name}"] = gradient
    for name, t in placed.items():
        unchanged = torch.equal(_bits(t.cpu()), _bits(getattr(inputs, name)))
        verdicts.append(Verdict(name, "contract", "input unchanged", unchanged))
    broken = {verdict.tensor for verdict in verdicts if not verdict.held}
    return {
        name: t.detach().cpu().double().numpy() for name, t in tensors.items() if name not in broken
    }, verdicts


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(torch.int16 if t.element_size() == 2 else torch.int32)


def _contract(name: str, t: Any, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Verdict:
    """Whether a result is a tensor of the right shape, dtype and device."""
    rule = "a tensor of the right shape, dtype and device"
    if not isinstance(t, Tensor):
        return Verdict(name, "contract", rule, False, note=f"it is a {type(t).__name__}")
    wrong = []
    if tuple(t.shape) != shape:
        wrong.append(f"shape {tuple(t.shape)}, not {shape}")
    if t.dtype != dtype:
        wrong.append(f"{t.dtype}, not {dtype}")
    if t.device.type != device.type:
        wrong.append(f"on {t.device}, not on {device}")
    return Verdict(name, "contract", rule, not wrong, note="; ".join(wrong))


def environment(path: str) -> Mapping[str, str]:
    """The variables that a replay needs to reach the same code path."""
    if path == "interpreter":
        return {"TRITON_INTERPRET": "1"}
    if path.endswith("-override"):
        return {"TRITON_OVERRIDE_ARCH": path.removesuffix("-override")}
    return {}
