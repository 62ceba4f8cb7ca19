"""The emulation in the place of an implementation: correct results, or broken ones, and their judgement."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from reference import emulation, oracle, sdpa
from reference.emulation import Result, Tiles
from reports.records import Verdict

from .cases import Case
from .comparison import describe
from .judge import judge
from .values import make_inputs

Array = NDArray[np.float64]

TENSORS = ("out", "lse", "dq", "dk", "dv")
TILES = Tiles(forward=(32, 16), dkdv=(16, 32), dq=(32, 16))


class Scene:
    """A case, what the emulation makes of it, and all that it takes to judge that."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.tensors = {name: t for name, t in vars(make_inputs(case)).items() if t is not None}
        self.dtype = self.tensors["q"].dtype
        self.options: dict[str, Any] = {"causal": case.causal, "scale": case.scale}
        self.sdpa = arrays_of(sdpa.attention(**self.tensors, **self.options)._asdict())

    def emulated(self, **changes: Any) -> Result:
        return emulation.attention(**{**self.tensors, **self.options, "tiles": TILES, **changes})

    def stored(self, registers: Result) -> dict[str, Array]:
        """What a kernel writes: all but the lse in the dtype of the inputs."""
        tensors = registers._asdict()
        return arrays_of({name: t if name == "lse" else t.to(self.dtype) for name, t in tensors.items()})

    def judged(self, results: dict[str, Array]) -> list[Verdict]:
        arrays: dict[str, Any] = arrays_of(self.tensors)
        given = results["out"]
        exact = oracle.attention(**arrays, **self.options, dtype=self.case.dtype, out_given=given)
        emulated = self.emulated(out_given=torch.from_numpy(given).to(self.dtype))
        return judge(self.case, results, exact, self.sdpa, arrays_of(emulated._asdict()))[0]


def arrays_of(tensors: dict[str, Tensor]) -> dict[str, Array]:
    return {name: t.double().numpy() for name, t in tensors.items()}


def broken_rules(verdicts: list[Verdict]) -> set[str]:
    return {rule(v) for v in verdicts if not v.held}


def rule(v: Verdict) -> str:
    """Its name with the reference's; unique within a tensor."""
    return f"{v.reference}: {v.rule}"


def told(verdicts: list[Verdict]) -> str:
    return "\n".join(describe(v) for v in verdicts if not v.held)


scene = cache(Scene)
