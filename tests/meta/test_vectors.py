"""Portable vectors: the same bytes each time, read back as they were; our kernel is right on them."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from reports import vectors
from reports.__main__ import main as reports
from reports.errors import ReportError
from reports.vectors import content, faults, format, judging
from reports.vectors.format import GUIDE, INDEX, SCHEMA, SUFFIX, Loaded
from tests.cases import DTYPES, Case, parse_case
from tests.comparison import Prepared
from tests.mutants import matrix
from tests.mutants.catalogue import CATALOGUE
from tests.values import make_inputs

TINY = Case(heads_q=2, len_q=5, len_k=7, causal=True, d_lse=True)
RAGGED = Case(
    heads_q=2, lengths=((5, 3), (2, 9)), past=(2, 1), layout="bshd", dtype="float32", causal=True, d_lse=True
)
SOME = [TINY, RAGGED]

HELD, BROKE, WRONG_USE, NOTHING_CHECKED = 0, 1, 2, 3


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def write_results(folder: Path, of: Mapping[str, Mapping[str, Any]]) -> Path:
    """What a kernel would write: results by heads (B, H, S, ...) as the cases' files."""
    folder.mkdir(exist_ok=True)
    for id, results in of.items():
        case = parse_case(id)
        tensors = {}
        for name, x in results.items():
            t = torch.from_numpy(np.array(content.handed_over(case, x)))
            tensors[name] = t.to(torch.float32 if name == "lse" else content.NATIVE[case.dtype]).contiguous()
        (folder / f"{id}{SUFFIX}").write_bytes(save(tensors))
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The default set."""
    folder = tmp_path_factory.mktemp("vectors")
    assert reports(["vectors", "--out", str(folder)]) == HELD
    return folder


@pytest.fixture(scope="module")
def loaded(whole: Path) -> list[Loaded]:
    return judging.read(whole)


@pytest.fixture(scope="module")
def ours(loaded: list[Loaded]) -> dict[str, judging.Made]:
    """What our kernel makes of the default set, by case."""
    session = judging.session_of(None, None)
    return {of.vector.case: made for of, made in judging.run(loaded, session)}


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Two vectors, dense and ragged, to be spoilt."""
    folder = tmp_path / "small"
    vectors.write(folder, SOME)
    return folder


# ---------------------------------------------------------------- the set


def test_the_default_set_catches_most_faults_and_is_small(whole: Path, loaded: list[Loaded]) -> None:
    caught = {fault.name for of in loaded for fault in of.vector.catches}
    size = sum(len(data) for data in files(whole).values())
    print(f"{len(loaded)} vectors, {size / 1e6:.2f} MB, {len(caught)} planted faults")
    assert len(loaded) == faults.MOST and size < 3e6
    assert len(caught) >= 120
    sizes = sorted((whole / of.vector.file).stat().st_size for of in loaded)
    assert sizes[-1] < 1.2 * faults.LARGEST and sizes[len(sizes) // 2] < 64 * 2**10


def test_the_default_set_has_of_everything(loaded: list[Loaded]) -> None:
    cases = [parse_case(of.vector.case) for of in loaded]
    assert {case.dtype for case in cases if case.grad == "qkv" and not case.d_lse} == set(DTYPES)
    for has in (
        lambda c: c.causal and c.backward,
        lambda c: not c.causal,
        lambda c: c.heads_q != c.heads_kv,
        lambda c: any(q != k for q, k in c.pairs),
        lambda c: c.dead_rows,
        lambda c: c.empty,
        lambda c: c.ragged and c.backward,
        lambda c: any(c.past),
        lambda c: c.scale is not None and c.scale < 0,
        lambda c: c.dim != c.dim_v,
        lambda c: c.d_lse,
        lambda c: c.exact,
    ):
        assert any(map(has, cases))


def test_a_set_begins_with_what_shows_most() -> None:
    def of(*names: str) -> list[format.Fault]:
        return [format.Fault(name, "kind", "does") for name in names]

    ids = [replace(TINY, seed=seed).id for seed in range(4)]
    large = replace(TINY, heads_q=400).id
    found = dict(
        zip((*ids, large), (of("a"), of("a", "b"), of("c"), of(), of("a", "b", "c", "d")), strict=True)
    )
    chosen = [case.id for case in faults.default_set(found, largest=100_000)]
    assert chosen == [*faults.BROAD, ids[1], ids[2]]
    assert faults.default_set(found, most=len(faults.BROAD) + 1, largest=10**7)[-1].id == large


def test_what_a_case_catches_is_told_with_the_words_of_the_catalogue(loaded: list[Loaded]) -> None:
    does = {mutant.name: mutant.does for mutant in CATALOGUE}
    found = [fault for of in loaded for fault in of.vector.catches]
    assert found and all(does[fault.name] == fault.does for fault in found)


def test_only_contiguous_memory_counts() -> None:
    for id, found in faults.catches().items():
        case = parse_case(id)
        assert case.layout in (("bshd", "sbhd") if case.ragged else ("bhsd",))
        assert not case.ragged or all(fault.kind != "strides" for fault in found)


def test_what_may_hang_on_the_call_before_counts_where_there_was_none() -> None:
    first = {
        (score.name, kill.case)
        for score in matrix.read(matrix.COMMITTED)
        for kill in score.found.values()
        if kill.cases == 1
    }
    found = {
        (fault.name, id)
        for id, caught in faults.catches().items()
        for fault in caught
        if fault.kind == "configuration and caching"
    }
    assert found and found <= first


def test_a_matrix_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match=r"none\.json: .*No such file"):
        faults.catches(tmp_path / "none.json")
    (tmp_path / "other.json").write_text("[]")
    with pytest.raises(ReportError, match=r"other\.json: .*is no kill matrix"):
        faults.catches(tmp_path / "other.json")


