"""The kernels compiled for Ampere and newer, without a GPU: what comes out fits, and is no worse than it was.

Every configuration must be one that can be launched on its chip at all (shared memory, registers), spill
nothing in its loops over tiles that nobody has accounted for, have the instructions that its tile was chosen
for (`reports.resources.limits`), and take no more than what is committed for this version of Triton.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator

import msgspec
import pytest
import triton

from kernels import launch, tiles
from kernels.architecture import Architecture
from kernels.launcher import Launcher
from kernels.tiles import TABLES, WHOLE, Tile, choose_tiles, shared_memory
from reports import kept, resources
from reports.kept import Difference
from reports.resources import MOST_SPILLED_IN_A_LOOP, Resources, Spills

from .offline import (
    ARCHITECTURES,
    KERNELS,
    TILED,
    Case,
    Program,
    compiled,
    entry_dim,
    launched,
    shipped,
    unusual,
)

if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET=1: there is nothing to compile", allow_module_level=True)
if triton.knobs.runtime.override_arch:
    pytest.skip("TRITON_OVERRIDE_ARCH replaces what is compiled for", allow_module_level=True)


@functools.cache
def committed() -> Resources | None:
    """The baseline of this version of Triton, if there is one."""
    path = kept.FOLDER / resources.key().name
    return resources.read(path) if path.is_file() else None


def check(case: Case) -> None:
    program, name = compiled(case), str(case)
    check_the_bound(case, program)
    found = resources.entry(program)
    changed = resources.limits_of(name, found)
    baseline = committed()
    if baseline is not None and name in baseline.entries:
        changed += resources.differences_of(name, baseline.entries[name], found)
    for difference in changed:
        if not difference.red:
            warnings.warn(difference.what, stacklevel=2)
    assert not red(changed)


def check_the_bound(case: Case, program: Program) -> None:
    assert program.shared <= case.arch.shared_memory
    if program.tile is not None:
        dim = max(case.dim, case.dim_v)
        bound = shared_memory(case.arch, case.kernel, program.tile, dim, case.dtype.itemsize)
        assert program.shared <= bound, "the bound by which tiles are chosen does not hold"


def red(differences: list[Difference]) -> list[str]:
    return [difference.what for difference in differences if difference.red]


@pytest.mark.parametrize("case", list(shipped()), ids=str)
def test_shipped_tiles(case: Case) -> None:
    """M8: shared memory of each architecture."""
    check(case)


@pytest.mark.parametrize("case", list(unusual()), ids=str)
def test_unusual_shapes(case: Case) -> None:
    check(case)


# ---------------------------------------------------------------- which configurations


@pytest.mark.parametrize("arch", ARCHITECTURES, ids=lambda arch: arch.name)
def test_whatever_tile_can_be_chosen_is_compiled(arch: Architecture) -> None:
    """For every head dimension from 16 to 256, in every arithmetic; float16 stands for bfloat16."""
    listed = {
        (case.kernel, case.arithmetic, entry_of(case), of_launch(case))
        for case in shipped()
        if case.arch == arch and case.kernel in TILED
    }
    for arithmetic, itemsize in (("float16", 2), ("float32", 4), ("tf32", 4)):
        for dim in range(16, 257):
            chosen = choose_tiles(arch, dim, 16, itemsize)
            assert chosen == choose_tiles(arch, 16, dim, itemsize)
            for kernel in TILED:
                tile = getattr(chosen, kernel)
                what = (kernel, arithmetic, entry_dim(arch, kernel, arithmetic, dim), tile)
                assert what in listed


def entry_of(case: Case) -> int:
    return entry_dim(case.arch, case.kernel, case.arithmetic, case.dim)


def of_launch(case: Case) -> Tile:
    _, _, keywords = launched(case)
    return Tile(*(keywords[name] for name in ("BM", "BN", "num_warps", "num_stages", "WIDTH")))


def test_every_entry_of_the_table_of_tiles_is_compiled() -> None:
    """None is left to be chosen for the first time by a chip that nobody has compiled for."""
    tried = {
        (case.kernel, entry_of(case), case.dtype.itemsize, of_launch(case))
        for case in shipped()
        if case.kernel in TILED
    }
    for name, table in TABLES.items():
        itemsize = int(name.split()[0]) // 8
        for kernel, by_dim in table.items():
            for dim, entries in by_dim.items():
                for entry in entries:
                    assert (kernel, dim, itemsize, Tile(*entry)) in tried


def test_every_kernel_that_is_launched_is_compiled() -> None:
    launchers = {name for name, of in vars(launch).items() if isinstance(of, Launcher)}
    assert launchers == set(KERNELS.values())
    assert {case.kernel for case in shipped()} == set(KERNELS)


# ---------------------------------------------------------------- the baseline


def test_there_is_a_baseline_of_these_configurations() -> None:
    baseline, file = committed(), resources.key().name
    if baseline is None:
        pytest.skip(f"there is no {file}: nothing is compared with what it was; {resources.UPDATE} makes it")
    names = [str(case) for case in (*shipped(), *unusual())]
    assert not baseline.entries.keys() - set(names), "configurations of the baseline that nobody compiles"
    for name in names:
        if name not in baseline.entries:
            warnings.warn(f"{name}: is not in the baseline; {resources.UPDATE}", stacklevel=1)
    if baseline.ptxas != (ptxas := triton.knobs.nvidia.ptxas.version):
        warnings.warn(f"the baseline was assembled by ptxas {baseline.ptxas}, this by {ptxas}", stacklevel=1)


def test_a_case_that_takes_more_than_was_committed_is_red_and_one_that_takes_less_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    case = next(case for case in shipped() if case.kernel == "delta")
    found = resources.measure(1, [case])
    ((name, entry),) = found.entries.items()

    def against(**changes: int) -> None:
        old = msgspec.structs.replace(found, entries={name: msgspec.structs.replace(entry, **changes)})
        monkeypatch.setattr(f"{__name__}.committed", lambda: old)
        check(case)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        against()
    registers = entry.registers
    with pytest.raises(AssertionError, match=rf"worse than .*: registers {registers - 1} -> {registers}"):
        against(registers=registers - 1)
    with pytest.warns(UserWarning, match=rf"better than .*: registers {registers + 1} -> {registers}"):
        against(registers=registers + 1)


def test_measuring_in_processes_finds_the_same() -> None:
    cases = [case for case in shipped() if case.kernel in ("delta", "list") and case.arch.capability == 80]
    found = resources.measure(2, cases)
    assert found == resources.measure(1, cases)
    assert list(found.entries) == [str(case) for case in cases]
    assert found.failed == {}


# ---------------------------------------------------------------- configurations that are wrong on purpose


@pytest.fixture
def forward_tile(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[int, list[tuple[int, ...]]]]:
    """The table of the forward tiles for 16 bit, to be changed; on sm_90 it is the same one."""
    table: dict[int, list[tuple[int, ...]]] = dict(TABLES["16 bit"]["forward"])
    monkeypatch.setitem(TABLES["16 bit"], "forward", table)
    monkeypatch.setitem(TABLES["16 bit, sm_90"], "forward", table)
    choose_tiles.cache_clear()
    yield table
    choose_tiles.cache_clear()


LARGE = (128, 64, 8, 4)
"""At D = 128 a forward tile of 128 KiB on sm_80, 86, 89, and of 160 KiB on sm_90, in 16 bit."""


def at_128(chip: str) -> Case:
    return Case("forward", next(arch for arch in ARCHITECTURES if arch.name == chip), "float16", 128)


@pytest.mark.parametrize("chip, fits", [("sm80", True), ("sm86", False), ("sm89", False), ("sm90", True)])
def test_a_tile_that_is_too_big_is_red_on_the_chips_that_cannot_hold_it(
    chip: str, fits: bool, forward_tile: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Launch code that chooses without counting: the compiled program is what is judged."""
    forward_tile[128] = [LARGE]
    monkeypatch.setattr(tiles, "shared_memory", lambda *_: 0)
    found = resources.measure(1, [at_128(chip)])
    (entry,) = found.entries.values()
    assert (entry.tile, entry.shared >= 128 * 1024) == ((*LARGE, WHOLE), True)
    too_big = [what for what in red(resources.limits(found)) if "shared memory" in what]
    assert too_big == (
        [] if fits else [f"forward-{chip}-float16-D128: 128 KiB of shared memory; a block on {chip} has 99"]
    )


