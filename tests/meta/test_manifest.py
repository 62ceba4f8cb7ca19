"""Manifests: what each key claims, what is refused in which words, and real runs with one."""

from __future__ import annotations

import re
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from reference.budget import Rounding
from reports import records
from tests import backends
from tests.cases import DTYPES, Case
from tests.edges import edges
from tests.implementations import Claims, Implementation, ImplementationError, foreign_kernels, load
from tests.manifest import KEYS, ManifestError, claims_of, main, read
from tests.meta.test_command_line import ROOT, suite
from tests.session import BROKE, HELD, NOTHING_EXECUTED, WRONG_USE, interpreted
from tests.strategies import cases, dims_of, shard_of

MINE = '''
import torch
from torch.nn.functional import scaled_dot_product_attention
from torch.nn.attention import SDPBackend, sdpa_kernel

def native(q, k, v, *, causal, scale, return_lse):
    return like_torch(q, k, v, is_causal=causal, scale=scale)

def ragged(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *, causal, scale, return_lse):
    """Ragged."""

def like_torch(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    with sdpa_kernel(SDPBackend.MATH):
        return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scale, enable_gqa=enable_gqa)

def without_gqa(q, k, v, is_causal=False, scale=None):
    return like_torch(q, k[:, : q.shape[1]], v[:, : q.shape[1]], is_causal=is_causal, scale=scale)

def like_flash_attn(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, return_attn_probs=False):
    assert q.is_contiguous() and k.is_contiguous() and v.is_contiguous()
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    s = (q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale) * q.float() @ k.float().mT
    if causal:
        later = torch.ones(s.shape[-2:], dtype=torch.bool).triu(1 + s.shape[-1] - s.shape[-2])
        s = s.masked_fill(later, float("-inf"))
    out = (s.softmax(-1) @ v.float()).to(q.dtype).transpose(1, 2)
    return (out, s.logsumexp(-1) / 0.6931471805599453, None) if return_attn_probs else out

def of_nobody(q, k, v, sm_scale):
    return q

number = 7
'''


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with functions of each convention; the user stands elsewhere."""
    monkeypatch.setattr(sys, "path", [*sys.path])
    loaded = [name for name in sys.modules if name.startswith("implementation_under_test_")]
    for name in dict.fromkeys([*loaded, *foreign_kernels()]):  # other tests'; a process has one otherwise
        monkeypatch.delitem(sys.modules, name)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def written(folder: Path, text: str) -> str:
    path = folder / "m.toml"
    path.write_text(text)
    return str(path)


def refused(folder: Path, text: str, spec: str | None = None) -> str:
    given = written(folder, text)
    with pytest.raises(ImplementationError) as error:
        load(spec, given)
    beginning = f"--manifest is {given!r}"
    assert str(error.value).startswith(beginning)
    return str(error.value).removeprefix(beginning)


# ---------------------------------------------------------------- what a manifest claims

IMPL = 'impl = "mine.py:native"\n'


def claims_by(text: str, folder: Path) -> Claims:
    return load(None, written(folder, IMPL + text)).claims


NONE: dict[str, Any] = {}
CLAIMED: list[tuple[str, dict[str, Any]]] = [
    ("", NONE),
    ('name = "mine"', NONE),
    ('dtypes = ["bfloat16"]', {"dtypes": ("bfloat16",)}),
    ('devices = ["cuda"]', {"devices": ("cuda",)}),
    ("head_dims = [64, 128]", {"smallest_dim": 64, "largest_dim": 128, "dims": (64, 128)}),
    ("head_dims = {min = 32}", {"smallest_dim": 32}),
    ("head_dims = {max = 512, multiple = 8}", {"largest_dim": 512, "dims_multiple_of": 8}),
    ("unequal_dims = true", {"equal_dims": False}),
    ('masks = ["causal"]', {"masks": ("causal",)}),
    ('causal_alignment = "top-left"', {"causal_alignment": "top-left"}),
    ('scales = "positive"', {"positive_scale": True}),
    ('scales = "default"', {"default_scale": True}),
    ("largest_scale = 100", {"largest_scale": 100}),
    ("gqa = true", {"gqa": True}),
    ("cross_lengths = true", {"cross_lengths": True}),
    ("cross_lengths = true\ndead_rows = true", {"cross_lengths": True, "dead_rows": True}),
    ("fewest_keys = 2", {"fewest_keys": 2}),
    ("empty = true", {"empty": True}),
    ('contiguous = "sbhd"', {"contiguous": "sbhd"}),
    ("strided = true", {"strided": True}),
    ('lse = "natural"', {"lse": True}),
    ('lse = "base2"', {"lse": True}),
    ("backward = true", {"backward": True}),
    ('lse = "base2"\nbackward = true\nlse_grad = true', {"lse": True, "backward": True, "lse_grad": True}),
    ("deterministic = true", {"deterministic": True}),
    (
        "backward = true\ndeterministic = true\ndeterministic_backward = true",
        {"backward": True, "deterministic": True, "deterministic_backward": True},
    ),
    ("deterministic = true\nbatch_invariant = true", {"deterministic": True, "batch_invariant": True}),
    ("tile = [128, 32]", NONE),
    ("l_from_rounded_p = true", {"rounding": Rounding(l_from_rounded_p=True)}),
    (
        "backward = true\np_rounded_before_ds = true",
        {"backward": True, "rounding": Rounding(p_rounded_before_ds=True)},
    ),
    (
        "backward = true\ngqa = true\nheads_rounded_before_group_sum = true",
        {"backward": True, "gqa": True, "rounding": Rounding(heads_rounded_before_group_sum=True)},
    ),
    ('products = "tf32"', {"rounding": Rounding(products="tf32")}),
    ('convention = "native"', NONE),
    ('varlen = "mine.py:ragged"', {"ragged": True, "past_rows": False}),
    ('varlen = "mine.py:ragged"\npast_rows = true', {"ragged": True}),
]


@pytest.mark.parametrize(("text", "claims"), CLAIMED, ids=[text or "nothing" for text, _ in CLAIMED])
def test_each_key_claims_what_it_says_and_nothing_else(
    text: str, claims: dict[str, Any], folder: Path
) -> None:
    assert claims_by(text, folder) == replace(Claims(), **claims)


def test_each_key_has_a_test_of_what_it_claims() -> None:
    named = {name for text, _ in CLAIMED for name in tomllib.loads(text)}
    assert named | {"impl"} == KEYS.keys()


@pytest.mark.parametrize(
    ("convention", "function", "alignment", "contiguous", "is_ragged"),
    [
        ("sdpa", "like_torch", "top-left", "bhsd", False),
        ("flash_attn", "like_flash_attn", "bottom-right", "bshd", False),
        ("flash_attn_varlen", "ragged", "bottom-right", "bshd", True),
    ],
)
def test_a_convention_has_an_alignment_and_a_layout_of_its_own(
    convention: str, function: str, alignment: str, contiguous: str, is_ragged: bool, folder: Path
) -> None:
    text = f'impl = "mine.py:{function}"\nconvention = "{convention}"\n'
    found = load(None, written(folder, text))
    assert (found.claims.causal_alignment, found.claims.contiguous) == (alignment, contiguous)
    assert found.claims.ragged == is_ragged == (found.varlen is not None)
    again = load(None, written(folder, text + 'causal_alignment = "top-left"\ncontiguous = "bhsd"\n'))
    assert (again.claims.causal_alignment, again.claims.contiguous) == ("top-left", "bhsd")


# ---------------------------------------------------------------- what is refused

WRONG = {
    "impl": ['""', "7", '["mine.py:native"]'],
    "name": ['""', '"  "', "true"],
    "convention": ['"torch"', '"SDPA"', "true", '["sdpa"]'],
    "varlen": ['""', "false"],
    "devices": ["[]", '"cpu"', '["cpu", "cpu"]', '["gpu"]', "[0]", '["cuda:0"]'],
    "dtypes": ["[]", '"float16"', '["float16", "float16"]', '["fp16"]', '["float61"]', "[16]"],
    "head_dims": [
        "[]", "64", "[64, 64]", "[0]", "[64.0]", "[true]", "[5000]", "{least = 3}", "{min = 0}",
        "{min = 64, max = 32}", "{min = 33, max = 39, multiple = 8}", "{max = true}", "{max = 5000}",
    ],
    "unequal_dims": ["1", '"true"'],
    "masks": ["[]", '"full"', '["none"]'],
    "causal_alignment": ['"bottom_right"', '"none"', "false"],
    "scales": ['"all"', "1", "true"],
    "largest_scale": ["0.5", "0", "-1", "inf", "nan", "true", '"1"', "1e39"],
    "gqa": ["1", '"yes"'],
    "cross_lengths": ["1"],
    "fewest_keys": ["0", "65", "true", "2.0", '"2"'],
    "dead_rows": ["1"],
    "empty": ["1"],
    "contiguous": ['"bhds"', '"strided"', "true"],
    "strided": ["1"],
    "past_rows": ["1"],
    "lse": ['"log2"', "true", "false", "2"],
    "backward": ["1"],
    "lse_grad": ["1"],
    "deterministic": ["1"],
    "deterministic_backward": ["1"],
    "batch_invariant": ["1"],
    "tile": ["64", "[64]", "[64, 64, 64]", "[7, 64]", "[64, 2000]", "[64, true]", "[64.0, 64.0]"],
    "p_rounded_before_ds": ["1"],
    "l_from_rounded_p": ["1"],
    "heads_rounded_before_group_sum": ["1"],
    "products": ['"TF32"', "true"],
}  # fmt: skip


@pytest.mark.parametrize("key", KEYS)
def test_a_wrong_value_is_refused_with_what_it_was_and_may_be(key: str, folder: Path) -> None:
    assert WRONG[key]
    for value in WRONG[key]:
        message = refused(folder, f"{key} = {value}\n")
        assert re.match(rf": {key} is .+; it may be ", message), message
        assert KEYS[key].kind.may_be in message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpa = true", ": there is no key 'gpa' (did you mean 'gqa'?); there are impl, name, "),
        ("Backward = true", ": there is no key 'Backward' (did you mean 'backward'?); there are impl"),
        ("dtype = ['float16']", ": there is no key 'dtype' (did you mean 'dtypes'?)"),
        ("[rounding]\nproducts = 'tf32'", ": there is no key 'rounding'; there are impl"),
        (
            "dtypes = ['float16', 'float61']",
            ': dtypes is ["float16", "float61"]; it may be a list of at least one of \'float16\','
            " 'bfloat16', 'float32' (did you mean 'float16'?)",
        ),
        ("convention = 'flash-attn'", "'flash_attn' or 'flash_attn_varlen' (did you mean 'flash_attn'?)"),
        ("products = 'TF32'", "(did you mean 'tf32'?)"),
        ("head_dims = {min = 64, max = 32}", ": head_dims is {min = 64, max = 32}; it may be a list of"),
        ("gqa = yes", ": it is not TOML: Invalid value"),
        ("gqa = true\ngqa = false", ": it is not TOML: Cannot overwrite a value"),
    ],
)
def test_a_refusal_says_what_was_probably_meant(text: str, message: str, folder: Path) -> None:
    assert message in refused(folder, text)


def test_a_file_that_cannot_be_read_is_refused(folder: Path) -> None:
    for file, why in (("none.toml", "No such file or directory"), (str(folder), "Is a directory")):
        with pytest.raises(ManifestError, match=f"^--manifest is {file!r}: it cannot be read: {why}$"):
            load(None, file)
    (folder / "m.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ManifestError, match="it is not TOML: 'utf-8' codec"):
        load(None, str(folder / "m.toml"))


CONTRADICTIONS = {
    "lse = 'natural'\nlse_grad = true": "lse_grad is true, and backward is false",
    "backward = true\nlse_grad = true": "lse_grad is true, and lse is 'none'",
    "deterministic_backward = true": "deterministic_backward is true, and backward is false",
    "backward = true\ndeterministic_backward = true": (
        "deterministic_backward is true, and deterministic is false: gradients follow from out"
    ),
    "batch_invariant = true": "batch_invariant is true, and deterministic is false",
    "convention = 'sdpa'\nlse = 'natural'": "lse is 'natural', and convention is 'sdpa', which returns none",
    "convention = 'sdpa'\nvarlen = 'a.py:f'": (
        "varlen is 'a.py:f', and convention is 'sdpa'; it may be 'native' or 'flash_attn'"
    ),
    "convention = 'flash_attn_varlen'\nvarlen = 'a.py:f'": (
        "varlen is 'a.py:f', and convention is 'flash_attn_varlen'; it may be 'native' or 'flash_attn'"
    ),
    "past_rows = true": "past_rows is true, and there is no function for ragged batches (varlen)",
    "dead_rows = true": "dead_rows is true, and cross_lengths is false",
    "masks = ['full']\ncausal_alignment = 'top-left'": (
        "causal_alignment is 'top-left', and masks has no 'causal'"
    ),
    "scales = 'default'\nlargest_scale = 2": "largest_scale is 2, and scales is 'default'",
    "p_rounded_before_ds = true": "p_rounded_before_ds is true, and backward is false",
    "heads_rounded_before_group_sum = true\nbackward = true": (
        "heads_rounded_before_group_sum is true, and gqa or backward is false"
    ),
    "products = 'tf32'\ndtypes = ['float16']": "products is 'tf32', and dtypes has no 'float32'",
    "unequal_dims = true\nhead_dims = [64]": "unequal_dims is true, and head_dims has only one",
}


@pytest.mark.parametrize("text", CONTRADICTIONS)
def test_claims_that_contradict_each_other_are_refused(text: str, folder: Path) -> None:
    assert refused(folder, text).startswith(f": {CONTRADICTIONS[text]}")


# ---------------------------------------------------------------- what it is about


def test_what_it_names_is_looked_up_from_its_own_folder(folder: Path) -> None:
    text = 'impl = "mine.py:native"\nvarlen = "./mine.py:ragged"\nname = "my own"\ntile = [128, 32]\n'
    given = written(folder, text)
    found = load(None, given)
    assert found.function.__module__ == found.varlen.__module__
    assert (found.name, found.tile, found.manifest) == ("my own", (128, 32), given)
    assert found.options == ("--manifest", given)
    of_module = load(None, written(folder, 'impl = "mine:native"'))
    assert of_module.name == "mine:native"


def test_the_command_line_counts_where_both_name_a_function(folder: Path) -> None:
    given = written(folder, 'impl = "nothing.py:at_all"\n')
    found = load("../mine.py:native", given)
    assert found.name == "../mine.py:native"
    assert found.options == ("--impl", "../mine.py:native", "--manifest", given)


def test_something_must_name_a_function(folder: Path) -> None:
    message = ": it has no key impl, and there is no --impl; one of them must say what is tested"
    assert refused(folder, "gqa = true") == message


@pytest.mark.parametrize("name", ["triton", *backends.NAMES])
def test_what_has_a_name_has_claims_of_its_own(name: str, folder: Path) -> None:
    assert f", and --impl is {name!r}, which has claims of its own" in refused(folder, "gqa = true", name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('impl = "none.py:f"', ": impl is 'none.py:f': there is no file {folder}/none.py"),
        ('impl = "mine.py:number"', ": impl is 'mine.py:number': 'number' is a int; it must be a callable"),
        ('impl = "mine"', ": impl is 'mine'; it may be 'module:callable' or 'path/file.py:callable'"),
        (IMPL + 'varlen = "mine.py:f"', ": varlen is 'mine.py:f': 'f' is not there; it must be a callable"),
        (
            'impl = "mine.py:like_torch"',
            ": convention is 'native', and what impl names does not take causal, return_lse",
        ),
        (
            IMPL + 'varlen = "mine.py:like_torch"',
            ": convention is 'native', and what varlen names does not take causal, return_lse",
        ),
        (
            'convention = "flash_attn"\nimpl = "mine.py:like_flash_attn"\nvarlen = "mine.py:like_flash_attn"',
            ": convention is 'flash_attn', and what varlen names does not take cu_seqlens_q, cu_seqlens_k",
        ),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_by_its_key(text: str, message: str, folder: Path) -> None:
    assert refused(folder, text).startswith(message.format(folder=folder))


def test_without_a_manifest_a_foreign_signature_is_refused_with_what_helps(folder: Path) -> None:
    with pytest.raises(ImplementationError) as error:
        load("../mine.py:like_torch")
    assert str(error.value) == (
        "--impl is '../mine.py:like_torch': it does not take causal, return_lse, and looks like the"
        " convention 'sdpa'. A manifest says how it is called: python -m tests.implementations --init"
        " ../mine.py:like_torch"
    )


@pytest.mark.skipif(not interpreted(), reason="Triton compiles here")
def test_bfloat16_is_not_claimed_of_a_triton_kernel_that_is_interpreted(folder: Path) -> None:
    dtypes = 'dtypes = ["bfloat16", "float32"]\n'
    assert load(None, written(folder, IMPL + dtypes)).claims.dtypes == ("bfloat16", "float32")
    kernel = "import triton\n\n@triton.jit\ndef kernel(x):\n    pass\n\nfrom mine import native\n"
    (folder / "of_triton.py").write_text(kernel)
    found = load(None, written(folder, 'impl = "of_triton.py:native"\n' + dtypes))
    sys.modules.pop("implementation_under_test_of_triton")
    assert found.claims.dtypes == ("float32",)
    assert found.untested().endswith(
        "; bfloat16 is claimed, and wrong in Triton's interpreter: it needs a GPU"
    )


# ---------------------------------------------------------------- which cases follow from it


def test_listed_head_dimensions_are_all_tested_and_no_others() -> None:
    def found(interpreted: bool, **claimed: Any) -> list[tuple[int, int]]:
        return dims_of(Claims(**claimed), interpreted)

    for small in (False, True):
        assert found(small, dims=(64, 128)) == [(64, 64), (128, 128)]
        assert found(small, dims=(512,), smallest_dim=512, largest_dim=512) == [(512, 512)]
        assert found(small, dims=(64, 96), equal_dims=False) == [(64, 64), (96, 96), (64, 96), (96, 64)]
        assert found(small, smallest_dim=100, largest_dim=127) == [(100, 100), (127, 127)]
        assert found(small, smallest_dim=97, largest_dim=111, dims_multiple_of=8) == [(104, 104)]
        assert found(small, smallest_dim=8, largest_dim=320)[-2:] == [(8, 8), (320, 320)]
    assert found(False, dims_multiple_of=32, largest_dim=100) == [(64, 64), (32, 32), (96, 96)]


values = st.fixed_dictionaries({
    "dtypes": st.sets(st.sampled_from(DTYPES), min_size=1).map(sorted),
    "masks": st.sampled_from([["full"], ["causal"], ["full", "causal"]]),
    "head_dims": st.one_of(
        st.sets(st.integers(1, 130), min_size=1, max_size=3).map(sorted),
        st.tuples(st.integers(1, 70), st.integers(70, 300), st.sampled_from([1, 2, 8, 16])).map(
            lambda parts: dict(zip(("min", "max", "multiple"), parts, strict=True))
        ).filter(KEYS["head_dims"].kind.holds),
    ),
    "scales": st.sampled_from(["any", "positive", "default"]),
    "largest_scale": st.sampled_from([None, 1, 50.0]),
    "causal_alignment": st.sampled_from([None, "top-left"]),
    "contiguous": st.sampled_from([None, "bshd", "sbhd"]),
    "varlen": st.sampled_from([None, "mine.py:ragged"]),
    "lse": st.sampled_from(["none", "natural"]),
    "fewest_keys": st.sampled_from([1, 2, 40]),
    **{name: st.booleans() for name, key in KEYS.items() if isinstance(key.default, bool)},
})  # fmt: skip


@settings(deadline=None, derandomize=True, database=None, max_examples=200)
@given(st.data(), values, st.integers(0, 99), st.booleans())
def test_whatever_is_claimed_no_case_is_generated_that_is_not(
    data: st.DataObject, drawn: dict[str, Any], shard: int, interpreted: bool
) -> None:
    v = {name: drawn.get(name, key.default) for name, key in KEYS.items()}
    claims = claims_of(v)
    dtype, dims = shard_of(shard, claims, interpreted)
    case = data.draw(cases(claims, dtype, dims, (32, 32), 9000))
    assert claims.refusal(case) == ""
    assert claims.narrowed(case) == case == claims.nearest(case)


def test_most_edges_of_square_float16_are_tested_without_a_manifest() -> None:
    claims, listed = Claims(), edges((64, 64), True)
    taken = {claims.narrowed(claims.nearest(case, of_any=True)) for case in listed if not case.ragged}
    refused = [case for case in taken if claims.refusal(case)]
    assert len(refused) < len(taken) / 2
    assert len(taken) - len(refused) > 80


@pytest.mark.parametrize(
    ("claimed", "changes"),
    [
        ({}, {"heads_kv": 4, "len_q": 70, "dim_v": 32}),
        ({"dtypes": ("bfloat16",)}, {"dtype": "bfloat16", "heads_kv": 4, "len_q": 70, "dim_v": 32}),
        ({"dims": (64, 128)}, {"dim": 64, "dim_v": 64, "heads_kv": 4, "len_q": 70}),
        ({"masks": ("causal",)}, {"causal": True, "heads_kv": 4, "len_q": 70, "dim_v": 32}),
        (
            {"gqa": True, "cross_lengths": True, "dims_multiple_of": 24, "equal_dims": False},
            {"dim": 24, "dim_v": 48},
        ),
    ],
)
def test_an_edge_becomes_the_nearest_one_that_is_claimed(claimed: Any, changes: dict[str, Any]) -> None:
    edge = Case(heads_q=4, heads_kv=2, len_q=33, len_k=70, dim=32, dim_v=40, grad="none")
    assert Claims(**claimed).nearest(edge, of_any=True) == replace(edge, **changes)


def test_what_a_recipe_is_about_is_not_changed() -> None:
    recipe = Case(heads_q=4, heads_kv=2, len_q=33, len_k=70, dim=16, dim_v=72, dtype="bfloat16", grad="none")
    claims = Claims(dims=(64, 128), smallest_dim=64, largest_dim=128)
    assert claims.nearest(recipe) == replace(recipe, dtype="float16", dim=64)


# ---------------------------------------------------------------- --init


def initialised(folder: Path, *arguments: str) -> Path:
    assert main(["--init", *arguments, "--out", str(folder / "new.toml")]) == HELD
    return folder / "new.toml"


def test_what_init_writes_claims_what_is_assumed_anyway(folder: Path) -> None:
    path = initialised(folder, "../mine.py:native")
    found, without = load(None, str(path)), load("../mine.py:native")
    assert found.claims == without.claims == Claims()
    assert found.tile == Implementation("", lambda: None, Claims(), str).tile
    assert found.function.__name__ == "native"
    assert tomllib.loads(path.read_text())["impl"] == "mine.py:native"  # from the manifest's folder


def test_what_init_writes_has_every_key_with_what_it_may_be(folder: Path) -> None:
    text = initialised(folder, "../mine.py:native").read_text()
    for name, key in KEYS.items():
        assert re.search(
            rf"^# .*It may be {re.escape(key.kind.may_be)}\.\n(# )?{name} = ", text, re.MULTILINE
        )
    uncommented = re.sub(rf"^# (?=({'|'.join(KEYS)}) = )", "", text, flags=re.MULTILINE)
    assert tomllib.loads(uncommented).keys() == KEYS.keys()
    for name, value in tomllib.loads(uncommented).items():
        assert KEYS[name].kind.holds(value), name


@pytest.mark.parametrize(
    ("function", "convention", "why"),
    [
        ("native", "native", "guessed from the signature"),
        ("like_torch", "sdpa", "guessed from the signature"),
        ("like_flash_attn", "flash_attn", "guessed from the signature"),
        ("ragged", "flash_attn_varlen", "guessed from the signature"),
        ("of_nobody", "native", "the signature looks like none: see README.md"),
    ],
)
def test_the_convention_is_guessed_and_the_file_says_so(
    function: str, convention: str, why: str, folder: Path
) -> None:
    path = initialised(folder, f"../mine.py:{function}")
    assert read(path)["convention"] == convention
    assert f"# How it is called ({why}). It may be" in path.read_text()


def test_the_convention_may_be_given(folder: Path) -> None:
    path = initialised(folder, "../mine.py:native", "--convention", "flash_attn")
    assert read(path)["convention"] == "flash_attn"
    assert "(as given to --convention)" in path.read_text()


def test_init_names_the_file_by_what_it_is_about_and_overwrites_none(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    assert main(["--init", "mine.py:native"]) == HELD
    before = (folder / "mine.toml").read_text()
    assert capsys.readouterr().out.startswith("mine.toml is written")
    assert main(["--init", "mine.py:like_torch"]) == WRONG_USE
    assert "--out is 'mine.toml', which is there already; name another file" in capsys.readouterr().err
    assert (folder / "mine.toml").read_text() == before
    assert main(["--init", "mine:native", "--out", "none/m.toml"]) == WRONG_USE
    assert "--out is 'none/m.toml': it cannot be written: No such file" in capsys.readouterr().err
    assert main(["--init", "mine.py:nothing"]) == WRONG_USE
    assert "--init is 'mine.py:nothing': 'nothing' is not there" in capsys.readouterr().err
    with pytest.raises(SystemExit) as misused:
        main(["--convention", "sdpa"])
    assert misused.value.code == WRONG_USE


def test_without_arguments_the_names_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == HELD
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed[:-1]] == list(backends.BUILT_IN)
    assert re.fullmatch("triton +can run here", listed[0])


# ---------------------------------------------------------------- what is not claimed


def test_what_is_not_claimed_is_said_with_what_helps(folder: Path) -> None:
    assert load("triton").claims.unclaimed() == [] and load("triton").untested() == ""
    text = load("../mine.py:native").untested()
    assert text.startswith(
        "not claimed, hence not tested: bfloat16, gradients, the lse, several query heads a KV head, "
    )
    assert text.endswith("; a manifest claims more: python -m tests.implementations --init ../mine.py:native")
    given = written(folder, IMPL)
    assert load(None, given).untested().endswith(f"; {given} may claim more")


@pytest.mark.parametrize(
    ("claimed", "left"),
    [
        ({"dtypes": ("bfloat16",)}, ["float16", "float32"]),
        ({"devices": ("cpu",)}, ["a GPU"]),
        ({"masks": ("full",)}, ["causal masks"]),
        ({"dims": (64, 128)}, ["head dimensions other than 64, 128"]),
        ({"largest_dim": 128}, ["head dimensions beyond 16 to 128"]),
        ({"dims_multiple_of": 8}, ["head dimensions not multiples of 8"]),
        ({"default_scale": True}, ["scales other than the default"]),
        ({"positive_scale": True}, ["a scale of 0 or less"]),
        (
            {"cross_lengths": True, "causal_alignment": "top-left"},
            ["Sq != Sk under a causal mask aligned at the bottom right"],
        ),
        ({"ragged": True, "past_rows": False}, ["rows past the last sequence"]),
        ({"backward": True}, ["the same bits of gradients in every run"]),
        ({"backward": True, "lse": True}, ["gradients through the lse"]),
    ],
)
def test_each_thing_not_claimed_has_words(claimed: dict[str, Any], left: list[str]) -> None:
    assert set(left) <= set(Claims(**claimed).unclaimed()) - set(Claims().unclaimed())


# ---------------------------------------------------------------- real runs

GENERATED = ["--examples", "20", "-k", "generated"]


def test_a_function_like_sdpa_holds_what_it_claims(folder: Path) -> None:
    given = written(
        folder,
        'impl = "mine.py:like_torch"\nconvention = "sdpa"\nname = "torch, spelt out"\ngqa = true\n'
        "cross_lengths = true\nbackward = true\nhead_dims = [24, 32]\n",
    )
    run = suite(folder / "reports", "--manifest", given, "--examples", "40", "-k", "generated")
    assert run.status == HELD, run.output
    found = records.read(folder / "reports" / "records.jsonl")
    held = [record for record in found if record.status == "held"]
    assert {record.implementation for record in found} == {"torch, spelt out"}
    assert {record.dtype for record in held} == {"float16", "float32"}
    assert all("_d24x24_" in record.case or "_d32x32_" in record.case for record in held)
    assert sum(record.backward for record in held) > len(held) / 2
    assert not [r for r in found if r.origin == "generated" and r.status == "not claimed"]
    assert f"attention: implementation torch, spelt out (claims: {given})" in run.output
    assert run.line("not claimed, hence not tested: ").endswith(f"; {given} may claim more")


def test_a_function_like_flash_attn_holds_what_it_claims(folder: Path) -> None:
    """In two processes, each of which reads the manifest."""
    given = written(
        folder,
        'convention = "flash_attn"\ncross_lengths = true\nlse = "base2"\nbackward = true\nlse_grad = true\n',
    )
    spec = f"{folder / 'mine.py'}:like_flash_attn"
    run = suite(folder / "reports", "--impl", spec, "--manifest", given, *GENERATED, "-n", "2")
    assert run.status == HELD, run.output
    found = records.read(folder / "reports" / "records.jsonl")
    assert len(found) == 20 and {record.status for record in found} == {"held"}
    assert {"out", "lse", "dq", "dk", "dv"} == {name for record in found for name in record.tensors}
    assert all("_bshd_" in record.case for record in found)


def test_a_claim_that_is_false_is_red_and_the_replay_has_the_manifest(folder: Path) -> None:
    """It takes several query heads a KV head as if they were one."""
    given = written(folder, 'impl = "mine.py:without_gqa"\nconvention = "sdpa"\ngqa = true\n')
    run = suite(folder / "reports", "--manifest", given, *GENERATED)
    assert run.status == BROKE, run.output
    (record,) = (r for r in records.read(folder / "reports" / "records.jsonl") if r.status == "broken")
    assert " query heads on " in record.words
    assert f" --manifest {given} --case {record.case}" in record.replay
    asked = record.case.replace("_grad=none_", "_grad=q_")
    again = suite(folder / "again", "--manifest", given, "--case", asked)
    assert again.status == BROKE, again.output
    assert f"without the gradients that are not claimed: {asked}\n  ran as {record.case}\n" in again.output


def test_status_2_if_the_manifest_is_wrong(folder: Path) -> None:
    given = written(folder, 'impl = "mine.py:like_torch"\nconvention = "sdpa"\ngpa = true\n')
    run = suite(folder / "reports", "--manifest", given)
    assert run.status == WRONG_USE, run.output
    assert run.output.startswith(
        f"Exit: --manifest is {given!r}: there is no key 'gpa' (did you mean 'gqa'?)"
    )
    assert len(run.output.strip().splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_status_3_if_it_claims_a_gpu_only_and_there_is_none(folder: Path) -> None:
    given = written(folder, 'impl = "mine.py:native"\ndevices = ["cuda"]\nname = "mine"\n')
    run = suite(folder / "reports", "--manifest", given)
    assert run.status == NOTHING_EXECUTED, run.output
    assert run.output.startswith("Exit: mine claims to run on a GPU only, and there is none")


# ---------------------------------------------------------------- the example of the README


def test_the_example_holds_what_it_claims(tmp_path: Path) -> None:
    given = "tests/example/manifest.toml"
    run = suite(tmp_path, "--manifest", given, "--examples", "40", "-k", "generated")
    assert run.status == HELD, run.output
    (executed,) = re.findall(r"comparisons executed: (\d+), of which with a backward: (\d+)", run.output)
    assert int(executed[0]) == 40 and int(executed[1]) > 20
    assert {record.dtype for record in records.read(tmp_path / "records.jsonl")} == {"float16", "bfloat16"}


def test_the_readme_shows_the_example_as_it_is() -> None:
    readme = (ROOT / "README.md").read_text()
    example = ROOT / "tests" / "example"
    code = (example / "adapter.py").read_text().partition('"""\n\n')[2]
    assert f"```python\n{code}```" in readme
    assert f"```toml\n{(example / 'manifest.toml').read_text().partition(chr(10))[2]}```" in readme
