"""Quantized weights: for one call and its backward, or once for many calls.

                                          form "mx"                  form "fold", "row"
    w (G, N, K) --along K, as stored-----> q (G, N, K), sf per 32     q, sf (G, N)     out = x w^T     "as_stored"
                '-along N, transposed---> q (G, K, N), sf per 32     q, sf (G, K)     dx  = dout w    "transposed"

A differentiated call makes both from one read of w and keeps the second for its backward; any other call makes the
first alone. A caller that quantizes once for several calls holds the result of `quantize_weights`.

Form "mx" on sm_90 dequantizes these bytes and multiplies bf16, and QuantizedWeights there hold the dequantized values.
Weights of layout (G, K, N) swap the two: along N they are read as stored, along K the kernel transposes them.
"""

import dataclasses
from typing import Any, Literal, NamedTuple, cast

import jax
import jax.numpy as jnp
from jax import lax

from ..core_kernels.dispatch import facts
from ..core_kernels.formats import BLOCK, WEIGHT_HEADROOM, Rounding
from ..core_kernels.launch import fail, require_multiple
from ..core_kernels.recipe import RECIPES, Form, Recipe
from . import _device, ops
from ._checks import check_floats
from ._shapes import Float

MX = tuple[jax.Array, jax.Array]
"""q and sf, one scale per 32 values, in the order in which a product reads them."""
Layout = Literal["GNK", "GKN"]
"""The dims of weights and of their gradient; a linear layer stores (G, N, K)."""


class Folded(NamedTuple):
    """E4M3 bytes with one scale per row: q (M, K), sf (M,), of weights q (G, N, K), sf (G, N). Along the tokens with
    one scale per feature and chunk of 256 tokens: q (K, M), sf (`spans(M, G)`, K)."""

    q: jax.Array
    sf: jax.Array


class Blockwise(NamedTuple):
    """E4M3 bytes q (M, K) with one fp32 scale per 128 values, sf (M, K/128); of weights q (G, N, K) with one per 128 x
    128 values, sf (G, N/128, K/128)."""

    q: jax.Array
    sf: jax.Array


class Upcast(NamedTuple):
    """MXFP8 dequantized to bf16, the operand of form "mx" on sm_90."""

    x: jax.Array


class KN(NamedTuple):
    """bf16 weights (G, K, N) of a product over K: a linear layer's (G, N, K), as stored, in its input gradient."""

    w: jax.Array


Quantized = MX | Folded | Blockwise | Upcast


def as_multiplied(pair: MX) -> MX | Upcast:
    """MXFP8 as the tensor cores of a program traced now read it: dequantized to bf16 for sm_90."""
    q, sf = pair  # a plain pair, whatever tuple the caller holds: pytrees of weights have one structure
    return Upcast(ops.dequantize(q, sf)) if facts(_device.arch()).upcasts else (q, sf)


def _on_this_device(x: Quantized) -> Quantized:
    return x if isinstance(x, Folded | Blockwise | Upcast) else as_multiplied(x)


def form_of(recipe: Recipe) -> Form:
    """The operand format of the recipe's products in a program traced now."""
    return recipe.form(_device.arch())


def recipe_of(op: str, recipe: object) -> Recipe:
    """`Recipe.parse`, whose errors name the op."""
    if isinstance(recipe, Recipe) and recipe.mx_legs is not None:
        allowed = "allowed: None; PyTorch alone takes another choice"
        fail(NotImplementedError, op, "recipe", f"mx_legs {recipe.mx_legs}", allowed)
    if isinstance(recipe, Recipe) or (isinstance(recipe, str) and recipe in RECIPES):
        return Recipe.parse(recipe)
    error = ValueError if isinstance(recipe, str) else TypeError
    fail(error, op, "recipe", repr(recipe), f"allowed: a Recipe or one of {', '.join(map(repr, RECIPES))}")


def resolve_compute(op: str, recipe: Recipe | str) -> Recipe:
    """The recipe with its compute decided, "fold" or "exact", so that forward and backward multiply alike wherever the
    backward is traced."""
    recipe = recipe_of(op, recipe)
    return dataclasses.replace(recipe, compute="fold" if form_of(recipe) == "fold" else "exact")


def mx_rows(pair: MX, recipe: Recipe, headroom: int = 0) -> Quantized:
    """MX in the recipe's form, "mx" or "fold". headroom: of a fold."""
    if form_of(recipe) == "mx":
        return as_multiplied(pair)
    return Folded(*ops.fold_rows(*pair, headroom=headroom))


