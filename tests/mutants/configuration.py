"""Configuration and caching: tiles, grids, what is compiled, and what is remembered between calls."""

from __future__ import annotations

from .gradients import SUM
from .mutant import FIRST_FUNCTION, Change, Mutant

KIND = "configuration and caching"

SMALL = "b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0"
FIRST_CALLS = "tests/test_first_calls.py::test_the_first_call_and_any_order_give_the_same_bits"
REPEATS = "tests/test_flash_attention_gpu.py::test_250_forwards_and_50_backwards_of_a_large_batch_are_one"

ADD_TILE = (
    "@triton.jit\n"
    "def add_tile(pointers, tiles, rows, n_rows, stride_dim, DIM: tl.constexpr, WIDTH: tl.constexpr,\n"
    "             VECTOR: tl.constexpr):\n"
    "    for i in tl.static_range(n_slices(DIM, WIDTH)):\n"
    "        where = slice_pointers(pointers, i, stride_dim, DIM, WIDTH, VECTOR)\n"
    "        columns = i * WIDTH + tl.arange(0, tiles[i].shape[1])\n"
    "        tl.atomic_add(where, tiles[i].to(where.dtype.element_ty),\n"
    "                      mask=(rows < n_rows)[:, None] & (columns < DIM)[None, :])\n\n\n"
)
"""The device function that adds a tile to memory."""

