"""The numbers of a case, from its seed: the same on every platform and version.

Integers come from a counter through splitmix64 (Steele, Lea, Flood 2014); floats are sums of their
16-bit lanes, scaled. Only integer arithmetic and single IEEE operations are used, no library's
generator, logarithm or cosine.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from .cases import Case
from .layouts import EXPANDED

Array = NDArray[np.float64]

TENSORS = ("q", "k", "v", "d_out", "d_lse")


@dataclass(frozen=True)
class Inputs:
    """A case's tensors on the CPU, contiguous, rounded to its dtype (d_lse: float32).

    q (B, Hq, Sq, D), k (B, Hkv, Sk, D), v (B, Hkv, Sk, Dv), d_out (B, Hq, Sq, Dv), d_lse (B, Hq, Sq);
    d_out is None without a backward, d_lse unless the case has one.

    Of a ragged batch the sequences lie behind one another along the rows: q (1, Hq, total_q, D),
    k (1, Hkv, total_k, D), ..., d_lse (1, Hq, total_q). Rows past the last sequence are NaN.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    d_out: torch.Tensor | None
    d_lse: torch.Tensor | None


def make_inputs(case: Case) -> Inputs:
    """The inputs of a case."""
    return _ragged(case) if case.ragged else _dense(case)


def _ragged(case: Case) -> Inputs:
    """The inputs of each sequence behind one another, then NaN: nothing may read what lies past them."""
    dtype = getattr(torch, case.dtype)
    past = {
        name: torch.full(shape, math.nan, dtype=torch.float32 if name == "d_lse" else dtype)
        for name, shape in _shapes(case, *case.past).items()
    }
    parts = [
        *(vars(_dense(sequence)) for sequence in case.sequences() if sequence.len_q or sequence.len_k),
        past,
    ]

    def joined(name: str) -> torch.Tensor:
        return torch.cat([part[name] for part in parts], dim=2)

    return Inputs(
        q=joined("q"),
        k=joined("k"),
        v=joined("v"),
        d_out=joined("d_out") if case.backward else None,
        d_lse=joined("d_lse") if case.d_lse else None,
    )


def _dense(case: Case) -> Inputs:
    x = dict(zip(("q", "k", "v", "d_out"), _regime(case), strict=True))
    if case.layout == "expanded":  # one head's memory serves all heads
        for name in EXPANDED:
            x[name] = np.broadcast_to(x[name][:, :1], x[name].shape)
    dtype = getattr(torch, case.dtype)
    tensors = {name: torch.from_numpy(np.array(t)).to(dtype) for name, t in x.items()}
    d_lse = None
    if case.d_lse:
        draw = _integers if case.values == "exact" else _normal
        shape = _shapes(case, case.len_q, case.len_k)["d_lse"]
        d_lse = torch.from_numpy(draw(case, "d_lse", shape)).float()
    return Inputs(
        q=tensors["q"],
        k=tensors["k"],
        v=tensors["v"],
        d_out=tensors["d_out"] if case.backward else None,
        d_lse=d_lse,
    )


# ---------------------------------------------------------------- integers and floats from a counter


def _hash(case: Case, tensor: str, salt: int, size: int) -> NDArray[np.uint64]:
    """splitmix64 of a counter; a stream of its own for each seed, tensor and salt."""
    stream = ((case.seed * 8 + TENSORS.index(tensor)) * 16 + salt) * 0x9E3779B97F4A7C15 % 2**64
    with np.errstate(over="ignore"):
        x = np.arange(size, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95) + np.uint64(stream)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return x ^ (x >> np.uint64(31))


def _normal(case: Case, tensor: str, shape: tuple[int, ...], salt: int = 0) -> Array:
    """Nearly N(0, 1): the sum of eight uniform numbers (Irwin-Hall), at most 4.9 in magnitude."""
    size = int(np.prod(shape))
    total = np.zeros(size, np.int64)
    for part in range(2):
        bits = _hash(case, tensor, 2 * salt + part, size)
        for lane in range(4):
            total += ((bits >> np.uint64(16 * lane)) & np.uint64(0xFFFF)).astype(np.int64)
    centred = (2 * total - 8 * 65535).astype(np.float64) / 131072.0
    return (centred * 1.224744871391589).reshape(shape)  # sqrt(12 / 8)


def _uniform(case: Case, tensor: str, shape: tuple[int, ...], salt: int = 0) -> Array:
    """[0, 1), multiples of 2**-32."""
    size = int(np.prod(shape))
    bits = _hash(case, tensor, 2 * salt, size) >> np.uint64(32)
    return (bits.astype(np.float64) / 2.0**32).reshape(shape)