def quantize_rows(x: jax.Array, recipe: Recipe, headroom: int = 0) -> Quantized:
    """Quantize x (..., M, K) along its last dim, in the recipe's form. headroom: of a fold."""
    form = form_of(recipe)
    if is_block(form):
        return Blockwise(*ops.quantize_blockwise(x, power_of_two=form == "block_power_of_two"))
    if form == "mx":
        return as_multiplied(ops.quantize_row(x, rounding=recipe.rounding))
    if form == "fold":
        return Folded(*ops.quantize_row_fold(x, rounding=recipe.rounding, headroom=headroom))
    return Folded(*ops.quantize_rowwise(x, rounding=recipe.rounding))


def is_block(form: Form) -> bool:
    """Whether operands have fp32 scales per 128 values."""
    return form in ("block", "block_power_of_two")


def _along_rows(w: jax.Array, recipe: Recipe) -> Quantized:
    """Quantize w (G, N, K) along its last dim, in the recipe's form."""
    form = form_of(recipe)
    if is_block(form):
        return Blockwise(*ops.quantize_squares(w, power_of_two=form == "block_power_of_two"))
    return quantize_rows(w, recipe, WEIGHT_HEADROOM)


def quantize_transposed(w: jax.Array, recipe: Recipe) -> Quantized:
    """Quantize w (G, N, K) along N -> q (G, K, N), in the recipe's form."""
    form = form_of(recipe)
    if is_block(form):
        return quantize_both_ways(w, recipe)[1]
    if form == "row":
        return quantize_rows(w.mT, recipe)
    return mx_rows(ops.quantize_col(w, rounding=recipe.rounding), recipe, WEIGHT_HEADROOM)


def quantize_both_ways(w: jax.Array, recipe: Recipe) -> tuple[Quantized, Quantized]:
    """w along its last dim, and along dim 1, transposed. Only weights scaled by row are read twice. MXFP8 is not
    dequantized here."""
    form = form_of(recipe)
    if is_block(form):
        q, sf, q_t, sf_t = ops.quantize_squares_both(w, power_of_two=form == "block_power_of_two")
        return Blockwise(q, sf), Blockwise(q_t, sf_t)
    if form == "row":
        return quantize_rows(w, recipe), quantize_rows(w.mT, recipe)
    if form == "fold":
        qf, row_sf, qf_t, col_sf = ops.quantize_matrix_fold(w, rounding=recipe.rounding)
        return Folded(qf, row_sf), Folded(qf_t, col_sf)
    q, sf, q_t, sf_t = ops.quantize_both(w, rounding=recipe.rounding)
    return (q, sf), (q_t, sf_t)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights and their quantized bytes, which the products multiply instead; made by `quantize_weights`.

    values (G, N, K): bf16 or fp32, differentiable; forward and input gradient do not read it, and its cotangent is the
    weight gradient. as_stored, transposed: q and sf (uint8) along the last dim and along dim 1; for exact products on
    Hopper their dequantized values (bf16); None for recipe "bf16". form, rounding: the format of the operands, static.
    The first dim of every array is G: one PartitionSpec serves all.
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
        """The dtype of the weight gradient."""
        return self.values.dtype

    def with_values(self, values: jax.Array) -> "QuantizedWeights":
        """Return the same bytes with other values, the parameter that they were quantized from and that is
        differentiated.

        Raises ValueError for another shape, TypeError unless it is bf16 or fp32.
        """
        check_floats("with_values", "values", values)
        if values.shape != self.values.shape:
            fail(ValueError, "with_values", "values", f"shape {values.shape}", f"allowed: {self.values.shape}")
        return dataclasses.replace(self, values=values)

    def cotangent(self, grad: jax.Array) -> Any:
        """The cotangent of weights whose values have gradient `grad`. Bytes have no gradient."""
        return dataclasses.replace(self, values=grad, as_stored=None, transposed=None)


Weights = jax.Array | QuantizedWeights


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class NoValues:
    """The dtype of an array, for a backward that does not read its values."""

    dtype: jnp.dtype


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _CallWeights(QuantizedWeights):
    """The bytes of an array for one call and its backward. Their cotangent is the array's."""

    def cotangent(self, grad: jax.Array) -> jax.Array:
        return grad


def for_call(w: Weights, recipe: Recipe, backward: bool) -> Weights:
    """The quantized w of a forward and its backward, both from one read if there is an input gradient.

    Without an input gradient XLA drops the operand along N. It is present here in any case, since JAX's residuals have
    one structure, whichever arguments are differentiated.
    """
    if isinstance(w, QuantizedWeights) or form_of(recipe) == "bf16":
        return w
    both = quantize_both_ways(w, recipe) if backward else (_along_rows(w, recipe), quantize_transposed(w, recipe))
    return _CallWeights(w, *both, form_of(recipe), recipe.rounding)


