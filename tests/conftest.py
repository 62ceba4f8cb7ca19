"""Where the tests of our own kernels run."""

from __future__ import annotations

import pytest
import torch

from .session import interpreted


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The current GPU if there is one and Triton compiles for it; else the CPU, interpreted."""
    if interpreted() or not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="session")
def gpu(device: torch.device) -> torch.device:
    """The GPU; skips the test where there is none."""
    if device.type != "cuda":
        pytest.skip("needs a GPU: Triton interprets the kernels here")
    return device
