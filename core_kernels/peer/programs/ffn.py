"""The programs of a feed-forward whose exchange the device drives, between two meetings of the ranks.

forward   main  MEET | homes | weights quantized | p1 s p2 of chunk 0 | p1 s p2 of 1 | ...            | MEET | sum
          side               '- pull 0 | pull 1 | ... -|              '- push 0 |- push 1 | ... -'
backward  main  MEET | dh of 0 | dh of 1 ... | dy_t | SwiGLU' | dx | dw2 | x_t | dw1 dw3 | MEET | sum
          side       '- pull 0 | pull 1 | ...                      '--- push of dx ----'

p1: gate and up, s: SwiGLU, p2: down; dy_t, x_t: requantized along tokens; pull, push: ../exchange.cu
mm.py: one product in place of the three
"""

from collections.abc import Sequence

from ...fold.gathered.plan_requantize import requantize_col_fold
from ...grouped_gemm.folded.plan import grouped_mm_fold, grouped_mm_fold_sum, grouped_wgrad_fold
from ...grouped_gemm.folded.plan_pair import grouped_mm_fold_pair, grouped_wgrad_fold_pair
from ...launch import ArrayType
from ...swiglu.folded import plan, plan_bwd
from ...tiles import cdiv
from .program import ALL, MAIN, SIDE, Program
from .writer import (
    BACKWARD,
    FORWARD,
    LONGEST,
    MULTIPLE,
    RESERVED,
    Layout,
    Matrices,
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

SAVED_FFN = "home", "prob", "x_q", "x_sf", "gate", "up"
OPERANDS = tuple(f"{w}_{part}" for w in ("w1", "w3", "w2") for part in ("q", "sf"))
TRANSPOSED = tuple(f"{name}_t" for name in OPERANDS)


def takes_ffn(groups: int, dim: int, hidden: int) -> bool:
    """Whether the kernels of the programs take these sizes, whatever the number of rows."""
    return (
        dim % MULTIPLE == 0
        and dim <= LONGEST
        and hidden <= min(plan.LONGEST_ROW, plan_bwd.LONGEST_ROW)
        and groups <= plan_bwd.MAX_GROUPS
        and groups * cdiv(hidden, plan_bwd.TILE_COLUMNS) >= plan_bwd.FEW_CHAINS
    )


def _matrices(sizes: Sizes) -> Matrices:
    f, d = sizes.hidden, sizes.dim
    return {"w1": (f, d), "w3": (f, d), "w2": (d, f)}


def write_ffn_forward(
    sizes: Sizes, memory: Memory, quantize: bool, results: Sequence[str], layout: Layout | None, push: bool = True
) -> Program:
    """quantize: weights are given, not their operands. results: of LAID_OUT, SAVED_FFN and TRANSPOSED. layout: None
    where the ranks are the devices of one process: group_ends, home and prob are given, and addresses are found by the
    call (program_of_peers.h). push: without, for a backward that needs the saved arrays of a later round again."""
    to, chunks, of_peers = Writer(), list_chunks(sizes.groups, FORWARD), layout is None
    add_addresses(to, sizes, of_peers)
    add_home(to, sizes, memory, layout)
    arrived = add_pulls(to, sizes, memory, "x", chunks)
    matrices = {name: shape for name, shape in _matrices(sizes).items() if push or name != "w2"}
    (add_quantized if quantize else give_operands)(to, sizes, False, matrices)
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
        if not push:
            continue
        to.add(
            plan.swiglu_row_fold, ("gate", "up", "prob", "group_ends"), ("h_qf", "h_row_sf"), share=share,
            rounding=sizes.rounding, alpha=alpha, limit=limit, offset=offset,
        )  # fmt: skip
        operands = "h_qf", "h_row_sf", "w2_q", "w2_sf", "group_ends"
        to.add(grouped_mm_fold, operands, ("y",), share=share, clear_rest=False)
        add_push(to, memory, "y", "no_numbers", chunk)
    to.order(SIDE, MAIN)
    return to.program(results)


def write_ffn_backward(sizes: Sizes, memory: Memory, quantize: bool, of_peers: bool = False) -> Program:
    """Results: dw1, dw3, dw2."""
    to, m, f, chunks = Writer(), sizes.rows, sizes.hidden, list_chunks(sizes.groups, BACKWARD)
    to.give("home", (m, 2), "int32")
    to.give("group_ends", (sizes.groups,), "int32")
    add_addresses(to, sizes, of_peers)
    to.give("x_q", (m, sizes.dim), "uint8")
    to.give("x_sf", (m, sizes.dim // 32), "uint8")
    to.give("gate", (m, f), "bfloat16")
    to.give("up", (m, f), "bfloat16")
    to.give("prob", (m,), "float32")
    arrived = add_pulls(to, sizes, memory, "y", chunks)
    (add_quantized if quantize else give_operands)(to, sizes, True, _matrices(sizes))
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
    add_push(to, memory, "dx", "dprob")
    beside = 0, ALL, RESERVED
    operands = "y_q_t", "y_span_sf", "h_q_t", "h_span_sf", "group_ends"
    to.add(grouped_wgrad_fold, operands, ("dw2",), share=beside, out_dtype=sizes.dtype)
    to.add(requantize_col_fold, ("x_q", "x_sf", "group_ends"), ("x_q_t", "x_span_sf"), rounding=sizes.rounding)
    operands = "gate_q_t", "gate_span_sf", "x_q_t", "x_span_sf", "up_q_t", "up_span_sf", "group_ends"
    to.add(grouped_wgrad_fold_pair, operands, ("dw1", "dw3"), share=beside, out_dtype=sizes.dtype)
    to.order(SIDE, MAIN)
    return to.program(("dw1", "dw3", "dw2"))
