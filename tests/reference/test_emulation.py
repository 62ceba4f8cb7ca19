"""The emulation against the definition (exact), and against rounding done by hand (rounded)."""

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from reference import emulation
from reference.emulation import Result, Tiles

attention: Any = emulation.attention  # untyped: a test knows which gradients are None
NAMES = Result._fields
INF = math.inf
LONG = (40, 40)  # lengths that span several tiles of every size below, the last one partial
DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@dataclass(frozen=True)
class Case:
    id: str
    heads: tuple[int, int] = (1, 1)
    lengths: tuple[int, int] = LONG
    dims: tuple[int, int] = (16, 16)
    batch: int = 2
    causal: bool = False
    scale: float | None = None
    d_out: bool = True
    d_lse: bool = True
    dtype: torch.dtype = torch.float32

    def tensors(self, seed: int = 0) -> list[Any]:
        """q, k, v, d_out, d_lse."""
        random = torch.Generator().manual_seed(seed)
        (Hq, Hkv), (Sq, Sk), (D, Dv) = self.heads, self.lengths, self.dims

        def normal(*shape, dtype=self.dtype):
            return torch.randn(self.batch, *shape, generator=random).to(dtype)

        q, k, v = normal(Hq, Sq, D), normal(Hkv, Sk, D), normal(Hkv, Sk, Dv)
        d_out = normal(Hq, Sq, Dv) if self.d_out else None
        d_lse = normal(Hq, Sq, dtype=torch.float32) if self.d_lse else None
        return [q, k, v, d_out, d_lse]

    @property
    def options(self) -> dict:
        return {"causal": self.causal, "scale": self.scale}


def every_pass(BM: int, BN: int) -> Tiles:
    return Tiles((BM, BN), (BM, BN), (BM, BN))


TILES = [
    pytest.param(every_pass(16, 16), id="tiles 16x16"),
    pytest.param(every_pass(64, 32), id="tiles 64x32"),
    pytest.param(every_pass(7, 5), id="tiles 7x5"),
    pytest.param(Tiles((5, 16), (16, 7), (7, 32)), id="tiles differ by pass"),
]


class Plain(NamedTuple):
    """The definition, in float64, and two of its intermediates."""

    result: Any  # a Result that has its gradients
    P: torch.Tensor  # (B, Hq, Sq, Sk), normalised
    dS: torch.Tensor  # (B, Hq, Sq, Sk), of scale * q k^T


def plain(q, k, v, d_out, d_lse, causal=False, scale=None) -> Plain:
    """Softmax attention in float64 and its gradients by autograd."""
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    Sq, Sk, G = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    pairs = [[not causal or j <= i + Sk - Sq for j in range(Sk)] for i in range(Sq)]
    sees = torch.tensor(pairs, dtype=torch.bool).view(Sq, Sk)
    live = sees.any(-1)

    S = scale * q @ k.repeat_interleave(G, 1).mT
    S = S[:, :, live].masked_fill(~sees[live], -INF)
    P = torch.zeros(*q.shape[:3], Sk, dtype=torch.float64)
    lse = torch.full(q.shape[:3], -INF, dtype=torch.float64)
    P[:, :, live] = S.softmax(-1)
    lse[:, :, live] = S.logsumexp(-1)
    out = P @ v.repeat_interleave(G, 1)

    d_out = torch.zeros_like(out) if d_out is None else d_out.double()
    d_lse = torch.zeros_like(lse) if d_lse is None else d_lse.double()
    dq, dk, dv, dS = torch.autograd.grad(
        [out, lse], [q, k, v, S], [d_out, d_lse], allow_unused=True, materialize_grads=True
    )
    all_dS = torch.zeros_like(P)
    all_dS[:, :, live] = dS
    return Plain(Result(out.detach(), lse.detach(), dq, dk, dv), P.detach(), all_dS)


