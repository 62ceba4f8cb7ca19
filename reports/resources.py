"""What the kernels take of a chip: shared memory, registers, spills, instructions.

No GPU is needed: `tests.offline` compiles every tile configuration for sm_80, 86, 89 and 90. With one version
of Triton that gives the same numbers on every machine, so that each may be compared with what was committed,
and what became worse is red. Instructions are counted in the PTX, each as often as it stands there, however
often a loop executes it; registers and spills are of the assembled code.

A register that is spilled outside of the loops over tiles is stored and loaded once a program, or once a head
of a group. That costs nothing that can be measured, and some of the fastest tiles do it. Within such a loop
it moves through memory for every tile: that is red unless it is listed with a reason (`SPILLS`), such as that
every tile without it was slower; and red whatever the reason, if it is more than a little.
"""

from __future__ import annotations

import concurrent.futures
import math
import multiprocessing
import os
import re
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from . import kept
from .errors import ReportError
from .kept import Difference, Key
from .tiles import WHOLE

if TYPE_CHECKING:
    from tests.offline import Case, Program

KIND = "resources"
VERSION = 1
"""Of the file."""

IMPLEMENTATION = "triton"
DEVICE = "sm80-86-89-90"
UPDATE = f"python -m reports baseline update --kind {KIND}"

KIB = 1024
SHARED_MEMORY = {"sm80": 163 * KIB, "sm86": 99 * KIB, "sm89": 99 * KIB, "sm90": 227 * KIB}
"""Most bytes of shared memory of a block, by chip: CUDA C++ Programming Guide, technical specifications per
compute capability. On purpose not the table by which `kernels.tiles` chooses: an error there is seen here."""

REGISTERS = 65536
"""32-bit registers that the threads of a block share, on each of these chips."""

REGISTERS_OF_A_THREAD = 255
THREADS = 1024
"""Most threads of a block."""

WGMMA_ROWS = 64
"""wgmma takes no fewer rows: a smaller tile is multiplied by mma.sync on sm_90 too."""

MOST_SPILLED_IN_A_LOOP = 96
"""Instructions that move what is spilled, in one innermost loop: more are red, whatever their reason, except
where rows allow no 16-byte accesses."""


class Spills(NamedTuple):
    """Configurations that may spill within a loop over tiles, and why.

    Attributes:
        why: the reason.
        kernels, chips: whose they are.
        dims: head dimensions, the larger of D and Dv, from the smallest to the largest.
        unaligned: whether the rows allow no 16-byte accesses. All are of 16 bits.
    """

    why: str
    kernels: tuple[str, ...]
    chips: tuple[str, ...]
    dims: tuple[int, int] = (16, WHOLE)
    unaligned: bool = False

    def part(self, words: Words) -> str:
        """Those of them that have the kernel and chip of a configuration, in words."""
        path = ", unaligned" if self.unaligned else ""
        return f"{words.kernel} on {words.chip}, D = {self.dims[0]} to {self.dims[1]}{path}"

    def has(self, words: Words) -> bool:
        """Whether a configuration is one of them."""
        return (
            words.kernel in self.kernels
            and words.chip in self.chips
            and self.dims[0] <= words.dim <= self.dims[1]
            and self.unaligned == ("unaligned" in words.path)
            and words.arithmetic in ("float16", "bfloat16")
        )


