"""The judge's own tests: a correct kernel holds everywhere, and every rule turns red on what it is for.

Two kinds of results are judged. The emulation's, rounded as a kernel stores it: a correct kernel. And
made-up ones, about values with a budget of our own choice, in which one statistic at a time is moved over
its limit. Broken kernels are in `test_judge_faults`.
"""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from reference import emulation, oracle, sdpa
from reference.budget import DTYPES
from reference.error_model import Estimate
from reference.oracle import Result
from reports.records import TensorSummary, Verdict

from . import judge as judge_module
from .cases import REGIMES, Case, parse_case
from .judge import judge
from .scenes import TENSORS, Array, Scene, arrays_of, broken_rules, rule, scene, told

Place = tuple[int, ...]

HARD_BOUND = {"oracle: hard bound", "sdpa: hard bound"}  # the two references agree to 1e-12
RMS = {"oracle: rms z by row", "oracle: rms z by tile", "oracle: rms z by head", "oracle: rms z"}


def one(verdicts: list[Verdict], name: str) -> Verdict:
    (verdict,) = (v for v in verdicts if rule(v) == name)
    return verdict


# ---------------------------------------------------------------- no false alarm

SHAPES: list[dict[str, Any]] = [
    {"heads_q": 4, "heads_kv": 2, "len_q": 33, "len_k": 49},
    {"heads_q": 2, "len_q": 70, "len_k": 33, "dim_v": 24, "d_lse": True},  # causal: rows that see no key
    {"batch": 2, "len_q": 17, "len_k": 65, "dim": 40, "dim_v": 32},
]


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", REGIMES)
def test_a_correct_kernel_holds(values: str, dtype: str, causal: bool) -> None:
    for shape in SHAPES:
        x = Scene(Case(values=values, dtype=dtype, causal=causal, **shape))
        verdicts = x.judged(x.stored(x.emulated()))
        assert {v.tensor for v in verdicts} == set(TENSORS)
        assert not broken_rules(verdicts), f"{x.case.id}\n{told(verdicts)}"


@pytest.mark.parametrize(
    "case",
    [
        # in float64 the keys that are not picked leave 1e-45, which float32 does not round to 0
        "b2_h3x3_s15x47_d24x40_float16_full_scale=auto_exact_bhsd_grad=qkv_dlse_seed2915897554",
        "b1_h2x1_s268x277_d32x32_float16_causal_scale=auto_exact_bhsd_grad=qkv_nodlse_seed1490360837",
        # nearly every dq is less than half a step of the subnormal numbers: rounded to 0, hence towards it
        "b1_h6x2_s129x15_d128x128_float16_full_scale=1.0_tiny_bhsd_grad=qkv_nodlse_seed2029388483",
        "b1_h3x3_s80x2_d32x32_float16_full_scale=1.0_tiny_bhsd_grad=qkv_nodlse_seed2990144021",
    ],
)
def test_a_correct_kernel_holds_where_it_once_did_not(case: str) -> None:
    """False alarms of earlier forms of the judge."""
    x = Scene(parse_case(case))
    verdicts = x.judged(x.stored(x.emulated()))
    assert not broken_rules(verdicts), told(verdicts)


def test_the_error_of_equal_scores_is_one_error() -> None:
    """P of equal scores is one number; 150 rows that it is off by the same, in float32, are no 150 errors."""
    x = Scene(Case(len_q=150, len_k=65, scale=0.0, values="mean", dtype="float32"))
    stored = x.stored(x.emulated())
    arrays: dict[str, Any] = arrays_of(x.tensors)
    exact = oracle.attention(**arrays, scale=0.0, dtype="float32").dv
    assert exact is not None
    ulp = 2.0**-23
    assert (exact.sigma >= 4 * ulp * np.abs(exact.value)).all()
    for off, seen in ((14 * ulp, False), (200 * ulp, True)):
        verdicts = x.judged(stored | {"dv": np.float32(stored["dv"] * (1 + off)).astype(float)})
        assert ("oracle: largest z" in broken_rules(verdicts)) is seen, told(verdicts)
        assert seen or not broken_rules(verdicts), told(verdicts)