def assert_close(name, actual, expected, relative):
    """Close relative to the largest finite magnitude of the tensor; what is not finite is equal."""
    finite = expected.isfinite()
    assert actual.shape == expected.shape, name
    assert torch.equal(actual[~finite].double(), expected[~finite].double()), name
    if finite.any():
        error = (actual - expected)[finite].abs().max()
        assert error <= relative * expected[finite].abs().max(), f"{name}: {error}"


EXACT = [
    Case("dense"),
    Case("causal", causal=True),
    Case("one query", lengths=(1, 40)),
    Case("one query causal", lengths=(1, 40), causal=True),
    Case("float16 in", causal=True, dtype=torch.float16),
    Case("bfloat16 in", causal=True, dtype=torch.bfloat16),
    # Lengths that differ; the third has a tile with both dead and live rows, then dead tiles.
    Case("more keys", lengths=(33, 71)),
    Case("more keys causal", lengths=(33, 71), causal=True),
    Case("more queries", lengths=(71, 33)),
    Case("dead rows", lengths=(71, 33), causal=True),
    Case("dead but one", lengths=(40, 1), causal=True),
    # Heads and head dimensions
    Case("grouped", heads=(6, 2), lengths=(33, 40)),
    Case("grouped causal", heads=(6, 2), lengths=(33, 40), causal=True),
    Case("grouped dead rows", heads=(4, 1), lengths=(40, 19), causal=True),
    Case("wider v", dims=(8, 24), heads=(4, 2), causal=True),
    Case("narrower v", dims=(24, 1), heads=(4, 2), causal=True),
    # Which gradients come in
    Case("d_out alone", causal=True, d_lse=False),
    Case("d_lse alone", causal=True, d_out=False),
    Case("no gradients", causal=True, d_out=False, d_lse=False),
    # Scale
    Case("scale 0", scale=0.0, heads=(2, 1)),
    Case("scale 0 causal", scale=0.0, lengths=(40, 33), causal=True),
    Case("scale negative", scale=-0.4),
    Case("scale negative causal", scale=-0.4, heads=(2, 1), lengths=(40, 33), causal=True),
    Case("scale large", scale=40.0, causal=True),
    # Nothing to do
    *(
        Case(f"{name}{' causal' * causal}", lengths=lengths, batch=batch, causal=causal, heads=(4, 2))
        for causal in (False, True)
        for name, lengths, batch in [
            ("no queries", (0, 20), 2),
            ("no keys", (20, 0), 2),
            ("no queries, no keys", (0, 0), 2),
            ("no batch", (20, 20), 0),
        ]
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("case", EXACT, ids=lambda case: case.id)
def test_exact_is_the_definition(case, tiles, device):
    inputs = case.tensors()
    on_device: list[Any] = [None if x is None else x.to(device) for x in inputs]

    expected = plain(*inputs, **case.options).result
    actual = attention(*on_device, **case.options, tiles=tiles, exact=True)

    for name, a, e in zip(NAMES, actual, expected, strict=True):
        if a is None:
            assert name in ("dq", "dk", "dv") and not case.d_out and not case.d_lse
            continue
        assert a.dtype == torch.float64 and a.is_contiguous() and a.device == on_device[0].device
        assert_close(name, a.cpu(), e, 1e-12)


ROUNDED = [
    Case("dense", heads=(2, 2)),
    Case("grouped causal", heads=(4, 2), lengths=(50, 67), causal=True),
    Case("dead rows, scale negative", lengths=(67, 50), causal=True, scale=-0.3),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tiles", TILES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", ROUNDED, ids=lambda case: case.id)
def test_rounded_is_within_what_rounding_P_dS_and_O_can_do(case, dtype, tiles, device):
    inputs = [x.to(dtype) for x in case.tensors()[:4]] + [case.tensors()[4]]
    q, k, v, d_out, _ = (x.double() for x in inputs)
    G = q.shape[1] // k.shape[1]
    scale = abs(case.scale or q.shape[-1] ** -0.5)
    u = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8, torch.float32: 0.0}[dtype]
    u += 2**-19  # for the float32 sums
    tiny = {torch.float16: 2.0**-25, torch.bfloat16: 0.0, torch.float32: 0.0}[dtype]

    expected, P, dS = plain(*inputs, **case.options)
    actual = attention(*(x.to(device) for x in inputs), **case.options, tiles=tiles)

    # |error| <= bound: P and dS each off by half a step, Delta by what O is off.
    K, V = (x.abs().repeat_interleave(G, 1) for x in (k, v))
    e_P, e_out = u * P + tiny, (u * P + tiny) @ V
    e_delta = (d_out.abs() * (e_out + u * expected.out.abs())).sum(-1, keepdim=True)
    e_dS = u * dS.abs() + tiny + P * (e_delta + u)
    bounds = {
        "out": e_out,
        "lse": torch.full_like(expected.lse, 1e-5),  # nothing that enters it is rounded
        "dq": scale * e_dS @ K,
        "dk": scale * (e_dS.mT @ q.abs()).unflatten(1, (-1, G)).sum(2),
        "dv": (e_P.mT @ d_out.abs()).unflatten(1, (-1, G)).sum(2),
    }
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert a.dtype == torch.float32 and a.is_contiguous()
        finite = e.isfinite()
        error = (a.cpu() - e).abs()[finite]
        assert torch.equal(a.cpu()[~finite].double(), e[~finite]), name
        assert (error <= bounds[name][finite]).all(), name
        if dtype != torch.float32 and name != "lse":  # and rounding does show
            assert error.max() >= 0.01 * bounds[name][finite].max(), name


def test_the_choice_of_tiles_shows_in_the_rounding_alone():
    inputs = Case("", causal=True, dtype=torch.bfloat16).tensors()
    small = attention(*inputs, causal=True, tiles=every_pass(16, 16))
    large = attention(*inputs, causal=True, tiles=every_pass(64, 64))
    assert not torch.equal(small.out, large.out)  # the running maximum differs, hence P's mantissa
    for name, s, x in zip(NAMES, small, large, strict=True):
        assert_close(name, s, x, 1e-5 if name == "lse" else 2**-7)


def test_each_pass_has_its_own_tiles():
    inputs = Case("", causal=True).tensors()
    usual = attention(*inputs, causal=True, tiles=every_pass(16, 16))
    changes = {
        Tiles((16, 16), (7, 5), (16, 16)): {"dk", "dv"},
        Tiles((16, 16), (16, 16), (7, 5)): {"dq"},
    }
    for tiles, changed in changes.items():
        other = attention(*inputs, causal=True, tiles=tiles)
        pairs = zip(NAMES, usual, other, strict=True)
        assert {name for name, u, o in pairs if not torch.equal(u, o)} == changed


def test_a_hidden_score_does_not_enter_the_maximum():
    q, k, v, *_ = Case("", causal=True, dtype=torch.float16).tensors()
    usual = attention(q, k, v, causal=True)
    k[:, :, -1] *= 1000  # only the last query sees it
    other = attention(q, k, v, causal=True)
    assert torch.equal(usual.out[:, :, :-1], other.out[:, :, :-1])
    assert torch.equal(usual.lse[:, :, :-1], other.lse[:, :, :-1])


class TestByHand:
    """One bfloat16 query and two keys with scores 0 and -1, V = (0, 1), dO = 1.

    The step of bfloat16 is 2^-9 in [1/4, 1/2) and 2^-10 in [1/8, 1/4). q = 3 and scale = 1/3 tell
    rounding before the scale from rounding after it.
    """

    l = 1 + math.exp(-1)
    P2 = 188 / 512  # exp(-1) = 188.35 / 512

    def problem(self, k=(0.0, -1.0), v=(0.0, 1.0)):
        def bf16(*values):
            return torch.tensor(values, dtype=torch.bfloat16).view(1, 1, -1, 1)

        return bf16(3.0), bf16(*k), bf16(*v), bf16(1.0)

    def test_P_is_rounded_and_its_sum_is_not(self):
        q, k, v, _ = self.problem()
        out, lse, *_ = attention(q, k, v, scale=1 / 3)
        assert out.item() == pytest.approx(self.P2 / self.l, rel=1e-6)  # exact: 0.2689, 0.2 % more
        assert lse.item() == pytest.approx(math.log(self.l), rel=1e-6)

    def test_P_is_rounded_relative_to_the_running_maximum(self):
        # The first tile's P is 1; what then makes exp(-1) of it is alpha, which is not rounded.
        q, k, v, _ = self.problem(k=(-1.0, 0.0), v=(1.0, 0.0))
        one_tile = attention(q, k, v, scale=1 / 3).out
        two_tiles = attention(q, k, v, scale=1 / 3, tiles=every_pass(1, 1)).out
        assert one_tile.item() == pytest.approx(self.P2 / self.l, rel=1e-6)
        assert two_tiles.item() == pytest.approx(math.exp(-1) / self.l, rel=1e-6)

    def test_backward_rounds_O_P_and_dS(self):
        # O = 0.26843 = 137.4 / 512, so Delta = 137 / 512 and
        # dS = (-0.73106 Delta, 0.26894 (1 - Delta)) = (-200.3, 201.7) / 1024.
        q, k, v, d_out = self.problem()
        r = attention(q, k, v, d_out, scale=1 / 3)
        assert r.dv.flatten().tolist() == [187 / 256, 138 / 512]  # (187.15 / 256, 137.7 / 512)
        assert r.dk.flatten().tolist() == pytest.approx([-200 / 1024, 202 / 1024], rel=1e-6)
        assert r.dq.item() == pytest.approx(-202 / 1024 / 3, rel=1e-6)

    def test_backward_takes_the_output_that_is_given(self):
        # Delta = 1/4: dS = (-187.15, 206.55) / 1024
        q, k, v, d_out = self.problem()
        given = torch.full_like(d_out, 0.25)
        r = attention(q, k, v, d_out, scale=1 / 3, out_given=given)
        assert r.dk.flatten().tolist() == pytest.approx([-187 / 1024, 207 / 1024], rel=1e-6)
        exact = attention(q, k, v, d_out, scale=1 / 3, out_given=given, exact=True)
        dS = [-0.25 / self.l, 0.75 * math.exp(-1) / self.l]
        assert exact.dk.flatten().tolist() == pytest.approx(dS, rel=1e-14)

    def test_heads_of_a_group_add_up_unrounded(self):
        # dk = 2 * -200 / 1024 + -200 / 1024, which needs 10 bits; so does 3 * 202.
        q, k, v, d_out = (x.bfloat16() for x in self.problem())
        q, d_out = (x.expand(1, 3, 1, 1) for x in (q, d_out))
        r = attention(q, k, v, d_out, scale=1 / 3)
        assert r.dk.flatten().tolist() == pytest.approx([-600 / 1024, 606 / 1024], rel=1e-6)

    def test_float32_is_not_rounded(self):
        q, k, v, d_out = (x.float() for x in self.problem())
        rounded = attention(q, k, v, d_out, scale=1 / 3)
        exact = attention(q, k, v, d_out, scale=1 / 3, exact=True)
        for name, r, e in zip(NAMES, rounded, exact, strict=True):
            assert_close(name, r, e, 1e-6)


def test_dS_beyond_float16_is_inf():
    ones = torch.ones(1, 1, 2, 1, dtype=torch.float16)
    v = torch.tensor([0.0, 60000.0], dtype=torch.float16).view(1, 1, 2, 1)
    dk = attention(ones, ones, v, 60000 * ones, scale=1.0).dk
    assert dk.flatten().tolist() == [-INF, INF]
    assert attention(ones, ones, v, 60000 * ones, scale=1.0, exact=True).dk.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_negative_scale_is_that_of_negated_queries(dtype):
    q, k, v, d_out, d_lse = Case("", heads=(2, 1), causal=True, dtype=dtype).tensors()
    minus = attention(q, k, v, d_out, d_lse, causal=True, scale=-0.3, tiles=every_pass(16, 16))
    plus = attention(-q, k, v, d_out, d_lse, causal=True, scale=0.3, tiles=every_pass(16, 16))
    for name, m, p in zip(NAMES, minus, plus, strict=True):
        assert torch.equal(m, -p if name == "dq" else p), name


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_missing_gradient_is_zero(dtype):
    q, k, v, d_out, d_lse = Case("", causal=True, dtype=dtype).tensors()
    pairs = [
        (attention(q, k, v, d_out), attention(q, k, v, d_out, torch.zeros_like(d_lse))),
        (attention(q, k, v, None, d_lse), attention(q, k, v, torch.zeros_like(d_out), d_lse)),
    ]
    for missing, zero in pairs:
        for name, m, z in zip(NAMES, missing, zero, strict=True):
            assert torch.equal(m, z), name


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_strides_do_not_matter_and_inputs_stay(dtype):
    inputs = Case("", heads=(4, 2), causal=True, dtype=dtype).tensors()
    copies = [x.clone() for x in inputs]
    expected = attention(*inputs, causal=True, tiles=every_pass(16, 16))
    transposed = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in inputs]
    assert not transposed[0].is_contiguous()
    actual = attention(*transposed, causal=True, tiles=every_pass(16, 16))
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(a, e) and a.is_contiguous(), name
    for name, x, copy in zip(("q", "k", "v", "d_out", "d_lse"), inputs, copies, strict=True):
        assert torch.equal(x, copy), name


