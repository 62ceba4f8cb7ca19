"""Tables and page of a run of speed, of made-up figures: what they say, of whom, and in what words."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import pytest

from reports import plots_of_speed as plots
from reports import speed
from reports.speed import digits, duration, markdown, render, size, write
from reports.timings import (
    CONVENTION,
    MEASURES,
    Contest,
    Curve,
    Entry,
    FirstCall,
    Gate,
    HostTime,
    Noise,
    Speed,
)

D64, D128 = "b8_h32x32_s2048_d64_float16_causal", "b8_h32x32_s2048_d128_float16_causal"
FULL = "b8_h32x32_s2048_d64_float16_full"
RAGGED = "r64_h16x16_s16384_d128_float16_causal_lognormal"

EMPTY = Speed(implementation="triton", device="a GPU", path="sm90", torch="2.11", triton="3.6")

QUIET = [1.001, 0.999, 1.002, 1.0, 0.998, 1.001, 0.999, 1.0, 1.002, 0.998, 1.0]
"""Factors of the rounds of a quiet machine."""


def rounds(seconds: float, n: int = 11, factors: list[float] = QUIET) -> list[float]:
    return [seconds * factor for factor in factors[:n]]


def contest(
    others: Mapping[str, Entry],
    problem: str = D64,
    step: str = "forward",
    measure: str = "device",
    flops: float = 1e12,
    control: float | None = 1.0,
) -> Contest:
    """A contest in which triton takes 2 ms; the control is so much slower."""
    own = rounds(2e-3)
    again = [] if control is None else [control * t for t in reversed(own)]
    return Contest(
        problem=problem, step=step, measure=measure, flops=flops, control=again,
        entries={"triton": Entry(seconds=own, kernels=["attention_forward"]), **others},
    )  # fmt: skip


def gate(name: str, verdict: str, ratio: float = 1.2) -> Gate:
    return Gate(
        name=name, problem=D64, step="forward", measure="device", subject="triton", other="sdpa-math",
        least=1.5, ratio=ratio, low=ratio * 0.99, high=ratio * 1.01, pairs=15, verdict=verdict,
    )  # fmt: skip


def line(contender: str, step: str, peak: list[int | None], exponent: float | None) -> Curve:
    lengths = [1024, 2048, 4096]
    seconds = [None if p is None else 1e-4 * (i + 1) ** 2 for i, p in enumerate(peak)]
    return Curve(contender=contender, step=step, heads=32, dim=64, lengths=lengths, peak=peak,
                 seconds=seconds, exponent=exponent)  # fmt: skip


def realistic() -> Speed:
    """A run with something of everything."""
    not_here = {"flash-attn": Entry(absent="not installed: flash_attn")}
    no_ragged = Entry(absent="it takes no ragged batches")

    def taken(**seconds: float) -> dict[str, Entry]:
        return {name.replace("_", "-"): Entry(seconds=rounds(t)) for name, t in seconds.items()} | not_here

    of_128 = taken(sdpa_math=30e-3, sdpa_cudnn=1e-3)
    of_128["flex"] = Entry(absent="wrong: out: largest z 812 > 6")
    of_full = taken(flex=4e-3, sdpa_cudnn=1.2e-3) | {"sdpa-math": Entry(seconds=rounds(25e-3, n=3))}
    contests = [
        contest(taken(sdpa_math=20e-3, flex=1.9e-3, sdpa_cudnn=2.01e-3)),
        contest(of_128, D128, control=1.2),
        contest(of_full, FULL),
        contest(dict.fromkeys(("sdpa-math", "flex", "sdpa-cudnn"), no_ragged) | not_here, RAGGED),
        contest(taken(sdpa_math=9e-3), step="backward", flops=2.5e12),
        contest(taken(flex=41e-6), measure="eager"),
        contest(taken(flex=41e-6), measure="graph"),
    ]
    MiB = 2**20
    curves = [
        line("triton", "forward", [MiB, 2 * MiB, 4 * MiB], 1.0),
        line("triton", "backward", [2 * MiB, 4 * MiB, 8 * MiB], 1.02),
        line("sdpa-math", "forward", [64 * MiB, 256 * MiB, None], 2.0),
        line("sdpa-math", "backward", [0, None, None], None),
    ]
    return msgspec.structs.replace(
        EMPTY, cudnn="9.1", driver="570", arguments=["--rounds", "11"], ended="2026-01-02T03:04:05+00:00",
        seconds=125.4, others_busy="processes 17 are on this GPU too", matmul=750e12, copy=4.1e12,
        contests=contests, gates=[gate("fast enough", "faster", 1.7), gate("as fast", "cannot tell", 1.5)],
        noise=Noise(comparisons=200, verdicts={"same": 190, "cannot tell": 8, "slower": 2},
                    ratios=[0.99, 0.999, 1.0, 1.001, 1.012], delay=0.05, slowed=50, found=48),
        curves=curves,
        first_calls=[
            FirstCall(cache="cold", imported=1.5, first=12.3, second=0.0123, compiled=9, from_cache=0)
        ],
        host_times=[HostTime(contender="triton", problem=D64, step="forward", seconds=35.2e-6),
                    HostTime(contender="flex", problem=D64, step="forward", seconds=101e-6)],
    )  # fmt: skip


@pytest.fixture(scope="module")
def run() -> Speed:
    return realistic()


def table(text: str, title: str) -> list[dict[str, str]]:
    """The rows of the table under a heading, by column."""
    part = text.split(f"#### {title}\n")[1].split("\n#### ")[0]
    lines = [line for line in part.splitlines() if line.startswith("|")]
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split(" | ")] for line in lines)
    assert all(len(row) == len(head) for row in rows)
    return [dict(zip(head, row, strict=True)) for row in rows]


def words(page: str) -> str:
    """What a reader of the page reads, without figures."""
    page = re.sub(r"<(svg|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    return html.unescape(re.sub(r"\s+", " ", re.sub(r"<[^>]+>", " ", page)))


def with_contests(*those: Contest) -> Speed:
    return msgspec.structs.replace(EMPTY, contests=list(those))


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("x", "shown"),
    [(1.3, "1.30"), (0.98765, "0.988"), (9.996, "10.0"), (99.96, "100"), (1234.5, "1230"), (0.0123, "0.0123"),
     (0, "0"), (-2.5, "-2.50"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_have_three_digits(x: float, shown: str) -> None:
    assert digits(x) == shown


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(12.34, "12.3 s"), (0.99996, "1.00 s"), (2e-3, "2.00 ms"), (0.9996e-3, "1.00 ms"), (41e-6, "41.0 µs"),
     (3e-7, "0.300 µs"), (0, "0 µs")],
)  # fmt: skip
def test_times_have_a_unit_that_fits(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_bytes_have_a_unit_that_fits() -> None:
    assert [size(n) for n in (0, 1023, 1024, 3 * 2**20, 5 * 2**29)] == \
        ["0 B", "1023 B", "1.00 KiB", "3.00 MiB", "2.50 GiB"]  # fmt: skip


# ---------------------------------------------------------------- what the tables say


def test_a_row_has_rates_ratios_and_verdicts(run: Speed) -> None:
    first, second, third, ragged = table(markdown(run), "Forward, device: TFLOP/s")
    assert first == {
        "problem": "D 64, causal, B 8, T 2048, H 32",
        "triton": "500",  # 1e12 operations in 2 ms
        "sdpa-math": "50.0 (10.0x ▲)",  # in 20 ms
        "flex": "526 (0.950x ▼)",  # in 1.9 ms
        "sdpa-cudnn": "498 (1.00x =)",  # in 2.01 ms
        "A/A": "1.000",
    }
    assert second["sdpa-math"] == "33.3 (15.0x ?)", "the control is 1.2 times slower: nothing can be told"
    assert second["A/A"] == "1.200 !"
    assert second["flex"] == "–"
    assert third["sdpa-math"] == "40.0 (3 pairs ?)"
    assert third["sdpa-cudnn"] == "833 (0.600x ▼)"
    assert {ragged[name] for name in ("sdpa-math", "flex", "sdpa-cudnn")} == {"–"}


@pytest.mark.parametrize("measure", ["eager", "graph"])
def test_with_the_host_there_are_times(run: Speed, measure: str) -> None:
    assert table(markdown(run), f"Forward, {measure}: time of a call") == [
        {"problem": "D 64, causal, B 8, T 2048, H 32", "GFLOP": "1000", "triton": "2.00 ms",
         "flex": "41.0 µs (0.0205x ▼)", "A/A": "1.000"}
    ]  # fmt: skip


def test_every_table_of_contests_says_what_is_counted_and_what_a_time_is_of(run: Speed) -> None:
    parts = markdown(run).split("\n#### ")[1:]
    told = {part.splitlines()[0]: part for part in parts}
    contests = [title for title in told if ", " in title and title.split(",")[0] in ("Forward", "Backward")]
    assert len(contests) == 4
    for title in contests:
        assert CONVENTION in told[title], title
        measure = title.split(", ")[1].split(":")[0]
        assert [name for name in MEASURES if MEASURES[name] in told[title]] == [measure]
    assert all(text in told["Geometric means of the ratios, by head dimension"] for text in MEASURES.values())
    assert CONVENTION in told["Geometric means of the ratios, by head dimension"]
    assert CONVENTION in told["Gates"] and MEASURES["device"] in told["Gates"]
    assert markdown(run).count(CONVENTION) == 6
    assert words(render([run])).count(CONVENTION) == 7, "beside the roofline too"


def test_geometric_means_are_of_the_problems_that_have_a_ratio(run: Speed) -> None:
    rows = table(markdown(run), "Geometric means of the ratios, by head dimension")
    by_group = {(row["step"], row["measure"], row["D"]): row for row in rows}
    of_64 = by_group["forward", "device", "64"]
    assert of_64["sdpa-math"] == "10.0x (of 1: 1▲)", "three pairs are no ratio"
    assert of_64["flex"] == "1.38x (of 2: 1▲ 1▼)", "sqrt(0.95 * 2)"
    assert of_64["sdpa-cudnn"] == "0.777x (of 2: 1= 1▼)", "sqrt(1.005 * 0.6)"
    assert by_group["forward", "device", "128"]["sdpa-math"] == "15.0x (of 1: 1?)"
    assert by_group["backward", "device", "64"]["flex"] == "–"


def test_a_problem_of_two_contests_counts_once_in_a_mean_with_more_pairs() -> None:
    those = [contest({"other": Entry(seconds=rounds(t, n))}) for t, n in ((4e-3, 9), (5e-3, 11), (6e-3, 8))]
    (row,) = table(markdown(with_contests(*those)), "Geometric means of the ratios, by head dimension")
    assert row["other"] == "2.50x (of 1: 1▲)"


def test_a_verdict_needs_a_quiet_control() -> None:
    twice = {"other": Entry(seconds=rounds(4e-3))}
    verdicts = {}
    for what, again in {"quiet": 1.0, "none": None, "off": 1.2}.items():
        found = speed.versus(contest(twice, control=again), "triton", "other")
        assert found is not None
        verdicts[what] = found.verdict
    assert verdicts == {"quiet": "faster", "none": "faster", "off": "cannot tell"}
    short = contest(twice)
    short.control[:] = short.control[:3]
    found = speed.versus(short, "triton", "other")
    assert found is not None and found.verdict == "cannot tell", "a control of three rounds says nothing"


def test_the_subject_may_be_another_than_triton() -> None:
    mine = msgspec.structs.replace(
        with_contests(contest({"mine": Entry(seconds=rounds(1e-3))}, control=0.5)), implementation="mine"
    )
    (row,) = table(markdown(mine), "Forward, device: TFLOP/s")
    assert list(row)[:3] == ["problem", "mine", "triton"]
    assert row["triton"] == "500 (2.00x ▲)"
    assert "over 1x mine is faster" in markdown(mine)


def test_without_the_subject_there_are_figures_and_no_ratios() -> None:
    alone = contest({"other": Entry(seconds=rounds(4e-3))})
    alone.entries["triton"] = Entry(absent="raised CompilationError: no")
    (row,) = table(markdown(with_contests(alone)), "Forward, device: TFLOP/s")
    assert (row["triton"], row["other"], row["A/A"]) == ("–", "250", "–")
    assert "absent: triton (D 64, causal, B 8, T 2048, H 32): raised CompilationError: no" in markdown(
        with_contests(alone)
    )


# ---------------------------------------------------------------- who is absent


def test_who_is_nowhere_has_no_column_and_is_told_once(run: Speed) -> None:
    for text in (markdown(run), words(render([run]))):
        assert text.count("not installed: flash_attn") == 1
    assert "- absent: flash-attn (everywhere): not installed: flash_attn\n" in markdown(run)
    assert "flash-attn" not in table(markdown(run), "Forward, device: TFLOP/s")[0]


def test_who_has_no_figure_is_told_with_the_reason_and_where(run: Speed) -> None:
    text = markdown(run)
    assert "- absent: flex (D 128, causal, B 8, T 2048, H 32): wrong: out: largest z 812 &gt; 6" in text
    assert text.count("it takes no ragged batches") == 1
    assert re.search(r"- absent: sdpa-math, flex, sdpa-cudnn \(.*lognormal.*\): it takes no ragged", text)
    said = re.sub(r" (?=[):])", "", words(render([run])))
    assert "absent: flex (D 128, causal, B 8, T 2048, H 32): wrong: out: largest z 812 > 6" in said


def test_many_absences_of_a_kind_are_one_line() -> None:
    lengths = (512, 1024, 2048, 4096, 8192)
    those = []
    for dim in (64, 256):
        for length in lengths:
            entry = Entry(absent="no kernel for it") if dim == 256 else Entry(seconds=rounds(4e-3))
            last = Entry(absent="not enough memory") if length == 8192 else Entry(seconds=rounds(4e-3))
            some = Entry(absent="odd") if length != 512 or dim == 64 else Entry(seconds=rounds(4e-3))
            others = {"one": entry, "two": last, "three": some}
            those.append(contest(others, f"b1_h8x8_s{length}_d{dim}_float16_causal"))
    absent = [line for line in markdown(with_contests(*those)).splitlines() if line.startswith("- absent")]
    assert absent[:2] == [
        "- absent: one (all D 256): no kernel for it",
        "- absent: two (all T 8192): not enough memory",
    ]
    assert absent[2].startswith("- absent: three (9 of 10 problems: D 64, causal, B 1, T 512, H 8;")
    assert absent[2].endswith("and others): odd")
    assert len(absent) == 3


def test_an_id_that_is_none_is_shown_as_it_is() -> None:
    found = with_contests(contest({"other": Entry(seconds=rounds(1e-3))}, "from_elsewhere"))
    (row,) = table(markdown(found), "Forward, device: TFLOP/s")
    assert row["problem"] == "from elsewhere"
    assert table(markdown(found), "Geometric means of the ratios, by head dimension")[0]["D"] == "–"
    assert "from elsewhere" in words(render([found]))


def test_who_did_not_take_part_is_not_called_absent() -> None:
    found = with_contests(contest({"other": Entry(seconds=rounds(1e-3))}), contest({}, D128))
    assert [row["other"] for row in table(markdown(found), "Forward, device: TFLOP/s")] == [
        "1000 (0.500x ▼)",
        "–",
    ]
    assert "- absent" not in markdown(found)


# ---------------------------------------------------------------- gates, noise, the rest


@pytest.mark.parametrize(
    ("verdicts", "kind", "gist"),
    [
        ([], "other", "No gate was measured"),
        (["faster"], "held", "Held: the one gate"),
        (["faster", "same"], "held", "Held: all of 2 gates"),
        (["faster", "cannot tell"], "other", "Held: 1 of 2 gates; of 1 nothing can be told"),
        (["faster", "slower"], "broken", "Broken: 1 of 2 gates"),
        (["slower", "cannot tell"], "broken", "Broken: 1 of 2 gates; of 1 nothing can be told"),
    ],
)
def test_the_headline_is_of_the_gates(verdicts: list[str], kind: str, gist: str) -> None:
    found = msgspec.structs.replace(EMPTY, gates=[gate(f"gate {n}", v) for n, v in enumerate(verdicts)])
    page = render([found])
    assert f'<header class="{kind}">' in page
    assert f"<h1>{gist}</h1>" in page
    assert f"\n{gist}.\n" in markdown(found)


def test_gates_of_all_code_paths_make_the_headline() -> None:
    paths = [
        msgspec.structs.replace(EMPTY, path=path, gates=[gate("fast enough", verdict)])
        for path, verdict in (("sm90", "faster"), ("sm80-override", "slower"))
    ]
    page = words(render(paths))
    assert "Broken: 1 of 2 gates" in page
    assert "broken: fast enough (sm80-override): 1.20x, at least 1.50x" in page
    assert "triton on a GPU, sm90" in page and "triton on a GPU, sm80-override" in page


def test_gates_have_their_interval_pairs_and_verdict(run: Speed) -> None:
    rows = table(markdown(run), "Gates")
    assert [row["verdict"] for row in rows] == ["held (faster)", "cannot tell"]
    assert rows[0]["ratio"] == "1.70x (1.68 to 1.72)"
    assert (rows[0]["pairs"], rows[0]["at least"]) == ("15", "1.50x")
    assert rows[0]["of times"] == "sdpa-math / triton"


def test_noise_memory_first_calls_and_host_time(run: Speed) -> None:
    text = markdown(run)
    assert "200 comparisons: faster 0, same 190, slower 2, cannot tell 8; wrong are 2." in text
    assert "Medians of these ratios: 0.990 to 1.012, half of them below 1.000." in text
    assert "Against itself made slower by 5%: found in 48 of 50." in text
    memory = table(text, "Peak memory against T: B H 32, D 64, causal, float16")
    assert memory[0] == {"contender": "triton", "step": "forward", "T 1024": "1.00 MiB", "T 2048": "2.00 MiB",
                         "T 4096": "4.00 MiB", "exponent": "1.00"}  # fmt: skip
    assert (memory[2]["T 4096"], memory[3]["T 1024"], memory[3]["exponent"]) == ("–", "0 B", "–")
    times = table(text, "Time against T: B H 32, D 64, causal, float16")
    assert [row["T 4096"] for row in times] == ["900 µs", "900 µs", "–", "–"]
    assert table(text, "First call") == [
        {"Triton's cache": "cold", "import": "1.50 s", "first call": "12.3 s", "second call": "12.3 ms",
         "compiled": "9", "cached": "0"}
    ]  # fmt: skip
    assert table(text, "Host time")[0]["flex"] == "101 µs"
    said = words(render([run]))
    for fact in ("2026-01-02 03:04:05 UTC, after 125 s", "torch 2.11, Triton 3.6, cuDNN 9.1, driver 570",
                 "a large float16 product 750 TFLOP/s; a large copy 4.10 TB/s",
                 "processes 17 are on this GPU too", "1.00 MiB", "wrong are 2", "101 µs"):  # fmt: skip
        assert fact in said, fact
        assert fact in text, fact


# ---------------------------------------------------------------- the page


def test_nothing_makes_a_page_too() -> None:
    assert "Nothing ran" in words(render([]))
    page = render([EMPTY])
    assert "<svg" not in page and "<table" not in page
    assert markdown(EMPTY).startswith("### Speed of triton on a GPU, sm90\n")
    assert "|" not in markdown(EMPTY)


def test_what_comes_from_a_run_is_text_and_no_markup() -> None:
    bad = "<script>alert(1)</script>"
    others = {
        bad: Entry(seconds=rounds(1e-3), kernels=[bad]),
        "gone": Entry(absent=f"{bad} | a\nb"),
    }
    found = msgspec.structs.replace(
        with_contests(contest(others, bad)),
        implementation=bad, device=bad, path=bad, arguments=[bad], others_busy=bad,
        gates=[msgspec.structs.replace(gate(bad, "slower"), problem=bad)],
        curves=[line(bad, "forward", [1024, 2048, None], 1.0)],
        host_times=[HostTime(contender=bad, problem=bad, step=bad, seconds=1.0)],
    )  # fmt: skip
    page = render([found])
    assert "<script" not in page
    assert bad in words(page)
    text = markdown(found)
    assert "<script" not in re.sub("`[^`]*`", "", text)
    (row,) = table(text, "Host time")
    assert row["step"] == "&lt;script&gt;alert(1)&lt;/script&gt;"
    assert "&lt;/script&gt; \\| a b" in text, "neither a line nor a cell ends in a reason"


def test_names_of_any_kind_can_be_drawn(tmp_path: Path) -> None:
    names = ("_hidden", r"$\frac{1$", "x" * 200)
    those = with_contests(contest({name: Entry(seconds=rounds(1e-3)) for name in names}))
    found = msgspec.structs.replace(those, curves=[line(n, "forward", [2**20] * 3, 0.0) for n in names])
    drawing = plots.memory(found)
    assert drawing
    drawn = html.unescape(drawing.picture("memory").svg)
    for name in ("_hidden", r"$\frac{1$", "xxx..."):
        assert f"{name}: 0.00" in drawn, name
    assert len(write(found, tmp_path)) == 5


def test_the_page_needs_nothing_else_and_its_pictures_are_told_in_words(run: Speed) -> None:
    two = [run, msgspec.structs.replace(run, path="sm80-override")]
    page = render(two)
    assert page.startswith("<!DOCTYPE html>")
    assert not re.search(r"<(link|img|script|iframe)|@import|\bsrc=|url\((?!#)", page)
    assert not re.findall(r'(?:href)="(?!#)[^"]*"', page)
    assert page.count("<svg") == 2 * (1 + 3)
    assert len(re.findall(r'<figure role="img" aria-label="[^"]{40,}', page)) == page.count("<svg")
    ids = re.findall(r'\bid="([^"]+)"', page)
    assert len(ids) == len(set(ids)), "an id stands twice"
    for anchor in re.findall(r'href="#([^"]+)"', page):
        assert anchor in ids
    assert page.count("<table") == page.count('<div class="scroll" tabindex="0">')


# ---------------------------------------------------------------- pictures


def test_pictures_say_what_is_seen(run: Speed) -> None:
    memory, latency, roofline = plots.memory(run), plots.latency(run), plots.roofline(run)
    assert memory and latency and roofline
    assert memory.title == "Growth of the peak memory: triton T^1.02, sdpa-math T^2.00."
    assert "sdpa-math forward beyond T 2048" in memory.alt
    assert "triton" not in memory.alt.split("Not drawn")[1]
    assert latency.title == "At T 2048 the forward takes triton 400 µs, sdpa-math 400 µs."
    # 500 and 1000 of 750 TFLOP/s
    assert roofline.title.endswith(" of the rate of a large product: triton 66.7%, sdpa-cudnn 133%.")
    ratios = plots.ratios(run, "forward", "device")
    assert ratios
    assert ratios.title == (
        "Forward, device: of 7 ratios triton is faster in 2, same in 1, slower in 2, cannot tell in 2."
    )
    assert "sdpa-math 12.2x" in ratios.alt, "sqrt(10 * 15)"


def test_what_is_not_there_is_not_drawn() -> None:
    drawings = (plots.memory, plots.latency, plots.roofline)
    assert [draw(EMPTY) for draw in drawings] == [None] * 3
    nowhere = msgspec.structs.replace(EMPTY, curves=[line("triton", "forward", [None] * 3, None)])
    assert [draw(nowhere) for draw in drawings] == [None] * 3
    assert plots.ratios(with_contests(contest({})), "forward", "device") is None
    one = msgspec.structs.replace(line("triton", "forward", [1024], None), lengths=[1024])
    assert plots.memory(msgspec.structs.replace(EMPTY, curves=[one])) is None, "one T is no curve"
    few = contest({"other": Entry(seconds=rounds(1e-3, n=2))})
    assert plots.ratios(with_contests(few), "forward", "device") is None
    wide = contest({}, "b8_h32x32_s2048_d64_float32_causal")
    assert plots.roofline(with_contests(wide)) is None, "float32 has no ceiling here"
    assert plots.roofline(with_contests(contest({}))) is not None, "without ceilings there are the rates"


def test_a_gap_stays_a_gap(run: Speed) -> None:
    gap = msgspec.structs.replace(run, curves=[line("triton", "forward", [1024, None, 4096], 1.0)])
    drawing = plots.memory(gap)
    assert drawing
    (drawn,) = drawing.draw("black").axes[0].lines
    y = np.asarray(drawn.get_ydata()).tolist()
    assert y[0] == 1024 and math.isnan(y[1]) and y[2] == 4096


def test_marks_of_the_roofline_are_at_their_intensity(run: Speed) -> None:
    one = msgspec.structs.replace(run, contests=[contest({})])
    drawing = plots.roofline(one)
    assert drawing
    lines = drawing.draw("black").axes[0].lines
    slope, ceiling, marks = (np.asarray(drawn.get_xydata()).tolist() for drawn in lines)
    # q, k, v, out: 4 x 8 x 32 x 2048 x 64 elements of 2 bytes; lse: 8 x 32 x 2048 of 4
    assert marks == [pytest.approx([1e12 / (8 * 32 * 2048 * (4 * 64 * 2 + 4)), 500])]
    assert slope[-1] == ceiling[0] == pytest.approx([750 / 4.1, 750])


def test_a_run_writes_its_files(run: Speed, tmp_path: Path) -> None:
    folder = tmp_path / "new"
    written = write(run, folder)
    assert [path.name for path in written] == [
        "speed.md", "speed.html", "memory.png", "latency.png", "roofline.png"
    ]  # fmt: skip
    for path in written[2:]:
        data = path.read_bytes()
        assert data.startswith(b"\x89PNG\r\n\x1a\n") and data.rstrip().endswith(b"IEND\xaeB`\x82")
    assert (folder / "speed.md").read_text() == markdown(run)
    assert (folder / "speed.html").read_text() == render([run])
    assert [path.name for path in write(EMPTY, folder)] == ["speed.md", "speed.html"]
    assert not list(folder.glob("*.png")), "pictures of an earlier run are not of this one"


def test_pngs_are_on_white(run: Speed, tmp_path: Path) -> None:
    from matplotlib.image import imread

    drawing = plots.roofline(run)
    assert drawing
    drawing.png(tmp_path / "roofline.png")
    pixels = imread(tmp_path / "roofline.png")
    assert pixels[0, 0, :3].tolist() == [1, 1, 1] and pixels[..., 3].min() == 1
    assert pixels.shape[1] > 600
