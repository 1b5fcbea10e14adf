"""The schedule of an exchange that the device drives: a program of two streams between two meetings of the ranks.

    forward   main  MEET | homes | weights quantized | p1 s p2 of chunk 0 | p1 s p2 of 1 | ...            | MEET | sum
              side               '- pull 0 | pull 1 | ... -|              '- push 0 |- push 1 | ... -'
    backward  main  MEET | dh of 0 | dh of 1 ... | dy_t | SwiGLU' | dx | dw2 | x_t | dw1 dw3 | MEET | sum
              side       '- pull 0 | pull 1 | ...                      '--- push of dx ----'

    p1: gate and up, s: SwiGLU, p2: down; dy_t, x_t: requantized along tokens; pull, push: exchange.cu
    programs/mm.py: one product in place of the three

A chunk is a range of local experts, fixed here; its rows are on the device. Products that overlap with a pull or a push
leave `RESERVED` multiprocessors to it. A kernel waits for kernels before it in the order of launches of its own GPU, a
rank for other ranks in MEET alone: launched one after the other, the same program ends too.

A `Program` names arrays and steps; a frontend allocates the arrays and calls one `CudaProgram`.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from ..fold.gathered.plan_requantize import requantize_col_fold
from ..fold.matrix.plan import quantize_matrix_fold
from ..formats import packed_width
from ..grouped_gemm.folded.plan import grouped_mm_fold, grouped_mm_fold_sum, grouped_wgrad_fold
from ..grouped_gemm.folded.plan_pair import grouped_mm_fold_pair, grouped_wgrad_fold_pair
from ..launch import ArrayType, KernelOp
from ..swiglu.folded import plan, plan_bwd
from ..tiles import cdiv

MAIN, SIDE = 0, 1
RESERVED = 16
"""Multiprocessors of a pull or push: 16 move 290 to 360 GB/s on an H200 (benchmarks/results/h200_exchange_probe)."""
FORWARD, BACKWARD = (1, 3, 3, 1), (1, 2, 2, 3)
"""Relative sizes of the chunks of experts. The first pull and the last push overlap with no product: a short first
chunk, and in the forward a short last one. The push of the backward has no chunks."""
MULTIPLE, LONGEST = 512, 8192
"""Of dim: scales of a row are whole vectors of 16 bytes, and a ring of rows fits in shared memory."""
ALIGNMENT = 256
ARCH = "sm_90"
ALL = 2**31 - 1


def takes(groups: int, dim: int, hidden: int) -> bool:
    """Whether the kernels of the programs take these sizes, whatever the number of rows."""
    return (
        dim % MULTIPLE == 0
        and dim <= LONGEST
        and hidden <= min(plan.LONGEST_ROW, plan_bwd.LONGEST_ROW)
        and groups <= plan_bwd.MAX_GROUPS
        and groups * cdiv(hidden, plan_bwd.TILE_COLUMNS) >= plan_bwd.FEW_CHAINS
    )


SAVED = "home", "prob", "x_q", "x_sf", "gate", "up"
OPERANDS = tuple(f"{w}_{part}" for w in ("w1", "w3", "w2") for part in ("q", "sf"))
TRANSPOSED = tuple(f"{name}_t" for name in OPERANDS)
ITEMSIZES = {"uint8": 1, "bfloat16": 2, "int32": 4, "float32": 4}


class Step(NamedTuple):
    """As in program.h. share: the groups from the first to before the last, and multiprocessors left."""

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


class Memory(NamedTuple):
    """The offsets of a rank's arrays in mapped memory, and its end: packed rows (T, K + K/32), the order (T k,) int32
    of rows by expert and -1 behind them, weights (T k,) fp32 in this order, slots (T k, D) bf16 and numbers (T k,) fp32
    of slots. count: slots of a rank."""

    rows: int
    order: int
    weights: int
    slots: int
    numbers: int
    end: int
    count: int

    @classmethod
    def of(cls, start: int, slots: int, top_k: int, dim: int) -> "Memory":
        """slots: the most that a rank may have."""
        at = [start]
        for nbytes in (slots // top_k * packed_width(dim), 4 * slots, 4 * slots, 2 * slots * dim, 4 * slots):
            at.append(at[-1] + -(-nbytes // ALIGNMENT) * ALIGNMENT)
        return cls(*at, count=slots)


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


EXCHANGE_OPS = "find_home", "pull_fold", "push_rows"
"""Of exchange_ops.h, in its order."""
ADDRESSES = "addresses", "slot_addresses", "number_addresses"


class _Writer:
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


def _pulls(to: _Writer, sizes: Sizes, memory: Memory, of: str, chunks: Sequence[tuple[int, int]]) -> list[int]:
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


def _push(to: _Writer, memory: Memory, rows: str, numbers: str, groups: tuple[int, int] = (0, ALL)) -> None:
    to.order(MAIN, SIDE)
    attrs = memory.slots, memory.numbers, RESERVED
    inputs = rows, numbers, "home", "group_ends", "slot_addresses", "number_addresses"
    to.send("push_rows", inputs, {}, attrs, groups)


Matrices = Mapping[str, tuple[int, int]]
"""(N, K) of the weights, by name."""


def _matrices(sizes: Sizes) -> Matrices:
    f, d = sizes.hidden, sizes.dim
    return {"w1": (f, d), "w3": (f, d), "w2": (d, f)}


def _quantize(to: _Writer, sizes: Sizes, matrices: Matrices | None = None) -> None:
    """matrices: None is the feed-forward's."""
    for name, shape in (matrices or _matrices(sizes)).items():
        to.give(name, (sizes.groups, *shape), sizes.dtype)
        parts = [f"{name}_{part}" for part in ("q", "sf", "q_t", "sf_t")]
        to.add(quantize_matrix_fold, (name,), parts, rounding=sizes.rounding)


