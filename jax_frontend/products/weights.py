"""Quantized weights: for one call and its backward, or once for many calls.

                                          form "mx"                  form "fold", "row"
    w (G, N, K) --along K, as stored-----> q (G, N, K), sf per 32     q, sf (G, N)     out = x w^T     "as_stored"
                '-along N, transposed---> q (G, K, N), sf per 32     q, sf (G, K)     dx  = dout w    "transposed"

A differentiated call makes both from one read of w and keeps the second for its backward; any other call makes the
first alone. A caller that quantizes once for several calls holds the result of `quantize_weights`.

Frozen weights have the bytes along the last dim alone, without a gradient. A backward dequantizes them and quantizes
the values along N, so its input gradient is the gradient of a call with these values as weights.

Form "mx" on sm_90 dequantizes these bytes and multiplies bf16, and QuantizedWeights there hold the dequantized values.
Weights of layout (G, K, N) swap the two: along N they are read as stored, along K the kernel transposes them.
"""

import dataclasses
import json
from importlib import import_module
from typing import Any, Literal, cast, get_args

import jax
import jax.numpy as jnp
from jax import lax
from jax.export import register_pytree_node_serialization

from ...core_kernels.dispatch import facts
from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import fail, require_multiple
from ...core_kernels.policy.recipe import RECIPES, Form, Recipe
from .. import ops
from ..ops import device
from ..ops.checks import check_floats, check_type
from ..ops.mx_array import MXArray
from ..ops.shapes import Float
from .forms.form import Format, FormatType, WeightOperands, as_bf16

Layout = Literal["GNK", "GKN"]
"""The dims of weights and of their gradient; a linear layer stores (G, N, K)."""
FORMS: dict[Form, FormatType] = {
    name: import_module(f".forms.{name.partition('_')[0]}", __package__).FORM for name in get_args(Form)
}
"""A form is in the file of the first word of its name."""


def format_of(recipe: Recipe) -> Format:
    """The operand form of the recipe's products in a program traced now."""
    arch = device.arch()
    name = recipe.form(arch)
    return FORMS[name](name, recipe.rounding, recipe.wgrad_mx, facts(arch).upcasts)


def recipe_of(op: str, recipe: object) -> Recipe:
    """`Recipe.parse`, whose errors name the op."""
    if isinstance(recipe, Recipe) and recipe.mxfp8_all_to_all is not None:
        allowed = "allowed: None; PyTorch alone takes another choice"
        fail(NotImplementedError, op, "recipe", f"mxfp8_all_to_all {recipe.mxfp8_all_to_all}", allowed)
    if isinstance(recipe, Recipe) or (isinstance(recipe, str) and recipe in RECIPES):
        return Recipe.parse(recipe)
    error = ValueError if isinstance(recipe, str) else TypeError
    fail(error, op, "recipe", repr(recipe), f"allowed: a Recipe or one of {', '.join(map(repr, RECIPES))}")


def resolve_compute(op: str, recipe: Recipe | str) -> Recipe:
    """The recipe with its compute decided, "fold" or "exact", so that forward and backward multiply alike wherever the
    backward is traced."""
    recipe = recipe_of(op, recipe)
    return dataclasses.replace(recipe, compute="fold" if recipe.form(device.arch()) == "fold" else "exact")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QuantizedWeights:
    """Weights and their quantized bytes, which the products multiply instead; made by `quantize_weights`.

    The first dim of every array is G: one PartitionSpec of this dim serves all. `moe.sharded_apply` splits others too.

    Attributes:
        values: (G, N, K), bf16 or fp32, differentiable; forward and input gradient do not read it, and its cotangent is
            the weight gradient.
        as_stored: q and sf (uint8) along the last dim. For exact products on Hopper their dequantized values (bf16);
            None for recipe "bf16".
        transposed: the same along dim 1.
        form: the format of the operands, static.
        rounding: of the scales, static.
    """

    values: jax.Array
    as_stored: Any
    transposed: Any
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
        """Return the same bytes with other values: the parameter that they were quantized from, and that is
        differentiated.

        Args:
            values: (G, N, K) bf16 or fp32.

        Returns:
            The QuantizedWeights.

        Raises:
            ValueError: another shape.
            TypeError: unless it is bf16 or fp32.

        Example:
            >>> w = jnp.ones((2, 32, 64))
            >>> quantize_weights(w).with_values(w).shape
            (2, 32, 64)
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
class FrozenWeights(QuantizedWeights):
    """Weights without a gradient, 1.03 bytes each; made by `quantize_weights(frozen=True)`.

    Attributes:
        values: their dtype alone.
        as_stored: q and sf (uint8) along the last dim.
        transposed: None.
        form: "mx"; folded products fold these bytes.
        rounding: of the scales.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        return self.as_stored[0].shape

    @property
    def ndim(self) -> int:
        return len(self.shape)

    def dequantize(self) -> jax.Array:
        """Return the values.

        Returns:
            (G, N, K) bf16.

        Example:
            >>> quantize_weights(jnp.ones((2, 32, 64)), frozen=True).dequantize().shape
            (2, 32, 64)
        """
        return as_bf16(self.as_stored)

    def with_values(self, values: jax.Array) -> "QuantizedWeights":
        """Raise TypeError: frozen weights have no gradient.

        Args:
            values: of any type.

        Raises:
            TypeError: always.
        """
        allowed = "allowed: weights of quantize_weights without frozen=True"
        fail(TypeError, "with_values", "values", "an array for frozen weights", allowed)

    def cotangent(self, grad: None) -> Any:
        return dataclasses.replace(self, as_stored=None)


