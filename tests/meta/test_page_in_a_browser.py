"""The page in a browser, where one is installed: it fits a phone, sorts and filters, and shows something."""

from __future__ import annotations

import html
import os
import re
import shutil
import subprocess
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.image import imread

from reports.outcomes import report
from reports.page import FEW, render
from reports.records import Record
from tests.cases import Case
from tests.comparison import compare
from tests.meta.plain import CPU, spoiled
from tests.meta.test_page import RUN, many

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
PHONE, DESKTOP = 390, 1280


@pytest.fixture(scope="module")
def browser() -> str:
    """A browser that starts: on some systems there is only a word that says how to get one."""
    names = [name for name in NAMES if shutil.which(name)]
    for name in names:
        if subprocess.run([name, "--version"], capture_output=True, timeout=60, check=False).returncode == 0:
            return name
    pytest.skip(
        f"no browser starts: {', '.join(names)}" if names else f"none is installed: {', '.join(NAMES)}"
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run with all there is: figures, tables, a failure with both maps, an earlier run."""
    case = Case(batch=2, heads_q=3, heads_kv=3, len_q=150, len_k=150, dim=32, dim_v=32, grad="none", seed=4)
    wrong = spoiled(lambda x: (x[1, 2, 129].mul_(2), x[0, 0, 3].fill_(float("nan"))))
    broken = compare(case, wrong, CPU, "recipe", hostile=True)
    held = compare(Case(len_q=40, len_k=40), spoiled(lambda x: None), CPU, "edge", hostile=False)
    found: list[Record] = [broken, *many(FEW, held)]
    path = tmp_path_factory.mktemp("page") / "report.html"
    run = msgspec.structs.replace(RUN, status=1, arguments=["--case", broken.case * 2])
    path.write_text(render(found, run, report(found[1:], None)), encoding="utf-8")
    return path


def browse(browser: str, page: Path, folder: Path, *words: str) -> str:
    """What a browser prints of a page."""
    command = [browser, "--headless", "--disable-gpu", "--hide-scrollbars"]
    command.append(f"--user-data-dir={folder}/browser")
    command += ["--no-sandbox"] * (hasattr(os, "geteuid") and os.geteuid() == 0)
    done = subprocess.run(
        [*command, *words, page.as_uri()], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def asked(browser: str, page: Path, folder: Path, width: int, script: str) -> str:
    """What a script returns in the page, in a frame of a width: the least that a window has may be more."""
    probe = (
        f"{page.read_text()}<script>document.title = `<answer>${{(() => {{{script}}})()}}</answer>`</script>"
    )
    frame = folder / "frame.html"
    frame.write_text(
        f'<meta charset="utf-8"><iframe id="f" style="width:{width}px;height:800px;border:0"'
        f' srcdoc="{html.escape(probe)}"></iframe>'
        '<script>document.getElementById("f").onload = (e) =>'
        " document.body.append(e.target.contentDocument.title)</script>",
        encoding="utf-8",
    )
    printed = browse(browser, frame, folder, "--dump-dom", "--virtual-time-budget=10000")
    answers = re.findall(r"&lt;answer&gt;(.*?)&lt;/answer&gt;", printed.rpartition("</iframe>")[2])
    assert answers, printed[-500:]
    return html.unescape(answers[0])


@pytest.mark.parametrize("width", [PHONE, DESKTOP])
def test_nothing_is_wider_than_the_screen(width: int, browser: str, page: Path, tmp_path: Path) -> None:
    script = """
        const wide = [...document.querySelectorAll("body *")]
            .filter((e) => e.getBoundingClientRect().right > innerWidth + 1)
            .filter((e) => !e.parentElement.closest(".scroll, svg, code.line"));
        return [document.documentElement.scrollWidth, ...wide.map((e) => e.outerHTML.slice(0, 80))].join(" ");
    """
    assert asked(browser, page, tmp_path, width, script).strip() == str(width)


def test_the_table_is_filtered_and_sorted(browser: str, page: Path, tmp_path: Path) -> None:
    script = """
        const table = document.getElementById("all"), filter = document.getElementById("filter");
        const shown = () => [...table.tBodies[0].rows].filter((row) => !row.hidden);
        const column = (n) => shown().map((row) => row.cells[n].textContent.trim());
        const before = column(0).length;
        filter.value = "float16 mean"; filter.dispatchEvent(new Event("input"));
        const found = column(8);
        filter.value = ""; filter.dispatchEvent(new Event("input"));
        table.tHead.rows[0].cells[3].firstChild.click();
        const down = column(3);
        table.tHead.rows[0].cells[3].firstChild.click();
        return JSON.stringify([before, found, down, column(3)]);
    """
    before, found, down, up = msgspec.json.decode(asked(browser, page, tmp_path, DESKTOP, script))
    assert before == FEW + 1
    assert found and len(found) < before and all("float16" in case and "mean" in case for case in found)
    numbers = [float(text) for text in down if text]
    assert numbers == sorted(numbers, reverse=True)
    assert up == down[::-1] or sorted(up) == sorted(down)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_it_shows_something_in_light_and_in_the_dark(
    dark: bool, browser: str, page: Path, tmp_path: Path
) -> None:
    picture = tmp_path / "page.png"
    words = ["--blink-settings=preferredColorScheme=0"] * dark
    browse(browser, page, tmp_path, f"--screenshot={picture}", f"--window-size={DESKTOP},2400", *words)
    colours = imread(picture)[..., :3]
    assert colours.shape == (2400, DESKTOP, 3)
    background = colours[5, 3].mean()
    assert background < 0.25 if dark else background > 0.75
    other = (np.abs(colours.mean(-1) - background) > 0.2).mean()
    assert 0.01 < other < 0.6
    red, green, blue = np.moveaxis(colours, -1, 0)
    assert ((red > 0.7) & (green > 0.2) & (green < 0.6) & (blue < 0.35)).sum() > 500  # beyond its limit
