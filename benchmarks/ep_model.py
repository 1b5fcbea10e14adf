"""A performance model of expert parallelism of one GEMM, from measured rates: each stage, without and with overlap.

    Case, Rates --forward, backward--> Direction: seconds of each stage --in_turn, overlapped--> seconds

    in_turn      before | dispatch | group | products | scatter | combine | after
    overlapped   wire         c0 c1 c2 ..            c0 c1 c2 ..       pulls first, then pushes of multiplied chunks
                 products  before  c0 c1 c2 .. filler              after

Routing is balanced. Every number of `Rates` is measured or quoted, and nothing is fitted. The overlapped exchange runs
within a host alone (core_kernels/peer/schedule.py).
"""

from collections.abc import Mapping, Sequence
from math import comb
from typing import Literal, NamedTuple, get_args

from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.peer.schedule import BACKWARD, FORWARD, list_chunks
from mxep.core_kernels.policy.deduplicate import Deduplicate
from mxep.core_kernels.policy.recipe import Recipe, TransferName

Send = Literal["each", "summed"]
"""Rows that are sent: one per replica; or one per rank, both ways, as `dispatch(deduplicate="both")`."""
MX, BF16 = 1 + 1 / BLOCK, 2.0
"""Bytes per value."""


class Rates(NamedTuple):
    """products: FLOP/s of "forward", "dgrad", "wgrad", "bf16" (ours) and of torch's bf16 "plain forward", ... .
    passes: bytes/s, read and written, of the other kernels. pull, push: bytes/s of each direction between GPUs of a
    host during products, which take `narrowed` times as long then. collectives: bytes/s within a host without work at
    the same time. network: bytes/s out of each GPU between hosts. gpus: of a host."""

    products: Mapping[str, float]
    passes: Mapping[str, float]
    pull: float
    push: float
    narrowed: float
    collectives: float
    network: float
    gpus: int


class Case(NamedTuple):
    """rows per rank, of `top_k` per token; experts per rank."""

    ranks: int
    rows: int
    dim: int
    hidden: int
    experts: int
    recipe: Recipe
    top_k: int = 1
    send: Send = "each"

    def chunks(self, parts: Sequence[int]) -> list[float]:
        """The share of the experts in each chunk. parts: FORWARD or BACKWARD of the schedule."""
        return [(last - first) / self.experts for first, last in list_chunks(self.experts, parts)]

    @property
    def tokens(self) -> float:
        return self.rows / self.top_k


class Direction(NamedTuple):
    """Seconds. before, after: local passes before the first row is sent and after the last one is received. there,
    back: of the communication of each chunk; chunks: of their GEMMs and folds, on all multiprocessors. filler: work
    after the last chunk, overlapped with the last communication. group, scatter: passes that only the run without
    overlap needs; fold too, since a pull folds. wire: of both all-to-alls without overlap. narrowed: of Rates."""

    before: float
    there: tuple[float, ...]
    chunks: tuple[float, ...]
    back: tuple[float, ...]
    filler: float
    after: float
    group: float
    fold: float
    scatter: float
    wire: float
    narrowed: float

    @property
    def local(self) -> float:
        """Everything but communication, overlapped."""
        return self.before + self.narrowed * sum(self.chunks) + self.filler + self.after

    @property
    def travel(self) -> float:
        return sum(self.there) + sum(self.back)

    @property
    def bound(self) -> str:
        """The resource that bounds the overlapped time from below."""
        return "wire" if self.travel > self.narrowed * sum(self.chunks) + self.filler else "products"


