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

import jax

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail, require_multiple
from ..core_kernels.recipe import Recipe
from ._call import jitted, vary_alike
from ._checks import check_bias, check_blocks, check_floats, check_type, dtype_name
from ._derivatives import reverse_only
from ._shapes import Float, Int
from .gathers import ungather
from .groups import LaidOut, ends_of, pad_groups
from .mx_array import MXArray, MXGradArray, differentiated, received, values_of
from .ops import RowMap
from .products import (
    bias_gradient,
    for_backward,
    input_gradient,
    output_gradient_operands,
    product,
    quantize_activation,
    token_operand,
    weight_gradient,
)
from .weights import (
    Layout,
    NoValues,
    QuantizedWeights,
    Weights,
    check_weights,
    cotangent_of,
    for_call,
    resolve_compute,
    saved,
)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _grouped_mm(x, w, group_ends, bias, recipe, out_dtype, mx_grad, layout):
    out = product(x, w, group_ends, recipe, out_dtype, layout, bias)
    return MXGradArray.of(out) if mx_grad else out


def _grouped_mm_fwd(x, w, group_ends, bias, recipe, out_dtype, mx_grad, layout):
    backward = differentiated(x)
    x, w, group_ends, bias = values_of((x, w, group_ends, bias))
    rows, tokens = quantize_activation(x, group_ends, recipe)
    w = for_call(w, recipe, backward)
    out = _grouped_mm(rows, w, group_ends, bias, recipe, out_dtype, mx_grad, layout)
    return out, (NoValues(x.dtype) if tokens else for_backward(x, recipe), tokens, saved(w, layout), group_ends, bias)


def _grouped_mm_bwd(recipe, out_dtype, mx_grad, layout, residuals, grad):
    x, tokens, w, group_ends, bias = residuals
    grad = received(grad)
    dbias = None if bias is None else bias_gradient(grad, group_ends)
    dout, dout_tokens = output_gradient_operands(grad, group_ends, recipe)
    dx = input_gradient(dout, w, group_ends, recipe, x.dtype, layout)
    tokens = tokens or token_operand(x, group_ends, recipe)
    dw = weight_gradient(dout_tokens, tokens, group_ends, w.dtype, layout)
    dx = MXArray.cotangent(dx) if isinstance(x, MXArray) else dx
    return dx, cotangent_of(w, dw), None, dbias


_grouped_mm.defvjp(_grouped_mm_fwd, _grouped_mm_bwd, symbolic_zeros=True)
_grouped_mm_jitted = jitted(_grouped_mm, 4, 5, 6, 7)


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
    out = _grouped_mm_jitted(x, w, group_ends, bias, recipe, out_dtype, mx_grad, layout)
    return ungather("grouped_mm", out, maps.row_map, maps.inverse) if maps else out


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

    x: (M, K) bf16 or fp32, quantized here along K; or an MXArray, used as it is. The recipes "bf16" and "fp8_..."
        dequantize an MXArray.
    w: (G, N, K) bf16 or fp32, as a linear layer stores it; or its QuantizedWeights, made with the same recipe, whose
        `values` get the gradient. K and N are multiples of 32, unless the recipe is "bf16".
    group_ends: (G,) int32, the end of each group of rows; or the RowMap or Route that laid the rows out, which has
        them. Rows past the last end give zeros. An eager call warns if these are more than half of the rows.
    recipe: a `Recipe` or its name: "mxfp8", "mxfp8_wgrad_with_hp", "fp8_rowwise", "fp8_blockwise" or "bf16".
        `Recipe.compute` "auto" follows `jax.default_backend()`, or `lower_for`, when the call is traced. A folded
        product runs on every backend.
    bias: (N,) for all groups or (G, N), bf16 or fp32; or None. The kernel adds it to the fp32 sums, before the rounding
        to out_dtype.
    out_dtype: "bfloat16" or "float32", or the dtype. The gradients of x, w and bias have their argument's dtype.
    pad_token_groups: the weight gradient of recipe "mxfp8" quantizes blocks of 32 tokens. True pads each group to
        whole blocks, so that groups of any size are allowed. False saves those passes for group ends that are multiples
        of 32; the weight gradient of any other group is NaN.
    mx_grad: return an MXGradArray, whose gradient arrives as MXFP8 bytes from `unpermute_hp_fwd_mxfp8_bwd`,
        `a2a_combine_hp_fwd_mxfp8_bwd` or `combine`.
    group_sizes: (G,) of an integer dtype, the rows of each group, in place of group_ends.

    Returns (M, N) of out_dtype. w is quantized in every call; `quantize_weights` quantizes it once for several calls.

    >>> x, w = jnp.ones((3, 32), jnp.bfloat16), jnp.ones((2, 64, 32), jnp.bfloat16)
    >>> grouped_mm(x, w, jnp.array([1, 2]))[:, 0].tolist()
    [32.0, 32.0, 0.0]
    >>> grouped_mm(x, w, group_sizes=jnp.array([1, 2]))[:, 0].tolist()
    [32.0, 32.0, 32.0]

    Raises ValueError (shapes, an unknown recipe, QuantizedWeights of another recipe, both or none of group_ends and
    group_sizes; their values in eager calls and under checkify) and TypeError (dtypes).

    Source: OCP Microscaling Formats (MX) Specification v1.0, section 6.
    """
    op = "grouped_mm"
    recipe, out_dtype = resolve_compute(op, recipe), dtype_name(op, "out_dtype", out_dtype)
    check_type(op, "mx_grad", mx_grad, bool)
    check_type(op, "pad_token_groups", pad_token_groups, bool)
    if not isinstance(x, MXArray):
        check_floats(op, "x", x, " or an MXArray")
    check_weights(op, "w", w, recipe)
    if w.ndim != 3 or len(x.shape) != 2:
        fail(ValueError, op, "x, w", f"shapes {x.shape}, {w.shape}", "allowed: (M, K) and (G, N, K)")
    group_ends = ends_of(op, group_ends, group_sizes, x, w.shape[0])
    if bias is not None:
        bias = check_bias(op, "bias", bias, *w.shape[:2])
    if recipe.operands != "bf16":
        require_multiple(op, "w", w.shape[1], BLOCK, "dim 1, N,", "the input gradient quantizes along it")
    x, w, bias = reverse_only(op, (x, w, bias))
    check_blocks(op, "x", x.shape[0], group_ends, recipe.wgrad_mx and not pad_token_groups)
    options = {"bias": bias, "mx_grad": mx_grad, "pad": pad_token_groups}
    return unchecked_grouped_mm(x, w, group_ends, recipe, out_dtype, **options)
