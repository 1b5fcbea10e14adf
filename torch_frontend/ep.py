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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch._dynamo.config as dynamo_config
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol
from torch.distributed.distributed_c10d import _resolve_process_group  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.tensor import DTensor

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from . import ops
from ._call import FLOATS
from ._differentiable import differentiable
from .combine import sum_slots
from .mx_tensor import MXTensor, plain
from .permute import RowMaps, gather_rows, map_rows, spread_rows

Splits = Sequence[int]


def _name_of(group: "str | dist.ProcessGroup | None") -> str:
    """The name of a process group; "" for a process alone. None is the default group where there is one."""
    if isinstance(group, str):
        return group
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ""
        group = cast(dist.ProcessGroup, dist.group.WORLD)
    return group.group_name


def _group(group_name: str) -> dist.ProcessGroup:
    return _resolve_process_group(cast(Any, group_name))


def _degree(group_name: str) -> int:
    return _group(group_name).size() if group_name else 1


def _all_to_all(x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str) -> Tensor:
    if _degree(group_name) == 1:
        return x
    return funcol.wait_tensor(funcol.all_to_all_single(x, list(output_splits), list(input_splits), _group(group_name)))


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
    or the group, TypeError for other dtypes.
    """
    op = "a2a_dispatch_mxfp8_fwd_hp_bwd"
    name = _checked(op, input, output_splits, input_splits, group_name, block_size)
    rounding = int(Rounding.parse(scaling_mode))
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
    op = "a2a_combine_hp_fwd_mxfp8_bwd"
    name = _checked(op, input, output_splits, input_splits, group_name, block_size)
    rounding = int(Rounding.parse(scaling_mode))
    return _exchange(input, list(output_splits), list(input_splits), name, False, mxfp8_bwd, rounding)


def to_mxfp8_a2a_dequant(
    input: Tensor, output_splits: Splits, input_splits: Splits, group: "str | dist.ProcessGroup | None" = None
) -> Tensor:
    """All-to-all with MXFP8 on the wire in both directions and input's dtype at both ends.

    A differentiable drop-in for `all_to_all_single_autograd`. Arguments, errors and result as in
    `a2a_dispatch_mxfp8_fwd_hp_bwd`, but dequantized.
    """
    name = _checked("to_mxfp8_a2a_dequant", input, output_splits, input_splits, group, BLOCK)
    return _exchange_dequantized(input, list(output_splits), list(input_splits), name)


def _checked(op: str, x: Tensor, output_splits: Splits, input_splits: Splits, group: Any, block_size: int) -> str:
    if isinstance(x, MXTensor) or x.dtype not in FLOATS:
        got = "an MXTensor" if isinstance(x, MXTensor) else f"dtype {x.dtype}"
        fail(TypeError, op, "input", got, "allowed: bfloat16 or float32 tensors")
    if x.dim() != 2 or x.shape[1] % BLOCK:
        fail(ValueError, op, "input", f"shape {tuple(x.shape)}", f"allowed: (M, K) with K a multiple of {BLOCK}")
    if block_size != BLOCK:
        fail(ValueError, op, "block_size", block_size, f"allowed: {BLOCK}, the block of MXFP8")
    name = _name_of(group)
    # While compiling, splits may be symbols without a value: the collective checks them when it runs.
    if not torch.compiler.is_compiling():
        degree = _degree(name)
        for argument, splits in (("output_splits", output_splits), ("input_splits", input_splits)):
            if len(splits) != degree or any(size < 0 for size in splits):
                allowed = f"allowed: {degree} counts, one per rank of the group, at least 0"
                fail(ValueError, op, argument, list(splits), allowed)
        if sum(input_splits) != x.shape[0]:
            got = f"{list(input_splits)}, in total {sum(input_splits)}"
            fail(ValueError, op, "input_splits", got, f"allowed: a total of {x.shape[0]}, the rows of input")
        if degree == 1 and output_splits[0] != input_splits[0]:
            fail(ValueError, op, "output_splits", list(output_splits), f"allowed: {list(input_splits)}, what is sent")
    return name


class Ranks(NamedTuple):
    """The ranks that share a layer's experts. gradient_divisor: what a weight's gradient, which comes from the tokens
    of all ranks, is divided by."""

    group_name: str
    degree: int
    gradient_divisor: int


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
    rows: Tensor | TokenCopies, counts: Tensor, recipe: Recipe, group_name: str = "", degree: int = 1
) -> tuple[Tensor, Tensor, Route]:
    """Send rows to their experts' ranks and lay them out in padded groups.

    rows: (M, K), sorted by expert, or TokenCopies. counts: (E,) rows per expert, any integer dtype; E a multiple of
    the group's size. group_name and degree: a group's name and size; by default a process alone, which sends
    nothing and syncs nothing.

    Returns (groups, padded_counts, route): groups (P, K), an MXTensor if the recipe quantizes;
    padded_counts (E / ranks,) int32; route for `combine`. Raises ValueError on counts that do not fit.
    """
    if counts.dim() != 1 or counts.shape[0] % degree:
        allowed = f"allowed: (E,) with E a multiple of {degree}, the ranks of the group"
        fail(ValueError, "dispatch", "num_tokens_per_expert", f"shape {tuple(counts.shape)}", allowed)
    if isinstance(rows, TokenCopies) and not recipe.mx:
        rows = spread_rows(*rows)
    num_rows = (rows.order if isinstance(rows, TokenCopies) else rows).shape[0]
    if degree == 1:
        received, totals, output_splits, input_splits = counts, counts, [num_rows], [num_rows]
    else:
        received, totals = _exchange_counts(counts, group_name, degree)
        # torch's all-to-all takes its splits from the host: the one sync of the layer.
        output_splits, input_splits = torch.stack([received, counts]).view(2, degree, -1).sum(-1).tolist()
    splits = output_splits, input_splits
    arrived: Tensor
    if isinstance(rows, TokenCopies):
        arrived = _exchange_tokens(*rows, *splits, group_name, int(recipe.rounding))
    elif recipe.mx:
        arrived = a2a_dispatch_mxfp8_fwd_hp_bwd(rows, *splits, group_name, recipe.rounding)
    else:
        arrived = a2a_combine_hp_fwd_mxfp8_bwd(rows, *splits, group_name, mxfp8_bwd=False)
    maps = map_rows("dispatch", arrived, received, degree, counts.shape[0] // degree, recipe.alignment)
    groups = gather_rows(arrived, maps.row_map, maps.inverse)
    return groups, maps.padded_counts, Route(maps, totals, output_splits, input_splits, group_name, recipe)


@torch.compiler.allow_in_graph  # Dynamo cannot look up a group
def _exchange_counts(counts: Tensor, group_name: str, degree: int) -> tuple[Tensor, Tensor]:
    """What this rank receives per rank and local expert, (E,), and the rows of all ranks per expert, (E,).

    All ranks get all counts: so few numbers take no longer, and the balance of the whole batch is known."""
    splits, local = [counts.shape[0]] * degree, counts.shape[0] // degree
    everyones = _all_to_all(counts.repeat(degree), splits, splits, group_name).view(degree, -1)
    first = _group(group_name).rank() * local
    return everyones[:, first : first + local].reshape(-1), everyones.sum(0, dtype=counts.dtype)


def dispatch_probs(probs: Tensor, route: Route) -> Tensor:
    """Send each row's probability where `dispatch` sent the row: (M,) float32 -> (P,), zeros for padding.

    One all-to-all of 4 bytes a row, and one back for the gradient.
    """
    received = _exchange(
        probs.unsqueeze(1), route.output_splits, route.input_splits, route.group_name, False, False, 0
    )  # fmt: skip
    return gather_rows(received, route.maps.row_map, route.maps.inverse).squeeze(1)


def combine(groups: Tensor, route: Route) -> Tensor:
    """Take expert outputs (P, N) back to where their rows came from -> (M, N)."""
    rows = gather_rows(groups, route.maps.inverse, route.maps.row_map)
    back = route.input_splits, route.output_splits
    return a2a_combine_hp_fwd_mxfp8_bwd(rows, *back, route.group_name, route.recipe.rounding, mxfp8_bwd=route.recipe.mx)


# A graph that ends in MX rows is traced for MX gradients, but theirs are plain (pytorch/pytorch#172556), and the other
# way round for one that begins where they end. So unless Dynamo may keep the splits as symbols and trace on, these run
# outside of compiled graphs.
_dispatch_eagerly: Callable[..., Any] = torch.compiler.disable(dispatch)
_probs_eagerly: Callable[..., Any] = torch.compiler.disable(dispatch_probs)
_combine_eagerly: Callable[..., Any] = torch.compiler.disable(combine)


def send_rows(rows: Tensor | TokenCopies, counts: Tensor, recipe: Recipe, ranks: Ranks) -> tuple[Tensor, Tensor, Route]:
    """`dispatch` over these ranks, compiled where Dynamo can."""
    send = dispatch if dynamo_config.capture_scalar_outputs else _dispatch_eagerly
    return send(rows, counts, recipe, ranks.group_name, ranks.degree)


def send_probs(probs: Tensor, route: Route) -> Tensor:
    """`dispatch_probs`, compiled where Dynamo can."""
    return (dispatch_probs if dynamo_config.capture_scalar_outputs else _probs_eagerly)(probs, route)


def receive_rows(groups: Tensor, route: Route) -> Tensor:
    """`combine`, compiled where Dynamo can."""
    return (combine if dynamo_config.capture_scalar_outputs else _combine_eagerly)(groups, route)


class _DivideGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, divisor: int) -> Tensor:
        ctx.divisor = divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] / ctx.divisor, None


class _ReduceGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group_name: str, divisor: int) -> Tensor:
        ctx.group_name, ctx.divisor = group_name, divisor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        total = funcol.wait_tensor(funcol.all_reduce(grads[0].contiguous(), "sum", _group(ctx.group_name)))
        return total / ctx.divisor, None, None


_divide_gradient = differentiable("MXFP8ExpertParallel", _DivideGradient)
_reduce_gradient = differentiable("MXFP8ExpertParallel", _ReduceGradient)


def sharded(parameter: Tensor, ranks: Ranks | None) -> Tensor:
    """This rank's part of a weight with `Shard(0)`, or the plain weight itself; differentiable."""
    part = cast(Tensor, parameter.to_local()) if isinstance(parameter, DTensor) else parameter
    return part if ranks is None or ranks.gradient_divisor == 1 else _divide_gradient(part, ranks.gradient_divisor)


def replicated(parameter: Tensor, ranks: Ranks | None) -> Tensor:
    """A weight with `Replicate()`, whose gradient is reduced over the ranks, or the plain weight itself;
    differentiable."""
    if not isinstance(parameter, DTensor) or ranks is None:
        return parameter
    return _reduce_gradient(parameter.to_local(), ranks.group_name, ranks.gradient_divisor)