_ELEMENT_BY_ELEMENT = (
    "rows that allow no 16-byte accesses: each element is loaded by itself, through a pointer of its own, and"
    " waits in a register, since cp.async copies no less than 4 bytes; meant to be right, not to be fast"
)
_AHEAD = (
    "measured ahead of every tile of the sweep that does not spill, on an H200"
    " (reports/baselines/tiles-h200-*.md)"
)
_LEAST = "between head dimensions that were timed: compiled only, of those looked at one that spills little"
_LIKE_SM80 = "the tile that is ahead on sm_80, or the next one that fits; not timed on this chip"
_LESS_MEMORY = ("sm86", "sm89")
SPILLS = [
    Spills(_ELEMENT_BY_ELEMENT, ("forward", "dkdv", "dq"), tuple(SHARED_MEMORY), unaligned=True),
    # Of whole entries of the tile table; what was measured is the largest head dimension of each.
    Spills(_AHEAD, ("forward",), ("sm80",), (81, 256)),
    Spills(_AHEAD, ("dkdv",), ("sm80",), (33, 64)),
    Spills(_AHEAD, ("dkdv",), ("sm80",), (225, 256)),
    Spills(_LEAST, ("dkdv",), ("sm80", *_LESS_MEMORY), (129, 160)),
    Spills(_AHEAD, ("dq",), ("sm80",), (97, 256)),
    Spills(_AHEAD, ("dkdv",), ("sm90",), (97, 256)),
    Spills(_AHEAD, ("dq",), ("sm90",), (193, 256)),
    Spills(_LIKE_SM80, ("forward",), _LESS_MEMORY, (65, 256)),
]
"""What may spill within a loop over tiles; the first that has a configuration gives its reason."""


def reason_of(words: Words) -> Spills | None:
    """Why a configuration may spill within a loop over tiles; None if nobody has accounted for it."""
    return next((those for those in SPILLS if those.has(words)), None)


DIMS = (16, 32, 64, 80, 96, 128, 160, 192, 224, 256)
"""Head dimensions that have tiles of their own: on the page others stand apart."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """A configuration on a chip. In a file what is 0 is left out.

    Attributes:
        BM, BN: query and key rows of the tile; 0 for kernels of one fixed shape.
        warps: of 32 threads each.
        stages: depth of the software pipeline.
        width: columns of a slice of the head dimension; 256 holds any.
        shared: bytes of shared memory of a block.
        registers: 32-bit registers of a thread.
        stack: bytes of stack of a thread: what is spilled, wherever it is.
        spilled_in_loops: instructions in loops over tiles, of the assembled code, that load or store what is
            spilled.
        spilled_in_a_loop: those of the loop that has most.
        mma, wgmma: instructions of tensor cores: synchronous (mma.sync), asynchronous ones of a warp group.
        tf32: those of them whose operands are TF32.
        cp_async_16, cp_async: asynchronous copies of 16 bytes, and of 4 or 8.
        tma: bulk asynchronous copies.
        ld_global_16, ld_global: loads of 16 bytes from global memory, and narrower ones.
        st_global_16, st_global: stores.
        ldmatrix: loads of operands from shared memory.
        ex2, fma: exponentials, and multiply-adds, in float32.
        barriers: bar.sync.
        instructions: all, whatever they are.
    """

    BM: int = 0
    BN: int = 0
    warps: int
    stages: int
    width: int = WHOLE
    shared: int = 0
    registers: int
    stack: int = 0
    spilled_in_loops: int = 0
    spilled_in_a_loop: int = 0
    mma: int = 0
    wgmma: int = 0
    tf32: int = 0
    cp_async_16: int = 0
    cp_async: int = 0
    tma: int = 0
    ld_global_16: int = 0
    ld_global: int = 0
    st_global_16: int = 0
    st_global: int = 0
    ldmatrix: int = 0
    ex2: int = 0
    fma: int = 0
    barriers: int = 0
    instructions: int = 0

    @property
    def tile(self) -> tuple[int, ...]:
        """BM, BN, warps, stages, width."""
        return self.BM, self.BN, self.warps, self.stages, self.width


class Resources(msgspec.Struct, frozen=True, kw_only=True):
    """A baseline.

    Attributes:
        version: of the file.
        implementation: whose kernels.
        triton: its version.
        ptxas: the version of the assembler, which Triton brings along; TRITON_PTXAS_PATH names another.
        failed: configurations that could not be compiled, and why.
        entries: by name: kernel, chip, arithmetic, head dimension, and what else is special
            ("forward-sm80-float16-D64-ragged"; `tests.offline.Case`).
    """

    version: int = VERSION
    implementation: str
    triton: str
    ptxas: str
    failed: dict[str, str] = {}
    entries: dict[str, Entry]


# ---------------------------------------------------------------- measuring


def key() -> Key:
    """Of what this machine would measure."""
    import triton

    return Key(KIND, IMPLEMENTATION, DEVICE, torch="", triton=triton.__version__)


def measure(workers: int, cases: Sequence[Case] | None = None) -> Resources:
    """Compiles everything: some 5 minutes on 2 cores, less what Triton's cache has.

    Args:
        workers: processes that compile; with 1 it is done in this one.
        cases: what is compiled; all of `tests.offline` if it is left out.

    Raises:
        ReportError: if Triton does not compile here but interprets, or compiles for another architecture than
            it is asked to; or a process that compiles dies.
    """
    import triton

    if triton.knobs.runtime.interpret:
        raise ReportError("TRITON_INTERPRET is set: nothing would be compiled; unset it")
    if triton.knobs.runtime.override_arch:
        named = triton.knobs.runtime.override_arch
        raise ReportError(f"TRITON_OVERRIDE_ARCH is {named!r}: all would be compiled for it; unset it")
    if cases is None:
        from tests.offline import shipped, unusual

        cases = [*shipped(), *unusual()]
    if workers <= 1:
        made = list(map(_made, cases))
    else:
        # a fresh process: torch and LLVM have threads, which a fork would leave behind in any state
        context = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(workers, context, _end_with_parent) as pool:
            try:
                made = list(pool.map(_made, cases))
            except BrokenProcessPool:
                raise ReportError("a process that compiles died (killed for memory? fewer workers)") from None
    by_name = dict(zip(map(str, cases), made, strict=True))
    return Resources(
        implementation=IMPLEMENTATION,
        triton=triton.__version__,
        ptxas=triton.knobs.nvidia.ptxas.version,
        failed={name: of for name, of in by_name.items() if isinstance(of, str)},
        entries={name: of for name, of in by_name.items() if isinstance(of, Entry)},
    )


def _end_with_parent() -> None:
    """Ends this process when the one that started it ends; else it would wait for work for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


