"""Attention that is right but for some lengths, at which it does to its process what a kernel may do."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

from tests.meta.plain import attention as right


def crashes() -> None:
    ctypes.string_at(0)


def waits() -> None:
    while True:
        time.sleep(0.1)


def holds_the_lock() -> None:
    ctypes.PyDLL(None).sleep(1000)  # with the interpreter's lock, as a kernel's launch may


def ends() -> None:
    os._exit(0)


def leaves() -> None:
    sys.exit(0)


FAULTS: dict[int, Callable[[], None]] = {17: crashes, 18: waits, 19: holds_the_lock, 20: ends, 21: leaves}


def attention(q: Tensor, *tensors: Tensor, **options: Any) -> Any:
    if fault := FAULTS.get(q.shape[2]):
        fault()
    return right(q, *tensors, **options)


def crashes_from_17_on(q: Tensor, *tensors: Tensor, **options: Any) -> Any:
    if q.shape[2] >= 17:
        crashes()
    return right(q, *tensors, **options)


def off_from_17_on(q: Tensor, *tensors: Tensor, **options: Any) -> Any:
    """Off by a percent."""
    return right(q if q.shape[2] < 17 else 1.01 * q, *tensors, **options)


def loses_the_gpu_from_17_on(q: Tensor, *tensors: Tensor, **options: Any) -> Any:
    """With the plugin `tests.meta.bad.no_gpu`, which is told."""
    from tests.meta.bad import no_gpu

    no_gpu.lost |= q.shape[2] >= 17
    return right(q, *tensors, **options)
