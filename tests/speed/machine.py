"""The GPU that is here, what else is on it, and what a run on it is called."""

from __future__ import annotations

import os
import statistics
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime

import torch
import triton

from reports.timings import Speed

from ..gpu_paths import AMPERE, ask_machine, why_unusable
from .timer import Timer


def why_not_here() -> str:
    """Why nothing can be timed on this machine, as it is set up; empty if it can.

    The answer costs no child process unless it is no.
    """
    if triton.knobs.runtime.interpret:
        value = os.environ.get("TRITON_INTERPRET")
        return f"TRITON_INTERPRET is {value!r}: Triton would interpret its kernels, and that is not timed."
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= AMPERE:
        return ""
    return why_unusable(ask_machine()) or "the current GPU is not of compute capability 8.0 or newer."


def described(implementation: str, path: str, arguments: Sequence[str], seconds: float = 0.0) -> Speed:
    """What a run on this machine is, without what it finds.

    Args:
        implementation: what others are compared with.
        path: of the code that runs.
        arguments: of the command line.
        seconds: that it took.
    """
    return Speed(
        implementation=implementation,
        device=torch.cuda.get_device_name(),
        path=path,
        torch=str(torch.__version__),
        triton=triton.__version__,
        cudnn=version_of_cudnn(torch.backends.cudnn.version()),
        driver=next(iter(_asked("gpu=driver_version")), ""),
        arguments=list(arguments),
        ended=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(seconds, 1),
        others_busy=others_busy(),
    )


def version_of_cudnn(number: int | None) -> str:
    """In words; empty if there is none."""
    if not number:
        return ""
    major, rest = divmod(number, 10_000 if number >= 90_000 else 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


def others_busy() -> str:
    """Whether other processes are on the GPU, as far as the driver tells; empty if not."""
    pids = [pid for pid in _asked("compute-apps=pid") if pid.isdecimal()]
    own = str(os.getpid())
    # in a container the driver may know this process by another number
    others = [pid for pid in pids if pid != own] if own in pids else pids[1:]
    return f"processes of others are on this GPU: {len(others)}" if others else ""


def _asked(query: str) -> list[str]:
    """What nvidia-smi says of the current GPU, a line each; nothing if it is not there."""
    uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
    which = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
    command = ["nvidia-smi", "-i", which, f"--query-{query}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in said.splitlines() if line.strip()]


def ceilings(timer: Timer, calls: int = 15) -> tuple[float, float]:
    """What the GPU does at most: operations a second of a float16 product of 8192 x 8192 matrices, and bytes
    a second, read and written, of a copy of a gibibyte."""
    n, size = 8192, 2**30
    a, b = (torch.randn(n, n, device="cuda", dtype=torch.float16) for _ in range(2))
    source = torch.empty(size, device="cuda", dtype=torch.uint8)
    copy = torch.empty_like(source)
    product = statistics.median(timer.device(lambda: a @ b) for _ in range(calls))
    copied = statistics.median(timer.device(lambda: copy.copy_(source)) for _ in range(calls))
    return 2 * n**3 / product, 2 * size / copied
