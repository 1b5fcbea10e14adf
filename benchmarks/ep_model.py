"""A performance model of expert parallelism of one GEMM, from measured rates: each stage, without and with overlap.

    Case, Rates --forward, backward--> Direction: seconds of each stage --in_turn, overlapped--> seconds

    in_turn      before | dispatch | group | products | scatter | combine | after
    overlapped   wire         c0 c1 c2 ..            c0 c1 c2 ..       dispatch first, then multiplied chunks
                 products  before  c0 c1 c2 .. filler              after
                 host      plan    c0 c1 c2 ..

Routing is balanced. Every number of `Rates` is measured or quoted. GEMMs and communication slow each other down. The
only fitted parameter, `unhidden`, is the part of the hidden communication time that reappears because of that.
"""

from collections.abc import Mapping, Sequence
from math import comb
from statistics import median
from typing import Literal, NamedTuple, get_args

from mxep.core_kernels.formats import BLOCK
from mxep.core_kernels.policy.deduplicate import Deduplicate
from mxep.core_kernels.policy.exchange import MOST_CHUNKS, expert_chunks
from mxep.core_kernels.policy.recipe import Recipe, TransferName

Send = Literal["each", "summed", "host"]
"""Rows that are sent: one per replica; one per rank, both ways, as `dispatch(deduplicate="both")`; or one per host."""
MX, BF16 = 1 + 1 / BLOCK, 2.0
"""Bytes per value."""


class Wire(NamedTuple):
    """The speed of communication between GPUs of a host. blocks: (bytes, seconds) of the copies that were measured, in
    order; one entry is a rate."""

    blocks: tuple[tuple[float, float], ...]

    def seconds(self, nbytes: float, block: float) -> float:
        """Of `nbytes`, in copies of `block` bytes. Between and beyond the measured sizes a copy's time is linear."""
        if not nbytes:
            return 0.0
        if len(self.blocks) == 1:
            ((size, time),) = self.blocks
            return nbytes * time / size
        after = next((i for i, (size, _) in enumerate(self.blocks) if size >= block), len(self.blocks) - 1)
        (a, at), (b, bt) = self.blocks[max(after, 1) - 1], self.blocks[max(after, 1)]
        return nbytes / block * (at + (bt - at) * (block - a) / (b - a))


class Rates(NamedTuple):
    """products: FLOP/s of "forward", "dgrad", "wgrad", "bf16" (ours) and of torch's bf16 "plain forward", ... .
    passes: bytes/s, read and written, of the other kernels. copies, collectives: communication within a host by copies
    one after another, and by collectives. network: bytes/s out of each GPU between hosts. gpus: of a host. launch,
    copy: CPU seconds per kernel and per copy."""

    products: Mapping[str, float]
    passes: Mapping[str, float]
    copies: Wire
    collectives: Wire
    network: float
    gpus: int
    launch: float
    copy: float


class Case(NamedTuple):
    """rows per rank, of `top_k` per token; experts per rank. chunk_bytes: of a transport."""

    ranks: int
    rows: int
    dim: int
    hidden: int
    experts: int
    recipe: Recipe
    top_k: int = 1
    send: Send = "each"
    chunk_bytes: int = 2**26

    @property
    def chunks(self) -> list[float]:
        """The share of the experts in each chunk."""
        nbytes = self.rows * self.dim * (MX if self.recipe.sends_mx("dispatch") else BF16)
        most = min(max(int(nbytes / self.chunk_bytes), 1), MOST_CHUNKS)
        return [(last - first) / self.experts for first, last in expert_chunks(self.experts, most)]

    @property
    def tokens(self) -> float:
        return self.rows / self.top_k


class Direction(NamedTuple):
    """Seconds. before, after: local passes before the first row is sent and after the last one is received. there,
    back: of the communication of each chunk; chunks: of their GEMMs and folds. filler: work after the last chunk,
    overlapped with the last communication. group, scatter: passes that only the run without overlap needs; own: copies
    that only the overlapped run needs. wire: of both all-to-alls without overlap. launches: CPU time per chunk."""

    before: float
    there: tuple[float, ...]
    chunks: tuple[float, ...]
    back: tuple[float, ...]
    filler: float
    after: float
    group: float
    scatter: float
    own: float
    wire: float
    launches: float

    @property
    def local(self) -> float:
        """Everything but communication and CPU time, overlapped."""
        return self.before + self.own + sum(self.chunks) + self.filler + self.after

    @property
    def travel(self) -> float:
        return sum(self.there) + sum(self.back)

    @property
    def bound(self) -> str:
        """The resource that bounds the overlapped time from below."""
        products, host = self.own + sum(self.chunks) + self.filler, self.launches * len(self.chunks)
        of = {"wire": self.travel, "products": products, "host": host}
        return max(of, key=lambda name: of[name])


