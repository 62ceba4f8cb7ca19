"""Around the contests: gates and noise, who is known by which kernels, who there is, and the machine."""

from __future__ import annotations

import functools
import importlib.util
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from reports.timings import Contest, Entry, Noise
from tests.implementations import Claims, ImplementationError
from tests.speed import gates, machine, problems
from tests.speed.contenders import KERNELS, AbsentError, contender
from tests.speed.contest import NO_MEMORY
from tests.speed.gates import DELAY, GATES, PAIRS, false_verdicts
from tests.speed.pairs import CANNOT_TELL, FASTER, SAME, SLOWER
from tests.speed.problems import BACKWARD, FORWARD, Problem, tensors

PROBLEM = Problem(1, 2, 2, 33, 16)
ROUNDS = 15

# ---------------------------------------------------------------- gates


def noisy(seconds: float, seed: int, sigma: float = 0.002) -> list[float]:
    rng = random.Random(seed)
    return [seconds * rng.lognormvariate(0, sigma) for _ in range(ROUNDS)]


def held(other: float | str, sigma: float = 0.002, control: float = 1.0) -> Contest:
    theirs = Entry(absent=other) if isinstance(other, str) else Entry(seconds=noisy(other, 1, sigma))
    entries = {"triton": Entry(seconds=noisy(1.0, 0)), "sdpa-math": theirs}
    return Contest(
        problem=PROBLEM.id, step=FORWARD, measure="device", flops=1.0, entries=entries,
        control=noisy(control, 2),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("of", "verdict"),
    [
        (held(2.5), SLOWER),
        (held(3.0), SAME),
        (held(4.0), FASTER),
        (held(3.2, sigma=0.3), CANNOT_TELL),
        (held(4.0, control=1.3), CANNOT_TELL),
    ],
)
def test_a_gate_is_judged_by_its_ratio(of: Contest, verdict: str) -> None:
    gate = gates.gate(GATES[0], of, "triton")
    assert gate.verdict == verdict and gate.least == 3 and gate.pairs == ROUNDS
    assert gate.low < gate.ratio < gate.high
    assert (gate.name, gate.problem, gate.step) == (GATES[0].name, PROBLEM.id, FORWARD)
    assert (gate.subject, gate.other) == ("triton", "sdpa-math")


def test_there_is_no_gate_without_both_figures() -> None:
    with pytest.raises(ValueError, match="sdpa-math is absent: wrong: out is off"):
        gates.gate(GATES[0], held("wrong: out is off"), "triton")
    with pytest.raises(ValueError, match="sdpa-math is absent: not enough memory"):
        gates.gate(GATES[0], held(NO_MEMORY), "sdpa-math")


class Quiet:
    """A bench of one whose calls take what they say, and a little chance.

    Attributes:
        problems: that it was asked for.
        timed: how many calls were.
    """

    def __init__(self, backward: bool = True, absent: str = "") -> None:
        self.subject = SimpleNamespace(name="mine", claims=Claims(backward=backward))
        self.timer = self
        self.absent = absent
        self.problems: list[Problem] = []
        self.timed = 0
        self._rng = random.Random(0)
        self._taken = 0.0

    @contextmanager
    def on(self, problem: Problem, names: Sequence[str]) -> Iterator[Any]:
        assert list(names) == ["mine"]
        self.problems.append(problem)
        # entered around calls by who cares
        calls = SimpleNamespace(step=self._step, of=SimpleNamespace(chosen=self._nothing))
        yield SimpleNamespace(calls={"mine": self.absent or calls})

    @contextmanager
    def _nothing(self) -> Iterator[None]:
        yield

    def _step(self, step: str) -> Callable[[], None]:
        return functools.partial(self.sleep, {FORWARD: 1.0, BACKWARD: 2.5}[step])

    def sleep(self, seconds: float) -> None:
        self._taken += seconds

    def device(self, call: Callable[[], Any]) -> float:
        self._taken = 0.0
        self.timed += 1
        call()
        return self._taken * self._rng.lognormvariate(0, 0.002)


@pytest.mark.parametrize(
    ("backward", "comparisons", "slowed"), [(True, 10, 12), (True, 12, 12), (True, 1, 4), (False, 5, 6)]
)
def test_noise_is_of_so_many_comparisons_and_what_is_slower_is_found(
    backward: bool, comparisons: int, slowed: int
) -> None:
    made: Any = Quiet(backward)
    problems = [PROBLEM, Problem(1, 2, 2, 64, 16)]
    found = gates.noise(made, comparisons, problems)
    assert found.comparisons == comparisons and found.verdicts == {SAME: comparisons}
    assert len(found.ratios) == comparisons and found.ratios == sorted(found.ratios)
    assert all(abs(ratio - 1) < 0.01 for ratio in found.ratios)
    assert (found.delay, found.slowed, found.found) == (DELAY, slowed, slowed)
    assert made.problems == problems
    steps = 2 * len(problems) if backward else len(problems)
    assert made.timed == 3 * steps + 4 * PAIRS * slowed


