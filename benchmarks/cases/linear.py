"""Cases of dense layers: x (M, K), w (N, K) and dout (M, N) in bf16, forward and both gradients of `linear`."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import torch
from mxep import jax_frontend, torch_frontend
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend.products.linear import SharedRows, checked_linear
from torch import Tensor

from ..peers.linear import Product, linear_bf16, steps_of
from .case import Tensors, values
from .error_check import Error, sqnr_db
from .products.grouped_gemm_autograd import MIN_SQNR_DB

OPS = ("linear_fwd_bwd", "linear_shared_rows_fwd_bwd")


class Size(NamedTuple):
    """M rows, K inputs, and the outputs of each layer that reads x."""

    M: int
    K: int
    N: tuple[int, ...]

    @property
    def flops(self) -> int:
        """Of the forward and both gradients."""
        return 6 * self.M * self.K * sum(self.N)

    @property
    def case(self) -> dict[str, object]:
        return {"M": self.M, "K": self.K, "N": self.N[0] if len(self.N) == 1 else "+".join(map(str, self.N))}


_WIDTHS = ((4096, 4096), (7168, 7168), (4096, 14336), (7168, 18432))
LARGE = tuple(Size(16384, k, (n,)) for k, n in _WIDTHS)
FEW_ROWS = tuple(Size(m, k, (n,)) for m in (2048, 4096) for k, n in _WIDTHS)
SHARED = (Size(16384, 4096, (4096, 1024, 1024)), Size(16384, 4096, (14336, 14336)))
"""q, k and v, and gate and up, of Llama 3.1 8B."""


class Operands(NamedTuple):
    """x and the weights are leaves; the weights have been written, as by an optimizer."""

    x: Tensor
    weights: tuple[Tensor, ...]
    douts: tuple[Tensor, ...]


def operands(size: Size, device: str) -> Operands:
    m, k, outputs = size
    x = values(m, k, device=device, octaves=1)
    weights = tuple(values(n, k, device=device, octaves=1, operand=1 + i) for i, n in enumerate(outputs))
    douts = tuple(values(m, n, device=device, octaves=1, operand=9 + i) for i, n in enumerate(outputs))
    return Operands(x.requires_grad_(), tuple(w.mul_(1).requires_grad_() for w in weights), douts)


def ours(recipe: str) -> Product:
    return partial(_linear, Recipe.parse(recipe, compute="fold") if Recipe.parse(recipe).mx else Recipe.parse(recipe))


def _linear(recipe: Recipe, x: Tensor, w: Tensor) -> Tensor:
    return torch_frontend.linear(x, w, recipe=recipe)


def step(o: Operands, product: Product) -> Callable[[], Tensors]:
    """Of the only weight."""
    return steps_of(product, o.x, o.weights[0], o.douts[0])


def shared_step(o: Operands, recipe: str | None) -> Callable[[], Tensors]:
    """Layers that read the same x; recipe None: `F.linear`."""
    shared, chosen = SharedRows(len(o.weights)), None if recipe is None else Recipe.parse(recipe, compute="fold")

    def run() -> Tensors:
        if chosen is None:
            outs = [linear_bf16(o.x, w) for w in o.weights]
        else:
            outs = [checked_linear("MXLinear", o.x, w, None, chosen, shared=shared) for w in o.weights]
        return *(out.detach() for out in outs), *torch.autograd.grad(outs, (o.x, *o.weights), o.douts)

    return run


def jax_program(o: Operands, recipe: str | None) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The step compiled, and its arguments; weights are (K, N). recipe None: a bf16 dot."""
    x, w, dout = (jax.dlpack.from_dlpack(t.detach()) for t in (o.x, o.weights[0].detach().T.contiguous(), o.douts[0]))
    chosen = None if recipe is None else Recipe.parse(recipe, compute="fold")

    def product(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w) if chosen is None else jax_frontend.dense(x, w, recipe=chosen)

    def step(x: jax.Array, w: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(product, x, w)
        dx, dw = backward(dout)
        return out, dx, dw.T

    return jax.jit(step).lower(x, w, dout).compile(), (x, w, dout)


def check(outputs: Sequence[Tensor], reference: Sequence[Tensor]) -> Error:
    """The distance from bf16; raises AssertionError if it is larger than quantization makes it."""
    one_group = torch.tensor([1], device=reference[0].device)
    db = sqnr_db([out.detach() for out in outputs], [out.detach() for out in reference], one_group)
    if not db >= MIN_SQNR_DB:
        raise AssertionError(f"{db} dB from bf16; expected {MIN_SQNR_DB} or more")
    return {"grade": "sqnr_db", "sqnr_db": db}
