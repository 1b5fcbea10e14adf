"""numerics_report measures the operands that the layer multiplies, and predicts the error of the products in dB."""

import doctest
from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.distributed as dist
from mxep import jax_frontend as mxep_jax
from mxep import torch_frontend as mxep_torch
from mxep.core_kernels import oracle_math
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.formats import BLOCK, WEIGHT_HEADROOM
from mxep.core_kernels.policy.numerics import OPERANDS, Measured, NumericsReport, measure
from mxep.core_kernels.quantize import oracle as quantize_oracle
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from ..layer_options import layer_options

Array = np.ndarray
Params = dict[str, Array]


def make_layer(dim: int, hidden: int, experts: int, tokens: int, hot: int = 0) -> tuple[Params, Array, Array]:
    """Parameters, x and dout. 32 channels of x are scaled by 2^hot, and their weights by 2^-hot to compensate."""
    rng = np.random.default_rng(7)
    shapes = {"router": (experts, dim), "w1": (experts, hidden, dim), "w3": (experts, hidden, dim)}
    shapes["w2"] = (experts, dim, hidden)
    params = {name: rng.standard_normal(shape, np.float32) * shape[-1] ** -0.5 for name, shape in shapes.items()}
    x, dout = rng.standard_normal((2, tokens, dim), np.float32)
    x[:, :BLOCK] *= np.float32(2) ** hot
    for name in ("router", "w1", "w3"):
        params[name][..., :BLOCK] *= np.float32(2) ** -hot
    return params, x, dout


def torch_layer(params: Params, top_k: int, **options) -> mxep_torch.MoE:
    experts, hidden, dim = params["w1"].shape
    moe = mxep_torch.MoE(dim, hidden, experts, **layer_options(top_k, **options))
    with torch.no_grad():
        moe.router.weight.copy_(torch.from_numpy(params["router"]))
        for name in ("w1", "w3", "w2"):
            getattr(moe.experts, name).copy_(torch.from_numpy(params[name]))
    return moe


def torch_report(params: Params, x: Array, dout: Array, top_k: int, **options) -> NumericsReport:
    return mxep_torch.numerics_report(torch_layer(params, top_k, **options), *map(torch.from_numpy, (x, dout)))


def jax_report(params: Params, x: Array, dout: Array, top_k: int, **options) -> NumericsReport:
    experts, hidden, dim = params["w1"].shape
    config = mxep_jax.MoEConfig(dim, hidden, experts, **layer_options(top_k, **options))
    tree = {"router": jnp.asarray(params["router"]), "experts": {n: jnp.asarray(params[n]) for n in ("w1", "w3", "w2")}}
    return mxep_jax.numerics_report(tree, jnp.asarray(x), config, jnp.asarray(dout))


FRONTENDS = {"torch": torch_report, "jax": jax_report}
both_frontends = pytest.mark.parametrize("report", FRONTENDS.values(), ids=FRONTENDS)


def sqnr(got: Array, want: Array) -> float:
    return float(10 * np.log10(np.sum(want**2) / np.sum((got - want) ** 2)))


def folded_rows(q: Array, sf: Array, headroom: int = 0) -> Array:
    qf, row_sf = fold_oracle.fold_rows(q, sf, headroom)
    return oracle_math.E4M3_VALUES[qf] * oracle_math.e8m0_value(row_sf)[..., None]


def counts(values: Array, folded: Array) -> tuple[int, int, int]:
    """Values that are not zero; how many of these the fold changes, and how many it makes zero."""
    nonzero = np.abs(values) > 0
    flushed = nonzero & (folded == 0)
    return int(nonzero.sum()), int((nonzero & (folded != values) & ~flushed).sum()), int(flushed.sum())


