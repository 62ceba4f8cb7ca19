"""Faults of the mask and of the loops: keys that a row should not see, keys and rows that are left out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .piece import Array, Mask, Piece
from .variations import Attention

Values = Mapping[str, Array]
Supposition = Callable[[Piece, Attention], Values | None]
"""What the tensors of a piece would be, by name; None if they would be as they should."""

Places = NDArray[np.int64]

ABOVE = "the tiles on the diagonal were not masked: keys above the diagonal count"


# ---------------------------------------------------------------- what another mask does, by pass


def everywhere(a: Attention, visible: Mask) -> Values:
    """All tensors, if these keys were visible in all passes."""
    out, lse = a.forward(visible)
    if a.d_out is None:
        return {"out": out, "lse": lse}
    return {"out": out, "lse": lse, **a.backward(visible, forward=(out, lse))}


def in_dq(a: Attention, visible: Mask) -> Values:
    return {"dq": a.backward(visible)["dq"]} if a.d_out is not None else {}


def in_dkdv(a: Attention, visible: Mask) -> Values:
    if a.d_out is None:
        return {}
    found = a.backward(visible)
    return {name: found[name] for name in ("dk", "dv")}


# ---------------------------------------------------------------- pairs of a row and a key


@dataclass(frozen=True)
class Pairs:
    """All pairs of a query row and a key of a piece, and the tiles of BM rows and BN keys that they are in.

    Attributes:
        visible: what should be, (Sq, Sk).
        i, j: row and key, (Sq, 1) and (1, Sk).
        offset: Sk - Sq: causal, row i sees the keys up to i + offset.
        Sq, Sk: how many there are.
    """

    visible: Mask
    BM: int
    BN: int

    @property
    def Sq(self) -> int:
        return self.visible.shape[0]

    @property
    def Sk(self) -> int:
        return self.visible.shape[1]

    @property
    def i(self) -> Places:
        return np.arange(self.Sq)[:, None]

    @property
    def j(self) -> Places:
        return np.arange(self.Sk)[None, :]

    @property
    def offset(self) -> int:
        return self.Sk - self.Sq

    @property
    def first(self) -> Places:
        """The first row of a row's tile."""
        return self.i // self.BM * self.BM

    def end(self, more: int = 0) -> Places:
        """Where the loop over keys ends, for a row's tile of rows."""
        return np.clip(self.first + self.BM + self.offset + more, 0, self.Sk)

    def whole(self, more: int = 0) -> Places:
        """Where the tiles of keys end that all rows of a row's tile see."""
        return np.clip(self.first + 1 + self.offset + more, 0, self.Sk) // self.BN * self.BN

    def up(self, keys: Places) -> Places:
        """So many keys in whole tiles."""
        return -(-keys // self.BN) * self.BN

    @property
    def last_tile(self) -> int:
        """The first key of the last tile."""
        return (-(-self.Sk // self.BN) - 1) * self.BN

    @property
    def last_tile_of_rows(self) -> int:
        return (-(-self.Sq // self.BM) - 1) * self.BM

    @property
    def start(self) -> Places:
        """Where the loop over rows begins, for a key's tile of keys: at the first that sees one of them."""
        return np.maximum(self.j // self.BN * self.BN - self.offset, 0)

    def rows_without_mask(self, more: int = 0) -> Places:
        """The row from which on tiles of rows need no mask, for a key's tile of keys."""
        whole = np.maximum(self.j // self.BN * self.BN + self.BN - 1 + more - self.offset, 0)
        return np.minimum(self.start + -(-(whole - self.start) // self.BM) * self.BM, self.Sq)


Change = Callable[[Pairs], Mask]


def _supposed(
    changes: Mapping[str, Change], values: Callable[[Attention, Mask], Values], tile: tuple[int, int]
) -> Iterator[tuple[str, Supposition]]:
    for words, change in changes.items():

        def suppose(piece: Piece, a: Attention, change: Change = change) -> Values | None:
            visible = np.broadcast_to(change(Pairs(a.visible, *tile)), a.visible.shape)
            return None if np.array_equal(visible, a.visible) else values(a, visible)

        yield words, suppose


# ---------------------------------------------------------------- suppositions


def of_keys(
    piece: Piece, name: str, values: Callable[[Attention, Mask], Values]
) -> Iterator[tuple[str, Supposition]]:
    """Other keys than those that a row should see, by the tiles of the kernel that makes a tensor.

    Args:
        piece: the first.
        name: of the tensor: "out", "dq" or "dk".
        values: what another mask does.
    """
    tile = BM, BN = piece.tile_of(name)
    causal = piece.case.causal
    changes: dict[str, Change] = {}
    one = piece.case.len_k % BN == 1 and piece.sequences is None
    if name != "dk":  # whose loop is over rows
        changes |= {
            f"the last tile of {BN} keys were left out{' (the last key)' if one else ''}": lambda p: (
                p.visible & (p.j < p.last_tile)
            ),
            f"the first tile of {BN} keys were left out": lambda p: p.visible & (p.j >= BN),
            f"every other tile of {BN} keys were left out": lambda p: p.visible & (p.j // BN % 2 == 0),
            # where the last tile has one key, that is the same
            "the last key were left out": (
                lambda p: p.visible & (p.j < p.Sk - (p.Sk <= BN or p.Sk % BN != 1))
            ),
        }
        if piece.case.len_k > BN or piece.sequences:
            changes[f"only the last tile of {BN} keys counted"] = lambda p: p.visible & (p.j >= p.last_tile)
    if causal:
        changes |= {
            "a row did not see the key on its diagonal": lambda p: p.j < p.i + p.offset,
            "a row saw one key above its diagonal": lambda p: p.j <= p.i + p.offset + 1,
        }
        if name == "dk":
            changes[ABOVE] = lambda p: (p.i >= p.start) | p.visible
        elif piece.case.len_k > BN or piece.sequences:
            changes[ABOVE] = lambda p: p.j < p.up(p.end())
    if causal and name != "dk":
        changes |= {
            "the tiles on the diagonal were left out": lambda p: p.visible & (p.j < p.whole()),
            f"keys that do not fill a tile of {BN} were left out, by tiles of {BM} rows": (
                lambda p: p.visible & (p.j < p.end() // BN * BN)
            ),
            "the loop over keys ended where a mask aligned at the top left ends": (
                lambda p: p.visible & (p.j < p.up(np.minimum(p.first + BM, p.Sk)))
            ),
            "the loop over keys ended one too soon, before the one that only a tile's last row sees": (
                lambda p: p.visible & (p.j < p.up(p.end(-1)))
            ),
            "a tile were taken for whole whose last key is above the diagonal of its first row": (
                lambda p: p.visible | (p.j < p.whole(1))
            ),
            f"only the last tile of {BN} keys that a row sees counted": (
                lambda p: p.visible & (p.j >= p.up(np.clip(p.i + 1 + p.offset, 0, p.Sk)) - BN)
            ),
        }
    if name != "out":  # of the forward that is another option
        if causal:
            changes["their mask were not causal: keys above the diagonal count"] = lambda p: p.j >= 0
            changes["their mask were aligned at the top left"] = lambda p: p.j <= p.i
        else:
            changes["their mask were causal"] = lambda p: p.j <= p.i + p.offset
    yield from _supposed(changes, values, tile)


def of_query_rows(piece: Piece) -> Iterator[tuple[str, Supposition]]:
    """Rows that give nothing to dk and dv, or give what they should not."""
    tile = BM, BN = piece.tile_of("dk")
    changes: dict[str, Change] = {"the last query row gave nothing": lambda p: p.visible & (p.i < p.Sq - 1)}
    if piece.case.len_q > BM or piece.sequences:
        changes |= {
            f"the last tile of {BM} query rows gave nothing": lambda p: (
                p.visible & (p.i < p.last_tile_of_rows)
            ),
            f"the first tile of {BM} query rows gave nothing": lambda p: p.visible & (p.i >= BM),
            f"every other tile of {BM} query rows gave nothing": lambda p: p.visible & (p.i // BM % 2 == 0),
        }
    if piece.case.causal:
        changes |= {
            f"the first tile of {BM} query rows, on the diagonal, gave nothing": (
                lambda p: p.visible & (p.i >= p.j // BN * BN + BM - p.offset)
            ),
            f"every other tile of {BM} query rows gave nothing, from the diagonal on": (
                lambda p: p.visible & ((p.i - p.start) // BM % 2 == 0)
            ),
            "the loop over query rows began where a mask aligned at the top left begins": (
                lambda p: p.visible & (p.i >= p.j // BN * BN)
            ),
            "rows that see a part of a tile of keys, on the diagonal, gave nothing": (
                lambda p: p.visible & (p.i >= p.rows_without_mask())
            ),
            "a tile of rows were not masked whose first does not see the last key, above the diagonal": (
                lambda p: p.visible | (p.i >= p.rows_without_mask(-1))
            ),
        }
    yield from _supposed(changes, in_dkdv, tile)
