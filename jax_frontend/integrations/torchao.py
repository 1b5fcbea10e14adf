"""The names of torchao's MXFP8 expert-parallel functions, as thin aliases over this package's functions.

    torchao's name                    this package
    a2a_dispatch_mxfp8_fwd_hp_bwd     ep.exchange_rows, quantized forward
    a2a_combine_hp_fwd_mxfp8_bwd      ep.exchange_rows, quantized backward
    to_mxfp8_a2a_dequant              ep.exchange_rows, quantized both ways
    permute_mxfp8_fwd_hp_bwd          permute
    unpermute_hp_fwd_mxfp8_bwd        gathers.ungather

This package does not call these functions, and imports nothing of torchao. The arguments follow JAX: an `Exchange`
instead of splits and a process group, a RowMap instead of a tuple.

Source: torchao.prototype.moe_training, commit 36027d82d of pytorch/ao.
"""

import jax

from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import fail, require_multiple
from ..exchange.all_to_all import Exchange, TokenReplicas, exchange_rows
from ..exchange.peer_rows import Across, reader_of
from ..exchange.rows import check_rows, gather_groups, replicas_to_send
from ..ops import RowMap
from ..ops.checks import check_floats, check_type, rounding_of
from ..ops.mx_array import MXArray, MXGradArray
from ..ops.shapes import Float, Int
from ..products.gathers import ungather


def a2a_dispatch_mxfp8_fwd_hp_bwd(
    input: Float[jax.Array, "M D"] | TokenReplicas, exchange: Exchange, rounding: Rounding | str = Rounding.RCEIL
) -> MXArray:
    """Quantize rows and send them to the ranks of their experts; the gradient comes back in input's dtype.

    Args:
        input: as in `a2a_dispatch`.
        exchange: as in `a2a_dispatch`.
        rounding: a `Rounding` or its name.

    Returns:
        An MXArray (ep_degree * capacity, D) for `permute_mxfp8_fwd_hp_bwd`: the rows of source rank s start at s *
        capacity, and `exchange.recv_counts` has their numbers.

    Raises:
        ValueError: shapes; D no multiple of 32.
        TypeError: dtypes.

    Example:
        >>> from mxep.jax_frontend.exchange.all_to_all import plan_exchange
        >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
        >>> a2a_dispatch_mxfp8_fwd_hp_bwd(jnp.ones((3, 32)), exchange).dequantize().sum().item()
        96.0
    """
    op = "a2a_dispatch_mxfp8_fwd_hp_bwd"
    check_type(op, "exchange", exchange, Exchange)
    rows, plan = replicas_to_send(op, input, exchange)
    return exchange_rows(op, rows, plan, fwd=rounding_of(op, "rounding", rounding))


def a2a_combine_hp_fwd_mxfp8_bwd(
    input: Float[jax.Array, "P N"] | MXGradArray,
    exchange: Exchange,
    rounding: Rounding | str = Rounding.RCEIL,
    *,
    mxfp8_bwd: bool = True,
) -> Float[jax.Array, "M N"]:
    """Send expert outputs back to the tokens' ranks as they are; the gradient is sent in MXFP8.

    Args:
        input: (P, N), P = ep_degree * capacity, in the layout of the dispatch. The received gradient of an array is
            dequantized. The received gradient of an MXGradArray is MXFP8 bytes for the grouped GEMM.
        exchange: of the dispatch.
        rounding: a `Rounding` or its name.
        mxfp8_bwd: False sends the gradient in its own dtype.

    Returns:
        (M, N) of input's dtype; rows that did not fit are zeros.

    Raises:
        ValueError: shapes; N no multiple of 32.
        TypeError: dtypes.

    Example:
        >>> from mxep.jax_frontend.exchange.all_to_all import plan_exchange
        >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
        >>> a2a_combine_hp_fwd_mxfp8_bwd(jnp.ones((3, 32)), exchange).shape
        (3, 32)
    """
    op = "a2a_combine_hp_fwd_mxfp8_bwd"
    check_type(op, "exchange", exchange, Exchange)
    check_type(op, "mxfp8_bwd", mxfp8_bwd, bool)
    values = input.value if isinstance(input, MXGradArray) else input
    check_rows(op, values, exchange.sources.shape[0], "ep_degree * capacity rows", " or an MXGradArray")
    if not mxfp8_bwd:
        return exchange_rows(op, values, exchange, back=True)
    require_multiple(op, "input", input.shape[1], BLOCK, "last dim", "the backward quantizes along it")
    rounding, floats = rounding_of(op, "rounding", rounding), not isinstance(input, MXGradArray)
    return exchange_rows(op, input, exchange, back=True, bwd=rounding, floats=floats)


