"""FlashAttention-2 in plain PyTorch, tile by tile, rounded where a tensor-core kernel rounds.

Forward and backward are Algorithms 1 and 2 of Dao, *FlashAttention-2* (2023, arXiv:2307.08691),
with the paper's letters. A kernel's products take operands in the dtype of the inputs and sum in
float32, so P and dS are rounded where they enter a product, and nothing else is, up to the outputs.
"""

import math
import numbers
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

INF = math.inf
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class Tiles:
    """Query rows x key rows of a tile, for each of the three passes."""

    forward: tuple[int, int] = (64, 64)
    dkdv: tuple[int, int] = (64, 64)
    dq: tuple[int, int] = (64, 64)

    def __post_init__(self) -> None:
        for name, tile in vars(self).items():
            if len(tile) != 2 or not all(isinstance(n, int) and n > 0 for n in tile):
                raise ValueError(f"tiles: {name} was {tile!r}, may be two positive integers")

    @property
    def largest(self) -> tuple[int, int]:
        """Query rows and key rows, the most of any pass."""
        passes = (self.forward, self.dkdv, self.dq)
        return max(rows for rows, _ in passes), max(keys for _, keys in passes)


DEFAULT_TILES = Tiles()


class Result(NamedTuple):
    """What a kernel has in its registers before the last rounding: float32, float64 if exact."""

    out: Tensor  # (B, Hq, Sq, Dv)
    lse: Tensor  # (B, Hq, Sq), natural logarithm
    dq: Tensor | None  # (B, Hq, Sq, D)
    dk: Tensor | None  # (B, Hkv, Sk, D)
    dv: Tensor | None  # (B, Hkv, Sk, Dv)