def _made(case: Case) -> Entry | str:
    """What becomes of a case; if it cannot be compiled, why."""
    from tests.offline import compiled

    try:
        return entry(compiled(case))
    except Exception as error:  # of Triton, LLVM, ptxas: each has its own kinds
        text = str(error).strip().splitlines()
        return f"{type(error).__name__}: {text[0] if text else ''}"


_COUNTED = {
    "mma": r"(?<![\w.])w?mma\.",
    "wgmma": r"\bwgmma\.mma_async\.",
    "tf32": r"mma[\w.]*\.tf32\b",
    "cp_async_16": r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* [^;]*, 0x10,",
    "cp_async": r"\bcp\.async\.c[ag]\.shared\.global[\w.:]* (?![^;]*, 0x10,)",
    "tma": r"\bcp\.async\.bulk\.(?:tensor|shared|global)",
    "ld_global_16": r"\bld\.global[\w.:]*\.v4\.b32\b",
    "ld_global": r"\bld\.global(?![\w.:]*\.v4\.b32\b)",
    "st_global_16": r"\bst\.global[\w.:]*\.v4\.b32\b",
    "st_global": r"\bst\.global(?![\w.:]*\.v4\.b32\b)",
    "ldmatrix": r"\bldmatrix\.",
    "ex2": r"\bex2\.",
    "fma": r"\bfma\.rn\.(?:ftz\.)?f32\b",
    "barriers": r"\bbar(?:rier)?(?:\.cta)?\.sync\b",
    "instructions": r"(?m)^[ \t]+(?:@!?%\w+ +)?[a-z][\w.:]*(?: [^;]*)?;",
}


