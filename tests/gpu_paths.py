"""Run the suite through every code path that this machine's GPU has; one exit status for all.

    python -m tests.gpu_paths [pytest arguments]

On an Ampere GPU there is one path. On a newer one there are two: `native`, and `sm80`, in which
Triton generates code as for an A100 and assembles it for the GPU that is there. Triton reads
TRITON_OVERRIDE_ARCH when it is imported, so each path is a process of its own, with results of its
own in FA_REPORT_DIR/<path>. All paths run, whatever the ones before them said.

This process never starts CUDA: it asks a child what GPU there is. With TRITON_OVERRIDE_ARCH already
set, exactly that path runs.

Exit status: 0 every claim held; 1 something broke; 2 wrong use; 3 nothing was executed, or there is
no GPU that the suite can use.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent

HELD, BROKE, MISUSED, NOTHING_RAN = range(4)
WORDS = ("every claim held", "something broke", "wrong use", "nothing was executed")
# pytest ends with these before the suite has a say: a bad command line, nothing collected.
PYTEST_STATUSES = {4: MISUSED, 5: NOTHING_RAN}

AMPERE = (8, 0)
ADA = (8, 9)  # the first compute capability after Ampere's 8.0, 8.6 and 8.7

GIB = 2**30
GIB_A_WORKER = 4

SLOT = "attention_slot"
"""In what pytest-xdist hands a worker: its number among those that live."""


@dataclass(frozen=True)
class Gpu:
    name: str
    capability: tuple[int, int]
    memory: int
    """Bytes."""

    def __str__(self) -> str:
        return f"{self.name} (compute capability {self.capability[0]}.{self.capability[1]})"


@dataclass(frozen=True)
class Machine:
    """What a child process found: versions, the visible GPUs, and what went wrong on the way."""

    torch: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    trouble: str = ""

    @property
    def usable(self) -> tuple[Gpu, ...]:
        return tuple(gpu for gpu in self.gpus if gpu.capability >= AMPERE)


@dataclass(frozen=True)
class CodePath:
    name: str
    override_arch: str | None = None


def describe_machine() -> None:
    """Start CUDA and print this machine as JSON: for the child process only."""
    found: dict[str, object] = {}
    try:
        import torch

        found.update(torch=torch.__version__, cuda=torch.version.cuda)
        torch.cuda.init()
        properties = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
        found["gpus"] = [(p.name, (p.major, p.minor), p.total_memory) for p in properties]
    except Exception as error:  # whatever it is, the parent prints it
        found["trouble"] = f"{type(error).__name__}: {error}"
    print(json.dumps(found))


def ask_machine() -> Machine:
    question = "from tests.gpu_paths import describe_machine; describe_machine()"
    child = subprocess.run(
        [sys.executable, "-c", question], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if child.returncode != HELD:
        return Machine(trouble=f"exit status {child.returncode}: {child.stderr.strip()[-2000:]}")
    found = json.loads(child.stdout.splitlines()[-1])
    gpus = tuple(Gpu(name, (major, minor), m) for name, (major, minor), m in found.pop("gpus", ()))
    return Machine(gpus=gpus, **found)


def why_unusable(machine: Machine) -> str | None:
    """Why the suite cannot run on a GPU here and what helps; None if it can."""
    if machine.usable:
        return None
    if machine.torch is None:
        return f"PyTorch cannot be imported by {sys.executable} ({machine.trouble})."
    if machine.cuda is None:
        return (
            f"PyTorch {machine.torch} was built without CUDA. `tox -e gpu` installs one with CUDA;"
            " FA_TORCH and FA_TORCH_INDEX choose another."
        )
    if machine.gpus:
        seen = ", ".join(map(str, machine.gpus))
        return f"the kernels need compute capability 8.0 (Ampere) or newer; found: {seen}."
    if old := re.search(r"driver .*too old \(found version (\d+)\)", machine.trouble):
        major, minor = divmod(int(old[1]) // 10, 100)
        return (
            f"the NVIDIA driver is too old: it supports CUDA {major}.{minor}, and PyTorch"
            f" {machine.torch} was built for CUDA {machine.cuda}. Update the driver, or name a"
            " PyTorch for an older CUDA in FA_TORCH."
        )
    return f"no GPU is visible ({machine.trouble or 'the driver lists none'})."


def code_paths(gpus: Iterable[Gpu], override_arch: str | None) -> list[CodePath]:
    if override_arch:
        return [CodePath(override_arch, override_arch)]
    native = CodePath("native")
    if any(gpu.capability >= ADA for gpu in gpus):
        return [native, CodePath("sm80", "sm80")]
    return [native]


def workers(gpus: Iterable[Gpu]) -> int:
    """What `-n auto` means on GPUs: more processes than their memory holds fail in ways that look
    like faults of a kernel. At least one a GPU, and more only as far as there are cores: the references
    are computed on the CPU."""
    fit = [gpu.memory // (GIB_A_WORKER * GIB) for gpu in gpus]  # workers are spread over the GPUs
    return max(len(fit), min(sum(fit), len(os.sched_getaffinity(0))))


def turned(given: str | None, count: Callable[[], int], worker: int) -> str | None:
    """CUDA_VISIBLE_DEVICES of a worker: the caller's GPUs, begun with another in each worker.

    All stay visible, for tests that need several.

    Args:
        given: the caller's.
        count: how many GPUs there are by that.
        worker: a number.

    Returns:
        None if there is nothing to choose.
    """
    if given is not None and given.strip().startswith("MIG-"):
        entries = [entry.strip() for entry in given.split(",")]  # counting them would start CUDA
    else:
        known = range(count()) if given is None else [entry.strip() for entry in given.split(",")]
        entries = [str(entry) for entry in known][: count()]  # CUDA ignores what follows a wrong entry
    if len(entries) < 2:
        return None
    first = worker % len(entries)
    return ",".join((*entries[first:], *entries[:first]))


def variables(override_arch: str | None) -> dict[str, str]:
    """What a process of a path is told: the architecture, and a cache of Inductor of its own, which does not
    know that the same kernel is compiled for another."""
    if not override_arch:
        return {}
    cache = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}_{override_arch}"
    return {"TRITON_OVERRIDE_ARCH": override_arch, "TORCHINDUCTOR_CACHE_DIR": str(cache)}


def run(path: CodePath, command: Sequence[str], reports: Path, defaults: Mapping[str, str]) -> int:
    """Run one path in a process of its own; return its status in the suite's terms.

    `defaults` are environment variables for the child where the caller has not set them.
    """
    environment = {**defaults, **os.environ, "FA_REPORT_DIR": str(reports / path.name)}
    environment |= variables(path.override_arch)
    with subprocess.Popen(command, env=environment) as child:
        try:
            child.wait()
        except KeyboardInterrupt:  # the child got it too, and has a summary to print
            child.wait()
            raise
    return suite_status(child.returncode)


def suite_status(returncode: int) -> int:
    """The suite's word for how a child ended; one that a signal killed has broken."""
    status = PYTEST_STATUSES.get(returncode, returncode)
    return status if status in (HELD, BROKE, MISUSED, NOTHING_RAN) else BROKE


