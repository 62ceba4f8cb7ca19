"""How attention functions are called elsewhere, and what makes the native convention of it.

    native              f(q, k, v, *, causal, scale, return_lse)                            (B, H, S, D)
    sdpa                f(q, k, v, attn_mask, dropout_p, is_causal, scale, enable_gqa)      (B, H, S, D)
    flash_attn          f(q, k, v, dropout_p, softmax_scale, causal, return_attn_probs)     (B, S, H, D)
    flash_attn_varlen   f(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, ...the same)
                                                                                            (total, H, D)

A keyword is passed if the signature names it, or if it is not the default and the signature takes any: so a
function need not have all of them. Tensors are handed over as views; what a function returns is not copied
either, so that gradients flow through, and a wrong shape is for the judge to see.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import Tensor

from .implementations import Claims

Attention = Callable[..., Any]

CONVENTIONS: tuple[str, ...] = ("native", "sdpa", "flash_attn", "flash_attn_varlen")

LAYOUT = {"flash_attn": "bshd", "flash_attn_varlen": "bshd"}
"""The memory that a convention's contiguous tensors have, in the words of `cases.LAYOUTS`; else "bhsd"."""

ALIGNMENT = {"sdpa": "top-left"}
"""Where a convention's causal mask is aligned; else "bottom-right"."""

DEFAULTS = {
    "attn_mask": None,
    "dropout_p": 0.0,
    "is_causal": False,
    "causal": False,
    "scale": None,
    "softmax_scale": None,
    "return_attn_probs": False,
    "return_lse": False,
}
"""What leaving a keyword out means."""


NAMES = {
    "scaled_dot_product_attention": "sdpa",
    "flash_attn_func": "flash_attn",
    "flash_attn_varlen_func": "flash_attn_varlen",
}
"""The functions that conventions are from."""


class Signature:
    """What keywords a function takes.

    Attributes:
        named: those that it names.
        any: whether it takes any other, or nobody can say, as of a builtin.
    """

    def __init__(self, function: Attention) -> None:
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):
            parameters = None
        by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
        self.named = [p.name for p in parameters or () if p.kind in by_name]
        self.any = parameters is None or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters)

    def __contains__(self, name: str) -> bool:
        return self.any or name in self.named

    def word(self, *names: str) -> str:
        """By which of some names it calls a thing: the first that it names, or could take."""
        return next((n for n in names if n in self.named), next((n for n in names if n in self), ""))

    def keywords(self, **wanted: Any) -> dict[str, Any]:
        """What of these is to be passed."""
        return {n: v for n, v in wanted.items() if n in self.named or (n and v != DEFAULTS[n])}


def missing(function: Attention, convention: str, claims: Claims) -> str:
    """Which keywords of a convention a function would have to take for the claims; empty if it takes all."""
    takes = Signature(function)
    causal = "is_causal" if convention == "sdpa" else "causal"
    scale = ("softmax_scale", "scale") if convention.startswith("flash_attn") else ("scale",)
    needs = {
        causal: causal in takes or "causal" not in claims.masks,
        scale[0]: bool(takes.word(*scale)) or claims.default_scale,
    }
    if convention == "native":
        needs = {name: name in takes for name in ("causal", "scale", "return_lse")}
    if convention == "flash_attn_varlen":
        needs |= {name: name in takes for name in ("cu_seqlens_q", "cu_seqlens_k")}
    return ", ".join(name for name, taken in needs.items() if not taken)


def guess(function: Attention) -> str | None:
    """The convention that a signature looks like, or a name where there is none; None if that is none."""
    named = set(Signature(function).named)
    for convention, words in (
        ("flash_attn_varlen", {"cu_seqlens_q"}),
        ("sdpa", {"is_causal"}),
        ("sdpa", {"attn_mask"}),
        ("native", {"causal", "scale", "return_lse"}),
        ("flash_attn", {"softmax_scale"}),
        ("flash_attn", {"return_attn_probs"}),
    ):
        if words <= named:
            return convention
    return NAMES.get(getattr(function, "__name__", "")) if not named else None


def native(
    function: Attention, convention: str, claims: Claims, base2: bool = False
) -> tuple[Attention, Attention | None]:
    """A function of a convention as a native one, and as one for ragged batches if it takes those.

    Args:
        function: of the convention.
        convention: of `CONVENTIONS`.
        claims: what it is used for.
        base2: its lse is a logarithm to the base 2.
    """
    match convention:
        case "native":
            return (_natural(function) if base2 else function), None
        case "sdpa":
            return _sdpa(function), None
        case "flash_attn":
            dense = _flash_attn(function, claims)
            return (_natural(dense) if base2 else dense), None
        case _:
            ragged = _flash_attn_varlen(function, claims)
            ragged = _natural(ragged) if base2 else ragged
            return _equal_sequences(ragged), ragged