def entry(program: Program) -> Entry:
    """What a program takes."""
    return Entry(
        BM=program.tile.BM if program.tile else 0,
        BN=program.tile.BN if program.tile else 0,
        warps=program.warps,
        stages=program.stages,
        width=program.tile.width if program.tile else WHOLE,
        shared=program.shared,
        registers=program.registers,
        stack=program.stack,
        spilled_in_loops=program.spilled_in_loops,
        spilled_in_a_loop=program.spilled_in_a_loop,
        **{name: len(re.findall(pattern, program.ptx)) for name, pattern in _COUNTED.items()},
    )


def read(path: Path) -> Resources:
    """A file that `write` wrote.

    Raises:
        ReportError: if it is missing, truncated, of another version, or not a baseline of this kind.
    """
    return kept.decode(path, Resources, VERSION)


def write(found: Resources, path: Path) -> list[Path]:
    """Writes a baseline, and its table beside it; returns where."""
    page = path.with_suffix(".md")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(kept.encode(found))
    page.write_text(markdown(found), encoding="utf-8")
    return [path, page]


# ---------------------------------------------------------------- what must hold


class Words(NamedTuple):
    """The words of a configuration's name; `path` is what else is special: "", "full", "ragged", ..."""

    kernel: str
    chip: str
    arithmetic: str
    shape: str
    path: str

    @staticmethod
    def of(name: str) -> Words:
        words = [*name.split("-", 4), ""]
        if not 5 <= len(words) <= 6 or words[1] not in SHARED_MEMORY:
            chips = ", ".join(SHARED_MEMORY)
            raise ReportError(
                f"{name!r} is no configuration: kernel-chip-arithmetic-D64[-path], the chip one of {chips}"
            )
        kernel, chip, arithmetic, shape, path = words[:5]
        return Words(kernel, chip, arithmetic, shape, path)

    @property
    def dim(self) -> int:
        """The larger of D and Dv."""
        return max(map(int, self.shape[1:].split("x")))


def limits(found: Resources) -> list[Difference]:
    """What a chip cannot hold, spills in loops that nobody has accounted for, and missing instructions.

    Raises:
        ReportError: if a name is not that of a configuration.
    """
    made = [Difference(f"{name}: cannot be compiled: {why}", True) for name, why in found.failed.items()]
    listed: dict[str, bool] = {}
    for name, of in found.entries.items():
        made += limits_of(name, of)
        words = Words.of(name)
        if (those := reason_of(words)) is not None:
            which = those.part(words)
            listed[which] = listed.get(which, False) or of.spilled_in_loops > 0
    what = "spills in no loop over tiles any more; reports.resources.SPILLS need not list it"
    made += [Difference(f"{which}: {what}", False) for which, spills in listed.items() if not spills]
    return made


def limits_of(name: str, of: Entry) -> list[Difference]:
    """The limits of one configuration."""
    words = Words.of(name)
    most, threads = SHARED_MEMORY[words.chip], 32 * of.warps
    broken = []
    if of.shared > most:
        broken.append(f"{_kib(of.shared)} KiB of shared memory; a block on {words.chip} has {_kib(most)}")
    # registers are given out in eights a thread
    if (taken := math.ceil(of.registers / 8) * 8 * threads) > REGISTERS:
        broken.append(f"{taken} registers, {of.registers} x {threads} threads; a block has {REGISTERS}")
    if of.registers > REGISTERS_OF_A_THREAD:
        broken.append(f"{of.registers} registers a thread; there are {REGISTERS_OF_A_THREAD}")
    if threads > THREADS:
        broken.append(f"{threads} threads; a block has at most {THREADS}")
    why = reason_of(words)
    if of.spilled_in_loops and why is None:
        broken.append(
            f"{of.spilled_in_loops} instructions in loops over tiles move what is spilled;"
            " reports.resources.SPILLS gives no reason why"
        )
    if of.spilled_in_a_loop > MOST_SPILLED_IN_A_LOOP and not (why is not None and why.unaligned):
        broken.append(
            f"{of.spilled_in_a_loop} instructions in one loop over tiles move what is spilled;"
            f" {MOST_SPILLED_IN_A_LOOP} are allowed"
        )
    if of.BN:
        broken += _missing_instructions(words, of)
    return [Difference(f"{name}: {what}", True) for what in broken]


