"""Attention that others have written, by name: what `--impl` takes beside a callable.

    triton                                      this project's own kernels, the default
    pytorch                                     the definition in PyTorch, in float32; needs no GPU
    sdpa-flash -efficient -cudnn -math          PyTorch's scaled_dot_product_attention
    flex                                        PyTorch's FlexAttention
    flash-attn  flash-attn-4  xformers          packages of these names, if they are installed
    emulation                                   one of the suite's own references

What each claims is what its authors document.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..implementations import EVERY_CASE, OWN, Implementation, ImplementationError, native_path
from . import emulated, flex, packages, plain, sdpa
from .sdpa import REFUSED

__all__ = ["BUILT_IN", "EMULATION", "NAMES", "REFUSED", "TRITON", "available", "load"]

EMULATION = "emulation"


@dataclass(frozen=True)
class _Entry:
    """How an implementation is loaded, and what it needs.

    Attributes:
        load: makes it, given its name.
        package, module: what has to be installed, and what is imported of it; empty if nothing.
        device: the only one that it runs on; empty if it runs on any.
    """

    load: Callable[[str], Implementation]
    package: str = ""
    module: str = ""
    device: str = ""


def _plain(name: str) -> Implementation:
    claims = replace(
        EVERY_CASE, batch_invariant=False
    )  # how a batch of products is computed is PyTorch's affair
    return Implementation(name, plain.attention, claims, native_path, varlen=plain.attention_varlen)


_ENTRIES = {
    "pytorch": _Entry(_plain),
    **{name: _Entry(sdpa.load, device="cuda") for name in sdpa.BACKENDS},
    "sdpa-math": _Entry(sdpa.load),
    "flex": _Entry(flex.load, device="cuda"),
    "flash-attn": _Entry(packages.flash_attn, "flash_attn", "flash_attn", "cuda"),
    "flash-attn-4": _Entry(packages.flash_attn_4, "flash_attn", "flash_attn.cute", "cuda"),
    "xformers": _Entry(packages.xformers, "xformers", "xformers.ops", "cuda"),
    EMULATION: _Entry(emulated.load, device="cpu"),
}

NAMES = tuple(_ENTRIES)
"""What is not this project's own."""

BUILT_IN = (OWN, *NAMES)
TRITON = frozenset({OWN, "flex"})
"""Those whose code Triton generates, for another architecture too if it is told so."""


def load(name: str) -> Implementation:
    """The implementation of a name of `NAMES`.

    Raises:
        ImplementationError: if it needs a package that is not there, or cannot be imported.
    """
    entry = _ENTRIES[name]
    if missing := _missing(entry):
        raise ImplementationError(f"--impl is {name!r}, which {missing}")
    return entry.load(name)


def available(name: str, require_gpu: bool = False) -> str:
    """Why an implementation of `BUILT_IN` cannot run on this machine; empty if it can.

    Args:
        name: of the implementation.
        require_gpu: whether nothing may run on the CPU.
    """
    if name == OWN:
        return ""
    entry = _ENTRIES[name]
    if missing := _missing(entry):
        return missing
    if entry.device == "cuda" and not torch.cuda.is_available():
        return "needs a GPU"
    if entry.device == "cuda" and os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        return "needs a GPU, and Triton interprets here"
    if entry.device == "cpu" and require_gpu:
        return "runs on the CPU only, and a GPU is required"
    return ""


def _missing(entry: _Entry) -> str:
    """What of the entry's package is not there; empty if all is."""
    if not entry.package:
        return ""
    try:
        if importlib.util.find_spec(entry.package) is None:
            return f"needs the package {entry.package}, which is not installed"
        importlib.import_module(entry.module)
    except (Exception, SystemExit) as error:  # compiled for another torch, no driver, ...
        first = (str(error).splitlines() or [""])[0]
        return f"needs {entry.module}, and importing it failed: {type(error).__name__}: {first}"
    return ""
