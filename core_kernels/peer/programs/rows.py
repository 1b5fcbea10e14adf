"""The programs of a call whose products are ordinary ops: rows to the experts, and rows of the experts to the tokens.

    forward     MEET | layout | homes | pull | ordinary products | push | MEET | sums or rows
    backward    MEET                  | pull | ordinary products | push | MEET | sums or rows

The experts' ranks pull a row once for each of its experts, as the programs that overlap do. A push of replicas by the
tokens' ranks would send as many bytes, and would need the place of each row on both ranks. Rows have any bytes: bf16,
fp32, or E4M3 codes and their scales. Nothing overlaps, so that the kernels have more CTAs.
"""

from typing import NamedTuple

from ...launch import ArrayType
from .program import MAIN, Program
from .writer import LAID_OUT, Layout, Memory, Sizes, Writer, add_addresses, add_home

CTAS = 64
"""Of a pull or a push that no product overlaps with, as in benchmarks/results/h200_exchange_probe."""
LONGEST_ROW = 48 * 1024
"""Bytes; kLongestRow of exchange_ops.h."""
GRANULE = 16
"""Bytes: rows of memory that kernels of peers copy are whole ones."""


class RowBytes(NamedTuple):
    """A row in mapped memory: bytes of its values and of its scales, and its length, a multiple of GRANULE."""

    values: int
    scales: int

    @property
    def length(self) -> int:
        return -(-(self.values + self.scales) // GRANULE) * GRANULE


def write_pull(sizes: Sizes, memory: Memory, row: RowBytes, layout: Layout | None) -> Program:
    """Results: values and scales (rows, ..) uint8; with a layout also LAID_OUT, home and prob."""
    to, m, found = Writer(), sizes.rows, ()
    add_addresses(to, sizes, False)
    if layout is None:
        _give_home(to, sizes)
    else:
        add_home(to, sizes, memory, layout)
        found = *LAID_OUT, "home", "prob"
    outputs = {"values": ArrayType((m, row.values), "uint8"), "scales": ArrayType((m, row.scales), "uint8")}
    attrs = memory.rows, sizes.top_k, row.length, CTAS
    to.send("pull_rows", ("home", "group_ends", "addresses"), outputs, attrs, stream=MAIN)
    return to.program((*found, *outputs))


def write_push(sizes: Sizes, memory: Memory, length: int, numbers: bool) -> Program:
    """Of rows of `length` bytes, which are given as bf16, and with them of numbers (rows,) fp32. No results."""
    to, m = Writer(), sizes.rows
    add_addresses(to, sizes, False)
    _give_home(to, sizes)
    to.give("rows", (m, length // 2), "bfloat16")
    to.give("numbers", (m if numbers else 0,), "float32")
    inputs = "rows", "numbers", "home", "group_ends", "slot_addresses", "number_addresses"
    to.send("push_rows", inputs, {}, (memory.slots, memory.numbers, CTAS), stream=MAIN)
    return to.program(())


def _give_home(to: Writer, sizes: Sizes) -> None:
    to.give("home", (sizes.rows, 2), "int32")
    to.give("group_ends", (sizes.groups,), "int32")