def _missing_instructions(words: Words, of: Entry) -> Iterable[str]:
    """What the tiles were chosen for and is not there."""
    if "unaligned" not in words.path:
        if not of.ld_global_16:
            yield "no ld.global of 16 bytes"
        if not of.st_global_16:
            yield "no st.global of 16 bytes"
        # not for TF32, whose operands Triton lays out twice, from registers
        if of.stages > 1 and words.arithmetic != "tf32" and not of.cp_async_16:
            yield f"no cp.async of 16 bytes, with {of.stages} stages"
    if words.arithmetic == "float32":
        if of.mma or of.wgmma:  # which would shorten the operands
            yield f"{of.mma + of.wgmma} instructions of tensor cores for float32 that is not TF32"
        if not of.fma:
            yield "no fma"
    elif words.arithmetic == "tf32":
        if not of.tf32:
            yield "no instruction of tensor cores for TF32"
    else:
        rows = of.BN if words.kernel == "dkdv" else of.BM
        asynchronous = words.chip == "sm90" and rows >= WGMMA_ROWS
        wanted, other = ("wgmma", "mma") if asynchronous else ("mma", "wgmma")
        if not getattr(of, wanted):
            yield f"no {wanted}"
        if getattr(of, other):
            yield f"{getattr(of, other)} {other} where {wanted} should be"


# ---------------------------------------------------------------- what has changed

_WORSE_IF_MORE = ("shared", "registers", "stack", "spilled_in_loops", "spilled_in_a_loop")
_WORSE_IF_FEWER = ("mma", "wgmma", "tf32", "cp_async_16", "cp_async", "tma")
_OTHERS = tuple(
    name for name in Entry.__struct_fields__
    if name not in (*_WORSE_IF_MORE, *_WORSE_IF_FEWER, "BM", "BN", "warps", "stages", "width")
)  # fmt: skip


def differences(committed: Resources, found: Resources) -> list[Difference]:
    """What is not as it was committed: red is what takes more, or has lost instructions that it should have.

    A configuration that is only in `found` is told; one that is only in `committed` is red. With another
    version of Triton nothing is compared, which is red.
    """
    if committed.triton != found.triton:
        return [
            Difference(
                f"the baseline is of Triton {committed.triton}, this is {found.triton}: nothing was compared",
                True,
            )
        ]
    made = []
    if committed.ptxas != found.ptxas:
        what = f"assembled by ptxas {found.ptxas}, the baseline by {committed.ptxas}: registers may differ"
        made.append(Difference(what, False))
    for name, old in committed.entries.items():
        if name in found.entries:
            made += differences_of(name, old, found.entries[name])
        else:
            why = f" ({found.failed[name]})" if name in found.failed else ""
            made.append(Difference(f"{name}: is in the baseline and was not compiled{why}", True))
    made += [Difference(f"{name}: is not in the baseline; {UPDATE}", False)
             for name in found.entries if name not in committed.entries]  # fmt: skip
    return made


