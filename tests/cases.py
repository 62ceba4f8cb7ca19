"""A case: everything that determines a comparison, in one frozen value with a printable id.

The id decodes back to the whole case, so that one line replays a failure anywhere:

    b2_h4x2_s33x65_d64x32_float16_causal_scale=auto_normal_bshd_grad=qkv_dlse_seed7

reads: batch 2, 4 query heads on 2 KV heads, 33 queries on 65 keys, head dimensions D = 64 and Dv = 32, ...
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

DTYPES = ("float16", "bfloat16", "float32")
GRADIENTS = ("none", "q", "k", "v", "qk", "qv", "kv", "qkv")

REGIMES = {
    "normal": "N(0, 1)",
    "large": "scores of magnitude 16, values of 8",
    "tiny": "inputs of 1/16, values and gradients near float16's subnormal numbers",
    "outliers": "N(0, 1) + N(0, 100) Bernoulli(0.001)",
    "equal": "all keys equal, so that all scores of a row are",
    "near-tied": "keys in pairs a factor of 1 + 2**-10 apart (equal in bfloat16), scores of +-40",
    "negative": "q > 0 and k < 0: every score clearly negative",
    "very-negative": "every score near -60000",
    "growing": "scores that grow with the key: the running maximum changes in every tile",
    "mean": "v and d_out 1 +- 0.1",
    "exact": "one-hot rows of small integers: the result is exact in every dtype",
}
"""Value regimes and what they are."""

LAYOUTS = {
    "bhsd": "contiguous",
    "bshd": "views of (B, S, H, D)",
    "sbhd": "views of (S, B, H, D)",
    "packed": "slots of one packed (B, S, 3, H, D) buffer each",
    "sliced": "slices along S and D of larger tensors",
    "strided": "last dimension not contiguous",
    "offset": "storage offset of one element",
    "expanded": "k, v and d_out expanded over the heads (stride 0)",
}
"""Memory layouts and what they are. What lies beside the values is NaN."""


@dataclass(frozen=True)
class Case:
    """A comparison's inputs. Values follow from the seed (`values`), memory from the layout (`layouts`).

    Attributes:
        batch, heads_q, heads_kv: B, Hq, Hkv; Hq is a multiple of Hkv.
        len_q, len_k: Sq, Sk.
        dim, dim_v: D, Dv.
        dtype: "float16", "bfloat16" or "float32".
        causal: aligned at the bottom right.
        scale: of the scores; None is the default D ** -0.5.
        values: a name of `REGIMES`.
        layout: a name of `LAYOUTS`.
        grad: which inputs require a gradient: "none" (forward only), "q", ..., "qkv".
        d_lse: whether a gradient flows into the lse too.
        seed: of the values, 0 to 2**32 - 1.
    """

    batch: int = 1
    heads_q: int = 1
    heads_kv: int = 1
    len_q: int = 16
    len_k: int = 16
    dim: int = 16
    dim_v: int = 16
    dtype: str = "float16"
    causal: bool = False
    scale: float | None = None
    values: str = "normal"
    layout: str = "bhsd"
    grad: str = "qkv"
    d_lse: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("batch", "len_q", "len_k", "seed"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must not be negative")
        for name in ("heads_q", "heads_kv", "dim", "dim_v"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if self.heads_q % self.heads_kv:
            raise ValueError(f"heads_q is {self.heads_q}; it must be a multiple of heads_kv, {self.heads_kv}")
        if self.scale is not None and not math.isfinite(self.scale):
            raise ValueError(f"scale is {self.scale}; it must be finite")
        if self.seed >= 2**32:
            raise ValueError(f"seed is {self.seed}; it must be less than 2**32")
        for name, allowed in (
            ("dtype", DTYPES),
            ("values", REGIMES),
            ("layout", LAYOUTS),
            ("grad", GRADIENTS),
        ):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; it may be one of {', '.join(allowed)}")
        if self.d_lse and self.grad == "none":
            raise ValueError("d_lse is True and grad is 'none'; d_lse needs an input with a gradient")

    @property
    def backward(self) -> bool:
        return self.grad != "none"

    @property
    def effective_scale(self) -> float:
        return self.dim**-0.5 if self.scale is None else self.scale

    @property
    def equal_scores(self) -> bool:
        """Whether all scores of a row are equal: P is then the same in rows that see as many keys."""
        return self.values == "equal" or self.effective_scale == 0

    @property
    def few_magnitudes(self) -> bool:
        """Whether the elements of q and k share their magnitude: those of dq and dk are then few, and are
        rounded by the same amount."""
        return self.values in ("exact", "very-negative")

    @property
    def exact(self) -> bool:
        """Whether out, and dv in 16 bit, must come out bit for bit."""
        return self.values == "exact" and self.effective_scale != 0

    @property
    def dead_rows(self) -> bool:
        """Whether some query sees no key."""
        return self.len_q > 0 and (self.len_k == 0 or (self.causal and self.len_q > self.len_k))

    @property
    def id(self) -> str:
        return "_".join(
            (
                f"b{self.batch}",
                f"h{self.heads_q}x{self.heads_kv}",
                f"s{self.len_q}x{self.len_k}",
                f"d{self.dim}x{self.dim_v}",
                self.dtype,
                "causal" if self.causal else "full",
                f"scale={'auto' if self.scale is None else repr(self.scale)}",
                self.values,
                self.layout,
                f"grad={self.grad}",
                "dlse" if self.d_lse else "nodlse",
                f"seed{self.seed}",
            )
        )

    def __repr__(self) -> str:
        return f"<{self.id}>"

    def words(self) -> str:
        """The case for a reader."""
        heads = f"{self.heads_q} heads"
        if self.heads_q != self.heads_kv:
            heads = f"{self.heads_q} query heads on {self.heads_kv} KV heads"
        dims = f"D {self.dim}" + ("" if self.dim == self.dim_v else f", Dv {self.dim_v}")
        scale = "default scale" if self.scale is None else f"scale {self.scale:g}"
        gradients = "forward only" if not self.backward else f"gradients of {', '.join(self.grad)}"
        return (
            f"{self.dtype}, batch {self.batch}, {heads}, {self.len_q} queries on {self.len_k} keys,"
            f" {dims}, {'causal' if self.causal else 'not causal'}, {scale}; values: {self.values}"
            f" ({REGIMES[self.values]}); memory: {LAYOUTS[self.layout]}; {gradients}"
            f"{', through lse too' if self.d_lse else ''}; seed {self.seed}"
        )


_PATTERN = re.compile(
    r"b(?P<batch>\d+)_h(?P<heads_q>\d+)x(?P<heads_kv>\d+)_s(?P<len_q>\d+)x(?P<len_k>\d+)"
    r"_d(?P<dim>\d+)x(?P<dim_v>\d+)_(?P<dtype>[a-z0-9]+)_(?P<causal>causal|full)"
    r"_scale=(?P<scale>[-+.e0-9a-z]+)_(?P<values>[-a-z]+)_(?P<layout>[a-z]+)_grad=(?P<grad>[a-z]+)"
    r"_(?P<d_lse>dlse|nodlse)_seed(?P<seed>\d+)"
)


def parse_case(text: str) -> Case:
    """The case that an id stands for.

    Raises:
        ValueError: if it is not an id of a case; says what one looks like, or which part is wrong.
    """
    match = _PATTERN.fullmatch(text.strip().strip("<>"))
    if match is None:
        raise ValueError(f"case id is {text!r}; it must look like {Case().id}")
    part = match.groupdict()
    numbers = {
        name: int(part[name])
        for name in (
            "batch", "heads_q", "heads_kv", "len_q", "len_k", "dim", "dim_v", "seed"
        )
    }  # fmt: skip
    try:
        scale = None if part["scale"] == "auto" else float(part["scale"])
        return Case(
            **numbers,
            dtype=part["dtype"],
            causal=part["causal"] == "causal",
            scale=scale,
            values=part["values"],
            layout=part["layout"],
            grad=part["grad"],
            d_lse=part["d_lse"] == "dlse",
        )
    except ValueError as error:
        raise ValueError(f"case id is {text!r}: {error}") from None
