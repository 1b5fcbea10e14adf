"""What the programs of an exchange are made of.

    layout  the groups of this rank, and its rows that no rank has capacity for
    home    the rank and slot of each row: found on the device, or given
    pull    packed rows of the tokens' ranks --> rows as they came, and folded      one mark per chunk of experts
    push    rows of this rank's experts --> slots of the tokens' ranks

A chunk is a range of local experts, fixed here; its rows are on the device. Products that overlap with a pull or a push
leave `RESERVED` multiprocessors to it. A kernel waits for kernels before it in the order of launches of its own GPU, a
rank for other ranks in MEET alone: launched one after the other, the same program ends too.
"""

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ...fold.matrix.plan import quantize_matrix_fold, quantize_matrix_fold_t
from ...launch import ArrayType, KernelOp
from .program import ADDRESSES, ALIGNMENT, ALL, MAIN, SIDE, Program, Step, nbytes_of, place

RESERVED = 16
"""Multiprocessors of a pull or push: 16 move 290 to 360 GB/s on an H200 (benchmarks/results/h200_exchange_probe)."""
FORWARD, BACKWARD = (1, 3, 3, 1), (1, 2, 2, 3)
"""Relative sizes of the chunks of experts. The first pull and the last push overlap with no product: a short first
chunk, and in the forward a short last one. The push of a feed-forward's backward has no chunks."""
MULTIPLE, LONGEST = 512, 8192
"""Of dim: scales of a row are whole vectors of 16 bytes, and a ring of rows fits in shared memory."""
ARCH = "sm_90"
LAID_OUT = "group_ends", "sources", "totals"
"""Of lay_out. sources: for each slot its own number, or the slot that a row without a place reads, or -1."""
Matrices = Mapping[str, tuple[int, int]]
"""(N, K) of the weights, by name."""


