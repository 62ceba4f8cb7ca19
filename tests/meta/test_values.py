"""Values: the same bits everywhere and for ever, normal numbers that are, and regimes that are as named."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from itertools import combinations, pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tests.cases import DTYPES, LAYOUTS, REGIMES, Case
from tests.values import TENSORS, Inputs, make_inputs

Array = NDArray[np.float64]

# ---------------------------------------------------------------- bits

PINNED = Case(
    batch=2,
    heads_q=4,
    heads_kv=2,
    len_q=5,
    len_k=7,
    dim=24,
    dim_v=16,
    d_lse=True,
    causal=True,
    seed=3141592653,
)

# of the bytes of q, k, v, d_out and d_lse. They may change only when a regime is changed on purpose:
# every id in the corpus and in anybody's red report then stands for another case
DIGESTS = {
    ("normal", "float16"): "645ab92122411476",
    ("large", "float16"): "47163a269f147f6c",
    ("tiny", "float16"): "aa1f37cc126a86f8",
    ("outliers", "float16"): "37851e42ded91e1f",
    ("equal", "float16"): "2f9ccb20f3cdc019",
    ("near-tied", "float16"): "85a1aa4febdb7886",
    ("negative", "float16"): "bcd05aba6621982b",
    ("very-negative", "float16"): "1d352cb56091ac5e",
    ("growing", "float16"): "0d9da4ff853a32a1",
    ("mean", "float16"): "4d1611aace7cf368",
    ("loud", "float16"): "281ee0d551c978cd",
    ("exact", "float16"): "6d842245f50d5974",
    ("normal", "bfloat16"): "b1616deafad42b20",
    ("normal", "float32"): "06336d891f126727",
}


def digest(case: Case) -> str:
    """A hash of the bytes of all tensors, in order."""
    inputs = make_inputs(case)
    total = hashlib.blake2b(digest_size=8)
    for name in TENSORS:
        total.update(getattr(inputs, name).contiguous().view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


@pytest.mark.parametrize(
    ("values", "dtype"), [(v, "float16") for v in REGIMES] + [("normal", d) for d in DTYPES[1:]]
)
def test_bits_never_change(values: str, dtype: str) -> None:
    assert digest(replace(PINNED, values=values, dtype=dtype)) == DIGESTS[values, dtype]


def test_the_first_numbers_are_splitmix64_by_hand() -> None:
    """With Python's integers: eight 16-bit lanes, summed, centred and scaled by sqrt(12 / 8)."""

    def splitmix64(x: int) -> int:
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        return x ^ x >> 31

    seed, tensor = 11, TENSORS.index("v")
    by_hand = []
    for i in range(6):
        bits = [
            splitmix64(
                (i * 0xD1342543DE82EF95 + (seed * 128 + tensor * 16 + part) * 0x9E3779B97F4A7C15) % 2**64
            )
            for part in (0, 1)
        ]
        total = sum(b >> 16 * lane & 0xFFFF for b in bits for lane in range(4))
        by_hand.append((2 * total - 8 * 65535) / 131072 * 1.224744871391589)
    v = make_inputs(Case(dtype="float32", seed=seed, grad="none")).v
    assert torch.equal(v.flatten()[:6], torch.tensor(by_hand, dtype=torch.float64).float())


# ---------------------------------------------------------------- normal numbers

MANY = Case(heads_q=4, heads_kv=4, len_q=256, len_k=256, dim=32, dim_v=32, dtype="float32", seed=5)
N = 4 * 256 * 32


def flat(case: Case, name: str) -> Array:
    return getattr(make_inputs(case), name).double().numpy().ravel()


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
@pytest.mark.parametrize("name", ["q", "k", "v", "d_out"])
def test_normal_numbers_have_mean_0_and_variance_1(name: str, seed: int) -> None:
    x = flat(replace(MANY, seed=seed), name)
    assert abs(x.mean()) < 5 / N**0.5
    assert abs(x.var() - 1) < 5 * (2 / N) ** 0.5
    assert 3.5 < np.abs(x).max() < 4.9