def test_what_is_not_slowed_is_not_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gates, "DELAY", 0.0)
    made: Any = Quiet()
    found = gates.noise(made, 4, [PROBLEM])
    assert (found.slowed, found.found) == (4, 0)


def test_the_noise_of_who_is_absent_is_none() -> None:
    made: Any = Quiet(absent=NO_MEMORY)
    with pytest.raises(ValueError, match=f"mine is absent on {PROBLEM.id}: not enough memory"):
        gates.noise(made, 4, [PROBLEM])


def test_false_are_the_verdicts_that_tell_a_difference() -> None:
    verdicts = {FASTER: 2, SAME: 100, SLOWER: 3, CANNOT_TELL: 5}
    of = Noise(comparisons=110, verdicts=verdicts, ratios=[], delay=DELAY, slowed=0, found=0)
    assert false_verdicts(of) == 5


# ---------------------------------------------------------------- known by their kernels

GEMM = "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x64x8_stage3_warpsize2x2x1_ffma_aligna4_alignc4"
SOFTMAX = "void (anonymous namespace)::softmax_warp_{}<float, float, float, 10, false, false>(float*, float"
CUDNN = "cudnn_generated_fort_native_sdpa_sm90_flash_{}_wgmma_f16_knob_{}_64x128x64_4x1x1_cga1x1x1_kernel0_0"

SEEN: dict[str, tuple[list[str], list[str]]] = {
    "triton": (
        ["attention_forward"], ["attention_backward_dkdv", "attention_backward_dq", "attention_delta"],
    ),
    "sdpa-math": (
        [GEMM, SOFTMAX.format("forward"), "void at::native::vectorized_elementwise_kernel<4, at::native"],
        [GEMM, SOFTMAX.format("backward")],
    ),
    "sdpa-flash": (
        ["void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false"],
        [
            "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64",
            "void pytorch_flash::flash_bwd_dot_do_o_kernel<true, Flash_bwd_kernel_traits<64, 128, 128, 8",
        ],
    ),
    "sdpa-efficient": (
        ["fmha_cutlassF_f16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::half_t"],
        ["fmha_cutlassB_f16_aligned_64x64_k64_seqaligned_sm80(PyTorchMemEffAttention::AttentionBackward"],
    ),
    "sdpa-cudnn": ([CUDNN.format("fprop", 7)], [CUDNN.format("bprop", 26)]),
    "flex": (["triton_tem_fused_flex_attention_0"], ["triton_tem_fused_flex_attention_backward_1"]),
}  # fmt: skip
"""Names of kernels on an H200, by contender: of the forward and of the backward."""

ALSO = {
    "flash-attn-4": {"sdpa-flash"},  # of a package: it runs nothing of PyTorch's
    "xformers": {"sdpa-flash", "sdpa-efficient"},  # which has the kernels of both
}


@pytest.mark.parametrize("ran", SEEN)
@pytest.mark.parametrize("name", KERNELS)
def test_a_contender_is_known_by_its_kernels_and_by_nobody_elses(name: str, ran: str) -> None:
    known = name == ran or ran in ALSO.get(name, ())
    forward, backward = SEEN[ran]
    of = KERNELS[name]
    assert (of.missing(FORWARD, forward) == "") == known
    if BACKWARD in of.needed:
        assert (of.missing(BACKWARD, backward) == "") == known
        assert not known or of.missing(BACKWARD, forward) or name == "flex"


@pytest.mark.parametrize(
    ("name", "step", "ran", "why"),
    [
        ("sdpa-flash", FORWARD, SEEN["sdpa-math"][0], "no kernel like 'flash_fwd' ran"),
        ("flex", FORWARD, SEEN["sdpa-math"][0], "no kernel like '^triton_tem_fused' ran"),
        ("flex", FORWARD, [*SEEN["flex"][0], GEMM], f"a kernel of something else ran: {GEMM[:80]}"),
        (
            "sdpa-math",
            FORWARD,
            [*SEEN["sdpa-math"][0], *SEEN["flex"][0]],
            "a kernel of something else ran: tri",
        ),
        ("triton", BACKWARD, SEEN["triton"][1][1:], "no kernel like '^attention_backward_dkdv' ran"),
        ("triton", FORWARD, [], "no kernel like '^attention_forward' ran"),
        ("triton", FORWARD, ["flash_attention_forward"], "no kernel like '^attention_forward' ran"),
    ],
)
def test_what_is_missing_or_too_much_is_named(name: str, step: str, ran: list[str], why: str) -> None:
    assert KERNELS[name].missing(step, ran).startswith(why)


# ---------------------------------------------------------------- who there is


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has: Hopper by its number, on which nothing runs."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delenv("TRITON_OVERRIDE_ARCH", raising=False)


