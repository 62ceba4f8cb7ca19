"""The resource baseline: what is written is read back, each limit is broken by something, worse is red.

Configurations that are really compiled, some of them wrong on purpose, are in tests/test_compile.py: here
Triton may interpret, and compile nothing.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path

import msgspec
import pytest
import triton

from reports import kept, resources
from reports.errors import ReportError
from reports.kept import Difference
from reports.resources import (
    KIB,
    MOST_SPILLED_IN_A_LOOP,
    SHARED_MEMORY,
    SPILLS,
    Entry,
    Resources,
    Spills,
    Words,
    reason_of,
)
from tests.offline import DIMS, Program, own_code, shipped, spilled_in, tile_loops, unusual

NAME = "forward-sm80-float16-D64"
AMPERE = Entry(BM=128, BN=64, warps=8, stages=3, shared=96 * KIB, registers=237, mma=256, cp_async_16=48,
               cp_async=2, ld_global_16=8, st_global_16=8, ldmatrix=152, ex2=68, fma=6, barriers=11,
               instructions=2500)  # fmt: skip
HOPPER = Entry(BM=64, BN=64, warps=4, stages=3, shared=112 * KIB, registers=194, wgmma=24, cp_async_16=96,
               ld_global_16=8, st_global_16=8, ex2=68, barriers=13, instructions=2600)  # fmt: skip


def found(**entries: Entry) -> Resources:
    """A baseline of these, `__` in a name standing for `-`."""
    named = {name.replace("__", "-"): of for name, of in entries.items()}
    return Resources(implementation="triton", triton="3.7.1", ptxas="12.8", entries=named)


def one(entry: Entry, **changes: int) -> Resources:
    return found(**{NAME: msgspec.structs.replace(entry, **changes)})


def texts(differences: list[Difference], red: bool) -> list[str]:
    return [of.what for of in differences if of.red == red]


# ---------------------------------------------------------------- the file


def test_a_baseline_is_read_back_and_its_table_lies_beside_it(tmp_path: Path) -> None:
    whole = found(forward__sm80__float16__D128=AMPERE, forward__sm90__float16__D128=HOPPER)
    written, page = resources.write(whole, tmp_path / "new folder" / "baseline.json")
    assert resources.read(written) == whole
    assert page.read_text(encoding="utf-8") == resources.markdown(whole)
    lines = written.read_text().splitlines()
    assert [line.split(":")[0] for line in lines if "sm" in line] == [
        '  "forward-sm80-float16-D128"',
        '  "forward-sm90-float16-D128"',
    ]
    assert "stack" not in written.read_text(), "what is 0 is left out"


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    path = tmp_path / "baseline.json"
    with pytest.raises(ReportError, match=rf"^{path}: No such file"):
        resources.read(path)
    whole = kept.encode(one(AMPERE))
    path.write_bytes(whole.replace(b'"version": 1', b'"version": 7'))
    with pytest.raises(ReportError, match=rf"^{path}: a baseline of version 7; this reads version 1$"):
        resources.read(path)
    for wrong in (whole[:-3], whole[: len(whole) // 2], b"", b"[]", b'{"version": 1}', b"\xff"):
        path.write_bytes(wrong)
        with pytest.raises(ReportError, match=rf"^{path}: not a baseline that can be read \("):
            resources.read(path)


def test_the_name_of_the_file_says_what_was_compiled_for_and_by_what() -> None:
    version = triton.__version__.partition("+")[0]
    assert resources.key().name == f"resources-triton-sm80-86-89-90-triton{version}.json"


@pytest.mark.parametrize("path", sorted(kept.FOLDER.glob("resources-*.json")), ids=lambda path: path.stem)
def test_what_is_committed_breaks_no_limit_and_its_table_is_of_the_same_numbers(path: Path) -> None:
    whole = resources.read(path)
    assert whole.failed == {}
    assert resources.limits(whole) == []
    assert path.with_suffix(".md").read_text(encoding="utf-8") == resources.markdown(whole)
    assert path.name.endswith(f"triton{whole.triton}.json")
    assert path.read_bytes() == kept.encode(whole)


# ---------------------------------------------------------------- what has changed


def test_the_same_again_is_no_difference() -> None:
    assert resources.differences(one(AMPERE), one(AMPERE)) == []
    assert resources.differences(one(HOPPER), one(HOPPER)) == []


@pytest.mark.parametrize(
    "field, old, new",
    [
        ("shared", 96 * KIB, 96 * KIB + 16),
        ("registers", 237, 238),
        ("stack", 0, 8),
        ("spilled_in_loops", 0, 2),
        ("spilled_in_a_loop", 0, 2),
        ("mma", 256, 255),
        ("cp_async_16", 48, 47),
        ("cp_async", 2, 0),
    ],
)
def test_what_is_worse_is_red_and_what_is_better_is_told(field: str, old: int, new: int) -> None:
    change = f"{field} {old} -> {new}"
    (difference,) = resources.differences(one(AMPERE), one(AMPERE, **{field: new}))
    assert difference == Difference(f"{NAME}: worse than the baseline: {change}", True)
    (difference,) = resources.differences(one(AMPERE, **{field: new}), one(AMPERE))
    change = f"{field} {new} -> {old}"
    told = f"{NAME}: better than the baseline: {change}; python -m reports baseline update --kind resources"
    assert difference == Difference(told, False)


@pytest.mark.parametrize("field", ["wgmma", "tf32", "tma"])
def test_fewer_instructions_of_these_are_red_too(field: str) -> None:
    more = one(HOPPER, **{field: 25})
    assert texts(resources.differences(more, one(HOPPER, **{field: 24})), red=True)
    assert not texts(resources.differences(one(HOPPER, **{field: 24}), more), red=True)


def test_what_is_worse_in_one_way_and_better_in_another_is_both() -> None:
    differences = resources.differences(one(AMPERE), one(AMPERE, registers=255, shared=64 * KIB))
    assert texts(differences, red=True) == [f"{NAME}: worse than the baseline: registers 237 -> 255"]
    assert len(texts(differences, red=False)) == 1


@pytest.mark.parametrize("field", ["ldmatrix", "ex2", "fma", "barriers", "ld_global", "instructions"])
@pytest.mark.parametrize("by", [1, -1])
def test_other_instructions_are_told_whichever_way_they_went(field: str, by: int) -> None:
    old = msgspec.structs.replace(AMPERE, ld_global=5)
    differences = resources.differences(one(old), one(old, **{field: getattr(old, field) + by}))
    assert [of.red for of in differences] == [False]
    assert f"not as in the baseline: {field} " in differences[0].what


def test_with_another_tile_instructions_are_not_weighed_but_resources_are() -> None:
    other = {"BM": 64, "mma": 128, "cp_async_16": 40}
    (difference,) = resources.differences(one(AMPERE), one(AMPERE, **other))
    assert not difference.red
    assert "tile 128x64 8w 3s -> 64x64 8w 3s" in difference.what
    (difference,) = resources.differences(one(AMPERE), one(AMPERE, **other, registers=240))
    assert difference.red
    assert difference.what.endswith("registers 237 -> 240, tile 128x64 8w 3s -> 64x64 8w 3s")
    (difference,) = resources.differences(one(AMPERE), one(AMPERE, width=64, mma=128))
    assert "not as in the baseline: tile 128x64 8w 3s -> 128x64 8w 3s 64c;" in difference.what


def test_a_configuration_that_is_gone_is_red_and_a_new_one_is_told() -> None:
    both = found(forward__sm80__float16__D64=AMPERE, forward__sm90__float16__D128=HOPPER)
    gone = "forward-sm90-float16-D128: is in the baseline and was not compiled"
    assert resources.differences(both, one(AMPERE)) == [Difference(gone, True)]
    (difference,) = resources.differences(one(AMPERE), both)
    assert not difference.red
    assert difference.what.startswith("forward-sm90-float16-D128: is not in the baseline; ")
    failed = msgspec.structs.replace(one(AMPERE), failed={"forward-sm90-float16-D128": "RuntimeError: why"})
    assert resources.differences(both, failed) == [Difference(f"{gone} (RuntimeError: why)", True)]


def test_another_triton_is_not_compared_and_another_assembler_is_told() -> None:
    older = msgspec.structs.replace(one(AMPERE), triton="3.6.0")
    what = "the baseline is of Triton 3.6.0, this is 3.7.1: nothing was compared"
    assert resources.differences(older, one(AMPERE)) == [Difference(what, True)]
    newer = msgspec.structs.replace(one(AMPERE), ptxas="13.0")
    assert [of.red for of in resources.differences(newer, one(AMPERE))] == [False]


# ---------------------------------------------------------------- limits


def limits(name: str, entry: Entry, **changes: int) -> list[str]:
    whole = found(**{name: msgspec.structs.replace(entry, **changes)})
    return texts(resources.limits(whole), red=True)


def test_programs_as_they_should_be_break_none() -> None:
    for chip in ("sm80", "sm86", "sm89"):
        assert limits(f"forward-{chip}-float16-D128", AMPERE) == []
    assert limits("forward-sm90-float16-D128", HOPPER) == []
    fixed = Entry(warps=4, stages=3, registers=60, ld_global_16=4)
    assert limits("delta-sm80-float16-D64", fixed) == []


@pytest.mark.parametrize("chip, most", SHARED_MEMORY.items())
def test_the_shared_memory_of_each_chip(chip: str, most: int) -> None:
    entry = HOPPER if chip == "sm90" else AMPERE
    name = f"forward-{chip}-float16-D128"
    assert limits(name, entry, shared=most) == []
    assert "of shared memory; a block on " + chip in limits(name, entry, shared=most + 1)[0]


@pytest.mark.parametrize(
    "changes, what",
    [
        ({"registers": 256}, "256 registers a thread; there are 255"),
        ({"registers": 136, "warps": 16}, "69632 registers, 136 x 512 threads; a block has 65536"),
        ({"registers": 129, "warps": 16}, "69632 registers, 129 x 512 threads; a block has 65536"),
        ({"registers": 40, "warps": 33}, "1056 threads; a block has at most 1024"),
        (
            {"stack": 8, "spilled_in_loops": 2},
            "2 instructions in loops over tiles move what is spilled;"
            " reports.resources.SPILLS gives no reason why",
        ),
        ({"mma": 0}, "no mma"),
        ({"wgmma": 24}, "24 wgmma where mma should be"),
        ({"cp_async_16": 0}, "no cp.async of 16 bytes, with 3 stages"),
        ({"ld_global_16": 0}, "no ld.global of 16 bytes"),
        ({"st_global_16": 0}, "no st.global of 16 bytes"),
    ],
    ids=str,
)
def test_each_limit_has_a_program_that_breaks_it(changes: dict[str, int], what: str) -> None:
    assert limits(NAME, AMPERE, **changes) == [f"{NAME}: {what}"]


def test_which_instructions_multiply() -> None:
    wgmma, mma = "no wgmma", "no mma"
    assert wgmma in limits("forward-sm90-float16-D128", HOPPER, wgmma=0)[0]
    assert mma in limits("forward-sm90-float16-D128", HOPPER, BM=32)[0], "wgmma takes 64 rows at least"
    assert limits("dkdv-sm90-float16-D128", HOPPER, BM=32) == [], "whose rows are keys"
    for mask in ("", "-full", "-ragged"):
        assert limits(f"{NAME}{mask}", AMPERE, mma=0)
    single = "forward-sm80-float32-D128"
    assert "instructions of tensor cores for float32" in limits(single, AMPERE)[0]
    assert limits(single, AMPERE, mma=0) == []
    assert "no fma" in limits(single, AMPERE, mma=0, fma=0)[0]
    tf32 = "forward-sm80-tf32-D128"
    assert "no instruction of tensor cores for TF32" in limits(tf32, AMPERE, cp_async_16=0)[0]
    assert limits(tf32, AMPERE, cp_async_16=0, tf32=256) == []


def test_what_is_spilled_outside_of_loops_breaks_no_limit() -> None:
    assert limits(NAME, AMPERE, stack=264) == []


LISTED = Spills("slow without", ("forward", "dq"), ("sm80",), (96, 128))


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "SPILLS", [LISTED])


@pytest.mark.usefixtures("listed")
def test_which_spills_are_listed() -> None:
    for name in ("forward-sm80-float16-D96", "dq-sm80-bfloat16-D128-ragged", "dq-sm80-float16-D64x128"):
        assert reason_of(Words.of(name)) == LISTED
    for name in ("dkdv-sm80-float16-D96", "dq-sm86-float16-D96", "dq-sm80-float16-D80", "dq-sm80-tf32-D96",
                 "dq-sm80-float16-D192x128", "dq-sm80-float16-D96-unaligned"):  # fmt: skip
        assert reason_of(Words.of(name)) is None


@pytest.mark.usefixtures("listed")
def test_spills_that_have_a_reason_are_not_red_and_are_told_once_they_are_gone() -> None:
    spilling = msgspec.structs.replace(AMPERE, stack=264, spilled_in_loops=30, spilled_in_a_loop=20)
    gone = msgspec.structs.replace(AMPERE, stack=264)
    both = {"forward-sm80-float16-D96": spilling, "forward-sm80-bfloat16-D96": gone}
    assert resources.limits(found(**both)) == []
    told = ("dq on sm80, D = 96 to 128: spills in no loop over tiles any more;"
            " reports.resources.SPILLS need not list it")  # fmt: skip
    assert resources.limits(found(**both, **{"dq-sm80-float16-D96": gone})) == [Difference(told, False)]


@pytest.mark.usefixtures("listed")
def test_no_reason_is_good_enough_for_many_in_a_loop() -> None:
    most = MOST_SPILLED_IN_A_LOOP
    name = "forward-sm80-float16-D128"
    assert limits(name, AMPERE, stack=264, spilled_in_loops=2 * most, spilled_in_a_loop=most) == []
    what = f"{most + 1} instructions in one loop over tiles move what is spilled; {most} are allowed"
    assert limits(name, AMPERE, stack=264, spilled_in_loops=2 * most, spilled_in_a_loop=most + 1) == [
        f"{name}: {what}"
    ]


def test_the_list_of_spills_is_of_configurations_that_are_compiled() -> None:
    compiled = {(those, words.kernel, words.chip)
                for words in (Words.of(str(case)) for case in (*shipped(), *unusual()))
                if (those := reason_of(words)) is not None}  # fmt: skip
    assert compiled == {(those, *which) for those in SPILLS for which in product(those.kernels, those.chips)}


def test_what_cannot_be_compiled_is_red() -> None:
    failed = msgspec.structs.replace(one(AMPERE), failed={"dq-sm86-float16-D64": "RuntimeError: no tile"})
    assert texts(resources.limits(failed), red=True) == [
        "dq-sm86-float16-D64: cannot be compiled: RuntimeError: no tile"
    ]


@pytest.mark.parametrize("name", ["forward", "forward-sm80-float16", "forward-sm75-float16-D64", ""])
def test_a_name_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(ReportError, match=f"^{name!r} is no configuration"):
        resources.limits(found(**{name: AMPERE}))


# ---------------------------------------------------------------- measuring

PTX = """
.visible .entry attention_forward(
{
	.reg .b32 	%r<10>;
	ld.param.b64 	%rd1, [attention_forward_param_0];
	// begin inline asm
	@%p1 ld.global.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	@!%p2 ld.global.b32 { %r1 }, [ %rd1 + 0 ];
	ld.global.L1::evict_last.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
	@%p1 st.global.v4.b32 [ %rd1 + 0 ], { %r1, %r2, %r3, %r4 };
	st.global.b32 [ %rd1 + 0 ], { %r1 };
	@%p1 cp.async.cg.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x10, %r2;
	@%p1 cp.async.ca.shared.global [ %r1 + 0 ], [ %rd1 + 0 ], 0x4, %r2;
	cp.async.commit_group;
	cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%r1], [%rd1, {%r2}], [%r3];
	cp.async.bulk.wait_group 0;
	mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
	mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
	wgmma.fence.sync.aligned;
	wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%r1}, %rd2, %rd3, 1, 1, 1, 0, 1;
	wgmma.wait_group.sync.aligned 0;
	ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%r1, %r2, %r3, %r4}, [%r5];
	ex2.approx.ftz.f32 %r1, %r2;
	fma.rn.ftz.f32 	%r1, %r2, %r3, %r4;
	bar.sync 	0;
	ret;
}
"""


def test_instructions_are_counted() -> None:
    entry = resources.entry(Program(None, 4, 3, 1024, 8, 2, 1, 60, PTX))
    assert entry == Entry(warps=4, stages=3, shared=1024, stack=8, spilled_in_loops=2,
                          spilled_in_a_loop=1, registers=60, mma=2, wgmma=1, tf32=1, cp_async_16=1,
                          cp_async=1, tma=1, ld_global_16=2, ld_global=1, st_global_16=1, st_global=1,
                          ldmatrix=1, ex2=1, fma=1, barriers=1, instructions=21)  # fmt: skip


# A loop over heads; in it two over tiles, the second with two branches back to its begin, and one that
# multiplies nothing. Branches go forwards too, and to themselves.
SASS = """
	code for sm_80
		Function : attention_backward_dkdv
        /*0000*/                   MOV R1, c[0x0][0x28] ;                       /* 0x00000a0000017a02 */
                                                                                /* 0x000fe40000000f00 */
        /*0010*/                   STL [R1], R2 ;                               /* 0x0000000201007387 */
        /*0020*/                   LDL.LU R2, [R1] ;
        /*0030*/              @!P0 BRA 0x80 ;
        /*0040*/                   HMMA.16816.F32 R4, R8, R12, R4 ;
        /*0050*/              @!P1 STL.64 [R1+0x8], R4 ;
        /*0060*/                   LDL.128 R4, [R1+0x10] ;
        /*0070*/             @!UP1 BRA 0x40 ;
        /*0080*/                   LDL R3, [R1+0x20] ;
        /*0090*/                   FFMA.FTZ R4, R5, R6, R7 ;
        /*00a0*/               @P2 BRA 0x90 ;
        /*00b0*/                   LDL R5, [R1+0x30] ;
        /*00c0*/                   BRA.U UP0, 0x90 ;
        /*00d0*/                   LDL R5, [R1] ;
        /*00e0*/               @P3 BRA 0xd0 ;
        /*00f0*/                   BRA 0x20 ;
        /*0100*/                   STL [R1], R5 ;
        /*0110*/                   EXIT ;
        /*0120*/                   BRA 0x120;
        /*0130*/                   NOP;