def test_tensors_and_seeds_are_independent_of_each_other_and_of_their_neighbours() -> None:
    streams = {name: flat(MANY, name) for name in ("q", "k", "v", "d_out")}
    streams["q of the next seed"] = flat(replace(MANY, seed=MANY.seed + 1), "q")
    streams["k of a far seed"] = flat(replace(MANY, seed=2**31), "k")
    streams |= {f"{name}, shifted": np.roll(x, 1) for name, x in streams.items()}
    for (a, x), (b, y) in combinations(streams.items(), 2):
        assert abs((x * y).mean()) < 5 / N**0.5, f"{a} and {b}"


def test_values_depend_on_nothing_that_leaves_the_tensors_as_they_are() -> None:
    case = Case(batch=2, heads_q=2, heads_kv=2, d_lse=True, seed=9)
    inputs = make_inputs(case)
    others = [replace(case, causal=True), replace(case, scale=0.3), replace(case, grad="k")]
    others += [replace(case, layout=layout) for layout in LAYOUTS if layout != "expanded"]
    for other in others:
        for name in TENSORS:
            assert torch.equal(getattr(make_inputs(other), name), getattr(inputs, name)), (other, name)


# ---------------------------------------------------------------- shapes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", REGIMES)
def test_shapes_dtypes_and_finite_numbers_in_every_regime(values: str, dtype: str) -> None:
    case = Case(2, 4, 2, 5, 7, 24, 16, dtype, values=values, d_lse=True)
    inputs = make_inputs(case)
    shapes = {
        "q": (2, 4, 5, 24),
        "k": (2, 2, 7, 24),
        "v": (2, 2, 7, 16),
        "d_out": (2, 4, 5, 16),
        "d_lse": (2, 4, 5),
    }
    for name, shape in shapes.items():
        x = getattr(inputs, name)
        assert x.shape == shape
        assert x.dtype == (torch.float32 if name == "d_lse" else getattr(torch, dtype))
        assert x.is_contiguous()
        assert x.isfinite().all()


@pytest.mark.parametrize("values", REGIMES)
@pytest.mark.parametrize("sizes", [(0, 3, 3), (2, 0, 3), (2, 3, 0), (2, 0, 0), (1, 1, 1)], ids=str)
def test_every_regime_takes_nothing_and_one(values: str, sizes: tuple[int, int, int]) -> None:
    batch, len_q, len_k = sizes
    inputs = make_inputs(Case(batch=batch, len_q=len_q, len_k=len_k, values=values))
    assert (inputs.q.shape[2], inputs.k.shape[2]) == (len_q, len_k)


def test_gradients_are_there_only_if_the_case_has_them() -> None:
    forward, backward, both = (
        make_inputs(Case(grad=grad, d_lse=d_lse))
        for grad, d_lse in (("none", False), ("v", False), ("v", True))
    )
    given = [(x.d_out is not None, x.d_lse is not None) for x in (forward, backward, both)]
    assert given == [(False, False), (True, False), (True, True)]


@pytest.mark.parametrize("values", REGIMES)
def test_expanded_inputs_have_equal_heads_and_the_others_have_not(values: str) -> None:
    case = Case(heads_q=2, heads_kv=2, values=values, layout="expanded", d_lse=True)
    inputs = make_inputs(case)
    for name in ("k", "v", "d_out"):
        x = getattr(inputs, name)
        assert torch.equal(x[:, 0], x[:, 1])
    assert inputs.d_lse is not None and not torch.equal(inputs.d_lse[:, 0], inputs.d_lse[:, 1])
    assert torch.equal(inputs.q[:, 0], inputs.q[:, 1]) == (values == "very-negative")
    one_each = make_inputs(replace(case, layout="bhsd"))
    assert torch.equal(one_each.v[:, 0], inputs.v[:, 0])
    assert not torch.equal(one_each.v[:, 0], one_each.v[:, 1])


# ---------------------------------------------------------------- ragged batches

RAGGED = replace(PINNED, lengths=((5, 7), (0, 3), (4, 0), (5, 7)), past=(2, 1))


def test_bits_of_a_ragged_batch_never_change() -> None:
    assert digest(RAGGED) == "593645a9f473c7b8"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values", REGIMES)
