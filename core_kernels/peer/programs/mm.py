"""The programs of one grouped product whose exchange the device drives; their parts are in writer.py.

    forward    main  MEET | homes | weights quantized | out of chunk 0 | out of 1 | ...         | MEET | sums or rows
               side               '- pull 0 | pull 1 | ... -|          '- push 0 |- push 1 | ... -'
    backward   main  MEET | x along tokens | dx of 0 | dx of 1 | ... | dy along tokens | dw     | MEET | sums or rows
               side       '- pull 0 | pull 1 | ...   '- push 0 |- push 1 | ... -----------------'

Rows of x and of dx have K values, rows of dy and of the result N. `Memory` has room for the longer ones.
"""

from collections.abc import Sequence

from ...fold.gathered.plan_requantize import requantize_col_fold
from ...grouped_gemm.folded.plan import grouped_mm_fold, grouped_wgrad_fold
from .program import ALL, MAIN, SIDE, Program
from .writer import (
    BACKWARD,
    FORWARD,
    LONGEST,
    MULTIPLE,
    RESERVED,
    Layout,
    Memory,
    Sizes,
    Writer,
    add_addresses,
    add_home,
    add_pulls,
    add_push,
    add_quantized,
    give_operands,
    list_chunks,
)

MOST_HOMES = 48 * 1024 // 4
"""find_home has a number for each rank and group in shared memory."""
SAVED_MM = "home", "x_q", "x_sf"


def takes_mm(ranks: int, groups: int, n: int, k: int) -> bool:
    """Whether the kernels of the programs take these sizes, whatever the number of rows."""
    return all(size % MULTIPLE == 0 and 0 < size <= LONGEST for size in (n, k)) and ranks * groups <= MOST_HOMES


def write_mm_forward(
    sizes: Sizes, memory: Memory, quantize: bool, results: Sequence[str], layout: Layout, push: bool = True
) -> Program:
    """quantize: w is given, not its operands. results: of LAID_OUT, SAVED_MM, w_q_t and w_sf_t. push: without, for a
    backward that needs the saved arrays of a later round again: its slots have rows of K values by then."""
    to, chunks = Writer(), list_chunks(sizes.groups, FORWARD)
    add_addresses(to, sizes, False)
    add_home(to, sizes, memory, layout)
    arrived = add_pulls(to, sizes, memory, "x", chunks)
    if not push:
        to.order(SIDE, MAIN)
        return to.program(results)
    _weights(to, sizes, quantize, False)
    to.give("no_numbers", (0,), "float32")
    for chunk, mark in zip(chunks, arrived, strict=True):
        to.wait(MAIN, mark)
        operands = "x_qf", "x_row_sf", "w_q", "w_sf", "group_ends"
        to.add(grouped_mm_fold, operands, ("y",), share=(*chunk, RESERVED), clear_rest=False)
        add_push(to, memory, "y", "no_numbers", chunk)
    to.order(SIDE, MAIN)
    return to.program(results)


def write_mm_backward(sizes: Sizes, memory: Memory, quantize: bool) -> Program:
    """Results: dw."""
    to, m, chunks = Writer(), sizes.rows, list_chunks(sizes.groups, BACKWARD)
    to.give("home", (m, 2), "int32")
    to.give("group_ends", (sizes.groups,), "int32")
    add_addresses(to, sizes, False)
    to.give("x_q", (m, sizes.dim), "uint8")
    to.give("x_sf", (m, sizes.dim // 32), "uint8")
    to.give("no_numbers", (0,), "float32")
    arrived = add_pulls(to, sizes._replace(dim=sizes.hidden), memory, "y", chunks)
    _weights(to, sizes, quantize, True)
    # Needs no pulled row: it fills the wait for the first chunk.
    to.add(requantize_col_fold, ("x_q", "x_sf", "group_ends"), ("x_q_t", "x_span_sf"), rounding=sizes.rounding)
    for chunk, mark in zip(chunks, arrived, strict=True):
        to.wait(MAIN, mark)
        operands = "y_qf", "y_row_sf", "w_q_t", "w_sf_t", "group_ends"
        to.add(grouped_mm_fold, operands, ("dx",), share=(*chunk, RESERVED), clear_rest=False)
        # A push moves 2 K bytes per row, and dw has 2 N K operations per row. At 300 GB/s and 1000 TFLOPS dw takes
        # longer than a push of all rows from N = 3300 on. For smaller N the push starts with the first chunk; larger N
        # lose nothing by it, since no pull comes after a push.
        add_push(to, memory, "dx", "no_numbers", chunk)
    to.add(requantize_col_fold, ("y_q", "y_sf", "group_ends"), ("y_q_t", "y_span_sf"), rounding=sizes.rounding)
    operands = "y_q_t", "y_span_sf", "x_q_t", "x_span_sf", "group_ends"
    to.add(grouped_wgrad_fold, operands, ("dw",), share=(0, ALL, RESERVED), out_dtype=sizes.dtype)
    to.order(SIDE, MAIN)
    return to.program(("dw",))


def _weights(to: Writer, sizes: Sizes, quantize: bool, transposed: bool) -> None:
    (add_quantized if quantize else give_operands)(to, sizes, transposed, {"w": (sizes.hidden, sizes.dim)})