@torch.no_grad()
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None = None,
    d_lse: Tensor | None = None,
    *,
    causal: bool = False,
    scale: float | None = None,
    tiles: Tiles = DEFAULT_TILES,
    exact: bool = False,
    out_given: Tensor | None = None,
) -> Result:
    """Attention and its gradients as FlashAttention-2 computes them (arXiv:2307.08691).

    Args:
        q, k, v: (B, Hq, Sq, D), (B, Hkv, Sk, D), (B, Hkv, Sk, Dv), Hq a multiple of Hkv; one dtype
            of float16, bfloat16 and float32, one device, any strides. Any length may be 0.
        d_out: gradient of out, (B, Hq, Sq, Dv), in the dtype of q. None is zero.
        d_lse: gradient of lse, (B, Hq, Sq), float32. None is zero; if d_out is None too, no
            gradients are computed.
        causal: query i sees key j iff j <= i + Sk - Sq (bottom-right aligned).
        scale: any finite number, D ** -0.5 by default.
        tiles: the tile sizes of the three passes.
        exact: compute in float64 and round nothing.
        out_given: the output that an implementation stored, (B, Hq, Sq, Dv), in the dtype of q: the
            gradients then start from it instead of from the emulation's own rounded output.

    Returns:
        Result(out, lse, dq, dk, dv), contiguous; the last three None without d_out and d_lse.
        A row that sees no key has out 0, lse -inf and dq 0, and adds nothing to dk and dv.

    Raises:
        TypeError: something is not a tensor or has a wrong dtype; scale is not a real number.
        ValueError: a wrong shape or device, heads that do not divide, a scale that is not finite.
    """
    _check(q, k, v, d_out, d_lse, out_given)
    (B, Hq, Sq, D), (_, Hkv, Sk, Dv) = q.shape, v.shape
    G = Hq // Hkv
    a = _Arithmetic.of(_checked_scale(scale, D), q.dtype, exact)
    visible = _Visible(causal, Sq, Sk)

    def per_kv_head(x: Tensor, *shape: int) -> Tensor:  # [Z, ...]: one bmm does all Z = B Hkv
        return x.to(a.register).contiguous().view(B * Hkv, *shape)

    with _ieee_products():
        Q = per_kv_head(q, G, Sq, D)
        K = per_kv_head(k, Sk, D)
        V = per_kv_head(v, Sk, Dv)
        out, lse = _forward(Q, K, V, a, visible, tiles.forward)
        forward = out.view(B, Hq, Sq, Dv), lse.view(B, Hq, Sq)
        if d_out is None and d_lse is None:
            return Result(*forward, None, None, None)

        dO = torch.zeros_like(out) if d_out is None else per_kv_head(d_out, G, Sq, Dv)
        O = a.rounded(out) if out_given is None else per_kv_head(out_given, G, Sq, Dv)
        delta = (dO * O).sum(-1, keepdim=True)
        if d_lse is not None:
            delta -= per_kv_head(d_lse, G, Sq, 1)
        rows = _Rows(Q, dO, lse[..., None] * a.log2e, delta)
        dk, dv = _dk_dv(rows, K, V, a, visible, tiles.dkdv)
        dq = _dq(rows, K, V, a, visible, tiles.dq)
        backward = dq.view(B, Hq, Sq, D), dk.view(B, Hkv, Sk, D), dv.view(B, Hkv, Sk, Dv)
        return Result(*forward, *backward)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, a: "_Arithmetic", visible: "_Visible", tile: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Algorithm 1: q [Z, G, Sq, D], k [Z, Sk, D], v [Z, Sk, Dv] to out and lse [Z, G, Sq].

    The G query heads that share k and v stand below one another in a tile: BM counts all their
    rows, and the leading Z is left out of the comments on shapes.
    """
    (BM, BN), (Z, G, Sq, _), Dv = tile, q.shape, v.shape[-1]
    out = q.new_zeros(Z, G, Sq, Dv)
    lse = q.new_full((Z, G, Sq), -INF)
    c = abs(a.c)
    for i0, i1 in visible.query_tiles(BM):
        Q = q[:, :, i0:i1].flatten(1, 2)  # [BM, D]
        Q = -Q if a.scale < 0 else Q
        acc = q.new_zeros(Z, Q.shape[1], Dv)  # [BM, Dv]
        m = q.new_full((Z, Q.shape[1], 1), -INF)  # [BM, 1], of Q K^T: the scale comes later
        l = torch.zeros_like(m)  # [BM, 1]
        for j0, j1 in visible.key_tiles(BN, i1):
            hidden = visible.hidden(i0, i1, j0, j1, q.device, heads=G)  # [BM, BN]
            S = Q @ k[:, j0:j1].mT  # [BM, BN]
            if hidden is not None:
                S.masked_fill_(hidden, -INF)
            m_new = torch.maximum(m, S.amax(-1, keepdim=True))
            m_safe = m_new.masked_fill(m_new == -INF, 0)  # -inf - -inf would be NaN
            P = S.sub_(m_safe).mul_(c).exp2_()
            if hidden is not None:
                P.masked_fill_(hidden, 0)  # -inf * c is NaN where c is 0
            alpha = (m - m_safe).mul_(c).exp2_().masked_fill_(m == -INF, 0)  # so is this
            l.mul_(alpha).add_(P.sum(-1, keepdim=True))
            acc.mul_(alpha).baddbmm_(a.rounded(P), v[:, j0:j1])
            m = m_new
        out[:, :, i0:i1] = acc.div_(l).view(Z, G, i1 - i0, Dv)
        lse[:, :, i0:i1] = m.mul_(abs(a.scale)).add_(l.log_()).view(Z, G, i1 - i0)
    return out, lse


class _Rows(NamedTuple):
    """What the backward reads of each query."""

    q: Tensor  # [..., D]
    dO: Tensor  # [..., Dv]
    L2: Tensor  # [..., 1], lse in base 2
    delta: Tensor  # [..., 1], rowsum(dO * O) - d_lse


def _dk_dv(
    rows: _Rows, k: Tensor, v: Tensor, a: "_Arithmetic", visible: "_Visible", tile: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """Algorithm 2, by columns: dk and dv, the sum over a group's heads in the same accumulators."""
    BM, BN = tile
    dk, dv = torch.zeros_like(k), torch.zeros_like(v)
    for j0, j1 in visible.key_tiles(BN, visible.Sq):
        K, V = k[:, j0:j1], v[:, j0:j1]  # [BN, D], [BN, Dv]
        dK, dV = torch.zeros_like(K), torch.zeros_like(V)
        for g in range(rows.q.shape[1]):
            for i0, i1 in visible.query_tiles(BM, j0):
                R = _Rows(*(x[:, g, i0:i1] for x in rows))
                P, dS = _p_ds(R, K, V, a.c, visible.hidden(i0, i1, j0, j1, k.device))
                dV.baddbmm_(a.rounded(P).mT, R.dO)
                dK.baddbmm_(a.rounded(dS).mT, R.q)
        dk[:, j0:j1] = dK.mul_(a.scale)
        dv[:, j0:j1] = dV
    return dk, dv