def test_a_delta_summed_from_p_and_dp_has_the_errors_of_p() -> None:
    """As autograd has it. Where two keys share a row and their dP are far apart, little else counts."""
    x = Scene(
        parse_case(
            "b1_h2x2_s127x166_d256x256_float16_full_scale=auto_loud_packed_grad=qkv_nodlse_seed2318873626"
        )
    )
    found = sdpa.attention(**x.tensors, **x.options, dtype=torch.float32)
    verdicts = x.judged(x.stored(emulation.Result(**found._asdict())))
    assert broken_rules(verdicts) <= {"emulation: rms z"}, told(verdicts)  # which rounds P and dS
    (of_dk,) = (v for v in verdicts if v.tensor == "dk" and rule(v) == "oracle: largest z")
    assert of_dk.statistic is not None and of_dk.statistic < 3  # 3.7 without, more on a GPU


# ---------------------------------------------------------------- each rule, on a made-up budget

SHAPE = (2, 2, 512, 16)  # B, H, S, D: four heads of eight tiles
SIGMA = 2.0**-12


def made_up(shape: Place = SHAPE, *, bound: float = 16.0, **changes: Any) -> Estimate:
    """A tensor whose errors are independent; `bound` in sigmas. Of three dimensions: an lse."""
    value = np.broadcast_to(changes.pop("value", np.random.default_rng(0).standard_normal(shape)), shape)
    parts = {
        "value": value,
        "bound": np.full(shape, bound * SIGMA),
        "sigma": np.full(shape, SIGMA),
        "low": value[None],
        "high": value[None],
        "sigma_emulation": np.full(shape, SIGMA / 4),
        "drift_low": np.zeros(shape),
        "drift_high": np.zeros(shape),
        "magnitude": np.abs(value) + 1,
        "concentration": np.full(shape[:3], 1 / shape[3] if len(shape) == 4 else 1.0),
        "powerless": np.zeros(shape[:3], bool),
        "nonfinite": np.zeros(shape[:3], bool),
    }
    return Estimate(**{**parts, **changes})


def judged(
    x: Array, e: Estimate, *, name: str = "dv", dtype: str = "bfloat16", values: str = "normal",
    sdpa: Array | None = None, emulation: Array | None = None,
) -> tuple[list[Verdict], TensorSummary]:  # fmt: skip
    """One tensor, about a made-up estimate."""
    keys = np.full(x.shape[:3], 7)
    made = Result(e, e, e, e, e, visible_keys=keys, score_terms=0.0, dtype=DTYPES[dtype])
    in_float64 = {name: e.value if sdpa is None else sdpa}
    emulated = None if emulation is None else {name: emulation}
    verdicts, summaries = judge(Case(dtype=dtype, values=values), {name: x}, made, in_float64, emulated)
    return verdicts, summaries[name]


def off(e: Estimate, place: Any, by: float) -> Array:
    """The exact value, but at `place` off by so many sigmas, in random directions."""
    z = np.zeros(e.value.shape)
    z[place] = by
    return e.value + z * np.random.default_rng(1).choice([-1, 1], z.shape) * e.sigma


@pytest.mark.parametrize(
    ("place", "by", "rules", "where"),
    [
        (np.s_[1, 0, 70, 5], 7, HARD_BOUND, (1, 0, 70, 5)),
        (np.s_[0, 1, 3, 5], 9, {"oracle: largest z"}, (0, 1, 3, 5)),
        (np.s_[1, 1, 70], 3.5, {"oracle: rms z by row"}, (1, 1, 70, 0)),
        (np.s_[1, 0, 128:192], 1.4, {"oracle: rms z by tile"}, (1, 0, 128, 0)),
        (np.s_[0, 1], 1.1, {"oracle: rms z by head"}, (0, 1, 0, 0)),
        (np.s_[:], 1.04, {"oracle: rms z"}, None),
    ],
    ids=["an element beyond its bound", "an element 9 sigma off", "a row 3.5 sigma off",
         "a tile 1.4 sigma off", "a head 1.1 sigma off", "everything 1.04 sigma off"],
)  # fmt: skip
def test_one_rule_alone_sees(place: Any, by: float, rules: set[str], where: Place | None) -> None:
    bound = 6 if rules == HARD_BOUND else 16
    e = made_up(bound=bound)
    verdicts, _ = judged(off(e, place, by), e, emulation=off(e, place, by))
    assert broken_rules(verdicts) == rules, told(verdicts)
    for name in rules:
        verdict = one(verdicts, name)
        assert verdict.statistic == pytest.approx(by / bound if "bound" in name else by)
        assert where in (None, verdict.where)


