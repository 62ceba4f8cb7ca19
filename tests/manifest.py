"""Manifests: what an implementation claims, in a TOML file beside it.

    python -m tests.implementations --init my/kernel.py:attention

writes one with every key, its default and what it may be; `KEYS` has them all. What is left out has its
default, which is what is assumed of an implementation that has no manifest.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from reference.budget import PRODUCTS, Rounding

from . import conventions
from .cases import DTYPES
from .conventions import ALIGNMENT, CONVENTIONS, LAYOUT
from .implementations import (
    MASKS,
    NO_BFLOAT16,
    OWN,
    Claims,
    Implementation,
    ImplementationError,
    bfloat16_is_wrong_here,
    callable_of,
    foreign_path,
)

HELD, WRONG_USE = 0, 2  # of the exit statuses of `session`

DEVICES = ("cpu", "cuda")
LAYOUTS = ("bhsd", "bshd", "sbhd")
"""In which a dense batch may be contiguous: their dimensions, the outermost first."""

LARGEST_DIM, LARGEST_TILE, FEWEST_KEYS = 4096, 1024, 64


class ManifestError(ImplementationError):
    """A manifest that cannot be used: the file, the key, what it was, what it may be."""


# ---------------------------------------------------------------- what a key may be


@dataclass(frozen=True)
class Kind:
    """What values a key may have.

    Attributes:
        may_be: in words, behind "it may be".
        holds: whether a value is one.
        words: the strings that it may be or hold, for a hint at what was meant.
    """

    may_be: str
    holds: Callable[[Any], bool]
    words: tuple[str, ...] = ()


def _is_whole(x: Any, least: int, most: int) -> bool:
    return type(x) is int and least <= x <= most


def _is_dims(x: Any) -> bool:
    if isinstance(x, list):
        return bool(x) and all(_is_whole(n, 1, LARGEST_DIM) for n in x) and len(set(x)) == len(x)
    return (
        isinstance(x, dict)
        and x.keys() <= RANGE.keys()
        and all(_is_whole(n, 1, LARGEST_DIM) for n in x.values())
        and bool(_range(x))
    )


def _is_tile(x: Any) -> bool:
    return isinstance(x, list) and len(x) == 2 and all(_is_whole(n, 8, LARGEST_TILE) for n in x)


def _is_scale(x: Any) -> bool:
    return type(x) in (int, float) and 1 <= x <= Claims().largest_scale


def _either(words: Sequence[str]) -> str:
    return ", ".join(map(repr, words[:-1])) + f" or {words[-1]!r}"


def one_of(*words: str) -> Kind:
    return Kind(_either(words), lambda x: x in words, words)


def some_of(*words: str) -> Kind:
    def holds(x: Any) -> bool:
        return isinstance(x, list) and bool(x) and all(w in words for w in x) and len(set(x)) == len(x)

    return Kind(f"a list of at least one of {', '.join(map(repr, words))}", holds, words)


TEXT = Kind("a text", lambda x: isinstance(x, str) and bool(x.strip()))
FUNCTION = Kind("'module:callable' or 'path/file.py:callable'", TEXT.holds)
SWITCH = Kind("true or false", lambda x: isinstance(x, bool))
DIMS = Kind(
    "a list of different whole numbers, or {min = 16, max = 256, multiple = 1} or some of these, with a"
    f" number between that is a multiple; from 1 to {LARGEST_DIM}",
    _is_dims,
)
KEYS_OF_A_CALL = Kind(f"a whole number from 1 to {FEWEST_KEYS}", lambda x: _is_whole(x, 1, FEWEST_KEYS))
TILE = Kind(f"two whole numbers from 8 to {LARGEST_TILE}, of queries and of keys", _is_tile)
SCALE = Kind(f"a number from 1 to {Claims().largest_scale:.8g}", _is_scale)

RANGE = {"min": Claims().smallest_dim, "max": Claims().largest_dim, "multiple": Claims().dims_multiple_of}
"""The parts of a range of head dimensions, and what they are where they are left out."""


@dataclass(frozen=True)
class Key:
    """A key of a manifest.

    Attributes:
        default: None if it follows from others.
        kind: what it may be.
        meaning: for a reader of the file.
        example: in a file that does not set it; of keys whose default is None.
    """

    default: Any
    kind: Kind
    meaning: str
    example: Any = None


KEYS: dict[str, Key] = {
    "impl": Key(None, FUNCTION, "the function, if --impl does not name it", "kernel.py:attention"),
    "name": Key(None, TEXT, "what reports call it; if left out, as the function is named", "my attention"),
    "convention": Key("native", one_of(*CONVENTIONS), "how it is called"),
    "varlen": Key(
        None, FUNCTION,
        "the function for ragged batches; native: like flash_attention_varlen of kernels, flash_attn: like"
        " flash_attn_varlen_func",
        "kernel.py:attention_varlen",
    ),
    "devices": Key(list(DEVICES), some_of(*DEVICES), "where it runs"),
    "dtypes": Key(list(Claims().dtypes), some_of(*DTYPES), "dtypes of q, k and v"),
    "head_dims": Key(dict(RANGE), DIMS, "head dimensions D and Dv"),
    "unequal_dims": Key(False, SWITCH, "Dv may differ from D"),
    "masks": Key(list(MASKS), some_of(*MASKS), "masks that it can be asked for; full is none"),
    "causal_alignment": Key(
        None, one_of("bottom-right", "top-left"),
        "of a causal mask where Sq and Sk differ: the last query sees the last key, or the first the first;"
        " if left out, top-left for sdpa, else bottom-right",
        "bottom-right",
    ),
    "scales": Key("any", one_of("any", "positive", "default"), "scales of the scores; default is D ** -0.5"),
    "largest_scale": Key(None, SCALE, "the largest magnitude of a scale; if left out, any", 1e30),
    "gqa": Key(False, SWITCH, "several query heads may share a KV head"),
    "cross_lengths": Key(False, SWITCH, "Sq and Sk may differ"),
    "fewest_keys": Key(1, KEYS_OF_A_CALL, "the shortest K and V that it takes, but for empty ones"),
    "dead_rows": Key(False, SWITCH, "a query may see no key: its out is 0, its lse -inf"),
    "empty": Key(False, SWITCH, "B, Sq, Sk or the length of a sequence may be 0"),
    "contiguous": Key(
        None, one_of(*LAYOUTS),
        "the dimensions of a contiguous dense input as memory has them; if left out, bshd for flash_attn and"
        " flash_attn_varlen, else bhsd",
        "bhsd",
    ),
    "strided": Key(False, SWITCH, "inputs need not be contiguous"),
    "past_rows": Key(
        False, SWITCH, "a ragged batch may have rows past its last sequence: their out is 0, their lse -inf"
    ),
    "lse": Key(
        "none", one_of("natural", "base2", "none"),
        "the logarithm of each row's sum of exponentials, float32, that it returns if it is asked to",
    ),
    "backward": Key(False, SWITCH, "it is differentiable in q, k and v"),
    "lse_grad": Key(False, SWITCH, "gradients flow through the lse too"),
    "deterministic": Key(False, SWITCH, "the forward gives the same bits in every run"),
    "deterministic_backward": Key(False, SWITCH, "the backward gives the same bits in every run"),
    "batch_invariant": Key(
        False, SWITCH,
        "what gives the same bits in every run does so wherever in the batch, among the heads and in memory"
        " it lies",
    ),
    "tile": Key([64, 64], TILE, "query and key rows of its largest tiles: lengths about them are tested"),
    "p_rounded_before_ds": Key(False, SWITCH, "dS is formed from P already rounded to the dtype of q"),
    "l_from_rounded_p": Key(False, SWITCH, "rows are summed over P already rounded to the dtype of q"),
    "heads_rounded_before_group_sum": Key(
        False, SWITCH,
        "dk and dv of the query heads of a group are rounded to the dtype of q before they are added up",
    ),
    "products": Key("ieee", one_of(*PRODUCTS), "how float32 is multiplied"),
}  # fmt: skip

ROUNDING = tuple(field.name for field in dataclasses.fields(Rounding))
"""Keys that say where it rounds."""

Values = Mapping[str, Any]
"""The value of each key."""


def _range(given: Mapping[str, int]) -> list[int]:
    """All head dimensions of a range."""
    least, most, multiple = ({**RANGE, **given}[name] for name in RANGE)
    return [dim for dim in range(least, most + 1) if dim % multiple == 0]


# ---------------------------------------------------------------- reading


def read(path: Path) -> dict[str, Any]:
    """The value of each key of a manifest.

    Raises:
        ManifestError: if it cannot be read, has an unknown key, a wrong value, or claims that contradict
            each other.
    """
    given = f"--manifest is {str(path)!r}"
    try:
        found = tomllib.loads(path.read_bytes().decode())
    except OSError as error:
        raise ManifestError(f"{given}: it cannot be read: {error.strerror}") from None
    except ValueError as error:  # of TOML, or of UTF-8
        raise ManifestError(f"{given}: it is not TOML: {error}") from None
    for name, value in found.items():
        key = KEYS.get(name)
        if key is None:
            near = _near([name], KEYS)
            raise ManifestError(f"{given}: there is no key {name!r}{near}; there are {', '.join(KEYS)}")
        if not key.kind.holds(value):
            near = _near(value if isinstance(value, list) else [value], key.kind.words)
            raise ManifestError(f"{given}: {name} is {_toml(value)}; it may be {key.kind.may_be}{near}")
    values = {name: found.get(name, key.default) for name, key in KEYS.items()}
    if wrong := _contradiction(values):
        raise ManifestError(f"{given}: {wrong}")
    return values


def _near(given: Iterable[Any], allowed: Iterable[str]) -> str:
    """A hint at what was meant."""
    allowed = list(allowed)
    for word in given:
        if word not in allowed and (near := difflib.get_close_matches(str(word).lower(), allowed, 1)):
            return f" (did you mean {near[0]!r}?)"
    return ""


def _contradiction(v: Values) -> str:
    """What of the values cannot be claimed together; empty if all can."""
    convention = v["convention"]
    rules = {
        "lse_grad is true, and backward is false": v["lse_grad"] and not v["backward"],
        "lse_grad is true, and lse is 'none'": v["lse_grad"] and v["lse"] == "none",
        "deterministic_backward is true, and backward is false": (
            v["deterministic_backward"] and not v["backward"]
        ),
        "deterministic_backward is true, and deterministic is false: gradients follow from out": (
            v["deterministic_backward"] and not v["deterministic"]
        ),
        "batch_invariant is true, and deterministic is false": (
            v["batch_invariant"] and not v["deterministic"]
        ),
        f"lse is {v['lse']!r}, and convention is 'sdpa', which returns none": (
            v["lse"] != "none" and convention == "sdpa"
        ),
        f"varlen is {v['varlen']!r}, and convention is {convention!r}; it may be 'native' or 'flash_attn'": (
            v["varlen"] is not None and convention not in ("native", "flash_attn")
        ),
        "past_rows is true, and there is no function for ragged batches (varlen)": (
            v["past_rows"] and not _is_ragged(v)
        ),
        "dead_rows is true, and cross_lengths is false: where Sq = Sk every query sees a key": (
            v["dead_rows"] and not v["cross_lengths"]
        ),
        f"causal_alignment is {v['causal_alignment']!r}, and masks has no 'causal'": (
            v["causal_alignment"] is not None and "causal" not in v["masks"]
        ),
        f"largest_scale is {v['largest_scale']}, and scales is 'default'": (
            v["largest_scale"] is not None and v["scales"] == "default"
        ),
        "p_rounded_before_ds is true, and backward is false": v["p_rounded_before_ds"] and not v["backward"],
        "heads_rounded_before_group_sum is true, and gqa or backward is false": (
            v["heads_rounded_before_group_sum"] and not (v["gqa"] and v["backward"])
        ),
        "products is 'tf32', and dtypes has no 'float32'": (
            v["products"] == "tf32" and "float32" not in v["dtypes"]
        ),
        "unequal_dims is true, and head_dims has only one": v["unequal_dims"] and len(_dims(v)) == 1,
    }
    return next((rule for rule, broken in rules.items() if broken), "")


def _dims(v: Values) -> list[int]:
    return v["head_dims"] if isinstance(v["head_dims"], list) else _range(v["head_dims"])


def _is_ragged(v: Values) -> bool:
    return v["varlen"] is not None or v["convention"] == "flash_attn_varlen"


def claims_of(v: Values) -> Claims:
    """The claims that the values of all keys amount to."""
    dims, listed = v["head_dims"], isinstance(v["head_dims"], list)
    limits = {} if listed else {**RANGE, **dims}
    convention = v["convention"]
    return Claims(
        dtypes=tuple(v["dtypes"]),
        devices=tuple(v["devices"]),
        masks=tuple(v["masks"]),
        smallest_dim=min(dims) if listed else limits["min"],
        largest_dim=max(dims) if listed else limits["max"],
        dims_multiple_of=1 if listed else limits["multiple"],
        dims=tuple(dims) if listed else None,
        equal_dims=not v["unequal_dims"],
        largest_scale=v["largest_scale"] or Claims().largest_scale,
        positive_scale=v["scales"] == "positive",
        default_scale=v["scales"] == "default",
        gqa=v["gqa"],
        cross_lengths=v["cross_lengths"],
        fewest_keys=v["fewest_keys"],
        causal_alignment=v["causal_alignment"] or ALIGNMENT.get(convention, "bottom-right"),
        dead_rows=v["dead_rows"],
        empty=v["empty"],
        backward=v["backward"],
        lse=v["lse"] != "none",
        lse_grad=v["lse_grad"],
        contiguous=v["contiguous"] or LAYOUT.get(convention, "bhsd"),
        strided=v["strided"],
        ragged=_is_ragged(v),
        past_rows=v["past_rows"] or not _is_ragged(v),
        deterministic=v["deterministic"],
        deterministic_backward=v["deterministic_backward"],
        batch_invariant=v["batch_invariant"],
        rounding=Rounding(**{name: v[name] for name in ROUNDING}),
    )


def load_manifest(given: str, spec: str | None = None) -> Implementation:
    """The implementation that a manifest is about.

    Args:
        given: the file, from the current folder. What it names by a relative path, or as a module, is looked
            up from its own folder.
        spec: the function, as `--impl` gave it, from the current folder; None: the manifest names it. Given
            by both, this one counts: a manifest may serve several variants of a kernel.

    Raises:
        ImplementationError: if the manifest, or a function that it names, cannot be used.
    """
    from . import backends  # which are made of what is defined beside this

    path = Path(given).expanduser()
    v = read(path)
    if spec in (OWN, *backends.NAMES):
        raise ManifestError(
            f"--manifest is {given!r}, and --impl is {spec!r}, which has claims of its own; it may be"
            " 'module:callable' or 'path/file.py:callable'"
        )
    if spec is None and v["impl"] is None:
        raise ManifestError(
            f"--manifest is {given!r}: it has no key impl, and there is no --impl; one of them must say what"
            " is tested"
        )

    def named(key: str) -> Callable[..., Any]:
        return callable_of(v[key], f"--manifest is {given!r}: {key}", path.absolute().parent)

    convention, claims = v["convention"], claims_of(v)
    base2 = v["lse"] == "base2"
    function = named("impl") if spec is None else callable_of(spec)
    dense, ragged = conventions.native(function, convention, claims, base2)
    functions = {"impl" if spec is None else "--impl": (function, convention)}
    if v["varlen"] is not None:
        of_ragged = "native" if convention == "native" else "flash_attn_varlen"
        functions["varlen"] = (named("varlen"), of_ragged)
        one, other = conventions.native(*functions["varlen"], claims, base2)
        ragged = one if other is None else other
    for key, (called, of) in functions.items():
        if missing := conventions.missing(called, of, claims):
            raise ManifestError(
                f"--manifest is {given!r}: convention is {convention!r}, and what {key} names does not take"
                f" {missing}"
            )
    not_here = ""
    if "bfloat16" in claims.dtypes and bfloat16_is_wrong_here():
        not_here = NO_BFLOAT16
        claims = dataclasses.replace(claims, dtypes=tuple(x for x in claims.dtypes if x != "bfloat16"))
    arguments = ("--manifest", given) if spec is None else ("--impl", spec, "--manifest", given)
    return Implementation(
        v["name"] or spec or v["impl"],
        dense,
        claims,
        foreign_path,
        varlen=ragged,
        tile=(v["tile"][0], v["tile"][1]),
        arguments=arguments,
        manifest=given,
        not_here=not_here,
    )


# ---------------------------------------------------------------- writing


def _toml(value: Any) -> str:
    """A value as TOML has it."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{name} = {_toml(x)}" for name, x in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, bool | str):
        return json.dumps(value)
    return str(value)


