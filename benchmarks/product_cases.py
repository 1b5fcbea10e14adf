"""The grouped products of the GPU table: their operands, when they are right, and what they are compared with.

    x (M, K), w (G, N, K), dout (M, N) bf16, ends (G,) multiples of 32
    grouped_mm_fwd        x w^T      -> (M, N)      folded along K
    grouped_mm_dgrad      dout w     -> (M, K)      folded along N
    grouped_mm_wgrad      dout^T x   -> (G, N, K)   folded along each group's rows, by spans of 256
    grouped_mm_exact      x w^T      -> (M, N)      MXFP8; on Hopper dequantized to bf16
    grouped_mm_autograd   the first three from bf16, weights included; or with "weights held": quantized before

On Hopper grouped_mm_exact dequantizes x in its time and w before ("weights dequantized before"): so QuantizedWeights
hold them.

A small grouped_mm_fwd begins with x in bf16 ("operands bf16"): what quantizing it costs is in its time.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch
from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.recipe import Recipe
from torch import Tensor

from . import product_calls, product_peers
from .gpu_calls import jax_call, torch_call
from .gpu_cases import Call, Tensors, one, values
from .product_checks import FP8_CHAIN, Error, Pair, rows_error, sqnr_db, wgrad_error
from .shapes import Product

OPS = ("grouped_mm_fwd", "grouped_mm_dgrad", "grouped_mm_wgrad", "grouped_mm_exact", "grouped_mm_autograd")
RECIPES = ("mxfp8", "mxfp8_wgrad_with_hp")
BF16, ROW_SCALED, RAGGED_DOT = "torch_grouped_mm_bf16", "torch_scaled_grouped_mm", "jax_ragged_dot_bf16"
DENSE_FP8, DENSE_FP8_FP32, DENSE_BF16 = "cublas_fp8", "cublas_fp8_fp32_sums", "cublas_bf16"
MIN_SQNR_DB = 25.2  # between MXFP8 and bf16 on the values below, of every output: 28.2 measured at least, less 3
# Between torch and JAX, where they may sum in another order: 108 and more measured on a CPU. Tensor cores keep less of
# a sum, and two roundings to bf16 of unrelated sums are 52 dB apart.
MIN_JAX_SQNR_DB = 60.0

Compiled = tuple[Callable[..., tuple[jax.Array, ...]], tuple[Any, ...]]
"""A program that JAX compiled, and its arguments."""


class Operands(NamedTuple):
    x: Tensor
    w: Tensor
    dout: Tensor
    ends: Tensor


@dataclass(frozen=True)
class ProductCase:
    """One line of the table.

    kernel: the op whose implementation is named. read: bytes of the operands.
    check: of the outputs, their error; raises AssertionError. peers: same outputs, but for quantization.
    dense: products without groups of `dense_flops` each, which are roofs. same_bytes: in torch and JAX, on a GPU.
    """

    name: str
    shape: Mapping[str, int | str]
    kernel: str
    flops: int
    read: int
    run: Callable[[], Tensors]
    compiled: Callable[[], Compiled]
    check: Callable[[Tensors], Error]
    peers: Mapping[str, Callable[[], Tensors]]
    ends: Tensor
    dense_flops: int = 0
    dense: Mapping[str, Callable[[], object]] = field(default_factory=dict)
    jax_peers: Mapping[str, Callable[[], Compiled]] = field(default_factory=dict)
    same_bytes: bool = True


def group_ends(p: Product, device: str) -> Tensor:
    """(G,) int32, multiples of 32. balanced: within a fifth of each other. skewed: half of all, none, the others."""
    weights = np.random.default_rng(p.G).uniform(0.9, 1.1, p.G)
    if p.routing == "skewed":
        weights[1] = 0
        weights[0] = weights[2:].sum()
    ends = np.rint(weights.cumsum() / weights.sum() * (p.M // BLOCK)) * BLOCK
    return torch.from_numpy(ends.astype(np.int32)).to(device)


def operands(p: Product, device: str) -> Operands:
    """Rows and columns of different magnitudes: a card's clock depends on what it multiplies."""
    x, w, dout = (values(*shape, device=device, octaves=1) for shape in ((p.M, p.K), (p.G, p.N, p.K), (p.M, p.N)))
    return Operands(x, w, dout, group_ends(p, device))


def _pair(op: str, *tensors: Tensor) -> Pair:
    """q and its scales."""
    q, sf = torch_call(op, *tensors)
    return q, sf