@pytest.mark.parametrize("direction", [-0.45, 0.45], ids=["towards zero", "away from zero"])
def test_the_bias_alone_sees_errors_that_all_point(direction: float, request: Any) -> None:
    e = made_up()
    verdicts, _ = judged(e.value + direction * SIGMA * np.sign(e.value), e)
    assert broken_rules(verdicts) == {"oracle: bias"}
    assert one(verdicts, "oracle: bias").note in request.node.name


@pytest.mark.parametrize("steps", [0.1, 0.4, 1, 3, 30])
def test_rounding_to_nearest_is_no_bias_even_of_values_of(steps: float) -> None:
    """Half of all values below half a step come out as 0: all of those errors point towards it."""
    half = DTYPES["float16"]
    value = np.random.default_rng(0).standard_normal(SHAPE) * steps * 2 * half.eta
    e = made_up(value=value, sigma=np.full(SHAPE, half.eta / 3**0.5), bound=1.0)
    verdicts, _ = judged(half.rounded(value), e, dtype="float16")
    assert not broken_rules(verdicts), told(verdicts)


def test_a_single_value_above_that_in_each_of_a_few_rows_is_no_bias() -> None:
    """The mean of three errors is not that of three rows of errors."""
    half = DTYPES["float16"]
    rng = np.random.default_rng(0)
    for _ in range(200):
        value = rng.standard_normal((1, 1, 3, 128)) * 2 * half.eta
        value[..., 0] = rng.uniform(10, 40, 3) * half.eta
        e = made_up(value.shape, value=value, sigma=np.full(value.shape, half.eta / 3**0.5), bound=1e9)
        verdicts, _ = judged(half.rounded(value), e, dtype="float16")
        assert not broken_rules(verdicts), told(verdicts)


def test_a_wrong_lse_is_placed_by_row() -> None:
    e = made_up(SHAPE[:3])
    verdicts, _ = judged(off(e, np.s_[1, 0, 300], 20), e, name="lse")
    assert broken_rules(verdicts) >= HARD_BOUND | {"oracle: largest z", "oracle: rms z by row"}
    for name in ("hard bound", "largest z", "rms z by row"):
        assert one(verdicts, f"oracle: {name}").where == (1, 0, 300)
    assert one(verdicts, "oracle: rms z by tile").where == (1, 0, 256)


def test_errors_count_from_the_end_of_the_legal_interval() -> None:
    e = made_up(bound=1000)
    e.high = e.high + 50 * SIGMA
    for inside in (0, 25, 50):
        assert not broken_rules(judged(e.value + inside * SIGMA, e)[0])
    x = e.value.copy()
    x[0, 0, 3, 1] += 59 * SIGMA
    verdicts, _ = judged(x, e)
    assert broken_rules(verdicts) == {"oracle: largest z"}
    assert one(verdicts, "oracle: largest z").statistic == pytest.approx(9)


def test_a_head_follows_one_hypothesis_throughout() -> None:
    """Delta comes from the exact output or from the given one, not from each in turn."""
    e = made_up(bound=1000)
    e.low = e.high = np.stack([e.value, e.value + 50 * SIGMA])
    x = e.value.copy()
    x[1, 0] += 50 * SIGMA
    assert not broken_rules(judged(x, e)[0])
    x[1, 0, 5] -= 50 * SIGMA
    verdicts, _ = judged(x, e)
    assert "oracle: largest z" in broken_rules(verdicts)
    assert one(verdicts, "oracle: rms z by row").where == (1, 0, 5, 0)


