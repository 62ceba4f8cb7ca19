"""A kernel launched again without Triton looking at its arguments: when, and that it is the right one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor

from kernels import launcher, plans
from kernels.launcher import Launcher, direct
from kernels.plans import recorded

from .calls import assert_same_bits, attend, inputs_of
from .session import interpreted


class Compiled:
    """Stands for a compiled kernel, whose launcher has a form that is not known."""

    run: Any = None
    function, packed_metadata = 1234, (4, 1, 0)

    def __init__(self, log: list[Any]) -> None:
        self.log = log

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return lambda *arguments: self.log.append(("directly", grid, arguments))


class Form:
    """Stands for Triton's launcher of a kernel: what it gives to its function in C, in some form."""

    global_scratch_size = profile_scratch_size = 0
    launch_cooperative_grid = launch_pdl = False

    def __init__(self, form: Callable[..., tuple[Any, ...]], **changes: Any) -> None:
        self.form = form
        self.calls: list[tuple[Any, ...]] = []
        self.launch = lambda *call: self.calls.append(call)
        vars(self).update(changes)

    def __call__(self, x: int, y: int, z: int, stream: int, *rest: Any) -> None:
        self.launch(*self.form(x, y, z, stream, *rest))


def one_by_one(x: Any, y: Any, z: Any, stream: Any, *rest: Any) -> tuple[Any, ...]:
    """As in Triton 3.6."""
    function, metadata, launch_metadata, on_enter, on_exit, *arguments = rest
    return (x, y, z, stream, function, 0, 0, None, None, metadata, launch_metadata, on_enter, on_exit,
            *arguments)  # fmt: skip


def in_a_tuple(x: Any, y: Any, z: Any, stream: Any, *rest: Any) -> tuple[Any, ...]:
    """As in Triton 3.7."""
    function, metadata, launch_metadata, on_enter, on_exit, *arguments = rest
    return (x, y, z, stream, function, 0, 0, metadata, launch_metadata, on_enter, on_exit, None, None,
            "annotations", b"signature", tuple(arguments))  # fmt: skip


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
    monkeypatch.setattr(launcher, "current_device", lambda: 0)
    monkeypatch.setattr(launcher, "current_stream", lambda device: 70 + device)
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
        monkeypatch.setattr(launcher, "current_device", lambda device=device: device)
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


# ---------------------------------------------------------------- without Triton's launcher


@pytest.mark.parametrize("form", [one_by_one, in_a_tuple])
def test_the_function_in_c_is_called_as_the_launcher_calls_it(form: Any) -> None:
    compiled, seen = Compiled([]), Form(form)
    compiled.run = seen
    launch = direct(compiled, (X, 5, 64, True))
    assert launch is not None and seen.calls == []  # to look at it launches nothing
    launch(7, 2, 1, 99, (X.data_ptr(), 6, 64, True))
    fixed = (compiled.function, compiled.packed_metadata, None, None, None)
    seen(7, 2, 1, 99, *fixed, X.data_ptr(), 6, 64, True)
    assert seen.calls[0] == seen.calls[1] and len(seen.calls) == 2


def to_other_arguments(*given: Any) -> tuple[Any, ...]:
    return (*one_by_one(*given)[:-1], 5)


UNKNOWN: dict[str, Any] = {
    "no launcher that is known": print,
    "scratch memory": Form(in_a_tuple, global_scratch_size=16),
    "scratch memory of a profiler": Form(in_a_tuple, profile_scratch_size=16),
    "a cooperative grid": Form(in_a_tuple, launch_cooperative_grid=True),
    "a dependent launch": Form(in_a_tuple, launch_pdl=True),
    "the stream elsewhere": Form(lambda x, y, z, stream, *rest: (stream, x, y, z, *rest)),
    "the grid as one": Form(lambda x, y, z, stream, *rest: ((x, y, z), stream, *rest)),
    "arguments in a dictionary": Form(lambda x, y, z, stream, *rest: (x, y, z, stream, {"a": rest})),
    "arguments that it changes": Form(to_other_arguments),
    "arithmetic with the grid": Form(lambda x, *rest: one_by_one(2 * x, *rest)),
}


