"""The three references agree with each other, and know nothing of each other.

The oracle multiplies whole matrices in NumPy, the emulation goes tile by tile, SDPA leaves the
gradients to autograd. A mistake in one of them, or a mask built differently, shows here.
"""

import ast
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference import emulation, oracle, sdpa
from reference.emulation import Tiles

TENSORS = ("out", "lse", "dq", "dk", "dv")
SMALL = Tiles(forward=(16, 16), dkdv=(16, 16), dq=(16, 16))


@dataclass(frozen=True)
class Case:
    lengths: tuple[int, int]  # Sq, Sk
    causal: bool = False
    heads: tuple[int, int] = (2, 2)  # Hq, Hkv
    dims: tuple[int, int] = (16, 16)  # D, Dv
    batch: int = 1
    scale: float | None = None
    given: tuple[str, ...] = ("d_out", "d_lse")
    tiles: Tiles = SMALL
    why: str = ""

    def __str__(self) -> str:
        mask = "causal" if self.causal else "full"
        return f"{self.why}{self.lengths[0]} queries, {self.lengths[1]} keys, {mask}"

    def tensors(self) -> dict[str, Any]:
        """Normal values in float32, each a (B, S, H, ·) tensor with its heads moved in front."""
        (sq, sk), (hq, hkv), (d, dv) = self.lengths, self.heads, self.dims
        shapes: dict[str, tuple[int, ...]] = {
            "q": (sq, hq, d),
            "k": (sk, hkv, d),
            "v": (sk, hkv, dv),
            "d_out": (sq, hq, dv),
            "d_lse": (sq, hq),
        }
        draw = torch.Generator().manual_seed(0)
        made = {n: torch.randn(self.batch, *s, generator=draw) for n, s in shapes.items()}
        wanted = ("q", "k", "v", *self.given)
        return {n: x.transpose(1, 2) for n, x in made.items() if n in wanted}


def cases() -> Iterator[Case]:
    # Nothing, one, and just below, at and above one tile and several; dead rows where Sq > Sk.
    lengths = (0, 1, 15, 16, 17, 33, 65)
    for sq, sk, causal in product(lengths, lengths, (False, True)):
        yield Case((sq, sk), causal)
    # One at a time, over lengths with a rest in every tile, with more keys and with dead rows.
    for (sq, sk), causal in product(((33, 65), (65, 33)), (False, True)):
        here: dict[str, Any] = {"lengths": (sq, sk), "causal": causal}
        yield Case(**here, heads=(6, 2), why="grouped heads: ")
        yield Case(**here, heads=(4, 1), why="one KV head: ")
        yield Case(**here, dims=(16, 40), why="wider values: ")
        yield Case(**here, dims=(48, 8), why="narrower values: ")
        yield Case(**here, dims=(23, 23), why="odd head dimension: ")
        yield Case(**here, dims=(1, 1), why="head dimension 1: ")
        yield Case(**here, given=("d_out",), why="no d_lse: ")
        yield Case(**here, given=("d_lse",), why="no d_out: ")
        yield Case(**here, given=(), why="forward only: ")
        yield Case(**here, scale=0.0, why="scale 0: ")
        yield Case(**here, scale=-0.3, why="negative scale: ")
        yield Case(**here, scale=10.0, why="scale 10: ")
        yield Case(**here, scale=-10.0, why="scale -10: ")
        yield Case(**here, batch=0, why="no batch: ")
        yield Case(**here, batch=3, heads=(4, 2), dims=(8, 12), why="batch of 3, grouped: ")
        yield Case(**here, tiles=Tiles((32, 16), (16, 64), (64, 16)), why="unequal tiles: ")


def magnitudes(x: dict[str, Tensor], scale: float | None) -> dict[str, float]:
    """An upper bound on the largest single term in the sums of each tensor.

    An element can cancel to nothing, so its own value is no measure of what rounding did to it; the
    terms that were added are. All follow from p <= 1: out adds p·v, dv adds p·dO, and dq and dk add
    dS·k and dS·q, where |dS| <= 2 max|dO·v| + |dlse|. lse is a score plus a logarithm.
    """
    largest = {n: float(t.abs().max()) if t.numel() else 0.0 for n, t in x.items()}
    d, (sk, dim_v) = x["q"].shape[-1], x["v"].shape[-2:]
    alpha = abs(d**-0.5 if scale is None else scale)
    d_out = largest.get("d_out", 0.0)
    d_s = 2 * dim_v * d_out * largest["v"] + largest.get("d_lse", 0.0)
    return {
        "out": largest["v"],
        "lse": alpha * d * largest["q"] * largest["k"] + math.log(max(sk, 1)),
        "dq": alpha * d_s * largest["k"],
        "dk": alpha * d_s * largest["q"],
        "dv": d_out,
    }


def by_reference(case: Case) -> dict[str, list[NDArray[np.float64] | None]]:
    """Each reference's out, lse, dq, dk, dv in float64."""
    x = case.tensors()
    options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}
    exact = oracle.attention(**{n: t.double().numpy() for n, t in x.items()}, **options)
    results = {
        "emulation": emulation.attention(**x, **options, tiles=case.tiles, exact=True),
        "sdpa": sdpa.attention(**x, **options),
    }
    parts = [getattr(exact, name) for name in TENSORS]
    found = {"oracle": [None if part is None else part.value for part in parts]}
    for name, result in results.items():
        assert all(t is None or t.dtype == torch.float64 for t in result)
        found[name] = [None if t is None else t.numpy() for t in result]
    return found


