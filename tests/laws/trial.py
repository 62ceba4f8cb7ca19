"""One case on trial: calls of the implementation under test, and what is found when two are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..cases import Case
from ..implementations import Claims, Implementation
from ..layouts import place
from ..magnitudes import Bounds, Problem, bounds
from ..ragged import Part
from ..values import Inputs, make_inputs

GRADIENTS = ("dq", "dk", "dv")

Results = Mapping[str, Tensor]
"""out, lse, dq, dk, dv by name, as far as they are claimed and asked for: (B, H, S, D), lse (B, H, S)."""


class NotClaimed(Exception):
    """A call that the law makes lies outside of the claims; says by what."""


class NotApplicable(Exception):
    """The law says nothing about this case; says why."""


@dataclass(frozen=True)
class Finding:
    """A law that does not hold.

    Attributes:
        law, tensor: their names.
        statistic, limit: the worst element's distance from what the law says and how far it may be; of a
            bitwise law how many elements differ, and 0.
        margin: statistic / limit.
        where: the element's place in the tensor of the dense problem, (batch, head, row, dimension).
        note: which sequence, and both values.
    """

    law: str
    tensor: str
    statistic: float
    limit: float
    margin: float
    where: tuple[int, ...] | None
    note: str


class Trial:
    """A case and an implementation. The case's own call and its bounds are made once.

    A list of problems stands for one call: of a dense case it has one, of a ragged case one for each
    sequence, all packed into a call of the function for ragged batches.

    Args:
        case: within the claims.
        implementation: under test.
        device: where it runs.
        dtype: instead of the case's; for float64, which proves the laws themselves.
    """

    def __init__(
        self, case: Case, implementation: Implementation, device: torch.device,
        dtype: torch.dtype | None = None,
    ) -> None:  # fmt: skip
        self.implementation, self.device = implementation, device
        self.claims: Claims = implementation.claims
        narrowed = self.claims.narrowed(case)
        self.case = replace(narrowed, grad="qkv") if narrowed.backward else narrowed
        self.dtype = dtype or getattr(torch, case.dtype)
        self.guard: Callable[[], AbstractContextManager[None]] = nullcontext  # around each call, only
        self.raised: BaseException | None = None  # by the implementation
        self.findings: list[Finding] = []
        self.law = ""
        self.judged = 0

    # ------------------------------------------------------------------ problems

    @cached_property
    def problems(self) -> list[Problem]:
        """Those of the case."""
        return self._problems(self.case)

    @cached_property
    def problems_with_d_lse(self) -> list[Problem]:
        """The same with a gradient of the lse.

        Raises:
            NotClaimed: if none is claimed.
        """
        if not (self.claims.backward and self.claims.lse_grad):
            raise NotClaimed("gradients through the lse")
        return self._problems(replace(self.case, grad="qkv", d_lse=True))

    def _problems(self, case: Case) -> list[Problem]:
        x = make_inputs(case)
        if not case.ragged:
            return [self._problem(x)]
        found = []
        q0 = k0 = 0
        for len_q, len_k in case.pairs:
            part = Part(replace(case, lengths=None, past=(0, 0), batch=1, len_q=len_q, len_k=len_k),
                        (0,), (q0,), (k0,))  # fmt: skip
            given: dict[str, Any] = {
                name: None if t is None else part.of(name, t) for name, t in vars(x).items()
            }
            found.append(self._problem(Inputs(**given)))
            q0, k0 = q0 + len_q, k0 + len_k
        return found

    def _problem(self, x: Inputs) -> Problem:
        def put(t: Tensor | None, dtype: torch.dtype) -> Tensor | None:
            return None if t is None else t.to(self.device, dtype).contiguous()

        exact = torch.float64 if self.dtype is torch.float64 else torch.float32
        q, k, v, d_out = (put(t, self.dtype) for t in (x.q, x.k, x.v, x.d_out))
        assert q is not None and k is not None and v is not None
        return Problem(q, k, v, d_out, put(x.d_lse, exact), self.case.causal, self.case.scale)

    @cached_property
    def base(self) -> list[Results]:
        """What the implementation makes of the case."""
        return self.call(self.problems)

    @cached_property
    def bounds(self) -> list[Bounds]:
        """The bounds of the case's own call."""
        return [self.bounds_of(p) for p in self.problems]

    def bounds_of(self, p: Problem) -> Bounds:
        return bounds(p, self.claims.rounding)

    def random(self, salt: int, count: int, high: int, low: int = 0) -> Tensor:
        """Whole numbers from low to high - 1, from the case's seed."""
        source = torch.Generator().manual_seed(self.case.seed * 64 + salt)
        return torch.randint(low, high, (count,), generator=source).to(self.device)

    def order(self, salt: int, count: int) -> Tensor:
        """A permutation, from the case's seed; not the identity if there is another."""
        source = torch.Generator().manual_seed(self.case.seed * 64 + salt)
        order = torch.randperm(count, generator=source)
        return (order if (order != torch.arange(count)).any() else order.flip(0)).to(self.device)

    # ------------------------------------------------------------------ calls

    def call(
        self, problems: Sequence[Problem], ragged: bool | None = None, layout: str | None = None
    ) -> list[Results]:
        """What the implementation makes of problems.

        Args:
            problems: of one call.
            ragged: through the function for ragged batches, all of them packed; that of the case if None.
            layout: of the memory, amid NaN; contiguous if None.

        Raises:
            NotClaimed: if the call lies outside of the claims.
            NotApplicable: if there are none.
        """
        if not problems:
            raise NotApplicable("there is nothing to compare")
        ragged = self.case.ragged if ragged is None else ragged
        self._require_claims(problems, ragged)
        if not ragged:
            return [self._dense(p, layout) for p in problems]
        return self._packed(problems, layout or "bshd")

    def _require_claims(self, problems: Sequence[Problem], ragged: bool) -> None:
        claims = self.claims
        for p in problems:
            dead = bool((~p.live).any())
            needs = {
                "ragged batches": claims.ragged or not ragged,
                "several query heads a KV head": claims.gqa or p.group == 1,
                "Sq != Sk": claims.cross_lengths or p.Sq == p.Sk,
                f"fewer than {claims.fewest_keys} keys": claims.takes_keys(p.Sk),
                "a causal mask aligned at the bottom right": (
                    claims.causal_alignment == "bottom-right" or not p.causal or p.Sq == p.Sk
                ),
                "a mask or none": ("causal" if p.causal else "full") in claims.masks,
                "rows that see no key": claims.dead_rows or not dead,
                "empty inputs": claims.empty or 0 not in (p.q.shape[0], p.Sq, p.Sk),
                "gradients through the lse": claims.lse_grad or p.d_lse is None,
            }
            if refused := ", ".join(what for what, claimed in needs.items() if not claimed):
                raise NotClaimed(refused)

    def _dense(self, p: Problem, layout: str | None) -> Results:
        given = {name: t for name, t in vars(p).items() if isinstance(t, Tensor)}
        if layout is None and self.claims.contiguous != "bhsd":
            layout = self.claims.contiguous
        if layout is not None:
            given = {name: self._placed(name, t, layout) for name, t in given.items()}
        return self._called(self.implementation.function, given, (), p)

    def _packed(self, problems: Sequence[Problem], layout: str) -> list[Results]:
        """All sequences in one ragged call."""
        first = problems[0]
        joined = {
            name: torch.cat([getattr(p, name) for p in problems], dim=2)
            for name, t in vars(first).items()
            if isinstance(t, Tensor)
        }
        given = {
            name: (x[0].transpose(0, 1) if x.ndim == 4 else x[0])
            for name, t in joined.items()
            for x in (self._placed(name, t, layout),)
        }
        lengths = [[p.Sq for p in problems], [p.Sk for p in problems]]
        where = [torch.tensor([0, *accumulate(side)], dtype=torch.int32, device=self.device)
                 for side in lengths]  # fmt: skip
        assert self.implementation.varlen is not None
        found = self._called(self.implementation.varlen, given, (*where, *map(max, lengths)), first)
        found = {name: t.transpose(0, 1)[None] if t.ndim == 3 else t[None] for name, t in found.items()}
        parts: list[Results] = []
        q0 = k0 = 0
        for p in problems:
            rows, keys = slice(q0, q0 + p.Sq), slice(k0, k0 + p.Sk)
            parts.append({name: t[:, :, keys if name in ("dk", "dv") else rows] for name, t in found.items()})
            q0, k0 = rows.stop, keys.stop
        return parts

    def _called(
        self, function: Callable[..., Any], given: Mapping[str, Tensor], where: tuple[Any, ...], p: Problem
    ) -> Results:
        try:
            with self.guard():
                return self._differentiated(function, given, where, p)
        except (Exception, SystemExit) as error:
            self.raised = error
            raise

    def _placed(self, name: str, x: Tensor, layout: str) -> Tensor:
        layout = self.claims.layout_of_d_lse(layout) if name == "d_lse" else layout
        return place(name, x, layout, self.device)

    def _differentiated(
        self, function: Callable[..., Any], given: Mapping[str, Tensor], where: tuple[Any, ...], p: Problem
    ) -> Results:
        wanted = "d_out" in given or "d_lse" in given
        leaves = [given[name].detach().requires_grad_(wanted) for name in "qkv"]
        returned = function(*leaves, *where, causal=p.causal, scale=p.scale, return_lse=self.claims.lse)
        if not self.claims.lse and isinstance(returned, Tensor):
            returned = (returned,)
        results = dict(zip(("out", "lse"), returned, strict=False))
        found = {name: t.detach() for name, t in results.items()}
        if wanted:
            into = [(results[of], given[name]) for of, name in (("out", "d_out"), ("lse", "d_lse"))
                    if name in given]  # fmt: skip
            outputs, gradients = zip(*into, strict=True)
            of_inputs = torch.autograd.grad(outputs, leaves, gradients)
            found |= dict(zip(("dq", "dk", "dv"), of_inputs, strict=True))
        return found

    # ------------------------------------------------------------------ comparisons

    def near(
        self, tensor: str, found: Tensor, expected: Tensor | float, limit: Tensor, note: str = ""
    ) -> None:
        """Every element within its limit; infinite limits are not judged, and NaN is NaN."""
        expected = torch.as_tensor(expected, dtype=torch.float64, device=found.device)
        x, r, limit = torch.broadcast_tensors(found.double(), expected, limit.double())
        judged = limit.isfinite()
        self.judged += int(judged.sum())
        same = (x == r) | (x.isnan() & r.isnan())  # what a NaN is not is told by the references
        error = torch.where(same, 0.0, (x - r).abs())
        excess = torch.where(error <= limit, 0.0, error / limit.clamp(min=1e-300))
        excess = excess.nan_to_num(nan=math.inf, posinf=math.inf).masked_fill_(~judged, 0.0)
        if not excess.numel() or not bool((worst := excess.max()) > 0):
            return
        where = _place(excess, int(excess.argmax()))
        self._found(tensor, float(error[where]), float(limit[where]), float(worst), where,
                    f"{note}{float(x[where]):.7g}, not {float(r[where]):.7g}")  # fmt: skip

    def equal(self, tensor: str, found: Tensor, expected: Tensor, note: str = "") -> None:
        """Every element the same; zeros of either sign and all NaN are equal."""
        found, expected = torch.broadcast_tensors(found, expected)
        self.judged += found.numel()
        differ = (found != expected) & ~(found.isnan() & expected.isnan())
        if not bool(differ.any()):
            return
        where = _place(differ, int(differ.flatten().int().argmax()))
        note += f"bitwise: {int(differ.sum())} of {differ.numel()} elements differ, the first"
        note += f" {float(found[where]):.9g}, not {float(expected[where]):.9g}"
        self._found(tensor, float(differ.sum()), 0.0, math.inf, where, note)

    def as_the_case(
        self,
        number: int,
        results: Results,
        taken: Callable[[str, Tensor], Tensor] = lambda _, x: x,
        elsewhere: bool = False,
    ) -> None:
        """Results are those of one of the case's problems: bitwise where claimed, to rounding elsewhere.

        Args:
            number: of the problem.
            results: to be compared; their bounds are the problem's own.
            taken: what of a tensor of the problem, by its name, they are.
            elsewhere: they were computed at another place in the batch, or among the heads.
        """
        note = self.about(number)
        same_bits = self.claims.invariant if elsewhere else self.claims.repeatable
        for name, x in results.items():
            expected = taken(name, self.base[number][name])
            if same_bits(name):
                self.equal(name, x, expected, note)
            else:
                self.near(name, x, expected, 2 * taken(name, self.bounds[number][name]), note)

    def _found(
        self, tensor: str, statistic: float, limit: float, margin: float, where: tuple[int, ...], note: str
    ) -> None:
        self.findings.append(Finding(self.law, tensor, statistic, limit, margin, where, note))

    def about(self, number: int) -> str:
        """The beginning of a note about a problem of the case."""
        return f"sequence {number}: " if self.case.ragged else ""


def _place(x: Tensor, flat: int) -> tuple[int, ...]:
    return tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), x.shape))


def copied(p: Problem, **changes: Any) -> Problem:
    """A problem with some of its tensors changed, contiguous."""
    dense: dict[str, Any] = {
        name: t.contiguous() if isinstance(t, Tensor) else t for name, t in changes.items()
    }
    return replace(p, **dense)