# SQNR of x w1^T with both operands folded, K = 1024, per value of hot: 50.0, 34.4, 20.5, 9.6 and 0.9 dB.
# SQNR against full precision: 28.4 dB without folding, and 28.4, 27.4, 19.8, 9.5 and 0.8 dB with it.
# The predicted values are within 0.11 dB of the measured ones; the test allows 0.5 dB.
@both_frontends
@pytest.mark.parametrize("hot", [10, 12, 18])
def test_the_report_predicts_the_loss_of_a_folded_product(report: Callable, hot: int) -> None:
    params, x, dout = make_layer(1024, 64, 1, 128, hot)
    found = report(params, x, dout, 1)
    operands = [quantize_oracle.quantize_row(t) for t in (x.astype(oracle_math.DTYPES["bfloat16"]), params["w1"][0])]
    a, b = (quantize_oracle.dequantize64(*pair) for pair in operands)
    a_folded, b_folded = folded_rows(*operands[0]), folded_rows(*operands[1], WEIGHT_HEADROOM)
    losses = found.operands["x"], found.operands["w1"]
    predicted = -10 * np.log10(sum(10 ** (-loss.product_db / 10) for loss in losses))
    assert abs(predicted - sqnr(a_folded @ b_folded.T, a @ b.T)) < 0.5
    # The report lists x as lossy if and only if folding costs more than 0.3 dB against full precision.
    full = x.astype(np.float64) @ params["w1"][0].astype(np.float64).T
    cost = sqnr(a @ b.T, full) - sqnr(a_folded @ b_folded.T, full)
    assert ("x" in found.lossy()) == (cost > 0.3), cost
    # Weights, whose rows have a headroom, lose as much as x where x begins to be lossy.
    assert found.worst() == "x" or hot <= 12
    # The SQNR of the operand itself does not show the loss.
    assert abs(losses[0].sqnr_db - sqnr(a_folded, a)) < 0.01
    assert losses[0].sqnr_db > 90


@both_frontends
@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_wgrad_with_hp"])
def test_the_report_of_one_expert_measures_the_operands_of_the_layer(report: Callable, recipe: str) -> None:
    """One expert takes every token once, in order and with weight 1, so the test can compute the operands itself."""
    params, x, dout = make_layer(64, 96, 1, 320, 12)
    found = report(params, x, dout, 1, recipe=recipe).operands
    assert list(found) == [name for name in OPERANDS if recipe == "mxfp8" or not name.endswith("_t") or name[0] == "w"]
    rounded = {name: t.astype(oracle_math.DTYPES["bfloat16"]) for name, t in (("x", x), ("dout", dout))}
    rows = {**rounded, **{name: params[name][0] for name in ("w1", "w3", "w2")}}
    rows |= {f"{name}_t": params[name][0].T for name in ("w1", "w3", "w2")}
    for name, t in rows.items():
        q, sf = quantize_oracle.quantize_row(np.ascontiguousarray(t))
        headroom = WEIGHT_HEADROOM if name[0] == "w" else 0
        values, folded = quantize_oracle.dequantize64(q, sf), folded_rows(q, sf, headroom)
        assert found[name][1:4] == counts(values, folded), name
        with np.errstate(divide="ignore"):
            assert found[name].sqnr_db == pytest.approx(sqnr(folded, values), 1e-5)
    if recipe == "mxfp8":
        ends = np.int32([320])
        for name, t in rounded.items():
            q, sf = quantize_oracle.quantize_col(quantize_oracle.dequantize(*quantize_oracle.quantize_row(t)))
            qf, span_sf = fold_oracle.fold_groups(q, sf, ends)
            values, folded = quantize_oracle.dequantize64(q, sf), fold_oracle.span_values(qf, span_sf, ends)
            loss = found[f"{name}_t"]
            assert loss[1:4] == counts(values, folded), name
            assert loss.sqnr_db == pytest.approx(sqnr(folded, values), 1e-5)


def test_the_counts_of_every_code_under_every_shift() -> None:
    """NaN, and blocks whose scale or target is NaN, count nowhere; a fold by more than 2^18 flushes every value."""
    q = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    sf = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, 1)
    for target in (0, 100, 254, 255):
        targets = np.maximum(np.uint8(target), np.where(sf == 255, 0, sf)).astype(np.uint8)
        shift = np.repeat(np.where(sf == 255, 0, sf.astype(int) - targets), BLOCK, 1)
        qf = oracle_math.to_e4m3(oracle_math.E4M3_VALUES[q] * np.exp2(shift))
        known = np.repeat((sf < 255) & (targets < 255), BLOCK, 1)
        values, folded = oracle_math.E4M3_VALUES[q], oracle_math.E4M3_VALUES[qf] * np.exp2(-shift)
        of = measure(q, sf, qf, targets, (slice(0, 256),))
        assert of.counts == counts(values[known], folded[known])
        unit = np.exp2(2.0 * np.clip(sf.astype(int) - targets, -60, 0)) * known[:, ::BLOCK]
        for got, want in ((of.signal, values), (of.noise, values - folded)):
            want = np.nan_to_num(want * known) ** 2
            np.testing.assert_allclose(got, want.reshape(256, 8, BLOCK).sum(-1) * unit, rtol=1e-6)


