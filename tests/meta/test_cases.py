"""Cases: ids decode back to the whole case, wrong ones are refused; what is drawn and what is listed."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given, seed, settings
from hypothesis import strategies as st

from tests.cases import DTYPES, GRADIENTS, LAYOUTS, REGIMES, Case, parse_case
from tests.corpus import read_corpus
from tests.edges import edges
from tests.implementations import Claims
from tests.strategies import DIMS, PROFILES, SHARD, SMALL_DIMS, cases, generation, shard_of

EVERYTHING = Claims(
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
NARROW = Claims()
SMALL_TILE, GPU_TILE = (32, 32), (128, 64)
"""Query and key rows of a tile in the interpreter, and one as on a GPU."""

STEADY = settings(deadline=None, derandomize=True, database=None, max_examples=400)

# ---------------------------------------------------------------- ids


@STEADY
@given(
    case=cases(EVERYTHING, "bfloat16", (24, 40), SMALL_TILE, 9000),
    scale=st.none() | st.floats(allow_nan=False, allow_infinity=False),
)
def test_an_id_decodes_back_to_the_case(case: Case, scale: float | None) -> None:
    case = replace(case, scale=scale)
    assert parse_case(case.id) == case


@pytest.mark.parametrize("scale", [1e-30, 5e-324, -0.0, 0.1 + 0.2, 1e10, -1e22, 1.7976931348623157e308])
def test_an_id_holds_every_bit_of_an_extreme_scale(scale: float) -> None:
    found = parse_case(Case(scale=scale).id).scale
    assert found == scale
    assert math.copysign(1, found) == math.copysign(1, scale)


def test_an_id_is_read_as_it_is_printed_and_with_blanks_around_it() -> None:
    case = Case(batch=2, seed=2**32 - 1, causal=True)
    assert parse_case(repr(case)) == parse_case(f" {case.id}\n") == case


GOOD = Case().id


WRONG = [
    ("b1", "b-1", "must look like b1_"),
    ("h1x1", "h1", "must look like b1_"),
    ("full", "causl", "must look like b1_"),
    ("seed0", "seed0x", "must look like b1_"),
    ("seed0", f"seed{2**32}", "seed is 4294967296"),
    ("h1x1", "h3x2", "heads_q is 3; it must be a multiple of heads_kv, 2"),
    ("h1x1", "h0x1", "heads_q is 0"),
    ("d16x16", "d0x16", "dim is 0"),
    ("d16x16", "d16x0", "dim_v is 0"),
    ("float16", "float8", "dtype is 'float8'; it may be one of float16, bfloat16, float32"),
    ("scale=auto", "scale=inf", "scale is inf; it must be finite"),
    ("scale=auto", "scale=nan", "scale is nan; it must be finite"),
    ("scale=auto", "scale=a", "could not convert string to float: 'a'"),
    ("normal", "odd", "values is 'odd'; it may be one of normal, "),
    ("bhsd", "dhsb", "layout is 'dhsb'; it may be one of bhsd, "),
    ("grad=qkv", "grad=vkq", "grad is 'vkq'; it may be one of none, "),
    ("grad=qkv_nodlse", "grad=none_dlse", "d_lse is True and grad is 'none'"),
]


@pytest.mark.parametrize(("part", "wrong", "names"), WRONG, ids=[wrong for _, wrong, _ in WRONG])
def test_a_wrong_id_is_refused_by_what_is_wrong(part: str, wrong: str, names: str) -> None:
    text = GOOD.replace(part, wrong, 1)
    assert text != GOOD
    with pytest.raises(ValueError, match=f"^case id is '{text}'.*{names}"):
        parse_case(text)


MEANINGLESS: list[tuple[str, object, str]] = [
    ("batch", -1, "batch is -1; it must not be negative"),
    ("len_q", -1, "len_q is -1; it must not be negative"),
    ("len_k", -1, "len_k is -1; it must not be negative"),
    ("seed", -1, "seed is -1; it must not be negative"),
    ("seed", 2**32, r"seed is 4294967296; it must be less than 2\*\*32"),
    ("heads_q", 0, "heads_q is 0; it must be at least 1"),
    ("heads_kv", 0, "heads_kv is 0; it must be at least 1"),
    ("heads_kv", 2, "heads_q is 1; it must be a multiple of heads_kv, 2"),
    ("dim", 0, "dim is 0; it must be at least 1"),
    ("dim_v", 0, "dim_v is 0; it must be at least 1"),
    ("scale", math.inf, "scale is inf; it must be finite"),
    ("scale", math.nan, "scale is nan; it must be finite"),
    ("dtype", "float64", "dtype is 'float64'; it may be one of float16"),
    ("values", "", "values is ''; it may be one of normal"),
    ("layout", "BHSD", "layout is 'BHSD'; it may be one of bhsd"),
    ("grad", "o", "grad is 'o'; it may be one of none"),
]


@pytest.mark.parametrize(
    ("field", "value", "message"), MEANINGLESS, ids=[f"{field}={value}" for field, value, _ in MEANINGLESS]
)
def test_a_case_that_means_nothing_cannot_be_made(field: str, value: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}"):
        Case(**{field: value})  # type: ignore[arg-type]


# ---------------------------------------------------------------- what is drawn


@functools.cache
def drawn(claims: Claims, tile: tuple[int, int], interpreted: bool) -> tuple[Case, ...]:
    """As many cases as the profile `ci` generates in the interpreter, by shards as the suite does."""
    found: list[Case] = []
    for shard in range(PROFILES["ci"].interpreted // SHARD):
        dtype, dims = shard_of(shard, claims, interpreted)

        @seed(shard)
        @generation(SHARD)
        @given(cases(claims, dtype, dims, tile, 9_000 if interpreted else 400_000))
        def generate(case: Case) -> None:
            found.append(case)

        generate()
    return tuple(found)


@pytest.mark.parametrize(
    ("claims", "tile", "interpreted"),
    [
        pytest.param(EVERYTHING, SMALL_TILE, True, id="all-claims-in-the-interpreter"),
        pytest.param(EVERYTHING, GPU_TILE, False, id="all-claims-on-a-GPU"),
        pytest.param(NARROW, (64, 64), True, id="no-manifest"),
        pytest.param(NARROW, (64, 128), False, id="square-cases-under-oblong-tiles"),
    ],
)
def test_half_of_the_drawn_cases_span_two_tiles_both_ways(
    claims: Claims, tile: tuple[int, int], interpreted: bool
) -> None:
    found = drawn(claims, tile, interpreted)
    spanning = [case for case in found if case.len_q > tile[0] and case.len_k > tile[1]]
    assert len(found) == PROFILES["ci"].interpreted
    assert len(spanning) >= len(found) / 2


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("dtype", DTYPES),
        ("causal", (False, True)),
        ("scale", (None, 1.0, 0.3, -0.2, 0.0)),
        ("values", REGIMES),
        ("layout", LAYOUTS),
        ("grad", GRADIENTS),
        ("d_lse", (False, True)),
        ("batch", (1, 2, 3)),
        ("dead_rows", (False, True)),
        ("equal_scores", (False, True)),
        ("exact", (False, True)),
    ],
)
@pytest.mark.parametrize(
    ("tile", "interpreted"), [(SMALL_TILE, True), (GPU_TILE, False)], ids=["small", "GPU"]
)
def test_every_choice_is_drawn(field: str, values: object, tile: tuple[int, int], interpreted: bool) -> None:
    assert {getattr(case, field) for case in drawn(EVERYTHING, tile, interpreted)} == set(values)  # type: ignore[call-overload]


def test_grouped_heads_and_lengths_at_the_edges_of_tiles_are_drawn() -> None:
    found = drawn(EVERYTHING, SMALL_TILE, True)
    groups = {case.heads_q // case.heads_kv for case in found if case.heads_kv > 1}
    assert {1, 2, 3} <= groups
    for lengths in ({case.len_q for case in found}, {case.len_k for case in found}):
        assert {0, 1, 31, 32, 33, 63, 64, 65} <= lengths


@pytest.mark.parametrize(("pool", "interpreted"), [(SMALL_DIMS, True), (DIMS, False)], ids=["small", "GPU"])
def test_every_dtype_meets_every_head_dimension_of_the_pool(
    pool: list[tuple[int, int]], interpreted: bool
) -> None:
    profile = PROFILES["ci"]
    shards = (profile.interpreted if interpreted else profile.compiled) // SHARD
    found = {shard_of(number, EVERYTHING, interpreted) for number in range(shards)}
    assert found == set(product(DTYPES, pool))


switches = st.fixed_dictionaries(
    {name: st.booleans() for name, value in vars(NARROW).items() if isinstance(value, bool)}
)


@STEADY
@given(st.data(), switches, st.sampled_from([SMALL_TILE, GPU_TILE]), st.integers(0, 99))
def test_whatever_is_claimed_drawn_cases_lie_within(
    data: st.DataObject, switched: dict[str, bool], tile: tuple[int, int], shard: int
) -> None:
    claims = replace(NARROW, **switched, largest_dim=64)  # type: ignore[arg-type]
    dtype, dims = shard_of(shard, claims, interpreted=False)
    case = data.draw(cases(claims, dtype, dims, tile, 9000))
    assert claims.refusal(case) == ""


# ---------------------------------------------------------------- what is listed

LISTS = pytest.mark.parametrize(
    ("tile", "interpreted"), [(SMALL_TILE, True), (GPU_TILE, False)], ids=["interpreted", "compiled"]
)


@LISTS
def test_edges_have_ids_of_their_own_that_decode_back(tile: tuple[int, int], interpreted: bool) -> None:
    found = edges(tile, interpreted)
    assert len({case.id for case in found}) == len(found)
    assert [parse_case(case.id) for case in found] == found


@LISTS
def test_edges_have_every_length_about_a_tile_under_both_masks(
    tile: tuple[int, int], interpreted: bool
) -> None:
    BM, BN = tile
    wanted = product((0, 1, BM - 1, BM, BM + 1), (0, 1, BN - 1, BN, BN + 1), (False, True))
    assert set(wanted) <= {(case.len_q, case.len_k, case.causal) for case in edges(tile, interpreted)}


@LISTS
def test_edges_have_every_kind_of_input(tile: tuple[int, int], interpreted: bool) -> None:
    BM, BN = tile
    found = edges(tile, interpreted)
    assert {(case.values, case.dtype) for case in found} == set(product(REGIMES, DTYPES))
    assert {case.layout for case in found} == set(LAYOUTS)
    with_and_without = {*product(GRADIENTS, (False, True))} - {("none", True)}
    assert {(case.grad, case.d_lse) for case in found} == with_and_without
    kinds = {
        "rows that see nothing": lambda c: c.dead_rows and c.len_k > 0,
        "a tile that sees nothing": lambda c: c.causal and c.len_q - c.len_k >= BM and c.len_k > 0,
        "no batch": lambda c: c.batch == 0,
        "several tiles both ways": lambda c: c.len_q > 2 * BM and c.len_k > 2 * BN,
        "decoding": lambda c: c.len_q == 1 and c.len_k > BN,
        "grouped heads": lambda c: 1 < c.heads_kv < c.heads_q,
        "one KV head": lambda c: c.heads_kv == 1 < c.heads_q,
        "Dv > D": lambda c: c.dim_v > c.dim,
        "Dv < D": lambda c: c.dim_v < c.dim,
        "odd D": lambda c: c.dim % 2,
        "D 256": lambda c: c.dim == 256,
        "scale 0": lambda c: c.scale == 0,
        "negative scale": lambda c: (c.scale or 0) < 0,
    }
    assert [name for name, is_one in kinds.items() if not any(map(is_one, found))] == []


def test_the_interpreter_leaves_edges_out_and_adds_none() -> None:
    assert set(edges(SMALL_TILE, True)) < set(edges(SMALL_TILE, False))


def test_the_corpus_in_the_repository_is_readable() -> None:
    assert read_corpus()


def test_a_corpus_has_remarks_and_repetitions(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    a, b = Case(seed=1), Case(seed=2)
    corpus.write_text(f"# remark\n\n{b.id}  # out: hard bound\n{a.id}\n{b.id}\n")
    assert read_corpus(corpus) == [b, a]


def test_a_wrong_line_of_a_corpus_is_named(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus.txt"
    corpus.write_text(f"{GOOD}\n# remark\n{GOOD.replace('float16', 'float17')}\n")
    with pytest.raises(ValueError, match=r"corpus\.txt, line 3: .*dtype is 'float17'"):
        read_corpus(corpus)
