"""Permute, grouped GEMM and un-permute with their gradients.

    forward    MXArray --permute--> MXArray --grouped mm--> MXGradArray --unpermute--> MXGradArray
                (R, K)               (P, K)                  (P, N)                     (R, N)
    backward    bf16  <--gather----  bf16   <--grouped mm--  MXFP8      <--gather-----  MXFP8

Everything to the left of the grouped GEMM goes forward in MXFP8 and backward in bf16, everything to the
right the other way round, so what crosses the network in MXFP8 meets the GEMM without being dequantized
and quantized again. Semantics of the public names: torchao's MXFP8 expert-parallel functions.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..core_kernels.formats import BLOCK
from ..core_kernels.launch import fail, require_multiple
from ..core_kernels.recipe import Recipe
from . import ops
from ._call import vary, varying_axes
from ._checks import check_counts, check_ends, check_floats, check_integers
from .mx_array import MXArray, MXGradArray, pack
from .ops import RowMap


def _vary_alike(*trees):
    """Arguments that vary along one set of mesh axes. JAX transposes the cast: the gradient of an argument
    that is replicated while others are not is summed over the mesh, as it must be."""
    axes = varying_axes(*jax.tree.leaves(trees))
    return jax.tree.map(lambda x: vary(x, axes), trees)


# --- permute ---------------------------------------------------------------------------------------


@jax.custom_vjp
def _gather_mx(mx: MXArray, row_map: jax.Array, inverse: jax.Array) -> MXArray:
    q, sf = ops.permute_mx(mx.packed(), row_map)
    return MXArray.from_bytes(q, sf, mx.dtype)


def _gather_mx_bwd(inverse, grad: MXArray):
    return MXArray.cotangent(ops.permute_rows(grad.carrier, inverse)), None, None


_gather_mx.defvjp(lambda mx, row_map, inverse: (_gather_mx(mx, row_map, inverse), inverse), _gather_mx_bwd)


@jax.custom_vjp
def _gather(x: jax.Array, row_map: jax.Array, inverse: jax.Array) -> jax.Array:
    return ops.permute_rows(x, row_map)


_gather.defvjp(
    lambda x, row_map, inverse: (_gather(x, row_map, inverse), inverse),
    lambda inverse, grad: (ops.permute_rows(grad, inverse), None, None),
)


def permute_mxfp8_fwd_hp_bwd(
    mx: MXArray,
    num_tokens_per_expert: jax.Array,
    ep_degree: int,
    num_local_experts: int,
    group_size_multiple_of: int = BLOCK,
    *,
    rank_rows: int = 0,
) -> tuple[MXArray, RowMap]:
    """Received rows, rank-major, to padded expert-major rows; forward moves bytes, backward moves floats.

    mx: (R, K). num_tokens_per_expert: (ep_degree * num_local_experts,) int32, rank-major.
    rank_rows: rows each rank's part of mx has (`Exchange.capacity`); 0 if the parts have no slack.
    Returns (MXArray (P, K), RowMap); P holds any split of R rows, padding rows are zeros, and an empty
    expert still gets one aligned group.

    Raises ValueError for counts that do not fit ep_degree, an alignment that is no multiple of 32, TypeError if
    mx is no MXArray or the counts are no integers.
    """
    if not isinstance(mx, MXArray):
        allowed = "allowed: an MXArray; `permute` takes float rows"
        fail(TypeError, "permute_mxfp8_fwd_hp_bwd", "mx", type(mx).__name__, allowed)
    maps = _row_map(mx, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of, rank_rows)
    return _gather_mx(*_vary_alike(mx, maps.row_map, maps.inverse)), maps


def permute(
    x: jax.Array,
    num_tokens_per_expert: jax.Array,
    ep_degree: int,
    num_local_experts: int,
    group_size_multiple_of: int = BLOCK,
    *,
    rank_rows: int = 0,
) -> tuple[jax.Array, RowMap]:
    """`permute_mxfp8_fwd_hp_bwd` for bf16 or fp32 rows, both ways."""
    check_floats("permute", "x", x)
    maps = _row_map(x, num_tokens_per_expert, ep_degree, num_local_experts, group_size_multiple_of, rank_rows)
    return gather_rows(x, maps.row_map, maps.inverse), maps


def _row_map(x, counts, ep_degree, num_local_experts, alignment, rank_rows) -> RowMap:
    check_integers("permute", "num_tokens_per_expert", counts)
    if counts.shape != (ep_degree * num_local_experts,):
        fail(
            ValueError, "permute", "num_tokens_per_expert", f"shape {counts.shape}",
            f"allowed: ({ep_degree * num_local_experts},), ep_degree * num_local_experts",
        )  # fmt: skip
    check_counts("permute", counts, ep_degree if rank_rows else 1, rank_rows or x.shape[0])
    return ops.row_map(
        counts.astype(jnp.int32),
        num_rows=x.shape[0],
        num_local_experts=num_local_experts,
        alignment=alignment,
        rank_rows=rank_rows,
    )


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _spread(x: jax.Array, order: jax.Array, inverse: jax.Array, copies: int) -> jax.Array:
    return ops.permute_rows(x, order // copies)


def _spread_bwd(copies, inverse, grad):
    slots = ops.permute_rows(grad, inverse).reshape(-1, copies, grad.shape[1])
    total, kept = slots.astype(jnp.float32).sum(1), jnp.finfo(grad.dtype)
    # Said explicitly, the rounding stays: XLA drops a conversion to bf16 that is followed by one to fp32,
    # in some programs and not in others.
    return lax.reduce_precision(total, kept.nexp, kept.nmant).astype(grad.dtype), None, None


_spread.defvjp(lambda x, order, inverse, copies: (_spread(x, order, inverse, copies), inverse), _spread_bwd)


def spread_rows(x: jax.Array, order: jax.Array, inverse: jax.Array, copies: int) -> jax.Array:
    """Copy each token to its `copies` slots, in the order of `sort_by_expert`: out[i] = x[order[i] // copies].

    x: (T, D); order, inverse: (T * copies,) int32. The gradient of a token is the fp32 sum over its slots.
    """
    return _spread(*_vary_alike(x, order, inverse), copies)


def gather_rows(x: jax.Array, row_map: jax.Array, inverse: jax.Array) -> jax.Array:
    """x[row_map], zeros where the map is -1; the gradient goes through `inverse`, the map back.

    x: (R, D) bf16 or fp32; row_map: (P,) int32; inverse: (R,) int32.
    """
    return _gather(*_vary_alike(x, row_map, inverse))


# --- un-permute ------------------------------------------------------------------------------------


@jax.custom_vjp
def _ungather_mx(x: MXGradArray, row_map: jax.Array, inverse: jax.Array) -> MXGradArray:
    return MXGradArray.wrap(ops.permute_rows(x.value, inverse))


def _ungather_mx_fwd(x, row_map, inverse):
    # symbolic_zeros hands every leaf over as (value, perturbed).
    return _ungather_mx(MXGradArray.wrap(x.value.value), row_map.value, inverse.value), row_map.value


def _ungather_mx_bwd(row_map, grad: MXGradArray):
    value, mx = grad.parts()
    value = None if value is None else ops.permute_rows(value, row_map)
    mx = None if mx is None else ops.permute_mx(pack(*mx), row_map)
    return MXGradArray.cotangent(value, mx, grad.uses), None, None


_ungather_mx.defvjp(_ungather_mx_fwd, _ungather_mx_bwd, symbolic_zeros=True)
# Outside a jit, shard_map takes no custom_vjp with symbolic zeros.
_ungather_mx_jitted = jax.jit(_ungather_mx, inline=True)


def unpermute_hp_fwd_mxfp8_bwd(input: jax.Array | MXGradArray, maps: RowMap) -> jax.Array | MXGradArray:
    """Padded expert-major rows back to received order, without the padding; rows without a token are zeros.

    input: (P, N), an MXGradArray from `mxfp8_grouped_mm(..., mx_grad=True)`, whose gradient is gathered as
    MXFP8 bytes, or an array, whose gradient is gathered as it is. maps: what the permute returned.
    Returns (R, N), of the kind that came in. Raises ValueError unless the rows are those of the map.
    """
    op = "unpermute_hp_fwd_mxfp8_bwd"
    if not isinstance(input, MXGradArray):
        check_floats(op, "input", input, " or an MXGradArray")
    if len(input.shape) != 2 or input.shape[0] != maps.row_map.shape[0]:
        allowed = f"allowed: ({maps.row_map.shape[0]}, N), the rows of maps.row_map"
        fail(ValueError, op, "input", f"shape {input.shape}", allowed)
    if isinstance(input, MXGradArray):
        input = input.once(op)
        return _ungather_mx_jitted(*_vary_alike(input, maps.row_map, maps.inverse))
    return gather_rows(input, maps.inverse, maps.row_map)


# --- grouped GEMM ----------------------------------------------------------------------------------

Pair = tuple[jax.Array, jax.Array]


def _to_mx(x: MXArray | jax.Array, recipe: Recipe) -> Pair:
    return (x.q, x.sf) if isinstance(x, MXArray) else ops.quantize_row(x, rounding=recipe.rounding)


def _to_float(x: MXArray | jax.Array) -> jax.Array:
    return ops.dequantize(x.q, x.sf, out_dtype="bfloat16") if isinstance(x, MXArray) else x.astype(jnp.bfloat16)


def _product(lhs, rhs_t, group_ends, recipe: Recipe, out_dtype) -> jax.Array:
    if not recipe.quantized:
        return ops.grouped_mm_bf16(_to_float(lhs), _to_float(rhs_t), group_ends, out_dtype=out_dtype)
    weights = ops.quantize_row(rhs_t, rounding=recipe.rounding)
    return ops.grouped_mm_mx(*_to_mx(lhs, recipe), *weights, group_ends, out_dtype=out_dtype)


def _gradients(dout, lhs, rhs_t, group_ends, recipe: Recipe) -> tuple[jax.Array, jax.Array]:
    """dlhs (M, K) and drhs (G, N, K), in the dtypes of lhs and rhs_t."""
    if not recipe.quantized:
        dlhs = ops.grouped_mm_bf16(_to_float(dout), _to_float(rhs_t).mT, group_ends, out_dtype=lhs.dtype)
        return dlhs, ops.grouped_wgrad_bf16(_to_float(dout), _to_float(lhs), group_ends, out_dtype=rhs_t.dtype)
    rounding, cols = recipe.rounding, None
    if recipe.wgrad_with_hp or isinstance(dout, MXArray):
        rows = _to_mx(dout, recipe)
    else:
        q, sf, q_t, sf_t = ops.quantize_both(dout, rounding=rounding)  # one read for both products
        rows, cols = (q, sf), (q_t, sf_t)
    dlhs = ops.grouped_mm_mx(*rows, *ops.quantize_col(rhs_t, rounding=rounding), group_ends, out_dtype=lhs.dtype)
    if recipe.wgrad_with_hp:
        return dlhs, ops.grouped_wgrad_bf16(_to_float(dout), _to_float(lhs), group_ends, out_dtype=rhs_t.dtype)
    cols = cols or ops.quantize_col(_to_float(dout), rounding=rounding)
    lhs_cols = ops.quantize_col(lhs.dequantize() if isinstance(lhs, MXArray) else lhs, rounding=rounding)
    return dlhs, ops.grouped_wgrad_mx(*cols, *lhs_cols, group_ends, out_dtype=rhs_t.dtype)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _grouped_mm(lhs, rhs_t, group_ends, recipe, out_dtype, mx_grad):
    out = _product(lhs, rhs_t, group_ends, recipe, out_dtype)
    return MXGradArray.wrap(out) if mx_grad else out


def _grouped_mm_fwd(lhs, rhs_t, group_ends, recipe, out_dtype, mx_grad):
    lhs = jax.tree.map(lambda leaf: leaf.value, lhs, is_leaf=lambda leaf: hasattr(leaf, "perturbed"))
    rhs_t, group_ends = rhs_t.value, group_ends.value
    return _grouped_mm(lhs, rhs_t, group_ends, recipe, out_dtype, mx_grad), (lhs, rhs_t, group_ends)


def _grouped_mm_bwd(recipe, out_dtype, mx_grad, residuals, grad):
    lhs, rhs_t, group_ends = residuals
    value, mx = grad.poisoned() if mx_grad else (grad, None)
    if mx is None:
        dout = value
    elif value is None:
        dout = MXArray.from_bytes(*mx)
    else:
        dout = value + ops.dequantize(*mx, out_dtype=value.dtype)
    dlhs, drhs = _gradients(dout, lhs, rhs_t, group_ends, recipe)
    return MXArray.cotangent(dlhs) if isinstance(lhs, MXArray) else dlhs, drhs, None


_grouped_mm.defvjp(_grouped_mm_fwd, _grouped_mm_bwd, symbolic_zeros=True)
_grouped_mm_jitted = jax.jit(_grouped_mm, static_argnums=(3, 4, 5), inline=True)  # as _ungather_mx_jitted


def mxfp8_grouped_mm(
    A: jax.Array | MXArray,
    rhs_t: jax.Array,
    group_ends: jax.Array | None = None,
    *,
    group_sizes: jax.Array | None = None,
    recipe: Recipe | str = "mxfp8_wgrad_with_hp",
    out_dtype: jax.typing.DTypeLike = jnp.bfloat16,
    mx_grad: bool = False,
    pad_token_groups: bool = False,
) -> jax.Array | MXGradArray:
    """One matrix product per group of rows, quantized to MXFP8 on the way; differentiable in A and rhs_t.

    A: (M, K) bf16 or fp32, quantized here, or an MXArray, used as it is.
    rhs_t: (G, N, K) bf16 or fp32, each group's weight transposed, as a linear layer stores it.
    group_ends: (G,) int32, where each group ends; or group_sizes (G,) int32. Rows past the last end give zeros.
    recipe: "mxfp8_wgrad_with_hp" multiplies bf16 in the weight gradient; "mxfp8" quantizes its operands along
        the tokens, so groups must end at multiples of 32 (pad_token_groups pads them here and unpads the
        result); "bf16" quantizes nothing and takes no MXArray.
    mx_grad: return an MXGradArray, for `unpermute_hp_fwd_mxfp8_bwd` and `a2a_combine_hp_fwd_mxfp8_bwd` to
        hand their MXFP8 gradient to without dequantizing it.
    Returns (M, N) in out_dtype, bf16 or fp32.

    >>> mxfp8_grouped_mm(jnp.ones((2, 32)), jnp.ones((2, 32, 32)), jnp.array([1, 2], jnp.int32))[:, 0].tolist()
    [32.0, 32.0]

    Raises ValueError if K or N is no multiple of 32, for an unknown recipe, or if not exactly one of group_ends
    and group_sizes is given; TypeError for other dtypes.
    """
    op, recipe = "mxfp8_grouped_mm", Recipe.parse(recipe)
    if (group_ends is None) == (group_sizes is None):
        fail(ValueError, op, "group_ends", "both or neither of group_ends, group_sizes", "allowed: exactly one")
    given = group_ends if group_sizes is None else group_sizes
    check_integers(op, "group_ends" if group_sizes is None else "group_sizes", given)
    if not isinstance(A, MXArray):
        check_floats(op, "A", A, " or an MXArray")
    check_floats(op, "rhs_t", rhs_t)
    ends = jnp.asarray(group_ends) if group_sizes is None else jnp.cumsum(group_sizes, dtype=jnp.int32)
    if isinstance(A, MXArray) and not recipe.quantized:
        fail(TypeError, op, "A", "MXArray with recipe 'bf16'", "allowed: an array; call A.dequantize()")
    if rhs_t.ndim != 3 or len(A.shape) != 2:
        fail(ValueError, op, "A, rhs_t", f"shapes {A.shape}, {rhs_t.shape}", "allowed: (M, K) and (G, N, K)")
    if recipe.quantized:
        require_multiple(op, "rhs_t", rhs_t.shape[1], BLOCK, "dim 1, N,", "the input gradient quantizes along it")
        if not recipe.wgrad_with_hp and not pad_token_groups:
            require_multiple(op, "A", A.shape[0], BLOCK, "rows", "the weight gradient quantizes along them")
    aligned = recipe.quantized and not recipe.wgrad_with_hp and not pad_token_groups
    check_ends(op, ends, A.shape[0], BLOCK if aligned else 1)
    if pad_token_groups:
        return _grouped_mm_padded(A, rhs_t, ends, recipe, out_dtype, mx_grad)
    lhs, rhs_t, ends = _vary_alike(A, rhs_t, ends)
    return _grouped_mm_jitted(lhs, rhs_t, ends, recipe, jnp.dtype(out_dtype).name, mx_grad)


def _grouped_mm_padded(A, rhs_t, group_ends, recipe: Recipe, out_dtype, mx_grad) -> jax.Array | MXGradArray:
    move: Any = permute_mxfp8_fwd_hp_bwd if isinstance(A, MXArray) else permute
    sizes = jnp.diff(group_ends, prepend=0)
    padded, maps = move(A, sizes, 1, rhs_t.shape[0], recipe.alignment)
    out = mxfp8_grouped_mm(padded, rhs_t, maps.group_ends, recipe=recipe, out_dtype=out_dtype, mx_grad=mx_grad)
    return unpermute_hp_fwd_mxfp8_bwd(out, maps)
