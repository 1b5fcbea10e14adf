"""Rows between ranks: the all-to-alls of expert parallelism, in MXFP8 in one direction or in both.

    forward    rows --a2a_dispatch--> received        quantize, send [q | sf]
               rows <--a2a_combine--- received        send bf16
    backward   rows --a2a_combine---> received        quantize, send [q | sf]
               rows <--a2a_dispatch-- received        send bf16

A quantized all-to-all is one collective over packed rows `[q | sf]`, 33/64 of the bytes of bf16. A token is quantized
once: its replicas share the bytes. A group of one rank sends nothing and needs no torch.distributed. dispatch.py and
combine.py order the rows before and after these exchanges; torchao.py has the functions with torchao's signatures.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.formats import Rounding
from ...core_kernels.policy.recipe import Recipe
from ..ops import direct as ops
from ..ops.differentiable import differentiable
from ..ops.mx_tensor import MXTensor, dequantized
from ..ops.private import all_to_all as _collective
from ..ops.private import group_named
from ..routing.permute import spread
from ..routing.weighted_combine import sum_slots
from .process_groups import Splits, checked_all_to_all, degree_of, naming_errors


class TokenReplicas(NamedTuple):
    """The top_k replicas of each token, as rows sorted by expert.

    `sort_by_expert` returns order and inverse. A token is quantized once for all of its replicas.

    Args:
        x: (T, D) bfloat16 or float32, the tokens.
        order: (T * top_k,) int32. Row i is a replica of token order[i] // top_k.
        inverse: (T * top_k,) int32, the row of each replica.
        top_k: experts per token.

    Example:
        >>> order, inverse, counts = sort_by_expert(torch.tensor([[1, 0], [1, 2]]), num_experts=3)
        >>> tokens = TokenReplicas(torch.ones(2, 32), order, inverse, top_k=2)
        >>> dispatch(tokens, counts)[1].tolist()
        [32, 32, 32]
    """

    x: Tensor
    order: Tensor
    inverse: Tensor
    top_k: int


def all_to_all(
    x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str, op: str = "all-to-all", rows: str = "rows"
) -> Tensor:
    """Rows of x between the ranks of a group; no gradient. The result of one rank is x itself. op, rows: of the error
    of a rank that has ended or does not answer."""
    if degree_of(group_name) == 1:
        return x
    with naming_errors(op, rows, "an error while the ranks exchange them"):
        return _collective(x, list(output_splits), list(input_splits), group_named(group_name))


def packed_rows(x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str, rounding: int) -> MXTensor:
    """Quantize rows and exchange them as MXFP8; no gradient."""
    packed = ops.quantize_row_packed(dequantized(x).contiguous(), rounding)
    return MXTensor.from_packed(all_to_all(packed, output_splits, input_splits, group_name), x.dtype)


class _AllToAll(torch.autograd.Function):
    """One all-to-all. `mx_fwd` and `mx_bwd` select the directions that quantize and return MX rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str,
        mx_fwd: bool, mx_bwd: bool, rounding: int,
    ) -> Tensor:  # fmt: skip
        ctx.back, ctx.mx_bwd, ctx.rounding = (input_splits, output_splits, group_name), mx_bwd, rounding
        if mx_fwd:
            return packed_rows(x, output_splits, input_splits, group_name, rounding)
        if degree_of(group_name) == 1:  # the result has memory of its own, from one rank as from several
            return x.clone(memory_format=torch.contiguous_format)
        return all_to_all(x.contiguous(), output_splits, input_splits, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output_splits, input_splits, group_name = ctx.back
        if ctx.mx_bwd:
            dx: Tensor = packed_rows(grads[0], output_splits, input_splits, group_name, ctx.rounding)
        else:
            dx = all_to_all(dequantized(grads[0]).contiguous(), output_splits, input_splits, group_name)
        return dx, None, None, None, None, None, None


class _ExchangeReplicas(torch.autograd.Function):
    """x (T, D) is quantized once and the bytes of its replicas are sent; the backward sums each token's replicas in
    fp32, in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int,
        output_splits: Splits, input_splits: Splits, group_name: str, rounding: int, mx_bwd: bool,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(inverse)
        ctx.back, ctx.top_k = (input_splits, output_splits, group_name), top_k
        ctx.mx_bwd, ctx.rounding = mx_bwd, rounding
        packed = ops.permute_rows(ops.quantize_row_packed(x.contiguous(), rounding), order // top_k)
        return MXTensor.from_packed(all_to_all(packed, output_splits, input_splits, group_name), x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        output_splits, input_splits, group_name = ctx.back
        if ctx.mx_bwd:
            rows = dequantized(packed_rows(grads[0], output_splits, input_splits, group_name, ctx.rounding))
        else:
            rows = all_to_all(dequantized(grads[0]).contiguous(), output_splits, input_splits, group_name)
        dx = sum_slots(rows, inverse.view(-1, ctx.top_k), grads[0].dtype)
        return dx, None, None, None, None, None, None, None, None


class _AllToAllDequantized(torch.autograd.Function):
    """MXFP8 on the wire in both directions, floats at both ends."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str) -> Tensor:
        ctx.back = input_splits, output_splits, group_name
        return dequantized(packed_rows(x, output_splits, input_splits, group_name, Rounding.RCEIL))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output_splits, input_splits, group_name = ctx.back
        dx = packed_rows(grads[0], output_splits, input_splits, group_name, Rounding.RCEIL)
        return dequantized(dx), None, None, None


class _Sent(torch.autograd.Function):
    """x itself. The gradient is plain, with the values of MXFP8 rows if `mx_bwd`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mx_bwd: bool, rounding: int) -> Tensor:
        ctx.mx_bwd, ctx.rounding = mx_bwd, rounding
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        dx = dequantized(grads[0])
        if ctx.mx_bwd:
            dx = dequantized(MXTensor.quantize(dx.contiguous(), Rounding(ctx.rounding)))
        return dx, None, None


sent_rows = differentiable("dispatch", _Sent)
"""sent_rows(x, mx_bwd, rounding): x, with the gradient that rows have after they were sent."""
exchange_rows = differentiable("all-to-all", _AllToAll)
"""exchange_rows(x, output_splits, input_splits, group_name, mx_fwd, mx_bwd, rounding): one all-to-all, unchecked."""
exchange_replicas = differentiable("dispatch", _ExchangeReplicas)
"""exchange_replicas(x, order, inverse, top_k, output_splits, input_splits, group_name, rounding, mx_bwd): MX rows of
the replicas of tokens, unchecked."""
exchange_dequantized = differentiable("to_mxfp8_a2a_dequant", _AllToAllDequantized)
"""exchange_dequantized(x, output_splits, input_splits, group_name), unchecked."""


def exchange_tokens(
    rows: Tensor | TokenReplicas, output_splits: Splits, input_splits: Splits, recipe: Recipe, group_name: str
) -> Tensor:
    """Rows, or the copies of `TokenReplicas`, in the precision of the recipe's all-to-alls; differentiable."""
    received, sent, rounding = list(output_splits), list(input_splits), int(recipe.rounding)
    mx, mx_grad = recipe.sends_mx("dispatch"), recipe.sends_mx("dispatch_grad")
    if isinstance(rows, TokenReplicas):
        x, order, inverse, top_k = rows
        if mx:
            return exchange_replicas(x, order, inverse, top_k, received, sent, group_name, rounding, mx_grad)
        rows = spread(x, order, inverse, top_k)
    rows = sent_rows(rows, False, 0) if mx_grad else rows  # an MXFP8 gradient is dequantized
    return exchange_rows(rows, received, sent, group_name, mx, mx_grad, rounding)


def a2a_dispatch(
    input: Tensor, output_splits: Splits, input_splits: Splits, group_name: "str | dist.ProcessGroup | None" = None
) -> Tensor:
    """Send rows to the ranks of their experts as they are, forward and backward.

    Args:
        input: (M, K) bfloat16 or float32, sorted by destination rank.
        output_splits: output_splits[r] rows come from rank r.
        input_splits: input_splits[r] rows go to rank r.
        group_name: a process group or its name; None is the default group, or this process alone where
            torch.distributed is not initialised.

    Returns:
        (sum(output_splits), K) of input's dtype.

    Raises:
        ValueError: as `a2a_dispatch_mxfp8_fwd_hp_bwd` does.
        TypeError: as `a2a_dispatch_mxfp8_fwd_hp_bwd` does.

    Example:
        >>> a2a_dispatch(torch.ones(3, 32), [3], [3]).shape
        torch.Size([3, 32])
    """
    name, _ = checked_all_to_all(
        "a2a_dispatch", input, output_splits, input_splits, "group_name", group_name, blocks=False
    )
    return exchange_rows(input, list(output_splits), list(input_splits), name, False, False, 0)