@pytest.mark.parametrize("chip, fits", [("sm80", True), ("sm86", False), ("sm89", False), ("sm90", True)])
def test_no_tile_that_fits_is_red_on_the_chips_that_have_none(
    chip: str, fits: bool, forward_tile: dict
) -> None:
    """Launch code that counts refuses: there is nothing that could be compiled."""
    forward_tile[128] = [LARGE]
    found = resources.measure(1, [at_128(chip)])
    assert list(found.failed) == ([] if fits else [f"forward-{chip}-float16-D128"])
    assert (f"no forward tile for head dimension 128 fits the 99 KiB of shared memory of {chip}"
            in "".join(red(resources.limits(found)))) == (not fits)  # fmt: skip


def test_a_tile_that_is_too_big_for_its_warps_spills_in_its_loops_and_is_red_unless_listed(
    forward_tile: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "SPILLS", [])
    forward_tile[128] = [(128, 64, 2, 2)]
    found = resources.measure(1, [at_128("sm80")])
    ((name, entry),) = found.entries.items()
    assert entry.stack > 0 and entry.spilled_in_loops >= entry.spilled_in_a_loop > MOST_SPILLED_IN_A_LOOP
    no_reason = (
        f"{name}: {entry.spilled_in_loops} instructions in loops over tiles move what is spilled;"
        " reports.resources.SPILLS gives no reason why"
    )
    too_many = (
        f"{name}: {entry.spilled_in_a_loop} instructions in one loop over tiles move what is spilled;"
        f" {MOST_SPILLED_IN_A_LOOP} are allowed"
    )
    assert red(resources.limits(found)) == [no_reason, too_many]
    monkeypatch.setattr(resources, "SPILLS", [Spills("on purpose", ("forward",), ("sm80",))])
    assert red(resources.limits(found)) == [too_many]
