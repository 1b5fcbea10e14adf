"""Expert parallelism: tokens travel to the rank of their expert and back, in MXFP8 where it is safe.

    forward    rows --a2a_dispatch--> received --permute--> groups --grouped_mm--> groups
               bf16     [q | sf]       MXFP8                MXFP8     MXFP8        bf16
               rows <--a2a_combine--- received <--unpermute---------------------------|
               bf16                    bf16

    backward   rows --a2a_combine---> received --unpermute--> groups --grouped_mm--> groups     dw: bf16
               bf16     [q | sf]       MXFP8                  MXFP8     MXFP8        bf16
               rows <--a2a_dispatch-- received <--permute-----------------------------|
               bf16                    bf16

A quantized all-to-all is one collective over packed rows `[q | sf]`, 33/64 of the bytes of bf16. A token is
quantized once: its copies are its bytes. A group of one rank, or none at all, sends nothing and needs no
torch.distributed.
"""

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from . import ops
from ._checks import check_counts, check_probs, check_shape, require_total
from ._differentiable import differentiable
from ._ranks import Splits, can_compare, check_travelling, checked_all_to_all, compare_experts
from ._ranks import degree_of as _degree
from ._torch_private import all_to_all, captures_splits, group_named
from .combine import sum_slots
from .mx_tensor import MXTensor, plain
from .permute import RowMaps, check_copies, gather, map_rows, spread
from .shards import Ranks


def _all_to_all(x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str) -> Tensor:
    if _degree(group_name) == 1:
        return x
    return all_to_all(x, list(output_splits), list(input_splits), group_named(group_name))


def _all_to_all_mx(x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str, rounding: int) -> MXTensor:
    packed = ops.quantize_row_packed(plain(x).contiguous(), rounding)
    packed = _all_to_all(packed, output_splits, input_splits, group_name)
    return _unpacked(packed, x)


def _unpacked(packed: Tensor, x: Tensor) -> MXTensor:
    """MX rows of what x was, as views of `[q | sf]`."""
    k = x.shape[1]
    return MXTensor(packed[:, :k], packed[:, k:], x.dtype)


