"""Implementations under test: where they come from and what they claim."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reference.budget import Rounding
from reference.emulation import Tiles

from .cases import DTYPES, Case

OWN = "triton"
"""The default: this project's own kernels."""


OURS = Rounding()
"""Rounding where our own kernels do."""


class ImplementationError(Exception):
    """An `--impl` that cannot be used: what was given, and what it may be."""


@dataclass(frozen=True)
class Claims:
    """What an implementation says that it does; each claim is proved, the rest is not tested.

    The defaults are what is assumed of a function about which nothing is said.

    Attributes:
        dtypes: names.
        devices: of "cpu", "cuda".
        smallest_dim, largest_dim: head dimensions.
        largest_scale: of the scores, in magnitude; no implementation is asked for what float32 cannot hold.
        positive_scale: the scale must be greater than 0.
        dims_multiple_of: of which D and Dv are multiples.
        equal_dims: D and Dv must be equal.
        gqa: Hq may be a multiple of Hkv.
        cross_lengths: Sq and Sk may differ.
        causal_alignment: which key the first query sees, if causal and Sq and Sk differ: "bottom-right" (the
            last query sees the last key) or "top-left" (the first query sees the first key). Cases are of the
            former.
        dead_rows: a query may see no key.
        empty: B, Sq or Sk may be 0.
        backward: it is differentiable.
        lse: it returns the lse, in natural logarithm.
        lse_grad: gradients flow through the lse.
        strided: inputs need not be contiguous; those of a ragged batch are as (total, H, D).
        ragged: it takes ragged batches, by a function of their own.
        deterministic: the forward gives the same bits in every run, whatever memory holds beside the inputs.
        deterministic_backward: so do the gradients.
        rounding: where it rounds.
    """

    dtypes: tuple[str, ...] = ("float16", "float32")
    devices: tuple[str, ...] = ("cpu", "cuda")
    smallest_dim: int = 16
    largest_dim: int = 256
    largest_scale: float = torch.finfo(torch.float32).max
    positive_scale: bool = False
    dims_multiple_of: int = 1
    equal_dims: bool = True
    gqa: bool = False
    cross_lengths: bool = False
    causal_alignment: str = "bottom-right"
    dead_rows: bool = False
    empty: bool = False
    backward: bool = False
    lse: bool = False
    lse_grad: bool = False
    strided: bool = False
    ragged: bool = False
    deterministic: bool = False
    deterministic_backward: bool = False
    rounding: Rounding = OURS

    def repeatable(self, tensor: str) -> bool:
        """Whether a result ("out", "lse", "dq", ...) is claimed to be the same bit for bit in each run."""
        return self.deterministic_backward if tensor.startswith("d") else self.deterministic

    def narrowed(self, case: Case) -> Case:
        """The case without the gradients that are not claimed: its forward is worth testing."""
        grad = case.grad if self.backward else "none"
        return replace(case, grad=grad, d_lse=case.d_lse and self.lse_grad and grad != "none")

    def refusal(self, case: Case) -> str:
        """Why a case lies outside of the claims; empty if it lies inside."""
        contiguous = "bshd" if case.ragged else "bhsd"
        square = all(len_q == len_k for len_q, len_k in case.pairs)
        needs = {
            "ragged batches": not case.ragged or self.ragged,
            f"dtype {case.dtype}": case.dtype in self.dtypes,
            f"head dimension {case.dim}": self.smallest_dim <= case.dim <= self.largest_dim,
            f"head dimension {case.dim_v}": self.smallest_dim <= case.dim_v <= self.largest_dim,
            f"head dimensions not multiples of {self.dims_multiple_of}": not (
                case.dim % self.dims_multiple_of or case.dim_v % self.dims_multiple_of
            ),
            f"a scale beyond {self.largest_scale:.5g}": abs(case.effective_scale) <= self.largest_scale,
            "a scale of 0 or less": case.effective_scale > 0 or not self.positive_scale,
            "Dv != D": case.dim == case.dim_v or not self.equal_dims,
            "several query heads a KV head": case.heads_q == case.heads_kv or self.gqa,
            "Sq != Sk": square or self.cross_lengths,
            "a causal mask aligned at the bottom right": (
                square or not case.causal or self.causal_alignment == "bottom-right" or not self.cross_lengths
            ),
            "rows that see no key": not case.dead_rows or self.dead_rows,
            "empty inputs": not case.empty or self.empty,
            "a backward": not case.backward or self.backward,
            "gradients through the lse": not case.d_lse or self.lse_grad,
            "inputs that are not contiguous": case.layout == contiguous or self.strided,
        }
        return ", ".join(what for what, claimed in needs.items() if not claimed)


