"""Weights as the products multiply them, quantized for one call and its backward or once for many calls.

                                          form "mx"                  form "fold", "row"
    w (G, N, K) --along K, as it lies---> q (G, N, K), sf per 32     q, sf (G, N)     out  = lhs w^T
                '-along N, transposed---> q (G, K, N), sf per 32     q, sf (G, K)     dlhs = dout w

A call that is differentiated makes both from one read of w and keeps those of its backward; without a gradient it makes
the first alone. What shall serve several calls the user holds: `quantize_weights`.

On Hopper form "mx" multiplies these dequantized, and that is what stands for them in QuantizedWeights. Weights stored
(G, K, N) swap the two: along N they are read as they lie, along K the kernel transposes them.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from ..core_kernels.dispatch import facts
from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail, require_multiple
from ..core_kernels.recipe import RECIPES, Form, Recipe
from . import _device, ops
from ._checks import check_floats

Pair = tuple[jax.Array, jax.Array]
"""q and sf, one scale per 32 values, in the order that a product reads them."""
Stored = Literal["nk", "kn"]
"""The last two dims of weights and of their gradient: (G, N, K), as a linear layer stores them, or (G, K, N)."""


class Folded(NamedTuple):
    """E4M3 under one scale per row: q (M, K), sf (M,) and weights q (G, N, K), sf (G, N); or per row and span of
    tokens: q (K, M), sf (`spans(M, G)`, K)."""

    q: jax.Array
    sf: jax.Array


class Upcast(NamedTuple):
    """MXFP8 dequantized to bf16: what form "mx" multiplies on sm_90."""

    x: jax.Array


Quantized = Pair | Folded | Upcast


def as_multiplied(pair: Pair) -> Pair | Upcast:
    """MXFP8 in the way that the tensor cores of a program that is traced now take it."""
    return Upcast(ops.dequantize(*pair)) if facts(_device.arch()).upcasts else pair


def _on_this_device(x: Quantized) -> Quantized:
    return x if isinstance(x, Folded | Upcast) else as_multiplied(x)


def form_of(recipe: Recipe) -> Form:
    """What the recipe's products multiply in a program that is traced now."""
    return recipe.form(_device.arch())


def recipe_of(op: str, recipe: object) -> Recipe:
    """`Recipe.parse`, whose errors name the op."""
    if isinstance(recipe, Recipe) or (isinstance(recipe, str) and recipe in RECIPES):
        return Recipe.parse(recipe)
    error = ValueError if isinstance(recipe, str) else TypeError
    fail(error, op, "recipe", repr(recipe), f"allowed: a Recipe or one of {', '.join(map(repr, RECIPES))}")


def settled(op: str, recipe: Recipe | str) -> Recipe:
    """The recipe without "auto": what a forward multiplied its backward does, wherever that is traced."""
    recipe = recipe_of(op, recipe)
    return dataclasses.replace(recipe, compute="fold" if form_of(recipe) == "fold" else "exact")


def quantized(x: jax.Array, recipe: Recipe) -> Quantized:
    """x (..., M, K) along its last dim, in the form that the recipe multiplies."""
    form = form_of(recipe)
    if form == "mx":
        return as_multiplied(ops.quantize_row(x, rounding=recipe.rounding))
    quantize = ops.quantize_row_fold if form == "fold" else ops.quantize_rowwise
    return Folded(*quantize(x, rounding=recipe.rounding))


def quantized_transposed(w: jax.Array, recipe: Recipe) -> Quantized:
    """w (G, N, K) along N -> q (G, K, N), in the form that the recipe multiplies."""
    form = form_of(recipe)
    if form == "row":
        return quantized(w.mT, recipe)
    turned = ops.quantize_col(w, rounding=recipe.rounding)
    return as_multiplied(turned) if form == "mx" else Folded(*ops.fold_rows(*turned))


def quantized_both(w: jax.Array, recipe: Recipe) -> tuple[Quantized, Quantized]:
    """`quantized` and `quantized_transposed` from one read of w, MXFP8 not dequantized yet."""
    if form_of(recipe) == "row":
        return quantized(w, recipe), quantized(w.mT, recipe)
    q, sf, q_t, sf_t = ops.quantize_both(w, rounding=recipe.rounding)
    if form_of(recipe) == "fold":
        return Folded(*ops.fold_rows(q, sf)), Folded(*ops.fold_rows(q_t, sf_t))
    return (q, sf), (q_t, sf_t)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights with the bytes that the products multiply in their place; made by `quantize_weights`.

    values (G, N, K): bf16 or fp32, differentiable; forward and input gradient do not read it, and its cotangent is
    the weight gradient. as_stored, transposed: q and sf (uint8) along the last dim and along dim 1, or what they
    dequantize to (bf16) where exact products multiply that, on Hopper; None for recipe "bf16". form, rounding: how they
    were made, static. Every array's first dim is G: one PartitionSpec serves all.
    """

    values: jax.Array
    as_stored: Quantized | None
    transposed: Quantized | None
    form: Form = dataclasses.field(metadata={"static": True})
    rounding: Rounding = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    @property
    def ndim(self) -> int:
        return self.values.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """What the weight gradient comes in."""
        return self.values.dtype

    def with_values(self, values: jax.Array) -> "QuantizedWeights":
        """The same bytes for values that are differentiated: the parameter that they were quantized from.

        Raises ValueError for another shape, TypeError unless it is bf16 or fp32.
        """
        check_floats("with_values", "values", values)
        if values.shape != self.values.shape:
            fail(ValueError, "with_values", "values", f"shape {values.shape}", f"allowed: {self.values.shape}")
        return dataclasses.replace(self, values=values)

    def cotangent(self, grad: jax.Array) -> Any:
        """The cotangent of weights whose values have gradient `grad`: bytes have none."""
        return dataclasses.replace(self, values=grad, as_stored=None, transposed=None)


Weights = jax.Array | QuantizedWeights


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoValues:
    """Of an array, what a backward that does not read it asks for."""

    dtype: jnp.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Held(QuantizedWeights):
    """The bytes of an array for one call and its backward, whose cotangent is the array's."""

    def cotangent(self, grad: jax.Array) -> jax.Array:
        return grad


