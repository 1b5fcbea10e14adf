"""The differentiable functions and their gradients: grouped product, permute, experts' feed-forward.

function       is compared with                                   grade
grouped_mm     products.py of the reference                       the error bound of a product
permute        the oracle                                         exact bytes
swiglu_ffn     ffn.py of the reference                            dB of each result and expert
"""

from collections import Counter
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from mxep.core_kernels.cases import BF16, seeded
from mxep.core_kernels.grouped_gemm.cases import GEMMS
from mxep.core_kernels.permute import oracle as permute_oracle
from mxep.core_kernels.policy.recipe import Recipe
from mxep.core_kernels.quantize import oracle as quantize_oracle
from mxep.core_kernels.reference import products as product_oracle
from mxep.core_kernels.routing import oracle as routing_oracle
from mxep.core_kernels.routing.cases import MAPS

from .. import check
from ..backends import adapter
from .layers import FFN, FFN_WITH_BIASES, RUNS

Array = np.ndarray
Rows = Array | tuple[Array, Array]


needs = pytest.mark.needs


@pytest.fixture
def frontend(backend: str) -> ModuleType:
    """The module of the adapter."""
    return adapter(backend)


def magnitude(x: Rows) -> Rows:
    """|x|, whose quantized values are the magnitudes of x's quantized values."""
    return (x[0] & 0x7F, x[1]) if isinstance(x, tuple) else np.abs(x)


def products(
    a: Rows, b_t: Array, group_ends: Array, dout: Rows, recipe: Recipe, out_dtype: str = "bfloat16",
    sums: str = "exact",
) -> tuple[Array, Array, Array]:  # fmt: skip
    """out, da and db_t by definition."""
    form, rest = recipe.form("cpu"), (recipe.rounding, sums, out_dtype)
    out = product_oracle.grouped_mm(a, b_t, group_ends, form, *rest)
    return out, *product_oracle.grouped_mm_vjp(dout, a, b_t, group_ends, form, recipe.wgrad_mx, *rest)


@cache
def case_of(name: str, run: str, mx: str) -> tuple[tuple[Any, ...], tuple[Array, ...], tuple[Array, ...]]:
    """For all backends: the arguments of the product, its results in fp64, and the sums of magnitudes."""
    case, recipe = GEMMS[name], RUNS[run]
    a: Rows = quantize_oracle.quantize_row(case.lhs) if mx == "mx" else case.lhs
    dout: Rows = quantize_oracle.quantize_row(case.dout) if mx == "mx" else case.dout
    b_t = np.swapaxes(case.rhs_t, 1, 2)
    exact = products(a, b_t, case.group_ends, dout, recipe, "float64")
    sizes = products(magnitude(a), np.abs(b_t), case.group_ends, magnitude(dout), recipe, "float64")
    return (a, b_t, case.group_ends, dout, recipe), exact, sizes


# JAX compiles every shape. Cases that share one are run with every recipe and operand. A case with a shape of its own
# is run with floats in every recipe, and with MXFP8 rows in "mxfp8", which reads their bytes, and in "bf16". Recipes
# other than these two and the default one are slow.
SHAPES = Counter(case.lhs.shape for case in GEMMS.values())
OFTEN = ("bf16", "mxfp8", "mxfp8_wgrad_with_hp")
PRODUCTS = [
    pytest.param(name, run, mx, marks=[] if run in OFTEN or SHAPES[case.lhs.shape] > 1 else pytest.mark.slow)
    for name, case in GEMMS.items()
    for run in RUNS
    for mx in ("floats", "mx")
    if mx == "floats" or run in ("mxfp8", "bf16") or SHAPES[case.lhs.shape] > 1
]