# ---------------------------------------------------------------- written


def test_writing_twice_gives_the_same_bytes(whole: Path, tmp_path: Path) -> None:
    vectors.write(tmp_path, faults.default_set())
    assert files(tmp_path) == files(whole)


def test_inputs_are_those_of_the_suite(loaded: list[Loaded]) -> None:
    for of in loaded:
        case = parse_case(of.vector.case)
        for name, t in vars(make_inputs(case)).items():
            if t is None:
                assert name not in of.tensors
            else:
                x = content.by_heads(case, of.tensors[name])
                assert x.dtype == t.dtype
                assert torch.equal(x.contiguous().view(torch.uint8), t.contiguous().view(torch.uint8))
        if case.lengths is not None:
            ends = of.tensors["cu_seqlens_q"].tolist(), of.tensors["cu_seqlens_k"].tolist()
            assert [tuple(np.diff(side)) for side in ends] == list(zip(*case.lengths, strict=True))


def test_budgets_are_those_of_the_oracle(loaded: list[Loaded]) -> None:
    """Those of out, lse and dv to the last bit of float32; those of dq and dk for any out that is right."""
    for of in loaded:
        case = parse_case(of.vector.case)
        arrays = {name: content.by_heads(case, t) for name, t in of.tensors.items() if name[:3] != "cu_"}
        for part, references in Prepared(case, fa2=False).parts:
            exact = references.problem.result()
            for name in of.vector.results:
                e = getattr(exact, name)
                sides = {"low": e.low[0], "high": e.high[0]}
                for field, x in {"": e.value, "bound": e.bound, "sigma": e.sigma, **sides}.items():
                    key = f"{name}.{field}" if field else name
                    given = part.of(name, arrays.get(key, arrays[name]).double().numpy())
                    if field in ("bound", "sigma"):
                        assert (given >= x).all(), (case, key)
                        if name not in judging.FROM_DELTA:
                            assert (given <= (1 + 2**-23) * x + 2.0**-149).all(), (case, key)
                        elif case.values in ("normal", "growing") and x.size:  # dS is more than delta's error
                            assert np.median(given / x) < 1.01, (case, key)
                    else:
                        assert np.array_equal(given, x)