def _addresses(to: _Writer, sizes: Sizes, of_peers: bool) -> None:
    for name in ADDRESSES:
        if of_peers:
            to.arrays[name] = ArrayType((sizes.ranks, 2), "int32")
        else:
            to.give(name, (sizes.ranks, 2), "int32")


def _find_home(to: _Writer, sizes: Sizes, memory: Memory, given: bool) -> None:
    """The rank and slot of each row, and its weight."""
    m = sizes.rows
    home = {"home": ArrayType((m, 2), "int32"), "prob": ArrayType((m,), "float32")}
    if given:
        for name, array in home.items():
            to.give(name, array.shape, array.dtype)
    else:
        to.give("counts", (sizes.ranks, sizes.groups * sizes.ranks), "int32")
        attrs = sizes.rank, memory.order, memory.weights, memory.count
        to.send("find_home", ("counts", "group_ends", "addresses"), home, attrs, stream=MAIN)


def _give_weights(to: _Writer, sizes: Sizes, transposed: bool, matrices: Matrices | None = None) -> None:
    g, end = sizes.groups, "_t" if transposed else ""
    for name, (n, k) in (matrices or _matrices(sizes)).items():
        n, k = (k, n) if transposed else (n, k)
        to.give(f"{name}_q{end}", (g, n, k), "uint8")
        to.give(f"{name}_sf{end}", (g, n), "uint8")