# ---------------------------------------------------------------- one adapter each


def _sdpa(function: Attention) -> Attention:
    takes = Signature(function)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
    ) -> Any:
        options = takes.keywords(attn_mask=None, dropout_p=0.0, is_causal=causal, scale=scale)
        if "enable_gqa" in takes and q.shape[1] != k.shape[1]:
            options["enable_gqa"] = True
        return function(q, k, v, **options)

    return attention


def _flash_attn(function: Attention, claims: Claims) -> Attention:
    options = _flash_attn_options(function, claims)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool
    ) -> Any:
        returned = function(*(t.transpose(1, 2) for t in (q, k, v)), **options(causal, scale, return_lse))
        out, lse = _results(returned)
        out = out.transpose(1, 2) if _is_tensor(out, 4) else out
        return (out, _of_dead_rows(lse)) if return_lse else out

    return attention


def _flash_attn_varlen(function: Attention, claims: Claims) -> Attention:
    options, takes = _flash_attn_options(function, claims), Signature(function)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
        max_seqlen_q: int, max_seqlen_k: int, *, causal: bool, scale: float | None, return_lse: bool,
    ) -> Any:  # fmt: skip
        where = {
            "cu_seqlens_q": cu_seqlens_q,
            "cu_seqlens_k": cu_seqlens_k,
            "max_seqlen_q": max_seqlen_q,
            "max_seqlen_k": max_seqlen_k,
        }
        where = {name: value for name, value in where.items() if name in takes}
        out, lse = _results(function(q, k, v, **where, **options(causal, scale, return_lse)))
        return (out, _of_dead_rows(lse)) if return_lse else out

    return attention


def _equal_sequences(ragged: Attention) -> Attention:
    """A dense batch as a ragged one of equally long sequences; views, if tensors lie as (B, S, H, D)."""

    def attention(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        batch, longest = len(q), (q.shape[2], k.shape[2])
        rows = [t.transpose(1, 2).reshape(-1, *t.shape[1::2]) for t in (q, k, v)]
        begin = torch.arange(batch + 1, dtype=torch.int32, device=q.device)
        returned = ragged(*rows, *(begin * length for length in longest), *longest, **options)
        out, lse = _results(returned)
        if _is_tensor(out, 3):
            out = out.unflatten(0, (batch, longest[0])).transpose(1, 2)
        if _is_tensor(lse, 2):
            lse = lse.unflatten(1, (batch, longest[0])).transpose(0, 1)
        return (out, lse) if options["return_lse"] else out

    return attention


def _natural(function: Attention) -> Attention:
    """The same with an lse in natural logarithm, rounded once."""

    def attention(*tensors: Any, return_lse: bool, **options: Any) -> Any:
        returned = function(*tensors, return_lse=return_lse, **options)
        out, lse = _results(returned)
        if not return_lse or not isinstance(lse, Tensor):
            return returned
        return out, (lse.double() * math.log(2)).to(lse.dtype)

    return attention


# ---------------------------------------------------------------- what they share


def _flash_attn_options(function: Attention, claims: Claims) -> Callable[..., dict[str, Any]]:
    """The keywords of a call. One that always returns its lse has no keyword for it."""
    takes = Signature(function)
    scale_word = takes.word("softmax_scale", "scale")
    lse_word = takes.word("return_attn_probs", "return_lse")

    def options(causal: bool, scale: float | None, return_lse: bool) -> dict[str, Any]:
        of_call = {"dropout_p": 0.0, "causal": causal, scale_word: scale, lse_word: return_lse}
        found = takes.keywords(**of_call)
        if claims.deterministic_backward and "deterministic" in takes.named:
            found["deterministic"] = True
        return found

    return options


def _of_dead_rows(lse: Any) -> Any:
    """An lse with -inf where FlashAttention has +inf, its mark of a row that sees no key."""
    return torch.where(lse == math.inf, -lse, lse) if isinstance(lse, Tensor) else lse


def _results(returned: Any) -> tuple[Any, Any]:
    """out and lse of what was returned; None for what was not."""
    if not isinstance(returned, tuple | list):
        return returned, None
    some = [*returned, None, None]
    return some[0], some[1]


def _is_tensor(x: Any, ndim: int) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and x.ndim == ndim
