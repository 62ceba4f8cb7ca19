"""Implementations under test: where they come from and what they claim."""

from __future__ import annotations

import importlib
import importlib.util
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import torch

from reference.budget import Rounding
from reference.emulation import Tiles

from .cases import DTYPES, Case

MASKS: tuple[str, ...] = ("full", "causal")
"""What a function may be asked for: nothing, and a causal mask."""

OWN = "triton"
"""The default: this project's own kernels."""


OURS = Rounding()
"""Rounding where our own kernels do."""


LONGEST_SQUARE = 1024
"""Rows of a side that the other is made as long as, where Sq and Sk may not differ."""


class ImplementationError(Exception):
    """An `--impl` that cannot be used: what was given, and what it may be."""


@dataclass(frozen=True)
class Claims:
    """What an implementation says that it does; each claim is proved, the rest is not tested.

    The defaults are what is assumed of a function about which nothing is said.

    Attributes:
        dtypes: names.
        devices: of "cpu", "cuda".
        masks: of "full" (none) and "causal".
        smallest_dim, largest_dim: head dimensions.
        dims_multiple_of: of which D and Dv are multiples.
        dims: the only head dimensions, where that is not all of these.
        equal_dims: D and Dv must be equal.
        largest_scale: of the scores, in magnitude; no implementation is asked for what float32 cannot hold.
        positive_scale: the scale must be greater than 0.
        default_scale: the scale must be D ** -0.5.
        gqa: Hq may be a multiple of Hkv.
        cross_lengths: Sq and Sk may differ.
        fewest_keys: of a dense problem or a sequence that has any.
        causal_alignment: which key the first query sees, if causal and Sq and Sk differ: "bottom-right" (the
            last query sees the last key) or "top-left" (the first query sees the first key). Cases are of the
            former.
        dead_rows: a query may see no key.
        empty: B, Sq or Sk may be 0.
        backward: it is differentiable.
        lse: it returns the lse, in natural logarithm.
        lse_grad: gradients flow through the lse.
        contiguous: the layout of a dense batch that its kernels know as contiguous; that of a ragged one is
            (total, H, D).
        strided: inputs need not be contiguous.
        ragged: it takes ragged batches, by a function of their own.
        past_rows: a ragged batch may have rows past its last sequence.
        deterministic: the forward gives the same bits in every run, whatever memory holds beside the inputs.
        deterministic_backward: so do the gradients.
        batch_invariant: what gives the same bits in every run also does so wherever in the batch, among the
            heads and in memory it lies.
        rounding: where it rounds.
    """

    dtypes: tuple[str, ...] = ("float16", "float32")
    devices: tuple[str, ...] = ("cpu", "cuda")
    masks: tuple[str, ...] = MASKS
    smallest_dim: int = 16
    largest_dim: int = 256
    dims_multiple_of: int = 1
    dims: tuple[int, ...] | None = None
    equal_dims: bool = True
    largest_scale: float = torch.finfo(torch.float32).max
    positive_scale: bool = False
    default_scale: bool = False
    gqa: bool = False
    cross_lengths: bool = False
    fewest_keys: int = 1
    causal_alignment: str = "bottom-right"
    dead_rows: bool = False
    empty: bool = False
    backward: bool = False
    lse: bool = False
    lse_grad: bool = False
    contiguous: str = "bhsd"
    strided: bool = False
    ragged: bool = False
    past_rows: bool = True
    deterministic: bool = False
    deterministic_backward: bool = False
    batch_invariant: bool = False
    rounding: Rounding = OURS

    def repeatable(self, tensor: str) -> bool:
        """Whether a result ("out", "lse", "dq", ...) is claimed to be the same bit for bit in each run."""
        return self.deterministic_backward if tensor.startswith("d") else self.deterministic

    def invariant(self, tensor: str) -> bool:
        """Whether a result is claimed to have the same bits wherever it is computed."""
        return self.batch_invariant and self.repeatable(tensor)

    def takes_keys(self, keys: int) -> bool:
        """Whether so many keys are claimed; none are `empty`."""
        return keys == 0 or keys >= self.fewest_keys

    def takes_dim(self, dim: int) -> bool:
        """Whether a head dimension is within the range, or among the only ones; multiple or not."""
        return self.smallest_dim <= dim <= self.largest_dim and (self.dims is None or dim in self.dims)

    def takes_scale(self, scale: float | None) -> bool:
        """Whether a scale is claimed; None is the default."""
        if scale is None:
            return True
        in_range = abs(scale) <= self.largest_scale and (scale > 0 or not self.positive_scale)
        return in_range and not self.default_scale

    def layout(self, ragged: bool) -> str:
        """The layout of inputs that are contiguous."""
        return "bshd" if ragged else self.contiguous

    def layout_of_d_lse(self, layout: str) -> str:
        """The layout of the lse's gradient, (B, H, S) wherever heads lie: where inputs must be contiguous, so
        is this."""
        return layout if self.strided else "bhsd"

    def narrowed(self, case: Case) -> Case:
        """The case without the gradients that are not claimed: its forward is worth testing.

        Where inputs must be contiguous, contiguous ones are so as this implementation understands it.
        """
        grad = case.grad if self.backward else "none"
        layout = case.layout
        if layout == "bhsd" and not case.ragged and not self.strided:
            layout = self.contiguous
        return replace(case, grad=grad, d_lse=case.d_lse and self.lse_grad and grad != "none", layout=layout)

    def nearest(self, case: Case, of_any: bool = False) -> Case:
        """A listed case with what is claimed in the place of what is not: all else about it is worth testing.

        Args:
            case: listed for whatever reason.
            of_any: whether it is changed in what it may be listed for: its mask, heads, lengths and odd head
                dimensions. Otherwise only its dtype, and head dimensions that are powers of two, are.
        """
        dtypes = [dtype for dtype in DTYPES if dtype in self.dtypes]
        changes: dict[str, Any] = {"dtype": case.dtype if case.dtype in dtypes else dtypes[0]}
        for name in ("dim", "dim_v"):
            dim = getattr(case, name)
            if of_any or dim.bit_count() == 1:
                changes[name] = self._nearest_dim(dim)
        if of_any and self.equal_dims:
            changes["dim_v"] = changes["dim"]
        if of_any and not self.gqa:
            changes["heads_kv"] = case.heads_q
        if of_any and len(self.masks) == 1:
            changes["causal"] = "causal" in self.masks
        causal = changes.get("causal", case.causal)
        crosses = self.cross_lengths and not (causal and self.causal_alignment == "top-left")
        if of_any and not (crosses or case.ragged or case.empty):
            lengths = case.len_q, case.len_k
            length = max(lengths) if max(lengths) <= LONGEST_SQUARE else min(lengths)
            length = max(length, self.fewest_keys)
            changes |= {"len_q": length, "len_k": length}
        elif of_any and not (case.ragged or self.takes_keys(case.len_k)):
            changes["len_k"] = self.fewest_keys
        return replace(case, **changes)

    def _nearest_dim(self, dim: int) -> int:
        step = self.dims_multiple_of
        least, most = -(-self.smallest_dim // step), self.largest_dim // step
        claimed = self.dims or [n * step for n in range(least, most + 1)]
        return min(claimed, key=lambda n: (abs(n - dim), n))

    def refusal(self, case: Case) -> str:
        """Why a case lies outside of the claims; empty if it lies inside."""
        square = all(len_q == len_k for len_q, len_k in case.pairs)
        needs = {
            "ragged batches": not case.ragged or self.ragged,
            "rows past the last sequence": not any(case.past) or self.past_rows,
            f"dtype {case.dtype}": case.dtype in self.dtypes,
            "a causal mask": not case.causal or "causal" in self.masks,
            "calls without a mask": case.causal or "full" in self.masks,
            f"head dimension {case.dim}": self.takes_dim(case.dim),
            f"head dimension {case.dim_v}": self.takes_dim(case.dim_v),
            f"head dimensions not multiples of {self.dims_multiple_of}": not (
                case.dim % self.dims_multiple_of or case.dim_v % self.dims_multiple_of
            ),
            "a scale other than the default": case.scale is None or not self.default_scale,
            f"a scale beyond {self.largest_scale:.5g}": abs(case.effective_scale) <= self.largest_scale,
            "a scale of 0 or less": case.effective_scale > 0 or not self.positive_scale,
            "Dv != D": case.dim == case.dim_v or not self.equal_dims,
            "several query heads a KV head": case.heads_q == case.heads_kv or self.gqa,
            "Sq != Sk": square or self.cross_lengths,
            f"fewer than {self.fewest_keys} keys": all(self.takes_keys(len_k) for _, len_k in case.pairs),
            "a causal mask aligned at the bottom right": (
                square or not case.causal or self.causal_alignment == "bottom-right" or not self.cross_lengths
            ),
            "rows that see no key": not case.dead_rows or self.dead_rows,
            "empty inputs": not case.empty or self.empty,
            "a backward": not case.backward or self.backward,
            "gradients through the lse": not case.d_lse or self.lse_grad,
            "inputs that are not contiguous": case.layout == self.layout(case.ragged) or self.strided,
        }
        return ", ".join(what for what, claimed in needs.items() if not claimed)

    def unclaimed(self) -> list[str]:
        """What of all that the suite can test is not claimed, hence not tested, for a reader."""
        widest = Claims()
        range_of_dims = [self.smallest_dim, self.largest_dim]
        if self.dims is not None:
            dims = "head dimensions other than " + ", ".join(map(str, self.dims))
        elif self.smallest_dim > widest.smallest_dim or self.largest_dim < widest.largest_dim:
            dims = "head dimensions beyond " + " to ".join(map(str, range_of_dims))
        else:
            dims = ""
        said = {
            **{dtype: dtype in self.dtypes for dtype in DTYPES},
            "a GPU": "cuda" in self.devices,
            "causal masks": "causal" in self.masks,
            "calls without a mask": "full" in self.masks,
            "gradients": self.backward,
            "the lse": self.lse,
            "gradients through the lse": self.lse_grad or not (self.backward and self.lse),
            "several query heads a KV head": self.gqa,
            "Sq != Sk": self.cross_lengths,
            f"fewer than {self.fewest_keys} keys": self.fewest_keys == 1,
            "Sq != Sk under a causal mask aligned at the bottom right": (
                not self.cross_lengths or self.causal_alignment == "bottom-right"
            ),
            dims: not dims,
            f"head dimensions not multiples of {self.dims_multiple_of}": (
                self.dims_multiple_of == 1 or self.dims is not None
            ),
            "Dv != D": not self.equal_dims,
            "scales other than the default": not self.default_scale,
            "a scale of 0 or less": not self.positive_scale or self.default_scale,
            "rows that see no key": self.dead_rows,
            "empty inputs": self.empty,
            "inputs that are not contiguous": self.strided,
            "ragged batches": self.ragged,
            "rows past the last sequence": self.past_rows or not self.ragged,
            "the same bits in every run": self.deterministic,
            "the same bits of gradients in every run": self.deterministic_backward or not self.backward,
            "the same bits wherever in the batch": self.batch_invariant or not self.deterministic,
        }
        return [what for what, claimed in said.items() if not claimed]


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
    batch_invariant=True,
)
EVERY_CASE = replace(EVERY_DENSE_CASE, ragged=True)