def to_mxfp8_a2a_dequant(
    input: Float[jax.Array, "M D"],
    exchange: Exchange,
    rounding: Rounding | str = Rounding.RCEIL,
    *,
    reverse: bool = False,
) -> Float[jax.Array, "P D"]:
    """All-to-all with MXFP8 on the wire in both directions and input's dtype at both ends.

    Args:
        input: (M, D) bf16 or fp32; (P, D) with reverse=True. P = ep_degree * capacity.
        exchange: as in `a2a_dispatch_mxfp8_fwd_hp_bwd`.
        rounding: as in `a2a_dispatch_mxfp8_fwd_hp_bwd`.
        reverse: the exchange back, from (P, D) to (M, D).

    Returns:
        (P, D) of input's dtype; (M, D) with reverse=True.

    Raises:
        ValueError: shapes; D no multiple of 32.
        TypeError: dtypes.

    Example:
        >>> from mxep.jax_frontend.exchange.all_to_all import plan_exchange
        >>> exchange = plan_exchange(jnp.array([1]), None, num_rows=1)
        >>> to_mxfp8_a2a_dequant(jnp.full((1, 32), 1.06), exchange)[0, 0].item()
        1.0
    """
    op = "to_mxfp8_a2a_dequant"
    check_type(op, "exchange", exchange, Exchange)
    check_type(op, "reverse", reverse, bool)
    rows = exchange.sources.shape[0] if reverse else exchange.num_rows
    check_rows(op, input, rows, "the exchange's rows")
    rounding = rounding_of(op, "rounding", rounding)
    return exchange_rows(op, input, exchange, back=reverse, fwd=rounding, bwd=rounding, floats=True)


def permute_mxfp8_fwd_hp_bwd(
    mx: MXArray, num_tokens_per_expert: Int[jax.Array, " G"] | Exchange, group_size_multiple_of: int = BLOCK
) -> tuple[MXArray, RowMap]:
    """`permute` of MX rows.

    Args:
        mx: (R, K) MXArray.
        num_tokens_per_expert: the Exchange that sent the rows, or (G,) of an integer dtype, as in `permute`.
        group_size_multiple_of: a positive multiple of 32.

    Returns:
        (rows (P, K), an MXArray, and the RowMap), as from `permute`.

    Raises:
        ValueError: shapes, counts that do not fit.
        TypeError: float rows, which `permute` takes; other dtypes.

    Example:
        >>> from mxep.jax_frontend.exchange.all_to_all import plan_exchange
        >>> exchange = plan_exchange(jnp.array([2, 1]), None, num_rows=3)
        >>> received = a2a_dispatch_mxfp8_fwd_hp_bwd(jnp.ones((3, 32)), exchange)
        >>> rows, row_map = permute_mxfp8_fwd_hp_bwd(received, exchange)
        >>> rows.shape, row_map.group_ends.tolist()
        ((96, 32), [32, 64])
    """
    op = "permute_mxfp8_fwd_hp_bwd"
    if not isinstance(mx, MXArray):
        fail(TypeError, op, "mx", type(mx).__name__, "allowed: an MXArray; `permute` takes float rows")
    return gather_groups(op, "mx", mx, num_tokens_per_expert, group_size_multiple_of)


def unpermute_hp_fwd_mxfp8_bwd(
    input: Float[jax.Array, "P N"] | MXGradArray, maps: RowMap, *, across: Across = None
) -> Float[jax.Array, "R N"] | MXGradArray:
    """Gather expert outputs back into the order in which the rows were received; rows without a token are zeros.

    Args:
        input: (P, N), an array, or an MXGradArray, whose gradient is gathered as MXFP8 bytes.
        maps: the RowMap of the permute.
        across: as in `gather_rows`.

    Returns:
        (R, N) of input's kind.

    Raises:
        ValueError: shapes.
        TypeError: dtypes.

    Example:
        >>> from mxep.jax_frontend.exchange.rows import permute
        >>> rows, row_map = permute(jnp.ones((3, 32)), jnp.array([2, 1]))
        >>> unpermute_hp_fwd_mxfp8_bwd(rows, row_map).shape
        (3, 32)
    """
    op = "unpermute_hp_fwd_mxfp8_bwd"
    if not isinstance(input, MXGradArray):
        check_floats(op, "input", input, " or an MXGradArray")
    check_type(op, "maps", maps, RowMap)
    if len(input.shape) != 2 or input.shape[0] != maps.row_map.shape[0]:
        allowed = f"allowed: ({maps.row_map.shape[0]}, N), the rows of maps.row_map"
        fail(ValueError, op, "input", f"shape {input.shape}", allowed)
    return ungather(op, input, maps.row_map, maps.inverse, reader_of(op, across))
