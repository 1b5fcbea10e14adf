"""The grouped matrix product and its gradients.

    out = x w^T      x (M, K)    --along K--> operand -.
                     w (G, N, K) --along K--> operand -+--> out (M, N) [+ bias]
    dx  = dout w     dout (M, N) --along N--> operand -.
                     w           --along N--> operand -+--> dx (M, K)
    dw  = dout^T x   dout, x: bf16, or both quantized along the tokens --> dw (G, N, K)
    dbias            the sums of dout's rows, computed as a product with ones

The forward saves x, and w along N from the same read that produces w along K. With compute="fold" and recipe "mxfp8" it
saves the E4M3 token operand of x instead of x, which the same read of x produces: half of the memory of bf16. An
MXArray enters as its bytes, and so does the gradient of an MXGradArray.
"""

from functools import partial
from typing import Any, NamedTuple

import jax

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail, require_multiple
from ...core_kernels.policy.recipe import Recipe
from ..ops import RowMap
from ..ops.call import jitted, vary_alike
from ..ops.checks import check_bias, check_blocks, check_floats, check_type, dtype_name
from ..ops.derivatives import reverse_only
from ..ops.mx_array import MXArray, MXGradArray, differentiated, received, values_of
from ..ops.shapes import Float, Int
from .forms.form import AddedBias, Format
from .gathers import ungather
from .groups import LaidOut, ends_of, pad_groups
from .products import bias_gradient
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
    is_frozen,
    quantize_for_call,
    resolve_compute,
    saved,
    saved_rows,
    without_tokens,
)


class Options(NamedTuple):
    """Static arguments. clear_rest: rows past the last end are zeros in the result and in the gradient of x; otherwise
    they are unspecified."""

    form: Format
    out_dtype: str
    mx_grad: bool
    layout: Layout
    clear_rest: bool


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _grouped_mm(x, w, group_ends, bias, options: Options):
    form, added = options.form, None if bias is None else AddedBias(bias)
    rows, w = form.rows(x, group_ends), along_k(w, form, options.layout)
    out = form.mm(rows, w, group_ends, options.out_dtype, added, options.clear_rest)
    return MXGradArray.of(out) if options.mx_grad else out


class Saved(NamedTuple):
    """x: what tokens are made of, if the forward has not made them."""

    x: Any
    tokens: Any
    w: Any
    group_ends: jax.Array
    bias: jax.Array | None


def _grouped_mm_fwd(x, w, group_ends, bias, options: Options):
    backward, form = differentiated(x), options.form
    x, w, group_ends, bias = values_of((x, w, group_ends, bias))
    rows, tokens = form.activation(x, group_ends)
    w = quantize_for_call(w, form, backward)
    out = _grouped_mm(rows, w, group_ends, bias, options)
    kept = NoValues(x.dtype) if tokens else saved_rows(x, w, form)
    return out, Saved(kept, tokens, saved(w, options.layout), group_ends, bias)


def _grouped_mm_bwd(options: Options, residuals: Saved, grad):
    (x, tokens, w, group_ends, bias), form, layout = residuals, options.form, options.layout
    grad = received(grad)
    dbias = None if bias is None else bias_gradient(grad, group_ends)
    dout, dout_tokens = form.gradient(grad, group_ends)
    w_n = along_n(w, form, layout)
    dx = form.mm(form.rows(dout, group_ends), w_n, group_ends, x.dtype, clear_rest=options.clear_rest)
    dw = None
    if not is_frozen(w):
        tokens = tokens or form.tokens(x, group_ends)
        a, b = (dout_tokens, tokens) if layout == "GNK" else (tokens, dout_tokens)
        dw = form.wgrad(a, b, group_ends, w.dtype)
    dx = MXArray.cotangent(dx) if isinstance(x, MXArray) else dx
    return dx, cotangent_of(w, dw), None, dbias


_grouped_mm.defvjp(_grouped_mm_fwd, _grouped_mm_bwd, symbolic_zeros=True)
_grouped_mm_jitted = jitted(_grouped_mm, 4)


def unchecked_grouped_mm(
    x: jax.Array | MXArray, w: Weights, group_ends: jax.Array, recipe: Recipe, out_dtype: str,
    *, bias: jax.Array | None = None, mx_grad: bool = False, layout: Layout = "GNK", pad: bool = True,
) -> jax.Array | MXGradArray:  # fmt: skip
    """`grouped_mm` without its checks. pad: pads the groups to whole blocks if the recipe needs them, and unpads the
    result."""
    maps = None
    if pad and recipe.wgrad_mx:
        x, maps = pad_groups("grouped_mm", x, group_ends, recipe.alignment)
        group_ends = maps.group_ends
    x, w, group_ends, bias = vary_alike(x, w, group_ends, bias)
    options = Options(format_of(recipe), out_dtype, mx_grad, layout, clear_rest=maps is None)  # maps read no such row
    out = _grouped_mm_jitted(x, w, group_ends, bias, options)
    return ungather("grouped_mm", out, maps.row_map, maps.inverse) if maps else out