def template(spec: str, convention: str, why: str) -> str:
    """A manifest that claims what is assumed without one.

    Args:
        spec: the function, as it is named from the manifest's folder.
        convention: of the function.
        why: where that is from.
    """
    lines = [
        f"# What {spec} claims: each claim is proved, the rest is reported as not claimed.",
        "# A line that begins with '# ' and a key is left out: what that means is said there.",
    ]
    for name, key in KEYS.items():
        value = {"impl": spec, "convention": convention}.get(name, key.default)
        meaning = f"{key.meaning} ({why})" if name == "convention" else key.meaning
        lines += ["", f"# {meaning[0].upper()}{meaning[1:]}. It may be {key.kind.may_be}."]
        lines.append(f"# {name} = {_toml(key.example)}" if value is None else f"{name} = {_toml(value)}")
    return "\n".join(lines) + "\n"


def initialise(spec: str, convention: str | None, out: Path | None) -> Path:
    """Writes a manifest to edit; returns where.

    Raises:
        ImplementationError: if there is no such function, or the file is there already.
    """
    function = callable_of(spec, "--init")
    source, _, name = spec.rpartition(":")
    is_file = source.endswith(".py")
    out = Path(f"{Path(source).stem if is_file else source.rpartition('.')[2]}.toml") if out is None else out
    if convention is None:
        guessed = conventions.guess(function)
        convention = guessed or "native"
        why = "guessed from the signature" if guessed else "the signature looks like none: see README.md"
    else:
        why = "as given to --convention"
    if is_file:
        path = Path(source).expanduser().absolute()
        source = os.path.relpath(path, out.absolute().parent)
    try:
        with out.open("x") as file:
            file.write(template(f"{source}:{name}", convention, why))
    except FileExistsError:
        raise ManifestError(f"--out is {str(out)!r}, which is there already; name another file") from None
    except OSError as error:
        raise ManifestError(f"--out is {str(out)!r}: it cannot be written: {error.strerror}") from None
    return out


def list_names() -> None:
    """Prints what --impl may name besides functions, and why it cannot run here."""
    from . import backends

    width = max(map(len, backends.BUILT_IN))
    for name in backends.BUILT_IN:
        print(f"{name:{width}}  {backends.available(name) or 'can run here'}")
    print("or 'module:callable' or 'path/file.py:callable': --init writes a manifest for it")


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.implementations",
        description="Lists the implementations that have a name, or writes a manifest for one of your own.",
    )
    parser.add_argument("--init", metavar="SPEC", help="module:callable or path/file.py:callable")
    parser.add_argument("--convention", choices=CONVENTIONS, help="how it is called, if not as it looks")
    parser.add_argument(
        "--out", metavar="FILE", type=Path, help="the manifest (default: by the file or module)"
    )
    options = parser.parse_args(arguments)
    if options.init is None:
        if options.convention is not None or options.out is not None:
            parser.error("--convention and --out go with --init")
        list_names()
        return HELD
    try:
        out = initialise(options.init, options.convention, options.out)
    except ImplementationError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return WRONG_USE
    print(f"{out} is written: edit what it claims, then\n  tox -e gpu -- --manifest {out}")
    return HELD