EVERY_DENSE_CASE = Claims(
    dtypes=DTYPES,
    equal_dims=False,
    gqa=True,
    cross_lengths=True,
    dead_rows=True,
    empty=True,
    backward=True,
    lse=True,
    lse_grad=True,
    strided=True,
    deterministic=True,
    deterministic_backward=True,
)


@dataclass(frozen=True)
class Implementation:
    """An attention function of the native convention, that of `kernels.flash_attention`.

    Attributes:
        name: as given to --impl.
        function: takes q, k, v and, by keyword, causal, scale, return_lse.
        claims: what is tested.
        tiles: the tiles it uses for a case on a device, if known: it is then also compared with the
            emulation.
        path: names the code that runs on a device ("sm90", "sm80-override", "interpreter", ...).
        varlen: the function for ragged batches, of the convention of `kernels.flash_attention_varlen`:
            takes q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k and the same keywords.
    """

    name: str
    function: Callable[..., Any]
    claims: Claims
    path: Callable[[torch.device], str]
    tiles: Callable[[Case, torch.device], Tiles] | None = None
    varlen: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if self.claims.ragged and self.varlen is None:
            raise ValueError(f"{self.name} claims ragged batches, and no function for them is given")


def load(spec: str) -> Implementation:
    """The implementation that `--impl` names.

    Args:
        spec: "triton", a name of `backends`, "module:callable" or "path/file.py:callable" (from the current
            folder).

    Raises:
        ImplementationError: if there is no such thing.
    """
    if spec == OWN:
        return _own()
    from . import backends  # which are made of what is defined here

    if spec in backends.NAMES:
        return backends.load(spec)
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ImplementationError(
            f"--impl is {spec!r}; it may be {OWN!r}, 'module:callable' or 'path/file.py:callable'"
        )
    module = _module(source, spec)
    try:
        function = getattr(module, name, None)
    except (Exception, SystemExit) as error:  # of the module's own __getattr__
        raise ImplementationError(
            f"--impl is {spec!r}: asking {source} for {name!r} failed: {type(error).__name__}: {error}"
        ) from error
    if isinstance(function, type):
        raise ImplementationError(
            f"--impl is {spec!r}: {name!r} is a class; give an instance of it or a function"
        )
    if not callable(function):
        was = "not there" if function is None else f"a {type(function).__name__}"
        raise ImplementationError(f"--impl is {spec!r}: {name!r} is {was}; it must be a callable")
    return Implementation(spec, function, Claims(), _foreign_path)


def _module(source: str, spec: str) -> Any:
    try:
        if not source.endswith(".py"):
            sys.path.insert(0, str(Path.cwd()))
            return importlib.import_module(source)
        path = Path(source).expanduser().resolve()
        if not path.is_file():
            raise ImplementationError(f"--impl is {spec!r}: there is no file {path}")
        name = f"implementation_under_test_{path.stem}"
        sys.path.insert(0, str(path.parent))  # it may import its neighbours
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module  # @triton.jit looks its source up through here
        found.loader.exec_module(module)
        return module
    except ImplementationError:
        raise
    except (Exception, SystemExit) as error:  # a script may end with sys.exit
        raise ImplementationError(
            f"--impl is {spec!r}: importing {source} failed: {type(error).__name__}: {error}"
        ) from error


def _foreign_path(device: torch.device) -> str:
    override = os.environ.get("TRITON_OVERRIDE_ARCH")  # reaches Triton kernels, whosever they are
    return f"{override}-override" if override and device.type != "cpu" else native_path(device)


def native_path(device: torch.device) -> str:
    """What runs on a device, whatever Triton was told."""
    if device.type == "cpu":
        return "cpu"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def _own() -> Implementation:
    from kernels import effective_architecture, flash_attention, flash_attention_varlen
    from kernels.checks import LARGEST_SCALE
    from kernels.tiles import choose_tiles

    def path(device: torch.device) -> str:
        arch = effective_architecture(device)
        return f"{arch.name}-override" if arch.overridden else arch.name

    def tiles(case: Case, device: torch.device) -> Tiles:
        itemsize = getattr(torch, case.dtype).itemsize
        chosen = choose_tiles(effective_architecture(device), case.dim, case.dim_v, itemsize)
        return Tiles(**{
            kernel: (tile.BM, tile.BN)
            for kernel, tile in (
                ("forward", chosen.forward), ("dkdv", chosen.dkdv), ("dq", chosen.dq)
            )
        })  # fmt: skip

    claims = replace(EVERY_DENSE_CASE, largest_scale=LARGEST_SCALE, ragged=True)
    return Implementation(OWN, flash_attention, claims, path, tiles, flash_attention_varlen)


def environment(path: str) -> Mapping[str, str]:
    """The variables that a replay needs to reach the same code path."""
    if path == "interpreter":
        return {"TRITON_INTERPRET": "1"}
    if path.endswith("-override"):
        return {"TRITON_OVERRIDE_ARCH": path.removesuffix("-override")}
    return {}