@pytest.mark.parametrize("values", REGIMES)
def test_half_a_step_everywhere_is_seen_and_as_a_bias_unless_rows_repeat(values: str) -> None:
    e = made_up()
    x = e.value + 3**0.5 * e.sigma * np.sign(e.value)
    verdicts, _ = judged(x, e, values=values, name="dq")
    case = Case(values=values)
    if case.few_magnitudes:  # there one error may be in all elements
        assert not broken_rules(verdicts), told(verdicts)
    else:
        bias = set() if case.equal_scores else {"oracle: bias"}
        assert broken_rules(verdicts) == RMS - {"oracle: rms z by row"} | bias
    verdicts, _ = judged(off(e, np.s_[0, 0], 15), e, values=values, name="dq")
    assert broken_rules(verdicts) >= {"oracle: largest z", "oracle: rms z by row"}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", TENSORS)
def test_a_value_that_is_not_finite_is_seen_and_placed(name: str, bad: float) -> None:
    e = made_up(SHAPE[:3] if name == "lse" else SHAPE)
    place = (1, 0, 9, 3)[: e.value.ndim]
    x = e.value.copy()
    x[place] = bad
    verdicts, _ = judged(x, e, name=name)
    assert broken_rules(verdicts) == {"oracle: finite where it should be"}
    assert one(verdicts, "oracle: finite where it should be").where == place


@pytest.mark.parametrize("sign", [1, -1], ids=["positive", "negative"])
@pytest.mark.parametrize(
    ("size", "allowed"), [(60_000, {60_000}), (65_000, {65_000, np.inf}), (70_000, {np.inf})]
)
def test_float16_overflows_where_it_must_and_to_its_own_side(size: float, allowed: set, sign: int) -> None:
    e = made_up((1, 1, 2, 2), value=float(sign * size), bound=1000 / SIGMA)
    for got in (size, np.inf, -np.inf, np.nan):
        verdicts, _ = judged(np.full(e.value.shape, sign * float(got)), e, dtype="float16")
        assert one(verdicts, "oracle: finite where it should be").held is (got in allowed), sign * got


def test_a_row_that_sees_a_nan_must_not_look_finite() -> None:
    e = made_up()
    e.nonfinite[1, 1, 4] = True
    x = e.value.copy()
    x[1, 1, 4] = np.nan
    assert not broken_rules(judged(x, e)[0])
    verdicts, _ = judged(e.value, e)
    assert broken_rules(verdicts) == {"oracle: finite where it should be"}
    assert one(verdicts, "oracle: finite where it should be").where == (1, 1, 4, 0)


def test_rows_without_power_are_not_judged_and_counted_so() -> None:
    e = made_up()
    e.powerless[0, 1, :100] = True
    x = off(e, np.s_[0, 1, :100], 1e6)
    x[0, 1, 0] = np.nan
    verdicts, summary = judged(x, e, emulation=e.value)
    assert not broken_rules(verdicts)
    assert summary.judged == e.value.size - 100 * SHAPE[3]
    x[0, 1, 100] += 20 * SIGMA  # the next row is judged
    assert one(judged(x, e)[0], "oracle: rms z by row").where == (0, 1, 100, 0)
    e.powerless[:] = True
    verdicts, summary = judged(x, e, emulation=e.value)
    assert {v.rule for v in verdicts} == {"finite where it should be", "references agree"}
    assert summary.judged == 0


@pytest.mark.parametrize(
    ("by", "rules"),
    [
        pytest.param(1e-9, {"sdpa: references agree"}, id="another value"),
        pytest.param(1e-2, {"sdpa: references agree", "sdpa: hard bound"}, id="a value beyond the bound"),
        pytest.param(np.inf, {"sdpa: references agree"}, id="inf"),
        pytest.param(np.nan, {"sdpa: references agree"}, id="nan"),
    ],
)
def test_references_that_disagree_are_the_fault_of_the_suite(by: float, rules: set[str]) -> None:
    e = made_up()
    other = e.value.copy()
    other[1, 1, 30, 2] += by
    verdicts, _ = judged(e.value, e, sdpa=other)
    assert broken_rules(verdicts) == rules
    assert {v.where for v in verdicts if not v.held} == {(1, 1, 30, 2)}
    assert "the suite, not the implementation, is at fault" in one(verdicts, "sdpa: references agree").note


