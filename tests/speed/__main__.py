"""How fast: gates, the table of contenders, memory, first calls, on each code path of this machine's GPU.

    python -m tests.speed [pytest arguments] [--impl SPEC] [--contenders NAMES] [--rounds N] [--strict]

`tox -e bench` is this. All of it takes some minutes a path; `-k gate` has the gates alone,
`tests/speed/bench_table.py` the table. On a GPU newer than Ampere it runs twice, natively and with
TRITON_OVERRIDE_ARCH=sm80 (see `tests.gpu_paths`). Results are in FA_REPORT_DIR/<path>: speed.json, speed.md,
speed.html, plots, and what pytest-benchmark keeps (benchmark.json, with all rounds).

Exit status: 0 every gate that could be judged was reached; 1 one was not, or a result was wrong; 2 wrong use;
3 nothing was timed: no GPU that can be used. Nothing is ever timed through the interpreter.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from ..gpu_paths import (
    HELD,
    MISUSED,
    NOTHING_RAN,
    ROOT,
    WORDS,
    ask_machine,
    code_paths,
    combine,
    run,
    why_unusable,
)

MODULES = ("bench_gates.py", "bench_table.py", "bench_memory.py", "bench_first_call.py")
SEVERAL_PROCESSES = ("-n", "--numprocesses", "--dist", "--tx")


def command(arguments: Sequence[str], folder: Path) -> list[str]:
    """Of pytest, for one path, results in a folder."""
    here = Path(__file__).parent
    words = ["--strict-verdicts" if word == "--strict" else word for word in arguments]
    given = [argument for argument in arguments if argument.split("::")[0].endswith(".py")
             and "bench_" in argument and not argument.startswith("-")]  # fmt: skip
    modules = [] if given else [str(here / module) for module in MODULES]
    return [
        sys.executable, "-m", "pytest", "--noconftest", "-p", "no:xdist", "-p", "tests.speed.plugin",
        "--rootdir", str(ROOT), "--benchmark-timer=tests.speed.timer.now", "--benchmark-quiet",
        "-W", "ignore:Benchmark fixture was not used",  # of who is absent
        f"--benchmark-json={folder / 'benchmark.json'}", f"--asked={shlex.join(arguments)}", *words, *modules,
    ]  # fmt: skip


def main(arguments: Sequence[str]) -> int:
    if {"-h", "--help"} & set(arguments):
        print(__doc__)
        return HELD
    if any(a.split("=")[0] in SEVERAL_PROCESSES or (a[:2] == "-n" and a[2:].isdecimal()) for a in arguments):
        print("bench: -n, --dist and --tx are for tests; what is timed runs in one process", file=sys.stderr)
        return MISUSED
    if os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"):
        print("bench: TRITON_INTERPRET is set; the interpreter is never timed: unset it", file=sys.stderr)
        return NOTHING_RAN
    machine = ask_machine()
    if reason := why_unusable(machine):
        print(f"bench: {reason} Nothing was timed.", file=sys.stderr)
        return NOTHING_RAN
    reports = Path(os.environ.get("FA_REPORT_DIR") or ROOT / "reports" / "out").resolve()
    print(f"bench: {', '.join(map(str, machine.gpus))}; PyTorch {machine.torch}, CUDA {machine.cuda}")
    statuses: dict[str, int] = {}
    for path in code_paths(machine.usable, os.environ.get("TRITON_OVERRIDE_ARCH")):
        folder = reports / path.name
        folder.mkdir(parents=True, exist_ok=True)
        print(f"bench: path {path.name}, results in {folder}", flush=True)
        statuses[path.name] = run(path, command(arguments, folder), reports, {})
    for name, status in statuses.items():
        words = {HELD: "every gate that could be judged was reached"}.get(status, WORDS[status])
        print(f"bench: path {name}: {words} ({status})")
    return combine(statuses.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