def test_product_db_weights_errors_by_the_energy_of_the_other_operand() -> None:
    """Compared with the definition, for two groups and rows of very different scales; one row is zeros."""
    rng = np.random.default_rng(1)

    def measured(rows: int, groups: tuple[slice, ...]) -> Measured:
        signal = np.exp2(rng.uniform(-20, 10, (rows, 5))).astype(np.float32)
        signal[1] = 0
        size = np.exp2(rng.integers(-60, 1, rows)).astype(np.float32)
        return Measured((0, 0, 0), signal, signal * rng.random((rows, 5), np.float32), size, groups)

    a, b = measured(7, (slice(0, 3), slice(3, 6))), measured(8, (slice(0, 4), slice(4, 8)))
    shares = []
    for rows, columns in zip(a.groups, b.groups, strict=True):
        energy = (b.signal[columns] * b.size[columns, None]).sum(0)
        shares += [(a.noise[i] @ energy) / (a.signal[i] @ energy) for i in range(rows.start, rows.stop) if i != 1]
    assert a.product_db(b) == pytest.approx(-10 * np.log10(np.mean(shares)), abs=1e-4)
    size = a.size[:, None].astype(np.float64)
    assert a.sqnr_db() == pytest.approx(10 * np.log10((a.signal * size).sum() / (a.noise * size).sum()), abs=1e-4)


@pytest.mark.parametrize("prob_in", ["combine", "swiglu", "input"])
def test_the_frontends_report_the_same(prob_in: str) -> None:
    params, x, dout = make_layer(64, 96, 4, 200, 6)
    by_torch, by_jax = (f(params, x, dout, 2, recipe="mxfp8", prob_in=prob_in).operands for f in FRONTENDS.values())
    assert list(by_torch) == list(by_jax) == list(OPERANDS)
    for name, want in by_torch.items():
        got = by_jax[name]
        if name.startswith(("x", "w")):  # the other operands follow GEMMs, whose summation order differs
            assert got[:4] == want[:4], name
        assert got.nonzero == pytest.approx(want.nonzero, rel=1e-3)
        assert got[4:] == pytest.approx(want[4:], abs=0.1), name  # measured: 4e-7


@pytest.mark.parametrize("prob_in", ["combine", "swiglu", "input"])
def test_the_experts_receive_the_reported_rows(prob_in: str) -> None:
    params, x, dout = make_layer(64, 96, 4, 200, 12)
    moe, seen = torch_layer(params, 2, recipe="mxfp8", prob_in=prob_in), {}

    def hook(_, inputs, out):
        seen["x"] = inputs[0]
        out.register_hook(lambda grad: seen.update(dout=grad))

    moe.experts.register_forward_hook(hook)
    y, _ = moe(torch.from_numpy(x).requires_grad_())
    y.backward(torch.from_numpy(dout))
    found = mxep_torch.numerics_report(moe, *map(torch.from_numpy, (x, dout))).operands
    for name, rows in seen.items():
        q, sf = rows.q.numpy(), rows.sf.numpy()
        assert found[name][1:4] == counts(quantize_oracle.dequantize64(q, sf), folded_rows(q, sf)), name


def test_a_report_changes_nothing_and_needs_no_gradient() -> None:
    params, x, _ = make_layer(64, 96, 2, 40)
    moe = torch_layer(params, 1)
    before = {name: p.clone() for name, p in moe.named_parameters()}
    tokens = torch.from_numpy(x).requires_grad_()
    first, again = (mxep_torch.numerics_report(moe, tokens) for _ in range(2))  # the default dout is the same in both
    assert first == again
    assert all(p.grad is None and torch.equal(p, before[name]) for name, p in moe.named_parameters())
    assert tokens.grad is None
    assert mxep_torch.numerics_report(moe, tokens[:0]).lossy() == ()


def test_the_printed_table() -> None:
    params, x, dout = make_layer(64, 96, 1, 64, 16)
    found = torch_report(params, x, dout, 1)
    lines = str(found).splitlines()
    assert [line.split()[0] for line in lines[1:-2]] == list(found.operands)
    assert lines[-2].startswith(f"Folding {found.worst()} leaves ")
    advice = "Use compute='exact' or recipe 'fp8_blockwise': x, w1, w3 below 40 dB, where MXFP8 itself has 27 to 30."
    assert lines[-1] == advice
    tokens = replace(found, operands=found.operands | {"x_t": found.operands["x_t"]._replace(product_db=39.0)})
    assert "'fp8_blockwise' with wgrad_with_hp=True: x, w1, w3, x_t below" in str(tokens)
    assert str(torch_report(*make_layer(64, 96, 1, 64), 1)).endswith(
        "compute='fold' is safe here: MXFP8 itself has 27 to 30 dB."
    )


