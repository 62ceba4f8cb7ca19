"""The record of one comparison, and files of them: versioned JSON, one record a line.

Everything that is printed, drawn or kept as a baseline is made from these records; so is the exit
status of a run.
"""

from __future__ import annotations

import math
from pathlib import Path

import msgspec

from .errors import ReportError

VERSION = 1
"""Of the format. Raised whenever a field changes its meaning or goes."""


class RecordError(ReportError):
    """A file of records that cannot be read; says which, where and why."""


class Verdict(msgspec.Struct, frozen=True):
    """One rule applied to one tensor.

    Attributes:
        tensor: "out", "lse", "dq", "dk" or "dv"; of rules of the contract also an input ("q",
            "cu_seqlens_k", ...), or "memory" for all that was allocated.
        reference: "oracle", "sdpa", "emulation", "contract" (shapes, dtypes, inputs unchanged; that it
            neither raises nor crashes nor hangs), or "law".
        rule: what was required.
        statistic, limit: the verdict holds if statistic <= limit; both None where there is no number.
        held: whether it does.
        where: index of the worst place, in the tensor's own dimensions; of a row, tile or head: of
            its first element.
        note: what a reader should know besides.
    """

    tensor: str
    reference: str
    rule: str
    held: bool
    statistic: float | None = None
    limit: float | None = None
    where: tuple[int, ...] | None = None
    note: str = ""

    @property
    def margin(self) -> float:
        """statistic / limit; over 1 is broken, and infinite where there is no number to it."""
        if self.statistic is None or not self.limit or math.isnan(self.statistic):
            return 0.0 if self.held else float("inf")
        return self.statistic / self.limit


Z_STEP, Z_END = 0.5, 4.0
"""Of `TensorSummary.histogram`: the width of a bin, and where the bins end."""


class TensorSummary(msgspec.Struct, frozen=True):
    """How far one tensor was off.

    Attributes:
        elements, judged: how many there are, and in how many a fault could have been seen.
        budget_use: largest |x - reference| / bound.
        max_z, rms_z: of the distance to the reference in units of sigma.
        fa2: largest |x - reference| / largest |p - reference|, p being SDPA MATH in the dtype of
            the inputs: FlashAttention-2's own rule wants at most 2 (out) or 3 (gradients). Where p is
            nearly exact, in units of half an ulp of the largest |reference|, or of what is summed where
            that cancels to about 0. None where there is neither. Decides nothing.
        histogram: elements by signed z: below -Z_END, in bins of Z_STEP up to Z_END, above it; last those
            that lie between the legal values, z = 0, and are in no bin. Empty in older records.

    JSON knows no infinity: a number that is not finite is read back as None.
    """

    elements: int
    judged: int
    budget_use: float | None
    max_z: float | None
    rms_z: float | None
    fa2: float | None = None
    histogram: tuple[int, ...] = ()


class ErrorMap(msgspec.Struct, frozen=True, kw_only=True):
    """Where one tensor is wrong: the worst of its heads as a small picture, and all of it along each axis.

    The picture is rows x head dimension; of the lse rows x heads. A cell is a block of elements, and shows
    the one with the largest |z| of them.

    Attributes:
        tensor: "out", "lse", "dq", "dk" or "dv".
        shape: (B, H, S, D) of what was judged in one piece, (B, H, S) of the lse; of a ragged batch the
            sequences of one length.
        entry, head: which of them is shown; of the lse all heads are, and this is the worst.
        sequence: of a ragged batch the number of the sequence that is shown; of a dense one None.
        tile: rows of a tile of the kernel that writes the tensor (queries, of dk and dv keys), if known.
        limit: of the largest z.
        step: rows x columns in a cell.
        cells: rows x columns of cells.
        z: signed, float16, row by row, little endian, packed by zlib.
        nonfinite: one byte a cell, packed by zlib, `NONFINITE` of the worst of its elements; empty if every
            element is finite where it should be.
        by_batch, by_head, by_row: largest |z|, over all else; None where something is not finite that should
            be, or the reverse. Of a ragged batch by sequence. At most `LONGEST` numbers, each the largest of
            as many as it takes.
        rows, columns: of what is shown: the first wrong one, the last, and how many are.
        wrong: elements beyond the hard bound or the limit of the largest z, or wrongly finite or not.
        elements: that were judged.
        first, worst: indices in (B, H, S, D), of the first of those and of the largest |z|; of a ragged batch
            the first is the sequence, and the third counts from its first row.
        worst_z: there; None if that is not finite.
    """

    tensor: str
    shape: tuple[int, ...]
    entry: int
    head: int
    sequence: int | None = None
    tile: int | None = None
    limit: float
    step: tuple[int, int]
    cells: tuple[int, int]
    z: bytes
    nonfinite: bytes = b""
    by_batch: list[float | None]
    by_head: list[float | None]
    by_row: list[float | None]
    rows: tuple[int, int, int] | None
    columns: tuple[int, int, int] | None
    wrong: int
    elements: int
    first: tuple[int, ...] | None
    worst: tuple[int, ...] | None
    worst_z: float | None


