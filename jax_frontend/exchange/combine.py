"""Outputs of experts back to the ranks and rows that `dispatch` took them from.

    groups (P, N), route --gather--> exchange [--sum over each token's replicas-->] rows (M, N), or tokens (T, N)

The gradient of the groups is sent in MXFP8 if the recipe quantizes.
"""

import jax
import jax.numpy as jnp

from ...core_kernels.launch import fail
from ..ops.checks import check_floats, check_shape, check_type, dtype_name
from ..ops.mx_array import MXGradArray
from ..ops.shapes import Float, Float32
from ..routing.overflow import nan_gradients_of_probs, nan_values
from .route import Route


@jax.named_scope("mxep.combine")
def combine(
    groups: Float[jax.Array, "P N"] | MXGradArray,
    route: Route,
    probs: Float32[jax.Array, "T top_k"] | None = None,
    *,
    out_dtype: jax.typing.DTypeLike | None = None,
) -> Float[jax.Array, "M N"]:
    """Take expert outputs back to the ranks and rows that `dispatch` took them from; differentiable.

    Args:
        groups: (P, N) bf16 or fp32, or an MXGradArray, whose gradient is received as MXFP8 bytes.
        route: of `dispatch`.
        probs: of TokenReplicas, (T, top_k) float32, the weight of each replica in its token's sum; None is a weight of
            1.
        out_dtype: bf16 or fp32; None is the dtype of groups.

    Returns:
        (M, N) rows; or, of TokenReplicas, (T, N), each token's weighted sum over its replicas in fp32, rounded once. A
        dropped row makes NaN or zeros, as `dispatch` says. If the recipe quantizes, the gradient of groups is MXFP8,
        dequantized unless groups is an MXGradArray.

    Raises:
        ValueError: shape.
        TypeError: dtype.

    Example:
        >>> groups, _, route = dispatch(jnp.ones((3, 32)), jnp.array([1, 2]))
        >>> combine(groups.dequantize(), route).shape
        (3, 32)
    """
    op = "combine"
    check_type(op, "route", route, Route)
    if not isinstance(groups, MXGradArray):
        check_floats(op, "groups", groups, " or an MXGradArray")
    rows_of_groups = route.row_map.row_map.shape[0]
    if len(groups.shape) != 2 or groups.shape[0] != rows_of_groups:
        fail(ValueError, op, "groups", f"shape {groups.shape}", f"allowed: ({rows_of_groups}, N), as dispatched")
    out_dtype = dtype_name(op, "out_dtype", groups.dtype if out_dtype is None else out_dtype)
    if probs is not None:
        if not route.top_k:
            allowed = "allowed: None for rows; the sum over replicas, of TokenReplicas, is weighted"
            fail(ValueError, op, "probs", "an array", allowed)
        check_shape(op, "probs", probs, route.probs_shape, "one weight per replica", "float32")
        probs = nan_gradients_of_probs(op, jnp.asarray(probs), route.lost)
    if not route.recipe.mx and isinstance(groups, MXGradArray):
        allowed = f"allowed: an array, after a dispatch of recipe {route.recipe.name!r}, which sends no MXFP8"
        fail(TypeError, op, "groups", "an MXGradArray", allowed)
    if route.recipe.mx and not isinstance(groups, MXGradArray):
        groups = MXGradArray.wrap(groups)
    return nan_values(op, route.exchange.combine(groups, route, probs, out_dtype), route.lost)