def distinct(units: int, experts: int, top_k: int) -> float:
    """Expected number of `units` equal parts of the experts that have one of a token's `top_k` different experts.

    >>> round(distinct(4, 64, 8), 2), round(distinct(8, 256, 8), 2)
    (3.66, 5.29)
    """
    return units * (1 - comb(experts - experts // units, top_k) / comb(experts, top_k))


def rows_sent(case: Case, gpus: int) -> tuple[float, float, float]:
    """Rows that a rank sends within its host and to other hosts, and rows that a rank receives, its own included."""
    ranks = case.ranks
    inside, experts = min(ranks, gpus), case.ranks * case.experts
    per_token = float(case.top_k) if case.send == "each" else distinct(ranks, experts, case.top_k)
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


def transfer_seconds(case: Case, rates: Rates, within: float, row_nbytes: float) -> float:
    """Of all rows of an all-to-all; within: bytes/s in a host. The links there and the network work in parallel."""
    inside, remote, _ = rows_sent(case, rates.gpus)
    return max(inside * row_nbytes / within, remote * row_nbytes / rates.network)


def forward(case: Case, rates: Rates) -> Direction:
    k, n, rows, recipe = case.dim, case.hidden, case.rows, case.recipe
    arrived = rows_sent(case, rates.gpus)[2]
    mx, folded = recipe.sends_mx("dispatch"), recipe.operands == "mxfp8"
    sent = MX if mx else BF16
    before = case.tokens * k * (BF16 + MX) / rates.passes["quantize_row"] if mx else 0.0
    work = 2 * rows * k * n / rates.products["forward" if folded else "plain forward"]
    if folded:
        work += case.experts * k * n * (BF16 + 2) / rates.passes["quantize_both_fold"]
    fold = _operand(rows * k, mx, rates) if folded else 0.0
    return _direction(case, rates, ("dispatch", k, sent), ("combine", n), before, arrived, fold, work, 0.0)


def backward(case: Case, rates: Rates) -> Direction:
    k, n, rows, recipe = case.dim, case.hidden, case.rows, case.recipe
    arrived = rows_sent(case, rates.gpus)[2]
    mx, folded = recipe.sends_mx("combine_grad"), recipe.operands == "mxfp8"
    sent, passes, flops = MX if mx else BF16, rates.passes, 2 * rows * k * n
    before = case.tokens * n * (BF16 + MX) / passes["quantize_row"] if mx else 0.0
    if not folded:
        work, filler, fold = flops / rates.products["plain dgrad"], flops / rates.products["plain wgrad"], 0.0
    else:
        work, again, fold = flops / rates.products["dgrad"], 2 * MX, _operand(rows * n, mx, rates)
        if recipe.wgrad_mx:
            work += rows * n * again / passes["requantize_col_fold"]
            filler = rows * k * again / passes["requantize_col_fold"] + flops / rates.products["wgrad"]
        else:
            filler = rows * (k + n) * (MX + BF16) / passes["dequantize"] + flops / rates.products["bf16"]
    return _direction(case, rates, ("combine_grad", n, sent), ("dispatch_grad", k), before, arrived, fold, work, filler)


def _operand(values: float, mx: bool, rates: Rates) -> float:
    """The fold of MX rows, or the quantization of plain ones."""
    return values * (2 * MX / rates.passes["fold"] if mx else (BF16 + 1) / rates.passes["quantize_row"])


def _direction(
    case: Case, rates: Rates, there: tuple[TransferName, int, float], back: tuple[TransferName, int], before: float,
    arrived: float, fold: float, work: float, filler: float,
) -> Direction:  # fmt: skip
    """Add the passes that the all-to-alls need, and divide the work into chunks of experts."""
    (_, width, sent), (name, back_width) = there, back
    mx_back, passes, rows = case.recipe.sends_mx(name), rates.passes, case.rows
    returned, chunks = MX if mx_back else BF16, case.chunks(FORWARD if name == "combine" else BACKWARD)
    after = 0.0
    if case.top_k > 1:  # rows are gathered from tokens, and summed over each token's copies
        before += arrived * width * 2 * sent / passes["permute_mx"]
        after += (arrived + case.tokens) * back_width * BF16 / passes["combine"]
    if case.send != "each":  # duplicated after dispatch; summed before combine
        work += (arrived + rows) * width * sent / passes["permute_mx"]
        work += (arrived + rows) * back_width * BF16 / passes["combine"]
    if mx_back:
        work += arrived * back_width * (BF16 + MX) / passes["quantize_row"]
        after += arrived * back_width * (BF16 + MX) / passes["dequantize"]
    transfers = ((width, sent), (back_width, returned))
    rows_and_rates = zip(transfers, (rates.pull, rates.push), strict=True)
    out, home = (transfer_seconds(case, rates, rate, w * nbytes) for (w, nbytes), rate in rows_and_rates)
    return Direction(
        before,
        tuple(out * share for share in chunks),
        tuple(work * share for share in chunks),
        tuple(home * share for share in chunks),
        filler,
        after,
        rows * width * 2 * sent / passes["permute_mx"],
        fold,
        rows * back_width * 2 * BF16 / passes["unpermute"],
        sum(transfer_seconds(case, rates, rates.collectives, w * nbytes) for w, nbytes in transfers),
        rates.narrowed,
    )


def in_turn(d: Direction) -> float:
    """Seconds of the stages one after the other."""
    return d.before + d.wire + d.group + d.fold + sum(d.chunks) + d.scatter + d.filler + d.after


def overlapped(d: Direction) -> float:
    """Seconds of the overlapped schedule. Chunks are sent in order, all of dispatch before the first one of combine."""
    wire, gpu, arrived = d.before, d.before, []
    for seconds in d.there:
        wire += seconds
        arrived.append(wire)
    for here, chunk, seconds in zip(arrived, d.chunks, d.back, strict=True):
        gpu = max(gpu, here) + d.narrowed * chunk
        wire = max(wire, gpu) + seconds
    return max(gpu + d.filler, wire) + d.after


def plain(case: Case, rates: Rates) -> tuple[float, float]:
    """Forward and backward of the same pipeline in bf16: all-to-all, index_select, torch's product, one by one."""
    k, n, rows, flops = case.dim, case.hidden, case.rows, 2 * case.rows * case.dim * case.hidden
    wire = sum(transfer_seconds(case, rates, rates.collectives, w * BF16) for w in (k, n))
    select = rows * (k + n) * 2 * BF16 / rates.passes["unpermute"]
    if case.top_k > 1:  # rows are gathered from tokens, and summed over each token's copies
        select += (rows * k * 2 + (rows + case.tokens) * n) * BF16 / rates.passes["unpermute"]
    of = rates.products
    gradients = flops / of["plain dgrad"] + flops / of["plain wgrad"]
    return wire + select + flops / of["plain forward"], wire + select + gradients