def _write_static(static: tuple[Form, Rounding]) -> bytes:
    """The static fields of weights, as `jax.export` writes them."""
    return json.dumps([static[0], static[1].name]).encode()


def _read_static(data: bytes) -> tuple[Form, Rounding]:
    form, rounding = json.loads(data)
    return form, Rounding[rounding]


for _kind in (QuantizedWeights, FrozenWeights):
    register_pytree_node_serialization(
        _kind,
        serialized_name=f"mxep.{_kind.__name__}",
        serialize_auxdata=_write_static,
        deserialize_auxdata=_read_static,
    )
register_pytree_node_serialization(
    NoValues,
    serialized_name="mxep.NoValues",
    serialize_auxdata=lambda static: static.dtype.name.encode(),
    deserialize_auxdata=lambda data: NoValues(jnp.dtype(data.decode())),
)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _CallWeights(QuantizedWeights):
    """The bytes of an array for one call and its backward. Their cotangent is the array's."""

    def cotangent(self, grad: jax.Array) -> jax.Array:
        return grad


def quantize_for_call(w: Weights, form: Format, backward: bool) -> Weights:
    """The quantized w of a forward and its backward, both from one read if there is an input gradient.

    Without an input gradient XLA drops the operand along N. It is present here in any case, since JAX's residuals have
    one structure, whichever arguments are differentiated.
    """
    if isinstance(w, QuantizedWeights) or not form.quantizes:
        return w
    both = form.weights(w) if backward else WeightOperands(form.along_rows(w), form.along_columns(w))
    return _CallWeights(w, both.as_stored, both.transposed, form.name, form.rounding)


def saved(w: Weights, layout: Layout = "GNK") -> Weights:
    """The part of w that a backward reads: of quantized weights the bytes along N, and the dtype of the values."""
    if not isinstance(w, QuantizedWeights) or w.as_stored is None or is_frozen(w):
        return w
    values = cast(jax.Array, NoValues(w.dtype))
    if layout == "GNK":
        return dataclasses.replace(w, values=values, as_stored=None)
    return dataclasses.replace(w, values=values, transposed=None)


def saved_rows(x: Any, w: Weights, form: Format) -> Any:
    """The part of x that a backward reads: for a weight gradient its values, otherwise its dtype."""
    return NoValues(x.dtype) if is_frozen(w) and not isinstance(x, MXArray) else form.saved(x)


def is_frozen(w: Weights) -> bool:
    return isinstance(w, FrozenWeights)


def without_tokens(recipe: Recipe, w: Weights) -> Recipe:
    """The recipe of a product with w. Without a weight gradient no tokens are quantized, and no groups padded."""
    return dataclasses.replace(recipe, wgrad_with_hp=True) if is_frozen(w) else recipe


def cotangent_of(w: Weights, grad: Any) -> Any:
    """The cotangent of w, as returned by `saved`, from its gradient; of frozen weights from None."""
    return w.cotangent(grad) if isinstance(w, QuantizedWeights) else grad