def combine(statuses: Iterable[int]) -> int:
    """The worst of the statuses: broke before wrong use before nothing executed."""
    return min((status for status in statuses if status != HELD), default=HELD)


WITH_VALUE = (
    "--impl", "--manifest", "--case", "--profile", "--examples", "--hang-after", "--known-failures"
)  # fmt: skip
"""The suite's options that take a value."""


def joined(arguments: Iterable[str]) -> list[str]:
    """Arguments with the values of the suite's options joined to them by `=`.

    pytest knows these options only once it has found conftest.py, which it looks for where the files among
    its arguments are: a value that is a file elsewhere would lead it there.
    """
    found: list[str] = []
    for argument in arguments:
        if found and found[-1] in WITH_VALUE:
            found[-1] += f"={argument}"
        else:
            found.append(argument)
    return found


def main(arguments: Sequence[str]) -> int:
    machine = ask_machine()
    if reason := why_unusable(machine):
        print(f"gpu: {reason}", file=sys.stderr)
        return NOTHING_RAN

    defaults = {
        "PYTEST_XDIST_AUTO_NUM_WORKERS": str(workers(machine.usable)),
        # The references are computed on the CPU, by several workers: one thread each.
        "OMP_NUM_THREADS": "1",
    }
    reports = Path(os.environ.get("FA_REPORT_DIR") or ROOT / "reports" / "out").resolve()
    command = [sys.executable, "-m", "pytest", "--require-gpu", *joined(arguments)]

    print(f"gpu: {', '.join(map(str, machine.gpus))}; PyTorch {machine.torch}, CUDA {machine.cuda}")
    statuses: dict[str, int] = {}
    for path in code_paths(machine.usable, os.environ.get("TRITON_OVERRIDE_ARCH")):
        print(f"gpu: path {path.name}, results in {reports / path.name}", flush=True)
        statuses[path.name] = run(path, command, reports, defaults)
    for name, status in statuses.items():
        print(f"gpu: path {name}: {WORDS[status]} ({status})")
    return combine(statuses.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
