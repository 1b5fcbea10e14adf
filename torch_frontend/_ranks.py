"""Process groups, and how their ranks agree before anything is sent.

a rank's arguments --check--> fine or an error --all-gather--> the table of all ranks --> send, or raise on every rank
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..core_kernels.formats import BLOCK, Rounding
from ..core_kernels.launch import fail
from ._call import checks_values
from ._checks import check_flag, check_floats, check_int, check_plain
from ._torch_private import group_named, is_fake, name_of_group

Splits = Sequence[int]


def name_of(op: str, argument: str, group: "str | dist.ProcessGroup | None") -> str:
    """The name of a process group; "" for a process alone. None is the default group where there is one."""
    if group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return ""
        group = dist.group.WORLD
    if isinstance(group, dist.ProcessGroup):
        return name_of_group(group)
    if not isinstance(group, str):
        outside = group is dist.GroupMember.NON_GROUP_MEMBER
        got = "a group that this rank is not in" if outside else repr(group)
        fail(TypeError, op, argument, got, "allowed: a group of this rank, its name, or None")
    if group and not torch.compiler.is_compiling():
        try:
            group_named(group)
        except (RuntimeError, ValueError):
            fail(ValueError, op, argument, repr(group), "allowed: the name of a group of this rank")
    return group


def degree_of(group_name: str) -> int:
    return group_named(group_name).size() if group_name else 1


def checked_all_to_all(
    op: str,
    x: Tensor,
    output_splits: Splits,
    input_splits: Splits,
    group_argument: str,
    group: Any,
    scaling_mode: Rounding | str = Rounding.RCEIL,
    block_size: int = BLOCK,
    mxfp8_bwd: bool = True,
) -> tuple[str, int]:
    """The group's name and the rounding; raises unless an all-to-all of these arguments can run.

    Over gloo, and within `debug_checks()` over any group, it raises on all ranks what is wrong on one.
    """
    name, rounding, error = name_of(op, group_argument, group), 0, None
    try:
        rounding = int(Rounding.parse(scaling_mode, op, "scaling_mode"))
        if type(block_size) is not int or block_size != BLOCK:
            fail(ValueError, op, "block_size", repr(block_size), f"allowed: {BLOCK}, the block of MXFP8")
        check_flag(op, "mxfp8_bwd", mxfp8_bwd)
        check_travelling(op, "input", x, True)
        # While compiling, splits may be symbols without a value: the collective checks them when it runs.
        if not torch.compiler.is_compiling():
            check_splits(op, x, output_splits, input_splits, name)
    except (TypeError, ValueError) as found:
        error = found
    if not (torch.compiler.is_compiling() or is_fake(x) or degree_of(name) == 1):
        over = torch.device("cpu" if dist.get_backend(group_named(name)) == "gloo" else "cuda")
        if checks_values(over):
            compare_ranks(op, x, output_splits, input_splits, name, error)
    if error is not None:
        raise error
    return name, rounding


def check_travelling(op: str, argument: str, x: Tensor, blocks: bool) -> None:
    """Raise unless x is (M, K) bf16 or fp32 and, where it travels in blocks of 32, K a multiple of 32."""
    check_plain(op, argument, x)
    check_floats(op, argument, x)
    if blocks and x.shape[1] % BLOCK:
        fail(ValueError, op, argument, f"shape {tuple(x.shape)}", f"allowed: (M, K) with K a multiple of {BLOCK}")


def check_splits(op: str, x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str) -> None:
    """Raise unless the splits are lists of one count per rank that say the same of x and of each other."""
    degree, rank = (degree_of(group_name), group_named(group_name).rank()) if group_name else (1, 0)
    for argument, splits in (("output_splits", output_splits), ("input_splits", input_splits)):
        if not isinstance(splits, list | tuple):
            allowed = "allowed: a list of ints; call .tolist() on a tensor"
            fail(TypeError, op, argument, f"a {type(splits).__name__}", allowed)
        if len(splits) != degree or any(isinstance(size, int) and size < 0 for size in splits):
            allowed = f"allowed: {degree} counts, one per rank of the group, at least 0"
            fail(ValueError, op, argument, list(splits), allowed)
        for size in splits:
            check_int(op, argument, size, 0)
    if sum(input_splits) != x.shape[0]:
        got = f"{list(input_splits)}, in total {sum(input_splits)}"
        fail(ValueError, op, "input_splits", got, f"allowed: a total of {x.shape[0]}, the rows of input")
    if output_splits[rank] != input_splits[rank]:
        allowed = f"allowed: {input_splits[rank]} from rank {rank}, what this rank sends itself"
        fail(ValueError, op, "output_splits", list(output_splits), allowed)


def compare_ranks(
    op: str, x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str, error: Exception | None
) -> None:
    """Raise on every rank what is wrong on one of them (this one's `error` among it) or between two. A collective."""
    mine = None if error else (x.shape[1] * x.element_size(), list(output_splits), list(input_splits))
    table: list[Any] = [None] * degree_of(group_name)
    dist.all_gather_object(table, mine, group=group_named(group_name))
    if error is not None:
        raise error
    for rank, row in enumerate(table):
        if row is None:
            allowed = f"allowed: valid arguments on all ranks; the error of rank {rank} says what is wrong"
            fail(ValueError, op, "input", f"bad arguments on rank {rank}", allowed)
    assert mine is not None
    for rank, (width, _, sent) in enumerate(table):
        if width != mine[0]:
            allowed = f"allowed: {mine[0]} bytes, as here: one K and one dtype"
            fail(ValueError, op, "input", f"rows of {width} bytes on rank {rank}", allowed)
        for other, size in enumerate(sent):
            expected = table[other][1][rank]
            if size != expected:
                got = f"{expected} from rank {rank} on rank {other}"
                fail(ValueError, op, "output_splits", got, f"allowed: {size}, its input_splits there")
