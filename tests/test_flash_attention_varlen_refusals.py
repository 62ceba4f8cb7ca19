"""What `flash_attention_varlen` refuses beyond what `flash_attention` does, and in which words."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kernels import flash_attention_varlen

FLAGS = ("causal", "return_lse", "deterministic", "allow_tf32", "validate")


def arguments(device: torch.device) -> dict[str, Any]:
    """q (9, 4, 32), k (12, 2, 32), v (12, 2, 48), sequences of 3 on 5, 0 on 1, 5 on 6; nothing to refuse."""
    shapes = {"q": (9, 4, 32), "k": (12, 2, 32), "v": (12, 2, 48)}
    tensors = {name: torch.ones(shape, dtype=torch.float16, device=device) for name, shape in shapes.items()}
    return tensors | {
        "cu_seqlens_q": torch.tensor([0, 3, 3, 8], dtype=torch.int32, device=device),
        "cu_seqlens_k": torch.tensor([0, 5, 6, 12], dtype=torch.int32, device=device),
        "max_seqlen_q": 5,
        "max_seqlen_k": 6,
    }


def test_what_the_others_change_is_accepted(device: torch.device) -> None:
    out, lse = flash_attention_varlen(**arguments(device), return_lse=True, validate=True)
    assert out.shape == (9, 4, 48) and lse.shape == (4, 9)
    assert not out[8].any()  # the row behind the last sequence


Change = Callable[[Any], Any]
"""What becomes of one of these arguments."""


def shape(*sizes: int) -> Change:
    return lambda t: t.new_ones(sizes)


def offsets(*values: int) -> Change:
    return lambda t: t.new_tensor(values)


def to(value: Any) -> Change:
    return lambda _: value


REFUSED: dict[str, tuple[type[Exception], dict[str, Change], str]] = {
    # as of dense tensors, with other words for the dimensions
    "q is a list": (TypeError, {"q": lambda t: t.tolist()}, "q is a list; it must be a torch.Tensor"),
    "v is float32": (
        TypeError,
        {"v": lambda t: t.float()},
        "v is torch.float32 and q is torch.float16; they must be the same",
    ),
    "q is dense": (
        ValueError,
        {"q": shape(1, 4, 9, 32)},
        "q has shape (1, 4, 9, 32); it must have 3 dimensions: rows of all sequences, heads, head dimension",
    ),
    "v has fewer keys": (
        ValueError,
        {"v": shape(11, 2, 48)},
        "v has 2 heads of 11 keys and k 2 of 12; they must be the same",
    ),
    "heads do not divide": (ValueError, {"q": shape(9, 3, 32)}, "q has 3 heads and k, v have 2; q must have"),
    "D is 15": (
        ValueError,
        {"q": shape(9, 4, 15), "k": shape(12, 2, 15)},
        "q has head dimension 15; it may be 16 to 256",
    ),
    "k has another head dimension": (
        ValueError,
        {"k": shape(12, 2, 24)},
        "k has head dimension 24 and q 32; they must be the same",
    ),
    # offsets, as far as the host sees them
    "offsets are a list": (
        TypeError,
        {"cu_seqlens_q": lambda t: t.tolist()},
        "cu_seqlens_q is a list; it must be a torch.Tensor",
    ),
    "offsets are int64": (
        TypeError,
        {"cu_seqlens_k": lambda t: t.long()},
        "cu_seqlens_k is torch.int64; it must be torch.int32",
    ),
    "offsets are float": (
        TypeError,
        {"cu_seqlens_q": lambda t: t.float()},
        "cu_seqlens_q is torch.float32; it must be torch.int32",
    ),
    "offsets are elsewhere": (
        ValueError,
        {"cu_seqlens_k": lambda t: t.to("meta")},
        "cu_seqlens_k is on meta and q on DEVICE; they must be the same",
    ),
    "offsets have gaps": (
        ValueError,
        {"cu_seqlens_q": lambda t: t.repeat_interleave(2)[::2]},
        "cu_seqlens_q has stride 2; it must be contiguous",
    ),
    "offsets are a matrix": (
        ValueError,
        {"cu_seqlens_q": shape(2, 2)},
        "cu_seqlens_q has shape (2, 2); it must have one dimension, of an element more than there are",
    ),
    "no offsets at all": (
        ValueError,
        {"cu_seqlens_q": shape(0)},
        "cu_seqlens_q has shape (0,); it must have one dimension",
    ),
    "other batch sizes": (
        ValueError,
        {"cu_seqlens_k": offsets(0, 12)},
        "cu_seqlens_k has 2 elements and cu_seqlens_q 4; they must be the same",
    ),
    # the longest sequences
    "max_seqlen is a tensor": (
        TypeError,
        {"max_seqlen_q": lambda n: torch.tensor(n)},
        "max_seqlen_q is tensor(5); it must be a whole number",
    ),
    "max_seqlen is a float": (TypeError, {"max_seqlen_k": float}, "max_seqlen_k is 6.0; it must be a whole"),
    "max_seqlen is a bool": (TypeError, {"max_seqlen_q": to(True)}, "max_seqlen_q is True; it must be a"),
    "max_seqlen is None": (TypeError, {"max_seqlen_q": to(None)}, "max_seqlen_q is None; it must be a whole"),
    "max_seqlen is negative": (
        ValueError,
        {"max_seqlen_k": to(-1)},
        "max_seqlen_k is -1; it must not be negative",
    ),
    # the rest
    "scale is NaN": (ValueError, {"scale": to(float("nan"))}, "scale is nan; it must be finite"),
    **{
        f"{flag} is 1": (TypeError, {flag: to(1)}, f"{flag} is 1; it must be True or False") for flag in FLAGS
    },
}  # fmt: skip

INVALID: dict[str, tuple[dict[str, Change], str]] = {
    "q does not begin with 0": (
        {"cu_seqlens_q": offsets(1, 3, 3, 8)},
        "cu_seqlens_q begins with 1; it must begin with 0",
    ),
    "k decreases": (
        {"cu_seqlens_k": offsets(0, 5, 4, 10)},
        "cu_seqlens_k goes from 5 to 4 at sequence 1; it must not decrease",
    ),
    "q ends past the tensor": (
        {"cu_seqlens_q": offsets(0, 3, 5, 10)},
        "cu_seqlens_q ends with 10; q has only 9 rows",
    ),
    "k ends past the tensor": (
        {"cu_seqlens_k": offsets(0, 5, 7, 13)},
        "cu_seqlens_k ends with 13; k has only 12 rows",
    ),
    "max_seqlen_q is too small": (
        {"max_seqlen_q": to(4)},
        "max_seqlen_q is 4, and sequence 2 has 5 rows; it must be at least that",
    ),
    "max_seqlen_k is too small": (
        {"max_seqlen_k": to(5)},
        "max_seqlen_k is 5, and sequence 2 has 6 rows; it must be at least that",
    ),
}
"""What only the device knows."""


def refusal(error: type[Exception], given: dict[str, Any]) -> str:
    with pytest.raises(error) as caught:
        flash_attention_varlen(**given)
    assert type(caught.value) is error
    return str(caught.value)


def changed(device: torch.device, changes: dict[str, Change]) -> dict[str, Any]:
    given = arguments(device)
    return given | {name: change(given.get(name)) for name, change in changes.items()}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_what_was_wrong_and_what_may_be(name: str, device: torch.device) -> None:
    """C7 among them: another dtype, gaps."""
    error, changes, says = REFUSED[name]
    assert says.replace("DEVICE", str(device)) in refusal(error, changed(device, changes))


@pytest.mark.parametrize("name", INVALID)
def test_with_validate_it_says_what_the_offsets_break(name: str, device: torch.device) -> None:
    """C10."""
    changes, says = INVALID[name]
    assert says == refusal(ValueError, changed(device, changes) | {"validate": True})


def test_a_longest_sequence_that_is_too_small_changes_nothing(device: torch.device) -> None:
    """Nothing is launched by it: where nobody looks, results are right all the same."""
    given = arguments(device)
    expected = flash_attention_varlen(**given)
    assert torch.equal(flash_attention_varlen(**given | {"max_seqlen_q": 0, "max_seqlen_k": 1}), expected)


@pytest.mark.parametrize("longest", [np.int64(6), 2**31, 2**70], ids=["NumPy's", "2**31", "2**70"])
def test_any_whole_number_is_a_longest_sequence(longest: int, device: torch.device) -> None:
    given = arguments(device)
    found = flash_attention_varlen(
        **given | {"max_seqlen_q": longest, "max_seqlen_k": longest}, validate=True
    )
    assert torch.equal(found, flash_attention_varlen(**given))


def test_what_is_wrong_with_the_offsets_is_said_before_what_is_with_the_longest(device: torch.device) -> None:
    given = changed(device, {"cu_seqlens_q": offsets(0, 100, 50, 7), "max_seqlen_q": to(5)})
    says = refusal(ValueError, given | {"validate": True})
    assert says == "cu_seqlens_q goes from 100 to 50 at sequence 1; it must not decrease"


def test_offsets_on_the_cpu_are_refused(device: torch.device) -> None:
    if device.type == "cpu":
        pytest.skip("needs a GPU: here all tensors are on the CPU")
    given = arguments(device)
    says = refusal(ValueError, given | {"cu_seqlens_q": given["cu_seqlens_q"].cpu()})
    assert says == f"cu_seqlens_q is on cpu and q on {device}; they must be the same"


def test_more_rows_than_int32_counts_are_refused() -> None:
    row = torch.ones(1, 1, 16, dtype=torch.float16)
    many: Tensor = row.expand(2**31, 1, 16)
    cu = torch.zeros(2, dtype=torch.int32)
    says = refusal(ValueError, {"q": row, "k": many, "v": many, "cu_seqlens_q": cu, "cu_seqlens_k": cu,
                                "max_seqlen_q": 1, "max_seqlen_k": 1})  # fmt: skip
    assert says == "k has 2147483648 rows; it may have 2147483647, as int32 counts them"
