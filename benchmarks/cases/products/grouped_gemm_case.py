"""Common parts of the cases of grouped GEMMs: operands, and one line of the table."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import torch
from mxep.core_kernels.grouped_gemm.cases import Product
from torch import Tensor

from ...peers import grouped_gemm as products
from ...peers.grouped_gemm import DENSE_BF16, DENSE_FP8, DENSE_FP8_FP32
from ..calls import jax_call, torch_call
from ..case import Tensors, values
from ..error_check import Error, Pair

Compiled = tuple[Callable[..., tuple[jax.Array, ...]], tuple[Any, ...]]
"""A compiled JAX program and its arguments."""


class Operands(NamedTuple):
    x: Tensor
    w: Tensor
    dout: Tensor
    ends: Tensor


@dataclass(frozen=True)
class ProductCase:
    """One line of the table.

    kernel: the op whose implementation the line names. read: bytes of the operands.
    check: outputs -> error; raises AssertionError. peers: same outputs up to quantization.
    dense: products without groups, `dense_flops` each; they are the roofs.
    same_bytes: whether torch and JAX return the same bytes on a GPU.
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


def operands(p: Product, device: str) -> Operands:
    """Rows and columns differ in magnitude: the clock of the card depends on the values."""
    shapes = (p.M, p.K), (p.G, p.N, p.K), (p.M, p.N)
    x, w, dout = (values(*shape, device=device, octaves=1, operand=i) for i, shape in enumerate(shapes))
    return Operands(x, w, dout, torch.from_numpy(p.group_ends).to(device))


def pair(op: str, *tensors: Tensor, **options: int) -> Pair:
    """Outputs of an op that returns q and its scales."""
    q, sf = torch_call(op, *tensors, **options)
    return q, sf


def compiled_ops(program: Callable[..., Any], *inputs: Tensor) -> Compiled:
    arrays = tuple(map(jax.dlpack.from_dlpack, inputs))
    return jax.jit(partial(program, jax_call)).lower(*arrays).compile(), arrays


def one_output(peer: Callable[..., Tensor], *args: Tensor) -> Callable[[], Tensors]:
    """A peer with one output as a program."""
    return lambda: (peer(*args),)


def dense_products(a: Tensor, b: Tensor, x: Tensor, w: Tensor) -> dict[str, Callable[[], object]]:
    return {
        DENSE_FP8: products.dense_fp8(a, b, fast=True),
        DENSE_FP8_FP32: products.dense_fp8(a, b, fast=False),
        DENSE_BF16: lambda: torch.mm(x, w.T),
    }
