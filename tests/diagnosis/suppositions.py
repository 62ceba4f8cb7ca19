"""Faults that are supposed, computed and compared: "as if the last tile of keys were left out".

A supposition says what the tensors would be. It explains one if all that can be judged is near that, and what
is right is not. Where several explain it, all are named and none is certain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from reference.budget import A

from ..execution import alike
from .piece import (
    CERTAIN,
    LIKELY,
    Array,
    Mask,
    Piece,
    are,
    how_sure,
    joined,
    no_surer,
    wrong_tensors,
)
from .variations import Attention
from .visibility import Supposition, Values, everywhere, in_dkdv, in_dq, of_keys, of_query_rows

LARGEST = 2**21
"""Most products q_id k_jd for which faults are computed: thirty of them, within a second."""

FEWEST = 4
"""Elements that must be wrong, and be as supposed, to be certain."""

FORWARD = frozenset({"out", "lse"})

NAMED = 3
"""Suppositions that are named where several explain the same."""


@dataclass(frozen=True)
class _Found:
    """A supposition that explains a tensor: how sure that is, and by how many elements that are wrong."""

    how: str
    telling: int


def as_if(pieces: Sequence[Piece], explained: Container[str]) -> Iterator[str]:
    """What the results would be with one fault or another.

    Args:
        pieces: all of it.
        explained: tensors of which it is known already.
    """
    names = [name for name in wrong_tensors(pieces) if name not in explained]
    if not names or sum(map(_products, pieces)) > LARGEST:
        return
    known = [(piece, piece.attention) for piece in pieces if piece.attention]
    if len(known) != len(pieces):
        return
    found: dict[str, dict[str, _Found]] = {name: {} for name in names}
    wrong = set(wrong_tensors(pieces))
    for words, suppose in _suppositions(pieces[0], wrong):
        values = [suppose(piece, attention) for piece, attention in known]
        if all(v is None for v in values):
            continue
        for name in names:
            if any(v is not None and name not in v for v in values):
                continue
            explains = _explains(pieces, [None if v is None else v[name] for v in values], name)
            if explains.how:
                found[name][words] = explains
    if wrong & FORWARD:  # the gradients follow from it: a fault of theirs alone would be a second one
        known_words = {words for name in FORWARD & found.keys() for words in found[name]}
        for name in found.keys() - FORWARD:
            found[name] = {words: each for words, each in found[name].items() if words in known_words}
    yield from _told(found)


def _products(piece: Piece) -> int:
    """How many are added up for S or out, keys up to the end of the last tile counted."""
    case, tile = piece.case, piece.tile_of("out")[1]
    keys = -(-case.len_k // tile) * tile
    return case.batch * case.heads_q * case.len_q * keys * max(case.dim, case.dim_v)


def _told(found: Mapping[str, Mapping[str, _Found]]) -> Iterator[str]:
    """Of each tensor the suppositions that explain it best, as one sentence for those that share them.

    One fault is likelier than two: of those that explain a tensor, these count that explain most tensors.
    """
    everywhere: dict[str, list[_Found]] = {}
    for of_tensor in found.values():
        for words, each in of_tensor.items():
            everywhere.setdefault(words, []).append(each)

    def rank(words: str) -> tuple[int, int]:
        certain = sum(each.how == CERTAIN for each in everywhere[words])
        return certain, len(everywhere[words])

    sentences: dict[tuple[str, str], list[str]] = {}
    for name, of_tensor in found.items():
        certain = [words for words, each in of_tensor.items() if each.how == CERTAIN]
        able = certain or list(of_tensor)
        if not able:
            continue
        most = max(map(rank, able))
        best = [words for words in able if rank(words) == most]
        telling = sum(each.telling for each in everywhere[best[0]])
        how = CERTAIN if certain and len(best) == 1 and telling >= FEWEST else LIKELY
        sentences.setdefault((how, ", or as if ".join(best[:NAMED])), []).append(name)
    for (how, words), names in sentences.items():
        yield f"{how}: {are(names)} as if {words}"


def _explains(pieces: Sequence[Piece], values: Sequence[Array | None], name: str) -> _Found:
    """How sure it is that a tensor is this."""
    near: list[Mask] = []
    as_right: list[Mask] = []
    left: list[tuple[Array, Array]] = []
    for piece, supposed in zip(pieces, values, strict=True):
        x, e = piece.results[name], getattr(piece.exact, name)
        value = e.value if supposed is None else supposed
        if value.shape != x.shape:
            return _Found("", 0)
        with np.errstate(invalid="ignore", over="ignore"):
            bound, size = e.bound, np.abs(value)
            if name != "lse":  # what is added up differently may be rounded as its row is
                bound, size = (np.max(t, -1, keepdims=True, initial=0.0) for t in (bound, size))
            own = 8 * A * (1 + piece.exact.score_terms) + (0 if name == "lse" else 4 * piece.exact.dtype.u)
            limit = 2 * bound + own * size
            for y, found in ((x, near), (e.value, as_right)):
                found.append(alike(y, value) | (np.abs(y - value) <= limit))
            left.append((np.where(alike(x, value), 0.0, np.abs(x - value)), np.abs(x - e.value)))
    wrong = joined(piece.fits[name].wrong for piece in pieces)
    judged = joined(piece.fits[name].judged for piece in pieces)
    differ = ~joined(as_right)[wrong]
    if differ.mean() <= 0.5 or not np.isfinite(joined(p.results[name] for p in pieces)[wrong]).any():
        return _Found("", 0)  # what is right would do as well, or anything that is NaN
    how = how_sure(joined(near), judged, wrong)
    return _Found(no_surer(how, *(joined(t)[wrong] for t in zip(*left, strict=True))), int(differ.sum()))


def _suppositions(piece: Piece, wrong: set[str]) -> Iterator[tuple[str, Supposition]]:
    """In words, and what the tensors would be. If the forward is right, only what concerns the backward."""
    case = piece.case
    if wrong & FORWARD:
        yield from of_keys(piece, "out", everywhere)
        yield from _of_memory(piece)
        yield from _of_scores(piece)
        yield from _of_lse(piece)
        yield from _of_the_online_softmax(piece)
        if case.heads_kv > 1 and "out" in wrong:
            yield from _of_heads(piece, forward=True)
    elif wrong:
        if "dq" in wrong:
            yield from of_keys(piece, "dq", in_dq)
        if wrong & {"dk", "dv"}:
            yield from of_keys(piece, "dk", in_dkdv)
            yield from of_query_rows(piece)
        yield from _of_gradients(piece)
        if case.heads_q > 1:
            yield from _of_heads(piece, forward=False)
            yield from _of_groups(piece)


# ---------------------------------------------------------------- what lies past the keys


def _of_memory(of: Piece) -> Iterator[tuple[str, Supposition]]:
    """Keys past the last one that take part: as zeros, or as what lies behind in memory."""
    BN = of.tile_of("out")[1]

    def padded(piece: Piece, a: Attention) -> Values | None:
        more = -piece.case.len_k % BN
        if not more or piece.case.causal:
            return None
        k, v = (np.pad(x, ((0, 0), (0, 0), (0, more), (0, 0))) for x in (a.k, a.v))
        out, lse = a.forward(np.ones((piece.case.len_q, k.shape[2]), bool), k=k, v=v)
        return {"out": out, "lse": lse}

    def next_head(piece: Piece, a: Attention) -> Values | None:
        more = -piece.case.len_k % BN
        if not more or piece.case.causal or piece.sequences:
            return None
        B, Hkv, group = piece.case.batch, piece.case.heads_kv, a.group

        def behind(x: Array) -> Array:
            heads = x[:, ::group]
            flat = np.concatenate(
                [heads.reshape(B * Hkv * x.shape[2], -1), np.full((more, x.shape[3]), np.nan)]
            )
            at = np.arange(B * Hkv)[:, None] * x.shape[2] + np.arange(x.shape[2] + more)
            return flat[at].reshape(B, Hkv, -1, x.shape[3]).repeat(group, 1)

        if more > piece.case.len_k:
            return None
        k = behind(a.k)
        out, lse = a.forward(np.ones((piece.case.len_q, k.shape[2]), bool), k=k, v=behind(a.v))
        return {"out": out, "lse": lse}

    yield f"keys past the end of the last tile of {BN} keys took part with score 0", padded
    yield f"the last tile of {BN} keys went on into the next head's", next_head


# ---------------------------------------------------------------- scores, exponents, the lse


def _of_scores(of: Piece) -> Iterator[tuple[str, Supposition]]:
    def scaled(by: float) -> Supposition:
        return lambda piece, a: dict(zip(("out", "lse"), a.forward(scale=a.scale * by), strict=True))

    def exponents(by: float) -> Supposition:
        """Scores less their maximum times a factor: the lse has the right maximum."""

        def suppose(piece: Piece, a: Attention) -> Values:
            out, lse = a.forward(scale=a.scale * by)
            with np.errstate(invalid="ignore"):  # rows that see no key
                return {"out": out, "lse": np.where(a.live, lse - by * a.maximum + a.maximum, -np.inf)}

        return suppose

    yield "exp2 took an exponent that is meant for exp: times ln 2", exponents(math.log(2))
    yield "exp took an exponent that is meant for exp2: times 1 / ln 2", exponents(1 / math.log(2))
    yield "the scores were multiplied by ln 2", scaled(math.log(2))
    yield "the scores were multiplied by 1 / ln 2", scaled(1 / math.log(2))
    yield "the scores had the opposite sign", scaled(-1)
    if of.case.effective_scale not in (0.0, 1.0):
        yield "the scores were multiplied by scale twice", scaled(of.case.effective_scale)
    if of.case.scale is None:
        yield (
            "the default scale were rounded to three decimals",
            (lambda piece, a: dict(zip(("out", "lse"), a.forward(scale=round(a.scale, 3)), strict=True))),
        )


def _of_lse(of: Piece) -> Iterator[tuple[str, Supposition]]:
    def of_parts(change: Callable[[Array, Array, Attention], Array]) -> Supposition:
        def suppose(piece: Piece, a: Attention) -> Values:
            with np.errstate(all="ignore"):
                return {"lse": np.where(a.live, change(a.maximum, a.right[1] - a.maximum, a), -np.inf)}

        return suppose

    log2e = 1 / math.log(2)
    yield "it were a logarithm in base 2", of_parts(lambda m, log_l, a: (m + log_l) * log2e)
    yield (
        "only the logarithm of the sum were in base 2, not the maximum",
        of_parts(lambda m, log_l, a: m + log_l * log2e),
    )
    yield "only the maximum were in base 2", of_parts(lambda m, log_l, a: m * log2e + log_l)
    yield "it were relative to the row's maximum: without the maximum", of_parts(lambda m, log_l, a: log_l)
    yield "it were the row's maximum, without the sum", of_parts(lambda m, log_l, a: m)
    if of.case.effective_scale not in (0, 1):
        yield "its maximum were not scaled", of_parts(lambda m, log_l, a: m / abs(a.scale) + log_l)
    if of.case.effective_scale < 0:
        yield "its maximum had the opposite sign", of_parts(lambda m, log_l, a: -m + log_l)
    yield "it had the opposite sign", of_parts(lambda m, log_l, a: -(m + log_l))
    yield "it were the sum itself, not its logarithm", of_parts(lambda m, log_l, a: np.exp(m + log_l))


def _of_the_online_softmax(of: Piece) -> Iterator[tuple[str, Supposition]]:
    BN = of.tile_of("out")[1]
    if all(n <= BN for n in (of.case.len_k,)) and not of.sequences:
        return

    def online(**fault: float) -> Supposition:
        return lambda piece, a: dict(zip(("out", "lse"), a.online(BN, **fault), strict=True))  # type: ignore[arg-type]

    yield "the accumulator of out were not rescaled when the maximum grows", online(rescale_acc=False)
    yield "the newest tile of out were rescaled along with the earlier ones", online(newest=True)
    yield "the sum were not rescaled when the maximum grows", online(rescale_l=False)
    yield (
        "neither sum nor accumulator were rescaled when the maximum grows",
        online(rescale_l=False, rescale_acc=False),
    )
    yield (
        "earlier tiles were rescaled by exp of an exponent that is meant for exp2",
        online(base=1 / math.log(2)),
    )
    yield "earlier tiles were rescaled by exp2 of an exponent that is meant for exp", online(base=math.log(2))


# ---------------------------------------------------------------- heads


def _of_heads(of: Piece, forward: bool) -> Iterator[tuple[str, Supposition]]:
    """KV heads that a query head does not belong to."""
    Hq, Hkv = of.case.heads_q, of.case.heads_kv
    h = np.arange(Hq)
    choices = {
        "query head h read KV head h % (number of KV heads)": h % Hkv,
        "query head h read KV head h": np.minimum(h, Hkv - 1),
        "all query heads read KV head 0": h * 0,
    }
    for words, chosen in choices.items():
        if np.array_equal(chosen, h // (Hq // Hkv)):
            continue
        for what in ("k and v", "k", "v"):

            def suppose(
                piece: Piece, a: Attention, chosen: Array = chosen, what: str = what
            ) -> Values | None:
                of_kv = [x[:, :: a.group][:, chosen] for x in (a.k, a.v)]
                k, v = (x if letter in what else None for x, letter in zip(of_kv, "kv", strict=True))
                if forward:
                    return dict(zip(("out", "lse"), a.forward(k=k, v=v), strict=True))
                return {"dq": a.backward(k=k, v=v)["dq"]} if a.d_out is not None else None

            yield words + ("" if what == "k and v" else f", for {what} alone"), suppose


def _of_groups(of: Piece) -> Iterator[tuple[str, Supposition]]:
    """Query heads that give to dk and dv of a KV head, and should not, or do not, and should."""
    Hq, Hkv = of.case.heads_q, of.case.heads_kv
    group = Hq // Hkv
    if group == 1:
        return

    def summed(heads: Callable[[int], Sequence[int]]) -> Supposition:
        def suppose(piece: Piece, a: Attention) -> Values | None:
            if a.d_out is None:
                return None
            return {
                name: np.stack([a.by_query_head[name][:, list(heads(h))].sum(1) for h in range(Hkv)], 1)
                for name in ("dk", "dv")
            }

        return suppose

    yield "only the last query head of each group gave to them", summed(lambda h: [h * group + group - 1])
    if group > 2:
        yield "only the first query head of each group gave to them", summed(lambda h: [h * group])
    yield (
        "the last query head of each group gave nothing",
        summed(lambda h: range(h * group, (h + 1) * group - 1)),
    )
    if group > 2:
        yield (
            "the first query head of each group gave nothing",
            summed(lambda h: range(h * group + 1, (h + 1) * group)),
        )
        power = 1 << (group.bit_length() - 1)
        if power not in (group, group - 1):
            yield (
                "the group of query heads were a power of two",
                summed(lambda h: range(h * power, (h + 1) * power)),
            )

    def apart(piece: Piece, a: Attention) -> Values | None:
        if a.d_out is None:
            return None
        chosen = np.arange(Hq) % Hkv
        k, v = (x[:, :: a.group][:, chosen] for x in (a.k, a.v))
        given = replace(a, heads_kv=Hq).backward(k=k, v=v)
        return {
            name: np.stack([given[name][:, h::Hkv].sum(1) for h in range(Hkv)], 1) for name in ("dk", "dv")
        }

    if Hkv > 1:
        yield "KV head h had the query heads h, h + (number of KV heads), ...", apart


# ---------------------------------------------------------------- the algebra of the backward


def _of_gradients(of: Piece) -> Iterator[tuple[str, Supposition]]:
    def changed(change: Callable[[Attention], Values]) -> Supposition:
        return lambda piece, a: None if a.d_out is None else change(a)

    def per_group(x: Array, a: Attention) -> Array:
        """Of each query head, what the one has whose number is that of its KV head."""
        return x[:, np.arange(x.shape[1]) // a.group]

    flows = of.tensors[4] is not None and of.case.d_lse
    yield "delta were not subtracted", changed(lambda a: a.backward(delta=0.0, d_lse=0.0))
    if flows:
        yield (
            "delta were not subtracted, but what flows into the lse is",
            changed(lambda a: a.backward(delta=0.0)),
        )
        yield "nothing flowed in through the lse", changed(lambda a: a.backward(d_lse=0.0))
        yield "what flows in through the lse had the opposite sign", changed(lambda a: a.backward(d_lse=-1.0))
    yield "delta were added, not subtracted", changed(lambda a: a.backward(delta=-1.0, d_lse=-1.0))
    yield (
        "the lse were taken for one in base 2",
        changed(lambda a: a.backward(lse=a.right[1] * math.log(2))),
    )
    if of.case.scale is not None:
        yield (
            "the backward had the default scale",
            changed(lambda a: a.backward(scale=a.q.shape[-1] ** -0.5)),
        )
    if of.case.heads_q > of.case.heads_kv:
        yield (
            "delta were that of the query head with the number of the KV head",
            changed(lambda a: a.backward(heads=lambda x: per_group(x, a))),
        )
        yield (
            "the lse were that of the query head with the number of the KV head",
            changed(lambda a: a.backward(lse=per_group(a.right[1], a))),
        )

    def dv_of_ds(a: Attention) -> Values:
        assert a.d_out is not None
        return {"dv": a.by_kv_head(np.swapaxes(a.score_gradients[0], -1, -2) @ a.d_out)}

    def dk_of_dp(a: Attention) -> Values:
        return {"dk": a.by_kv_head(a.scale * np.swapaxes(a.score_gradients[1], -1, -2) @ a.q)}

    yield "dv added up dS, not P", changed(dv_of_ds)
    yield "dk added up dP - delta, without P", changed(dk_of_dp)
