"""What a reader gets of a tile sweep: the tables, what is claimed, the files and the picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kernels.tiles import WHOLE, Tile
from reports import tile_sweep, tiles
from reports.errors import ReportError
from reports.plots_of_tiles import plot
from reports.tile_claims import claims
from reports.tile_sweep import markdown
from reports.tiles import MEASURED, PRUNED, WRONG, Program, TileEntry, TileSweep
from tests.speed import pairs
from tests.speed.occupancy import KIB
from tests.speed.sweep import outcomes


def entry(
    kernel: str, dim: int, tile: tuple[int, ...], ms: float, *, registers: int = 128,
    spilled: int = 0, shipped: bool = False, final: Sequence[float] = (),
) -> TileEntry:  # fmt: skip
    """One that was measured, in `ms` with a causal mask and in twice that without."""
    programs = {"causal": Program(registers=registers, spilled=spilled, shared=64 * KIB),
                "full": Program(registers=registers - 8, spilled=0, shared=60 * KIB)}  # fmt: skip
    outcome = outcomes.Outcome(
        MEASURED, "", programs, {"T 2048 causal": [ms / 1e3] * 7, "T 2048 full": [ms / 500] * 7}
    )
    if final:
        outcome.final = {"T 2048 causal": [t / 1e3 for t in final], "T 2048 full": [t / 500 for t in final]}
    return outcomes.entry(kernel, dim, Tile(*tile), shipped, outcome, [90])


NOISE = [1 + 0.001 * (n % 5 - 2) for n in range(15)]


def made_up(*entries: TileEntry, **changes: Any) -> TileSweep:
    controls = {f"{of.kernel} {of.dim}": of.final for of in entries if of.shipped}
    values: dict[str, Any] = {
        "device": "NVIDIA H200", "chip": "sm90", "compiled_for": "sm90", "path": "sm90", "dtype": "float16",
        "table": "16 bit, sm_90", "tokens": 16384, "versions": {"triton": "3.6.0"}, "controls": controls,
    }  # fmt: skip
    return TileSweep(entries=list(entries), **values | changes)


FORWARD = (
    entry("forward", 64, (64, 64, 4, 3), 0.5, shipped=True, final=[0.5 * x for x in NOISE]),
    entry("forward", 64, (128, 128, 8, 2), 0.4, registers=200, final=[0.4 * x for x in reversed(NOISE)]),
    entry("forward", 64, (128, 64, 4, 3), 0.39, registers=255, spilled=40, final=[0.39] * 15),
    TileEntry(kernel="forward", dim=64, BM=128, BN=128, warps=4, stages=3, status=PRUNED, reason="too large"),
    TileEntry(kernel="forward", dim=64, BM=32, BN=128, warps=4, stages=3, status=PRUNED, reason="too large"),
    TileEntry(kernel="forward", dim=64, BM=32, BN=32, warps=4, stages=3, status=WRONG, reason="dq | off"),
)
DQ = (
    entry("dq", 64, (64, 64, 4, 2), 1.0, shipped=True, final=NOISE),
    entry("dq", 64, (128, 64, 8, 2), 0.999, registers=200, final=[0.999 * x for x in reversed(NOISE)]),
)


def test_the_table_is_sorted_by_time_and_says_what_is_left_out() -> None:
    lines = markdown(made_up(*FORWARD, *DQ)).splitlines()
    begin = lines.index("#### forward, D = 64")
    rows = lines[begin + 4 : begin + 7]
    assert rows[0] == (
        "| 128 | 64 | 4 | 3 | whole | 0.390 | 0.780 | 1.282 | 255 | 40 | 64 | 2 | registers | 12.5% |"
    )
    assert rows[1].startswith("| 128 | 128 | 8 | 2 | whole | 0.400 | 0.800 | 1.250 | 200 |")
    assert rows[2].startswith("| **64** | **64** | **4** | **3** | **whole** | **0.500** | **1.000** |")
    assert "- 2 pruned: too large" in lines
    assert "- 1 wrong: dq \\| off (32x32 w4 s3)" in lines
    assert "Of 8 tiles 5 measured, 2 pruned, 1 wrong." in "\n".join(lines)


def test_only_what_is_faster_by_more_than_noise_is_for_the_tile_table() -> None:
    found = {of.kernel: of for of in claims(made_up(*FORWARD, *DQ))}
    assert found["forward"].line == "64: [(128, 64, 4, 3)],", "what spills may be the best all the same"
    assert found["forward"].verdict == pairs.FASTER
    assert found["forward"].ratio is not None and found["forward"].ratio.median == pytest.approx(
        1.282, abs=0.01
    )
    assert found["dq"].verdict == pairs.SAME
    page = markdown(made_up(*FORWARD, *DQ))
    code = page[page.index("```python") :]
    assert "    64: [(128, 64, 4, 3)],  # 1.28 (" in code
    assert "against (64, 64, 4, 3), spills 40 B\n" in code
    assert "| forward | 64 | 64x64 w4 s3 | 128x64 w4 s3, spills 40 B | 1.28 (" in page
    assert "dq" not in code
    assert "No other tile is faster by more than noise" in markdown(made_up(*DQ))


def test_the_width_of_slices_is_told_and_is_the_fifth_number_where_it_is_not_whole() -> None:
    assert tiles.WHOLE == WHOLE
    sliced = entry("dq", 128, (64, 64, 4, 2, 64), 0.5, final=[0.5 * x for x in reversed(NOISE)])
    whole = entry("dq", 128, (64, 64, 4, 2), 1.0, shipped=True, final=NOISE)
    (of,) = claims(made_up(whole, sliced))
    assert of.line == "128: [(64, 64, 4, 2, 64)],"
    page = markdown(made_up(whole, sliced))
    assert "| 64 | 64 | 4 | 2 | 64 | 0.500 |" in page
    assert "| dq | 128 | 64x64 w4 s2 | 64x64 w4 s2 c64 |" in page
    old = TileEntry(kernel="dq", dim=128, BM=64, BN=64, warps=4, stages=2, status=PRUNED)
    assert old.width == WHOLE, "files of before there were slices say none"


def test_without_enough_rounds_or_quiet_nothing_is_claimed() -> None:
    few = [entry("dq", 64, (64, 64, 4, 2), 1.0, shipped=True, final=[1.0] * 6),
           entry("dq", 64, (64, 32, 4, 2), 0.5, final=[0.5] * 6)]  # fmt: skip
    (of,) = claims(made_up(*few))
    assert (of.ratio, of.verdict) == (None, pairs.CANNOT_TELL)
    assert "too few rounds" in markdown(made_up(*few))
    loud = {"forward 64": {"T 2048 causal": [0.6e-3] * 15, "T 2048 full": [1.2e-3] * 15}}
    (of,) = claims(made_up(*FORWARD, controls=loud))
    assert of.verdict == pairs.CANNOT_TELL
    assert claims(made_up(FORWARD[1])) == [], "there is no shipped one"
    assert "Nothing was compared." in markdown(made_up(FORWARD[1]))


def test_the_files_are_read_back_and_drawn_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = made_up(*FORWARD, *DQ, path="sm80-override", compiled_for="sm80")
    tile_sweep.write(whole, tmp_path)
    path = tmp_path / tile_sweep.FILE
    assert tiles.read(path) == whole
    (tmp_path / tile_sweep.PAGE).unlink()
    assert tile_sweep.main([str(path)]) == 0
    assert "The code is that for sm80, assembled for sm90" in (tmp_path / tile_sweep.PAGE).read_text()
    picture = (tmp_path / tile_sweep.PLOT).read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 20_000
    path.write_text(path.read_text().replace('"version": 1', '"version": 2'))
    assert tile_sweep.main([str(path)]) == 2
    assert "a file of a tile sweep of version 2; this reads version 1" in capsys.readouterr().err
    with pytest.raises(ReportError, match="no tile has a time"):
        plot(made_up(FORWARD[3]), tmp_path / "none.png")