class Memory(NamedTuple):
    """The offsets of a rank's arrays in mapped memory, and its end: rows (T, ..), the order (T k,) int32 of rows by
    expert and -1 behind them, weights (T k,) fp32 in this order, slots (T k, ..) and numbers (T k,) fp32 of slots.
    count: slots of a rank. Slots and numbers have one more, which no rank writes: a row without a place reads it."""

    rows: int
    order: int
    weights: int
    slots: int
    numbers: int
    end: int
    count: int

    @classmethod
    def of(cls, start: int, slots: int, top_k: int, row_bytes: int, slot_bytes: int) -> "Memory":
        """slots: the most that a rank may have. row_bytes, slot_bytes: of the longest row, and of the longest slot."""
        at, tokens, more = [start], slots // top_k, slots + 1
        for nbytes in (tokens * row_bytes, 4 * slots, 4 * slots, more * slot_bytes, 4 * more):
            at.append(at[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
        return cls(*at, count=slots)


class Layout(NamedTuple):
    """How lay_out places rows. alignment: rows that a group has whole blocks of. rounds: rows beyond the capacity have
    a place in a later round. drop: a row without a place is zero, and not NaN."""

    alignment: int
    rounds: bool = False
    drop: bool = False


class Sizes(NamedTuple):
    """Of a rank. rows: of an operand, padded groups of all ranks. numbers: of the activation. One product has dim = K,
    hidden = N and no numbers."""

    rank: int
    ranks: int
    groups: int
    rows: int
    dim: int
    hidden: int
    top_k: int
    dtype: str
    rounding: int
    numbers: tuple[float, ...]


def list_chunks(groups: int, parts: Sequence[int]) -> list[tuple[int, int]]:
    """The first and the last expert of each chunk, as a range. parts: the relative sizes of the chunks; each has at
    least one expert, so that fewer experts than parts are as many chunks.

    >>> list_chunks(16, (1, 3, 3, 1))
    [(0, 2), (2, 8), (8, 14), (14, 16)]
    >>> list_chunks(5, (1, 3, 3, 1))
    [(0, 1), (1, 2), (2, 4), (4, 5)]
    >>> list_chunks(2, (1, 3, 3, 1))
    [(0, 1), (1, 2)]
    """
    n, total = min(groups, len(parts)), sum(parts)
    ends = [0]
    for c in range(1, n):
        end = round(groups * sum(parts[:c]) / total)
        ends.append(min(max(end, ends[-1] + 1), groups - (n - c)))
    return list(pairwise([*ends, groups]))


class Writer:
    def __init__(self) -> None:
        self.arrays, self.given, self.steps, self.marks = {}, [], [], 0

    def give(self, name: str, shape: Sequence[int], dtype: str) -> None:
        self.arrays[name] = ArrayType(tuple(shape), dtype)
        self.given.append(name)

    def add(
        self, op: KernelOp, inputs: Sequence[str], outputs: Sequence[str], *, share: tuple[int, int, int] = (0, ALL, 0),
        **options: Any,
    ) -> None:  # fmt: skip
        """An op of the registry on the main stream."""
        launch = op.launch(*(self.arrays[name] for name in inputs), arch=ARCH, **options)
        if launch.cuda_unsupported:
            raise NotImplementedError(f"{op.name}: {launch.cuda_unsupported}")
        scratch = [f"{outputs[0]}.scratch{i}" for i in range(len(launch.scratch))]
        self.arrays.update(zip((*outputs, *scratch), (*launch.out, *launch.scratch), strict=True))
        self._step(op.name, MAIN, inputs, (*outputs, *scratch), launch.cuda_attrs, share)

    def send(
        self, op: str, inputs: Sequence[str], outputs: dict[str, ArrayType], attrs: tuple[int, ...],
        groups: tuple[int, int] = (0, ALL), stream: int = SIDE,
    ) -> None:  # fmt: skip
        """An op of exchange_ops.h."""
        self.arrays.update(outputs)
        self._step(op, stream, inputs, tuple(outputs), attrs, (*groups, 0))

    def order(self, earlier: int, later: int) -> None:
        """The stream `later` waits for all work of `earlier` so far."""
        self.wait(later, self.record(earlier))

    def record(self, stream: int) -> int:
        self.marks += 1
        self._step("record", stream, (), (), (self.marks,))
        return self.marks

    def wait(self, stream: int, mark: int) -> None:
        self._step("wait", stream, (), (), (mark,))

    def _step(
        self, op: str, stream: int, inputs: Sequence[str], outputs: Sequence[str], attrs: tuple[int, ...],
        share: tuple[int, int, int] = (0, ALL, 0),
    ) -> None:  # fmt: skip
        numbers = {name: i for i, name in enumerate(self.arrays)}
        of = lambda names: tuple(numbers[name] for name in names)  # noqa: E731
        self.steps.append(Step(op, stream, of(inputs), of(outputs), tuple(map(int, attrs)), share))

    def program(self, results: Sequence[str]) -> Program:
        others = [name for name in self.arrays if name not in {*self.given, *results}]
        places, nbytes = place({name: nbytes_of(self.arrays[name]) for name in others}, self._users(), self.steps)
        return Program(self.arrays, tuple(self.given), tuple(results), tuple(self.steps), places, nbytes)

    def _users(self) -> dict[str, list[int]]:
        """The steps that read or write each array. Addresses are written before the first step."""
        users: dict[str, list[int]] = {name: [0] if name in ADDRESSES else [] for name in self.arrays}
        names = list(self.arrays)
        for i, step in enumerate(self.steps):
            for number in {*step.inputs, *step.outputs}:
                users[names[number]].append(i)
        return users


def add_pulls(to: Writer, sizes: Sizes, memory: Memory, of: str, chunks: Sequence[tuple[int, int]]) -> list[int]:
    """Rows `of`_q, _sf as they came and _qf, _row_sf folded; returns the mark of each chunk."""
    m, k, marks = sizes.rows, sizes.dim, []
    types = {"q": (m, k), "sf": (m, k // 32), "qf": (m, k), "row_sf": (m,)}
    outputs = {f"{of}_{name}": ArrayType(shape, "uint8") for name, shape in types.items()}
    to.order(MAIN, SIDE)
    for chunk in chunks:
        attrs = memory.rows, sizes.top_k, RESERVED
        to.send("pull_fold", ("home", "group_ends", "addresses"), outputs, attrs, chunk)
        marks.append(to.record(SIDE))
    return marks


def add_push(to: Writer, memory: Memory, rows: str, numbers: str, groups: tuple[int, int] = (0, ALL)) -> None:
    to.order(MAIN, SIDE)
    attrs = memory.slots, memory.numbers, RESERVED
    inputs = rows, numbers, "home", "group_ends", "slot_addresses", "number_addresses"
    to.send("push_rows", inputs, {}, attrs, groups)


def add_quantized(to: Writer, sizes: Sizes, transposed: bool, matrices: Matrices) -> None:
    """transposed: a backward, which reads the operands along N alone. A forward also makes what its backward may save;
    there is no CUDA kernel for the operands along K alone."""
    op, parts = (quantize_matrix_fold_t, ()) if transposed else (quantize_matrix_fold, ("q", "sf"))
    for name, shape in matrices.items():
        to.give(name, (sizes.groups, *shape), sizes.dtype)
        to.add(op, (name,), [f"{name}_{part}" for part in (*parts, "q_t", "sf_t")], rounding=sizes.rounding)


def add_addresses(to: Writer, sizes: Sizes, of_peers: bool) -> None:
    for name in ADDRESSES:
        if of_peers:
            to.arrays[name] = ArrayType((sizes.ranks, 2), "int32")
        else:
            to.give(name, (sizes.ranks, 2), "int32")


def add_home(to: Writer, sizes: Sizes, memory: Memory, layout: Layout | None) -> None:
    """The ends of the groups, and the rank, slot and weight of each row: given without a layout, else found, with the
    arrays LAID_OUT."""
    m, groups, experts = sizes.rows, sizes.groups, sizes.groups * sizes.ranks
    ends = ArrayType((groups,), "int32")
    home = {"home": ArrayType((m, 2), "int32"), "prob": ArrayType((m,), "float32")}
    if layout is None:
        for name, array in {"group_ends": ends, **home}.items():
            to.give(name, array.shape, array.dtype)
        return
    to.give("counts", (sizes.ranks, experts), "int32")
    to.give("worst", (sizes.ranks, 2), "int32")
    laid_out = ends, ArrayType((memory.count,), "int32"), ArrayType((experts,), "int32")
    found = dict(zip(LAID_OUT, laid_out, strict=True)) | {"worst": to.arrays["worst"]}
    missing = -1 if layout.drop else memory.count
    attrs = sizes.rank, m, layout.alignment, layout.rounds, memory.order, missing
    to.send("lay_out", ("counts", "addresses"), found, attrs, stream=MAIN)
    attrs = sizes.rank, memory.order, memory.weights, memory.count
    to.send("find_home", ("counts", "group_ends", "addresses"), home, attrs, stream=MAIN)


def give_operands(to: Writer, sizes: Sizes, transposed: bool, matrices: Matrices) -> None:
    g, end = sizes.groups, "_t" if transposed else ""
    for name, (n, k) in matrices.items():
        n, k = (k, n) if transposed else (n, k)
        to.give(f"{name}_q{end}", (g, n, k), "uint8")
        to.give(f"{name}_sf{end}", (g, n), "uint8")