@pytest.mark.parametrize("layout", ["bhsd", "expanded"])
def test_a_sequence_has_the_values_of_its_dense_case(layout: str, values: str, dtype: str) -> None:
    case = replace(RAGGED, values=values, dtype=dtype, layout=layout)
    inputs = make_inputs(case)
    rows = {"q": 0, "k": 0, "v": 0, "d_out": 0, "d_lse": 0}
    for sequence in case.sequences():
        for name, x in vars(make_inputs(sequence)).items():
            found = getattr(inputs, name)[:, :, rows[name] : rows[name] + x.shape[2]]
            assert torch.equal(found, x)
            assert found.dtype == x.dtype
            rows[name] += x.shape[2]
    assert rows == {"q": 14, "k": 17, "v": 17, "d_out": 14, "d_lse": 14}


def test_sequences_of_equal_lengths_have_other_values() -> None:
    q = make_inputs(RAGGED).q
    assert not torch.equal(q[:, :, :5], q[:, :, 9:14])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", [RAGGED.lengths, (), ((0, 0),)], ids=str)
@pytest.mark.parametrize("past", [(0, 0), (2, 1), (0, 3)], ids=str)
def test_rows_past_the_last_sequence_are_nan_and_no_others(
    past: tuple[int, int], lengths: tuple[tuple[int, int], ...], dtype: str
) -> None:
    case = replace(RAGGED, lengths=lengths, past=past, dtype=dtype)
    shapes = {
        "q": (1, 4, case.len_q, 24),
        "k": (1, 2, case.len_k, 24),
        "v": (1, 2, case.len_k, 16),
        "d_out": (1, 4, case.len_q, 16),
        "d_lse": (1, 4, case.len_q),
    }
    for name, x in vars(make_inputs(case)).items():
        end = x.shape[2] - past[name in ("k", "v")]
        assert x.shape == shapes[name]
        assert x.dtype == (torch.float32 if name == "d_lse" else getattr(torch, dtype))
        assert x.is_contiguous()
        assert x[:, :, :end].isfinite().all()
        assert x[:, :, end:].isnan().all()


def test_gradients_of_a_ragged_batch_are_there_only_if_the_case_has_them() -> None:
    forward, backward = (make_inputs(replace(RAGGED, grad=grad, d_lse=False)) for grad in ("none", "v"))
    assert (forward.d_out, forward.d_lse, backward.d_lse) == (None, None, None)
    assert backward.d_out is not None


# ---------------------------------------------------------------- regimes

SOME = Case(heads_q=4, heads_kv=2, len_q=96, len_k=96, dim=32, dim_v=32, seed=2)