def test_inputs_that_require_grad_leave_no_graph():
    q, k, v, d_out, d_lse = Case("").tensors()
    result = attention(q.requires_grad_(), k, v, d_out, d_lse)
    assert not any(x.requires_grad for x in result)


@pytest.mark.parametrize("exact", [False, True], ids=["rounded", "exact"])
def test_nothing_of_a_dead_row_reaches_a_result(exact):
    case = Case("", lengths=(40, 33), causal=True)  # rows 0 to 6 are dead, in a tile with live ones
    inputs = case.tensors()
    expected = attention(*inputs, causal=True, exact=exact)
    q, _, _, d_out, d_lse = inputs
    for x in (q, d_out, d_lse):
        x[:, :, :7] = math.nan
    actual = attention(*inputs, causal=True, exact=exact)
    assert actual.lse[:, :, :7].eq(-INF).all() and not actual.out[:, :, :7].any()
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(a, e), name


def test_a_visible_nan_makes_nan_of_every_row_that_sees_it():
    case = Case("", causal=True, dtype=torch.float16)
    for position, operand in enumerate("qkv"):
        inputs = case.tensors()
        inputs[position][:, :, 20, 3] = math.nan
        r = attention(*inputs, causal=True, tiles=every_pass(16, 16))
        sees = slice(20, 21) if operand == "q" else slice(20, None)
        assert r.out[:, :, sees, 3].isnan().all(), operand
        assert r.dq[:, :, sees].isnan().all(), operand
        assert r.out[:, :, :16].isfinite().all(), operand  # an earlier tile, which does not see it
        if operand != "v":
            assert r.lse[:, :, sees].isnan().all()