@dataclass(frozen=True)
class Implementation:
    """An attention function of the native convention, that of `kernels.flash_attention`.

    Attributes:
        name: as given to --impl, or by its manifest.
        function: takes q, k, v and, by keyword, causal, scale, return_lse.
        claims: what is tested.
        tiles: the tiles it uses for a case on a device, if known: it is then also compared with the
            emulation.
        path: names the code that runs on a device ("sm90", "sm80-override", "interpreter", ...).
        varlen: the function for ragged batches, of the convention of `kernels.flash_attention_varlen`:
            takes q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k and the same keywords.
        tile: query and key rows of the largest tiles that it uses, for the choice of cases; a guess if not
            known.
        arguments: of the command line, which name it; None: --impl and its name.
        manifest: the file that says what it claims, as it was given; empty if there is none.
        not_here: which of these claims cannot be proved here, and why; they are not among `claims`.
    """

    name: str
    function: Callable[..., Any]
    claims: Claims
    path: Callable[[torch.device], str]
    tiles: Callable[[Case, torch.device], Tiles] | None = None
    varlen: Callable[..., Any] | None = None
    tile: tuple[int, int] = (64, 64)
    arguments: tuple[str, ...] | None = None
    manifest: str = ""
    not_here: str = ""

    def __post_init__(self) -> None:
        if self.claims.ragged and self.varlen is None:
            raise ValueError(f"{self.name} claims ragged batches, and no function for them is given")

    @property
    def options(self) -> tuple[str, ...]:
        """The words of the command line that name it."""
        if self.arguments is not None:
            return self.arguments
        return () if self.name == OWN else ("--impl", self.name)

    def untested(self) -> str:
        """What is not claimed, hence not tested, and how more is claimed; empty if everything is."""
        left = self.claims.unclaimed()
        if not left:
            return ""
        from . import backends

        text = f"not claimed, hence not tested: {', '.join(left)}"
        if self.not_here:
            return f"{text}; {self.not_here}"
        if self.manifest:
            return f"{text}; {self.manifest} may claim more"
        if self.name in (OWN, *backends.NAMES):
            return text
        return f"{text}; a manifest claims more: {init_command(self.name)}"