class Near(doctest.OutputChecker):
    """Compares words exactly, and numbers within 1% or 0.3, because the summation order is free."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        pairs = list(zip_longest(want.replace("%", " %").split(), got.replace("%", " %").split()))
        return all(w == g or (w and g and self._near(w, g)) for w, g in pairs)

    def _near(self, want: str, got: str) -> bool:
        try:
            return float(got) == pytest.approx(float(want), rel=0.01, abs=0.3)
        except ValueError:
            return False


def test_the_page_shows_the_output_of_its_example() -> None:
    page = Path(__file__).parents[2] / "docs" / "concepts" / "fold.md"
    example = doctest.DocTestParser().get_doctest(page.read_text(), {}, page.name, str(page), 0)
    results = doctest.DocTestRunner(Near()).run(example)
    assert results.attempted > 0
    assert results.failed == 0


X = torch.zeros(4, 64)


@pytest.mark.parametrize(
    ("error", "message", "options", "x", "dout"),
    [
        (ValueError, r"moe: got recipe 'bf16'; allowed: 'mxfp8' or", {"recipe": "bf16"}, X, None),
        (ValueError, r"x: got device meta; allowed: cpu", {}, X.to("meta"), None),
        (ValueError, r"dout: got NaN or infinity; allowed: finite values", {}, X, X + float("inf")),
    ],
)
def test_torch_names_a_bad_argument(error, message: str, options: dict, x, dout) -> None:
    with pytest.raises(error, match=f"numerics_report: {message}"):
        mxep_torch.numerics_report(mxep_torch.MoE(64, 96, 2, mxep_torch.RouterConfig(1), **options), x, dout)


def test_torch_rejects_other_modules() -> None:
    with pytest.raises(TypeError, match="numerics_report: moe: got a Linear; allowed: a MoE"):
        mxep_torch.numerics_report(torch.nn.Linear(64, 64), X)  # pyright: ignore[reportArgumentType]


def test_torch_rejects_a_sharded_layer() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        moe, mesh = (
            mxep_torch.MoE(64, 96, 2, mxep_torch.RouterConfig(1)),
            init_device_mesh("cpu", (1,), mesh_dim_names=("ep",)),
        )
        parallelize_module(moe.experts, mesh, mxep_torch.ExpertParallel())
        with pytest.raises(NotImplementedError, match=r"moe: got w1 as a DTensor; .*call it before parallelize_module"):
            mxep_torch.numerics_report(moe, X)
    finally:
        dist.destroy_process_group()


CONFIG = mxep_jax.MoEConfig(64, 96, 1, mxep_jax.RouterConfig(1))
BF16 = mxep_jax.MoEConfig(64, 96, 1, mxep_jax.RouterConfig(1), recipe="bf16")
PARAMS = mxep_jax.moe.init(jax.random.key(0), CONFIG)
XJ = jnp.zeros((4, 64))


@pytest.mark.parametrize(
    ("error", "message", "call"),
    [
        (ValueError, r"config: got recipe 'bf16'", lambda f: f(PARAMS, XJ, BF16)),
        (ValueError, r"x: got shape \(4, 32\); allowed: \(..., 64\)", lambda f: f(PARAMS, XJ[:, :32], CONFIG)),
        (ValueError, r"dout: got shape \(4, 32\); allowed: \(4, 64\)", lambda f: f(PARAMS, XJ, CONFIG, XJ[:, :32])),
        (TypeError, r"x: got dtype int32", lambda f: f(PARAMS, XJ.astype("int32"), CONFIG)),
        (ValueError, r"dout: got NaN or infinity; allowed: finite", lambda f: f(PARAMS, XJ, CONFIG, XJ + jnp.nan)),
        (TypeError, r"config: got a dict; allowed: a MoEConfig", lambda f: f(PARAMS, XJ, {})),
        (NotImplementedError, r"x: got a traced value", lambda f: jax.jit(lambda x: f(PARAMS, x, CONFIG))(XJ)),
        (NotImplementedError, r"params: got a traced value", lambda f: jax.grad(lambda p: f(p, XJ, CONFIG))(PARAMS)),
    ],
)  # fmt: skip
def test_jax_names_a_bad_argument(error, message: str, call: Callable) -> None:
    with pytest.raises(error, match=f"numerics_report: {message}"):
        call(mxep_jax.numerics_report)


def test_jax_accepts_quantized_weights() -> None:
    experts = {name: mxep_jax.quantize_weights(w) for name, w in PARAMS["experts"].items()}
    x = jax.random.normal(jax.random.key(1), (320, 64))
    want = mxep_jax.numerics_report(PARAMS, x, CONFIG)
    assert mxep_jax.numerics_report({**PARAMS, "experts": experts}, x, CONFIG) == want