NONFINITE = ("finite", "not finite, and may be so", "finite, and must not be so", "-inf", "inf", "NaN")
"""What a cell of `ErrorMap.nonfinite` stands for, by its number; the larger is the worse."""

LONGEST = 128
"""Numbers of a marginal that are kept."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """One comparison: a case, an implementation, a code path; all tensors, all references.

    Attributes:
        version: of this format.
        case: its id (tests.cases).
        words: the case for a reader.
        origin: which list the case is from: "generated", "edge", "corpus", "replay", ...; "law" of a record
            that is about a law, which is no comparison: such are red ones, and those that a known failure
            names.
        implementation: its name.
        path: "interpreter", "sm80", "sm90", ...; with "-override" if TRITON_OVERRIDE_ARCH chose it,
            "cpu" or the device's architecture for an implementation that is not Triton.
        status: "held"; "broken"; "known failure" (all that is broken is known, by --known-failures);
            "no power" (nothing could be judged: not executed); "not claimed".
        reason: why, if not held; of a known failure the reason that the file gives.
        dtype, backward: of the case, for summaries.
        verdicts: every rule that was applied.
        tensors: by name.
        diagnosis: of a broken one, what its results look like (tests.diagnosis).
        maps: of a broken one, where its tensors are wrong; only of the first few of a run.
        tile: query rows x keys, the largest tiles of the implementation; None if they are not known.
        seconds: by stage.
        replay: the command that repeats it.
    """

    version: int = VERSION
    case: str
    words: str
    origin: str
    implementation: str
    path: str
    status: str
    reason: str = ""
    dtype: str
    backward: bool
    verdicts: list[Verdict] = []
    tensors: dict[str, TensorSummary] = {}
    diagnosis: list[str] = []
    maps: list[ErrorMap] = []
    tile: tuple[int, int] | None = None
    seconds: dict[str, float] = {}
    replay: str = ""

    @property
    def worst(self) -> Verdict | None:
        """The verdict that failed by most, or came closest to it."""
        return max(self.verdicts, key=lambda verdict: (not verdict.held, verdict.margin), default=None)


class _Version(msgspec.Struct):
    version: int


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Record)


def encode(record: Record) -> bytes:
    """The line of a file that is a record."""
    return _encoder.encode(record) + b"\n"


def append(path: Path, record: Record) -> None:
    """Adds a record to a file, which a crash afterwards leaves whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        file.write(encode(record))


def read(path: Path) -> list[Record]:
    """All records of a file.

    Raises:
        RecordError: if it is missing, truncated, of another version, or not a file of records.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise RecordError(f"{path}: {error.strerror}") from None
    records = []
    for number, line in enumerate(lines, 1):
        try:
            version = msgspec.json.decode(line, type=_Version).version
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise RecordError(f"{path}, line {number}: not a record ({error})") from None
        if version != VERSION:
            raise RecordError(
                f"{path}, line {number}: a record of version {version}; this reads version {VERSION}"
            )
        try:
            records.append(_decoder.decode(line))
        except msgspec.DecodeError as error:
            raise RecordError(f"{path}, line {number}: not a record ({error})") from None
    return records