def load(spec: str | None, manifest: str | None = None) -> Implementation:
    """The implementation that `--impl` and `--manifest` name.

    Args:
        spec: "triton", a name of `backends`, "module:callable" or "path/file.py:callable" (from the current
            folder); None: the manifest names it.
        manifest: the file that says what it claims (`manifest`), if it is not what is assumed.

    Raises:
        ImplementationError: if there is no such thing.
    """
    if manifest is not None:
        from .manifest import load_manifest  # which makes what is defined here

        return load_manifest(manifest, spec)
    if spec is None or spec == OWN:
        return _own()
    from . import backends  # the same

    if spec in backends.NAMES:
        return backends.load(spec)
    function = callable_of(spec)
    from . import conventions

    if missing := conventions.missing(function, "native", Claims()):
        looks = conventions.guess(function)
        like = f", and looks like the convention {looks!r}" if looks not in (None, "native") else ""
        raise ImplementationError(
            f"--impl is {spec!r}: it does not take {missing}{like}. A manifest says how it is called:"
            f" {init_command(spec)}"
        )
    return Implementation(spec, function, Claims(), foreign_path)


def init_command(spec: str) -> str:
    """What writes a manifest to begin with."""
    return shlex.join(["python", "-m", "tests.implementations", "--init", spec])