def _dq(
    rows: _Rows, k: Tensor, v: Tensor, a: "_Arithmetic", visible: "_Visible", tile: tuple[int, int]
) -> Tensor:
    """Algorithm 2, by rows: dq; as in the forward, a tile holds the rows of a group's G heads."""
    (BM, BN), (Z, G, _, D) = tile, rows.q.shape
    dq = torch.zeros_like(rows.q)
    for i0, i1 in visible.query_tiles(BM):
        R = _Rows(*(x[:, :, i0:i1].flatten(1, 2) for x in rows))
        dQ = torch.zeros_like(R.q)  # [BM, D]
        for j0, j1 in visible.key_tiles(BN, i1):
            K, V = k[:, j0:j1], v[:, j0:j1]
            _, dS = _p_ds(R, K, V, a.c, visible.hidden(i0, i1, j0, j1, k.device, heads=G))
            dQ.baddbmm_(a.rounded(dS), K)
        dq[:, :, i0:i1] = dQ.mul_(a.scale).view(Z, G, i1 - i0, D)
    return dq


def _p_ds(R: _Rows, K: Tensor, V: Tensor, c: float, hidden: Tensor | None) -> tuple[Tensor, Tensor]:
    """P, computed again from lse, and dS = P (dP - delta), of one tile: [BM, BN], not rounded."""
    P = (R.q @ K.mT).mul_(c).sub_(R.L2).exp2_()
    if hidden is not None:
        P.masked_fill_(hidden, 0)
    dP = R.dO @ V.mT
    return P, dP.sub_(R.delta).mul_(P)


@dataclass(frozen=True)
class _Arithmetic:
    """The two dtypes of a kernel, and its constants, in the first of them."""

    register: torch.dtype  # of sums, results, and all that is not an operand of a product
    operand: torch.dtype
    scale: float
    log2e: float
    c: float  # scale * log2e: softmax in base 2

    @classmethod
    def of(cls, scale: float, dtype: torch.dtype, exact: bool) -> "_Arithmetic":
        register, operand = (torch.float64,) * 2 if exact else (torch.float32, dtype)

        def constant(x: float) -> float:
            return torch.tensor(x, dtype=register).item()

        scale, log2e = constant(scale), constant(math.log2(math.e))
        return cls(register, operand, scale, log2e, constant(scale * log2e))

    def rounded(self, x: Tensor) -> Tensor:
        """x as an operand: to nearest, ties to even, too large is inf."""
        return x.to(self.operand).to(self.register)


