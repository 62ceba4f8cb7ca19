"""A right implementation in plain PyTorch, to be spoiled: what the tests of execution share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from reports.records import Verdict
from tests.cases import Case
from tests.execution import REPEATS, Execution
from tests.implementations import Claims, Implementation

CPU = torch.device("cpu")
INFINITE, PLAIN = REPEATS
INPUTS = ("q", "k", "v", "d_out", "d_lse")


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float | None, return_lse: bool) -> Any:
    """Differentiable attention in float32 by its definition, for square cases."""
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    s = scale * q.float() @ k.float().mT
    if causal:
        s = s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool).triu(1), float("-inf"))
    out = (s.softmax(-1) @ v.float()).to(q.dtype)
    return (out, s.logsumexp(-1)) if return_lse else out


CLAIMS = Claims(backward=True, lse=True, lse_grad=True)
CASE = Case(heads_q=2, heads_kv=2, len_q=20, len_k=20, d_lse=True, dtype="float32")
FORWARD = replace(CASE, grad="none", d_lse=False)
DETERMINISTIC = replace(CLAIMS, strided=True, deterministic=True, deterministic_backward=True)


def red(execution: Execution) -> dict[tuple[str, str], Verdict]:
    return {(v.tensor, v.rule): v for v in execution.verdicts if not v.held}


def spoiled(spoil: Callable[[Tensor], Any], which: str = "out") -> Implementation:
    """Right attention, of which something is then written over in place."""

    def function(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Any:
        if which in ("dq", "dk", "dv"):
            spoiled_input = {"dq": q, "dk": k, "dv": v}[which]
            if spoiled_input.requires_grad:
                spoiled_input.register_hook(lambda gradient: _with(spoil, gradient))
        found = attention(q, k, v, **options)
        out, lse = found if options["return_lse"] else (found, None)
        if which == "out":
            out = _with(spoil, out)
        if lse is None:
            return out
        return out, _with(spoil, lse) if which == "lse" else lse

    return Implementation("mine.py:attention", function, CLAIMS, lambda device: "cpu")


def _with(spoil: Callable[[Tensor], Any], x: Tensor) -> Tensor:
    x = x.clone()
    spoil(x)
    return x


def beside(t: Tensor, past_last: int = 1) -> Tensor:
    """An element past a contiguous tensor's last."""
    return t.as_strided((1,), (1,), int(t.storage_offset()) + t.numel() - 1 + past_last)
