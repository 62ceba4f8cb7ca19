"""Random cases without Hypothesis: of a campaign millions are drawn, and none is shrunk.

A case follows from the seed and its number alone, whatever machine draws it and however many workers do.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

from .cases import GRADIENTS, LAYOUTS, REGIMES, Case
from .implementations import Claims

Pair = tuple[str, tuple[int, int]]

# dtype and (D, Dv): what forces a compilation. The first ones are what a short campaign has.
PAIRS: list[Pair] = [
    ("float16", (64, 64)),
    ("bfloat16", (128, 128)),
    ("float32", (64, 64)),
    ("bfloat16", (32, 32)),
    ("float16", (128, 128)),
    ("bfloat16", (64, 64)),
    ("float16", (16, 16)),
    ("bfloat16", (96, 96)),
    ("float16", (40, 40)),
    ("bfloat16", (16, 16)),
    ("float16", (32, 32)),
    ("float32", (32, 32)),
    ("bfloat16", (80, 80)),
    ("float16", (256, 256)),
    ("bfloat16", (64, 32)),
    ("float16", (96, 96)),
    ("float32", (128, 128)),
    ("bfloat16", (40, 40)),
    ("float16", (80, 80)),
    ("bfloat16", (256, 256)),
    ("float32", (16, 16)),
    ("float16", (192, 128)),
    ("bfloat16", (72, 104)),
    ("float32", (40, 40)),
    ("float16", (64, 32)),
    ("bfloat16", (192, 128)),
    ("float32", (96, 96)),
    ("float16", (72, 104)),
]

# these are Hypothesis's pools too (`strategies`), in order of simplicity
HEADS = [(1, 1), (2, 1), (2, 2), (3, 3), (4, 2), (6, 2), (5, 1), (8, 1)]
SCALES = [None, None, None, 1.0, 0.3, -0.2, 0.0]
PAST = [(0, 0), (0, 0), (0, 0), (0, 0), (1, 0), (0, 1), (3, 5), (9, 2)]
"""Rows of q and of k past the last sequence of a ragged batch."""

FREE = 0.3
"""Share of the cases that only our own kernels claim in full; the others are within what all claim."""

SHAPES = 16
"""Shapes that the cases within what all claim have, by dtype, head dimensions and seed: a backend that
plans for each shape anew must not spend the campaign on that."""

LARGEST = 60_000
"""Most scores (B Hq Sq Sk) of a case of more than one head or batch entry."""


def pairs(seed: int, count: int) -> list[Pair]:
    """The dtypes and head dimensions of a campaign: others for another seed, all of them in turn."""
    first = seed * count
    return [PAIRS[(first + i) % len(PAIRS)] for i in range(min(count, len(PAIRS)))]


def common(claims: Iterable[Claims], pair: Pair) -> Claims:
    """What all claim of those that claim a dtype and head dimensions at all."""
    dtype, (dim, dim_v) = pair
    plain = Case(dtype=dtype, dim=dim, dim_v=dim_v, grad="none")
    asked = [c for c in claims if not c.refusal(plain)]
    top_left = any(c.causal_alignment == "top-left" for c in asked)
    together: dict[str, Any] = {
        name: all(getattr(c, name) for c in asked)
        for name in ("gqa", "cross_lengths", "dead_rows", "empty", "backward", "lse_grad")
    }
    return Claims(
        positive_scale=any(c.positive_scale for c in asked),
        fewest_keys=max((c.fewest_keys for c in asked), default=1),
        causal_alignment="top-left" if top_left else "bottom-right",
        strided=any(c.strided for c in asked),  # the others get the same values, contiguous
        **together,
    )


@functools.cache
def _tile(pair: Pair) -> tuple[int, int]:
    """Largest query and key tiles of our kernels on sm_80 and sm_90."""
    from kernels.architecture import SHARED_MEMORY, Architecture
    from kernels.tiles import choose_tiles

    dtype, dims = pair
    itemsize = 4 if dtype == "float32" else 2
    chosen = [
        choose_tiles(Architecture(f"sm{cc}", cc, SHARED_MEMORY[cc]), *dims, itemsize) for cc in (80, 90)
    ]
    tiles = [tile for of_arch in chosen for tile in (of_arch.forward, of_arch.dkdv, of_arch.dq)]
    return max(tile.BM for tile in tiles), max(tile.BN for tile in tiles)


def is_free(seed: int, number: int) -> bool:
    """Whether a case is drawn within our own kernels' claims, and not within what all claim."""
    return Random(f"{seed}/{number}").random() < FREE


