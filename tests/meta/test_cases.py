"""Cases: ids decode back to the whole case, wrong ones are refused; what is drawn and what is listed."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable
from dataclasses import replace
from itertools import chain, product
from pathlib import Path

import pytest
from hypothesis import Phase, find, given, seed, settings
from hypothesis import strategies as st

from tests.cases import DTYPES, GRADIENTS, LAYOUTS, REGIMES, Case, parse_case
from tests.corpus import read_corpus
from tests.edges import edges
from tests.implementations import EVERY_CASE, Claims
from tests.recipes import recipes
from tests.strategies import DIMS, PROFILES, SHARD, SMALL_DIMS, cases, generation, shard_of

EVERYTHING = EVERY_CASE
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


RAGGED = Case(lengths=((33, 65), (0, 7), (5, 0)), past=(2, 1), layout="bshd")


@pytest.mark.parametrize(
    ("lengths", "past", "part"),
    [
        (RAGGED.lengths, (2, 1), "b3_h1x1_r33x65+0x7+5x0_past2x1_d16x16_"),
        ((), (0, 0), "b0_h1x1_r_past0x0_"),
        ((), (3, 5), "b0_h1x1_r_past3x5_"),
        (((0, 0),), (0, 0), "b1_h1x1_r0x0_past0x0_"),
        (((5, 5), (5, 5), (5, 6), (5, 5)), (0, 9), "b4_h1x1_r2of5x5+5x6+5x5_past0x9_"),
        (((1, 1),) * 70_000, (0, 0), "b70000_h1x1_r70000of1x1_past0x0_"),
    ],
    ids=["some", "none", "only-past", "nothing", "equal-neighbours", "many"],
)
def test_an_id_has_the_lengths_of_each_sequence(
    lengths: tuple[tuple[int, int], ...], past: tuple[int, int], part: str
) -> None:
    case = Case(lengths=lengths, past=past)
    assert case.id.startswith(part)
    assert parse_case(case.id) == case


def test_of_a_ragged_batch_the_lengths_decide() -> None:
    assert (RAGGED.batch, RAGGED.len_q, RAGGED.len_k) == (3, 40, 73)
    other = replace(RAGGED, lengths=((1, 2),), batch=7, len_q=7)
    assert (other.batch, other.len_q, other.len_k) == (1, 3, 3)
    assert replace(other, lengths=None, past=(0, 0)).pairs == ((3, 3),)


def test_sequences_are_dense_cases_that_differ_in_lengths_and_seeds_only() -> None:
    case = replace(RAGGED, causal=True, dtype="bfloat16", seed=2**32 - 1)
    found = case.sequences()
    assert tuple((s.len_q, s.len_k) for s in found) == case.lengths
    assert [s.seed for s in found] == [2**32 - 1, 2654435760, 1013904225]
    for s in found:
        assert s == replace(
            case, lengths=None, past=(0, 0), batch=1, len_q=s.len_q, len_k=s.len_k, seed=s.seed
        )


@pytest.mark.parametrize(
    ("lengths", "causal", "dead_rows", "empty"),
    [
        (((5, 5), (7, 9)), True, False, False),
        (((5, 5), (9, 7)), True, True, False),
        (((5, 5), (9, 7)), False, False, False),
        (((5, 5), (0, 7)), True, False, True),
        (((5, 0), (5, 5)), False, True, True),
        ((), False, False, True),
    ],
    ids=str,
)
def test_one_sequence_makes_a_batch_one_with_dead_rows_or_an_empty_one(
    lengths: tuple[tuple[int, int], ...], causal: bool, dead_rows: bool, empty: bool
) -> None:
    case = Case(lengths=lengths, causal=causal, past=(3, 0))
    assert (case.dead_rows, case.empty) == (dead_rows, empty)


def test_words_count_equal_sequences() -> None:
    words = Case(lengths=((1, 1),) * 64 + ((33, 65),), past=(2, 1)).words()
    by_sequence = "queries on keys by sequence: 1 on 1 (64 times), 33 on 65, 2 and 1 rows past them,"
    assert "ragged batch of 65, " in words
    assert by_sequence in words


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


WRONG_RAGGED = [
    ("b3", "b2", "b2, but there are 3 sequences"),
    ("r33x65+0x7+5x0", "r33x65+0x7", "b3, but there are 2 sequences"),
    ("r33x65+0x7+5x0", "r", "b3, but there are 0 sequences"),
    ("r33x65", "r2of33x65", "b3, but there are 4 sequences"),
    ("r33x65", "r0of33x65", "must look like b1_"),
    ("r33x65", "r33x-65", "must look like b1_"),
    ("r33x65+", "r33x65++", "must look like b1_"),
    ("+5x0", "+5", "must look like b1_"),
    ("_past2x1", "", "must look like b1_"),
    ("_past2x1", "_past2", "must look like b1_"),
    ("r33x65+0x7+5x0", "s33x65", "must look like b1_"),
]


@pytest.mark.parametrize(
    ("part", "wrong", "names"), WRONG_RAGGED, ids=[f"{part}-{wrong}" for part, wrong, _ in WRONG_RAGGED]
)
def test_a_wrong_id_of_a_ragged_batch_is_refused_by_what_is_wrong(part: str, wrong: str, names: str) -> None:
    text = RAGGED.id.replace(part, wrong, 1)
    assert text != RAGGED.id
    with pytest.raises(ValueError, match=f"^case id is '{re.escape(text)}'.*{names}"):
        parse_case(text)


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
    ("past", (1, 0), r"past is \(1, 0\); only a ragged batch has rows past its sequences"),
    ("lengths", ((3, 4), (-1, 2)), r"lengths are \(\(3, 4\), \(-1, 2\)\) .*; none may be negative"),
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
        pytest.param(replace(NARROW, ragged=True), (64, 64), True, id="square-sequences"),
        pytest.param(NARROW, (64, 128), False, id="square-cases-under-oblong-tiles"),
    ],
)
def test_half_of_the_drawn_cases_span_two_tiles_both_ways(
    claims: Claims, tile: tuple[int, int], interpreted: bool
) -> None:
    found = drawn(claims, tile, interpreted)
    spanning = [case for case in found if any(q > tile[0] and k > tile[1] for q, k in case.pairs)]
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
        ("batch", (0, 1, 2, 3, 4, 5, 6)),
        ("ragged", (False, True)),
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
    for batches in ("dense", "ragged"):
        pairs = {pair for case in found if case.ragged == (batches == "ragged") for pair in case.pairs}
        for lengths in ({q for q, _ in pairs}, {k for _, k in pairs}):
            assert {0, 1, 31, 32, 33, 63, 64, 65} <= lengths, batches


@pytest.mark.parametrize(
    ("tile", "interpreted"), [(SMALL_TILE, True), (GPU_TILE, False)], ids=["small", "GPU"]
)
def test_about_a_quarter_of_the_drawn_cases_are_ragged_of_every_kind(
    tile: tuple[int, int], interpreted: bool
) -> None:
    found = [case for case in drawn(EVERYTHING, tile, interpreted) if case.ragged]
    assert 0.15 < len(found) / PROFILES["ci"].interpreted < 0.35
    kinds = {
        "no sequence": lambda c: not c.pairs,
        "fewer rows than sequences": lambda c: 0 < c.len_q < c.batch,
        "rows of q past the end": lambda c: c.past[0] > 0,
        "rows of k past the end": lambda c: c.past[1] > 0,
        "no query in one of several": lambda c: any(q == 0 < k for q, k in c.pairs) and c.batch > 1,
        "no key in one of several": lambda c: any(k == 0 < q for q, k in c.pairs) and c.batch > 1,
        "more queries than keys beside more keys than queries": lambda c: (
            c.causal and {q > k > 0 for q, k in c.pairs} == {False, True}
        ),
        "a row beside several tiles": lambda c: (
            {*c.pairs} & {(1, 1), (2, 2), (1, 2), (2, 1)} and max(k for _, k in c.pairs) > tile[1]
        ),
        "several heads": lambda c: c.heads_q > 1,
    }
    assert [name for name, is_one in kinds.items() if not any(map(is_one, found))] == []


@pytest.mark.parametrize("claims", [EVERYTHING, replace(NARROW, ragged=True)], ids=["all", "square"])
def test_no_case_of_several_heads_or_sequences_is_larger_than_asked_for(claims: Claims) -> None:
    for case in drawn(claims, SMALL_TILE, True):
        scores = case.heads_q * sum(q * k for q, k in case.pairs) * (1 if case.ragged else case.batch)
        assert scores <= 9_000 or (case.heads_q == 1 and sum(q * k > 0 for q, k in case.pairs) == 1)


@pytest.mark.parametrize(
    ("fails", "smallest"),
    [
        (lambda case: case.batch > 1, Case(batch=2, len_q=33, len_k=33)),
        (lambda case: case.ragged and case.len_q > 3, ((33, 33),)),
        (lambda case: case.ragged and case.batch > 2, ((33, 33),) * 3),
        (lambda case: case.ragged and 0 in [k for _, k in case.pairs][1:], ((33, 33), (33, 0))),
    ],
    ids=["dense-if-that-will-do", "one-sequence", "equal-sequences", "after-another"],
)
def test_a_case_shrinks_to_few_equal_sequences(fails: Callable[[Case], bool], smallest: object) -> None:
    strategy = cases(EVERYTHING, "float16", (16, 16), SMALL_TILE, 9000)
    found = find(strategy, fails, settings=settings(STEADY, phases=[Phase.generate, Phase.shrink]))
    expected = smallest if isinstance(smallest, Case) else Case(lengths=smallest)  # type: ignore[arg-type]
    assert found == expected


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
    aligned = data.draw(st.sampled_from(["bottom-right", "top-left"]))
    claims = replace(NARROW, **switched, largest_dim=64, causal_alignment=aligned)  # type: ignore[arg-type]
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


@LISTS
def test_edges_and_recipes_have_every_kind_of_ragged_batch(tile: tuple[int, int], interpreted: bool) -> None:
    BM, BN = tile
    listed = [*edges(tile, interpreted), *chain(*recipes(tile).values())]
    found = [case for case in listed if case.ragged]
    assert {case.layout for case in found} == set(LAYOUTS)
    for has in (
        lambda c: any(c.past),
        lambda c: c.causal and any(q > k > 0 for q, k in c.pairs) and any(q < k for q, k in c.pairs),
        lambda c: c.values == "negative" and not c.causal,
    ):
        assert {case.dtype for case in found if has(case)} == set(DTYPES)
    assert {case.grad for case in found} >= {"q", "k", "v", "qkv", "none"}
    assert {case.batch for case in found} >= ({0, 1, 64} if interpreted else {0, 1, 64, 1000, 70_000})
    kinds = {
        "no sequence": lambda c: not c.pairs and c.past == (0, 0),
        "no sequence, but rows": lambda c: not c.pairs and min(c.past) > 0,
        "keys and no query": lambda c: c.len_q == 0 < c.len_k,
        "queries and no key": lambda c: c.len_k == 0 < c.len_q,
        "neither": lambda c: {*c.pairs} == {(0, 0)},
        "fewer rows than sequences": lambda c: 0 < c.len_q < c.batch,
        "the first empty": lambda c: c.batch > 1 and c.pairs[0] == (0, 0) != c.pairs[-1],
        "the last empty": lambda c: c.batch > 1 and c.pairs[-1] == (0, 0) != c.pairs[0],
        "one in the middle empty": lambda c: (0, 0) in c.pairs[1:-1] and c.pairs[0] != (0, 0),
        "one sequence": lambda c: c.batch == 1,
        "five sequences and more": lambda c: c.batch >= 5 and min(map(min, c.pairs)) > 0,
        "one row beside several tiles": lambda c: (
            (1, 1) in c.pairs and any(q > 2 * BM and k > 2 * BN for q, k in c.pairs)
        ),
        "exactly a tile": lambda c: (BM, BN) in c.pairs,
        "a tile and more of rows past the end": lambda c: c.past[0] > BM and c.past[1] > BN,
        "grouped heads": lambda c: 1 < c.heads_kv < c.heads_q,
        "Dv > D": lambda c: c.dim_v > c.dim,
        "Dv < D": lambda c: c.dim_v < c.dim,
        "D 100": lambda c: c.dim == 100,
        "a negative scale": lambda c: (c.scale or 0) < 0,
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