def _integers(case: Case, tensor: str, shape: tuple[int, ...]) -> Array:
    """-2 to 2."""
    return np.floor(5 * _uniform(case, tensor, shape, salt=5)) - 2


# ---------------------------------------------------------------- regimes


def _shapes(case: Case, len_q: int, len_k: int) -> dict[str, tuple[int, ...]]:
    """Of all tensors, with so many rows; a ragged batch is one entry."""
    B, Hq, Hkv = 1 if case.ragged else case.batch, case.heads_q, case.heads_kv
    return {
        "q": (B, Hq, len_q, case.dim),
        "k": (B, Hkv, len_k, case.dim),
        "v": (B, Hkv, len_k, case.dim_v),
        "d_out": (B, Hq, len_q, case.dim_v),
        "d_lse": (B, Hq, len_q),
    }


def _regime(case: Case) -> tuple[Array, Array, Array, Array]:
    shapes = _shapes(case, case.len_q, case.len_k)
    q, k, v, d_out = (_normal(case, name, shapes[name]) for name in ("q", "k", "v", "d_out"))
    Sk, D = case.len_k, case.dim
    match case.values:
        case "normal":
            pass
        case "large":
            q, k, v, d_out = 4 * q, 4 * k, 8 * v, 8 * d_out
        case "tiny":
            q, k, v, d_out = q / 16, k / 16, v / 4096, d_out / 4096
        case "outliers":
            q, k, v, d_out = (
                x + 10 * _normal(case, n, x.shape, 2) * (_uniform(case, n, x.shape, 3) < 0.001)
                for n, x in zip(TENSORS, (q, k, v, d_out), strict=False)
            )
        case "equal":
            k = np.repeat(k[:, :, :1], Sk, axis=2)
        case "near-tied":
            q, k = 3 * q, 3 * k
            k[:, :, 1::2] = k[:, :, : Sk // 2 * 2 : 2] * (1 + 2.0**-10)
        case "negative":
            q, k = np.abs(q) + 0.25, -np.abs(k) - 0.25
        case "very-negative":
            # k a few steps of the dtype above a constant, so that the softmax is not one-hot
            size = np.round(math.sqrt(60000 / math.sqrt(D)))
            step = {"float16": 2.0**-4, "bfloat16": 0.5, "float32": 2.0**-6}[case.dtype]
            changed = _uniform(case, "k", k.shape, 3) < 2 / D
            q, k = np.full_like(q, size), -size + step * changed
        case "growing":
            direction = np.sign(_uniform(case, "q", (D,), 4) - 0.5)
            ramp = np.arange(Sk)[:, None] / max(Sk, 1)
            q = 0.5 * q + direction
            k = 0.5 * k + 16 * ramp * direction / math.sqrt(D)
        case "mean":
            v, d_out = 1 + 0.1 * v, 1 + 0.1 * d_out
        case "loud":
            for x in (k, v, d_out):
                x[:, 1::2] *= 50
        case "exact":
            q, k = _one_hot(case)
            v, d_out = (_integers(case, n, x.shape) for n, x in (("v", v), ("d_out", d_out)))
    return q, k, v, d_out


def _one_hot(case: Case) -> tuple[Array, Array]:
    """Queries that each pick one visible key: its score leads all others by 104 or more, P is 1 or 0.

    Keys are the binary codes of their numbers, each bit as +-amplitude and as often as D allows; a query
    is the code of its key. A key that differs in one bit scores 2 copies amplitude**2 |scale| less. No
    larger than that needs: the backward recomputes P from the lse, whose last bits must not matter.
    """
    Sq, Sk, D = case.len_q, case.len_k, case.dim
    scale = abs(case.effective_scale)
    shapes = _shapes(case, Sq, Sk)
    q, k = np.zeros(shapes["q"]), np.zeros(shapes["k"])
    if Sk == 0 or scale == 0:
        return q, k
    width = min(max(1, (Sk - 1).bit_length()), D)
    amplitude = math.ceil(math.sqrt(52 / (scale * (D // width))))
    bits = np.arange(Sk)[:, None] >> (np.arange(D) % width) & 1  # [Sk, D]
    codes = amplitude * (2.0 * bits - 1)
    k[:] = codes
    last = np.minimum(np.arange(Sq) + Sk - Sq, Sk - 1) if case.causal else np.full(Sq, Sk - 1)
    pick = np.floor(_uniform(case, "q", q.shape[:3], 4) * (np.maximum(last, 0) + 1)).astype(int)
    q[:] = np.sign(case.effective_scale) * codes[pick]
    return q, k
