"""Cases from faults that public reports show in attention kernels, by their numbers in `field_bugs.md`.

Each is the smallest input that shows its kind of fault, written in units of the tiles of the implementation
under test where the report is about tiles. What a case cannot say (graphs, streams, caches, repetition) has
tests of its own; the table has them all.
"""

from __future__ import annotations

from itertools import product

from .cases import DTYPES, Case


def recipes(tile: tuple[int, int]) -> dict[str, list[Case]]:
    """Cases by the number of the report.

    Args:
        tile: query and key rows of the implementation's tiles.
    """
    BM, BN = tile
    some = Case(heads_q=2, heads_kv=2, len_q=BM + 1, len_k=BN + 1, d_lse=True)

    def of(**changes: object) -> Case:
        return Case(**{**vars(some), **changes})

    def ragged(cu_q: list[int], cu_k: list[int], **changes: object) -> Case:
        lengths = tuple(
            (cu_q[i + 1] - cu_q[i], cu_k[i + 1] - cu_k[i]) for i in range(len(cu_q) - 1)
        )  # fmt: skip
        return of(lengths=lengths, dim=32, dim_v=32, layout="bshd", **changes)

    found: dict[str, list[Case]] = {}

    # tails: what lies past the last key has score 0, above all the true ones; not causal, or the diagonal
    # would hide it
    found["A1"] = [
        of(len_k=len_k, values="negative", dtype=dtype)
        for len_k, dtype in zip((BN + 1, 2 * BN - 1, BN - 1), DTYPES, strict=True)
    ]
    found["A2"] = [of(values="loud"), of(values="loud", len_q=2 * BM - 1, len_k=2 * BN - 1, dtype="bfloat16")]
    found["A4"] = [of(batch=2, dtype=dtype) for dtype in DTYPES]
    found["A5"] = [of(heads_q=3, heads_kv=3, len_k=BN + 1 + BN // 2, causal=True)]
    # padding of the head dimension
    found["A7"] = [of(heads_q=4, heads_kv=4, len_q=128, len_k=128, dim=72, dim_v=72)]
    found["A8"] = [of(len_q=64, len_k=64, dim=dim, dim_v=dim, dtype="bfloat16") for dim in (72, 104)]
    # rows past the end of the scratch of the backward
    found["A10"] = [of(len_q=len_q, causal=causal) for len_q, causal in ((BM + 3, False), (2 * BM - 1, True))]
    found["A11"] = [of(len_q=32, len_k=32, dim=dim, dim_v=dim) for dim in (128, 256)]
    found["A14"] = [
        ragged([0, 40, 43, 43, 100, 117, 150], [0, 3, 80, 90, 95, 95, 133], causal=causal)
        for causal in (False, True)
    ]

    # alignment, loop bounds, rows that see no key
    found["B1"] = [of(len_q=5, len_k=70, causal=True, dtype=dtype) for dtype in DTYPES]
    found["B2"] = [of(len_q=1, len_k=BN + 1, causal=True), of(len_q=3, len_k=2 * BN + 7, causal=True)]
    found["B4"] = [
        ragged([0, 76, 110, 256], [0, 1, 2, 3], causal=True, values="large"),
        of(len_q=70, len_k=5, causal=True, values="large"),
    ]
    found["B5"] = [of(len_q=70, len_k=5, causal=True, dtype=dtype) for dtype in DTYPES]
    found["B7"] = [
        of(len_q=3 * BM, len_k=BN // 2, causal=True),  # whole tiles of rows that see nothing
        of(len_q=BM, len_k=0),
    ]
    found["B8"] = [of(len_q=64, len_k=64, causal=causal) for causal in (False, True)]
    found["B11"] = [of(batch=2, causal=True, len_q=BM + 1, len_k=BM + 1)]
    found["B13"] = [of(causal=True, len_q=n, len_k=n) for n in (1, BM, BM + 1)]

    # ragged batches
    found["C1"] = [
        ragged([0, 0, 33, 33], [0, 20, 40, 90], heads_q=4, heads_kv=1, causal=causal)
        for causal in (False, True)
    ]
    found["C2"] = [ragged([0, 5, 5, 9], [0, 7, 12, 12], causal=causal) for causal in (False, True)]
    found["C4"] = [of(lengths=((15, 15), (35, 35), (47, 47)), dim=100, dim_v=100, layout="bshd")]
    found["C5"] = [
        of(lengths=((15, 15), (18, 18)), past=(7, 7), layout="bshd", dtype=dtype, causal=True)
        for dtype in DTYPES
    ]
    found["C8"] = [of(lengths=((17, 20), (40, 33), (5, 50)), values="loud", layout="bshd")]
    found["C11"] = [
        of(batch=0), of(len_q=0), of(len_k=0),
        of(lengths=(), layout="bshd"), of(lengths=((0, 9), (0, 2)), layout="bshd"),
        of(lengths=((9, 0), (2, 0)), layout="bshd"),
    ]  # fmt: skip

    # memory
    found["D1"] = [of(batch=2, heads_q=3, heads_kv=3, layout="gradient", dtype=dtype) for dtype in DTYPES]
    found["D2"] = [of(layout="expanded"), of(layout="sliced")]
    found["D4"] = [
        of(heads_q=8, heads_kv=8, len_q=1, len_k=len_k, dim=64, dim_v=64, layout="expanded")
        for len_k in (33, BN + 1)
    ]
    found["D5"] = [of(batch=2, layout="sliced", causal=True, len_k=BN + 1, dtype="bfloat16")]
    found["D7"] = [of(batch=2, layout="packed", heads_q=4, heads_kv=2)]

    # numerics
    found["F1"] = [
        of(len_q=1, len_k=1, scale=1e10, dtype="bfloat16", dim=64, dim_v=64, grad="none", d_lse=False),
        of(values="exact", len_q=BM + 1, len_k=2 * BN + 1),
    ]
    found["F2"] = [
        of(values="very-negative", len_q=33, len_k=len_k, dim=64, dim_v=64) for len_k in (1, 33)
    ] + [of(values="very-negative", len_q=BM + 1, len_k=BN + 1, dim=64, dim_v=64, causal=True)]
    found["F4"] = [
        of(len_q=128, len_k=128, dim=32, dim_v=32, dtype="float32", causal=causal) for causal in (True, False)
    ]
    found["F5"] = found["F4"][:1]
    found["F7"] = [
        of(batch=2, heads_q=16, heads_kv=2, len_q=17, len_k=19, dim=256, dim_v=256, values="outliers",
           dtype="bfloat16")
    ]  # fmt: skip
    found["F8"] = [of(values="mean", dtype="bfloat16", dim=64, dim_v=64)]
    found["F10"] = [of(values="near-tied", len_q=65, len_k=65, dtype=dtype) for dtype in DTYPES]

    # the lse
    found["G1"] = [of(len_q=1, len_k=1, dtype=dtype) for dtype in DTYPES]
    found["G2"] = [ragged([0, 9, 20, 33], [0, 12, 12, 40], causal=causal) for causal in (False, True)]

    # groups of heads, the backward
    found["H1"] = [
        of(heads_q=heads_q, heads_kv=heads_kv, len_q=20, len_k=23)
        for heads_q, heads_kv in ((6, 1), (6, 2), (6, 3), (5, 1), (10, 2))
    ]
    found["H2"] = [
        of(heads_kv=1, len_q=37, len_k=37, dim=dim, dim_v=dim_v) for dim, dim_v in ((16, 32), (32, 16))
    ]
    found["H4"] = [of(heads_q=8, heads_kv=1, len_q=200, len_k=40, values="mean", dtype="bfloat16")]
    found["H10"] = [
        of(scale=scale, len_q=33, len_k=40, causal=causal)
        for scale, causal in product((1.0, 0.5, 0.0, -0.3), (False, True))
    ]
    found["M10"] = [
        of(batch=1, heads_q=1, heads_kv=1, len_q=1, len_k=1),
        of(batch=2, heads_q=1, heads_kv=1, len_q=1, len_k=5),
        of(heads_q=2, heads_kv=1, len_q=5, len_k=1),
        of(heads_q=1, heads_kv=1, lengths=((1, 1),), layout="bshd"),
    ]
    return found
