"""What `flash_attention` refuses, and in which words: the argument, what it was, what it may be."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
from torch import Tensor

from kernels import architecture, effective_architecture, flash_attention
from kernels.architecture import KIB, Architecture
from kernels.tiles import choose_tiles

ROOT = Path(__file__).parent.parent


def tensors(device: torch.device) -> dict[str, Any]:
    """q (2, 4, 5, 32), k (2, 2, 7, 32), v (2, 2, 7, 48), float16: nothing to refuse."""
    shapes = {"q": (2, 4, 5, 32), "k": (2, 2, 7, 32), "v": (2, 2, 7, 48)}
    return {name: torch.ones(shape, dtype=torch.float16, device=device) for name, shape in shapes.items()}


def test_what_the_others_change_is_accepted(device: torch.device) -> None:
    out, lse = flash_attention(**tensors(device), return_lse=True)
    assert out.shape == (2, 4, 5, 48) and lse.shape == (2, 4, 5)


Change = Callable[[Tensor], Any]
"""What becomes of one of these tensors."""


def shape(*sizes: int) -> Change:
    return lambda t: t.new_ones(sizes)


def dtype(name: str) -> Change:
    return lambda t: t.to(getattr(torch, name))


TYPE_ERRORS: dict[str, tuple[dict[str, Change], str]] = {
    "q is a list": ({"q": lambda t: t.tolist()}, "q is a list; it must be a torch.Tensor"),
    "k is None": ({"k": lambda _: None}, "k is a NoneType; it must be a torch.Tensor"),
    "v is a NumPy array": ({"v": lambda t: t.cpu().numpy()}, "v is a ndarray; it must be a torch.Tensor"),
    "q is sparse": (
        {"q": lambda t: t.to_sparse()},
        "q has layout torch.sparse_coo; it must be torch.strided",
    ),
    "q is nested": (
        {"q": lambda t: torch.nested.nested_tensor(list(t))},
        "q has layout nested; it must be torch.strided",
    ),
    "k is nested": (
        {"k": lambda t: torch.nested.nested_tensor(list(t))},
        "k has layout nested; it must be torch.strided",
    ),
    "k is in compressed rows": (
        {"k": lambda t: t.to_sparse_csr()},
        "k has layout torch.sparse_csr; it must be torch.strided",
    ),
    "all are float64": (
        dict.fromkeys("qkv", dtype("float64")),
        "q is torch.float64; it may be float16, bfloat16 or float32",
    ),
    "all are int32": (dict.fromkeys("qkv", dtype("int32")), "q is torch.int32; it may be float16"),
    "all are complex": (dict.fromkeys("qkv", dtype("complex64")), "q is torch.complex64; it may be"),
    "k is float8": ({"k": dtype("float8_e4m3fn")}, "k is torch.float8_e4m3fn; it may be float16"),
    "v is float32": (
        {"v": dtype("float32")},
        "v is torch.float32 and q is torch.float16; they must be the same",
    ),
    "k is bfloat16": (
        {"k": dtype("bfloat16")},
        "k is torch.bfloat16 and q is torch.float16; they must be the same",
    ),
}

VALUE_ERRORS: dict[str, tuple[dict[str, Change], str]] = {
    "k is elsewhere": ({"k": lambda t: t.to("meta")}, "k is on meta and q on DEVICE; they must be the same"),
    # dimensions
    "q has rank 3": (
        {"q": shape(4, 5, 32)},
        "q has shape (4, 5, 32); it must have 4 dimensions: batch, heads, sequence, head dimension",
    ),
    "k has rank 5": ({"k": shape(1, 2, 2, 7, 32)}, "k has shape (1, 2, 2, 7, 32); it must have 4 dimensions"),
    "v has rank 0": ({"v": shape()}, "v has shape (); it must have 4 dimensions"),
    "k has another batch": ({"k": shape(1, 2, 7, 32)}, "k has batch size 1 and q 2; they must be the same"),
    "v has another batch": ({"v": shape(3, 2, 7, 48)}, "v has batch size 3 and q 2; they must be the same"),
    "k has another head dimension": (
        {"k": shape(2, 2, 7, 24)},
        "k has head dimension 24 and q 32; they must be the same",
    ),
    "v has fewer heads": (
        {"v": shape(2, 1, 7, 48)},
        "v has 1 heads of 7 keys and k 2 of 7; they must be the same",
    ),
    "v has fewer keys": (
        {"v": shape(2, 2, 6, 48)},
        "v has 2 heads of 6 keys and k 2 of 7; they must be the same",
    ),
    # heads
    "heads do not divide": (
        {"q": shape(2, 3, 5, 32)},
        "q has 3 heads and k, v have 2; q must have one or a multiple of as many",
    ),
    "fewer query heads than KV heads": (
        {"q": shape(2, 1, 5, 32)},
        "q has 1 heads and k, v have 2; q must have",
    ),
    "no query heads": ({"q": shape(2, 0, 5, 32)}, "q has 0 heads and k, v have 2; q must have"),
    "no KV heads": (
        {"k": shape(2, 0, 7, 32), "v": shape(2, 0, 7, 48)},
        "q has 4 heads and k, v have 0; q must have",
    ),
    # head dimensions
    "D is 15": (
        {"q": shape(2, 4, 5, 15), "k": shape(2, 2, 7, 15)},
        "q has head dimension 15; it may be 16 to 256",
    ),
    "D is 257": (
        {"q": shape(2, 4, 5, 257), "k": shape(2, 2, 7, 257)},
        "q has head dimension 257; it may be 16 to 256",
    ),
    "D is 0": (
        {"q": shape(2, 4, 5, 0), "k": shape(2, 2, 7, 0)},
        "q has head dimension 0; it may be 16 to 256",
    ),
    "Dv is 15": ({"v": shape(2, 2, 7, 15)}, "v has head dimension 15; it may be 16 to 256"),
    "Dv is 257": ({"v": shape(2, 2, 7, 257)}, "v has head dimension 257; it may be 16 to 256"),
}


def refusal(error: type[Exception], call: Callable[[], object]) -> str:
    """What it says. Exactly this type: a subclass would come from somewhere else."""
    with pytest.raises(error) as raised:
        call()
    assert raised.type is error
    return str(raised.value)


@pytest.mark.parametrize("name", TYPE_ERRORS | VALUE_ERRORS)
def test_tensors_that_do_not_fit_are_refused(name: str, device: torch.device) -> None:
    changes, says = (TYPE_ERRORS | VALUE_ERRORS)[name]
    arguments = tensors(device)
    arguments |= {which: change(arguments[which]) for which, change in changes.items()}
    error = TypeError if name in TYPE_ERRORS else ValueError
    assert says.replace("DEVICE", str(device)) in refusal(error, lambda: flash_attention(**arguments))


@pytest.mark.parametrize(
    ("scale", "error", "says"),
    [
        (float("nan"), ValueError, "scale is nan; it must be finite"),
        (float("inf"), ValueError, "scale is inf; it must be finite"),
        (float("-inf"), ValueError, "scale is -inf; it must be finite"),
        (1e300, ValueError, "scale is 1e+300; it must be finite, and at most 2.3586e+38 in magnitude"),
        (-3e38, ValueError, "scale is -3e+38; it must be finite, and at most 2.3586e+38 in magnitude"),
        (10**400, ValueError, "it must be finite, and at most 2.3586e+38 in magnitude"),
        ("x", TypeError, "scale is 'x'; it must be a number or None"),
        (True, TypeError, "scale is True; it must be a number or None"),
        (1j, TypeError, "scale is 1j; it must be a number or None"),
        (torch.tensor(0.5), TypeError, "scale is tensor(0.5000); it must be a number or None"),
    ],
    ids=["nan", "inf", "-inf", "1e300", "-3e38", "10**400", "a string", "True", "complex", "a tensor"],
)
def test_a_scale_that_is_no_finite_number_is_refused(
    scale: Any, error: type[Exception], says: str, device: torch.device
) -> None:
    assert says in refusal(error, lambda: flash_attention(**tensors(device), scale=scale))


@pytest.mark.parametrize("value", [1, 0, None, "yes", np.True_], ids=["1", "0", "None", "string", "NumPy's"])
@pytest.mark.parametrize("flag", ["causal", "return_lse", "deterministic", "allow_tf32"])
def test_a_flag_is_true_or_false(flag: str, value: Any, device: torch.device) -> None:
    says = refusal(TypeError, lambda: flash_attention(**(tensors(device) | {flag: value})))
    assert says == f"{flag} is {value!r}; it must be True or False"


# ---------------------------------------------------------------- devices and architectures


def test_without_the_interpreter_a_cpu_tensor_is_refused() -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    program = (
        "import torch\n"
        "from kernels import flash_attention\n"
        "x = torch.ones(1, 1, 3, 16)\n"
        "flash_attention(x, x, x)\n"
    )
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True, timeout=300)
    assert ended.stderr.splitlines()[-1] == (
        "RuntimeError: device is cpu; the kernels run on CUDA devices, or on the CPU if TRITON_INTERPRET=1"
        " is set before triton is imported"
    )


def test_without_a_usable_gpu_a_cuda_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert refusal(RuntimeError, effective_architecture).startswith(
        "device is cuda, but torch.cuda finds no usable GPU; the kernels run on CUDA devices, or on the CPU"
    )


Gpu = Callable[..., None]


@pytest.fixture
def gpu_of(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """Makes PyTorch report a GPU of a capability, and sets or unsets TRITON_OVERRIDE_ARCH."""

    def pretend(major: int, minor: int, override: str | None = None) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        assert not triton.knobs.runtime.interpret
        if override is None:
            monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)
        else:
            monkeypatch.setenv("TRITON_OVERRIDE_ARCH", override)
        for name, value in (
            ("is_available", True),
            ("current_device", 0),
            ("get_device_capability", (major, minor)),
            ("get_device_name", f"GPU of {major}.{minor}"),
        ):
            monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
        architecture._of_device.cache_clear()

    yield pretend
    architecture._of_device.cache_clear()


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ((8, 0), Architecture("sm80", 80, 163 * KIB)),
        ((8, 6), Architecture("sm86", 86, 99 * KIB)),
        ((8, 9), Architecture("sm89", 89, 99 * KIB)),
        ((9, 0), Architecture("sm90", 90, 227 * KIB)),
        ((10, 0), Architecture("sm100", 100, 227 * KIB)),
        ((12, 0), Architecture("sm120", 120, 99 * KIB)),
    ],
    ids=lambda value: f"{value[0]}.{value[1]}" if isinstance(value, tuple) else value.name,
)
def test_the_architecture_of_a_gpu(capability: tuple[int, int], expected: Architecture, gpu_of: Gpu) -> None:
    gpu_of(*capability)
    assert effective_architecture() == effective_architecture("cuda:0") == expected


@pytest.mark.parametrize(
    ("capability", "override", "expected"),
    [
        ((9, 0), "sm80", Architecture("sm80", 80, 163 * KIB, overridden=True)),
        ((9, 0), "sm86", Architecture("sm86", 86, 99 * KIB, overridden=True)),
        ((9, 0), "sm90", Architecture("sm90", 90, 227 * KIB, overridden=True)),
        ((8, 6), "sm80", Architecture("sm80", 80, 99 * KIB, overridden=True)),  # the chip has no more
    ],
    ids=["sm80 on 9.0", "sm86 on 9.0", "sm90 on 9.0", "sm80 on 8.6"],
)
def test_the_architecture_is_the_one_that_triton_is_told_to_compile_for(
    capability: tuple[int, int], override: str, expected: Architecture, gpu_of: Gpu
) -> None:
    gpu_of(*capability, override)
    assert effective_architecture() == expected


@pytest.mark.parametrize("itemsize", [2, 4], ids=["16 bit", "32 bit"])
def test_tiles_follow_the_override(itemsize: int, gpu_of: Gpu) -> None:
    dims = (16, 32, 64, 80, 128, 192, 256)

    def chosen() -> list[Any]:
        arch = effective_architecture()
        return [choose_tiles(arch, dim, dim, itemsize) for dim in dims]

    gpu_of(8, 0)
    ampere = chosen()
    gpu_of(9, 0, "sm80")
    assert chosen() == ampere
    gpu_of(9, 0, "sm86")
    small = chosen()
    gpu_of(8, 6)
    assert chosen() == small


@pytest.mark.parametrize("override", [None, "sm80"])
def test_a_gpu_older_than_ampere_is_refused(override: str | None, gpu_of: Gpu) -> None:
    gpu_of(7, 5, override)
    assert refusal(RuntimeError, effective_architecture) == (
        "device cuda:0 is a GPU of 7.5 of compute capability 7.5; the kernels need 8.0 (Ampere) or newer"
    )


@pytest.mark.parametrize("override", ["nonsense", "80", "sm75", "sm_80", "sm90a", "sm100", "sm800", "gfx942"])
def test_an_override_that_names_no_architecture_of_the_gpu_is_refused(override: str, gpu_of: Gpu) -> None:
    gpu_of(9, 0, override)
    assert refusal(RuntimeError, effective_architecture) == (
        f"TRITON_OVERRIDE_ARCH is {override!r}; it may be sm80 or newer, up to the device's own sm90"
    )


def test_the_interpreter_is_an_architecture_whatever_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("TRITON_OVERRIDE_ARCH", "sm80")
    for device in (None, "cpu", "cuda:0"):
        arch = effective_architecture(device)
        assert arch.interpreted and arch.name == "interpreter" and not arch.overridden
