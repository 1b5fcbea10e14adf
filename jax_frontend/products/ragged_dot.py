"""`jax.lax.ragged_dot` in MXFP8: the same arguments, weights (G, K, N) read as stored.

out  = lhs rhs        rhs (G, K, N) quantized along K, transposed by the kernel
dlhs = dout rhs^T     rhs quantized along N, as stored
drhs = lhs^T dout     written (G, K, N)
"""

import jax
import jax.numpy as jnp

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail, require_multiple
from ...core_kernels.policy.recipe import Recipe
from ..ops.checks import check_floats, dtype_name
from ..ops.derivatives import reverse_only
from ..ops.shapes import Float, Int
from .grouped_mm import unchecked_grouped_mm
from .groups import ends_of_sizes
from .weights import QuantizedWeights, check_weights, resolve_compute


def ragged_dot_mxfp8(
    lhs: Float[jax.Array, "M K"],
    rhs: Float[jax.Array, "G K N"] | QuantizedWeights,
    group_sizes: Int[jax.Array, " G"],
    precision: jax.lax.Precision | str | None = None,
    preferred_element_type: jax.typing.DTypeLike | None = None,
    group_offset: None = None,
    out_sharding: None = None,
    *,
    recipe: Recipe | str = "mxfp8",
) -> Float[jax.Array, "M N"]:
    """Multiply each group of rows by its own matrix in MXFP8, with the signature of `jax.lax.ragged_dot`;
    differentiable in lhs and rhs.

    Args:
        lhs: (M, K) bf16 or fp32.
        rhs: (G, K, N) bf16 or fp32, or its QuantizedWeights, made with the same recipe. K and N are multiples of 32,
            unless the recipe is "bf16".
        group_sizes: (G,) of any integer dtype and any sizes, or tokamax's RaggedDotGroupSizes; rows past their sum give
            zeros.
        precision: None or `jax.lax.Precision.DEFAULT`. The recipe is the precision.
        preferred_element_type: bf16 or fp32; None is fp32 if lhs or rhs is, else bf16.
        group_offset: None. JAX implements no group_offset either; it leaves rows out in front. Drop them from lhs, and
            their groups from group_sizes, before the call.
        out_sharding: None. `jax.reshard` moves the result.
        recipe: as in `grouped_mm`. With "mxfp8" the rows are copied into groups padded to the recipe's alignment, and
            back.

    Returns:
        (M, N) of preferred_element_type. The gradients have their argument's shape and dtype.

    Raises:
        ValueError: shapes, an unknown recipe, QuantizedWeights of another recipe.
        TypeError: dtypes.
        NotImplementedError: another precision, an offset, a sharding.

    Example:
        >>> ragged_dot_mxfp8(jnp.ones((2, 32)), jnp.ones((2, 32, 32)), jnp.array([1, 1]))[:, 0].tolist()
        [32.0, 32.0]
    """
    op, recipe = "ragged_dot_mxfp8", resolve_compute("ragged_dot_mxfp8", recipe)
    if precision not in (None, jax.lax.Precision.DEFAULT, "default"):
        allowed = "allowed: None or Precision.DEFAULT; recipe says how operands are held"
        fail(NotImplementedError, op, "precision", repr(precision), allowed)
    if group_offset is not None:
        allowed = "allowed: None; call with the rows and sizes of the groups of rhs alone"
        fail(NotImplementedError, op, "group_offset", repr(group_offset), allowed)
    if out_sharding is not None:
        allowed = "allowed: None; jax.reshard moves the result"
        fail(NotImplementedError, op, "out_sharding", repr(out_sharding), allowed)
    group_sizes = getattr(group_sizes, "value", group_sizes)  # of tokamax
    check_floats(op, "lhs", lhs)
    check_weights(op, "rhs", rhs, recipe, "GKN")
    if lhs.ndim != 2 or rhs.ndim != 3 or lhs.shape[1] != rhs.shape[1]:
        fail(ValueError, op, "lhs, rhs", f"shapes {lhs.shape}, {rhs.shape}", "allowed: (M, K) and (G, K, N)")
    ends = ends_of_sizes(op, group_sizes, lhs.shape[0], rhs.shape[0], "rhs")
    if recipe.operands != "bf16":
        require_multiple(op, "rhs", rhs.shape[1], BLOCK, "dim 1, K,", "the product quantizes along it")
        require_multiple(op, "rhs", rhs.shape[2], BLOCK, "dim 2, N,", "the input gradient quantizes along it")
    out_dtype = jnp.promote_types(lhs.dtype, rhs.dtype).name
    if preferred_element_type is not None:
        out_dtype = dtype_name(op, "preferred_element_type", preferred_element_type)
    lhs, rhs = reverse_only(op, (lhs, rhs))
    out = unchecked_grouped_mm(lhs, rhs, ends, recipe, out_dtype, layout="GKN")
    assert isinstance(out, jax.Array)
    return out
