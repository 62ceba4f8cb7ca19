"""A kernel launched again without Triton looking at its arguments: when, and that it is the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kernels import launcher, plans
from kernels.launcher import Launcher

from .calls import assert_same_bits, attend, inputs_of
from .session import interpreted


class Compiled:
    """Stands for a compiled kernel."""

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments: self.log.append(("directly", grid, arguments))


class Kernel:
    """Stands for one of triton.jit: compiles anew in each launch, and says so."""

    arg_names = ("X", "n", "scale", "BM", "CAUSAL")

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.pre_run_hooks: list[Any] = []

    def __getitem__(self, grid: Any) -> Callable[..., Compiled]:
        def launch(*arguments: Any, **keywords: Any) -> Compiled:
            self.log.append(("by Triton", grid, arguments, keywords))
            return Compiled(self.log)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(launcher, "JITFunction", Kernel)
    monkeypatch.setattr(launcher, "CompiledKernel", Compiled)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


X = torch.zeros(64)
OPTIONS: dict[str, Any] = {"CAUSAL": True, "BM": 64, "num_warps": 4}


def how(kernel: Kernel) -> list[str]:
    return [entry[0] for entry in kernel.log]


def test_the_second_launch_is_direct_with_constants_in_the_order_of_the_signature(kernel: Kernel) -> None:
    launched = Launcher(kernel)
    launched[7,](X, 5, 0.5, **OPTIONS)
    launched[8,](X, 6, -1.5, **OPTIONS)
    launched[2, 3](X, 6, -1.5, **OPTIONS)
    assert how(kernel) == ["by Triton", "directly", "directly"]
    assert kernel.log[0] == ("by Triton", (7,), (X, 5, 0.5), OPTIONS)
    assert kernel.log[1] == ("directly", (8, 1, 1), (X, 6, -1.5, 64, True))
    assert kernel.log[2][1] == (2, 3, 1)


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((X.half(), 5, 0.5), OPTIONS),
        ((X, 5, 0.5), OPTIONS | {"BM": 128}),
        ((X, 5, 0.5), OPTIONS | {"CAUSAL": False}),
        ((X, 5, 0.5), OPTIONS | {"num_warps": 8}),
        ((X, 5, 0.5), OPTIONS | {"maxnreg": 255}),
    ],
    ids=["dtype", "tile", "mask", "warps", "registers"],
)
def test_what_is_compiled_otherwise_is_triton_s_the_first_time(
    arguments: tuple[Any, ...], options: dict[str, Any], kernel: Kernel
) -> None:
    launched = Launcher(kernel)
    for _ in range(2):
        launched[7,](X, 5, 0.5, **OPTIONS)
        launched[7,](*arguments, **options)
    assert how(kernel) == ["by Triton", "by Triton", "directly", "directly"]


@pytest.mark.parametrize(
    "arguments",
    [(X[1:], 5, 0.5), (X, 2**31, 0.5), (X, -(2**31) - 1, 0.5)],
    ids=["an address that is no multiple of 16", "beyond int32", "below int32"],
)
def test_what_triton_specialises_for_is_always_triton_s(arguments: tuple[Any, ...], kernel: Kernel) -> None:
    launched = Launcher(kernel)
    launched[7,](X, 5, 0.5, **OPTIONS)
    for _ in range(2):
        launched[7,](*arguments, **OPTIONS)
    launched[7,](X, 2**31 - 1, 0.5, **OPTIONS)
    assert how(kernel) == ["by Triton"] * 3 + ["directly"]


def test_each_device_has_a_kernel_of_its_own(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    launched = Launcher(kernel)
    for device in (0, 1, 0, 1):
        monkeypatch.setattr(torch.cuda, "current_device", lambda device=device: device)
        launched[7,](X, 5, 0.5, **OPTIONS)
    assert how(kernel) == ["by Triton", "by Triton", "directly", "directly"]


def test_a_hook_before_launches_is_triton_s_to_call(kernel: Kernel) -> None:
    launched = Launcher(kernel)
    launched[7,](X, 5, 0.5, **OPTIONS)
    kernel.pre_run_hooks.append(print)
    launched[7,](X, 5, 0.5, **OPTIONS)
    assert how(kernel) == ["by Triton", "by Triton"]


@pytest.mark.parametrize(
    ("of", "knob", "value"), [("runtime", "debug", True), ("compilation", "instrumentation_mode", "x")]
)
def test_what_triton_is_told_beside_is_triton_s(of: str, knob: str, value: Any, kernel: Kernel) -> None:
    launched = Launcher(kernel)
    launched[7,](X, 5, 0.5, **OPTIONS)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(getattr(triton.knobs, of), knob, value)
        launched[7,](X, 5, 0.5, **OPTIONS)
    assert how(kernel) == ["by Triton", "by Triton"]


def test_what_was_compiled_for_debugging_is_not_kept(kernel: Kernel) -> None:
    launched = Launcher(kernel)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "debug", True)
        launched[7,](X, 5, 0.5, **OPTIONS)
    for _ in range(2):
        launched[7,](X, 5, 0.5, **OPTIONS)
    assert how(kernel) == ["by Triton", "by Triton", "directly"]


@pytest.mark.skipif(interpreted(), reason="Triton interprets: nothing is compiled")
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_results_are_those_of_triton_s_launches(
    dtype: str, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = inputs_of(device, dtype=dtype)
    found: list[dict[str, Tensor]] = [attend(x, causal=True) for _ in range(2)]
    asked: list[Any] = []

    def by_its_own(self: Launcher, grid: tuple[int, ...]) -> Any:
        asked.append(self.kernel)
        return self.kernel[grid]

    monkeypatch.setattr(plans, "_plans", {})
    monkeypatch.setattr(Launcher, "__getitem__", by_its_own)
    by_triton = attend(x, causal=True)
    assert len(asked) == 4
    for each in found:
        assert_same_bits(each, by_triton)
