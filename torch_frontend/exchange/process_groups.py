"""Process groups, and the checks that their ranks share before an all-to-all.

arguments of a rank --check--> valid or an error --all-gather--> table of all ranks --> send, or raise on every rank
"""

import dataclasses
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import fail
from ..ops.checks import check_flag, check_floats, check_int, check_plain
from ..ops.private import all_gather, group_named, is_fake, name_of_group

Splits = Sequence[int]


def name_of(op: str, argument: str, group: "str | dist.ProcessGroup | None") -> str:
    """The name of a process group, "" for a process alone. None is the default group if there is one."""
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
    blocks: bool = True,
) -> tuple[str, int]:
    """Return the group's name and the rounding; raise unless an all-to-all of these arguments can run.

    The ranks compare their arguments first, so that an error on one rank raises on all: one small all-gather, for which
    the host waits. Under torch.compile and during CUDA graph capture the host cannot wait, and a rank checks its own
    arguments alone. blocks: the rows are quantized, so their width must be a multiple of 32.
    """
    name, rounding, error = name_of(op, group_argument, group), 0, None
    try:
        rounding = int(Rounding.parse(scaling_mode, op, "scaling_mode"))
        if type(block_size) is not int or block_size != BLOCK:
            fail(ValueError, op, "block_size", repr(block_size), f"allowed: {BLOCK}, the block of MXFP8")
        check_flag(op, "mxfp8_bwd", mxfp8_bwd)
        check_rows_to_send(op, "input", x, blocks)
        # Under torch.compile splits may be symbols without a value: the collective checks them when it runs.
        if not torch.compiler.is_compiling():
            check_splits(op, x, output_splits, input_splits, name)
    except (TypeError, ValueError) as found:
        error = found
    if can_compare(name) and not is_fake(x):  # is_fake comes last: torch.compile of 2.11 cannot trace it
        options = {"rounding": rounding, "mxfp8_bwd": mxfp8_bwd}
        compare_all_to_all(op, x, output_splits, input_splits, options, name, error)
    if error is not None:
        raise error
    return name, rounding


def check_rows_to_send(op: str, argument: str, x: Tensor, blocks: bool) -> None:
    """Raise unless x is (M, K) bf16 or fp32, with K a multiple of 32 if it is sent in blocks of 32."""
    check_plain(op, argument, x)
    check_floats(op, argument, x)
    if blocks and x.shape[1] % BLOCK:
        fail(ValueError, op, argument, f"shape {tuple(x.shape)}", f"allowed: (M, K) with K a multiple of {BLOCK}")


def check_splits(op: str, x: Tensor, output_splits: Splits, input_splits: Splits, group_name: str) -> None:
    """Raise unless the splits are lists of one count per rank that fit x and each other."""
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