def _compiled(program: Callable[..., Any], *inputs: Tensor) -> Compiled:
    arrays = tuple(map(jax.dlpack.from_dlpack, inputs))
    return jax.jit(partial(program, jax_call)).lower(*arrays).compile(), arrays


def _alone(peer: Callable[..., Tensor], *args: Tensor) -> Callable[[], Tensors]:
    return lambda: (peer(*args),)


def _dense(a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> dict[str, Callable[[], object]]:
    return {
        DENSE_FP8: product_peers.dense_fp8(a, b, fast=True),
        DENSE_FP8_FP32: product_peers.dense_fp8(a, b, fast=False),
        DENSE_BF16: lambda: torch.mm(x, w.T),
    }


def _op_case(
    name: str, p: Product, kernel: str, lhs: Pair, rhs: Pair, o: Operands, error: Callable[..., Error],
    program: Callable[..., Tensors] | None = None, w: Tensor | None = None, **more: Any,
) -> ProductCase:  # fmt: skip
    """`program`: what runs, where that is more than `kernel`; `w`: rhs dequantized, where it takes that."""
    inputs, flops = (*lhs, *(rhs if w is None else (w,)), o.ends), 2 * p.M * p.N * p.K
    shape = p._asdict() if w is None else {**p._asdict(), "weights": "dequantized before"}
    program = program or one(kernel)
    chain = FP8_CHAIN if kernel.endswith("fold") and o.x.is_cuda else 0.0
    return ProductCase(
        name, shape, kernel, flops, sum(x.nbytes for x in inputs),
        run=partial(program, torch_call, *inputs),
        compiled=partial(_compiled, program, *inputs),
        check=partial(error, lhs=lhs, rhs=rhs, ends=o.ends, chain=chain),
        dense_flops=flops,
        ends=o.ends,
        **more,
    )  # fmt: skip


def _row_scaled(lhs: Pair, rhs: Pair, ends: Tensor) -> Callable[[], Tensors]:
    pairs = *product_peers.row_scaled(*lhs), *product_peers.row_scaled(*rhs)
    return _alone(product_peers.grouped_fp8, *pairs, ends)


def forward(p: Product, o: Operands) -> ProductCase:
    lhs, rhs = (_pair("quantize_row_fold", x) for x in (o.x, o.w))
    peers = {BF16: _alone(product_peers.grouped_bf16, o.x, o.w, o.ends), ROW_SCALED: _row_scaled(lhs, rhs, o.ends)}
    return _op_case(
        "grouped_mm_fwd", p, "grouped_mm_fold", lhs, rhs, o, rows_error,
        peers=peers,
        dense=_dense(lhs[0], rhs[0][0], o.x, o.w[0]),
        jax_peers={RAGGED_DOT: partial(product_peers.ragged_dot, o.x, o.w, o.ends)},
    )  # fmt: skip


def input_gradient(p: Product, o: Operands) -> ProductCase:
    lhs, rhs = _pair("quantize_row_fold", o.dout), _pair("fold_rows", *_pair("quantize_col", o.w))
    peers = {
        BF16: _alone(product_peers.grouped_bf16_dgrad, o.dout, o.w, o.ends),
        ROW_SCALED: _row_scaled(lhs, rhs, o.ends),
    }
    return _op_case(
        "grouped_mm_dgrad", p, "grouped_mm_fold", lhs, rhs, o, rows_error,
        peers=peers,
        dense=_dense(lhs[0], rhs[0][0], o.dout, o.w[0].T),
    )  # fmt: skip


def weight_gradient(p: Product, o: Operands) -> ProductCase:
    lhs, rhs = (_pair("fold_groups", *_pair("quantize_col", x), o.ends) for x in (o.dout, o.x))
    # The same bytes as operands of the forward product: a roof has its shape for all three.
    a, b = rhs[0].view(p.M, p.K), lhs[0].view(-1)[: p.N * p.K].view(p.N, p.K)
    return _op_case(
        "grouped_mm_wgrad", p, "grouped_wgrad_fold", lhs, rhs, o, wgrad_error,
        peers={BF16: _alone(product_peers.grouped_bf16_wgrad, o.dout, o.x, o.ends)},
        dense=_dense(a, b, o.x, o.w[0]),
    )  # fmt: skip


def on_hopper(x: Tensor) -> bool:
    return x.is_cuda and torch.cuda.get_device_capability(x.device)[0] == 9


def _dequantized_first(call: Call, lhs_q: Any, lhs_sf: Any, w: Any, ends: Any) -> tuple[Any, ...]:
    """What form "mx" is in both frontends where the tensor cores take no scales per 32."""
    return call("grouped_mm_bf16", *call("dequantize", lhs_q, lhs_sf), w, ends)


def exact(p: Product, o: Operands) -> ProductCase:
    lhs, rhs = (_pair("quantize_row", x) for x in (o.x, o.w))
    kernel, program, w = "grouped_mm_mx", None, None
    if on_hopper(o.x):
        kernel, program, (w,) = "grouped_mm_bf16", _dequantized_first, torch_call("dequantize", *rhs)
    return _op_case(
        "grouped_mm_exact", p, kernel, lhs, rhs, o, rows_error, program, w,
        peers={BF16: _alone(product_peers.grouped_bf16, o.x, o.w, o.ends)},
        dense=_dense(lhs[0], rhs[0][0], o.x, o.w[0]),
        same_bytes=False,
    )  # fmt: skip


def autograd(p: Product, o: Operands, recipe_name: str, held: bool) -> ProductCase:
    recipe = Recipe.parse(recipe_name, compute="fold")
    x, w = (t.detach().requires_grad_() for t in (o.x, o.w))  # the same memory, leaves of this case alone
    with torch.no_grad():
        w.mul_(1)  # as an optimizer has: a weight that was never written may be one that FSDP2 gathered
    weights = product_calls.torch_weights(w, recipe) if held else w
    bf16 = partial(product_peers.autograd, product_peers.grouped_bf16, x, w, o.ends, o.dout)

    def product(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return product_calls.torch_product(x, weights, ends, recipe)

    def check(outputs: Tensors) -> Error:
        db = sqnr_db(outputs, bf16(), o.ends)
        if not db >= MIN_SQNR_DB:
            raise AssertionError(f"{db} dB from bf16; expected {MIN_SQNR_DB} or more")
        return {"grade": "sqnr_db", "sqnr_db": db}

    def compiled() -> Compiled:
        arrays = tuple(map(jax.dlpack.from_dlpack, (o.x, o.w, o.ends, o.dout)))
        return product_calls.jax_autograd(*arrays, recipe=recipe, held=held)

    a, b = (_pair("quantize_row", t)[0] for t in (o.x, o.w[0]))
    return ProductCase(
        "grouped_mm_autograd", {**p._asdict(), "recipe": recipe_name, **({"weights": "held"} if held else {})},
        "grouped_mm_fold",
        flops=6 * p.M * p.N * p.K,
        read=sum(t.nbytes for t in o),
        run=partial(product_peers.autograd, product, x, w, o.ends, o.dout),
        compiled=compiled,
        check=check,
        peers={BF16: bf16},
        ends=o.ends,
        dense_flops=2 * p.M * p.N * p.K,
        dense=_dense(a, b, o.x, o.w[0]),
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


def large_cases(p: Product, device: str, only: tuple[str, ...]) -> Iterator[ProductCase]:
    """Every case of a shape, or those of the ops named, one after the other: they share x, w and dout alone."""
    o = operands(p, device)
    yield from (make(p, o) for name, make in CASES if not only or name in only)


def small_case(p: Product, device: str) -> ProductCase:
    x, w, _, ends = operands(p, device)
    rhs = _pair("quantize_row_fold", w)

    def program(call: Call, x: Any, w_qf: Any, w_sf: Any, ends: Any) -> tuple[Any, ...]:
        return call("grouped_mm_fold", *call("quantize_row_fold", x), w_qf, w_sf, ends)

    def check(outputs: Tensors) -> Error:
        return rows_error(outputs, _pair("quantize_row_fold", x), rhs, ends, FP8_CHAIN if x.is_cuda else 0.0)

    inputs = (x, *rhs, ends)
    return ProductCase(
        "grouped_mm_fwd", {**p._asdict(), "operands": "bf16"}, "grouped_mm_fold",
        flops=2 * p.M * p.N * p.K,
        read=sum(t.nbytes for t in inputs),
        run=partial(program, torch_call, *inputs),
        compiled=partial(_compiled, program, *inputs),
        check=check,
        peers={BF16: _alone(product_peers.grouped_bf16, x, w, ends)},
        ends=ends,
    )  # fmt: skip
