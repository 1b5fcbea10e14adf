"""A performance model of expert parallelism of one GEMM, from measured rates, without and with overlap.

    Case, Rates --forward, backward--------------------> Stages: seconds of the all-to-alls, and of the rest
                --forward_program, backward_program----> Program: seconds of each stage --run--> seconds

    main   before | first | GEMM c0 | GEMM c1 | ..           | last | after
    side            pull c0 | pull c1 | .. | push c0 | push c1 | ..

The programs are in core_kernels/peer: the device drives the exchange, and no stage waits for the host. Routing is
balanced. Every number of `Rates` is measured or quoted, and none is fitted.
"""

from collections.abc import Mapping
from math import comb
from typing import NamedTuple, get_args

from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.peer.programs.mm import takes_mm
from mxep.core_kernels.peer.programs.writer import BACKWARD, FORWARD, list_chunks
from mxep.core_kernels.policy.deduplicate import Deduplicate
from mxep.core_kernels.policy.recipe import Recipe, TransferName

MX, BF16 = 1 + 1 / BLOCK, 2.0
"""Bytes per value."""


class Copies(NamedTuple):
    """Pulls or pushes by the reserved SMs. link: bytes/s of rows of other ranks. kernel: bytes/s of all rows. slower:
    the time of GEMMs on the other SMs meanwhile, relative to GEMMs on all SMs with nothing at the same time."""

    link: float
    kernel: float
    slower: float


class Rates(NamedTuple):
    """products: FLOP/s of "forward", "dgrad", "wgrad", "bf16" (ours) and of torch's bf16 "plain forward", ... .
    passes: bytes/s, read and written, of the other kernels. nccl, network: bytes/s out of each GPU in an all-to-all,
    within a host and between hosts. gpus: of a host."""

    products: Mapping[str, float]
    passes: Mapping[str, float]
    nccl: float
    network: float
    gpus: int
    pull: Copies
    push: Copies


class Case(NamedTuple):
    """rows per rank, of `top_k` per token; experts per rank. once: `deduplicate="both"`."""

    ranks: int
    rows: int
    dim: int
    hidden: int
    experts: int
    recipe: Recipe
    top_k: int = 1
    once: bool = False

    @property
    def tokens(self) -> float:
        return self.rows / self.top_k

    def overlaps(self, gpus: int) -> bool:
        """Whether the device drives the exchange."""
        takes = takes_mm(self.ranks, self.experts, self.hidden, self.dim)
        return takes and not self.once and self.ranks <= gpus and self.recipe == Recipe.parse("mxfp8")


class Stages(NamedTuple):
    """Seconds without overlap. transfers: of both all-to-alls. local: of everything else."""

    transfers: float
    local: float


class Program(NamedTuple):
    """Seconds. before, after: local passes before the first barrier and after the last one. first: passes that need no
    pulled row. pulls, gemms, pushes: of each chunk. last: the weight gradient with its pass."""

    before: float
    first: float
    pulls: tuple[float, ...]
    gemms: tuple[float, ...]
    pushes: tuple[float, ...]
    last: float
    after: float

    @property
    def local(self) -> float:
        """Everything but pulls and pushes, on all SMs."""
        return self.before + self.first + sum(self.gemms) + self.last + self.after

    @property
    def copies(self) -> float:
        return sum(self.pulls) + sum(self.pushes)