def callable_of(spec: str, given_by: str = "--impl", folder: Path | None = None) -> Callable[..., Any]:
    """The callable that "module:callable" or "path/file.py:callable" names.

    Args:
        spec: what was given.
        given_by: what it was given by, for messages.
        folder: from which paths and modules are looked up; the current one if None.

    Raises:
        ImplementationError: if there is no such thing, or it cannot be imported.
    """
    folder = Path.cwd() if folder is None else folder
    given = f"{given_by} is {spec!r}"
    source, _, name = spec.rpartition(":")
    if not source or not name:
        own = f"{OWN!r}, " if given_by == "--impl" else ""
        raise ImplementationError(f"{given}; it may be {own}'module:callable' or 'path/file.py:callable'")
    module = _module(source, given, folder)
    try:
        function = getattr(module, name, None)
    except (Exception, SystemExit) as error:  # of the module's own __getattr__
        raise ImplementationError(
            f"{given}: asking {source} for {name!r} failed: {type(error).__name__}: {error}"
        ) from error
    if isinstance(function, type):
        raise ImplementationError(f"{given}: {name!r} is a class; give an instance of it or a function")
    if not callable(function):
        was = "not there" if function is None else f"a {type(function).__name__}"
        raise ImplementationError(f"{given}: {name!r} is {was}; it must be a callable")
    return function


def _ended(status: int) -> NoReturn:
    raise SystemExit(status)


def _module(source: str, given: str, folder: Path) -> Any:
    leave = os._exit
    os._exit = _ended  # a module that ends this process would leave it with status 0
    try:
        if not source.endswith(".py"):
            sys.path.insert(0, str(folder))
            return importlib.import_module(source)
        path = (folder / Path(source).expanduser()).resolve()
        if not path.is_file():
            raise ImplementationError(f"{given}: there is no file {path}")
        name = f"implementation_under_test_{path.stem}"
        loaded = sys.modules.get(name)
        if loaded is not None and loaded.__file__ == str(path):  # two functions of one file
            return loaded
        sys.path.insert(0, str(path.parent))  # it may import its neighbours
        found = importlib.util.spec_from_file_location(name, path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        sys.modules[name] = module  # @triton.jit looks its source up through here
        try:
            found.loader.exec_module(module)
        except BaseException:
            del sys.modules[name]
            raise
        return module
    except ImplementationError:
        raise
    except (Exception, SystemExit) as error:  # a script may end with sys.exit
        raise ImplementationError(
            f"{given}: importing {source} failed: {type(error).__name__}: {error}"
        ) from error
    finally:
        os._exit = leave


NO_BFLOAT16 = "bfloat16 is claimed, and wrong in Triton's interpreter: it needs a GPU"


def bfloat16_is_wrong_here() -> bool:
    """Whether Triton's interpreter runs kernels that are not ours: it takes the bits of bfloat16 for whole
    numbers, which ours know. To be asked when the modules that have the kernels are loaded.
    """
    return bool(foreign_kernels())


def foreign_kernels() -> list[str]:
    """The loaded modules that have kernels which Triton interprets, but for ours, our tests' and Triton's."""
    import triton

    if not triton.knobs.runtime.interpret:
        return []
    from triton.runtime.interpreter import InterpretedFunction

    return [
        name
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] not in ("kernels", "tests", "torch", "triton")
        and any(isinstance(x, InterpretedFunction) for x in list(getattr(module, "__dict__", {}).values()))
    ]


def foreign_path(device: torch.device) -> str:
    """What runs on a device, if it may be anybody's kernel."""
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

    claims = replace(EVERY_CASE, largest_scale=LARGEST_SCALE)
    return Implementation(OWN, flash_attention, claims, path, tiles, flash_attention_varlen)


def environment(path: str) -> Mapping[str, str]:
    """The variables that a replay needs to reach the same code path."""
    if path == "interpreter":
        return {"TRITON_INTERPRET": "1"}
    if path.endswith("-override"):
        return {"TRITON_OVERRIDE_ARCH": path.removesuffix("-override")}
    return {}


if __name__ == "__main__":
    from tests.manifest import main  # this module by its own name, not a second time as __main__

    sys.exit(main(sys.argv[1:]))