MUTANTS: tuple[Mutant, ...] = (
    Mutant(
        "dv-added-to-the-result-of-a-trial-run",
        KIND,
        "dk and dv are computed twice, as by a tuner's trial, and dv is added to what the trial left.",
        (
            Change(
                "launch.py",
                "            attention_backward_dkdv[grid](\n",
                "            _twice(attention_backward_dkdv, grid)(\n",
            ),
            Change("launch.py", "v.new_empty(v.shape if need_dkdv", "v.new_zeros(v.shape if need_dkdv"),
            Change(
                "launch.py",
                "class _Sizes(NamedTuple):",
                "def _twice(kernel, grid):\n"
                "    def run(*args, **options):\n"
                "        kernel[grid](*args, **options)\n"
                "        kernel[grid](*args, **options)\n\n"
                "    return run\n\n\nclass _Sizes(NamedTuple):",
            ),
            SUM,
            Change(
                "backward.py",
                "store_tile(dv_rows, dv,",
                "there = load_tile(dv_rows, keys, Sk, stride_dvd, DV, WIDTH, VECTOR, True, EMULATE_BF16)\n"
                "    store_tile(dv_rows, sum_of(dv, there, DV, WIDTH),",
            ),
        ),
        witness="b1_h1x1_s5x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=v_nodlse_seed0",
        report="M1",
        tensors=("dv",),
    ),
    Mutant(
        "delta-grid-of-larger-tiles",
        KIND,
        "The grid of the delta kernel is that of tiles twice as large: the last heads are skipped.",
        (Change("launch.py", "BM=DELTA_ROWS,", "BM=DELTA_ROWS // 2,"),),
        witness="b1_h1x1_s17x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="M2",
        tensors=("dq",),
    ),
    Mutant(
        "dq-grid-of-the-other-kernels-tiles",
        KIND,
        "The grid of the dq kernel counts tiles of another kernel.",
        (
            Change(
                "launch.py",
                'listed, grid = _programs("q", q, sizes, tile.BM, ragged)',
                'listed, grid = _programs("q", q, sizes, 2 * tile.BM, ragged)',
            ),
        ),
        witness="b1_h1x1_s33x5_d16x16_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        tensors=("dq",),
    ),
    Mutant(
        "grid-remembered-without-the-length",
        KIND,
        "The grid of a number of heads is remembered: other lengths get it too.",
        (
            Change(
                "launch.py",
                "    return (programs,)\n",
                "    return (_GRIDS.setdefault((name, heads, rows), programs),)\n",
            ),
            Change("launch.py", "DELTA_ROWS = 32\n", "_GRIDS: dict = {}\nDELTA_ROWS = 32\n"),
        ),
        witness=FIRST_CALLS,
        report="M5",
    ),
    Mutant(
        "default-scale-remembered-without-d",
        KIND,
        "The default scale of the first head dimension is used for all that come later.",
        (
            Change(
                "checks.py",
                "return float(head_dim**-0.5)",
                'return _DEFAULT.setdefault("scale", float(head_dim**-0.5))',
            ),
            Change(
                "checks.py",
                "SMALLEST_SCALE = 2.0**-126\n",
                "SMALLEST_SCALE = 2.0**-126\n_DEFAULT: dict[str, float] = {}\n",
            ),
        ),
        witness="tests/test_references.py::test_recipe",
        report="M5",
    ),
    Mutant(
        "tiles-remembered-without-the-head-dimension",
        KIND,
        "The tiles of the first head dimension are used for all that come later.",
        (
            Change(
                "tiles.py",
                "@functools.cache\ndef choose_tiles(",
                "_CHOSEN: dict = {}\n\n\n"
                "def choose_tiles(arch, head_dim, head_dim_v, itemsize):\n"
                "    if (arch, itemsize) not in _CHOSEN:\n"
                "        _CHOSEN[arch, itemsize] = _choose_tiles(arch, head_dim, head_dim_v, itemsize)\n"
                "    return _CHOSEN[arch, itemsize]\n\n\n"
                "def _choose_tiles(",
            ),
        ),
        witness="tests/test_compile.py::test_unusual_shapes",
        lane="gpu",
    ),
    Mutant(
        "graph-of-one-parity-of-the-length",
        KIND,
        "The wrapper looks at the parity of the length: a compiled graph holds for one of them alone.",
        (
            Change(
                "attention.py",
                "    check_tensors(q, k, v)\n",
                "    check_tensors(q, k, v)\n    if q.shape[2] % 2:\n        deterministic = True\n",
            ),
        ),
        witness="tests/test_flash_attention_operators.py::test_one_compiled_function_serves_all_lengths",
        report="M4",
    ),
    Mutant(
        "even-head-dimensions-taken-for-unpadded",
        KIND,
        "Head dimensions that are multiples of 8 are loaded without the mask of the padding.",
        (Change("numerics.py", "if i * WIDTH + columns <= DIM:", "if DIM % 8 == 0:", 2),),
        witness="b1_h1x1_s5x5_d40x40_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        report="N1",
        tensors=("out",),
    ),
    Mutant(
        "width-of-accesses-from-q-alone",
        KIND,
        "Whether rows allow 16-byte accesses is decided by q: v may have other strides.",
        (Change("launch.py", "VECTOR=_vector(q, k, v, out)", "VECTOR=_vector(q)"),),
        witness="b1_h1x1_s5x5_d16x20_float16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "width-of-accesses-without-the-address",
        KIND,
        "16-byte accesses are made wherever the strides allow them, whatever the address is.",
        (Change("launch.py", "if last != 1 or t.data_ptr() % 16:", "if last != 1:"),),
        lane="gpu",
        equivalent="Triton compiles a kernel of its own for an address that is no multiple of 16 bytes",
    ),
    Mutant(
        "bfloat16-not-raised-in-the-interpreter",
        KIND,
        "The interpreter multiplies bfloat16 operands as they are: their bit patterns.",
        (
            Change(
                "launch.py",
                '"EMULATE_BF16": arch.interpreted and q.dtype == torch.bfloat16',
                '"EMULATE_BF16": False',
            ),
        ),
        witness="b1_h1x1_s5x5_d16x16_bfloat16_full_scale=auto_normal_bhsd_grad=none_nodlse_seed0",
        tensors=("out",),
    ),
    Mutant(
        "shared-memory-of-another-chip",
        KIND,
        "sm86 is taken to have the shared memory of sm80.",
        (Change("architecture.py", "86: 99 * KIB", "86: 163 * KIB"),),
        witness="tests/test_flash_attention_refusals.py::test_the_architecture_of_a_gpu",
        report="M8",
    ),
    Mutant(
        "shared-memory-of-the-override",
        KIND,
        "Code for sm80 is taken to have sm80's shared memory on any chip.",
        (
            Change(
                "architecture.py",
                "min(_shared_memory(index, capability), _shared_memory(index, int(match[1])))",
                "_shared_memory(index, int(match[1]))",
            ),
        ),
        witness=(
            "tests/test_flash_attention_refusals.py"
            "::test_the_architecture_is_the_one_that_triton_is_told_to_compile_for"
        ),
        report="M8",
    ),
    Mutant(
        "a-stage-more-than-was-counted",
        KIND,
        "Kernels are compiled with a stage more than their shared memory was counted for.",
        (Change("launch.py", '"num_stages": tile.stages', '"num_stages": tile.stages + 1'),),
        witness="b1_h1x1_s65x65_d256x256_float16_full_scale=auto_normal_bhsd_grad=q_nodlse_seed0",
        report="N2",
        lane="gpu",
    ),
    Mutant(
        "registers-capped-at-half",
        KIND,
        "Kernels may use 128 registers a thread: the rest is spilled.",
        (Change("launch.py", 'options["maxnreg"] = 255', 'options["maxnreg"] = 128'),),
        witness="tests/test_compile.py::test_shipped_tiles[forward-sm80-float16-D128]",
        lane="gpu",
    ),
    Mutant(
        "compiled-anew-for-lengths-of-1",
        KIND,
        "Triton specialises heads and lengths: 1 becomes a constant, and multiples of 16 another kernel.",
        (Change("numerics.py", '    "Hq", "Hkv", "group", "Sq", "Sk", "batch",\n', ""),),
        witness="tests/test_compile.py::test_shipped_tiles[forward-sm80-float16-D16]",
        report="M10",
        lane="gpu",
    ),
    Mutant(
        "current-device-not-changed",
        KIND,
        "Kernels are launched on the current device, not on that of the tensors.",
        (
            Change(
                "launch.py",
                "    return torch.cuda.device(t.device)",
                "    return contextlib.nullcontext()",
            ),
        ),
        witness="tests/test_flash_attention_devices.py"
        "::test_every_kernel_is_launched_while_the_device_of_the_tensors_is_current",
        report="M7",
    ),
    Mutant(
        "gradients-of-a-group-by-atomics",
        KIND,
        "Each query head of a group has a program of its own; they add in the order in which they end.",
        (
            Change(
                "launch.py", "attention_backward_dkdv[grid](", "attention_backward_dkdv[*grid, sizes.group]("
            ),
            Change("launch.py", "k.new_empty(k.shape if need_dkdv", "k.new_zeros(k.shape if need_dkdv"),
            Change("launch.py", "v.new_empty(v.shape if need_dkdv", "v.new_zeros(v.shape if need_dkdv"),
            Change(
                "backward.py",
                "for g in range(group):",
                "for g in range(tl.program_id(1), tl.program_id(1) + 1):",
            ),
            Change("backward.py", "    scores,\n", "    scores,\n    slice_pointers,\n"),
            Change("backward.py", FIRST_FUNCTION["backward.py"], ADD_TILE + FIRST_FUNCTION["backward.py"]),
            Change(
                "backward.py",
                "store_tile(dk_rows, dk, keys, Sk, stride_dkd, D, WIDTH, VECTOR, EMULATE_BF16)",
                "add_tile(dk_rows, dk, keys, Sk, stride_dkd, D, WIDTH, VECTOR)",
            ),
            Change(
                "backward.py",
                "store_tile(dv_rows, dv, keys, Sk, stride_dvd, DV, WIDTH, VECTOR, EMULATE_BF16)",
                "add_tile(dv_rows, dv, keys, Sk, stride_dvd, DV, WIDTH, VECTOR)",
            ),
        ),
        witness=REPEATS,
        report="K4",
        lane="gpu",
        tensors=("dk", "dv"),
    ),
)
