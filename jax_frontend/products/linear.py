"""The product of a dense layer and its gradients: the grouped product of one group that has all rows.

    out = x w + bias     x (M, K) --rows, tokens--> one read        w (K, N) --along K, along N--> one read
    dx  = dout w^T       dout (M, N) --rows, tokens--> one read
    dw  = x^T dout       tokens of x, tokens of dout
    dbias                the sum of dout's rows

The kernels and their bytes are PyTorch's (torch_frontend/products/linear.py). XLA computes equal calls of an op once:
layers of one program that read the same x share its operands.

The weight gradient of recipe "mxfp8" quantizes blocks of 32 tokens. With another number of rows a differentiated call
copies x and dout with up to 31 rows of zeros, which add nothing to a product; any other call copies nothing.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..ops.call import jitted, vary_alike
from ..ops.checks import check_floats, dtype_name
from ..ops.derivatives import reverse_only
from ..ops.mx_array import differentiated, values_of
from ..ops.shapes import Float
from .forms.form import AddedBias, Format
from .weights import (
    Layout,
    NoValues,
    QuantizedWeights,
    Weights,
    along_k,
    along_n,
    check_weights,
    cotangent_of,
    format_of,
    quantize_for_call,
    resolve_compute,
    saved,
)

LAYOUT: Layout = "GKN"
"""The dims of the weights, one group of them, and of their gradient."""


class Options(NamedTuple):
    """Static arguments."""

    form: Format
    out_dtype: str


class Saved(NamedTuple):
    """x: what tokens are made of, if the forward has not made them."""

    x: Any
    tokens: Any
    w: Any
    bias: Any


def _in_whole_blocks(x: jax.Array, form: Format) -> jax.Array:
    """x with rows of zeros up to a multiple of 32, if the form quantizes tokens."""
    rows = x.shape[0]  # perhaps a symbol of jax.export, which knows that this sum of it is a multiple of 32
    missing = (rows + BLOCK - 1) // BLOCK * BLOCK - rows
    if not form.wgrad_mx or (not is_symbolic_dim(missing) and not missing):
        return x
    return jnp.concatenate([x, jnp.zeros((missing, x.shape[1]), x.dtype)])


def _first_rows(operand: Any, rows: int) -> Any:
    """The first rows of an operand along the rows: every array of it has a row for each."""
    return jax.tree.map(lambda array: array[:rows], operand)


def _one_end(x: jax.Array) -> jax.Array:
    return jnp.full((1,), x.shape[0], jnp.int32)


def _multiply(rows: Any, w: Any, x: jax.Array, bias: jax.Array | None, options: Options) -> jax.Array:
    added = None if bias is None else AddedBias(bias, one_group=True)
    rows, ends, w = _first_rows(rows, x.shape[0]), _one_end(x), along_k(w, options.form, LAYOUT)
    return options.form.mm(rows, w, ends, options.out_dtype, added, clear_rest=False)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dense(x, w, bias, options: Options):
    return _multiply(options.form.rows(x, _one_end(x)), w, x, bias, options)


def _dense_fwd(x, w, bias, options: Options):
    backward, form = differentiated(x), options.form
    x, w, bias = values_of((x, w, bias))
    padded = _in_whole_blocks(x, form)
    rows, tokens = form.activation(padded, _one_end(padded))
    w = quantize_for_call(w, form, backward)
    kept = NoValues(x.dtype) if tokens else form.saved(padded)
    return _multiply(rows, w, x, bias, options), Saved(kept, tokens, saved(w, LAYOUT), bias)


def _dense_bwd(options: Options, residuals: Saved, dout):
    (x, tokens, w, bias), form = residuals, options.form
    padded = _in_whole_blocks(dout, form)
    ends = _one_end(padded)
    dout_rows, dout_tokens = form.gradient(padded, ends)
    dx = form.mm(form.rows(dout_rows, ends), along_n(w, form, LAYOUT), ends, x.dtype)[: dout.shape[0]]
    dw = form.wgrad(tokens or form.tokens(x, ends), dout_tokens, ends, w.dtype)
    return dx, cotangent_of(w, dw), None if bias is None else dout.sum(0, dtype=jnp.float32, keepdims=True)


_dense.defvjp(_dense_fwd, _dense_bwd, symbolic_zeros=True)
_dense_jitted = jitted(_dense, 3)


def dense(
    x: Float[jax.Array, "... K"],
    w: Float[jax.Array, "K N"] | QuantizedWeights,
    bias: Float[jax.Array, " N"] | None = None,
    *,
    recipe: Recipe | str = "mxfp8",
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[jax.Array, "... N"]:
    """Compute x w + bias with a recipe, the product of a dense layer; differentiable in x, w and bias.

    Args:
        x: (..., K) bf16 or fp32, any number of rows; quantized here along K. With a number of rows that is no multiple
            of 32, recipe "mxfp8" copies x and the gradient for the weight gradient.
        w: (K, N) bf16 or fp32, as flax's Linear and Dense store it, read as stored; or `quantize_weights(w[None])`,
            made with the same recipe, whose `values` get the gradient. K and N are multiples of 32.
        bias: (N,) bf16 or fp32; or None. It is added to the fp32 sums, before the rounding to out_dtype.
        recipe: a `Recipe` or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise" or "bf16".
            `Recipe.compute` "auto" follows `jax.default_backend()`, or `lower_for`, when the call is traced.
        out_dtype: "bfloat16" or "float32", or the dtype. None: x's. The gradients of x, w and bias have their
            argument's dtype.

    Returns:
        (..., N) of out_dtype. w is quantized in every call; `quantize_weights` quantizes it once for several calls. On
        a mesh call it inside `jax.shard_map`, or call `sharded_dense`; a jit of sharded arrays gathers them.

    Raises:
        ValueError: shapes, an unknown recipe, QuantizedWeights of another recipe.
        TypeError: dtypes.

    Example:
        >>> x, w = jnp.ones((3, 5, 32)), jnp.ones((32, 64))
        >>> dense(x, w, jnp.ones(64))[0, 0, 0].item()
        33.0

    Source:
        OCP Microscaling Formats (MX) Specification v1.0, section 6.
    """
    return checked_dense("dense", x, w, bias, recipe, out_dtype)


def checked_dense(
    op: str, x: jax.Array, w: Weights, bias: jax.Array | None, recipe: Recipe | str, out_dtype: Any = None
) -> jax.Array:
    """`dense` with its checks, in the name of `op`."""
    recipe = resolve_compute(op, recipe)
    check_floats(op, "x", x)
    check_weights(op, "w", w, recipe, LAYOUT)
    if isinstance(w, QuantizedWeights):
        if w.ndim != 3 or w.shape[0] != 1:
            fail(ValueError, op, "w", f"QuantizedWeights {w.shape}", "allowed: quantize_weights(w[None]) of w (K, N)")
        weights: Weights = w
    elif w.ndim != 2:
        fail(ValueError, op, "w", f"shape {w.shape}", "allowed: (K, N)")
    else:
        weights = jnp.asarray(w)[None]
    _, k, n = weights.shape
    if not x.ndim or x.shape[-1] != k:
        fail(ValueError, op, "x", f"shape {x.shape}", f"allowed: (..., {k}), the K of w (K, N)")
    for dim, size in (("K", k), ("N", n)):
        if size % BLOCK or not size:
            fail(ValueError, op, "w", f"{dim} = {size}", f"allowed: positive multiples of {BLOCK}")
    if bias is not None:
        check_floats(op, "bias", bias)
        if bias.shape != (n,):
            fail(ValueError, op, "bias", f"shape {bias.shape}", f"allowed: ({n},)")
        bias = jnp.asarray(bias).astype(jnp.float32)[None]
    dtype = dtype_name(op, "out_dtype", x.dtype if out_dtype is None else out_dtype)
    x, weights, bias = vary_alike(*reverse_only(op, (jnp.asarray(x), weights, bias)))
    out = _dense_jitted(x.reshape(-1, k), weights, bias, Options(format_of(recipe), dtype))
    return out.reshape(*x.shape[:-1], n)