def test_scores_of_minus_infinity_come_and_go():
    # q k = -2^128 overflows to -inf in float32; the tile after it holds an ordinary score.
    q = torch.full((1, 1, 1, 1), 2.0**64)
    k = torch.tensor([-(2.0**64), 0.0]).view(1, 1, 2, 1)
    v = torch.tensor([5.0, 7.0]).view(1, 1, 2, 1)
    r = attention(q, k, v, scale=1.0, tiles=every_pass(1, 1))
    assert r.out.item() == 7 and r.lse.item() == 0


class PrecisionOfProducts(TorchDispatchMode):
    """Records under which float32 precision every product runs."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "mm" in op.__name__:
            self.seen.add(self.now())
        return op(*args, **(kwargs or {}))

    @staticmethod
    def now() -> tuple[str, str]:
        cpu = torch.backends.mkldnn.matmul  # type: ignore[attr-defined]
        return torch.backends.cuda.matmul.fp32_precision, cpu.fp32_precision


@pytest.mark.parametrize("device", DEVICES)
def test_products_are_ieee_whatever_the_process_allows(device):
    inputs = [x.to(device) for x in Case("", lengths=(128, 128), dims=(64, 64)).tensors()]
    expected = attention(*inputs)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with PrecisionOfProducts() as products:
            actual = attention(*inputs)
        assert products.seen == {("ieee", "ieee")}
        assert products.now() == ("tf32", "bf16")  # as the process had it
    finally:
        torch.set_float32_matmul_precision(before)
    for name, a, e in zip(NAMES, actual, expected, strict=True):
        assert torch.equal(a, e), name


Q, K, V = torch.zeros(2, 4, 5, 8), torch.zeros(2, 2, 6, 8), torch.zeros(2, 2, 6, 3)
D_OUT, D_LSE = torch.zeros(2, 4, 5, 3), torch.zeros(2, 4, 5)
GOOD = {"q": Q, "k": K, "v": V, "d_out": D_OUT, "d_lse": D_LSE, "out_given": D_OUT}


@pytest.mark.parametrize(
    ("name", "value", "error", "told"),
    [
        ("q", Q.numpy(), TypeError, "ndarray"),
        ("q", Q.double(), TypeError, "float64"),
        ("q", Q[0], ValueError, r"\(4, 5, 8\)"),
        ("q", Q[:, :3], ValueError, "divisor of the 3 heads"),
        ("k", K.half(), TypeError, "float16.*float32"),
        ("k", K[0], ValueError, r"\(2, 6, 8\)"),
        ("k", K[:1], ValueError, r"\(1, 2, 6, 8\).*\(2, Hkv, Sk, 8\)"),
        ("k", K[..., :7], ValueError, r"\(2, 2, 6, 7\).*\(2, Hkv, Sk, 8\)"),
        ("k", K.to("meta"), ValueError, "meta.*cpu"),
        ("v", V.bfloat16(), TypeError, "bfloat16"),
        ("v", V[:, :, :5], ValueError, r"\(2, 2, 5, 3\).*\(2, 2, 6, Dv\)"),
        ("v", V[:, :1], ValueError, r"\(2, 1, 6, 3\).*\(2, 2, 6, Dv\)"),
        ("d_out", D_OUT.half(), TypeError, "float16"),
        ("d_out", D_OUT[..., :2], ValueError, r"\(2, 4, 5, 2\).*\(2, 4, 5, 3\)"),
        ("d_lse", D_LSE.half(), TypeError, "float16.*float32"),
        ("d_lse", D_LSE[..., None], ValueError, r"\(2, 4, 5, 1\).*\(2, 4, 5\)"),
        ("out_given", D_OUT.half(), TypeError, "float16"),
        ("out_given", D_OUT[:, :2], ValueError, r"\(2, 2, 5, 3\).*\(2, 4, 5, 3\)"),
        ("scale", "1", TypeError, "'1'"),
        ("scale", math.nan, ValueError, "nan"),
        ("scale", INF, ValueError, "inf"),
    ],
)
def test_bad_input_is_refused_by_name(name, value, error, told):
    attention(**GOOD)
    with pytest.raises(error, match=told) as refusal:
        attention(**{**GOOD, name: value})
    assert name in str(refusal.value) and "may" in str(refusal.value)


def test_a_head_dimension_of_0_is_refused():
    with pytest.raises(ValueError, match="q: its head dimension was 0, may be 1 or more"):
        attention(Q[..., :0], K[..., :0], V)


@pytest.mark.parametrize("tile", [(0, 16), (16, -1), (16,), (16, 1.5)], ids=str)
def test_bad_tiles_are_refused(tile):
    with pytest.raises(ValueError, match="tiles: dkdv was"):
        Tiles(dkdv=tile)
