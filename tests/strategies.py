"""Hypothesis strategies for cases: lengths at the edges of tiles, everything else from small pools.

A case is drawn, never a tensor: a failure shrinks to the smallest case within seconds. What forces a
compilation (dtype, head dimensions) is fixed for each shard of a run, so that the workers do not all
compile the same kernels.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st

from .cases import DTYPES, GRADIENTS, LAYOUTS, REGIMES, Case
from .drawing import HEADS, PAST, SCALES
from .implementations import MASKS, Claims


@dataclass(frozen=True)
class Profile:
    """How many comparisons are generated.

    Attributes:
        interpreted, compiled: on the CPU through the interpreter, and on a GPU.
        random: other cases in each run; otherwise the same in all.
    """

    interpreted: int
    compiled: int
    random: bool = False


PROFILES = {
    "dev": Profile(60, 480),
    "ci": Profile(560, 3200),
    "nightly": Profile(3000, 20000, random=True),
    "thorough": Profile(10000, 100000, random=True),
}

SHARD = 20
"""Cases that one test generates: small, so that workers share the load."""

# D, Dv: powers of two first, since the first is what a failure is tried with
DIMS = [(16, 16), (64, 64), (32, 32), (128, 128), (40, 40), (64, 32), (96, 96), (80, 80), (192, 128)]
DIMS += [(256, 256), (72, 104)]
SMALL_DIMS = [(16, 16), (32, 32), (24, 40), (64, 64), (40, 24), (16, 32)]


def dims_of(claims: Claims, interpreted: bool) -> list[tuple[int, int]]:
    """D and Dv of the cases: all that are listed if they are, else the pool's, as far as they are claimed.

    The ends of a range that reach beyond all pools, or have none of the pool between them, are its cases too.
    """
    if claims.dims is not None:
        equal = [(dim, dim) for dim in claims.dims]
        neighbours = zip(claims.dims, claims.dims[1:], strict=False)
        pairs = [pair for d, dv in neighbours for pair in ((d, dv), (dv, d))]
        return equal + ([] if claims.equal_dims else pairs)
    step = claims.dims_multiple_of
    ends = [-(-claims.smallest_dim // step) * step, claims.largest_dim // step * step]
    found = [
        (d, dv)
        for d, dv in (SMALL_DIMS if interpreted else DIMS)
        if claims.takes_dim(d) and claims.takes_dim(dv) and not (d % step or dv % step)
        if d == dv or not claims.equal_dims
    ]
    reached = [dim for pair in DIMS for dim in pair]
    beyond = [(dim, dim) for dim in ends if not found or not min(reached) <= dim <= max(reached)]
    return list(dict.fromkeys((*found, *beyond)))


def shard_of(number: int, claims: Claims, interpreted: bool) -> tuple[str, tuple[int, int]]:
    """The dtype and head dimensions of a shard's cases."""
    dims = dims_of(claims, interpreted)
    dtypes = [dtype for dtype in DTYPES if dtype in claims.dtypes]
    return dtypes[number % len(dtypes)], dims[number // len(dtypes) % len(dims)]


def lengths(tile: int) -> st.SearchStrategy[int]:
    """Mostly within one of a multiple of the tile, and mostly of two tiles or more."""
    at_edges = [tile + 1, 2 * tile, 2 * tile + 1, 2 * tile - 1, 3 * tile - 1]
    short = [1, tile, tile - 1, 2, 0]
    return st.one_of(
        st.sampled_from(at_edges),
        st.integers(tile + 1, 3 * tile),
        st.sampled_from(at_edges),
        st.sampled_from(short),
    )


def crosses(claims: Claims, causal: bool) -> bool:
    """Whether Sq and Sk may differ: not under a causal mask that is aligned otherwise than the cases are."""
    return claims.cross_lengths and not (causal and claims.causal_alignment == "top-left")


@st.composite
def pairs(
    draw: st.DrawFn, claims: Claims, causal: bool, of_q: st.SearchStrategy[int], of_k: st.SearchStrategy[int]
) -> tuple[int, int]:
    """Sq and Sk of one sequence, within the claims."""
    len_q = draw(of_q)
    len_k = draw(of_k) if crosses(claims, causal) else len_q
    if not claims.empty:
        len_q, len_k = max(len_q, 1), max(len_k, 1)
    if not claims.dead_rows:
        len_k = max(len_k, len_q if causal else min(len_q, 1))
    if not claims.takes_keys(len_k):
        len_k = claims.fewest_keys
        len_q = len_q if crosses(claims, causal) else len_k
    return len_q, len_k


def about_tiles(claims: Claims, causal: bool, tile: tuple[int, int]) -> st.SearchStrategy[tuple[int, int]]:
    """Sq and Sk at the edges of tiles; of square problems at those of the larger side."""
    tile_q, tile_k = tile if crosses(claims, causal) else (max(tile), max(tile))
    return pairs(claims, causal, lengths(tile_q), lengths(tile_k))


def sequences(
    claims: Claims, causal: bool, tile: tuple[int, int]
) -> st.SearchStrategy[list[tuple[int, int]]]:
    """Sq and Sk of up to six sequences: at the edges of tiles and short ones mixed, or one row at most each.

    Of the latter there are often more than rows.
    """
    short, one_row = (pairs(claims, causal, st.integers(0, n), st.integers(0, n)) for n in (7, 1))

    def mixed() -> st.SearchStrategy[list[tuple[int, int]]]:
        long = [about_tiles(claims, causal, tile) for _ in range(3)]
        return st.lists(st.one_of(*long, short), min_size=1, max_size=6)

    # one object counts once in one_of, however often it is given: hence several that are alike
    rows = st.lists(one_row, min_size=0 if claims.empty else 1, max_size=6)
    return st.one_of(*(mixed() for _ in range(3)), rows)


def fitting(sequences: list[tuple[int, int]], largest: int) -> tuple[tuple[int, int], ...]:
    """The sequences, without those whose scores are too many beside those of the ones before."""
    kept: list[tuple[int, int]] = []
    scores = 0
    for len_q, len_k in sequences:
        if kept and scores + len_q * len_k > largest:
            continue
        scores += len_q * len_k
        kept.append((len_q, len_k))
    return tuple(kept)


@st.composite
def cases(
    draw: st.DrawFn,
    claims: Claims,
    dtype: str,
    dims: tuple[int, int],
    tile: tuple[int, int],
    largest: int,
) -> Case:
    """A case within the claims of an implementation.

    Args:
        claims: of the implementation under test.
        dtype, dims: fixed for the shard.
        tile: query and key rows of the implementation's largest tiles.
        largest: most scores (Hq times the sum of Sq Sk) of a case with more than one head in all.
    """
    both = set(MASKS) <= set(claims.masks)
    causal = draw(st.booleans(), label="causal") if both else "causal" in claims.masks
    ragged = claims.ragged and draw(st.sampled_from([False] * 4 + [True]), label="ragged")
    shape: dict[str, Any] = {}
    if ragged:
        drawn = draw(sequences(claims, causal, tile), label="sequences")
        shape["lengths"] = fitting(drawn, largest)
        shape["past"] = draw(st.sampled_from(PAST), label="past") if claims.past_rows else (0, 0)
        scores = sum(len_q * len_k for len_q, len_k in shape["lengths"])
    else:
        shape["len_q"], shape["len_k"] = draw(about_tiles(claims, causal, tile), label="Sq, Sk")
        scores = shape["len_q"] * shape["len_k"]
    room = max(1, largest // max(1, scores))
    groups = [(q, kv) for q, kv in HEADS if q <= room and (q == kv or claims.gqa)]
    heads_q, heads_kv = draw(st.sampled_from(groups), label="heads")
    if not ragged:
        shape["batch"] = draw(st.integers(1, max(1, min(3, room // heads_q))), label="batch")
    layout = claims.layout(ragged)
    if claims.strided:
        layout = draw(st.sampled_from(list(LAYOUTS)), label="layout")
    scales = list(filter(claims.takes_scale, SCALES))
    grad, d_lse = "none", False
    if claims.backward:
        grad = draw(st.sampled_from(["qkv"] * 18 + list(GRADIENTS)), label="grad")
        d_lse = claims.lse_grad and grad != "none" and draw(st.booleans(), label="d_lse")
    return Case(
        **shape,
        heads_q=heads_q,
        heads_kv=heads_kv,
        dim=dims[0],
        dim_v=dims[1],
        dtype=dtype,
        causal=causal,
        scale=draw(st.sampled_from(scales), label="scale"),
        values=draw(st.sampled_from(list(REGIMES)), label="values"),
        layout=layout,
        grad=grad,
        d_lse=d_lse,
        seed=draw(st.integers(0, 2**32 - 1), label="seed"),
    )


def generation(examples: int) -> settings:
    """Hypothesis's settings: no deadline (kernels compile), no database (our corpus is the memory)."""
    return settings(
        max_examples=examples,
        deadline=None,
        database=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
        print_blob=False,
        report_multiple_bugs=False,
    )