def distinct(units: int, experts: int, top_k: int) -> float:
    """Expected number of `units` equal parts of the experts that have one of a token's `top_k` different experts.

    >>> round(distinct(4, 64, 8), 2), round(distinct(8, 256, 8), 2)
    (3.66, 5.29)
    """
    return units * (1 - comb(experts - experts // units, top_k) / comb(experts, top_k))


def rows_sent(case: Case, gpus: int) -> tuple[float, float, float]:
    """Rows that a rank sends within its host and to other hosts, and rows that a rank receives, its own included."""
    ranks, hosts = case.ranks, max(case.ranks // gpus, 1)
    inside, experts = min(ranks, gpus), case.ranks * case.experts
    per_token = float(case.top_k) if case.send == "each" else distinct(ranks, experts, case.top_k)
    rows = case.tokens * per_token
    if case.send == "host" and hosts > 1:
        remote = case.tokens * distinct(hosts, experts, case.top_k) * (hosts - 1) / hosts
        return rows * (inside - 1) / inside, remote, rows
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


def transfer_seconds(case: Case, rates: Rates, wire: Wire, row_nbytes: float) -> float:
    """Of all rows of an all-to-all; the links within a host and the network transfer them in parallel."""
    inside, remote, received = rows_sent(case, rates.gpus)
    block = received * row_nbytes / (case.ranks * case.experts)
    return max(wire.seconds(inside * row_nbytes, block), remote * row_nbytes / rates.network)


def forward(case: Case, rates: Rates) -> Direction:
    k, n, rows, recipe = case.dim, case.hidden, case.rows, case.recipe
    arrived = rows_sent(case, rates.gpus)[2]
    mx, folded = recipe.sends_mx("dispatch"), recipe.operands == "mxfp8"
    sent = MX if mx else BF16
    before = case.tokens * k * (BF16 + MX) / rates.passes["quantize_row"] if mx else 0.0
    work = 2 * rows * k * n / rates.products["forward" if folded else "plain forward"]
    if folded:
        work += _operand(rows * k, mx, rates) + case.experts * k * n * (BF16 + 2) / rates.passes["quantize_both_fold"]
    return _direction(case, rates, ("dispatch", k, sent), ("combine", n), before, arrived, work, 0.0)


def backward(case: Case, rates: Rates) -> Direction:
    k, n, rows, recipe = case.dim, case.hidden, case.rows, case.recipe
    arrived = rows_sent(case, rates.gpus)[2]
    mx, folded = recipe.sends_mx("combine_grad"), recipe.operands == "mxfp8"
    sent, passes, flops = MX if mx else BF16, rates.passes, 2 * rows * k * n
    before = case.tokens * n * (BF16 + MX) / passes["quantize_row"] if mx else 0.0
    if not folded:
        work, filler = flops / rates.products["plain dgrad"], flops / rates.products["plain wgrad"]
    else:
        work, again = flops / rates.products["dgrad"] + _operand(rows * n, mx, rates), 2 * MX
        if recipe.wgrad_mx:
            work += rows * n * again / passes["requantize_col_fold"]
            filler = rows * k * again / passes["requantize_col_fold"] + flops / rates.products["wgrad"]
        else:
            filler = rows * (k + n) * (MX + BF16) / passes["dequantize"] + flops / rates.products["bf16"]
    return _direction(case, rates, ("combine_grad", n, sent), ("dispatch_grad", k), before, arrived, work, filler)


def _operand(values: float, mx: bool, rates: Rates) -> float:
    """The fold of MX rows, or the quantization of plain ones."""
    return values * (2 * MX / rates.passes["fold"] if mx else (BF16 + 1) / rates.passes["quantize_row"])


def _direction(
    case: Case, rates: Rates, there: tuple[TransferName, int, float], back: tuple[TransferName, int], before: float,
    arrived: float, work: float, filler: float,
) -> Direction:  # fmt: skip
    """Add the passes that the all-to-alls need, and divide the work into chunks of experts."""
    (_, width, sent), (name, back_width) = there, back
    mx_back, passes, rows = case.recipe.sends_mx(name), rates.passes, case.rows
    returned = MX if mx_back else BF16
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
    out, home = (transfer_seconds(case, rates, rates.copies, w * nbytes) for w, nbytes in transfers)
    return Direction(
        before,
        tuple(out * share for share in case.chunks),
        tuple(work * share for share in case.chunks),
        tuple(home * share for share in case.chunks),
        filler,
        after,
        rows * width * 2 * sent / passes["permute_mx"],
        rows * back_width * 2 * BF16 / passes["unpermute"],
        sum(arrived / case.ranks * w * 2 * nbytes for w, nbytes in transfers) / passes["unpermute"],
        sum(transfer_seconds(case, rates, rates.collectives, w * nbytes) for w, nbytes in transfers),
        2 * (rates.launch + (case.ranks - 1) * rates.copy),
    )


def in_turn(d: Direction) -> float:
    """Seconds of the stages one after the other."""
    return d.before + d.wire + d.group + sum(d.chunks) + d.scatter + d.filler + d.after


def overlapped(d: Direction, unhidden: float = 0.0) -> float:
    """Seconds of the overlapped schedule. Chunks are sent in order, all of dispatch before the first one of combine."""
    host, wire, gpu, arrived = (
        d.before,
        d.before,
        d.before + d.own,
        [],
    )  # the host waits for the counts during `before`
    for seconds in d.there:
        wire += seconds
        arrived.append(wire)
    for here, chunk, seconds in zip(arrived, d.chunks, d.back, strict=True):
        host += d.launches
        gpu = max(gpu, here, host) + chunk
        wire = max(wire, gpu) + seconds
    total = max(gpu + d.filler, wire) + d.after
    return total + unhidden * max(d.local + d.travel - total, 0)


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


def fitted(measured: Sequence[float], hidden: Sequence[float], exposed: Sequence[float]) -> float:
    """`unhidden` of runs whose times are `measured`; the model has `hidden` for 0 and `exposed` for 1. The median; 0
    without any run."""
    shares = [(real - low) / (high - low) for real, low, high in zip(measured, hidden, exposed, strict=True)]
    return median(shares) if shares else 0.0