def test_moved_by_delta_is_what_the_oracle_makes_of_a_given_output(loaded: list[Loaded]) -> None:
    """But for where dS is rounded, some of its half steps."""
    checked = 0
    for of in loaded:
        case = parse_case(of.vector.case)
        if case.ragged or "dq" not in of.vector.results:
            continue
        checked += 1
        tensors = {name: t.double().numpy() for name, t in of.tensors.items()}
        problem = Prepared(case, fa2=False).parts[0][1].problem
        out = tensors["out"] + 3 * tensors["out.sigma"] * np.sign(tensors["d_out"])
        found = judging.moved_by_delta(case, tensors.__getitem__, out)
        exact = problem.result(out)
        for name, moved in found.items():
            if name in of.vector.results:
                e = getattr(exact, name)
                low, high = ((side[1] - side[0] - moved) / e.sigma for side in (e.low, e.high))
                assert max(np.abs(low).max(), np.abs(high).max()) < 6
                assert np.sqrt(np.mean(((low + high) / 2) ** 2)) < 0.8
    assert checked >= 6


def test_the_schema_names_every_field(whole: Path) -> None:
    schema, index = (json.loads((whole / name).read_text()) for name in (SCHEMA, INDEX))
    assert schema["$schema"].endswith("2020-12/schema") and index["$schema"] == schema["$id"] == SCHEMA

    def fits(x: Any, of: dict[str, Any]) -> None:
        if "$ref" in of:
            of = schema["$defs"][of["$ref"].rpartition("/")[2]]
        if "anyOf" in of:
            of = next(o for o in of["anyOf"] if (o.get("type") == "null") == (x is None))
        match of.get("type"):
            case "object" if "properties" in of:
                assert x.keys() <= of["properties"].keys() and set(of["required"]) <= x.keys()
                assert of["additionalProperties"] is False
                for name, y in x.items():
                    fits(y, of["properties"][name])
            case "object":
                for y in x.values():
                    fits(y, of["additionalProperties"])
            case "array":
                for y in x:
                    fits(y, of["items"])
            case "string":
                assert isinstance(x, str) and re.search(of.get("pattern", ""), x)
            case "integer":
                assert isinstance(x, int) and x >= of.get("minimum", x)
            case "number":
                assert isinstance(x, int | float)
            case "boolean":
                assert isinstance(x, bool)
            case other:
                assert other == "null" and x is None

    fits(index, schema)


def test_a_case_whose_file_could_not_be_named() -> None:
    lengths = tuple((n, n + 1) for n in range(60))
    with pytest.raises(ReportError, match=r"case b60_.* has \d+ characters; its file's name may have 255"):
        content.make(Case(lengths=lengths, layout="bshd"))


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ReportError, match=r"file: File exists"):
        vectors.write(tmp_path / "file", [])


# ---------------------------------------------------------------- our kernel


def test_our_kernel_is_right_on_all_of_them(loaded: list[Loaded], ours: dict[str, judging.Made]) -> None:
    for of in loaded:
        made = ours[of.vector.case]
        for judgement in judging.judged(of, made.results, made.owed):
            assert judgement.state == "held", vectors.line(judgement)


