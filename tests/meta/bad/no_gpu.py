"""A pytest plugin by which a run takes its GPU for lost once an implementation says so, without any GPU."""

from __future__ import annotations

import torch

lost = False


def pytest_sessionstart() -> None:
    from tests import isolation

    def trouble(device: torch.device) -> RuntimeError | None:
        return RuntimeError("CUDA error: an illegal memory access was encountered") if lost else None

    isolation._trouble = trouble
