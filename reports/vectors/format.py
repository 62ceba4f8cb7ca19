"""The folder of vectors: what is in it, written and read.

`vectors.json` is the index, `vectors.schema.json` its JSON Schema, `<case>.safetensors` the tensors of a
case, `README.md` what somebody needs to know who has nothing else of this project.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec
from msgspec import Meta

from ..errors import ReportError

if TYPE_CHECKING:
    from torch import Tensor

INDEX, SCHEMA, GUIDE = "vectors.json", "vectors.schema.json", "README.md"

FORMAT = "attention-vectors"
VERSION = 1
"""Of the format. Raised whenever a field or a tensor changes its meaning or goes."""

DRAFT = "https://json-schema.org/draft/2020-12/schema"

SUFFIX = ".safetensors"
LONGEST_NAME = 255
"""Bytes of a file's name that file systems take."""

Count = Annotated[int, Meta(ge=0)]


class Layout(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor: dtype ("float16", "bfloat16", "float32", "float64", "int32", "uint8") and shape."""

    dtype: str
    shape: list[Count]


class Options(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the kernel is asked for.

    Attributes:
        dtype: of q, k, v, d_out and of all results but lse.
        causal, alignment: key j is visible to query i iff j <= i + Sk - Sq ("bottom-right").
        scale: of the scores.
        batch, heads_q, heads_kv, dim, dim_v: B, Hq, Hkv, D, Dv; of a ragged batch B sequences.
        ragged: whether the sequences lie behind one another, each with lengths of its own.
        max_seqlen_q, max_seqlen_k: Sq and Sk of the longest sequence; of a dense batch Sq and Sk.
        exact: whether out, and dv in 16 bit, must come out bit for bit.
    """

    dtype: str
    causal: bool
    alignment: str
    scale: float
    batch: Count
    heads_q: Count
    heads_kv: Count
    dim: Count
    dim_v: Count
    ragged: bool
    max_seqlen_q: Count
    max_seqlen_k: Count
    exact: bool


class Limits(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What the statistics of a tensor may be, all of it finite.

    Attributes:
        judged: elements in which a fault could be seen.
        largest_z: of |z| over them; None where there are none.
        rms_z: of the root mean square of z over them.
        bias: of |mean of z sign(r)|; None where the rule says nothing: errors are repeated, or too few.
    """

    judged: Count
    largest_z: float | None = None
    rms_z: float | None = None
    bias: float | None = None


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is judged in one piece: a dense batch, or all sequences of a ragged one that are as long.

    Attributes:
        sequences: which these are; None: a dense batch.
        len_q, len_k: Sq and Sk of each.
        limits: by tensor.
    """

    sequences: list[Count] | None
    len_q: Count
    len_k: Count
    limits: dict[str, Limits]


class Fault(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A planted fault that the case shows: its name, its kind, and what is wrong then."""

    name: str
    kind: str
    does: str


class Vector(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A case.

    Attributes:
        case: its id (tests.cases).
        words: the case for a reader.
        file, sha256: its tensors.
        options: what the kernel is asked for.
        results: what it is to give, by name.
        tensors: all that are in the file, by name.
        parts: what is judged in one piece, with its limits.
        catches: the planted faults that it is known to show.
    """

    case: str
    words: str
    file: Annotated[str, Meta(pattern=r"^[^/\\]+\.safetensors$")]
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    options: Options
    results: dict[str, Layout]
    tensors: dict[str, Layout]
    parts: list[Part]
    catches: list[Fault]


class Index(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The index.

    Attributes:
        schema: the file of its JSON Schema.
        format, version: of the folder.
        alpha: chance that one statistic of one tensor is red for a correct kernel.
        rules: the formulas of the limits.
        vectors: the cases.
    """

    schema: str = msgspec.field(name="$schema", default=SCHEMA)
    format: str = FORMAT
    version: int = VERSION
    alpha: float
    rules: dict[str, str]
    vectors: list[Vector]


@dataclass(frozen=True)
class Loaded:
    """A case as it was read: its entry of the index, and its tensors by name."""

    vector: Vector
    tensors: Mapping[str, Tensor]


# ---------------------------------------------------------------- written


def schema() -> bytes:
    """The JSON Schema of the index."""
    found = {"$schema": DRAFT, "$id": SCHEMA, **msgspec.json.schema(Index)}
    return msgspec.json.format(msgspec.json.encode(found, order="sorted"), indent=1) + b"\n"


def encode(tensors: Mapping[str, Tensor]) -> bytes:
    """A file of tensors; the same bytes for the same tensors."""
    from safetensors.torch import save

    return save({name: t.contiguous() for name, t in tensors.items()})


def file_name(case: str) -> str:
    """The name of a case's file.

    Raises:
        ReportError: if no file may be called so.
    """
    name = case + SUFFIX
    if len(name) > LONGEST_NAME:
        raise ReportError(
            f"case {case[:60]}... has {len(case)} characters; its file's name may have {LONGEST_NAME}"
        )
    return name


def layouts(tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
    return {name: layout(t) for name, t in sorted(tensors.items())}


def layout(t: Tensor) -> Layout:
    return Layout(str(t.dtype).removeprefix("torch."), list(t.shape))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def write(folder: Path, index: Index, files: Iterable[tuple[str, bytes]]) -> int:
    """Writes a folder, the index last: one that is there is whole.

    Args:
        folder: made if it is not there.
        index: of all cases.
        files: those of the cases, by name.

    Returns:
        Bytes written.

    Raises:
        ReportError: if it cannot be written.
    """
    guide = Path(__file__).with_name("guide.md").read_bytes()
    data = msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"
    written = 0
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / INDEX).unlink(missing_ok=True)
        for name, content in (*files, (SCHEMA, schema()), (GUIDE, guide), (INDEX, data)):
            new = folder / f".{name[:200]}.{os.getpid()}"
            new.write_bytes(content)
            new.replace(folder / name)
            written += len(content)
    except OSError as error:
        raise ReportError(f"{error.filename or folder}: {error.strerror}") from None
    return written


# ---------------------------------------------------------------- read


class _Version(msgspec.Struct):
    format: str
    version: int


def read_index(folder: Path) -> Index:
    """The index of a folder.

    Raises:
        ReportError: if it is missing, truncated, foreign, or of another version; says which.
    """
    path = folder / INDEX
    data = _bytes(path)
    try:
        found = msgspec.json.decode(data, type=_Version)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: not an index of vectors ({error})") from None
    if found.format != FORMAT:
        raise ReportError(f"{path}: format is {found.format!r}; it may be {FORMAT!r}")
    if found.version != VERSION:
        raise ReportError(f"{path}: version is {found.version}; this reads version {VERSION}")
    try:
        index = msgspec.json.decode(data, type=Index)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ReportError(f"{path}: not an index of vectors ({error})") from None
    if index.schema != SCHEMA:
        raise ReportError(f"{path}: $schema is {index.schema!r}; it may be {SCHEMA!r}")
    names = [vector.case for vector in index.vectors]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ReportError(f"{path}: vectors has case {twice[0]} more than once; each may be there once")
    return index


def read_tensors(path: Path, data: bytes | None = None) -> dict[str, Tensor]:
    """The tensors of a file, by name.

    Args:
        path: of the file.
        data: its content, if that is known.

    Raises:
        ReportError: if it is missing, or not a file of tensors.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    data = _bytes(path) if data is None else data
    try:
        return load(data)
    except (SafetensorError, LookupError, TypeError, ValueError, RuntimeError) as error:
        raise ReportError(f"{path}: not a safetensors file that can be read ({error})") from None


def read_vector(folder: Path, vector: Vector, expected: Mapping[str, Layout]) -> Loaded:
    """A case of a folder.

    Args:
        folder, vector: where, and its entry of the index.
        expected: the tensors that there must be.

    Raises:
        ReportError: if the file is not the one that the index was written for, or its tensors are not what
            they must be; says which, what it was and what it may be.
    """
    index, path = folder / INDEX, folder / vector.file
    check_layouts(f"{index}: case {vector.case}: tensors", vector.tensors, expected)
    data = _bytes(path)
    if (found := sha256(data)) != vector.sha256:
        raise ReportError(f"{path}: sha256 is {found}; the index has {vector.sha256}")
    tensors = read_tensors(path, data)
    check_layouts(f"{path}", layouts(tensors), expected)
    return Loaded(vector, tensors)


def check_layouts(where: str, found: Mapping[str, Layout], expected: Mapping[str, Layout]) -> None:
    """Raises ReportError at the first tensor that is missing, is there unasked, or is not as it must be."""
    for name in sorted(found.keys() | expected.keys()):
        if name not in found:
            raise ReportError(f"{where}: {name} is missing; it must be {_words(expected[name])}")
        if name not in expected:
            raise ReportError(f"{where}: {name} is there; it may have {', '.join(sorted(expected))}")
        if found[name] != expected[name]:
            raise ReportError(
                f"{where}: {name} is {_words(found[name])}; it must be {_words(expected[name])}"
            )


def _words(of: Layout) -> str:
    return f"{of.dtype} {of.shape}"


def _bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReportError(f"{path}: {error.strerror}") from None
