"""How NVIDIA's compute-sanitizer is called on the cases of `sanitized`."""

from __future__ import annotations

import shutil
import sys

FOUND = 9
"""Exit status of the sanitizer where it found something."""

ENVIRONMENT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

OPTIONS = {"memcheck": ("--padding", str(2**16))}
"""Without padding what lies beyond an allocation may belong to the next one, where reads are legal."""

MISSING = "needs compute-sanitizer, which comes with the CUDA toolkit"


def command(tool: str, *arguments: str) -> list[str]:
    """The command line; empty where there is no sanitizer.

    Args:
        tool: "memcheck", "initcheck" or "racecheck".
        arguments: of `tests.sanitized`.
    """
    program = shutil.which("compute-sanitizer")
    if program is None:
        return []
    options = ["--tool", tool, *OPTIONS.get(tool, ()), "--error-exitcode", str(FOUND)]
    return [program, *options, sys.executable, "-m", "tests.sanitized", *arguments]