def test_the_emulation_alone_sees_an_error_below_the_rounding_of_p() -> None:
    e = made_up()
    verdicts, _ = judged(off(e, np.s_[:], 0.6), e, emulation=e.value)  # its sigma is four times smaller
    assert broken_rules(verdicts) == {"emulation: rms z"}
    assert one(verdicts, "emulation: rms z").statistic == pytest.approx(2.4)


def test_a_flip_that_moves_one_row_is_no_error_against_the_emulation() -> None:
    """One P that decides a row, and fell on the other side of a midpoint."""
    e = made_up()
    verdicts, _ = judged(off(e, np.s_[0, 0, 3], 100), e, emulation=e.value)
    assert one(verdicts, "emulation: rms z").held


def test_what_tensor_cores_may_truncate_is_no_error_against_the_emulation() -> None:
    e = made_up()
    low = np.full(e.value.shape, -0.3 * SIGMA)
    drifting = made_up(drift_low=low)
    for by, broken in ((-0.3, set()), (0.6, {"emulation: rms z"}), (-0.9, {"emulation: rms z"})):
        verdicts, _ = judged(e.value + by * SIGMA, drifting, emulation=e.value)
        assert broken_rules(verdicts) == broken


@pytest.mark.parametrize(
    ("shape", "options", "compared"),
    [
        pytest.param((1, 1, 32, 16), {}, True, id="thirty-two rows"),
        pytest.param((1, 1, 31, 16), {}, False, id="fewer rows"),
        pytest.param((1, 1, 32), {"name": "lse"}, False, id="the lse"),
        pytest.param((1, 1, 32, 16), {"dtype": "float32"}, False, id="float32"),
    ],
)
def test_the_emulation_is_compared_where_it_says_something(
    shape: Place, options: dict[str, Any], compared: bool
) -> None:
    e = made_up(shape)
    verdicts, _ = judged(e.value, e, emulation=e.value, **options)
    assert ("emulation: rms z" in {rule(v) for v in verdicts}) is compared


# ---------------------------------------------------------------- what must come out bit for bit

ONE_KEY = Case(len_q=3, len_k=3, causal=True)
DEAD = Case(len_q=5, len_k=3, causal=True, dtype="float32", d_lse=True)
EXACT = Case(values="exact", dtype="bfloat16")
FINITE = "finite where it should be"
NEXT = "next"


@pytest.mark.parametrize(
    ("case", "tensor", "place", "to", "broken"),
    [
        pytest.param(ONE_KEY, "out", (0, 0, 0, 4), NEXT, "one visible key: out = v", id="out of one key"),
        pytest.param(DEAD, "out", (0, 0, 1, 2), 1e-40, "no visible key: 0", id="out nearly 0, of no key"),
        pytest.param(DEAD, "dq", (0, 0, 1, 2), 1e-40, "no contribution: 0", id="dq nearly 0, of no key"),
        pytest.param(DEAD, "lse", (0, 0, 1), 0, FINITE, id="lse 0 of no key"),
        pytest.param(DEAD, "lse", (0, 0, 1), -3e38, FINITE, id="lse lowest number of no key"),
        pytest.param(DEAD, "lse", (0, 0, 1), np.inf, FINITE, id="lse inf of no key"),
        pytest.param(DEAD, "lse", (0, 0, 1), np.nan, FINITE, id="lse nan of no key"),
        pytest.param(EXACT, "out", (0, 0, 7, 1), NEXT, "exactly representable", id="out of an exact problem"),
        pytest.param(EXACT, "dv", (0, 0, 15, 1), NEXT, "exactly representable", id="dv of an exact problem"),
    ],
)
def test_one_rule_alone_sees_one_wrong_element(
    case: Case, tensor: str, place: Place, to: Any, broken: str
) -> None:
    x = scene(case)
    results = x.stored(x.emulated())
    assert not broken_rules(x.judged(results))
    at = results[tensor][place]
    step = np.copysign(2 * DTYPES[case.dtype].half_step(at), at)
    results[tensor][place] = at + step if to == NEXT else to
    verdicts = [v for v in x.judged(results) if v.tensor == tensor]
    assert broken_rules(verdicts) == {f"oracle: {broken}"}, told(verdicts)
    assert one(verdicts, f"oracle: {broken}").where == place


