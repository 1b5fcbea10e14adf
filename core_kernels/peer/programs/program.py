"""A program of two streams, and the memory of its arrays.

    Step, Step, ... --list_earlier--> what has ended before each one --place--> offsets in one buffer --> Program
    Program --encode--> the numbers that program_of_peers.h reads

writer.py makes a `Program`, which names arrays and steps. A frontend allocates the arrays and calls one `CudaProgram`.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from ...launch import ArrayType

MAIN, SIDE = 0, 1
ALL = 2**31 - 1
ALIGNMENT = 256
ITEMSIZES = {"uint8": 1, "bfloat16": 2, "int32": 4, "float32": 4}
EXCHANGE_OPS = "find_home", "pull_fold", "push_rows", "lay_out", "pull_rows"
"""Of exchange_ops.h, in its order."""
ADDRESSES = "addresses", "slot_addresses", "number_addresses"


class Step(NamedTuple):
    """As in ../program.h. share: the groups from the first to before the last, and multiprocessors left."""

    op: str
    stream: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    attrs: tuple[int, ...]
    share: tuple[int, int, int] = (0, ALL, 0)


class Program(NamedTuple):
    """arrays: their types by name, in the order of their numbers. given: the names of those that the caller has.
    results: of those that it keeps. The others are in one buffer of `nbytes` bytes, at the offsets `places`."""

    arrays: dict[str, ArrayType]
    given: tuple[str, ...]
    results: tuple[str, ...]
    steps: tuple[Step, ...]
    places: dict[str, int]
    nbytes: int


def nbytes_of(array: ArrayType) -> int:
    return math.prod(array.shape) * ITEMSIZES[array.dtype]


def list_earlier(steps: Sequence[Step]) -> list[list[int]]:
    """For each step the number of steps of each stream that have ended before it starts, counted in the list.

    >>> wait = [Step("a", 1, (), (), ()), Step("record", 1, (), (), (7,)), Step("wait", 0, (), (), (7,))]
    >>> list_earlier([*wait, Step("b", 0, (), (), ())])[-1]  # b: what is before it on stream 0, a on stream 1
    [3, 2]
    """
    ended, marks, found = [[0, 0], [0, 0]], {}, []
    for i, step in enumerate(steps):
        of = ended[step.stream]
        if step.op == "wait":
            ended[step.stream] = of = [max(pair) for pair in zip(of, marks[step.attrs[0]], strict=True)]
        found.append(list(of))
        of[step.stream] = i + 1
        if step.op == "record":
            marks[step.attrs[0]] = list(of)
    return found


def place(nbytes: dict[str, int], users: dict[str, list[int]], steps: Sequence[Step]) -> tuple[dict[str, int], int]:
    """Offsets in one buffer, and its size. Two arrays share memory if all steps with one end before all with the
    other start, whatever the order in which the streams run.

    Each array gets the lowest free offset, once in the order of sizes and once in the order of last uses, from the
    last step. The smaller buffer is returned: either order can leave gaps that no other array fits in.
    """
    earlier = list_earlier(steps)

    def before(x: str, y: str) -> bool:
        return all(j < earlier[i][steps[j].stream] for i in users[y] for j in users[x])

    share = {(x, y) for x in nbytes for y in nbytes if before(x, y) or before(y, x)}

    def in_order(names: Sequence[str]) -> tuple[dict[str, int], int]:
        places: dict[str, int] = {}
        for name in names:
            at = 0
            for begin, end in sorted((at, at + nbytes[x]) for x, at in places.items() if (x, name) not in share):
                if at + nbytes[name] <= begin:
                    break
                at = max(at, -(-end // ALIGNMENT) * ALIGNMENT)
            places[name] = at
        return places, max((at + nbytes[name] for name, at in places.items()), default=0)

    by_size = sorted(nbytes, key=lambda name: -nbytes[name])
    by_last_use = sorted(by_size, key=lambda name: -users[name][-1])
    return min(in_order(by_size), in_order(by_last_use), key=lambda found: found[1])


def encode(program: Program, inputs: Sequence[str], outputs: Sequence[str], ops: Sequence[str]) -> list[int]:
    """The numbers that program_of_peers.h reads. inputs, outputs: the names of the arrays of a call that are in the
    program, "" for others. ops: the names of the table."""
    dtypes, numbers = ("uint8", "int32", "bfloat16", "float32"), [len(program.arrays)]
    for name, array in program.arrays.items():
        if name in program.places:
            numbers += 2, program.places[name]
        else:
            given = name in inputs
            numbers += 0 if given else 1, (inputs if given else outputs).index(name)
        numbers += dtypes.index(array.dtype), len(array.shape), *array.shape
    names = list(program.arrays)
    numbers += [*map(names.index, ADDRESSES), len(program.steps)]
    marks = {"record": -1, "wait": -2}
    for step in program.steps:
        numbers += marks[step.op] if step.op in marks else ops.index(step.op), step.stream
        for part in (step.inputs, step.outputs, step.attrs, step.share):
            numbers += len(part), *part
    return numbers