def differences_of(name: str, old: Entry, new: Entry) -> list[Difference]:
    """Of one configuration: at most one that is red and one that is not.

    Instructions of different tiles are not weighed against each other: a smaller tile has fewer of them.
    """
    same_tile = old.tile == new.tile
    worse = _changes(old, new, _WORSE_IF_MORE, 1)
    better = _changes(old, new, _WORSE_IF_MORE, -1)
    if same_tile:
        worse += _changes(old, new, _WORSE_IF_FEWER, -1)
        better += _changes(old, new, _WORSE_IF_FEWER, 1)
        others = [change for sign in (1, -1) for change in _changes(old, new, _OTHERS, sign)]
    else:
        others = [f"tile {_tile(old)} -> {_tile(new)}"]
    made = []
    if worse:
        what = ", ".join(worse if same_tile else [*worse, *others])
        made.append(Difference(f"{name}: worse than the baseline: {what}", True))
    if better:
        made.append(Difference(f"{name}: better than the baseline: {', '.join(better)}; {UPDATE}", False))
    elif others and not worse:
        made.append(Difference(f"{name}: not as in the baseline: {', '.join(others)}; {UPDATE}", False))
    return made


def _changes(old: Entry, new: Entry, fields: Iterable[str], sign: int) -> list[str]:
    """The fields that became larger (sign 1) or smaller (-1)."""
    pairs = [(name, getattr(old, name), getattr(new, name)) for name in fields]
    return [f"{name} {was} -> {now}" for name, was, now in pairs if sign * (now - was) > 0]


# ---------------------------------------------------------------- for a reader

_ORDER = ("forward", "dkdv", "dq", "delta", "list")


def markdown(found: Resources) -> str:
    """The table as a page: a row for a kernel, arithmetic and head dimension, columns by chip.

    Raises:
        ReportError: if a name is not that of a configuration.
    """
    rows: dict[tuple[str, str, str, str], dict[str, Entry]] = {}
    for name, of in found.entries.items():
        words = Words.of(name)
        rows.setdefault((words.kernel, words.arithmetic, words.shape, words.path), {})[words.chip] = of
    lines = [
        "### What the kernels take, compiled offline",
        "",
        f"Implementation {found.implementation}, Triton {found.triton}, ptxas {found.ptxas}:"
        f" {len(found.entries)} configurations.",
        "Tile: BM x BN, warps (w), stages (s), columns of a slice of the head dimension (c) where there are"
        " several. KiB: shared memory of a block. reg: registers"
        " of a thread, bytes that are spilled, and in brackets the instructions in loops over tiles that move"
        " them, where there are any. TC: instructions of tensor cores, mma.sync, or wgmma where marked w."
        " cp: asynchronous copies of 16 bytes."
        " Instructions are counted in the PTX, those that move what is spilled in the assembled code, each as"
        " often as it stands there, however often a loop executes it.",
        "",
        *_extremes(found.entries),
    ]
    if found.failed:
        lines += [
            "",
            "Could not be compiled:",
            "",
            *(f"- {name}: {why}" for name, why in found.failed.items()),
        ]
    lines += _spills(found.entries)
    for title, is_it in _PARTS.items():
        part = {row: chips for row, chips in rows.items() if is_it(row)}
        if part:
            lines += ["", f"#### {title}", "", *_table(part)]
    return "\n".join(lines) + "\n"


def _spills(entries: Mapping[str, Entry]) -> list[str]:
    """What is spilled, and why: in loops over tiles with the reasons, elsewhere how many."""
    spilling = {name: of for name, of in entries.items() if of.stack}
    if not spilling:
        return []
    reasons: dict[str, list[str]] = {}
    for name, of in spilling.items():
        if of.spilled_in_loops:
            those = reason_of(Words.of(name))
            reasons.setdefault(those.why if those is not None else "no reason is known", []).append(name)
    lines = ["", "What is spilled, and why:", ""]
    for why, names in reasons.items():
        most = max(names, key=lambda name: entries[name].spilled_in_a_loop)
        lines.append(
            f"- In loops over tiles: {why}. {len(names)} configuration{'s' * (len(names) > 1)}, with at most"
            f" {entries[most].spilled_in_a_loop} instructions in a loop ({most})."
        )
    outside = {name: of.stack for name, of in spilling.items() if not of.spilled_in_loops}
    if outside:
        most = max(outside, key=lambda name: outside[name])
        lines.append(
            f"- Only outside of them: {len(outside)} of {len(entries)} configurations, at most"
            f" {outside[most]} B ({most}). That is moved once a program, or once a head of a group, which"
            " costs nothing that can be measured."
        )
    return lines