def distinct(units: int, experts: int, top_k: int) -> float:
    """Expected number of `units` equal parts of the experts that have one of a token's `top_k` different experts.

    >>> round(distinct(4, 64, 8), 2), round(distinct(8, 256, 8), 2)
    (3.66, 5.29)
    """
    return units * (1 - comb(experts - experts // units, top_k) / comb(experts, top_k))


def rows_sent(case: Case, gpus: int) -> tuple[float, float, float]:
    """Rows that a rank sends within its host and to other hosts, and rows that a rank receives, its own included."""
    ranks, inside = case.ranks, min(case.ranks, gpus)
    per_token = distinct(ranks, ranks * case.experts, case.top_k) if case.once else float(case.top_k)
    rows = case.tokens * per_token
    return rows * (inside - 1) / ranks, rows * (ranks - inside) / ranks, rows


class TokenBytes(NamedTuple):
    """Bytes of a token, on average, that its rank sends to other ranks and receives from them."""

    forward: float
    backward: float


def token_bytes(
    ranks: int, experts: int, top_k: int, dim: int, recipe: Recipe, deduplicate: Deduplicate, weighted: bool = False
) -> TokenBytes:
    """Of `dispatch` and `combine` with uniform routing. experts: of all ranks. weighted: `combine` has probabilities.

    An all-to-all has top_k rows of a token, or one for each rank with one of its experts: on average
    R (1 - C(E - E/R, k) / C(E, k)) of the R ranks. R - 1 of R rows are for other ranks. With "dispatch" and "both"
    dispatch also sends 4 bytes per replica.

    >>> mxfp8 = Recipe.parse("mxfp8")
    >>> [round(token_bytes(4, 64, 8, 7168, mxfp8, how).forward / 1e3, 1) for how in (None, "dispatch", "both")]
    [130.4, 106.3, 59.7]
    """
    copies, sent = distinct(ranks, experts, top_k), (ranks - 1) / ranks
    each: set[TransferName] = set(get_args(TransferName))
    if deduplicate is not None:
        each -= {"dispatch"} if weighted else {"dispatch", "combine_grad"}
    once = deduplicate == "both"
    rows = {transfer: top_k if transfer in each and not once else copies for transfer in get_args(TransferName)}
    of_transfer = {
        transfer: n * sent * dim * (MX if recipe.sends_mx(transfer) else BF16) for transfer, n in rows.items()
    }
    slots = 0 if deduplicate is None else 4 * top_k * sent
    return TokenBytes(
        of_transfer["dispatch"] + slots + of_transfer["combine"],
        of_transfer["combine_grad"] + of_transfer["dispatch_grad"],
    )


def transfer_seconds(case: Case, rates: Rates, row_nbytes: float) -> float:
    """Of an all-to-all; the links within a host and the network send in parallel."""
    inside, remote, _ = rows_sent(case, rates.gpus)
    return max(inside * row_nbytes / rates.nccl, remote * row_nbytes / rates.network)


def forward(case: Case, rates: Rates) -> Stages:
    k, n, rows, recipe, passes = case.dim, case.hidden, case.rows, case.recipe, rates.passes
    mx, folded, flops = recipe.sends_mx("dispatch"), recipe.operands == "mxfp8", 2 * rows * k * n
    local = case.tokens * k * (BF16 + MX) / passes["quantize_row"] if mx else 0.0
    local += flops / rates.products["forward" if folded else "plain forward"]
    if folded:
        local += _operand(rows * k, mx, rates) + _weights(case, rates)
    return _with_transfers(case, rates, ("dispatch", k), ("combine", n), local)


def backward(case: Case, rates: Rates) -> Stages:
    k, n, rows, recipe, passes = case.dim, case.hidden, case.rows, case.recipe, rates.passes
    mx, flops = recipe.sends_mx("combine_grad"), 2 * rows * k * n
    local = case.tokens * n * (BF16 + MX) / passes["quantize_row"] if mx else 0.0
    if recipe.operands != "mxfp8":
        local += flops / rates.products["plain dgrad"] + flops / rates.products["plain wgrad"]
    else:
        local += flops / rates.products["dgrad"] + _operand(rows * n, mx, rates)
        if recipe.wgrad_mx:
            local += _along_tokens(rows * (k + n), rates) + flops / rates.products["wgrad"]
        else:
            local += rows * (k + n) * (MX + BF16) / passes["dequantize"] + flops / rates.products["bf16"]
    return _with_transfers(case, rates, ("combine_grad", n), ("dispatch_grad", k), local)


def _weights(case: Case, rates: Rates) -> float:
    return case.experts * case.dim * case.hidden * (BF16 + 2) / rates.passes["quantize_both_fold"]


def _operand(values: float, mx: bool, rates: Rates) -> float:
    """The fold of MX rows, or the quantization of plain ones."""
    return values * (2 * MX / rates.passes["fold"] if mx else (BF16 + 1) / rates.passes["quantize_row"])


def _along_tokens(values: float, rates: Rates) -> float:
    """An operand of the weight gradient."""
    return values * 2 * MX / rates.passes["requantize_col_fold"]


def _with_transfers(
    case: Case, rates: Rates, there: tuple[TransferName, int], back: tuple[TransferName, int], local: float
) -> Stages:
    """Add the all-to-alls and the passes that they need."""
    (name, width), (back_name, back_width), passes, rows = there, back, rates.passes, case.rows
    sent, returned = (MX if case.recipe.sends_mx(of) else BF16 for of in (name, back_name))
    received = rows_sent(case, rates.gpus)[2]
    local += rows * width * 2 * sent / passes["permute_mx"] + rows * back_width * 2 * BF16 / passes["unpermute"]
    if case.top_k > 1:  # rows are gathered from tokens, and summed over each token's copies
        local += received * width * 2 * sent / passes["permute_mx"]
        local += (received + case.tokens) * back_width * BF16 / passes["combine"]
    if case.once:  # duplicated after dispatch; summed before combine
        local += (received + rows) * width * sent / passes["permute_mx"]
        local += (received + rows) * back_width * BF16 / passes["combine"]
    if returned == MX:
        local += received * back_width * (BF16 + MX) * (1 / passes["quantize_row"] + 1 / passes["dequantize"])
    transfers = transfer_seconds(case, rates, width * sent) + transfer_seconds(case, rates, back_width * returned)
    return Stages(transfers, local)


def forward_program(case: Case, rates: Rates) -> Program:
    """Of a case that overlaps, in the chunks of the library."""
    work, chunks = (
        2 * case.rows * case.dim * case.hidden / rates.products["forward"],
        list_chunks(case.experts, FORWARD),
    )
    return _program(case, rates, case.dim, case.hidden, chunks, _weights(case, rates), work, 0.0)


def backward_program(case: Case, rates: Rates) -> Program:
    k, n, rows, flops = case.dim, case.hidden, case.rows, 2 * case.rows * case.dim * case.hidden
    last = _along_tokens(rows * n, rates) + flops / rates.products["wgrad"]
    work, chunks = flops / rates.products["dgrad"], list_chunks(case.experts, BACKWARD)
    return _program(case, rates, n, k, chunks, _along_tokens(rows * k, rates), work, last)


def _program(
    case: Case, rates: Rates, width: int, back_width: int, chunks: list[tuple[int, int]], first: float, work: float,
    last: float,
) -> Program:  # fmt: skip
    """Rows are pulled folded, in MXFP8; the result is pushed in bf16, and summed over each token's copies."""
    passes, shares = rates.passes, [(end - start) / case.experts for start, end in chunks]
    pull = _copy_seconds(case, rates.pull, width * MX)
    push = _copy_seconds(case, rates.push, back_width * BF16)
    return Program(
        case.tokens * width * (BF16 + MX) / passes["quantize_row"],
        first,
        tuple(pull * share for share in shares),
        tuple(work * share for share in shares),
        tuple(push * share for share in shares),
        last,
        (case.rows + case.tokens) * back_width * BF16 / passes["combine"],
    )


def _copy_seconds(case: Case, copies: Copies, row_nbytes: float) -> float:
    """Rows of the own rank are copied too, but not over the link."""
    nbytes = case.rows * row_nbytes
    return max(nbytes * (1 - 1 / case.ranks) / copies.link, nbytes / copies.kernel)


def run(program: Program, rates: Rates) -> float:
    """Seconds of a program. The side stream pulls all chunks, then pushes each one that is multiplied."""
    side, pulled = program.before, []
    for seconds in program.pulls:
        side += seconds
        pulled.append(side)
    main = program.before + program.first
    for here, gemm, push in zip(pulled, program.gemms, program.pushes, strict=True):
        main = max(main, here)
        main += gemm * (rates.pull if main < pulled[-1] else rates.push).slower
        side = max(side, main) + push
    return max(main + program.last * rates.push.slower, side) + program.after


def plain(case: Case, rates: Rates) -> tuple[float, float]:
    """Forward and backward of the same pipeline in bf16: all-to-all, index_select, torch's product, one by one."""
    k, n, rows, flops = case.dim, case.hidden, case.rows, 2 * case.rows * case.dim * case.hidden
    transfers = sum(transfer_seconds(case, rates, width * BF16) for width in (k, n))
    select = rows * (k + n) * 2 * BF16 / rates.passes["unpermute"]
    if case.top_k > 1:  # rows are gathered from tokens, and summed over each token's copies
        select += (rows * k * 2 + (rows + case.tokens) * n) * BF16 / rates.passes["unpermute"]
    of = rates.products
    gradients = flops / of["plain dgrad"] + flops / of["plain wgrad"]
    return transfers + select + flops / of["plain forward"], transfers + select + gradients
