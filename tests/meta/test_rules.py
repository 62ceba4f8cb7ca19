"""The rules of other suites: where each draws its line, and what it is known to let pass."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from reference import sdpa
from tests.cases import Case
from tests.comparison import Prepared
from tests.implementations import load
from tests.mutants.rule_table import (
    ALL,
    JUDGE,
    OURS,
    SETS,
    Row,
    Table,
    amid_ordinary_numbers,
    by_rules,
    false_alarms,
    kills,
    markdown,
    read,
    references,
    write,
)
from tests.rules import JUDGED, OWN_PRECISIONS, RULES, own_precision
from tests.session import interpreted
from tests.values import make_inputs

Array = NDArray[np.float64]

RANDOM = np.random.default_rng(0)
R = RANDOM.uniform(0.5, 1.0, (1, 2, 32, 16)) * RANDOM.choice((-1.0, 1.0), (1, 2, 32, 16))
"""A reference without anything near 0, in magnitude 1/2 to 1."""

ERROR = 2.0**-10
P = R + ERROR * RANDOM.choice((-1.0, 1.0), R.shape)
"""One whose every element is off by as much."""


def at(size: float, where: tuple[int, ...] = (0, 1, 3, 5)) -> Array:
    """R with one element off by so much."""
    x = R.copy()
    x[where] += size
    return x


def everywhere(size: float) -> Array:
    return R + size


def relative(size: float) -> Array:
    return R * (1 + size)


FLOOR = 2 * float(
    np.abs((torch.from_numpy(R).half() + 0.3 - 0.3 - torch.from_numpy(R).half()).double().numpy()).max()
)

LINES = [
    ("FlashAttention-2", "out", at(1.99 * ERROR), at(2.01 * ERROR)),
    ("FlashAttention-2", "dq", at(2.99 * ERROR), at(3.01 * ERROR)),
    ("FlashAttention-3/4", "dk", at(2 * ERROR + 0.99 * FLOOR), at(2 * ERROR + 1.01 * FLOOR)),
    ("PyTorch SDPA, newer", "out", at(3.99 * ERROR), at(4.01 * ERROR)),
    ("PyTorch SDPA, newer", "dq", at(179 * ERROR), at(181 * ERROR)),
    ("PyTorch SDPA, newer", "dk", at(15.9 * ERROR), at(16.1 * ERROR)),
    # atol 1e-3, and an rtol of at most 2e-3 of what is at most 1: 3e-3; a fourth of it at 0.5
    ("PyTorch SDPA, older", "out", everywhere(1e-3), at(4e-3)),
    ("PyTorch SDPA, older", "dq", everywhere(4e-3), at(1.6e-2)),
    ("FlexAttention", "dv", everywhere(1.09 * ERROR), everywhere(1.11 * ERROR)),
    ("xFormers", "out", everywhere(4e-3), at(4.5e-3)),
    ("xFormers", "dv", everywhere(9e-2), at(0.12)),
    ("Triton tutorial", "dq", everywhere(9.9e-3), at(1.01e-2)),
    ("triton_kernels", "out", at(9.9e-3), at(2.1e-2)),
    ("triton_kernels", "dq", relative(2.9e-3), relative(5.5e-3)),
    ("fla", "dk", relative(4.9e-3), relative(5.1e-3)),
    ("fla, in its CI", "dk", everywhere(0.299), everywhere(0.301)),
    ("Liger", "out", relative(0.5), at(0.54)),
    ("KernelBench", "out", relative(9.9e-3), at(2.1e-2)),
    ("gpu-mode", "out", relative(0.09), everywhere(0.21)),
]
"""A rule, a tensor, the last x that holds and the first that does not, nearly."""


@pytest.mark.parametrize(
    ("name", "tensor", "inside", "beyond"), LINES, ids=[f"{name} {tensor}" for name, tensor, *_ in LINES]
)
def test_a_rule_holds_up_to_its_line(name: str, tensor: str, inside: Array, beyond: Array) -> None:
    assert RULES[name].held(tensor, inside, R, P, "float16")
    assert not RULES[name].held(tensor, beyond, R, P, "float16")


@pytest.mark.parametrize("tensor", JUDGED)
@pytest.mark.parametrize("name", RULES)
def test_a_rule_holds_for_what_is_as_good_as_p(name: str, tensor: str) -> None:
    assert RULES[name].held(tensor, P, R, P, "float16")
    assert RULES[name].held(tensor, 2 * R - P, R, P, "float16")


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", sorted(set(RULES) - {"gpu-mode"}))
def test_what_is_not_finite_is_red(name: str, bad: float) -> None:
    with np.errstate(invalid="ignore"):
        assert not RULES[name].held("out", at(bad), R, P, "bfloat16")


# ---------------------------------------------------------------- what they let pass


def test_gpu_mode_lets_a_twentieth_be_garbage() -> None:
    x = R.copy()
    x.flat[: x.size // 25] = np.nan  # 4 %
    assert RULES["gpu-mode"].held("out", x, R, P, "float16")
    x.flat[: x.size // 16] = np.nan  # 6 %
    assert not RULES["gpu-mode"].held("out", x, R, P, "float16")


@pytest.mark.parametrize("factor", [0, -1], ids=["all zero", "sign flipped"])
def test_older_sdpa_takes_any_gradient_if_p_is_off_where_r_is_nearly_zero(factor: int) -> None:
    rule, r, p = RULES["PyTorch SDPA, older"], R.copy(), P.copy()
    assert not rule.held("dq", factor * r, r, p, "float16")
    r[0, 0, 0, 0], p[0, 0, 0, 0] = 1e-6, 1e-4  # off by 99 times r: so may be all elements
    assert rule.held("dq", factor * r, r, p, "float16")
    assert not RULES["FlashAttention-2"].held("dq", factor * r, r, p, "float16")
    r[0, 0, 0, 0] = 0.0  # infinitely many times: the default instead
    assert not rule.held("dq", factor * r, r, p, "float16")


def test_newer_sdpa_takes_nan_where_p_has_it() -> None:
    assert RULES["PyTorch SDPA, newer"].held("out", at(np.nan), R, np.full_like(R, np.nan), "float16")


def test_the_first_rows_hide_the_late_ones_from_whole_tensor_norms() -> None:
    size = 1 / np.sqrt(np.arange(1, 513))[:, None]  # out of a causal case: row i is a mean of i values
    r = RANDOM.standard_normal((1, 1, 512, 64)) * size
    p = r * (1 + 2.0**-8 * RANDOM.uniform(-1, 1, r.shape))
    x = r.copy()
    x[:, :, -64:] *= 1.04  # 4 % off: ten times the error that p has there
    for name in ("FlashAttention-2", "FlashAttention-3/4", "xFormers", "KernelBench", "gpu-mode", "Liger"):
        assert RULES[name].held("out", x, r, p, "bfloat16"), name


def test_fixed_tolerances_pass_zeros_where_values_are_small() -> None:
    r = R / 500
    for name in ("xFormers", "Triton tutorial", "KernelBench", "gpu-mode", "Liger", "fla, in its CI"):
        assert RULES[name].held("out", np.zeros_like(r), r, r, "float16"), name
    assert not RULES["FlashAttention-2"].held("out", np.zeros_like(r), r, P / 500, "float16")


def test_fla_wants_nothing_of_a_ratio_where_all_is_exact() -> None:
    assert RULES["fla"].held("dq", np.zeros_like(R), np.zeros_like(R), np.zeros_like(R), "float16")


# ---------------------------------------------------------------- p


@pytest.mark.parametrize("own", OWN_PRECISIONS)
@pytest.mark.parametrize(
    "case",
    [
        Case(heads_q=4, heads_kv=2, len_q=17, len_k=19, causal=True, d_lse=True, dtype="bfloat16"),
        Case(len_q=20, len_k=5, causal=True, dim=24, dtype="float16"),
    ],
    ids=lambda case: case.id,
)
def test_p_is_attention_to_the_precision_of_the_dtype(own: str, case: Case) -> None:
    i = make_inputs(case)
    tensors = (i.q, i.k, i.v, i.d_out, i.d_lse)
    exact = sdpa.attention(*tensors, causal=case.causal)
    p = own_precision(own, *tensors, causal=case.causal, scale=case.scale)  # type: ignore[arg-type]
    assert tuple(p) == JUDGED
    step = float(torch.finfo(getattr(torch, case.dtype)).eps)
    for name, x in p.items():
        r = getattr(exact, name).numpy()
        error = np.abs(x - r).max() / np.abs(r).max()
        assert error < 4 * step
        if own == "rounded at the end":
            assert error <= 0.51 * step


# ---------------------------------------------------------------- the table


@pytest.mark.skipif(not interpreted(), reason="planted through the interpreter")
def test_a_case_is_judged_by_all_rules() -> None:
    of = load("triton")
    case = replace(SETS["our edges"][4], dim=16, dim_v=16, lengths=((5, 6), (3, 2)))
    prepared = Prepared(case)
    assert amid_ordinary_numbers("our edges", case, of, prepared).red == {}

    def wrong(*tensors: torch.Tensor, **options: object) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = of.varlen(*tensors, **options)  # type: ignore[misc]
        return -out, lse

    red = amid_ordinary_numbers("our edges", case, replace(of, varlen=wrong), prepared).red
    assert set(red) == {JUDGE, *RULES}

    def raises(*tensors: torch.Tensor, **options: object) -> torch.Tensor:
        raise RuntimeError("planted")

    red = amid_ordinary_numbers("our edges", case, replace(of, varlen=raises), prepared).red
    assert set(red) == {JUDGE, *RULES}
    known = references(prepared)
    assert by_rules(known.r, known, case.dtype) == {name: [] for name in RULES}
    assert by_rules({}, known, case.dtype) == {name: list(JUDGED) for name in RULES}


def test_what_is_red_without_a_fault_is_no_kill() -> None:
    control, fault = Row("control", "control"), Row("a", "x")
    control.add("long causal", "fla", ["case dq"])
    fault.add("long causal", "fla", ["case dq"])
    table = Table(1, "here", "today", {name: [case.id for case in cases] for name, cases in SETS.items()},
                  control, [fault])  # fmt: skip
    assert not kills(table, fault, "fla", "long causal")
    assert false_alarms(table, "fla", "long causal") == 1
    fault.add("long causal", "fla", ["case dk"])
    assert kills(table, fault, "fla", "long causal")


def test_the_table_is_written_and_read(tmp_path: Path) -> None:
    rows = [
        Row("only-ours", "x"),
        Row("everybody", "x"),
        Row("nobody", "x"),
        Row("no-code", "x", "compile error"),
    ]
    rows[0].add("our edges", OURS, ["case lse"])
    for rule in ALL:
        rows[1].add("as their tests", rule, ["crash"])
    sets = {name: [case.id for case in cases] for name, cases in SETS.items()}
    table = Table(1, "here", "today", sets, Row("control", "control"), rows)
    assert write(table, tmp_path) == 1  # a mutant that is no code is to be repaired
    assert read(tmp_path / "rule-table.json") == table
    text = markdown(table)
    assert text == (tmp_path / "rule-table.md").read_text()
    assert f"| **{OURS}** | 1 | 0 | 1 | 2 | 0 |" in text
    assert "| FlexAttention | 1 | 0 | 0 | 1 | 0 |" in text
    assert "Killed by this suite only: 1. only-ours\n" in text
    assert "- no-code: compile error" in text
    (tmp_path / "foreign.json").write_text("{}")
    with pytest.raises(ValueError, match=r"foreign.json is no table of rules"):
        read(tmp_path / "foreign.json")
