"""Which tile a program works on.

Dense: batch entries, heads and tiles in a row. Ragged: a table lists the tiles of all sequences (see
`ragged`), and each stands for itself in all heads. A sequence is then a batch entry that begins at its
first row: the stride of the batch is that of a row.
"""

import triton
import triton.language as tl

from .ragged import listed_tile


@triton.jit
def query_tile(Tiles, Hq, Sq, Sk, BM: tl.constexpr, RAGGED: tl.constexpr):
    """Batch entry of q and of k, head, first row of the tile, Sq, Sk: the tile of query rows of a program."""
    program = tl.program_id(0)
    if RAGGED:
        start_m, first_q, n_q, first_k, n_k = listed_tile(Tiles, program // Hq)
        return first_q, first_k, (program % Hq).to(tl.int64), start_m, n_q, n_k
    else:
        n_tiles = tl.cdiv(Sq, BM)
        batch_head = program // n_tiles
        b = (batch_head // Hq).to(tl.int64)
        h = (batch_head % Hq).to(tl.int64)
        start_m = (n_tiles - 1 - program % n_tiles) * BM  # causal: the tiles with the most keys first
        return b, b, h, start_m, Sq, Sk


@triton.jit
def key_tile(Tiles, Hkv, Sq, Sk, BN: tl.constexpr, RAGGED: tl.constexpr):
    """Batch entry of q and of k, KV head, first key of the tile, Sq, Sk: the tile of keys of a program."""
    program = tl.program_id(0)
    if RAGGED:
        start_n, first_k, n_k, first_q, n_q = listed_tile(Tiles, program // Hkv)
        return first_q, first_k, (program % Hkv).to(tl.int64), start_n, n_q, n_k
    else:
        n_tiles = tl.cdiv(Sk, BN)
        batch_head = program // n_tiles
        b = (batch_head // Hkv).to(tl.int64)
        h_kv = (batch_head % Hkv).to(tl.int64)
        start_n = program % n_tiles * BN  # causal: the first keys have the most rows
        return b, b, h_kv, start_n, Sq, Sk