def draw(seed: int, number: int, pair: Pair, ours: Claims, of_all: Claims) -> Case:
    """A case of a campaign.

    Args:
        seed, number: which.
        pair: its dtype and head dimensions.
        ours: what the implementation with the most claims claims.
        of_all: what all claim, see `common`.
    """
    free = is_free(seed, number)
    random = Random(f"{seed}/{number}/case")
    claims = ours if free else of_all
    of_shape = random if free else Random(f"{seed}/{pair}/{random.randrange(SHAPES)}")
    case = _shape(of_shape, pair, claims, free)
    layouts = [name for name in LAYOUTS if free or name != "expanded"]  # which changes the values
    grad, d_lse = "none", False
    if claims.backward:
        grad = random.choice(["qkv"] * 18 + list(GRADIENTS))
        d_lse = claims.lse_grad and grad != "none" and random.random() < 0.5
    scales = [scale for scale in SCALES if scale is None or scale > 0 or not claims.positive_scale]
    return replace(
        case,
        scale=random.choice(scales),
        values=random.choice(list(REGIMES)),
        layout=random.choice(layouts) if claims.strided else "bshd" if case.ragged else "bhsd",
        grad=grad,
        d_lse=d_lse,
        seed=random.getrandbits(32),
    )


def _shape(random: Random, pair: Pair, claims: Claims, free: bool) -> Case:
    dtype, (dim, dim_v) = pair
    causal = random.random() < 0.5
    top_left = causal and claims.causal_alignment == "top-left"
    tile = _tile(pair)
    case = Case(dtype=dtype, dim=dim, dim_v=dim_v, causal=causal, grad="none")
    if free and claims.ragged and random.random() < 0.2:
        sequences = [
            _lengths(random, claims, causal, tile if random.random() < 0.5 else (4, 4))
            for _ in range(random.randint(1, 6))
        ]
        kept: list[tuple[int, int]] = []
        for length in sequences:
            if not kept or _scores([*kept, length]) <= LARGEST:
                kept.append(length)
        case = replace(case, lengths=tuple(kept), past=random.choice(PAST))
        scores = _scores(kept)
    else:
        len_q, len_k = _lengths(random, claims, causal, tile)
        square = top_left or not claims.cross_lengths
        if square:
            len_k = len_q
        if not claims.takes_keys(len_k):
            len_k = claims.fewest_keys
            len_q = len_k if square else len_q
        case = replace(case, len_q=len_q, len_k=len_k)
        scores = len_q * len_k
    room = max(1, LARGEST // max(1, scores))
    heads = [(q, kv) for q, kv in HEADS if q <= room and (q == kv or claims.gqa)]
    heads_q, heads_kv = random.choice(heads)
    batch = case.batch if case.ragged else random.randint(1, max(1, min(3, room // heads_q)))
    return replace(case, heads_q=heads_q, heads_kv=heads_kv, batch=batch)


def _scores(lengths: Sequence[tuple[int, int]]) -> int:
    return sum(len_q * len_k for len_q, len_k in lengths)


def _lengths(random: Random, claims: Claims, causal: bool, tile: tuple[int, int]) -> tuple[int, int]:
    """Sq and Sk, within the claims: mostly within one of a multiple of the tile, and of two tiles or more."""
    len_q, len_k = (_length(random, n) for n in tile)
    if not claims.cross_lengths:
        len_k = len_q = _length(random, max(tile))
    if not claims.empty:
        len_q, len_k = max(len_q, 1), max(len_k, 1)
    if not claims.dead_rows:
        len_k = max(len_k, len_q if causal else min(len_q, 1))
    return len_q, len_k


def _length(random: Random, tile: int) -> int:
    at_edges = [tile + 1, 2 * tile, 2 * tile + 1, 2 * tile - 1, 3 * tile - 1]
    pools: list[Sequence[int]] = [at_edges, range(tile + 1, 3 * tile + 1), at_edges]
    pools.append([1, tile, tile - 1, 2, 0])
    return random.choice(random.choice(pools))
