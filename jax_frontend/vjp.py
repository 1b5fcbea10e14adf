"""The grouped product with its gradients, quantized to MXFP8 on the way.

    lhs (M, K) --along K--.                              dout (M, N) --along N--.
                          +--> out (M, N)                                       +--> dlhs (M, K)
    rhs_t (G, N, K) ------'                rhs_t quantized along N (transposed) '

    dout, lhs: bf16, or both quantized along the tokens --> drhs_t (G, N, K)
    bias (G, N), if any, is added to out's sums; dbias: sums of dout's rows, as a product with ones

Saved for the backward: lhs; or in its place, where the weight gradient folds it, its codes along the tokens, which the
forward's read of lhs made too: half of the memory of bf16. And rhs_t along N, from the forward's read of it.
An MXArray enters as the bytes that it is, and so does the gradient that an MXGradArray receives.
"""

from functools import partial

import jax
import jax.numpy as jnp

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail, require_multiple
from ..core_kernels.recipe import Recipe
from ._call import jitted, vary_alike
from ._checks import check_blocks, check_floats, check_integers, check_shape, check_type, dtype_name
from ._derivatives import reverse_only
from .mx_array import MXArray, MXGradArray, differentiated, received, values_of
from .permute import pad_groups, unpermute_hp_fwd_mxfp8_bwd
from .products import activation, bias_gradient, gradient_operands, input_gradient, product, tokens_of, weight_gradient
from .weights import NoValues, Stored, Weights, check_weights, cotangent_of, held, saved, settled


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6, 7))
def _grouped_mm(lhs, rhs, group_ends, bias, recipe, out_dtype, mx_grad, stored):
    out = product(lhs, rhs, group_ends, recipe, out_dtype, stored, bias)
    return MXGradArray.of(out) if mx_grad else out


def _grouped_mm_fwd(lhs, rhs, group_ends, bias, recipe, out_dtype, mx_grad, stored):
    backward = differentiated(lhs)
    lhs, rhs, group_ends, bias = values_of((lhs, rhs, group_ends, bias))
    rows, tokens = activation(lhs, group_ends, recipe)
    rhs = held(rhs, recipe, backward)
    out = _grouped_mm(rows, rhs, group_ends, bias, recipe, out_dtype, mx_grad, stored)
    return out, (NoValues(lhs.dtype) if tokens else lhs, tokens, saved(rhs, stored), group_ends, bias)


def _grouped_mm_bwd(recipe, out_dtype, mx_grad, stored, residuals, grad):
    lhs, tokens, rhs, group_ends, bias = residuals
    grad = received(grad)
    dbias = None if bias is None else bias_gradient(grad, group_ends)
    dout, dout_tokens = gradient_operands(grad, group_ends, recipe)
    dlhs = input_gradient(dout, rhs, group_ends, recipe, lhs.dtype, stored)
    tokens = tokens or tokens_of(lhs, group_ends, recipe)
    drhs = weight_gradient(dout_tokens, tokens, group_ends, rhs.dtype, stored)
    dlhs = MXArray.cotangent(dlhs) if isinstance(lhs, MXArray) else dlhs
    return dlhs, cotangent_of(rhs, drhs), None, dbias


_grouped_mm.defvjp(_grouped_mm_fwd, _grouped_mm_bwd, symbolic_zeros=True)
_grouped_mm_jitted = jitted(_grouped_mm, 4, 5, 6, 7)


def grouped_mm(
    lhs: jax.Array | MXArray, rhs: Weights, group_ends: jax.Array, recipe: Recipe,
    out_dtype: str,
    *, bias: jax.Array | None = None, mx_grad: bool = False, stored: Stored = "nk", pad: bool = True,
) -> jax.Array | MXGradArray:  # fmt: skip
    """The product below the checks of its public forms; `pad` gives the recipe whole blocks and unpads the result."""
    maps = None
    if pad and recipe.wgrad_mx:
        lhs, maps = pad_groups(lhs, group_ends, recipe.alignment)
        group_ends = maps.group_ends
    lhs, rhs, group_ends, bias = vary_alike(lhs, rhs, group_ends, bias)
    out = _grouped_mm_jitted(lhs, rhs, group_ends, bias, recipe, out_dtype, mx_grad, stored)
    return unpermute_hp_fwd_mxfp8_bwd(out, maps) if maps else out