def held(w: Weights, recipe: Recipe, backward: bool) -> Weights:
    """w for a forward and its backward. Without an input gradient the two do not share a read of w: XLA then drops the
    second. It may not be left out here: what JAX saves has one structure, whichever arguments are differentiated.
    """
    if isinstance(w, QuantizedWeights) or form_of(recipe) == "bf16":
        return w
    both = quantized_both(w, recipe) if backward else (quantized(w, recipe), quantized_transposed(w, recipe))
    return _Held(w, *both, form_of(recipe), recipe.rounding)


def saved(w: Weights, stored: Stored = "nk") -> Weights:
    """What a backward needs of w: of values that stand beside their bytes, the dtype and the bytes along N."""
    if not isinstance(w, QuantizedWeights) or w.as_stored is None:
        return w
    values = cast(jax.Array, NoValues(w.dtype))
    if stored == "nk":
        return dataclasses.replace(w, values=values, as_stored=None)
    return dataclasses.replace(w, values=values, transposed=None)


def cotangent_of(w: Weights, grad: jax.Array) -> Any:
    """The cotangent of w, as `saved` left it, from its gradient."""
    return w.cotangent(grad) if isinstance(w, QuantizedWeights) else grad


def quantize_weights(w: jax.Array, recipe: Recipe | str = "mxfp8_wgrad_with_hp") -> QuantizedWeights:
    """Quantize w (G, N, K) bf16 or fp32 along both of its dims, for all products until the next optimizer step.

    `mxfp8_grouped_mm`, `ragged_dot_mxfp8`, `grouped_swiglu_ffn` and `moe.apply` take the result wherever they take
    an array, with a recipe of the same form and rounding. Quantize once per step outside of `jax.grad`, and inside
    put the parameter in, which then gets the gradient:

        cached = quantize_weights(params["w"], recipe=recipe)

        def loss(params, x):
            return mxfp8_grouped_mm(x, cached.with_values(params["w"]), ends, recipe=recipe).sum()

        grads = jax.tree.map(jnp.add, *(jax.grad(loss)(params, x) for x in microbatches))

    The bytes are integers and have no gradient; `jax.grad(..., allow_int=True)` with respect to the whole gives them
    float0, and zeros to what stands for them in bf16. "auto" chooses their form here. Works under jit, shard_map and
    remat, and where w is differentiated.

    >>> quantize_weights(jnp.ones((2, 32, 64))).as_stored[1].shape
    (2, 32, 2)

    Raises ValueError unless w has 3 dims, N and K multiples of 32, TypeError for another dtype.
    """
    op, recipe = "quantize_weights", settled("quantize_weights", recipe)
    check_floats(op, "w", w)
    if w.ndim != 3:
        fail(ValueError, op, "w", f"shape {w.shape}", "allowed: (G, N, K)")
    form = form_of(recipe)
    if form == "bf16":
        return QuantizedWeights(w, None, None, form, recipe.rounding)
    require_multiple(op, "w", w.shape[1], BLOCK, "dim 1", "the input gradient quantizes along it")
    require_multiple(op, "w", w.shape[2], BLOCK, "dim 2", "the product quantizes along it")
    fixed = lax.stop_gradient(w)
    as_stored, transposed = map(_on_this_device, quantized_both(fixed, recipe))
    return QuantizedWeights(w, as_stored, transposed, form, recipe.rounding)


def check_weights(op: str, argument: str, w: object, recipe: Recipe) -> None:
    """TypeError unless w is a float array or QuantizedWeights, ValueError for another recipe's."""
    if not isinstance(w, QuantizedWeights):
        check_floats(op, argument, w, " or QuantizedWeights")
        return
    check_floats(op, argument, w.values)
    form = form_of(recipe)
    if w.form != form or (form != "bf16" and w.rounding != recipe.rounding):
        got = f"QuantizedWeights of form {w.form!r} with {w.rounding.name}"
        allowed = f"allowed: form {form!r} with {recipe.rounding.name}, as recipe {recipe.name!r} multiplies here"
        fail(ValueError, op, argument, got, f"{allowed}; call quantize_weights with that recipe")


def along_k(w: Weights, recipe: Recipe, stored: Stored = "nk") -> jax.Array | Quantized:
    """The right operand (G, N, K) of a product over K."""
    return _as_stored(w, recipe) if stored == "nk" else _transposed(w, recipe)


def along_n(w: Weights, recipe: Recipe, stored: Stored = "nk") -> jax.Array | Quantized:
    """The right operand (G, K, N) of a product over N."""
    return _transposed(w, recipe) if stored == "nk" else _as_stored(w, recipe)


def _as_stored(w: Weights, recipe: Recipe) -> jax.Array | Quantized:
    if isinstance(w, QuantizedWeights):
        if w.as_stored is not None:
            return w.as_stored
        w = w.values
    return w.astype(jnp.bfloat16) if form_of(recipe) == "bf16" else quantized(w, recipe)


def _transposed(w: Weights, recipe: Recipe) -> jax.Array | Quantized:
    if isinstance(w, QuantizedWeights):
        if w.transposed is not None:
            return w.transposed
        w = w.values
    return w.astype(jnp.bfloat16).mT if form_of(recipe) == "bf16" else quantized_transposed(w, recipe)
