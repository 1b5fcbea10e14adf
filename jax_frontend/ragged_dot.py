"""`jax.lax.ragged_dot` in MXFP8: the same arguments, weights read as they lie.

out  = lhs rhs        rhs (G, K, N) quantized along K, transposed by the kernel
dlhs = dout rhs^T     rhs quantized along N, as it lies
drhs = lhs^T dout     written (G, K, N)
"""

import jax
import jax.numpy as jnp

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail, require_multiple
from ..core_kernels.recipe import Recipe
from ._checks import check_counts, check_floats, check_integers, dtype_name
from ._derivatives import reverse_only
from .vjp import grouped_mm
from .weights import Weights, check_weights, settled


def ragged_dot_mxfp8(
    lhs: jax.Array,
    rhs: Weights,
    group_sizes: jax.Array,
    *,
    recipe: Recipe | str = "mxfp8_wgrad_with_hp",
    preferred_element_type: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """One matrix product per group of rows in MXFP8, as `jax.lax.ragged_dot` is called; differentiable in lhs and rhs.

    lhs: (M, K) bf16 or fp32. rhs: (G, K, N) bf16 or fp32, or QuantizedWeights of it, made with the same recipe.
    group_sizes: (G,) of any integer dtype and any sizes; rows past their sum give zeros.
    recipe: as in `mxfp8_grouped_mm`. With "mxfp8", whose weight gradient quantizes along the tokens, rows are copied
        into groups padded to the recipe's alignment, and back.
    Returns (M, N) of preferred_element_type, bf16 or fp32; None is fp32 if lhs or rhs is, else bf16. The gradients
    have their argument's shape and dtype.

    >>> ragged_dot_mxfp8(jnp.ones((2, 32)), jnp.ones((2, 32, 32)), jnp.array([1, 1]))[:, 0].tolist()
    [32.0, 32.0]

    Raises ValueError if K or N is no multiple of 32, for shapes that do not fit, an unknown recipe or QuantizedWeights
    of another one; TypeError for other dtypes.
    """
    op, recipe = "ragged_dot_mxfp8", settled("ragged_dot_mxfp8", recipe)
    check_floats(op, "lhs", lhs)
    check_weights(op, "rhs", rhs, recipe)
    check_integers(op, "group_sizes", group_sizes)
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        fail(ValueError, op, "lhs, rhs", f"shapes {lhs.shape}, {rhs.shape}", "allowed: (M, K) and (G, K, N)")
    if group_sizes.shape != rhs.shape[:1]:
        allowed = f"allowed: {rhs.shape[:1]}, one size per group of rhs"
        fail(ValueError, op, "group_sizes", f"shape {group_sizes.shape}", allowed)
    if recipe.operands != "bf16":
        require_multiple(op, "rhs", rhs.shape[1], BLOCK, "dim 1, K,", "the product quantizes along it")
        require_multiple(op, "rhs", rhs.shape[2], BLOCK, "dim 2, N,", "the input gradient quantizes along it")
    out_dtype = jnp.promote_types(lhs.dtype, rhs.dtype).name
    if preferred_element_type is not None:
        out_dtype = dtype_name(op, "preferred_element_type", preferred_element_type)
    sizes = jnp.asarray(group_sizes).astype(jnp.int32)
    check_counts(op, sizes, 1, lhs.shape[0], "group_sizes")
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    lhs, rhs = reverse_only(op, (lhs, rhs))
    out = grouped_mm(lhs, rhs, ends, recipe, out_dtype, stored="kn")
    assert isinstance(out, jax.Array)
    return out