"""


def test_spills_are_counted_in_innermost_loops_that_multiply() -> None:
    loops = tile_loops(SASS)
    assert loops == [["HMMA", "STL", "LDL", "BRA"], ["FFMA", "BRA", "LDL", "BRA"]]
    assert spilled_in(loops) == [2, 1]
    without = SASS.replace("HMMA", "IMAD").replace("FFMA", "FADD")
    assert tile_loops(without) == []
    # what multiplies is around loops that do not
    assert spilled_in(tile_loops(without.replace("LDL R3", "HMMA R3"))) == [5]
    with pytest.raises(AssertionError, match=r"where does it go\? .*BRA `"):
        tile_loops(SASS.replace("BRA 0x80", "BRA `(.L_x_1)"))


def test_what_a_kernel_calls_is_not_the_kernels() -> None:
    called = SASS.replace("LDL.LU R2, [R1] ;", "CALL.REL.NOINC 0x80 ;")
    assert tile_loops(called) == [["HMMA", "STL", "LDL", "BRA"]]
    assert tile_loops(called.replace("0x80 ;", "0x90 ;", 1)) == [["HMMA", "STL", "LDL", "BRA"]]
    declared = ".version 8.0\n.func exactly\n(\n)\n;\n"
    kernel = ".visible .entry forward(\n)\n{\n\tmma.sync a;\n\tcall exactly;\n}\n"
    body = ".func exactly()\n{\n\tmma.sync b;\n}\n"
    assert own_code(declared + kernel + body) == own_code(kernel) == kernel.removeprefix(".visible ")


@pytest.mark.parametrize("variable, value", [("interpret", True), ("override_arch", "sm80")])
def test_where_triton_does_not_compile_for_what_it_is_asked_to_nothing_is_measured(
    variable: str, value: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(triton.knobs.runtime, variable, value)
    with pytest.raises(ReportError, match=f"^TRITON_{variable.upper()} is "):
        resources.measure(1)


# ---------------------------------------------------------------- the page


@pytest.mark.usefixtures("listed")
def test_the_page_has_a_row_for_a_shape_and_columns_for_each_chip() -> None:
    in_loops = msgspec.structs.replace(
        AMPERE, stack=16, spilled_in_loops=3, spilled_in_a_loop=2, registers=255
    )
    more = msgspec.structs.replace(in_loops, spilled_in_a_loop=3)
    lines = resources.markdown(
        found(
            forward__sm80__float16__D128=AMPERE,
            forward__sm90__float16__D128=HOPPER,
            dq__sm80__float16__D80=msgspec.structs.replace(AMPERE, stack=8),
            dq__sm80__float16__D96=msgspec.structs.replace(AMPERE, stack=24),
            forward__sm80__float16__D96=in_loops,
            forward__sm80__bfloat16__D96=more,
            dq__sm80__float16__D192=in_loops,
        )
    ).splitlines()
    assert (
        "| forward | float16 | 128 | 128x64 8w 3s | 96 | 237 | 256 | 48 |  |  |  |  |  |  |  |  |  |  |"
        " 64x64 4w 3s | 112 | 194 | w 24 | 96 |"
    ) in lines
    assert (
        "- In loops over tiles: slow without. 2 configurations, with at most 3 instructions in a loop"
        " (forward-sm80-bfloat16-D96)."
    ) in lines
    assert (
        "- In loops over tiles: no reason is known. 1 configuration, with at most 2 instructions in a loop"
        " (dq-sm80-float16-D192)."
    ) in lines
    (outside,) = (line for line in lines if line.startswith("- Only outside of them: "))
    assert "2 of 7 configurations, at most 24 B (dq-sm80-float16-D96)" in outside
    (of_new,) = (line for line in lines if line.startswith("| dq | float16 | 192 |"))
    assert "| 128x64 8w 3s | 96 | 255 + 16 B (3) |" in of_new
    assert any(line.startswith("| sm80 | 163 |") and line.endswith("| 3 of 6 | 2 |") for line in lines)
    assert ("| sm90 | 227 | 112 (forward-sm90-float16-D128) | 194 (forward-sm90-float16-D128) | 0 of 1 | 0 |"
            in lines)  # fmt: skip
    header = next(line for line in lines if line.startswith("| kernel "))
    assert all(line.count("|") == header.count("|") for line in lines if line.startswith("| forward "))


def test_head_dimensions_that_have_tiles_of_their_own_stand_together() -> None:
    assert resources.DIMS == DIMS
    lines = resources.markdown(
        found(forward__sm80__float16__D96=AMPERE, forward__sm80__float16__D176=AMPERE)
    ).splitlines()
    titles = [line for line in lines if line.startswith("#### ")]
    assert titles == ["#### Causal", "#### Other head dimensions, and rows that allow no 16-byte accesses"]
