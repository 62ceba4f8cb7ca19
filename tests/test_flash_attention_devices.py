"""M7 without two GPUs: which device is current at each launch. With two: `test_flash_attention_gpu`."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from kernels import launch
from kernels.launcher import Launcher

from .calls import Offsets, attend, inputs_of, ragged_inputs_of
from .session import interpreted

KERNELS = (
    "attention_forward", "attention_delta", "attention_backward_dkdv", "attention_backward_dq", "list_tiles",
)  # fmt: skip
RAGGED = [(5, 7), (0, 3)]
CURRENT, OTHER = 0, 1


class Machine:
    """Two GPUs that are not there: PyTorch's calls for the current device, and what is launched on which."""

    def __init__(self) -> None:
        self.current = CURRENT
        self.launched: set[tuple[str, int]] = set()
        machine = self

        class Device:
            def __init__(self, device: torch.device) -> None:
                self.index = device.index

            def __enter__(self) -> None:
                self.before, machine.current = machine.current, self.index

            def __exit__(self, *_: object) -> None:
                machine.current = self.before

        self.device = Device

    def seen(self, name: str, kernel: Any) -> Any:
        """A kernel, each launch of which is noted."""

        class Seen:
            def __getitem__(_, grid: Any) -> Callable[..., Any]:
                self.launched.add((name, self.current))
                return kernel[grid]

        return Seen()


@pytest.mark.skipif(not interpreted(), reason="Triton launches on the device that is current")
def test_every_kernel_is_launched_while_the_device_of_the_tensors_is_current(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    machine, cpu = Machine(), torch.device("cpu")
    made_current = launch._device_of
    elsewhere: Any = SimpleNamespace(device=torch.device("cuda", OTHER))
    monkeypatch.setattr(launch, "_device_of", lambda t: made_current(elsewhere))
    monkeypatch.setattr(torch.cuda, "device", machine.device)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: machine.current)
    for name in KERNELS:
        monkeypatch.setattr(launch, name, machine.seen(name, getattr(launch, name)))
    attend(inputs_of(cpu, len_q=3, len_k=5))
    attend(ragged_inputs_of(cpu, RAGGED), Offsets.of(RAGGED, cpu))
    assert machine.launched == {(name, OTHER) for name in KERNELS}
    assert machine.current == CURRENT


def test_these_are_all_kernels() -> None:
    launchable = {name for name, x in vars(launch).items() if isinstance(x, Launcher)}
    assert launchable == set(KERNELS)