class _AllToAll(torch.autograd.Function):
    """One all-to-all; `mx_fwd` and `mx_bwd` say which directions quantize and hand on MX rows."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str,
        mx_fwd: bool, mx_bwd: bool, rounding: int,
    ) -> Tensor:  # fmt: skip
        ctx.splits, ctx.group_name, ctx.mx_bwd, ctx.rounding = (
            (input_splits, output_splits),
            group_name,
            mx_bwd,
            rounding,
        )
        if mx_fwd:
            return _all_to_all_mx(x, output_splits, input_splits, group_name, rounding)
        if _degree(group_name) == 1:  # what arrives is memory of its own, from one rank as from several
            return x.clone(memory_format=torch.contiguous_format)
        return _all_to_all(x.contiguous(), output_splits, input_splits, group_name)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output_splits, input_splits = ctx.splits
        if ctx.mx_bwd:
            dx = _all_to_all_mx(grads[0], output_splits, input_splits, ctx.group_name, ctx.rounding)
        else:
            dx = _all_to_all(plain(grads[0]).contiguous(), output_splits, input_splits, ctx.group_name)
        return dx, None, None, None, None, None, None


class _DispatchTokens(torch.autograd.Function):
    """x (T, D) quantized once, the bytes of its copies sent; backward adds up what the copies get, in a fixed order."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, copies: int,
        output_splits: Splits, input_splits: Splits, group_name: str, rounding: int,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(inverse)
        ctx.splits, ctx.group_name, ctx.copies = (input_splits, output_splits), group_name, copies
        packed = ops.permute_rows(ops.quantize_row_packed(x.contiguous(), rounding), order // copies)
        return _unpacked(_all_to_all(packed, output_splits, input_splits, group_name), x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,), (output_splits, input_splits) = ctx.saved_tensors, ctx.splits
        rows = _all_to_all(plain(grads[0]).contiguous(), output_splits, input_splits, ctx.group_name)
        dx = sum_slots(rows, inverse.view(-1, ctx.copies), grads[0].dtype)
        return dx, None, None, None, None, None, None, None


class _AllToAllDequantized(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str) -> Tensor:
        ctx.splits, ctx.group_name = (input_splits, output_splits), group_name
        return plain(_all_to_all_mx(x, output_splits, input_splits, group_name, Rounding.RCEIL))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        output_splits, input_splits = ctx.splits
        dx = plain(_all_to_all_mx(grads[0], output_splits, input_splits, ctx.group_name, Rounding.RCEIL))
        return dx, None, None, None


_exchange = differentiable("all-to-all", _AllToAll)
_exchange_tokens = differentiable("dispatch", _DispatchTokens)
_exchange_dequantized = differentiable("to_mxfp8_a2a_dequant", _AllToAllDequantized)


def a2a_dispatch_mxfp8_fwd_hp_bwd(
    input: Tensor,
    output_splits: Splits,
    input_splits: Splits,
    group_name: "str | dist.ProcessGroup | None" = None,
    scaling_mode: Rounding | str = Rounding.RCEIL,
    block_size: int = BLOCK,
) -> MXTensor:
    """Quantize rows and send them to the ranks of their experts; the gradient comes back in `input`'s dtype.

    input: (M, K) bfloat16 or float32, K a multiple of 32, sorted by destination. input_splits[r] rows
    go to rank r, output_splits[r] come from it. group_name: a group's name or the group; None is the
    default group, or this process alone where torch.distributed is not initialised.

    Returns an MXTensor (sum(output_splits), K). Raises ValueError when the splits do not fit the input
    or the group, TypeError for other dtypes. The ranks compare their arguments first, one small all-gather that the
    host waits for: what is wrong on one of them, or between two, raises on all, and nothing is sent. Under
    torch.compile and while a CUDA graph is captured a rank checks its own arguments alone.
    """
    op, options = "a2a_dispatch_mxfp8_fwd_hp_bwd", (scaling_mode, block_size)
    name, rounding = checked_all_to_all(op, input, output_splits, input_splits, "group_name", group_name, *options)
    return cast(MXTensor, _exchange(input, list(output_splits), list(input_splits), name, True, False, rounding))


def a2a_combine_hp_fwd_mxfp8_bwd(
    input: Tensor,
    output_splits: Splits,
    input_splits: Splits,
    group_name: "str | dist.ProcessGroup | None" = None,
    scaling_mode: Rounding | str = Rounding.RCEIL,
    block_size: int = BLOCK,
    mxfp8_bwd: bool = True,
) -> Tensor:
    """Send expert outputs back to the tokens' ranks as they are; the gradient travels in MXFP8.

    Arguments as in `a2a_dispatch_mxfp8_fwd_hp_bwd`, with the two splits swapped. mxfp8_bwd: the
    gradient is quantized, sent packed and handed on as an MXTensor, which `unpermute_hp_fwd_mxfp8_bwd` and
        `mxfp8_grouped_mm` take; False: sent in its own dtype, for any other operation in front of this one.

    Returns (sum(output_splits), K) of input's dtype. Raises ValueError and TypeError likewise.
    """
    op, options = "a2a_combine_hp_fwd_mxfp8_bwd", (scaling_mode, block_size, mxfp8_bwd)
    name, rounding = checked_all_to_all(op, input, output_splits, input_splits, "group_name", group_name, *options)
    return _exchange(input, list(output_splits), list(input_splits), name, False, mxfp8_bwd, rounding)


def to_mxfp8_a2a_dequant(
    input: Tensor, output_splits: Splits, input_splits: Splits, group: "str | dist.ProcessGroup | None" = None
) -> Tensor:
    """All-to-all with MXFP8 on the wire in both directions and input's dtype at both ends.

    A differentiable drop-in for `all_to_all_single_autograd`. Arguments, errors and result as in
    `a2a_dispatch_mxfp8_fwd_hp_bwd`, but dequantized.
    """
    name, _ = checked_all_to_all("to_mxfp8_a2a_dequant", input, output_splits, input_splits, "group", group)
    return _exchange_dequantized(input, list(output_splits), list(input_splits), name)


class Route(NamedTuple):
    """What `combine` needs to undo a `dispatch`; counts (E,): rows of all ranks per expert."""

    maps: RowMaps
    counts: Tensor
    output_splits: list[int]
    input_splits: list[int]
    group_name: str
    recipe: Recipe


class TokenCopies(NamedTuple):
    """Rows that are copies of tokens x (T, D): row i is that of token order[i] // copies, and token t's are the rows
    inverse[t * copies : (t + 1) * copies]; both (T * copies,) int32, as `sort_by_expert` returns them."""

    x: Tensor
    order: Tensor
    inverse: Tensor
    copies: int


def dispatch(
    rows: Tensor | TokenCopies,
    counts: Tensor,
    recipe: Recipe,
    group_name: str = "",
    degree: int = 1,
    experts: tuple[int, str] | None = None,
    probs: Tensor | None = None,
) -> tuple[Tensor, Tensor, Route]:
    """Send rows to their experts' ranks and lay them out in padded groups.

    rows: (M, K), sorted by expert, or TokenCopies. counts: (E,) rows per expert, any integer dtype; E a multiple of
    the group's size. group_name and degree: a group's name and size; by default a process alone, which sends
    nothing and syncs nothing. experts: their number on all ranks together and the type of the group's device. probs:
    (M,) float32, what `dispatch_probs` is going to send; it is checked here.

    Returns (groups, padded_counts, route): groups (P, K), an MXTensor if the recipe quantizes;
    padded_counts (E / ranks,) int32; route for `combine`. Raises TypeError and ValueError on arguments that do not fit.
    What is wrong on one rank raises on all of them, and no row is sent: where `experts` is given, which all ranks have
    agreed on, the verdict travels with the counts; otherwise in a small all-gather before.
    """
    error = None
    try:
        rows, num_rows = _checked_dispatch(rows, counts, recipe, degree, experts, probs)
    except (TypeError, ValueError) as found:
        error, num_rows = found, 0
    if experts is None:
        if can_compare(group_name):
            compare_experts("dispatch", -1 if error else counts.shape[0], group_name, error)
        elif error is not None:
            raise error
    if degree == 1:
        received, totals, output_splits, input_splits = counts, counts, [num_rows], [num_rows]
    else:
        if error is None:
            fits = (counts.sum() == num_rows) & (counts.amin() >= 0)
            sent = torch.where(fits, counts.to(torch.int32), -1)
        else:
            assert experts is not None
            sent = torch.full(experts[:1], -1, dtype=torch.int32, device=experts[1])
        received, totals = _exchange_counts(sent, group_name, degree)
        # torch's all-to-all takes its splits from the host: the one sync of the layer.
        output_splits, input_splits = torch.stack([received, sent]).view(2, degree, -1).sum(-1).tolist()
        if error is not None:
            raise error
        if not torch.compiler.is_compiling():
            _check_received(counts, num_rows, output_splits)
    splits = output_splits, input_splits
    arrived: Tensor
    if isinstance(rows, TokenCopies):
        arrived = _exchange_tokens(*rows, *splits, group_name, int(recipe.rounding))
    else:
        arrived = _exchange(rows, *splits, group_name, recipe.mx, False, int(recipe.rounding))
    maps = map_rows("dispatch", arrived, received, degree, received.shape[0] // degree, recipe.alignment)
    groups = gather(arrived, maps.row_map, maps.inverse)
    return groups, maps.padded_counts, Route(maps, totals, output_splits, input_splits, group_name, recipe)


@torch.compiler.allow_in_graph  # Dynamo cannot look up a group
def _exchange_counts(counts: Tensor, group_name: str, degree: int) -> tuple[Tensor, Tensor]:
    """What this rank receives per rank and local expert, (E,), and the rows of all ranks per expert, (E,).

    All ranks get all counts: so few numbers take no longer, and the balance of the whole batch is known."""
    splits, local = [counts.shape[0]] * degree, counts.shape[0] // degree
    everyones = _all_to_all(counts.repeat(degree), splits, splits, group_name).view(degree, -1)
    first = group_named(group_name).rank() * local
    return everyones[:, first : first + local].reshape(-1), everyones.sum(0, dtype=counts.dtype)


def _checked_dispatch(
    rows: Tensor | TokenCopies,
    counts: Tensor,
    recipe: Recipe,
    degree: int,
    experts: tuple[int, str] | None,
    probs: Tensor | None,
) -> tuple[Tensor | TokenCopies, int]:
    """What to send and how many rows it is, or what is wrong with an argument of this rank."""
    op = "dispatch"
    x = rows.x if isinstance(rows, TokenCopies) else rows
    check_travelling(op, "rows", x, recipe.mx)
    if experts is not None and x.device.type != experts[1]:
        fail(ValueError, op, "rows", f"device {x.device}", f"allowed: {experts[1]}, where the group of the experts is")
    if isinstance(rows, TokenCopies):
        order, inverse = check_copies(op, x, rows.order, rows.inverse, rows.copies)
        rows = TokenCopies(x, order, inverse, rows.copies) if recipe.mx else spread(x, order, inverse, rows.copies)
    num_rows = (rows.order if isinstance(rows, TokenCopies) else rows).shape[0]
    name = "num_tokens_per_expert"
    check_counts(op, name, counts, x.device)
    check_shape(op, name, counts, (experts[0],) if experts else ("E",))
    if counts.shape[0] == 0 or counts.shape[0] % degree:
        allowed = f"allowed: (E,) with E a multiple of {degree}, the ranks of the group"
        fail(ValueError, op, name, f"shape {tuple(counts.shape)}", allowed)
    if probs is not None:
        check_probs(op, "probs", probs, (num_rows,), x.device)
    return rows, num_rows


def _check_received(counts: Tensor, num_rows: int, output_splits: list[int]) -> None:
    """Raise ValueError if this rank's counts are wrong, or another rank said -1."""
    op, name = "dispatch", "num_tokens_per_expert"
    failed = [rank for rank, size in enumerate(output_splits) if size < 0]
    if failed:
        require_total(op, name, counts, num_rows)
        allowed = f"allowed: counts of at least 0 from every rank; the error of rank {failed[0]} says what is wrong"
        fail(ValueError, op, name, f"-1 from rank {failed[0]}", allowed)


def dispatch_probs(probs: Tensor, route: Route) -> Tensor:
    """Send each row's probability where `dispatch` sent the row: (M,) float32 -> (P,), zeros for padding.

    One all-to-all of 4 bytes a row, and one back for the gradient.
    """
    received = _exchange(
        probs.unsqueeze(1), route.output_splits, route.input_splits, route.group_name, False, False, 0
    )  # fmt: skip
    return gather(received, route.maps.row_map, route.maps.inverse).squeeze(1)


def combine(groups: Tensor, route: Route) -> Tensor:
    """Take expert outputs (P, N) back to where their rows came from -> (M, N)."""
    check_travelling("combine", "groups", groups, route.recipe.mx)
    check_shape("combine", "groups", groups, (route.maps.row_map.shape[0], "N"))
    rows = gather(groups, route.maps.inverse, route.maps.row_map)
    back, recipe = (route.input_splits, route.output_splits), route.recipe
    return _exchange(rows, *back, route.group_name, False, recipe.mx, int(recipe.rounding))


# A graph that ends in MX rows is traced for MX gradients, but theirs are plain (pytorch/pytorch#172556), and the other
# way round for one that begins where they end. So unless Dynamo may keep the splits as symbols and trace on, these run
# outside of compiled graphs.
_dispatch_eagerly: Callable[..., Any] = torch.compiler.disable(dispatch)
_probs_eagerly: Callable[..., Any] = torch.compiler.disable(dispatch_probs)
_combine_eagerly: Callable[..., Any] = torch.compiler.disable(combine)


def send_rows(
    rows: Tensor | TokenCopies, counts: Tensor, recipe: Recipe, ranks: Ranks, probs: Tensor | None = None
) -> tuple[Tensor, Tensor, Route]:
    """`dispatch` over these ranks, compiled where Dynamo can."""
    send = dispatch if captures_splits() else _dispatch_eagerly
    experts = ranks.num_experts, ranks.device_type
    return send(rows, counts, recipe, ranks.group_name, ranks.degree, experts, probs)


def refuse(ranks: Ranks) -> None:
    """Take part in the exchange of counts of a `dispatch` that this rank will not make, so that all ranks raise."""
    if ranks.degree > 1:
        refused = torch.full((ranks.num_experts,), -1, dtype=torch.int32, device=ranks.device_type)
        _exchange_counts(refused, ranks.group_name, ranks.degree)


def send_probs(probs: Tensor, route: Route) -> Tensor:
    """`dispatch_probs`, compiled where Dynamo can."""
    return (dispatch_probs if captures_splits() else _probs_eagerly)(probs, route)


def receive_rows(groups: Tensor, route: Route) -> Tensor:
    """`combine`, compiled where Dynamo can."""
    return (combine if captures_splits() else _combine_eagerly)(groups, route)