@pytest.mark.parametrize("what", UNKNOWN)
def test_a_launcher_of_another_form_launches_by_itself(what: str, kernel: Kernel) -> None:
    Compiled.run = UNKNOWN[what]
    try:
        assert direct(Compiled([]), (X, 5, 0.5, 64, True)) is None
        launched = Launcher(kernel)
        for _ in range(2):
            launched[7,](X, 5, 0.5, **OPTIONS)
    finally:
        Compiled.run = None
    assert how(kernel) == ["by Triton", "directly"]
    assert kernel.log[1] == ("directly", (7, 1, 1), (X, 5, 0.5, 64, True))


def test_a_launcher_that_launches_twice_launches_by_itself() -> None:
    class Twice(Form):
        def __call__(self, *given: Any) -> None:
            super().__call__(*given)
            super().__call__(*given)

    compiled = Compiled([])
    compiled.run = Twice(one_by_one)
    assert direct(compiled, (X, 5)) is None


def test_kernels_are_given_addresses_and_the_current_stream(
    kernel: Kernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    form = Form(in_a_tuple)
    monkeypatch.setattr(Compiled, "run", form)
    launched = Launcher(kernel)
    launched[7,](X, 5, 0.5, **OPTIONS)
    with recorded() as launches:
        launched[8,](X, 6, -1.5, **OPTIONS)
    monkeypatch.setattr(launcher, "current_stream", lambda device: 80 + device)
    launched[2, 3](X, 6, -1.5, **OPTIONS)
    assert how(kernel) == ["by Triton"]
    (first, second), (launch,) = form.calls, launches
    assert (first[:4], first[-1]) == ((8, 1, 1, 70), (X.data_ptr(), 6, -1.5, 64, True))
    assert (second[:4], second[-1]) == ((2, 3, 1, 80), (X.data_ptr(), 6, -1.5, 64, True))
    assert launch is not None and launch.by_address and launch.arguments == (X, 6, -1.5, 64, True)
    launch.run(90, first[-1])
    assert form.calls[2] == (8, 1, 1, 90, *first[4:])


def test_the_form_of_this_triton_is_known() -> None:
    """Of its launcher for NVIDIA: else every launch is slower, without a word."""
    driver = pytest.importorskip("triton.backends.nvidia.driver")
    of_triton = driver.CudaLauncher.__new__(driver.CudaLauncher)
    calls: list[tuple[Any, ...]] = []
    vars(of_triton).update(
        launch=lambda *call: calls.append(call), global_scratch_size=0, profile_scratch_size=0,
        global_scratch_align=1, profile_scratch_align=1, launch_cooperative_grid=False, launch_pdl=False,
        num_ctas=1, arg_annotations=["annotation"], kernel_signature=b"signature",
    )  # fmt: skip
    compiled = Compiled([])
    compiled.run = of_triton
    launch = direct(compiled, (X, 5, 64, True))
    assert launch is not None and calls == []
    launch(7, 2, 1, 99, (X.data_ptr(), 6, 64, True))
    of_triton(7, 2, 1, 99, compiled.function, compiled.packed_metadata, None, None, None,
              X.data_ptr(), 6, 64, True)  # fmt: skip
    assert calls[0] == calls[1] and len(calls) == 2


@pytest.mark.parametrize("when", ["launch_enter_hook", "launch_exit_hook"])
def test_a_hook_that_is_installed_later_is_called(when: str, kernel: Kernel) -> None:
    launched = Launcher(kernel)
    launched[7,](X, 5, 0.5, **OPTIONS)
    hooks = getattr(triton.knobs.runtime, when)
    hooks.add(print)
    try:
        launched[7,](X, 5, 0.5, **OPTIONS)
    finally:
        hooks.remove(print)
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

    plans.forget()
    monkeypatch.setattr(Launcher, "__getitem__", by_its_own)
    by_triton = attend(x, causal=True)
    assert len(asked) == 4
    for each in found:
        assert_same_bits(each, by_triton)