@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_the_three_references_agree_in_float64(case: Case) -> None:
    """B10: each has a mask of its own, and SDPA's `is_causal`, aligned at the top left, is none of them."""
    size = magnitudes(case.tensors(), case.scale)
    found = by_reference(case)
    for (one, results), (other, others) in combinations(found.items(), 2):
        for name, a, b in zip(TENSORS, results, others, strict=True):
            if name.startswith("d") and not case.given:
                assert a is None and b is None
                continue
            assert a is not None and b is not None and a.shape == b.shape
            with np.errstate(invalid="ignore"):  # -inf - -inf, where both are
                error = np.max(np.where(a == b, 0.0, np.abs(a - b)), initial=0.0)
            assert error <= 1e-12 * size[name], f"{name} of {one} and {other} differ by {error}"


# SDPA alone: what the others have no part in.


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_sdpa_in_the_precision_of_the_inputs_rounds_on_its_way(dtype: torch.dtype) -> None:
    """Were only the result rounded, twice its error would be a tolerance that nobody can meet."""
    allowed = torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed()
    x = {name: t.to(dtype) for name, t in Case((33, 65)).tensors().items()}
    exact, own = sdpa.attention(**x), sdpa.attention(**x, dtype=dtype)
    assert own.lse.dtype == torch.float32
    for name in ("out", "dq", "dk", "dv"):
        value, got = getattr(exact, name), getattr(own, name)
        assert got.dtype == dtype
        rounded_once = (value.to(dtype) - value).abs().mean()
        assert 1.3 * rounded_once < (got - value).abs().mean() < 20 * rounded_once
    assert torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed() == allowed


@pytest.mark.parametrize(
    ("wrong", "error", "message"),
    [
        ({"q": torch.zeros(2, 5, 16)}, ValueError, r"q\.shape was \(2, 5, 16\)"),
        ({"k": torch.zeros(1, 2, 7, 8)}, ValueError, r"k\.shape was .* may be \(1, 2, 7, 16\)"),
        ({"k": torch.zeros(1, 3, 7, 16)}, ValueError, r"k had 3 heads, .* divisor of the 2"),
        ({"v": torch.zeros(1, 2, 6, 16)}, ValueError, r"v\.shape was .* may be \(1, 2, 7, 16\)"),
        ({"d_out": torch.zeros(1, 2, 5, 8)}, ValueError, r"d_out\.shape was"),
        ({"d_lse": torch.zeros(1, 2, 5, 1)}, ValueError, r"d_lse\.shape was"),
        ({"v": torch.zeros(1, 2, 7, 16, device="meta")}, ValueError, r"v\.device was meta"),
        ({"q": torch.zeros(1, 2, 5, 16).int()}, TypeError, r"q\.dtype was torch\.int32"),
        ({"v": [0.0]}, TypeError, "v was a list"),
        ({"dtype": torch.int8}, TypeError, r"dtype was torch\.int8"),
        ({"scale": "1"}, TypeError, "scale was '1'"),
        ({"scale": math.inf}, ValueError, "scale was inf"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_sdpa_names_the_argument_that_is_wrong(
    wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    arguments: dict[str, Any] = {**Case((5, 7)).tensors(), **wrong}
    with pytest.raises(error, match=message):
        sdpa.attention(**arguments)


# Independence.

ROOT = Path(__file__).resolve().parents[2]


def modules_named_in(source: Path) -> Iterator[str]:
    """Dotted names that a file imports; `from a import b` counts as a.b, which may be a module."""
    package = source.relative_to(ROOT).parts[:-1]
    for node in ast.walk(ast.parse(source.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            relative_to = package[: len(package) - node.level + 1] if node.level else ()
            start = ".".join((*relative_to, *filter(None, [node.module])))
            yield from (f"{start}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Name | ast.Attribute):
            name = node.id if isinstance(node, ast.Name) else node.attr
            assert name not in ("importlib", "import_module", "__import__"), source.name


def files_behind(source: Path) -> set[Path]:
    """The file and all of this repository that it imports, directly or not."""
    found: set[Path] = set()
    to_read = [source]
    while to_read:
        file = to_read.pop()
        found.add(file)
        for name in modules_named_in(file):
            parts = name.split(".")
            modules = [ROOT.joinpath(*parts[:n]) for n in range(1, len(parts) + 1)]
            paths = {path for m in modules for path in (m.with_suffix(".py"), m / "__init__.py")}
            to_read += [path for path in paths - found if path.is_file()]
    return found


def test_the_references_share_no_code_with_each_other_or_with_what_they_judge() -> None:
    behind = {
        name: files_behind(ROOT / "reference" / f"{name}.py") - {ROOT / "reference/__init__.py"}
        for name in ("oracle", "emulation", "sdpa")
    }
    for files in behind.values():
        assert {file.relative_to(ROOT).parts[0] for file in files} == {"reference"}
    for (one, files), (other, others) in combinations(behind.items(), 2):
        assert not files & others, f"{one} and {other} share code"