def scores(case: Case, inputs: Inputs) -> Array:
    """scale q k^T in float64, (B, Hq, Sq, Sk)."""
    q, k = inputs.q.double().numpy(), inputs.k.double().numpy()
    return case.effective_scale * q @ np.repeat(k, case.heads_q // case.heads_kv, 1).swapaxes(-1, -2)


def regime(values: str, dtype: str = "float16") -> tuple[Inputs, Array]:
    case = replace(SOME, values=values, dtype=dtype)
    inputs = make_inputs(case)
    return inputs, scores(case, inputs)


def std(x: torch.Tensor | None) -> float:
    assert x is not None
    return float(x.double().std())


def test_large_has_scores_of_16_and_values_of_8() -> None:
    inputs, s = regime("large")
    assert s.std() == pytest.approx(16, rel=0.1)
    assert std(inputs.v) == pytest.approx(8, rel=0.05)
    assert std(inputs.d_out) == pytest.approx(8, rel=0.05)


def test_tiny_has_values_near_the_subnormal_numbers_of_float16() -> None:
    inputs, _ = regime("tiny")
    smallest_normal = torch.finfo(torch.float16).tiny
    for x in (inputs.v, inputs.d_out):
        assert x is not None
        assert 0.1 < float((x.abs() < smallest_normal).float().mean()) < 0.5
        assert x.abs().max() < 32 * smallest_normal
    assert std(inputs.q) == pytest.approx(1 / 16, rel=0.05)


def test_outliers_are_one_in_a_thousand_and_ten_times_as_large() -> None:
    x = np.concatenate([flat(replace(MANY, values="outliers"), name) for name in ("q", "k", "v", "d_out")])
    far = np.abs(x) > 6  # of N(0, 1) + N(0, 100), 55 % lie there
    assert 0.0003 < far.mean() < 0.001
    assert np.abs(x).max() > 20
    assert x[~far].std() == pytest.approx(1, abs=0.02)


@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_has_equal_keys_and_so_equal_scores(dtype: str) -> None:
    inputs, s = regime("equal", dtype)
    assert torch.equal(inputs.k, inputs.k[:, :, :1].expand(inputs.k.shape))
    assert np.ptp(s, axis=-1).max() == 0
    assert s[..., 0].std() > 0.5


def test_near_tied_has_keys_in_pairs_a_step_or_two_of_float16_apart() -> None:
    inputs, s = regime("near-tied")
    first, second = (inputs.k[:, :, i::2].contiguous().view(torch.int16).int() for i in (0, 1))
    steps = (second - first).abs()
    assert steps.unique().tolist() == [1, 2]
    assert 25 < np.abs(s).max() < 60


@pytest.mark.parametrize("dtype", DTYPES)
def test_negative_has_no_score_near_zero(dtype: str) -> None:
    _, s = regime("negative", dtype)
    assert s.max() < -2


@pytest.mark.parametrize("dim", [40, 64, 256])
@pytest.mark.parametrize("dtype", DTYPES)
def test_very_negative_has_scores_near_minus_60000_of_which_several_count(dtype: str, dim: int) -> None:
    case = replace(SOME, values="very-negative", dtype=dtype, dim=dim, dim_v=dim)
    s = scores(case, make_inputs(case))
    assert np.abs(s / -60000 - 1).max() < 0.03
    p = np.exp(s - s.max(-1, keepdims=True))
    assert (p.sum(-1) > 1.5).all()
    assert np.ptp(s) > 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_growing_has_a_new_maximum_in_every_tile(dtype: str) -> None:
    _, s = regime("growing", dtype)
    largest = [s[..., start : start + 32].max(-1) for start in range(0, SOME.len_k, 32)]
    for before, after in pairwise(largest):
        assert (after > before).all()


def test_mean_has_values_about_one() -> None:
    inputs, _ = regime("mean", "float32")
    for x in (inputs.v, inputs.d_out):
        assert x is not None
        assert float(x.mean()) == pytest.approx(1, abs=0.01)
        assert std(x) == pytest.approx(0.1, rel=0.05)


exact_cases = st.builds(
    Case,
    heads_q=st.just(2),
    heads_kv=st.sampled_from([1, 2]),
    len_q=st.integers(1, 130),
    len_k=st.integers(1, 130),
    dim=st.sampled_from([16, 17, 24, 64, 256]),
    dtype=st.sampled_from(DTYPES),
    causal=st.booleans(),
    scale=st.sampled_from([None, 1.0, 0.3, -0.2, 1e-3, 3.0]),
    values=st.just("exact"),
    layout=st.sampled_from(["bhsd", "expanded"]),
    seed=st.integers(0, 2**32 - 1),
)


@settings(deadline=None, derandomize=True, database=None)
@given(exact_cases)
def test_exact_has_one_hot_rows_and_small_integers(case: Case) -> None:
    inputs = make_inputs(case)
    s = scores(case, inputs)
    i, j = np.ogrid[: case.len_q, : case.len_k]
    visible = (j <= i + case.len_k - case.len_q) | (not case.causal)
    ordered = np.sort(np.where(visible, s, -np.inf), axis=-1)
    two_visible = visible.sum(-1) >= 2
    lead = (
        ordered[..., two_visible, -1] - ordered[..., two_visible, -2] if case.len_k > 1 else np.array([104.0])
    )
    assert lead.min(initial=np.inf) >= 104 * (1 - 1e-12)
    for x in (inputs.v, inputs.d_out):
        assert x is not None
        assert set(x.unique().tolist()) <= {-2, -1, 0, 1, 2}


def test_exact_picks_many_different_keys() -> None:
    _, s = regime("exact")
    assert len(np.unique(s.argmax(-1))) > 80
