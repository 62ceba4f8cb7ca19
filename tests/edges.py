"""The cases that are always run: every edge that the definition names, and what broke kernels before.

Written in units of the tiles of the implementation under test, so that an edge is one for its kernels.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

from .cases import DTYPES, LAYOUTS, REGIMES, Case


def edges(tile: tuple[int, int], interpreted: bool) -> list[Case]:
    """All edge cases, of dense batches and then of ragged ones.

    Args:
        tile: query and key rows of the implementation's tiles.
        interpreted: leave out what takes minutes in the interpreter.
    """
    return list(dict.fromkeys((*_dense(tile, interpreted), *_ragged(tile, interpreted))))


def long() -> list[Case]:
    """Lengths past any usual tile, for implementations whose tiles are not known."""
    some = Case(heads_q=2, heads_kv=2, len_q=641, len_k=641, dim=64, dim_v=64)
    return [replace(some, dtype=dtype, causal=causal) for dtype in DTYPES for causal in (False, True)]


def _dense(tile: tuple[int, int], interpreted: bool) -> Iterator[Case]:
    BM, BN = tile
    some = Case(heads_q=2, heads_kv=2, len_q=BM + 1, len_k=BN + 1, dim=32, dim_v=32, d_lse=True)

    def of(**changes: object) -> Case:
        return Case(**{**vars(some), **changes})

    # what a suite shows first: both masks, every dtype, several tiles both ways
    for dtype, causal in product(DTYPES, (True, False)):
        yield of(dtype=dtype, causal=causal, len_q=2 * BM + 1, len_k=2 * BN + 3)

    # a group of query heads; nothing square, so that no two counts can be mixed up
    for heads_q, heads_kv, causal in ((4, 2, False), (6, 2, True), (5, 1, False), (6, 3, True)):
        yield of(heads_q=heads_q, heads_kv=heads_kv, len_q=17, len_k=19, causal=causal)
    yield of(heads_q=4, heads_kv=2, batch=2, len_k=2 * BN + 1, dtype="bfloat16")
    yield of(heads_q=8, heads_kv=1, values="mean", len_q=BM, d_lse=False, dtype="bfloat16")

    # lengths 0, 1, and about a tile, both ways
    for number, (len_q, len_k) in enumerate(product((0, 1, BM - 1, BM, BM + 1), (0, 1, BN - 1, BN, BN + 1))):
        for causal in (False, True):
            dtype = DTYPES[(number + causal) % 3]
            yield of(len_q=len_q, len_k=len_k, causal=causal, dtype=dtype, seed=number)

    # alignment at the bottom right: decoding, chunked prefill, rows that see nothing, whole dead tiles
    for len_q, len_k in (
        (1, BN + 1),
        (5, 2 * BN + 6),
        (2 * BM + 6, 5),
        (3 * BM, BN // 2),
        (2, 1),
        (BM, 2 * BN),
    ):
        for dtype in DTYPES:
            yield of(len_q=len_q, len_k=len_k, causal=True, dtype=dtype)
    yield of(batch=3, len_q=2 * BM - 1, len_k=1, causal=True, values="large")

    # clearly negative scores: a key that leaks in with score zero dominates. Not causal: the diagonal
    # would hide the last tile
    for dtype in DTYPES:
        yield of(len_q=BM + 1, len_k=BN + 1, values="negative", dtype=dtype)
        yield of(len_q=BM - 1, len_k=2 * BN - 1, values="negative", dtype=dtype, layout="sliced")

    # values
    for values, dtype in product(REGIMES, DTYPES):
        yield of(values=values, dtype=dtype, causal=values in ("growing", "large"), len_k=2 * BN + 1)
    yield of(values="very-negative", dim=64, dim_v=64, causal=True)
    yield of(values="very-negative", dim=64, dim_v=64, len_k=1, dtype="bfloat16")

    # one key, a score of 1e10: out is v, whatever the last bits of the maximum are
    for scale in (1e10, -1e10):
        yield of(len_q=1, len_k=1, scale=scale, dtype="bfloat16", dim=64, dim_v=64, grad="none", d_lse=False)

    # scales
    for scale, dtype in product((1.0, 0.5, 0.0, -0.25, 1e-3), ("float16", "float32")):
        yield of(scale=scale, dtype=dtype, causal=scale == 1.0)

    # head dimensions, padded or not, v's as q's or not
    equal = (16, 17, 24, 40, 63, 64, 72, 80, 96, 100, 104, 111, 128, 160, 192, 256)
    # in the last two, rows of only one of q and v are whole blocks of 16 bytes
    different = ((16, 32), (32, 16), (40, 16), (64, 128), (128, 64), (192, 128), (16, 256), (256, 16),
                 (16, 20), (20, 16))  # fmt: skip
    for number, (dim, dim_v) in enumerate([*((dim, dim) for dim in equal), *different]):
        for dtype in DTYPES if not interpreted else DTYPES[number % 3 :: 3]:
            yield of(dim=dim, dim_v=dim_v, dtype=dtype, heads_q=2, heads_kv=1, causal=number % 2 == 0)

    # memory
    for number, layout in enumerate(LAYOUTS):
        for dtype in DTYPES if not interpreted else DTYPES[number % 3 :: 3]:
            yield of(layout=layout, dtype=dtype, batch=2, causal=number % 2 == 1, dim=40, dim_v=24)
            yield of(
                layout=layout, dtype=dtype, batch=2, heads_q=3, heads_kv=3, dim=64, dim_v=64, len_k=BN - 1
            )

    # which inputs need a gradient, with and without one of the lse; no backward at all
    for grad, d_lse in product(("q", "k", "v", "qk", "qv", "kv", "qkv"), (True, False)):
        yield of(grad=grad, d_lse=d_lse, heads_q=2, heads_kv=1, causal=True, len_q=17, len_k=18)
    yield of(grad="none", d_lse=False)

    # no batch; one of everything
    yield of(batch=0)
    yield of(batch=1, heads_q=1, heads_kv=1, len_q=1, len_k=1, dim=16, dim_v=16)

    if not interpreted:
        # more programs than a grid's second dimension takes; the notebook's shape; long rows
        yield of(
            batch=65536, heads_q=1, heads_kv=1, len_q=1, len_k=1, dim=16, dim_v=16, grad="none", d_lse=False
        )
        yield of(batch=65536, heads_q=1, heads_kv=1, len_q=1, len_k=2, dim=16, dim_v=16)
        yield of(heads_q=65536, heads_kv=65536, len_q=1, len_k=1, dim=16, dim_v=16)
        for dtype in DTYPES:
            yield of(
                heads_q=8, heads_kv=8, len_q=1024, len_k=1024, dim=64, dim_v=64, causal=True, dtype=dtype
            )
        yield of(heads_q=2, heads_kv=1, len_q=33, len_k=4099, dim=64, dim_v=64, dtype="bfloat16")
        yield of(heads_q=2, heads_kv=1, len_q=4099, len_k=33, dim=128, dim_v=128, values="mean")


def _ragged(tile: tuple[int, int], interpreted: bool) -> Iterator[Case]:
    BM, BN = tile
    some = Case(heads_q=2, heads_kv=1, dim=32, dim_v=32, d_lse=True, layout="bshd", lengths=())

    def of(*lengths: tuple[int, int], **changes: object) -> Case:
        return Case(**{**vars(some), "lengths": lengths, **changes})

    # no sequence; nothing but rows past the end
    yield of()
    yield of(past=(3, 5))
    yield of(past=(BM + 1, BN + 1), dtype="float32")

    # no query in all of them, no key, neither; with rows past the end, which must not be taken for theirs
    yield of((0, 7), (0, BN + 1))
    yield of((0, 7), past=(2, 0))
    yield of((5, 0), (BM + 1, 0), dtype="bfloat16")
    yield of((5, 0), past=(0, 3))
    yield of((0, 0), (0, 0), (0, 0), past=(1, 1))

    # fewer rows than sequences; sequences without any first, in the middle, last
    yield of((1, 3), (0, 4), (0, 2), (1, 0), (0, 1), (0, 0))
    yield of((0, 0), (0, 3), (0, 0), (BM + 1, BN + 1))
    yield of((5, 0), (0, 0), (7, BN + 1), causal=True)
    yield of((3, 4), (0, 0), (0, 2), (4, 0), (0, 0), (BM + 1, 5))
    yield of((BM + 1, BN - 1), (0, 0), (0, BN + 1), (3, 0), (0, 0), dtype="float32", past=(1, 2))

    # one sequence: as a dense batch of one
    for causal in (True, False):
        yield of((BM + 1, 2 * BN + 3), causal=causal, heads_kv=2)
    yield of((1, 1), dim=16, dim_v=16, heads_q=1)

    # very different lengths: what is launched for the longest must leave the others alone
    yield of((1, 1), (3 * BM, 3 * BN), (2, 1), causal=True)
    yield of((1, 3 * BN), (2 * BM + 1, 1), (BM, 2), dtype="bfloat16")

    # the causal mask is aligned by sequence: rows that see nothing in one, whole prefixes in the next
    for dtype in DTYPES:
        yield of((BM + 5, 7), (7, BN + 5), (2 * BM, BN // 2), (1, 2 * BN), causal=True, dtype=dtype)

    # sequences of exactly a tile, one more, one less: their ends are ends of tiles, or nearly
    for number, causal in enumerate((True, False)):
        lengths = ((BM, BN), (BM - 1, BN + 1), (BM + 1, BN - 1), (BM, BN))
        for dtype in DTYPES if not interpreted else DTYPES[number : number + 1]:
            yield of(*lengths, causal=causal, dtype=dtype)

    # rows past the end: of q, of k, of both, a tile and more of them
    for dtype in DTYPES:
        yield of((5, 9), (BM - 2, BN - 2), past=(5, 3), dtype=dtype, causal=dtype == "bfloat16")
    yield of((BM, BN), past=(BM + 1, 0))
    yield of((BM, BN), past=(0, BN + 1), causal=True)

    # clearly negative scores: a key of the next sequence that leaks in with score zero dominates
    for dtype in DTYPES:
        yield of((17, BN - 1), (BM + 1, BN + 1), (3, 5), values="negative", dtype=dtype)

    # values
    for values, dtype in (
        ("equal", "float16"),
        ("very-negative", "bfloat16"),
        ("very-negative", "float32"),
        ("exact", "float16"),
        ("outliers", "bfloat16"),
    ):
        yield of((17, BN + 1), (BM + 1, 9), (5, 5), values=values, dtype=dtype, causal=values == "exact")

    # scales; of the rows past the end the gradients are +0 whatever the sign of the scale
    for scale, dtype in ((0.3, "float16"), (-0.2, "float32"), (0.0, "bfloat16")):
        yield of((7, BN + 1), (BM + 1, 9), scale=scale, dtype=dtype, causal=scale == 0.3, past=(1, 2))

    # groups of heads; v's head dimension is not q's
    yield of((17, 19), (BM + 1, 5), (2, 3), heads_q=4, heads_kv=2, causal=True)
    yield of((17, 19), (5, BN + 1), dim=40, dim_v=24, heads_q=3, heads_kv=3)
    yield of((17, 19), (5, BN + 1), dim=24, dim_v=40, dtype="bfloat16", causal=True)

    # memory
    for number, layout in enumerate(LAYOUTS):
        for dtype in DTYPES if not interpreted else DTYPES[number % 3 : number % 3 + 1]:
            yield of((9, 11), (BM + 1, BN - 1), layout=layout, dtype=dtype, heads_kv=2, past=(2, 1),
                     causal=number % 2 == 1)  # fmt: skip

    # one input with a gradient, or all without one of the lse; no backward at all
    for grad, d_lse in (("q", True), ("k", True), ("v", True), ("qkv", False)):
        yield of((9, 11), (0, 3), (4, 0), (7, 5), grad=grad, d_lse=d_lse, causal=True, past=(1, 1))
    yield of((9, 11), (7, 5), grad="none", d_lse=False, past=(1, 1))

    # many sequences: all of one row, and short ones of any lengths
    yield of(*[(1, 1)] * 64, heads_q=1, dim=16, dim_v=16)
    yield of(*((n % 3, 5 * n % 7) for n in range(64)), heads_q=1, dim=16, dim_v=16, causal=True)

    if not interpreted:
        # more of them than a grid's second dimension takes; long ones beside single rows
        yield of(*((n % 5, 3 * n % 7) for n in range(1000)), causal=True)
        yield of(*[(1, 1)] * 500, *[(0, 0)] * 69_000, *[(1, 1)] * 500, heads_q=1, dim=16, dim_v=16)
        # dP is 256 in every element, and tensor cores truncate it by nearly half a step of dS: that flips
        # roundings that the emulation does not
        for layout, d_lse in (("bhsd", False), ("bshd", True)):
            yield of(*[(65, 65)] * 3, heads_q=4, heads_kv=2, dim=256, dim_v=256, values="mean", layout=layout,
                     d_lse=d_lse)  # fmt: skip
        for dtype in DTYPES:
            yield of((1024, 1024), (1, 1), (3, 4099), (1025, 33), causal=True, dtype=dtype, heads_q=4)
