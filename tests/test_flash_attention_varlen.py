"""What a caller of `flash_attention_varlen` relies on: a ragged batch is its sequences, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from kernels import flash_attention, flash_attention_varlen

from .calls import (
    Lengths,
    Offsets,
    assert_same_bits,
    attend,
    bits,
    every,
    inputs_of,
    largest_tile,
    ragged_inputs_of,
    same_bits,
    sequence_of,
)
from .cases import DTYPES, GRADIENTS
from .fences import fenced
from .layouts import place
from .values import Inputs

SUBSETS = [wanted for wanted in GRADIENTS if wanted != "none"]
ROWS_OF_KEYS = ("k", "v", "dk", "dv")


def in_tiles(device: torch.device, dtype: str = "float16", dim: int = 32) -> Lengths:
    """Longer than a tile, empty on one side and on both, rows that see no key: none like its neighbours."""
    BM, BN = largest_tile(device, dtype, dim)
    return [(BM + 1, 2 * BN + 1), (0, 7), (BM + 3, 5), (0, 0), (5, 0), (2, BN + 3)]


def rows_of(name: str, t: Tensor, first: int, last: int) -> Tensor:
    return t[:, first:last] if name in ("lse", "d_lse") else t[first:last]


def part_of(results: dict[str, Tensor], offsets: Offsets, number: int) -> dict[str, Tensor]:
    """The results of one sequence, in the form of a dense batch of one entry."""
    found = {}
    for name, t in results.items():
        cu = offsets.cu_seqlens_k if name in ROWS_OF_KEYS else offsets.cu_seqlens_q
        rows = rows_of(name, t, *cu[number : number + 2].tolist())
        found[name] = rows[None] if name == "lse" else rows.transpose(0, 1)[None]
    return found


# ---------------------------------------------------------------- a ragged batch is its sequences


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_sequence_comes_out_as_if_it_were_alone(dtype: str, causal: bool, device: torch.device) -> None:
    lengths = in_tiles(device, dtype)
    offsets = Offsets.of(lengths, device)
    x = ragged_inputs_of(device, lengths, past=(3, 2), dtype=dtype)
    found = attend(x, offsets, causal=causal)
    for number in range(len(lengths)):
        alone = attend(sequence_of(x, offsets, number), causal=causal)
        assert_same_bits(part_of(found, offsets, number), alone)


def test_sequences_of_equal_length_are_a_dense_batch(device: torch.device) -> None:
    """Batch-invariance: the same rows, dense and ragged."""
    BM, BN = largest_tile(device)
    lengths = [(BM + 1, BN + 3)] * 3
    offsets = Offsets.of(lengths, device)
    x = ragged_inputs_of(device, lengths)
    parts = [vars(sequence_of(x, offsets, number)) for number in range(3)]
    dense = attend(Inputs(**{name: torch.cat([part[name] for part in parts]) for name in parts[0]}))
    found = attend(x, offsets)
    for number in range(3):
        expected = {name: t[number : number + 1] for name, t in dense.items()}
        assert_same_bits(part_of(found, offsets, number), expected)


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_permuting_sequences_permutes_results(causal: bool, device: torch.device) -> None:
    """C8. Values of very different size: what one sequence took from another would dominate."""
    lengths = in_tiles(device)
    offsets = Offsets.of(lengths, device)
    x = ragged_inputs_of(device, lengths)
    parts = [vars(sequence_of(x, offsets, number)) for number in range(len(lengths))]
    for number, part in enumerate(parts):
        for name in ("v", "d_out"):
            part[name] = part[name] * (50.0, 1.0, 0.02)[number % 3]
    order = [3, 5, 0, 4, 2, 1]

    def joined(numbers: list[int]) -> tuple[Inputs, Offsets]:
        def rows(name: str) -> Tensor:
            pieces = [parts[number][name][0] for number in numbers]
            return torch.cat(pieces, 1) if name == "d_lse" else torch.cat(pieces, 1).transpose(0, 1)

        batch = Inputs(**{name: rows(name).contiguous() for name in parts[0]})
        return batch, Offsets.of([lengths[number] for number in numbers], device)

    (x, offsets), (permuted, elsewhere) = joined(list(range(len(lengths)))), joined(order)
    found, moved = attend(x, offsets, causal=causal), attend(permuted, elsewhere, causal=causal)
    for place_, number in enumerate(order):
        assert_same_bits(part_of(moved, elsewhere, place_), part_of(found, offsets, number))


def test_permuting_batch_entries_permutes_results(device: torch.device) -> None:
    x = inputs_of(device, batch=3)
    order = [2, 0, 1]
    found, permuted = attend(x, causal=True), attend(every(x, lambda _, t: t[order]), causal=True)
    assert_same_bits(permuted, {name: t[order] for name, t in found.items()})


def test_one_entry_alone_comes_out_as_in_its_batch(device: torch.device) -> None:
    x = inputs_of(device, batch=3)
    found = attend(x, causal=True)
    for b in range(3):
        one = slice(b, b + 1)
        alone = attend(Inputs(**{name: t[one] for name, t in vars(x).items()}), causal=True)
        assert_same_bits(alone, {name: t[b : b + 1] for name, t in found.items()})


# ---------------------------------------------------------------- rows behind the last sequence, empties


def behind(results: dict[str, Tensor], ends: tuple[int, int]) -> dict[str, Tensor]:
    return {
        name: t[:, ends[0] :] if name == "lse" else t[ends[name in ROWS_OF_KEYS] :]
        for name, t in results.items()
    }


@pytest.mark.parametrize("lengths", [[], [(0, 0)], [(3, 5), (0, 7)], [(0, 7), (3, 0)]], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_behind_the_last_sequence_are_written_and_not_read(
    dtype: str, lengths: Lengths, device: torch.device
) -> None:
    """C5. More of them than a tile holds; NaN in all inputs."""
    BM, BN = largest_tile(device, dtype)
    x = ragged_inputs_of(device, lengths, past=(BM + 3, BN + 2), dtype=dtype)
    found = attend(x, Offsets.of(lengths, device), causal=True)
    ends = (sum(q for q, _ in lengths), sum(k for _, k in lengths))
    for name, t in behind(found, ends).items():
        assert t.numel()
        assert (t == -math.inf).all() if name == "lse" else not bits(t).any(), name
    for name, t in found.items():
        assert not t.isnan().any(), name


@pytest.mark.parametrize(
    "lengths",
    [[], [(0, 0)], [(0, 5), (0, 3)], [(5, 0), (3, 0)], [(0, 0)] * 40, [(0, 0)] * 40 + [(1, 1)]],
    ids=["no sequence", "nothing", "no queries", "no keys", "40 times nothing", "one row of 41 sequences"],
)
def test_empty_batches(lengths: Lengths, device: torch.device) -> None:
    """C11: no sequences, total_q = 0, total_k = 0, fewer rows than sequences."""
    x = ragged_inputs_of(device, lengths)
    found = attend(x, Offsets.of(lengths, device), causal=True)
    inputs = {"out": x.d_out, "lse": x.d_lse, "dq": x.q, "dk": x.k, "dv": x.v}
    for name, t in found.items():
        like = inputs[name]
        assert like is not None and t.shape == like.shape, name
        if (1, 1) not in lengths:
            assert (t == (-math.inf if name == "lse" else 0.0)).all(), name
    if (1, 1) in lengths:
        assert same_bits(found["out"], x.v.expand(found["out"].shape))


# ---------------------------------------------------------------- gradients


@pytest.fixture(scope="module")
def all_three(device: torch.device) -> tuple[Inputs, Offsets, dict[str, Tensor]]:
    lengths = [(17, 19), (0, 3), (20, 5)]
    offsets = Offsets.of(lengths, device)
    x = ragged_inputs_of(device, lengths, past=(1, 1), dtype="bfloat16")
    return x, offsets, attend(x, offsets, causal=True)


@pytest.mark.parametrize("wanted", SUBSETS)
def test_a_gradient_does_not_depend_on_which_others_are_wanted(
    wanted: str, all_three: tuple[Inputs, Offsets, dict[str, Tensor]]
) -> None:
    """G5."""
    x, offsets, results = all_three
    found = attend(x, offsets, wanted=wanted, causal=True)
    assert len(found) == 2 + len(wanted)
    assert_same_bits(found, {name: results[name] for name in found})


@pytest.mark.parametrize("through", ["out", "lse"])
def test_an_output_that_is_not_used_has_gradient_zero(
    through: str, all_three: tuple[Inputs, Offsets, dict[str, Tensor]]
) -> None:
    x, offsets, _ = all_three
    unused = "d_lse" if through == "out" else "d_out"
    zeros = replace(x, **{unused: torch.zeros_like(getattr(x, unused))})
    assert_same_bits(attend(x, offsets, through=through), attend(zeros, offsets))


def test_a_second_backward_of_one_forward_gives_the_same_bits(
    all_three: tuple[Inputs, Offsets, dict[str, Tensor]],
) -> None:
    """H7."""
    x, offsets, results = all_three
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v)]
    out, lse = flash_attention_varlen(
        leaves[0], leaves[1], leaves[2], offsets.cu_seqlens_q, offsets.cu_seqlens_k,
        offsets.max_seqlen_q, offsets.max_seqlen_k, causal=True, return_lse=True,
    )  # fmt: skip
    for keep in (True, False):
        found = torch.autograd.grad((out, lse), leaves, (x.d_out, x.d_lse), retain_graph=keep)
        expected = {name: results[name] for name in ("dq", "dk", "dv")}
        assert_same_bits(dict(zip(expected, found, strict=True)), expected)


def test_options_reach_the_backward(device: torch.device) -> None:
    """H5, H10: through the public function each option changes the gradients as it does of a dense batch."""
    lengths = [(9, 7), (5, 11)]
    offsets = Offsets.of(lengths, device)
    x = ragged_inputs_of(device, lengths, dtype="float32")
    for options in ({"scale": 0.3}, {"scale": -0.5}, {"scale": 0.0}, {"causal": True}):
        found = attend(x, offsets, **options)
        for number in range(2):
            alone = attend(sequence_of(x, offsets, number), **options)
            assert_same_bits(part_of(found, offsets, number), alone)


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd", "packed", "sliced", "strided", "offset"])
def test_any_layout_gives_the_bits_of_the_contiguous_one(layout: str, device: torch.device) -> None:
    lengths = [(9, 7), (0, 3), (5, 11)]
    offsets = Offsets.of(lengths, device)
    # v and d_lse such that delta is exact in whatever order it is summed
    x = ragged_inputs_of(device, lengths, heads_kv=2, dim=40, dim_v=24, values="exact")

    def laid_out(name: str, t: Tensor) -> Tensor:
        dense = (t if name == "d_lse" else t.transpose(0, 1))[None].contiguous().cpu()
        placed = place(name, dense, layout, device)
        return placed[0] if name == "d_lse" else placed[0].transpose(0, 1)

    assert_same_bits(attend(every(x, laid_out), offsets), attend(x, offsets))


HOSTILE: dict[str, tuple[list[int], list[int]]] = {
    "decreasing": ([0, 9, 4, 20], [0, 12, 3, 20]),
    "past the end": ([0, 9, 900_000, 2**31 - 1], [0, 900_000, 901_000, 2**31 - 1]),
    "negative": ([0, -5, 9, -(2**31)], [-7, -5, -3, -1]),
    "not from zero": ([4, 9, 12, 20], [3, 9, 12, 20]),
    "garbage": ([2**31 - 1, -(2**31), 7, 3], [-(2**31), 2**31 - 1, -1, 2**30]),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_offsets_that_break_the_rules_lead_to_no_access_outside(name: str, device: torch.device) -> None:
    """C10. Results may be wrong; what lies beside inputs and outputs is neither read (NaN) nor written."""
    x = ragged_inputs_of(device, [(20, 20)], dtype="float32")
    amid_nan = every(x, lambda which, t: place(which, t[None].cpu(), "bhsd", device)[0])
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=device) for cu in HOSTILE[name])
    offsets = Offsets(cu_q, cu_k, 20, 20)
    with fenced(device) as fences:
        attend(amid_nan, offsets, causal=True)
    assert not fences.violations()
    if name == "past the end":  # the first sequence is as it should be
        first = attend(sequence_of(x, Offsets.of([(9, 20)], device), 0), causal=True)
        out = flash_attention_varlen(
            *(getattr(amid_nan, n) for n in "qkv"), *vars(offsets).values(), causal=True
        )
        assert same_bits(out[:9].transpose(0, 1)[None], first["out"])


# ---------------------------------------------------------------- torch.compile, torch.library


@pytest.mark.parametrize("dynamic", [False, True], ids=["each length compiled", "lengths dynamic"])
def test_compiled_as_one_graph_it_gives_the_same_bits(dynamic: bool, device: torch.device) -> None:
    """M4."""
    torch.compiler.reset()
    compiled: Any = torch.compile(
        flash_attention_varlen, fullgraph=True, dynamic=dynamic, backend="aot_eager"
    )
    for lengths in ([(9, 7), (5, 11)], [(10, 8), (0, 0), (6, 12)], [(3, 3)]):
        offsets = Offsets.of(lengths, device)
        x = ragged_inputs_of(device, lengths)
        assert_same_bits(attend(x, offsets, attention=compiled, causal=True), attend(x, offsets, causal=True))


def test_compiled_it_validates_too(device: torch.device) -> None:
    torch.compiler.reset()
    compiled: Any = torch.compile(flash_attention_varlen, fullgraph=True, backend="aot_eager")
    x = ragged_inputs_of(device, [(9, 7)])
    offsets = Offsets.of([(9, 7)], device)
    arguments = x.q, x.k, x.v, offsets.cu_seqlens_q, offsets.cu_seqlens_k
    assert same_bits(compiled(*arguments, 9, 7, validate=True), compiled(*arguments, 9, 7))
    with pytest.raises(ValueError, match="max_seqlen_q is 8"):
        compiled(*arguments, 8, 7, validate=True)


def test_what_dense_and_ragged_functions_share_is_the_same(device: torch.device) -> None:
    """One sequence, without a table: the same kernels, the same bits."""
    x = inputs_of(device, heads_q=4, heads_kv=2, dim_v=48)
    ragged = every(x, lambda name, t: t[0] if name == "d_lse" else t[0].transpose(0, 1))
    out = flash_attention(x.q, x.k, x.v, causal=True)
    offsets = Offsets.of([(x.q.shape[2], x.k.shape[2])], device)
    found = flash_attention_varlen(ragged.q, ragged.k, ragged.v, *vars(offsets).values(), causal=True)
    assert same_bits(found.transpose(0, 1)[None], out)