def saved(w: Weights, layout: Layout = "GNK") -> Weights:
    """The part of w that a backward reads: of quantized weights the bytes along N, and the dtype of the values."""
    if not isinstance(w, QuantizedWeights) or w.as_stored is None:
        return w
    values = cast(jax.Array, NoValues(w.dtype))
    if layout == "GNK":
        return dataclasses.replace(w, values=values, as_stored=None)
    return dataclasses.replace(w, values=values, transposed=None)


def cotangent_of(w: Weights, grad: jax.Array) -> Any:
    """The cotangent of w, as returned by `saved`, from its gradient."""
    return w.cotangent(grad) if isinstance(w, QuantizedWeights) else grad


def quantize_weights(w: Float[jax.Array, "G N K"], recipe: Recipe | str = "mxfp8") -> QuantizedWeights:
    """Quantize w (G, N, K) along both of its last dims, for all calls until w changes.

    w: bf16 or fp32, as a linear layer stores it; N and K multiples of 32. `grouped_mm`, `ragged_dot_mxfp8`,
    `grouped_swiglu_ffn` and `moe.apply` take the result in place of w, with a recipe of the same form and rounding.
    Quantize once per optimizer step outside of `jax.grad`. Inside, insert the parameter, which gets the gradient:

        quantized = quantize_weights(params["w"], recipe=recipe)

        def loss(params, x):
            return grouped_mm(x, quantized.with_values(params["w"]), ends, recipe=recipe).sum()

        grads = jax.tree.map(jnp.add, *(jax.grad(loss)(params, x) for x in microbatches))

    The bytes are integers and have no gradient; `jax.grad(..., allow_int=True)` with respect to the whole gives them
    float0, and zeros to dequantized values. The device of this call decides what compute "auto" is. Works under jit,
    shard_map and remat, and for a differentiated w.

    >>> quantize_weights(jnp.ones((2, 32, 64))).as_stored[1].shape
    (2, 32, 2)

    Raises ValueError (shape) and TypeError (dtype).
    """
    op, recipe = "quantize_weights", resolve_compute("quantize_weights", recipe)
    check_floats(op, "w", w)
    if w.ndim != 3:
        fail(ValueError, op, "w", f"shape {w.shape}", "allowed: (G, N, K)")
    form = form_of(recipe)
    if form == "bf16":
        return QuantizedWeights(w, None, None, form, recipe.rounding)
    require_multiple(op, "w", w.shape[1], BLOCK, "dim 1", "the input gradient quantizes along it")
    require_multiple(op, "w", w.shape[2], BLOCK, "dim 2", "the product quantizes along it")
    fixed = lax.stop_gradient(w)
    as_stored, transposed = map(_on_this_device, quantize_both_ways(fixed, recipe))
    return QuantizedWeights(w, as_stored, transposed, form, recipe.rounding)


def check_weights(op: str, argument: str, w: object, recipe: Recipe) -> None:
    """Raise TypeError unless w is a float array or QuantizedWeights, ValueError for QuantizedWeights of another form or
    rounding."""
    if not isinstance(w, QuantizedWeights):
        check_floats(op, argument, w, " or QuantizedWeights")
        return
    check_floats(op, argument, w.values)
    form = form_of(recipe)
    if w.form != form or (form != "bf16" and w.rounding != recipe.rounding):
        got = f"QuantizedWeights of form {w.form!r} with {w.rounding.name}"
        allowed = f"allowed: form {form!r} with {recipe.rounding.name}, as recipe {recipe.name!r} multiplies here"
        fail(ValueError, op, argument, got, f"{allowed}; call quantize_weights with that recipe")


def along_k(w: Weights, recipe: Recipe, layout: Layout = "GNK") -> jax.Array | KN | Quantized:
    """The right operand of a product over K: (G, N, K), or bf16 as stored."""
    return _as_stored(w, recipe) if layout == "GNK" else _transposed(w, recipe)


def along_n(w: Weights, recipe: Recipe, layout: Layout = "GNK") -> jax.Array | KN | Quantized:
    """The right operand of a product over N: (G, K, N), or bf16 as stored."""
    return _transposed(w, recipe) if layout == "GNK" else _as_stored(w, recipe)


def _as_stored(w: Weights, recipe: Recipe) -> jax.Array | Quantized:
    if isinstance(w, QuantizedWeights):
        if w.as_stored is not None:
            return w.as_stored
        w = w.values
    return w.astype(jnp.bfloat16) if form_of(recipe) == "bf16" else _along_rows(w, recipe)


def _transposed(w: Weights, recipe: Recipe) -> KN | Quantized:
    if isinstance(w, QuantizedWeights):
        if w.transposed is not None:
            return w.transposed
        w = w.values
    return KN(w.astype(jnp.bfloat16)) if form_of(recipe) == "bf16" else quantize_transposed(w, recipe)
