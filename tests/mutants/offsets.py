"""32-bit offsets and launch limits: what only memory and grids beyond 2**31 and 2**16 show."""

from __future__ import annotations

from .mutant import Change, Mutant

KIND = "32-bit offsets"
BEYOND = "tests/test_flash_attention_gpu.py::test_offsets_beyond_32_bits"
RAGGED_BEYOND = "tests/test_flash_attention_gpu.py::test_ragged_offsets_beyond_32_bits"

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "row-times-stride-in-32-bits",
        KIND,
        "The offset of a row is an int32.",
        (
            Change("numerics.py", "rows.to(tl.int64) * row_step(", "rows * row_step("),
            Change(
                "numerics.py",
                "(stride_row // VECTOR * VECTOR).to(tl.int64)",
                "stride_row // VECTOR * VECTOR",
            ),
        ),
        witness=f"{BEYOND}[sequence-k]",
        report="E1",
        lane="gpu",
    ),
    Mutant(
        "row-of-the-gradient-of-the-lse-in-32-bits",
        KIND,
        "The pass for delta alone has an int32 offset: of the rows of d_lse.",
        (Change("backward.py", "rows.to(tl.int64) * stride_dlm", "rows * stride_dlm"),),
        witness="tests/test_flash_attention_gpu.py::test_offsets_of_the_gradient_of_the_lse_beyond_32_bits",
        report="E2",
        lane="gpu",
        tensors=("dq",),
    ),
    Mutant(
        "batch-times-stride-in-32-bits",
        KIND,
        "The offset of a batch entry is an int32 where out and dq are written.",
        (Change("position.py", "b = (batch_head // Hq).to(tl.int64)", "b = batch_head // Hq"),),
        witness="tests/test_flash_attention_gpu.py::test_results_of_more_than_2_31_elements",
        report="E4",
        lane="gpu",
        tensors=("out",),
    ),
    Mutant(
        "head-times-stride-in-32-bits",
        KIND,
        "The offset of a query head is an int32.",
        (Change("position.py", "h = (batch_head % Hq).to(tl.int64)", "h = batch_head % Hq"),),
        witness=f"{BEYOND}[heads-q]",
        report="E1",
        lane="gpu",
    ),
    Mutant(
        "column-times-stride-in-32-bits",
        KIND,
        "The offset in a last dimension with gaps is an int32.",
        (Change("numerics.py", "(dims.to(tl.int64) * stride_dim)", "(dims * stride_dim)"),),
        witness=f"{BEYOND}[head dimension-v]",
        lane="gpu",
    ),
    Mutant(
        "sequence-times-stride-in-32-bits",
        KIND,
        "The first row of a sequence on the other side is an int32, and so is its offset.",
        (Change("ragged.py", "first_other.to(tl.int64), length_other", "first_other, length_other"),),
        witness=f"{RAGGED_BEYOND}[rows-k]",
        lane="gpu",
    ),
    Mutant(
        "ragged-head-times-stride-in-32-bits",
        KIND,
        "The offset of a KV head of a ragged batch is an int32 in dK/dV.",
        (Change("position.py", "(program % Hkv).to(tl.int64), start_n", "program % Hkv, start_n"),),
        witness=f"{RAGGED_BEYOND}[heads-k]",
        lane="gpu",
        tensors=("dk",),
    ),
    Mutant(
        "heads-in-the-second-dimension-of-the-grid",
        KIND,
        "Heads and batch entries are the grid's second dimension, which ends at 65,535.",
        (
            Change("launch.py", "return (programs,)", "return (programs // max(heads, 1), heads)"),
            Change(
                "position.py",
                "program = tl.program_id(0)",
                "program = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)",
                2,
            ),
        ),
        witness="tests/test_flash_attention_gpu.py::test_more_heads_than_a_grid_has_in_its_second_dimension",
        report="E7",
        lane="gpu",
    ),
)