@dataclass(frozen=True)
class _Visible:
    """Which key j a query i sees: j <= i + Sk - Sq if causal, else every key."""

    causal: bool
    Sq: int
    Sk: int

    def query_tiles(self, BM: int, j: int = 0) -> Iterator[tuple[int, int]]:
        """The rows of each tile that has a query that sees key j; never rows that see no key."""
        if self.Sk == 0:
            return
        first_seeing_j = max(0, j + self.Sq - self.Sk) if self.causal else 0
        first_seeing_any = max(0, self.Sq - self.Sk) if self.causal else 0
        for i0 in range(first_seeing_j // BM * BM, self.Sq, BM):
            yield max(i0, first_seeing_any), min(i0 + BM, self.Sq)

    def key_tiles(self, BN: int, i1: int) -> Iterator[tuple[int, int]]:
        """The keys of each tile that has a key that a query before i1 sees."""
        end = min(i1 + self.Sk - self.Sq, self.Sk) if self.causal else self.Sk
        for j0 in range(0, end, BN):
            yield j0, min(j0 + BN, self.Sk)

    def hidden(
        self, i0: int, i1: int, j0: int, j1: int, device: torch.device, heads: int = 1
    ) -> Tensor | None:
        """Mask of the pairs that do not see each other, [heads BM, BN]; None if there are none."""
        last_seen_by_i0 = i0 + self.Sk - self.Sq
        if not self.causal or j1 - 1 <= last_seen_by_i0:
            return None
        mask = torch.ones(i1 - i0, j1 - j0, dtype=torch.bool, device=device)
        return mask.triu_(last_seen_by_i0 - j0 + 1).repeat(heads, 1)


@contextmanager
def _ieee_products() -> Iterator[None]:
    """No TF32 (CUDA) and no bfloat16 (CPU) inside float32 products, whatever the process allows."""
    backends = (torch.backends.cuda.matmul, torch.backends.mkldnn.matmul)  # type: ignore[attr-defined]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def _checked_scale(scale: float | None, D: int) -> float:
    if scale is None:
        return D**-0.5
    if not isinstance(scale, numbers.Real):
        raise TypeError(f"scale was {scale!r}, may be None or a real number")
    if not math.isfinite(scale):
        raise ValueError(f"scale was {scale!r}, may be any finite number")
    return float(scale)


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None,
    d_lse: Tensor | None,
    out_given: Tensor | None,
) -> None:
    _check_tensor("q", q, ("B", "Hq", "Sq", "D"), q)
    _check_tensor("k", k, (q.shape[0], "Hkv", "Sk", q.shape[3]), q)
    _check_tensor("v", v, (*k.shape[:3], "Dv"), q)
    (B, Hq, Sq, D), (_, Hkv, _, Dv) = q.shape, v.shape
    if D == 0:
        raise ValueError("q: its head dimension was 0, may be 1 or more")
    if Hkv == 0 or Hq % Hkv:
        raise ValueError(f"k has {Hkv} heads, may have a divisor of the {Hq} heads of q")
    if d_out is not None:
        _check_tensor("d_out", d_out, (B, Hq, Sq, Dv), q)
    if d_lse is not None:
        _check_tensor("d_lse", d_lse, (B, Hq, Sq), q, (torch.float32,))
    if out_given is not None:
        _check_tensor("out_given", out_given, (B, Hq, Sq, Dv), q)


def _check_tensor(
    name: str,
    x: Tensor,
    shape: tuple[int | str, ...],  # a letter stands for any length
    q: Tensor,
    dtypes: tuple[torch.dtype, ...] = (),
) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name} was {type(x).__name__}, may be a torch.Tensor")
    dtypes = dtypes or (DTYPES if x is q else (q.dtype,))
    if x.dtype not in dtypes:
        raise TypeError(f"{name}.dtype was {x.dtype}, may be {', '.join(map(str, dtypes))}")
    if x.dim() != len(shape) or any(
        isinstance(n, int) and n != size for n, size in zip(shape, x.shape, strict=True)
    ):
        wanted = ", ".join(map(str, shape))
        raise ValueError(f"{name}.shape was {tuple(x.shape)}, may be ({wanted})")
    if x.device != q.device:
        raise ValueError(f"{name}.device was {x.device}, may be {q.device}, as that of q")