def test_results_in_files_are_checked(
    whole: Path, ours: dict[str, judging.Made], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_results(tmp_path / "results", {case: made.results for case, made in ours.items()})
    (folder / "b1_misspelt.safetensors").write_bytes(b"")
    assert reports(["vectors", "--check", str(whole), "--results", str(folder)]) == HELD
    *lines, unused, last = capsys.readouterr().out.splitlines()
    assert len(lines) == sum(len(made.results) for made in ours.values())
    assert all(line.startswith("held      b") for line in lines)
    assert unused.startswith("not used  b1_misspelt.safetensors")
    assert re.fullmatch(r"24 of 24 cases, their tensors: \d+ held, 0 broken, 0 no power, 0 missing", last)


def test_run_runs_our_kernel(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reports(["vectors", "--check", str(small), "--run"]) == HELD
    assert "2 of 2 cases, their tensors: 10 held, 0 broken" in capsys.readouterr().out


def test_run_runs_any_implementation(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    square = Case(heads_q=2, heads_kv=2)
    with_d_lse = replace(square, d_lse=True)
    vectors.write(tmp_path, [square, with_d_lse, RAGGED])
    assert reports(["vectors", "--check", str(tmp_path), "--run", "--impl", "sdpa-math"]) == HELD
    out = capsys.readouterr().out
    assert f"held      {square.id} dk" in out and f"not claimed  {RAGGED.id}: ragged batches" in out
    # of a case with a gradient of the lse, which is not claimed, the forward is run alone
    assert f"held      {with_d_lse.id} out" in out and f"missing   {with_d_lse.id} dq" in out
    assert reports(["vectors", "--check", str(tmp_path), "--run", "--impl", "nothing:there"]) == WRONG_USE
    assert "--impl is 'nothing:there'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("does", "told"),
    [
        ("raise ValueError('no')", "out: does not raise; ValueError: no"),
        ("q.zero_(); return v", "q: input unchanged; 256 of its elements"),
        ("return v.float()", "out: a tensor of the right shape, dtype and device"),
    ],
)
def test_what_an_implementation_owes_is_judged_too(
    does: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        f"def attention(q, k, v, *, causal=False, scale=None, return_lse=False):\n    {does}\n"
    )
    case = Case(grad="none")
    vectors.write(tmp_path, [case])
    spec = f"{tmp_path / 'mine.py'}:attention"
    assert reports(["vectors", "--check", str(tmp_path), "--run", "--impl", spec]) == BROKE
    assert f"broken    {case.id} {told}" in capsys.readouterr().out
    sys.modules.pop("implementation_under_test_mine")


Change = Callable[[dict[str, Any]], None]


def last_row(x: dict[str, Any]) -> None:
    x["out"][..., -1, :] = 0


PLANTED: dict[str, tuple[str, Change]] = {
    "out times 1.01": ("out", lambda x: x.update(out=x["out"] * 1.01)),
    "out in its last row": ("out", last_row),
    "dk of the other sign": ("dk", lambda x: x.update(dk=-x["dk"])),
    "dq without scale": ("dq", lambda x: x.update(dq=x["dq"] / 0.3)),
    "dv one row on": ("dv", lambda x: x.update(dv=np.roll(x["dv"], 1, 2))),
    "lse in base 2": ("lse", lambda x: x.update(lse=x["lse"] / np.log(2))),
    "a NaN in dq": ("dq", lambda x: np.copyto(x["dq"][0, 1, 3], np.nan)),
}


@pytest.mark.parametrize("fault", PLANTED)
@pytest.mark.parametrize("case", faults.BROAD[:2], ids=["float16", "float32"])
def test_a_planted_error_is_seen_and_where(
    fault: str, case: str, loaded: list[Loaded], ours: dict[str, judging.Made]
) -> None:
    tensor, change = PLANTED[fault]
    of = next(of for of in loaded if of.vector.case == case)
    results = {name: x.copy() for name, x in ours[case].results.items()}
    change(results)
    found = {judgement.tensor: judgement for judgement in judging.judged(of, results)}
    assert found[tensor].state == "broken"
    wrong = {name for name, judgement in found.items() if judgement.failed}
    assert wrong <= ({tensor, *judging.FROM_DELTA} if tensor == "out" else {tensor})
    text = vectors.line(found[tensor])
    assert text.startswith(f"broken    {case} {tensor}: ")
    if fault == "out in its last row":
        assert re.search(r"hard bound: [\d.e+]+, at most 1 .* at \[0, [01], 16, \d+\]", text)
    if fault == "a NaN in dq":
        assert "finite where it should be: 16, at most 0 at [0, 1, 3, 0]" in text


def test_a_planted_error_of_a_ragged_batch_is_where_it_is_in_its_tensors(
    loaded: list[Loaded], ours: dict[str, judging.Made]
) -> None:
    of = next(o for o in loaded if o.vector.case.startswith("b2_h2x2_r9x11+33x31_past2x1"))
    results = {name: x.copy() for name, x in ours[of.vector.case].results.items()}
    results["dk"][0, 1, 30] *= 1.5  # row 19 of the second sequence
    results["out"][0, 0, 42] = 1.0  # past them
    found = {judgement.tensor: judgement for judgement in judging.judged(of, results)}
    assert re.search(r"at \[30, 1, \d+\]; sequence 1: 33 queries on 31 keys", vectors.line(found["dk"]))
    assert "rows past the last sequence: 0: 32, at most 0 at [42, 0, 0]" in vectors.line(found["out"])
    assert {name for name, judgement in found.items() if judgement.failed} == {"dk", "out"}


def test_without_out_the_gradients_have_their_bound_alone(
    loaded: list[Loaded], ours: dict[str, judging.Made]
) -> None:
    of = next(o for o in loaded if o.vector.case == faults.BROAD[0])
    results = {name: ours[of.vector.case].results[name] for name in ("dq", "dk", "dv")}
    found = judging.judged(of, results)
    assert [(j.tensor, j.state) for j in found] == [
        ("out", "missing"), ("lse", "missing"), ("dq", "held"), ("dk", "held"), ("dv", "held"),
    ]  # fmt: skip
    assert vectors.line(found[0]).endswith("without it dq and dk are judged by the hard bound alone")
    negated = {j.tensor: j.state for j in judging.judged(of, results | {"dk": -results["dk"]})}
    assert negated["dk"] == "broken"


# ---------------------------------------------------------------- the guide


def test_the_code_of_the_guide_judges_as_the_judge_does(
    whole: Path, loaded: list[Loaded], ours: dict[str, judging.Made]
) -> None:
    (code,) = re.findall(r"^```python\n(.*?)^```", (whole / GUIDE).read_text(), re.MULTILINE | re.DOTALL)
    assert code.count("\n") <= 60
    scope: dict[str, Any] = {}
    exec(code, scope)
    index = json.loads((whole / INDEX).read_text())
    checked = 0
    for entry, of in zip(index["vectors"], loaded, strict=True):
        if entry["options"]["ragged"]:
            continue
        checked += 1
        tensors = {name: t.double().numpy() for name, t in of.tensors.items()}
        results = ours[entry["case"]].results
        options, limits = entry["options"], entry["parts"][0]["limits"]
        with np.errstate(invalid="ignore"):  # -inf - -inf
            assert scope["check"](tensors, results, options, limits) == []
        for tensor, change in PLANTED.values():
            if tensor in results and entry["case"] in faults.BROAD[:2]:
                wrong = {name: x.copy() for name, x in results.items()}
                change(wrong)
                mine = {f"{j.tensor}: {v.rule}" for j in judging.judged(of, wrong) for v in j.failed}
                with np.errstate(invalid="ignore"):
                    found = set(scope["check"](tensors, wrong, options, limits))
                assert {line.partition(":")[0] for line in found} == {s.partition(":")[0] for s in mine}
                assert {s for s in found if "exactly" not in s} <= mine
    assert checked >= 18


# ---------------------------------------------------------------- what cannot be used


def spoilt(small: Path, **changes: Any) -> str:
    """The message of reading a folder whose index has another first vector, or other fields."""
    path = small / INDEX
    index = json.loads(path.read_text())
    for name, value in changes.items():
        where = index if name in index or name == "$schema" else index["vectors"][0]
        where[name] = value
    path.write_text(json.dumps(index))
    with pytest.raises(ReportError) as raised:
        judging.read(small)
    return str(raised.value)


def test_an_index_that_is_missing_truncated_or_foreign(tmp_path: Path, small: Path) -> None:
    with pytest.raises(ReportError, match=r"vectors\.json: No such file or directory"):
        judging.read(tmp_path / "nowhere")
    path = small / INDEX
    data = path.read_bytes()
    for broken in (data[: len(data) // 2], b"", b"\xff\xfe", b"[]", b'{"version": 1}', b'{"format": 1}'):
        path.write_bytes(broken)
        with pytest.raises(ReportError, match=r"vectors\.json: not an index of vectors \("):
            judging.read(small)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("version", 2, "version is 2; this reads version 1"),
        ("format", "other", "format is 'other'; it may be 'attention-vectors'"),
        ("$schema", "x.json", "$schema is 'x.json'; it may be 'vectors.schema.json'"),
        ("alpha", "much", "not an index of vectors (Expected `float`, got `str` - at `$.alpha`)"),
        ("vectors", None, "not an index of vectors ("),
        ("strange", 1, "not an index of vectors (Object contains unknown field `strange`"),
        ("case", "b1", "vectors[0]: case id is 'b1'; it must look like "),
        ("case", RAGGED.id, "vectors has case b2_h2x1_r5x3+2x9_past2x1"),
        ("file", "../x.safetensors", "not an index of vectors (Expected `str` matching regex"),
        ("file", "x.safetensors", "vectors[0]: file is 'x.safetensors'; it may be 'b1_h2x1_s5x7"),
        ("sha256", "0" * 64, "safetensors: sha256 is "),
        ("tensors", {}, "tensors: d_lse is missing; it must be float32 [1, 2, 5]"),
        ("results", {}, "results: dk is missing; it must be float16 [1, 1, 7, 16]"),
    ],
)
def test_an_index_with_another_field(small: Path, field: str, value: Any, message: str) -> None:
    text = spoilt(small, **{field: value})
    assert message in text and (INDEX in text or SUFFIX in text)


def test_an_index_with_other_options(small: Path) -> None:
    options = json.loads((small / INDEX).read_text())["vectors"][0]["options"]
    assert "vectors[0]: options are not those of case b1_h2x1" in spoilt(
        small, options=options | {"causal": False}
    )


def test_a_vector_that_is_missing_truncated_or_another(small: Path) -> None:
    path = small / f"{TINY.id}{SUFFIX}"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(ReportError, match=r"seed0\.safetensors: sha256 is [0-9a-f]{64}; the index has "):
        judging.read(small)
    path.unlink()
    with pytest.raises(ReportError, match=r"seed0\.safetensors: No such file or directory"):
        judging.read(small)


def with_file(small: Path, data: bytes) -> str:
    """The message of reading a folder whose first file is this, and the index knows it."""
    (small / f"{TINY.id}{SUFFIX}").write_bytes(data)
    return spoilt(small, sha256=format.sha256(data))


def test_a_vector_that_is_no_file_of_tensors(small: Path) -> None:
    data = (small / f"{TINY.id}{SUFFIX}").read_bytes()
    for broken in (b"", data[:-1], data[:100], b"\x80\x04\x95 pickled", b"\xff" * 64):
        assert f"{TINY.id}{SUFFIX}: not a safetensors file that can be read (" in with_file(small, broken)


def test_a_vector_with_other_tensors(small: Path) -> None:
    (of, _) = judging.read(small)
    tensors = dict(of.tensors)
    text = with_file(small, format.encode(tensors | {"q": tensors["q"].float()}))
    assert f"{SUFFIX}: q is float32 [1, 2, 5, 16]; it must be float16 [1, 2, 5, 16]" in text
    text = with_file(small, format.encode(tensors | {"q": tensors["q"][:, :1]}))
    assert "q is float16 [1, 1, 5, 16]; it must be float16 [1, 2, 5, 16]" in text
    text = with_file(small, format.encode(tensors | {"mask": tensors["q"].clone()}))
    assert "mask is there; it may have d_lse, d_out, dk, dk.bound, " in text
    del tensors["lse.sigma"]
    assert "lse.sigma is missing; it must be float32 [1, 2, 5]" in with_file(small, format.encode(tensors))


def test_a_case_that_is_not_there(small: Path) -> None:
    with pytest.raises(ReportError, match=r"vectors\.json: there is no case b9; it has b1_h2x1.*, b2_h2x1"):
        judging.read(small, ["b9"])
    assert [of.vector.case for of in judging.read(small, [RAGGED.id])] == [RAGGED.id]


# ---------------------------------------------------------------- results that cannot be used


def checked(small: Path, tmp_path: Path, tensors: dict[str, Tensor] | bytes) -> int:
    folder = tmp_path / "results"
    folder.mkdir(exist_ok=True)
    data = tensors if isinstance(tensors, bytes) else save(tensors)
    (folder / f"{TINY.id}{SUFFIX}").write_bytes(data)
    return reports(["vectors", "--check", str(small), "--results", str(folder)])


OUT = torch.zeros(1, 2, 5, 16)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (b"no", "not a safetensors file that can be read ("),
        ({"o": OUT}, "o is there; it may have out, lse, dq, dk, dv"),
        (
            {"out": OUT[0]},
            "out is float32 [2, 5, 16]; it must be float16 [1, 2, 5, 16], or float32 or float64",
        ),
        ({"out": OUT.int()}, "out is int32 [1, 2, 5, 16]; it must be float16 [1, 2, 5, 16]"),
        ({"out": OUT + 0.1}, "out is 0.10000000149011612 at [0, 0, 0, 0]; it must be a number of float16"),
        ({"lse": OUT[..., 0].half()}, "lse is float16 [1, 2, 5]; it must be float32 [1, 2, 5], or float64"),
    ],
    ids=["no tensors", "another name", "another shape", "another dtype", "not rounded", "an lse in 16 bit"],
)
def test_results_that_cannot_be_used(
    tensors: dict[str, Tensor] | bytes,
    message: str,
    small: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert checked(small, tmp_path, tensors) == WRONG_USE
    text = capsys.readouterr().err
    assert text.startswith("python -m reports vectors: ") and f"{TINY.id}{SUFFIX}: {message}" in text


def test_results_that_are_missing_are_told(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (of, _) = judging.read(small)
    right = of.tensors["out"].half()
    assert checked(small, tmp_path, {"out": right.double()}) == HELD
    text = capsys.readouterr().out
    assert f"held      {TINY.id} out" in text
    assert f"missing   {TINY.id} dv: there is no such tensor" in text
    assert f"missing   {RAGGED.id}: there is no {RAGGED.id}{SUFFIX}" in text
    assert checked(small, tmp_path, {"out": -right}) == BROKE
    assert f"broken    {TINY.id} out: " in capsys.readouterr().out


def test_nothing_to_check_is_no_success(small: Path, tmp_path: Path) -> None:
    folder = tmp_path / "results"
    folder.mkdir()
    assert reports(["vectors", "--check", str(small), "--results", str(folder)]) == NOTHING_CHECKED
    (folder / f"{TINY.id}{SUFFIX}").write_bytes(save({}))
    assert reports(["vectors", "--check", str(small), "--results", str(folder)]) == NOTHING_CHECKED


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--check", "x"], "--check needs either --results, a folder, or --run; neither is given"),
        (["--check", "x", "--results", "y", "--run"], "or --run; both are given"),
        (["--out", "x", "--run"], "--results and --run need --check"),
        (["--list", "--impl", "triton"], "--impl and --manifest need --run"),
        (["--out", "x", "--case", "b1"], "--case: case id is 'b1'; it must look like"),
        (["--check", "nowhere", "--run"], "nowhere/vectors.json: No such file or directory"),
    ],
)
def test_wrong_use(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert reports(["vectors", *words]) == WRONG_USE
    assert message in capsys.readouterr().err


def test_results_in_a_folder_that_is_not_there(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert reports(["vectors", "--check", str(small), "--results", str(small / "no")]) == WRONG_USE
    assert "there is no such folder" in capsys.readouterr().err


def test_list_names_the_cases(capsys: pytest.CaptureFixture[str]) -> None:
    assert reports(["vectors", "--list"]) == HELD
    *lines, last = capsys.readouterr().out.splitlines()
    assert [line.split()[-1] for line in lines] == [case.id for case in faults.default_set()]
    assert re.fullmatch(r"24 cases, \d{3} planted faults", last)


def test_edge_cases_are_written_and_read(tmp_path: Path) -> None:
    """No batch, no key, no query, no sequence; values that are not judged."""
    cases = [
        replace(TINY, batch=0),
        replace(TINY, len_k=0),
        replace(TINY, len_q=0),
        replace(RAGGED, lengths=(), past=(2, 3)),
        replace(TINY, values="very-negative", scale=1.0, dim=64, dim_v=64),
        replace(TINY, layout="expanded", heads_kv=2, dtype="bfloat16"),
    ]
    vectors.write(tmp_path, cases)
    found = judging.read(tmp_path)
    session = judging.session_of(None, None)
    for of, made in judging.run(found, session):
        states = {j.tensor: j.state for j in judging.judged(of, made.results, made.owed)}
        assert set(states.values()) <= {"held", "no power"}, (of.vector.case, states)