# ---------------------------------------------------------------- the statistics


@pytest.mark.parametrize(("n", "t"), [(100, 6.18), (1000, 6.54), (10**4, 6.89), (10**5, 7.21), (10**6, 7.53)])
def test_the_limit_of_the_largest_z(n: int, t: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """sqrt(2 ln(2 N / alpha)) at alpha = 1e-6, worked out beforehand."""
    monkeypatch.setattr(judge_module, "FALSE_ALARM", 1e-6)
    e = made_up((1, 1, n // 10, 10))
    verdict = one(judged(e.value, e)[0], "oracle: largest z")
    assert verdict.limit == pytest.approx(t, abs=0.005)


@pytest.mark.parametrize(
    ("together", "rows", "claimed", "understated", "alarms"),
    [
        pytest.param(0.0, 96, False, 1, set(), id="of independent errors"),
        pytest.param(0.5, 96, True, 1, set(), id="of errors that move together in some rows"),
        pytest.param(1.0, 3, True, 1, set(), id="of errors that move together in three rows"),
        pytest.param(1.0, 96, False, 1, RMS, id="but not of errors that do and do not say so"),
        pytest.param(0.0, 96, False, 3, RMS | {"oracle: largest z"}, id="but not of errors thrice too large"),
    ],
)
def test_false_alarms_are_as_rare_as_claimed(
    together: float, rows: int, claimed: bool, understated: int, alarms: set[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Uniform rounding errors at alpha = 1 / 20: which rules are red in more than so many of 1000 tensors."""
    monkeypatch.setattr(judge_module, "FALSE_ALARM", 0.05)
    rng = np.random.default_rng(3)
    shape = (1, 2, rows, 32)
    moves = rng.uniform(size=(*shape[:3], 1)) < together
    common = rng.uniform(1, 2, shape[3])
    sigma = np.sqrt(common**2 * moves + 0.1)
    e = made_up(shape, value=rng.standard_normal(shape) + 1, sigma=sigma / understated, bound=1e9)
    if claimed:
        share = common / np.sqrt(common**2 + 0.1)  # of the common error in each element
        correlation = np.outer(share, share) + np.diag(1 - share**2)
        e.concentration[moves[..., 0]] = np.linalg.eigvalsh(correlation).max() / 32
    tensors = 100 if alarms else 1000
    count: Counter[str] = Counter()
    for _ in range(tensors):
        of_row, of_element = (rng.uniform(-(3**0.5), 3**0.5, (*shape[:3], d)) for d in (1, 32))
        x = e.value + of_row * moves * common + 0.1**0.5 * of_element
        count.update(broken_rules(judged(x, e)[0]))
    assert {name for name in count if count[name] > 0.05 * tensors} == alarms, count


def test_every_rule_is_applied() -> None:
    """One that never is cannot fail."""
    applied = set()
    for values, dtype in product(("normal", "exact"), ("float16", "float32")):
        x = Scene(Case(values=values, dtype=dtype, causal=True, len_q=40, len_k=38, d_lse=True))
        applied |= {rule(v) for v in x.judged(x.stored(x.emulated()))}
    assert applied == RMS | HARD_BOUND | {
        "oracle: finite where it should be", "oracle: largest z", "oracle: bias",
        "oracle: one visible key: out = v", "oracle: no visible key: 0", "oracle: exactly representable",
        "oracle: no contribution: 0", "sdpa: references agree", "emulation: rms z",
        "emulation: twice the hard bound",
    }  # fmt: skip
