"""Work and traffic of an attention call: the numbers behind its arithmetic intensity."""

from __future__ import annotations


def visible_pairs(len_q: int, len_k: int, causal: bool) -> int:
    """How many (query, key) pairs a head has; causal is aligned at the bottom right."""
    if not causal:
        return len_q * len_k
    # row i sees min(Sk, max(0, i + 1 + Sk - Sq)) keys: the last row all, each row above one less
    rows = min(len_q, len_k)
    return rows * len_k - rows * (rows - 1) // 2


def attention_flops(
    batch: int,
    heads: int,
    len_q: int,
    len_k: int,
    dim: int,
    dim_v: int | None = None,
    *,
    causal: bool = False,
) -> int:
    """Floating-point operations of the two products of the forward, S = q k^T and P V.

    A multiplication and an addition count as two. Causal counts the visible pairs exactly, which for
    a square problem is half of all and half the diagonal.

    Args:
        batch, heads: B, Hq.
        len_q, len_k: Sq, Sk.
        dim, dim_v: D, Dv; equal if only one is given.
        causal: whether hidden pairs are left out.
    """
    dim_v = dim if dim_v is None else dim_v
    return batch * heads * visible_pairs(len_q, len_k, causal) * 2 * (dim + dim_v)


def attention_bytes(
    batch: int,
    heads: int,
    len_q: int,
    len_k: int,
    dim: int,
    dim_v: int | None = None,
    *,
    heads_kv: int | None = None,
    itemsize: int = 2,
    lse: bool = True,
) -> int:
    """Least bytes that the forward moves: q, k, v read once, out and the float32 lse written once.

    Args:
        batch, heads, heads_kv: B, Hq, Hkv (Hq if None).
        len_q, len_k: Sq, Sk.
        dim, dim_v: D, Dv; equal if only one is given.
        itemsize: bytes of an element of q, k, v, out.
        lse: whether the lse is written.
    """
    dim_v = dim if dim_v is None else dim_v
    heads_kv = heads if heads_kv is None else heads_kv
    queries = heads * len_q * (dim + dim_v) * itemsize
    keys = heads_kv * len_k * (dim + dim_v) * itemsize
    return batch * (queries + keys + (4 * heads * len_q if lse else 0))


def arithmetic_intensity(flops: int, bytes_moved: int) -> float:
    """Operations a byte; above the machine's ratio of the two a kernel is bound by arithmetic."""
    return flops / bytes_moved