def test_a_manifest_names_the_contender_and_what_it_claims(tmp_path: Path, no_gpu: None) -> None:
    (tmp_path / "mine.py").write_text("def f(q, k, v, *, causal, scale, return_lse): return causal, scale\n")
    manifest = tmp_path / "m.toml"
    manifest.write_text('impl = "mine.py:f"\nname = "my attention"\nmasks = ["causal"]\nbackward = true\n')
    found = contender(None, str(manifest))
    assert (found.name, found.path) == ("my attention", "sm90")
    assert found.claims.backward and found.kernels.missing(FORWARD, ["whatever"]) == ""
    assert found.refusal(PROBLEM) == ""
    assert found.refusal(Problem(1, 2, 2, 33, 16, causal=False)) == "calls without a mask"
    assert found.prepare(PROBLEM, tensors(PROBLEM, device="cpu"))() == (True, None)


@pytest.mark.parametrize("name", ["nonsense", "nowhere.py:f", "os.path:join"])
def test_who_is_nobody_is_refused(name: str, no_gpu: None) -> None:
    with pytest.raises(ImplementationError, match=f"--impl is '{name}'"):
        contender(name)


def test_who_is_not_installed_or_cannot_run_here_is_absent(
    no_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = importlib.util.find_spec
    there = {"flash_attn": None, "xformers": find("json")}
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: there.get(name) or (
        None if name in there else find(name, *of)))  # fmt: skip
    monkeypatch.setitem(sys.modules, "xformers", None)
    for name, why in {
        "flash-attn": "needs the package flash_attn, which is not installed",
        "flash-attn-4": "needs the package flash_attn, which is not installed",
        "xformers": "needs xformers.ops, and importing it failed: ModuleNotFoundError",
        "sdpa-cudnn": "needs a GPU",
        "flex": "needs a GPU",
    }.items():
        with pytest.raises(AbsentError, match=why):
            contender(name)


def test_naive_attention_is_what_runs_if_it_is_chosen(no_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    found, usual = contender("sdpa-math"), contender("sdpa")
    assert (found.name, usual.name, usual.kernels.needed) == ("sdpa-math", "sdpa", {})
    for one, others in ((found, False), (usual, True)):
        with one.chosen():
            assert torch.backends.cuda.math_sdp_enabled()
            assert torch.backends.cuda.flash_sdp_enabled() == others
    grouped = Problem(2, 4, 2, 40, 32)
    x = tensors(grouped, device="cpu")
    assert found.refusal(grouped) == "" and found.prepare(grouped, x)().shape == x.q.shape
    monkeypatch.setattr(problems, "drawn", lambda kind: (5, 33, 1, 12))
    ragged = Problem(4, 4, 2, 51, 16, kind="lognormal")
    with pytest.raises(AbsentError, match="it takes no ragged batches"):
        found.prepare(ragged, tensors(ragged, device="cpu"))


# ---------------------------------------------------------------- the machine


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Sets what nvidia-smi says: the processes, and its version; an error is raised."""

    def says(*pids: object, version: str = "570.1", error: Exception | None = None) -> None:
        def run(command: list[str], **_: Any) -> Any:
            assert command[:3] == ["nvidia-smi", "-i", "GPU-1234"] and command[-1] == "--format=csv,noheader"
            if error:
                raise error
            lines = {"--query-compute-apps=pid": pids, "--query-gpu=driver_version": [version]}[command[3]]
            return SimpleNamespace(stdout="".join(f"{line} \n" for line in lines))

        monkeypatch.setattr(subprocess, "run", run)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA X")
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda of: SimpleNamespace(uuid="1234"))

    return says


OWN = os.getpid()


@pytest.mark.parametrize(
    ("pids", "others"),
    [
        ([], 0),
        ([OWN], 0),
        ([OWN, OWN], 0),
        ([OWN, OWN + 1], 1),
        ([OWN + 1, OWN, OWN + 2], 2),
        ([OWN + 1], 0),  # this one, by another number
        ([OWN + 1, OWN + 2, OWN + 3], 2),
        (["[N/A]", OWN], 0),
    ],
)
def test_others_on_the_gpu_are_counted(pids: list[object], others: int, driver: Callable[..., None]) -> None:
    driver(*pids)
    said = f"processes of others are on this GPU: {others}" if others else ""
    assert machine.others_busy() == said
    found = machine.described("mine", "sm90", ["-k", "gate"], 1.26)
    assert (found.implementation, found.path, found.arguments, found.seconds) == (
        "mine", "sm90", ["-k", "gate"], 1.3,
    )  # fmt: skip
    assert (found.device, found.driver, found.others_busy) == ("NVIDIA X", "570.1", said)


@pytest.mark.parametrize("error", [FileNotFoundError(), subprocess.TimeoutExpired("nvidia-smi", 20)])
def test_without_an_answer_nothing_is_claimed(error: Exception, driver: Callable[..., None]) -> None:
    driver(1, 2, 3, error=error)
    found = machine.described("mine", "sm90", [])
    assert found.others_busy == found.driver == ""
