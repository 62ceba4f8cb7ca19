"""What a fresh process pays: imports, compilation, the first call; and what each call costs the host.

    python -m tests.speed.first_call

prints both; it takes a minute or two on a GPU. Exit status: 0 measured, 3 no GPU that can be used.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import msgspec

from reports.timings import FirstCall, HostTime

from .machine import why_not_here

if TYPE_CHECKING:
    from .bench import Bench
    from .problems import Problem

ROOT = Path(__file__).resolve().parents[2]

MEASURED, NO_GPU = 0, 3

CHILD = "--child"

Cache = Literal["cold", "warm"]

CHANGING = ("TRITON_INTERPRET", "TRITON_ALWAYS_COMPILE")
"""Variables with which Triton would not do what is measured."""

LIMIT = 600
"""Seconds that a child may take."""


# ---------------------------------------------------------------- the first call


class Compilations:
    """Counts kernels that Triton compiles, and those that it finds in its cache on disk.

    A listener of `triton.knobs.compilation` (3.4 or newer): it is called once a kernel that a process has not
    had yet.
    """

    def __init__(self) -> None:
        self.compiled = self.from_cache = 0

    def __call__(self, *, cache_hit: bool, **_: Any) -> None:
        if cache_hit:
            self.from_cache += 1
        else:
            self.compiled += 1


def measure(cache: Cache, folder: Path) -> FirstCall:
    """The first forward and backward of B 1, H 8, T 1024, D 64, causal, float16, in a process of its own.

    `imported` is of `import kernels`, and with it of PyTorch and Triton, from files that may or may not be in
    memory. Then CUDA is started, the inputs are made, and the GPU waited for: none of that is in `first`,
    which is what Triton and our own code need (compiling or loading kernels and launchers), and PyTorch for
    its first gradients. The results are checked afterwards.

    Args:
        cache: "cold" or "warm".
        folder: Triton's cache: empty if cold; if warm, what the cold one left.

    Raises:
        ValueError: if the folder is not as the cache is to be.
        RuntimeError: if the child failed; with what it said last.
    """
    if any(folder.iterdir()) != (cache == "warm"):
        raise ValueError(f"{folder} is to be the {cache} cache, and is {'not ' * (cache == 'cold')}empty")
    environment = {name: value for name, value in os.environ.items() if name not in CHANGING}
    environment["TRITON_CACHE_DIR"] = str(folder)
    command = [sys.executable, "-m", "tests.speed.first_call", CHILD, cache]
    child = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=LIMIT, check=False
    )
    if child.returncode != 0:
        raise RuntimeError(f"exit status {child.returncode}: {child.stderr.strip()[-2000:]}")
    return msgspec.json.decode(child.stdout.splitlines()[-1], type=FirstCall)


def first_calls() -> list[FirstCall]:
    """With a cold cache, then with what that one left.

    Raises:
        RuntimeError: if a child failed.
    """
    with tempfile.TemporaryDirectory(prefix="first_call_") as folder:
        return [measure(cache, Path(folder)) for cache in get_args(Cache)]


def _child(cache: str) -> FirstCall:
    """In the child process, which has imported nothing of weight yet."""
    begin = time.perf_counter()
    from kernels import flash_attention

    imported = time.perf_counter() - begin

    import torch
    import triton

    from .correct import Expected
    from .problems import SMALL, tensors

    counted = Compilations()
    triton.knobs.compilation.listener = counted
    problem = SMALL[0]
    x = tensors(problem)  # which starts CUDA
    torch.cuda.synchronize()

    def call() -> tuple[Any, ...]:
        out = flash_attention(*x.leaves, causal=problem.causal)
        return out, *torch.autograd.grad(out, x.leaves, x.d_out)

    taken = []
    for _ in range(2):
        begin = time.perf_counter()
        found = call()
        torch.cuda.synchronize()
        taken.append(time.perf_counter() - begin)
    from ..implementations import OURS

    results = {name: t.detach() for name, t in zip(("out", "dq", "dk", "dv"), found, strict=True)}
    if why := Expected(problem, x).wrong(results, OURS):
        raise RuntimeError(f"wrong: {why}")
    first, second = taken
    return FirstCall(cache=cache, imported=imported, first=first, second=second, compiled=counted.compiled,
                     from_cache=counted.from_cache)  # fmt: skip


# ---------------------------------------------------------------- the host


def host_times(bench: Bench, problems: Sequence[Problem], steps: Sequence[str]) -> list[HostTime]:
    """What the host spends on an eager call of each contender that takes the problem and the step.

    Those that are absent, or raise, are left out; contests tell why.
    """
    from .contest import why_absent
    from .timer import host_seconds

    found = []
    for problem in problems:
        with bench.on(problem) as those:
            for name, calls in those.calls.items():
                if isinstance(calls, str):
                    continue
                for step in steps:
                    try:
                        with calls.of.chosen():
                            seconds = host_seconds(calls.step(step))
                    except Exception as error:  # of a compiler, a library: each has its own kinds
                        why_absent(error)  # gives memory back
                        continue
                    found.append(HostTime(contender=name, problem=problem.id, step=step, seconds=seconds))
    return found


# ---------------------------------------------------------------- the command


def first_calls_table(found: Sequence[FirstCall]) -> list[list[str]]:
    """Rows of words, the head first."""
    head = ["Triton's cache", "import s", "first s", "second ms", "compiled", "from cache"]
    return [head, *(
        [of.cache, f"{of.imported:.2f}", f"{of.first:.3f}", f"{1e3 * of.second:.3f}", str(of.compiled),
         str(of.from_cache)]
        for of in found
    )]  # fmt: skip


def host_times_table(found: Sequence[HostTime]) -> list[list[str]]:
    """Rows of words, the head first: of each problem and contender the steps, in microseconds."""
    steps = list(dict.fromkeys(of.step for of in found))
    seconds = {(of.problem, of.contender, of.step): of.seconds for of in found}
    rows = [["problem", "contender", *(f"{step} us" for step in steps)]]
    for problem, contender in dict.fromkeys((of.problem, of.contender) for of in found):
        taken = (seconds.get((problem, contender, step)) for step in steps)
        rows.append([problem, contender, *("-" if t is None else f"{1e6 * t:.1f}" for t in taken)])
    return rows


def main(words: Sequence[str] | None = None) -> int:
    """Prints both tables; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.speed.first_call", description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument(CHILD, choices=get_args(Cache), help=argparse.SUPPRESS)
    args = parser.parse_args(words)
    if args.child:
        print(msgspec.json.encode(_child(args.child)).decode())
        return MEASURED
    if why := why_not_here():
        print(f"first_call: {why}", file=sys.stderr)
        return NO_GPU
    from reports.bench import aligned
    from reports.timings import PASSES

    from .bench import Bench
    from .problems import SMALL

    print("A first forward and backward in a fresh process (B 1, H 8, T 1024, D 64, causal, float16)\n")
    print(aligned(first_calls_table(first_calls())), flush=True)
    print("\nWhat the host spends on an eager call, the median\n")
    print(aligned(host_times_table(host_times(Bench(), SMALL[:1], PASSES)), labels=2))
    return MEASURED


if __name__ == "__main__":
    sys.exit(main())
