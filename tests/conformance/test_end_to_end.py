"""The differentiable functions of both frontends: values and gradients of the grouped product, of permute, of a layer.

The products are judged by the bound of a GEMM, operand by operand: the oracle quantizes what the recipe quantizes.
A whole layer is judged against fp64 in dB, beside the exact checks of its routing.
"""

from importlib import import_module
from types import ModuleType

import numpy as np
import pytest
from mxep.core_kernels import oracle, oracle_layer
from mxep.core_kernels.recipe import RECIPES

from . import check
from .backends import FRONTENDS, dense_layer
from .cases import BF16, GEMMS, MAPS, seeded
from .layers import LAYER_RUNS, LAYERS

Array = np.ndarray
Rows = Array | tuple[Array, Array]


@pytest.fixture(params=FRONTENDS)
def frontend(request: pytest.FixtureRequest) -> ModuleType:
    return import_module(f"{__package__}.backends.{request.param}")


def magnitude(x: Rows) -> Rows:
    """|x|; quantization knows no sign, so the magnitude of a product's operands is the product of magnitudes'."""
    return (x[0] & 0x7F, x[1]) if isinstance(x, tuple) else np.abs(x)


@pytest.mark.parametrize("mx", [False, True], ids=["floats", "mx"])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", GEMMS)
def test_grouped_mm_and_its_gradients(frontend: ModuleType, name: str, recipe: str, mx: bool) -> None:
    """mx: the activations and the gradient arrive quantized, as they do from a dispatch and from a combine."""
    case = GEMMS[name]
    a: Rows = oracle.quantize_row(case.lhs) if mx else case.lhs
    dout: Rows = oracle.quantize_row(case.dout) if mx else case.dout
    b_t = np.swapaxes(case.rhs_t, 1, 2)
    out, da, db = frontend.grouped_mm(a, b_t, case.group_ends, dout, recipe)

    rest = (case.group_ends, recipe, "rceil", "float64")
    terms = (case.lhs.shape[1], b_t.shape[2], case.lhs.shape[0])
    exact = (oracle.mxfp8_grouped_mm(a, b_t, *rest), *oracle.mxfp8_grouped_mm_vjp(dout, a, b_t, *rest))
    a, dout, b_t = magnitude(a), magnitude(dout), np.abs(b_t)
    sizes = (oracle.mxfp8_grouped_mm(a, b_t, *rest), *oracle.mxfp8_grouped_mm_vjp(dout, a, b_t, *rest))
    for got, want, size, k in zip((out, da, db), exact, sizes, terms, strict=True):
        assert got.dtype == BF16
        check.gemm_bound(got, want, size, k)


@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_grouped_mm_uses_the_rounding_it_is_given(frontend: ModuleType, rounding: str) -> None:
    case = GEMMS["normal"]
    b_t = np.swapaxes(case.rhs_t, 1, 2)
    got = frontend.grouped_mm(case.lhs, b_t, case.group_ends, case.dout, "mxfp8", rounding)
    want = (
        oracle.mxfp8_grouped_mm(case.lhs, b_t, case.group_ends, "mxfp8", rounding),
        *oracle.mxfp8_grouped_mm_vjp(case.dout, case.lhs, b_t, case.group_ends, "mxfp8", rounding),
    )
    other = oracle.mxfp8_grouped_mm(case.lhs, b_t, case.group_ends, "mxfp8", {"rceil": "floor"}.get(rounding, "rceil"))
    assert check.sqnr_db(other, want[0]) < 40
    assert all(check.sqnr_db(g, w) > 50 for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("name", [name for name, case in MAPS.items() if not case.rank_rows and not case.slack])
def test_permute_and_unpermute_and_their_gradients(frontend: ModuleType, name: str, dtype: np.dtype) -> None:
    case = MAPS[name]
    row_map, inverse, *_ = oracle.row_map(case.flat, **case.options)
    rng = seeded(name)
    rows, dout = (rng.standard_normal((m, 64)).astype(dtype) for m in (case.num_rows, len(row_map)))
    groups, drows, back, dback = frontend.permute(rows, case.flat, len(case.counts), dout, case.alignment)
    check.same_bytes(groups, oracle.permute_rows(rows, row_map))
    check.same_bytes(drows, oracle.permute_rows_vjp(dout, row_map, case.num_rows))
    check.same_bytes(back, oracle.permute_rows(dout, inverse))
    check.same_bytes(dback, oracle.permute_rows_vjp(rows, inverse, len(row_map)))


# dB from the fp64 layer, in either framework: measured at least 44.8 and 22.7, less 1.5. A router's gradient is a
# difference of products, and with four tokens little averages out: measured at least 43.8 and 16.4, less 1.
LAYER_DB = {"bf16": 43.3, "mxfp8": 21.2, "mxfp8_wgrad_with_hp": 21.2}
ROUTER_DB = {"bf16": 42.8, "mxfp8": 15.4, "mxfp8_wgrad_with_hp": 15.4}
# dB between the frameworks: measured at least 69.6 and 82.6, less 10, since each value on which two fp32 sums round
# to different bf16 costs as much, and how many there are depends on the machine's matmul.
BETWEEN_DB = {"bf16": 59.6, "mxfp8": 72.6, "mxfp8_wgrad_with_hp": 72.6}


@pytest.mark.parametrize("frontend", FRONTENDS)
@pytest.mark.parametrize(("name", "recipe"), LAYER_RUNS)
def test_a_dense_layer_and_its_gradients(frontend: str, name: str, recipe: str) -> None:
    case = LAYERS[name]
    y, stats, grads = dense_layer(frontend, name, recipe)

    logits = case.x.astype(np.float64) @ case.params["router"].T
    ids, _ = oracle_layer.route(logits, **case.routing)
    counts = np.bincount(ids.reshape(-1), minlength=case.num_experts)
    np.testing.assert_array_equal(stats["counts"], counts)
    assert stats["overflow"] == 0
    probabilities = oracle_layer.scores(logits, case.score)
    probabilities /= probabilities.sum(-1, keepdims=True)
    aux_loss = case.num_experts * np.sum(counts / ids.size * probabilities.mean(0))
    np.testing.assert_allclose(stats["aux_loss"], aux_loss, rtol=1e-5)

    want_y, want_grads = case.reference()
    decibels = {"y": check.sqnr_db(y, want_y)} | {k: check.sqnr_db(grads[k], want_grads[k]) for k in want_grads}
    assert decibels.pop("router") > ROUTER_DB[recipe]
    assert min(decibels.values()) > LAYER_DB[recipe], decibels
    for expert in np.flatnonzero(counts == 0):
        assert not any(grads[w][expert].any() for w in ("w1", "w2", "w3"))


@pytest.mark.parametrize(("name", "recipe"), LAYER_RUNS)
def test_both_frameworks_compute_the_same_layer(name: str, recipe: str) -> None:
    y, stats, grads = dense_layer("torch", name, recipe)
    other_y, other_stats, other_grads = dense_layer("jax", name, recipe)
    np.testing.assert_array_equal(stats["counts"], other_stats["counts"])
    assert check.sqnr_db(other_y, y) > BETWEEN_DB[recipe]
    for key, grad in grads.items():
        assert check.sqnr_db(other_grads[key], grad) > BETWEEN_DB[recipe], key