@needs("grouped_mm")
@pytest.mark.parametrize(("name", "run", "mx"), PRODUCTS)
def test_grouped_mm_and_its_gradients(frontend: ModuleType, backend: str, name: str, run: str, mx: str) -> None:
    """mx: the activations and the gradient are received quantized, as from a dispatch and from a combine."""
    case, recipe = GEMMS[name], RUNS[run]
    arguments, exact, sizes = case_of(name, run, mx)
    results = frontend.grouped_mm(*arguments)
    fp8 = recipe.form("cpu") in check.FP8_FORMS
    chain = check.fp8_chain(backend) if fp8 else 0
    assert all(got.dtype == BF16 for got in results)
    for got, want, size, k in zip(results, exact, sizes, (case.lhs.shape[1], case.rhs_t.shape[1]), strict=False):
        check.gemm_bound(got, want, size, k, chain)
    for got, want, size, k in zip(results[2], exact[2], sizes[2], np.diff(case.group_ends, prepend=0), strict=True):
        check.gemm_bound(got, want, size, int(k), chain)
    if fp8 and check.sums(backend) == "sm_90":
        of_fp8 = slice(3 if recipe.wgrad_mx else 2)  # otherwise the weight gradient is a bf16 product
        want = products(*arguments, sums="sm_90")
        check.same_bytes(results[of_fp8], want[of_fp8])


@needs("grouped_mm")
@pytest.mark.parametrize("rounding", ["rceil", "floor"])
def test_grouped_mm_uses_the_rounding_it_is_given(frontend: ModuleType, rounding: str) -> None:
    case = GEMMS["normal"]
    b_t = np.swapaxes(case.rhs_t, 1, 2)
    arguments = case.lhs, b_t, case.group_ends, case.dout
    opposite = "floor" if rounding == "rceil" else "rceil"
    recipe, another = (Recipe.parse(RUNS["mxfp8"], rounding=r) for r in (rounding, opposite))
    got, want, other = (
        frontend.grouped_mm(*arguments, recipe),
        products(*arguments, recipe),
        products(*arguments, another),
    )
    assert check.sqnr_db(other[0], want[0]) < 40
    assert all(check.sqnr_db(g, w) > 50 for g, w in zip(got, want, strict=True))


@needs("permute")
@pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)
@pytest.mark.parametrize("name", [name for name, case in MAPS.items() if not case.rank_rows and not case.slack])
def test_permute_and_unpermute_and_their_gradients(frontend: ModuleType, name: str, dtype: np.dtype) -> None:
    case = MAPS[name]
    row_map, inverse, *_ = routing_oracle.row_map(case.flat, **case.options)
    rng = seeded(name)
    rows, dout = (rng.standard_normal((m, 64)).astype(dtype) for m in (case.num_rows, len(row_map)))
    groups, drows, back, dback = frontend.permute(rows, case.flat, len(case.counts), dout, case.alignment)
    check.same_bytes(groups, permute_oracle.permute_rows(rows, row_map))
    check.same_bytes(drows, permute_oracle.permute_rows_vjp(dout, row_map, case.num_rows))
    check.same_bytes(back, permute_oracle.permute_rows(dout, inverse))
    check.same_bytes(dback, permute_oracle.permute_rows_vjp(rows, inverse, len(row_map)))


@needs("swiglu_ffn")
@pytest.mark.parametrize("run", RUNS)
def test_each_expert_of_a_feed_forward(frontend: ModuleType, backend: str, run: str) -> None:
    """Floats in; a layer passes MXFP8 rows. Groups of any size are padded for the weight gradient."""
    got = frontend.swiglu_ffn(FFN.x, FFN.weights, FFN.group_ends, FFN.prob, FFN.dout, RUNS[run])
    decibels = check.expert_db(got, FFN.reference(run, check.sums(backend)), FFN.rows())
    assert min(decibels.values()) > check.definition_db(backend), decibels
    for key in ("out", "x"):
        assert not got[key][FFN.group_ends[-1] :].any()


@needs("swiglu_ffn")
@pytest.mark.parametrize("run", ["bf16", "mxfp8", "mxfp8_folded"])
def test_each_expert_of_a_feed_forward_with_biases(frontend: ModuleType, backend: str, run: str) -> None:
    """And the clamped SwiGLU. The weights of rows past the last end are NaN."""
    case = FFN_WITH_BIASES
    got = frontend.swiglu_ffn(case.x, case.weights, case.group_ends, case.prob, case.dout, RUNS[run], **case.numbers)
    decibels = check.expert_db(got, case.reference(run, check.sums(backend)), case.rows())
    assert min(decibels.values()) > check.definition_db(backend), decibels
    for key in ("out", "x", "prob"):
        assert not got[key][case.group_ends[-1] :].any()