def mxfp8_grouped_mm(
    A: jax.Array | MXArray,
    rhs_t: Weights,
    group_ends: jax.Array | None = None,
    *,
    group_sizes: jax.Array | None = None,
    bias: jax.Array | None = None,
    recipe: Recipe | str = "mxfp8_wgrad_with_hp",
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    mx_grad: bool = False,
    pad_token_groups: bool = True,
) -> jax.Array | MXGradArray:
    """One matrix product per group of rows, quantized to MXFP8 on the way; differentiable in A, rhs_t and bias.

    A: (M, K) bf16 or fp32, quantized here, or an MXArray, used as it is.
    rhs_t: (G, N, K) bf16 or fp32, each group's weight transposed, as a linear layer stores it, quantized here, or
        QuantizedWeights of it, made with the same recipe; their `values` get the gradient.
    group_ends: (G,) int32, where each group ends; or group_sizes (G,) int32. Rows past the last end give zeros.
    bias: (N,) for all groups or (G, N), one per group, bf16 or fp32; None. It is added to the sums, before they are
        rounded to out_dtype.
    recipe: "mxfp8_wgrad_with_hp" multiplies bf16 in the weight gradient; "mxfp8" quantizes its operands along
        the tokens; "bf16" quantizes nothing and takes no MXArray. `Recipe.compute` says whether MXFP8 is multiplied as
        it is or folded; "auto" follows `jax.default_backend()`, or `lower_for`, when the call is traced. A folded
        product runs everywhere: a program that is placed on another backend stays right.
    mx_grad: return an MXGradArray, for `unpermute_hp_fwd_mxfp8_bwd` and `a2a_combine_hp_fwd_mxfp8_bwd` to
        hand their MXFP8 gradient to without dequantizing it.
    pad_token_groups: of recipe "mxfp8" alone: copy the rows into groups of whole blocks of 32, and the result back, so
        that groups of any size are right. False saves the copies; the groups then end at multiples of 32, or the weight
        gradients of those that do not, or begin elsewhere, are NaN inside jit, where nothing checks values.
    Returns (M, N) in out_dtype, bf16 or fp32.

    >>> mxfp8_grouped_mm(jnp.ones((2, 32)), jnp.ones((2, 32, 32)), jnp.array([1, 2], jnp.int32))[:, 0].tolist()
    [32.0, 32.0]

    Raises ValueError if K or N is no multiple of 32, for an unknown recipe, QuantizedWeights of another one, or if
    not exactly one of group_ends and group_sizes is given; TypeError for other dtypes.
    """
    op = "mxfp8_grouped_mm"
    recipe, out_dtype = settled(op, recipe), dtype_name(op, "out_dtype", out_dtype)
    check_type(op, "mx_grad", mx_grad, bool)
    check_type(op, "pad_token_groups", pad_token_groups, bool)
    if (group_ends is None) == (group_sizes is None):
        fail(ValueError, op, "group_ends", "both or neither of group_ends, group_sizes", "allowed: exactly one")
    given = group_ends if group_sizes is None else group_sizes
    check_integers(op, "group_ends" if group_sizes is None else "group_sizes", given)
    if not isinstance(A, MXArray):
        check_floats(op, "A", A, " or an MXArray")
    check_weights(op, "rhs_t", rhs_t, recipe)
    ends = jnp.asarray(group_ends) if group_sizes is None else jnp.cumsum(group_sizes, dtype=jnp.int32)
    if isinstance(A, MXArray) and not recipe.mx:
        fail(TypeError, op, "A", f"MXArray with recipe {recipe.name!r}", "allowed: an array; call A.dequantize()")
    if rhs_t.ndim != 3 or len(A.shape) != 2:
        fail(ValueError, op, "A, rhs_t", f"shapes {A.shape}, {rhs_t.shape}", "allowed: (M, K) and (G, N, K)")
    check_shape(op, "group_ends", ends, rhs_t.shape[:1], "one end per group of rhs_t", "int")
    if bias is not None:
        bias = _checked_bias(op, bias, rhs_t)
    if recipe.operands != "bf16":
        require_multiple(op, "rhs_t", rhs_t.shape[1], BLOCK, "dim 1, N,", "the input gradient quantizes along it")
    A, rhs_t, bias = reverse_only(op, (A, rhs_t, bias))
    check_blocks(op, "A", A.shape[0], ends, recipe.wgrad_mx and not pad_token_groups)
    return grouped_mm(A, rhs_t, ends, recipe, out_dtype, bias=bias, mx_grad=mx_grad, pad=pad_token_groups)


def _checked_bias(op: str, bias: jax.Array, rhs_t: Weights) -> jax.Array:
    """(G, N) fp32."""
    groups, n, _ = rhs_t.shape
    check_floats(op, "bias", bias)
    if bias.shape not in ((n,), (groups, n)):
        fail(ValueError, op, "bias", f"shape {bias.shape}", f"allowed: ({n},) or ({groups}, {n})")
    # in this order, so that the gradient is rounded after all sums
    return jnp.broadcast_to(jnp.asarray(bias).astype(jnp.float32), (groups, n))