def quantize_weights(
    w: Float[jax.Array, "G N K"], recipe: Recipe | str = "mxfp8", *, frozen: bool = False
) -> QuantizedWeights:
    """Quantize w along both of its last dims, for all calls until w changes.

    Quantize once per optimizer step outside of `jax.grad`. Inside, insert the parameter, which gets the gradient:

        quantized = quantize_weights(params["w"], recipe=recipe)

        def loss(params, x):
            return grouped_mm(x, quantized.with_values(params["w"]), ends, recipe=recipe).sum()

        grads = jax.tree.map(jnp.add, *(jax.grad(loss)(params, x) for x in microbatches))

    The bytes are integers and have no gradient; `jax.grad(..., allow_int=True)` with respect to the whole gives them
    float0, and zeros to dequantized values. The device of this call decides what compute "auto" is. Works under jit,
    shard_map and remat, and for a differentiated w.

    Frozen weights take 1.03 bytes and no gradient, and nothing refers to w. Every MXFP8 recipe multiplies them, and
    recipe "bf16" multiplies their values. The forward is bitwise the forward of w. The input gradient is bitwise the
    gradient of a call with `.dequantize()` of the result as weights.

    Args:
        w: (G, N, K) bf16 or fp32, as a linear layer stores it; N and K multiples of 32. `grouped_mm`,
            `ragged_dot_mxfp8`, `grouped_swiglu_ffn` and `moe.apply` take the result in place of w, with a recipe of the
            same form and rounding.
        recipe: a `Recipe` or its name.
        frozen: for weights that get no gradient, such as the base of LoRA; with an MXFP8 recipe. `grouped_mm`,
            `grouped_swiglu_ffn` and `moe.apply` take them.

    Returns:
        The bytes along the last dim and along dim 1, and w. If frozen, the bytes along the last dim.

    Raises:
        ValueError: shape, a recipe without MXFP8 operands if frozen.
        TypeError: dtype.

    Example:
        >>> quantize_weights(jnp.ones((2, 32, 64))).as_stored[1].shape
        (2, 32, 2)
    """
    op, recipe = "quantize_weights", resolve_compute("quantize_weights", recipe)
    check_floats(op, "w", w)
    if w.ndim != 3:
        fail(ValueError, op, "w", f"shape {w.shape}", "allowed: (G, N, K)")
    check_type(op, "frozen", frozen, bool)
    if frozen and not recipe.mx:
        fail(ValueError, op, "recipe", f"{recipe.name!r} with frozen=True", "allowed: one with operands 'mxfp8'")
    form = format_of(recipe)
    if not form.quantizes:
        return QuantizedWeights(w, None, None, form.name, recipe.rounding)
    require_multiple(op, "w", w.shape[1], BLOCK, "dim 1", "the input gradient quantizes along it")
    require_multiple(op, "w", w.shape[2], BLOCK, "dim 2", "the product quantizes along it")
    if frozen:
        q, sf = ops.quantize_row(lax.stop_gradient(w), rounding=recipe.rounding)
        return FrozenWeights(cast(jax.Array, NoValues(w.dtype)), (q, sf), None, "mx", recipe.rounding)
    as_stored, transposed = map(form.rows, form.weights(lax.stop_gradient(w)))  # MX as this device multiplies it
    return QuantizedWeights(w, as_stored, transposed, form.name, recipe.rounding)


def check_weights(op: str, argument: str, w: object, recipe: Recipe, layout: Layout = "GNK") -> None:
    """Raise TypeError unless w is a float array or QuantizedWeights, ValueError for QuantizedWeights of another form or
    rounding, and for frozen weights in the other layout or with a recipe that does not multiply them."""
    if isinstance(w, FrozenWeights):
        if layout == "GKN":
            allowed = "allowed: an array, QuantizedWeights; grouped_mm takes frozen weights, (G, N, K)"
            fail(ValueError, op, argument, "frozen weights", allowed)
        if recipe.operands not in ("mxfp8", "bf16"):
            got, allowed = f"frozen weights with recipe {recipe.name!r}", "allowed: operands 'mxfp8' or 'bf16'"
            fail(ValueError, op, argument, got, allowed)
        return
    if not isinstance(w, QuantizedWeights):
        check_floats(op, argument, w, " or QuantizedWeights")
        return
    check_floats(op, argument, w.values)
    form = recipe.form(device.arch())
    if w.form != form or (form != "bf16" and w.rounding != recipe.rounding):
        got = f"QuantizedWeights of form {w.form!r} with {w.rounding.name}"
        allowed = f"allowed: form {form!r} with {recipe.rounding.name}, as recipe {recipe.name!r} multiplies here"
        fail(ValueError, op, argument, got, f"{allowed}; call quantize_weights with that recipe")


def along_k(w: Weights, form: Format, layout: Layout = "GNK") -> Any:
    """The right operand of a product over K: (G, N, K), or bf16 as stored."""
    return _as_stored(w, form) if layout == "GNK" else _transposed(w, form)


def along_n(w: Weights, form: Format, layout: Layout = "GNK") -> Any:
    """The right operand of a product over N: (G, K, N), or bf16 as stored."""
    return _transposed(w, form) if layout == "GNK" else _as_stored(w, form)


def _as_stored(w: Weights, form: Format) -> Any:
    if not isinstance(w, QuantizedWeights):
        return form.along_rows(w)
    if isinstance(w, FrozenWeights):
        return form.along_rows(w.as_stored if form.quantizes else w.dequantize())
    return form.along_rows(w.values) if w.as_stored is None else w.as_stored


def _transposed(w: Weights, form: Format) -> Any:
    if not isinstance(w, QuantizedWeights):
        return form.along_columns(w)
    if isinstance(w, FrozenWeights):
        return form.along_columns(w.dequantize())
    return form.along_columns(w.values) if w.transposed is None else w.transposed