def write_forward(
    sizes: Sizes, memory: Memory, quantize: bool, results: Sequence[str], of_peers: bool = False
) -> Program:
    """quantize: weights are given, not their operands. results: of SAVED and TRANSPOSED. of_peers: the ranks are the
    devices of one process; home and prob are given, and addresses are found by the call (program_of_peers.h)."""
    to, chunks = _Writer(), list_chunks(sizes.groups, FORWARD)
    to.give("group_ends", (sizes.groups,), "int32")
    _addresses(to, sizes, of_peers)
    _find_home(to, sizes, memory, of_peers)
    arrived = _pulls(to, sizes, memory, "x", chunks)
    _quantize(to, sizes) if quantize else _give_weights(to, sizes, False)
    if of_peers:
        to.arrays["no_numbers"] = ArrayType((0,), "float32")
    else:
        to.give("no_numbers", (0,), "float32")
    alpha, limit, offset = sizes.numbers
    for chunk, mark in zip(chunks, arrived, strict=True):
        to.wait(MAIN, mark)
        share = *chunk, RESERVED
        operands = "x_qf", "x_row_sf", "w1_q", "w1_sf", "w3_q", "w3_sf", "group_ends"
        to.add(grouped_mm_fold_pair, operands, ("gate", "up"), share=share, clear_rest=False)
        to.add(
            plan.swiglu_row_fold, ("gate", "up", "prob", "group_ends"), ("h_qf", "h_row_sf"), share=share,
            rounding=sizes.rounding, alpha=alpha, limit=limit, offset=offset,
        )  # fmt: skip
        operands = "h_qf", "h_row_sf", "w2_q", "w2_sf", "group_ends"
        to.add(grouped_mm_fold, operands, ("y",), share=share, clear_rest=False)
        _push(to, memory, "y", "no_numbers", chunk)
    to.order(SIDE, MAIN)
    return to.program(results)


def write_backward(sizes: Sizes, memory: Memory, quantize: bool, of_peers: bool = False) -> Program:
    """Results: dw1, dw3, dw2."""
    to, m, f, chunks = _Writer(), sizes.rows, sizes.hidden, list_chunks(sizes.groups, BACKWARD)
    to.give("home", (m, 2), "int32")
    to.give("group_ends", (sizes.groups,), "int32")
    _addresses(to, sizes, of_peers)
    to.give("x_q", (m, sizes.dim), "uint8")
    to.give("x_sf", (m, sizes.dim // 32), "uint8")
    to.give("gate", (m, f), "bfloat16")
    to.give("up", (m, f), "bfloat16")
    to.give("prob", (m,), "float32")
    arrived = _pulls(to, sizes, memory, "y", chunks)
    _quantize(to, sizes) if quantize else _give_weights(to, sizes, True)
    for chunk, mark in zip(chunks, arrived, strict=True):
        to.wait(MAIN, mark)
        operands = "y_qf", "y_row_sf", "w2_q_t", "w2_sf_t", "group_ends"
        to.add(grouped_mm_fold, operands, ("dh",), share=(*chunk, RESERVED), clear_rest=False)
    to.add(requantize_col_fold, ("y_q", "y_sf", "group_ends"), ("y_q_t", "y_span_sf"), rounding=sizes.rounding)
    alpha, limit, offset = sizes.numbers
    parts = [f"{of}_{part}" for of in ("gate", "up") for part in ("qf", "row_sf", "q_t", "span_sf")]
    to.add(
        plan_bwd.swiglu_bwd_fold, ("dh", "gate", "up", "prob", "group_ends"), (*parts, "h_q_t", "h_span_sf", "dprob"),
        rounding=sizes.rounding, alpha=alpha, limit=limit, offset=offset,
    )  # fmt: skip
    operands = "gate_qf", "gate_row_sf", "w1_q_t", "w1_sf_t", "up_qf", "up_row_sf", "w3_q_t", "w3_sf_t", "group_ends"
    to.add(grouped_mm_fold_sum, operands, ("dx",), clear_rest=False)
    _push(to, memory, "dx", "dprob")
    beside = 0, ALL, RESERVED
    operands = "y_q_t", "y_span_sf", "h_q_t", "h_span_sf", "group_ends"
    to.add(grouped_wgrad_fold, operands, ("dw2",), share=beside, out_dtype=sizes.dtype)
    to.add(requantize_col_fold, ("x_q", "x_sf", "group_ends"), ("x_q_t", "x_span_sf"), rounding=sizes.rounding)
    operands = "gate_q_t", "gate_span_sf", "x_q_t", "x_span_sf", "up_q_t", "up_span_sf", "group_ends"
    to.add(grouped_wgrad_fold_pair, operands, ("dw1", "dw3"), share=beside, out_dtype=sizes.dtype)
    to.order(SIDE, MAIN)
    return to.program(("dw1", "dw3", "dw2"))


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