def can_compare(group_name: str) -> bool:
    """Whether the group has other ranks and the host can wait for them now."""
    if torch.compiler.is_compiling():  # first: Dynamo cannot trace a look-up of the group
        return False
    if degree_of(group_name) == 1 or dist.get_backend(group_named(group_name)) == "fake":
        return False
    # The question about capture creates a CUDA context: a process without one captures nothing.
    return not (torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def raise_collective_error(op: str, argument: str, got: str) -> NoReturn:
    """Raise RuntimeError for a collective that has failed: another rank has ended, or the time limit is over."""
    hint = "see the output of the rank that has ended or does not answer"
    fail(RuntimeError, op, argument, got, hint=hint)


@contextmanager
def naming_errors(op: str, argument: str, got: str) -> Iterator[None]:
    """Around a collective, whose own errors name no op."""
    try:
        yield
    except torch.OutOfMemoryError:  # a RuntimeError too, which scripts catch by its type
        raise
    except RuntimeError as error:
        raise_collective_error(op, argument, f"{got}: {error}")


def table_of_ranks(op: str, values: Sequence[int], group_name: str) -> list[list[int]]:
    """Row r: the values of rank r. An all-gather of int64, on the CPU if the group has a CPU backend; the host waits.
    All ranks pass equally many values."""
    group = group_named(group_name)
    on_cpu = "cpu:" in dist.get_backend_config(group)
    device = torch.device("cpu") if on_cpu else torch.device("cuda", torch.cuda.current_device())
    mine = torch.tensor(values, dtype=torch.int64, device=device)
    with naming_errors(op, "sizes", "an error while the ranks compare them"):
        return all_gather(mine, group).view(group.size(), -1).tolist()


def raise_of_ranks(op: str, argument: str, failed: Sequence[bool], error: Exception | None) -> None:
    """Raise this rank's error; on the other ranks raise that a rank failed."""
    if error is not None:
        raise error
    if any(failed):
        rank = list(failed).index(True)
        allowed = f"allowed: valid arguments on all ranks; rank {rank} raises the error that explains it"
        fail(ValueError, op, argument, f"bad arguments on rank {rank}", allowed)


def compare_all_to_all(
    op: str, x: Tensor, output_splits: Splits, input_splits: Splits, options: Mapping[str, Any], group_name: str,
    error: Exception | None,
) -> None:  # fmt: skip
    """Raise on every rank if one rank has an `error` or the arguments of two ranks disagree. A collective."""
    degree, shared, mine = degree_of(group_name), {}, [-1]
    if error is None:
        gradient = "needed" if torch.is_grad_enabled() and x.requires_grad else "none"
        shared = {"op": op, "input": f"{x.shape[1]} values of {x.dtype}", "gradient of input": gradient, **options}
        mine = [key_of(shared), *output_splits, *input_splits]
    table = table_of_ranks(op, mine + [-1] * (1 + 2 * degree - len(mine)), group_name)
    raise_of_ranks(op, "input", [row[0] < 0 for row in table], error)
    if any(row[0] != mine[0] for row in table):
        agree(op, group_name, shared, None)
    for rank in range(degree):
        for other, size in enumerate(table[rank][1 + degree :]):
            expected = table[other][1 + rank]
            if size != expected:
                got = f"{expected} from rank {rank} on rank {other}"
                fail(ValueError, op, "output_splits", got, f"allowed: {size}, its input_splits there")


def key_of(shared: Mapping[str, Any]) -> int:
    """31 bits that are equal in every process for equal arguments."""
    return zlib.crc32(repr(list(shared.items())).encode()) & 0x7FFFFFFF


def compare_calls(op: str, shared: Mapping[str, Any], group_name: str, error: Exception | None) -> None:
    """Raise on every rank if one rank has an `error` or the calls differ in an argument that all ranks share. A
    collective."""
    ours = -1 if error else key_of(shared)
    keys = [key for (key,) in table_of_ranks(op, [ours], group_name)]
    raise_of_ranks(op, "rows", [key < 0 for key in keys], error)
    if any(key != ours for key in keys):
        agree(op, group_name, shared, None)


def agree(
    op: str, group_name: str, arguments: Mapping[str, Any], error: Exception | None, argument: str = "rows"
) -> None:
    """Raise on every rank if one rank has an `error`, in the name of `argument`, or an argument differs between ranks.
    It sends pickled objects: once per layer, or to name the argument where the keys of two calls differ."""
    if not can_compare(group_name):
        if error is not None:
            raise error
        return
    table: list[Any] = [None] * degree_of(group_name)
    dist.all_gather_object(table, None if error else dict(arguments), group=group_named(group_name))
    raise_of_ranks(op, argument, [theirs is None for theirs in table], error)
    for rank, theirs in enumerate(table):
        for name, value in arguments.items():
            if theirs.get(name) != value:
                there, here = _differing(theirs.get(name), value)
                fail(ValueError, op, name, f"{there} on rank {rank}", f"allowed: {here}, as here")


def _differing(there: Any, here: Any) -> tuple[Any, Any]:
    """Two values, or of two dataclasses the fields that differ."""
    if not (dataclasses.is_dataclass(there) and type(there) is type(here)):
        return there, here
    names = [f.name for f in dataclasses.fields(there) if getattr(there, f.name) != getattr(here, f.name)]
    return ", ".join(f"{n}={getattr(there, n)!r}" for n in names), ", ".join(f"{n}={getattr(here, n)!r}" for n in names)