def check_operands(op: str, x: Any, weights: dict[str, Any], recipe: Recipe, shapes: str) -> None:
    """Raise unless x is floats or an MXArray, weights are floats or QuantizedWeights of the recipe, and x and the first
    of the weights have 2 and 3 dims."""
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    for name, w in weights.items():
        check_weights(op, name, w, recipe)
    name, w = next(iter(weights.items()))
    if len(x.shape) != 2 or w.ndim != 3:
        fail(ValueError, op, f"x, {name}", f"shapes {x.shape}, {w.shape}", f"allowed: {shapes}")


def grouped_mm(
    x: Float[jax.Array, "M K"] | MXArray,
    w: Float[jax.Array, "G N K"] | QuantizedWeights,
    group_ends: Int[jax.Array, " G"] | RowMap | LaidOut | None = None,
    *,
    recipe: Recipe | str = "mxfp8",
    bias: Float[jax.Array, "G N"] | Float[jax.Array, " N"] | None = None,
    out_dtype: jax.typing.DTypeLike = "bfloat16",
    pad_token_groups: bool = True,
    mx_grad: bool = False,
    group_sizes: Int[jax.Array, " G"] | None = None,
) -> Float[jax.Array, "M N"] | MXGradArray:
    """Multiply each group of rows by its own matrix, out = x w^T; differentiable in x, w and bias.

    Args:
        x: (M, K) bf16 or fp32, quantized here along K; or an MXArray, used as it is. The recipes "bf16" and "fp8_..."
            dequantize an MXArray.
        w: (G, N, K) bf16 or fp32, as a linear layer stores it; or its QuantizedWeights, made with the same recipe,
            whose `values` get the gradient; or frozen weights. K and N are multiples of 32, unless the recipe is
            "bf16".
        group_ends: (G,) int32, the end of each group of rows; or the RowMap or Route that laid the rows out, which has
            them. Rows past the last end give zeros. An eager call warns if these are more than half of the rows.
        recipe: a `Recipe` or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise" or "bf16".
            `Recipe.compute` "auto" follows `jax.default_backend()`, or `lower_for`, when the call is traced. A folded
            product runs on every backend.
        bias: (N,) for all groups or (G, N), bf16 or fp32; or None. The kernel adds it to the fp32 sums, before the
            rounding to out_dtype.
        out_dtype: "bfloat16" or "float32", or the dtype. The gradients of x, w and bias have their argument's dtype.
        pad_token_groups: the weight gradient of recipe "mxfp8" quantizes blocks of 32 tokens. True pads each group to
            whole blocks, so that groups of any size are allowed. False saves those passes for group ends that are
            multiples of 32; the weight gradient of any other group is NaN.
        mx_grad: return an MXGradArray, whose gradient is received as MXFP8 bytes from `unpermute_hp_fwd_mxfp8_bwd`,
            `a2a_combine_hp_fwd_mxfp8_bwd` or `combine`.
        group_sizes: (G,) of an integer dtype, the rows of each group, in place of group_ends.

    Returns:
        (M, N) of out_dtype. w is quantized in every call; `quantize_weights` quantizes it once for several calls.

    Raises:
        ValueError: shapes, an unknown recipe, QuantizedWeights of another recipe, both or none of group_ends and
            group_sizes; their values in eager calls and under checkify.
        TypeError: dtypes.

    Example:
        >>> x, w = jnp.ones((3, 32), jnp.bfloat16), jnp.ones((2, 64, 32), jnp.bfloat16)
        >>> grouped_mm(x, w, jnp.array([1, 2]))[:, 0].tolist()
        [32.0, 32.0, 0.0]
        >>> grouped_mm(x, w, group_sizes=jnp.array([1, 2]))[:, 0].tolist()
        [32.0, 32.0, 32.0]

    Source:
        OCP Microscaling Formats (MX) Specification v1.0, section 6.
    """
    op = "grouped_mm"
    recipe, out_dtype = resolve_compute(op, recipe), dtype_name(op, "out_dtype", out_dtype)
    check_type(op, "mx_grad", mx_grad, bool)
    check_type(op, "pad_token_groups", pad_token_groups, bool)
    check_operands(op, x, {"w": w}, recipe, "(M, K) and (G, N, K)")
    recipe = without_tokens(recipe, w)
    if x.shape[1] != w.shape[2]:
        fail(ValueError, op, "x, w", f"shapes {x.shape}, {w.shape}", "allowed: (M, K) and (G, N, K) with the same K")
    group_ends = ends_of(op, group_ends, group_sizes, x, w.shape[0])
    if bias is not None:
        bias = check_bias(op, "bias", bias, *w.shape[:2])
    if recipe.operands != "bf16":
        require_multiple(op, "w", w.shape[1], BLOCK, "dim 1, N,", "the input gradient quantizes along it")
        require_multiple(op, "w", w.shape[2], BLOCK, "dim 2, K,", "the product quantizes along it")
    x, w, bias = reverse_only(op, (x, w, bias))
    check_blocks(op, "x", x.shape[0], group_ends, recipe.wgrad_mx and not pad_token_groups)
    return unchecked_grouped_mm(x, w, group_ends, recipe, out_dtype, bias=bias, mx_grad=mx_grad, pad=pad_token_groups)
