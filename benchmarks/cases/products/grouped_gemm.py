"""Cases of the family `grouped_gemm`: operands, checks and peers of the grouped products.

    x (M, K), w (G, N, K), dout (M, N) bf16; ends (G,) multiples of 32
    grouped_mm_fwd        x w^T     -> (M, N)      operands folded along K: one scale per row
    grouped_mm_dgrad      dout w    -> (M, K)      operands folded along N
    grouped_mm_wgrad      dout^T x  -> (G, N, K)   operands folded along the tokens: one scale per chunk of 256
    grouped_mm_exact      x w^T     -> (M, N)      MXFP8 operands, dequantized values multiplied
    grouped_mm_autograd   the first three from bf16: grouped_gemm_autograd.py

On Hopper grouped_mm_exact dequantizes x within the measured time and w before it ("weights": "dequantized before"), as
QuantizedWeights hold them. A small grouped_mm_fwd ("operands": "bf16") includes the quantization of x.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from mxep.core_kernels.formats import WEIGHT_HEADROOM
from mxep.core_kernels.grouped_gemm.cases import Product
from torch import Tensor

from ...peers import grouped_gemm as products
from ...peers.grouped_gemm import BF16, RAGGED_DOT, ROW_SCALED
from ..calls import torch_call
from ..case import Call, Tensors
from ..error_check import FP8_CHAIN, Error, Pair, rows_error, wgrad_error
from .grouped_gemm_autograd import RECIPES, autograd
from .grouped_gemm_case import Operands, ProductCase, compiled_ops, dense_products, one_output, operands, pair


def _op_case(
    name: str, p: Product, kernel: str, lhs: Pair, rhs: Pair, o: Operands, error: Callable[..., Error],
    program: Callable[..., Tensors] | None = None, w: Tensor | None = None, **more: Any,
) -> ProductCase:  # fmt: skip
    """program: the program, if it is more than `kernel`. w: rhs dequantized, if the program takes that."""
    inputs, flops = (*lhs, *(rhs if w is None else (w,)), o.ends), 2 * p.M * p.N * p.K
    shape = p._asdict() if w is None else {**p._asdict(), "weights": "dequantized before"}
    program = program or (lambda call, *arrays: call(kernel, *arrays))
    chain = FP8_CHAIN if kernel.endswith("fold") and o.x.is_cuda else 0.0
    return ProductCase(
        name, shape, kernel, flops, sum(x.nbytes for x in inputs),
        run=partial(program, torch_call, *inputs),
        compiled=partial(compiled_ops, program, *inputs),
        check=partial(error, lhs=lhs, rhs=rhs, ends=o.ends, chain=chain),
        dense_flops=flops,
        ends=o.ends,
        **more,
    )  # fmt: skip


def _row_scaled(lhs: Pair, rhs: Pair, ends: Tensor) -> Callable[[], Tensors]:
    pairs = *products.row_scaled(*lhs), *products.row_scaled(*rhs)
    return one_output(products.grouped_fp8, *pairs, ends)


def forward(p: Product, o: Operands) -> ProductCase:
    lhs, rhs = pair("quantize_row_fold", o.x), pair("quantize_row_fold", o.w, headroom=WEIGHT_HEADROOM)
    peers = {BF16: one_output(products.grouped_bf16, o.x, o.w, o.ends), ROW_SCALED: _row_scaled(lhs, rhs, o.ends)}
    return _op_case(
        "grouped_mm_fwd", p, "grouped_mm_fold", lhs, rhs, o, rows_error,
        peers=peers,
        dense=dense_products(lhs[0], rhs[0][0], o.x, o.w[0]),
        jax_peers={RAGGED_DOT: partial(products.ragged_dot, o.x, o.w, o.ends)},
    )  # fmt: skip


def input_gradient(p: Product, o: Operands) -> ProductCase:
    lhs = pair("quantize_row_fold", o.dout)
    rhs = pair("fold_rows", *pair("quantize_col", o.w), headroom=WEIGHT_HEADROOM)
    peers = {
        BF16: one_output(products.grouped_bf16_dgrad, o.dout, o.w, o.ends),
        ROW_SCALED: _row_scaled(lhs, rhs, o.ends),
    }
    return _op_case(
        "grouped_mm_dgrad", p, "grouped_mm_fold", lhs, rhs, o, rows_error,
        peers=peers,
        dense=dense_products(lhs[0], rhs[0][0], o.dout, o.w[0].T),
    )  # fmt: skip


def weight_gradient(p: Product, o: Operands) -> ProductCase:
    lhs, rhs = (pair("fold_groups", *pair("quantize_col", x), o.ends) for x in (o.dout, o.x))
    # The same bytes in the forward product's shape: the three products share one roof.
    a, b = rhs[0].view(p.M, p.K), lhs[0].view(-1)[: p.N * p.K].view(p.N, p.K)
    return _op_case(
        "grouped_mm_wgrad", p, "grouped_wgrad_fold", lhs, rhs, o, wgrad_error,
        peers={BF16: one_output(products.grouped_bf16_wgrad, o.dout, o.x, o.ends)},
        dense=dense_products(a, b, o.x, o.w[0]),
    )  # fmt: skip


def on_hopper(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def _dequantized_first(call: Call, lhs_q: Any, lhs_sf: Any, w: Any, ends: Any) -> tuple[Any, ...]:
    """The exact path of both frontends on a GPU whose tensor cores take no scale per 32 values."""
    return call("grouped_mm_bf16", *call("dequantize", lhs_q, lhs_sf), w, ends)


def exact(p: Product, o: Operands) -> ProductCase:
    lhs, rhs = (pair("quantize_row", x) for x in (o.x, o.w))
    kernel, program, w = "grouped_mm_mx", None, None
    if on_hopper(o.x):
        kernel, program, (w,) = "grouped_mm_bf16", _dequantized_first, torch_call("dequantize", *rhs)
    return _op_case(
        "grouped_mm_exact", p, kernel, lhs, rhs, o, rows_error, program, w,
        peers={BF16: one_output(products.grouped_bf16, o.x, o.w, o.ends)},
        dense=dense_products(lhs[0], rhs[0][0], o.x, o.w[0]),
        same_bytes=False,
    )  # fmt: skip


CASES: tuple[tuple[str, Callable[[Product, Operands], ProductCase]], ...] = (
    ("grouped_mm_fwd", forward),
    ("grouped_mm_dgrad", input_gradient),
    ("grouped_mm_wgrad", weight_gradient),
    ("grouped_mm_exact", exact),
    *(
        ("grouped_mm_autograd", partial(autograd, recipe_name=recipe, held=held))
        for recipe in RECIPES
        for held in (False, True)
    ),
)
OPS = tuple(dict.fromkeys(name for name, _ in CASES))


def large_cases(p: Product, device: str, only: tuple[str, ...]) -> Iterator[ProductCase]:
    """The cases of the ops named, built one after the other; they share x, w and dout."""
    o = operands(p, device)
    yield from (make(p, o) for name, make in CASES if not only or name in only)


def small_case(p: Product, device: str) -> ProductCase:
    x, w, _, ends = operands(p, device)
    rhs = pair("quantize_row_fold", w, headroom=WEIGHT_HEADROOM)

    def program(call: Call, x: Any, w_qf: Any, w_sf: Any, ends: Any) -> tuple[Any, ...]:
        return call("grouped_mm_fold", *call("quantize_row_fold", x), w_qf, w_sf, ends)

    def check(outputs: Tensors) -> Error:
        return rows_error(outputs, pair("quantize_row_fold", x), rhs, ends, FP8_CHAIN if x.is_cuda else 0.0)

    inputs = (x, *rhs, ends)
    return ProductCase(
        "grouped_mm_fwd", {**p._asdict(), "operands": "bf16"}, "grouped_mm_fold",
        flops=2 * p.M * p.N * p.K,
        read=sum(t.nbytes for t in inputs),
        run=partial(program, torch_call, *inputs),
        compiled=partial(compiled_ops, program, *inputs),
        check=check,
        peers={BF16: one_output(products.grouped_bf16, x, w, ends)},
        ends=ends,
    )  # fmt: skip