def _unusual(row: tuple[str, str, str, str]) -> bool:
    return "x" in row[2] or "unaligned" in row[3] or int(row[2][1:]) not in DIMS


_PARTS = {
    "Causal": lambda row: row[3] == "" and not _unusual(row),
    "Without a mask": lambda row: row[3] == "full" and not _unusual(row),
    "Ragged": lambda row: row[3] == "ragged" and not _unusual(row),
    "Other head dimensions, and rows that allow no 16-byte accesses": _unusual,
}


def _table(rows: Mapping[tuple[str, str, str, str], Mapping[str, Entry]]) -> list[str]:
    groups = ("tile", "KiB", "reg", "TC", "cp")
    head = ["kernel", "arithmetic", "D", *(f"{chip} {group}" for chip in SHARED_MEMORY for group in groups)]
    lines = [f"| {' | '.join(head)} |", "|---|---|---|" + "---|---:|---:|---:|---:|" * len(SHARED_MEMORY)]
    for (kernel, arithmetic, shape, path), chips in sorted(rows.items(), key=lambda row: _position(row[0])):
        special = " unaligned" if path == "unaligned" else ""
        cells = [cell for chip in SHARED_MEMORY for cell in _cells(chips.get(chip), len(groups))]
        lines.append(f"| {' | '.join([kernel, arithmetic, shape[1:] + special, *cells])} |")
    return lines


def _position(row: tuple[str, str, str, str]) -> tuple[int, int, list[int], str]:
    arithmetics = ("float16", "bfloat16", "float32", "tf32")
    dims = [int(dim) for dim in re.findall(r"\d+", row[2])]
    return _ORDER.index(row[0]), arithmetics.index(row[1]), dims, row[3]


def _cells(of: Entry | None, n: int) -> list[str]:
    if of is None:
        return [""] * n
    spilled = f" + {of.stack} B" if of.stack else ""
    spilled += f" ({of.spilled_in_loops})" if of.spilled_in_loops else ""
    tensor_cores = f"w {of.wgmma}" if of.wgmma else str(of.mma)
    return [_tile(of), _kib(of.shared), f"{of.registers}{spilled}", tensor_cores, str(of.cp_async_16)]


def _extremes(entries: Mapping[str, Entry]) -> list[str]:
    """Of each chip: how close the closest comes to what it has."""
    lines = [
        "| chip | shared memory of a block, KiB | most that is taken | most registers of a thread"
        " | spill in loops over tiles | only outside |",
        "|---|---:|---|---|---:|---:|",
    ]
    for chip, most in SHARED_MEMORY.items():
        own = {name: of for name, of in entries.items() if Words.of(name).chip == chip}
        if not own:
            continue
        large = max(own, key=lambda name: own[name].shared)
        many = max(own.values(), key=lambda of: of.registers).registers
        with_many = [name for name, of in own.items() if of.registers == many]
        others = f" and {len(with_many) - 1} more" if len(with_many) > 1 else ""
        in_loops = sum(of.spilled_in_loops > 0 for of in own.values())
        outside = sum(of.stack > 0 for of in own.values()) - in_loops
        lines.append(
            f"| {chip} | {_kib(most)} | {_kib(own[large].shared)} ({large})"
            f" | {many} ({with_many[0]}{others}) | {in_loops} of {len(own)}"
            f" | {outside} |"
        )
    return lines


def _tile(of: Entry) -> str:
    shape = f"{of.BM}x{of.BN} " if of.BN else ""
    slices = f" {of.width}c" if of.width != WHOLE else ""
    return f"{shape}{of.warps}w {of.stages}s{slices}"


def _kib(size: int) -> str:
    return f"{size / KIB:.7g}"
