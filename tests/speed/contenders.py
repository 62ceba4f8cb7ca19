"""Who is timed: called as its users would call it, and known by the kernels that ran.

What a user prepares once, and no call has to do again, is prepared before (FlexAttention's compilation and
block mask, the choice of SDPA's backend); what each call has to do is part of it (delta, zeroing,
conversions). Tensors lie as the contender knows them as contiguous.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from reference.budget import Rounding

from .. import backends
from ..implementations import OWN as OWN
from ..implementations import Claims, Implementation, load
from .problems import BACKWARD, FORWARD, Problem, Tensors

NAIVE, FLASH = "sdpa-math", "sdpa-flash"
DEFAULT = "sdpa"
"""scaled_dot_product_attention with the backend that PyTorch chooses."""

Call = Callable[[], Any]


class AbsentError(Exception):
    """Why a contender has no figure for a problem."""


@dataclass(frozen=True)
class Kernels:
    """Which kernels a step must have run: regular expressions, each found in some kernel's name.

    Attributes:
        needed: all of these, by step.
        forbidden: and none of these, in any step.
    """

    needed: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    forbidden: tuple[str, ...] = ()

    def missing(self, step: str, ran: list[str]) -> str:
        """What is not as it should be; empty if all is."""
        for pattern in self.needed.get(step, ()):
            if not any(re.search(pattern, name) for name in ran):
                return f"no kernel like {pattern!r} ran"
        for pattern in self.forbidden:
            for name in ran:
                if re.search(pattern, name):
                    return f"a kernel of something else ran: {name[:80]}"
        return ""


@dataclass(frozen=True)
class Contender:
    """Attributes:
    name: as --impl has it, or `DEFAULT`.
    claims: what it can be asked for, and how it rounds.
    prepare: makes the forward call of a problem with these tensors.
    path: of the code that runs ("sm90", "sm80-override").
    kernels: that must have run.
    chosen: is entered around each call, outside of what is timed.
    """

    name: str
    claims: Claims
    prepare: Callable[[Problem, Tensors], Call]
    path: str
    kernels: Kernels = Kernels()
    chosen: Callable[[], AbstractContextManager[Any]] = nullcontext

    def refusal(self, problem: Problem) -> str:
        """Why its claims leave the problem out; empty if they do not. Those that are known by name may take
        more than they promise: they are asked."""
        if self.name in (*OTHERS, DEFAULT):
            return ""
        return self.claims.refusal(self.claims.narrowed(problem.case))

    @property
    def layout(self) -> str:
        """Of the tensors of a dense batch."""
        return self.claims.contiguous if self.claims.contiguous in ("bhsd", "bshd") else "bhsd"


FUSED = r"flash_fwd|flash_bwd|fmha_cutlass|flash_fprop|flash_bprop|flex_attention"

KERNELS = {
    OWN: Kernels({
        FORWARD: (r"^attention_forward",),
        BACKWARD: (r"^attention_delta", r"^attention_backward_dkdv", r"^attention_backward_dq"),
    }),
    NAIVE: Kernels({FORWARD: (r"(?i)softmax",), BACKWARD: (r"(?i)softmax\w*backward",)}, (FUSED,)),
    FLASH: Kernels({FORWARD: (r"flash_fwd",), BACKWARD: (r"flash_bwd",)}, (r"fmha_cutlass|cudnn",)),
    "sdpa-efficient": Kernels({FORWARD: (r"fmha_cutlassF",), BACKWARD: (r"fmha_cutlassB",)}),
    "sdpa-cudnn": Kernels({FORWARD: (r"cudnn\w*sdpa\w*fprop",), BACKWARD: (r"cudnn\w*sdpa\w*bprop",)}),
    "flex": Kernels(
        {FORWARD: (r"^triton_tem_fused",), BACKWARD: (r"^triton_tem_fused\w*backward",)},
        (r"(?i)softmax|gemm|cutlass",),
    ),
    "flash-attn": Kernels({FORWARD: (r"flash_fwd",), BACKWARD: (r"flash_bwd",)}, (r"pytorch_flash",)),
    "flash-attn-4": Kernels({FORWARD: (r"(?i)flash\w*fwd|flash\w*forward",)}, (r"(?i)softmax",)),
    "xformers": Kernels({FORWARD: (r"fmha_cutlassF|flash_fwd",), BACKWARD: (r"fmha_cutlassB|flash_bwd",)}),
}  # fmt: skip
"""By contender. Of an implementation by --impl nobody knows; those that ran are kept with its figures."""

OTHERS = tuple(name for name in (
    NAIVE, FLASH, "sdpa-efficient", "sdpa-cudnn", "flex", "flash-attn", "flash-attn-4", "xformers",
))  # fmt: skip
"""With whom the subject is compared, where they are installed."""


def contender(name: str | None, manifest: str | None = None) -> Contender:
    """The contender of a name: of `OTHERS`, `DEFAULT`, or as the suite's --impl; None: the manifest names it.

    Raises:
        AbsentError: if it is not installed, or cannot run here.
        ImplementationError: if there is no such thing.
    """
    if name in backends.BUILT_IN and manifest is None and (why := backends.available(name)):
        raise AbsentError(why)
    under_test = load(NAIVE if name == DEFAULT else name, manifest)
    path = under_test.path(torch.device("cuda", torch.cuda.current_device()))
    kernels = KERNELS.get(under_test.name, Kernels())
    if name == DEFAULT:
        widest = Rounding(heads_rounded_before_group_sum=True, p_rounded_before_ds=True)
        claims = replace(under_test.claims, rounding=widest)  # of whichever it chooses
        return Contender(DEFAULT, claims, functools.partial(_sdpa, None), path)
    if name in SDPA:
        chosen = functools.partial(sdpa_kernel, SDPA[name])
        return Contender(name, under_test.claims, functools.partial(_sdpa, name), path, kernels, chosen)
    if name == "flex":
        return Contender(name, under_test.claims, _flex, path, kernels, _compiled_for_good)
    native = functools.partial(_native, under_test)
    return Contender(under_test.name, under_test.claims, native, path, kernels)


SDPA = {
    NAIVE: SDPBackend.MATH,
    FLASH: SDPBackend.FLASH_ATTENTION,
    "sdpa-efficient": SDPBackend.EFFICIENT_ATTENTION,
    "sdpa-cudnn": SDPBackend.CUDNN_ATTENTION,
}


# ---------------------------------------------------------------- how each is called


def _native(under_test: Implementation, problem: Problem, x: Tensors) -> Call:
    options = {"causal": problem.causal, "scale": None, "return_lse": False}
    if x.offsets is None:
        return lambda: under_test.function(x.q, x.k, x.v, **options)
    ragged = under_test.varlen
    if ragged is None:
        raise AbsentError("it has no function for ragged batches")
    where = (x.offsets, x.offsets, x.longest, x.longest)
    return lambda: ragged(x.q, x.k, x.v, *where, **options)


def _sdpa(name: str | None, problem: Problem, x: Tensors) -> Call:
    if x.offsets is not None:
        if name != FLASH:
            raise AbsentError("it takes no ragged batches")
        return _varlen_of_torch(problem, x)
    options: dict[str, Any] = {"is_causal": problem.causal}
    if problem.heads_q != problem.heads_kv:
        options["enable_gqa"] = True
    return lambda: scaled_dot_product_attention(x.q, x.k, x.v, **options)


def _varlen_of_torch(problem: Problem, x: Tensors) -> Call:
    """PyTorch's own FlashAttention-2 of ragged batches."""
    try:
        varlen_attn = importlib.import_module("torch.nn.attention.varlen").varlen_attn
    except (ImportError, AttributeError):
        raise AbsentError(f"PyTorch {torch.__version__} has no torch.nn.attention.varlen") from None
    options: dict[str, Any] = {"window_size": (-1, 0) if problem.causal else (-1, -1)}
    if problem.heads_q != problem.heads_kv:
        import inspect

        if "enable_gqa" not in inspect.signature(varlen_attn).parameters:
            raise AbsentError(f"varlen_attn of PyTorch {torch.__version__} takes no grouped heads")
        options["enable_gqa"] = True
    where = (x.offsets, x.offsets, x.longest, x.longest)
    return lambda: varlen_attn(x.q, x.k, x.v, *where, **options)


def _flex(problem: Problem, x: Tensors) -> Call:
    if x.offsets is not None:
        raise AbsentError("it takes no ragged batches")
    from torch.nn.attention.flex_attention import create_block_mask

    mask = None
    if problem.causal:
        length = problem.length
        mask = create_block_mask(_visible, None, None, length, length, device=x.q.device)
    gqa = problem.heads_q != problem.heads_kv
    return lambda: _compiled()(x.q, x.k, x.v, mask, gqa)


def _visible(b: Any, h: Any, i: Any, j: Any) -> Any:
    return j <= i


@functools.cache
def _compiled() -> Callable[..., Any]:
    """FlexAttention, compiled for each shape: what is compiled for any shape takes a third longer."""
    from torch.nn.attention.flex_attention import flex_attention

    def flex(q: Any, k: Any, v: Any, mask: Any, gqa: bool) -> Any:
        return flex_attention(q, k, v, block_mask=mask, enable_gqa=gqa)

    return torch.compile(flex, dynamic=False, fullgraph=True)


@contextmanager
def _compiled_for_good() -> Iterator[None]:
    """After a few recompilations dynamo would run it uncompiled without a word; and what it keeps for the
    backward is needed again."""
    import torch._dynamo.config
    import torch._functorch.config

    with (
        torch._dynamo.config.patch(recompile_limit=100_000, accumulated_recompile_limit=100_000),
        torch._functorch.config.patch(donated_buffer=False),
    ):
        yield
