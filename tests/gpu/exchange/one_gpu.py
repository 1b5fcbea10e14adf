"""Ranks of an exchange on one GPU, in threads of one process: each rank has an allocation of its own, and a barrier is
a synchronization on the host. Run by test_one_gpu.py under compute-sanitizer:

    compute-sanitizer python -m tests.gpu.exchange.one_gpu PART [FAULT]

PART: a name of PARTS. FAULT: a name of FAULTS, an array that is too short, so that kernels access memory past its end.
The results are compared with one process that has the tokens of all ranks. Each array of a program is an allocation of
its own too: inside a buffer, or a block of torch's allocator, the tool cannot detect an access out of bounds.
"""

import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, cast

import torch
from mxep.core_kernels.formats import packed_width
from mxep.core_kernels.peer.programs.writer import Memory, Sizes
from mxep.core_kernels.policy.rounds import capacity_of
from mxep.core_kernels.swiglu.activation import PLAIN
from mxep.torch_frontend import TokenReplicas, expert_parallel_ffn, ops, sort_by_expert
from mxep.torch_frontend.ops import differentiable
from mxep.torch_frontend.ops.mx_tensor import dequantized
from mxep.torch_frontend.overlap import device_exchange, prepared
from mxep.torch_frontend.overlap.device_call import FFN, DeviceCall
from mxep.torch_frontend.overlap.mapped_memory import MappedBuffer, MappedMemory
from mxep.torch_frontend.overlap.peer_experts import PeerCall
from mxep.torch_frontend.overlap.peer_memory import PeerMemory
from mxep.torch_frontend.overlap.prepared import Prepared
from mxep.torch_frontend.overlap.rank_rows import RankRows
from mxep.torch_frontend.overlap.rows import Rows, Transfers
from mxep.torch_frontend.overlap.symmetric import Shared
from torch import Tensor

from ...torch_frontend.overlap.ep_device import HIDDEN, LOCAL, RECIPE, TOP_K, D, routed

RANKS, MOST_TOKENS, ALIGNMENT = 3, 60, 32
SEEDS_OF_WIDTH = {96: (1, 4, 5), 2560: (5,), 7168: (5,)}
"""Of rows without overlap, from 112 bytes to 28 KiB: each number of warps that the kernels have."""
DEVICE = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
F = HIDDEN[DEVICE.type]
FAULTS = {"home": "homes", "sources": "layouts", "x_q": "pull_folds", "x_qf": "pull_folds", "slots": "pushes"}
FAULTS |= {"values": "pulls", "scales": "pulls"}
"""The array that is too short, and the kernel that writes past its end; x_q, values and slots are written by bulk
copies."""
WITHOUT_OVERLAP = "values", "scales"
"""Faults of the part `kernels`."""
fault = ""


class Ranks:
    """Threads, one per rank, of which one runs at a time, from a barrier to the next."""

    def __init__(self) -> None:
        self.turn, self.all, self.errors = threading.Lock(), threading.Barrier(RANKS), list[BaseException]()

    def meet(self) -> None:
        synchronize()
        self.turn.release()
        try:
            self.all.wait(300)
        finally:
            self.turn.acquire()

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        """function(rank) of each rank."""
        results: list[Any] = [None] * RANKS

        def of_rank(rank: int) -> None:
            with self.turn, torch.no_grad():
                try:
                    results[rank] = function(rank)
                    synchronize()
                except BaseException as error:
                    self.errors.append(error)
                    self.all.abort()

        threads = [threading.Thread(target=of_rank, args=(rank,)) for rank in range(RANKS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for error in self.errors:
            raise error
        return results


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Meeting(MappedMemory):
    """The memory of a rank, next to the others."""

    def __init__(self, rank: int, buffer: MappedBuffer, meet: Callable[[], None]) -> None:
        self.rank, self.ranks, self.device, self.buffer, self.meet = rank, RANKS, DEVICE, buffer, meet
        self.interrupted, self.compared = False, set()

    def barrier(self) -> None:
        self.meet()


class Mapped(PeerMemory):
    """buffer: of all ranks."""

    def __init__(self, rank: int, buffer: MappedBuffer, meet: Callable[[], None]) -> None:
        self.rank, self.ranks, self.device = rank, RANKS, DEVICE
        self.mapped, self.programs = Meeting(rank, buffer, meet), {}
        self.on_overflow, self.rounds = "nan", False
        self.worst = torch.zeros((RANKS, 2), dtype=torch.int32, device=DEVICE)
        self.side = torch.cuda.Stream(DEVICE, priority=-1) if DEVICE.type == "cuda" else None

    def rows(self, tokens: int, row_bytes: int, slot_bytes: int, capacity: int) -> RankRows:
        return RankRows(self, tokens, TOP_K, True, LOCAL, ALIGNMENT, row_bytes, slot_bytes, capacity, capacity)


def map_memory(
    row_bytes: int, slot_bytes: int, capacity: int, meet: Callable[[], None], short: bool = False
) -> list[Mapped]:
    """Memory of calls of these sizes. short: it ends in the second slot."""
    counts_end = -(-4 * LOCAL * RANKS // 256) * 256
    places = Memory.of(counts_end, capacity, TOP_K, row_bytes, slot_bytes)
    nbytes = places.slots + slot_bytes if short else places.end
    of_rank = [torch.full((nbytes,), 255, dtype=torch.uint8, device=DEVICE) for _ in range(RANKS)]
    addresses = torch.tensor([of.data_ptr() for of in of_rank], device=DEVICE).view(torch.int32).view(-1, 2)
    buffers = [MappedBuffer(Shared(of_rank, None), addresses, (0, counts_end, places.end), []) for _ in range(RANKS)]
    return [Mapped(rank, buffer, meet) for rank, buffer in enumerate(buffers)]


class Separate(Prepared):
    """A program whose arrays are allocations of their own."""

    @classmethod
    def of(cls, program: Any, device: torch.device) -> "Separate":
        types = [(array.shape, array.dtype) for array in program.arrays.values()]
        exchange: Any = prepared.exchange
        arguments = types, [-1] * len(types), program.steps
        launch = prepared.cpp_bindings.CudaProgram(exchange, device.index, *arguments)
        return cls(program, launch, ())

    def __call__(self, memory: PeerMemory, given: dict[str, Tensor]) -> dict[str, Tensor]:
        arrays = {name: given[name] if name in given else empty(name, *of) for name, of in self.program.arrays.items()}
        self.launch(tuple(arrays.values()), torch.empty(16, dtype=torch.uint8, device=DEVICE), memory.side_stream)
        synchronize()  # the arrays of both streams are freed
        return {name: arrays[name] for name in self.program.results}


def empty(name: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """Filled with ones: nobody may read what nobody has written."""
    shape = (1, *shape[1:]) if name == fault else shape
    out = torch.empty(shape, dtype=getattr(torch, dtype), device=DEVICE)
    out.view(torch.uint8).fill_(255)
    return out


class Context:
    """In place of autograd's: its backward has one thread per GPU, in which ranks cannot wait for each other."""

    needs_input_grad = (True,) * 8
    saved_tensors: tuple[Any, ...]

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def mark_non_differentiable(self, *_: Any) -> None:
        pass


class Tokens(NamedTuple):
    """Of a rank: rows, experts of each, weights, gradient of the result."""

    x: Tensor
    experts: Tensor
    probs: Tensor
    dy: Tensor

    @classmethod
    def of(cls, seed: int, rank: int) -> "Tokens":
        x, experts = routed(seed, rank, RANKS, MOST_TOKENS)
        rng = torch.Generator().manual_seed(1000 * seed + rank)
        probs = torch.rand(len(x), TOP_K, generator=rng)
        dy = torch.randn(len(x), D, generator=rng).to(torch.bfloat16)
        return cls(x.to(DEVICE), experts.to(DEVICE), probs.to(DEVICE), dy.to(DEVICE))


def weights_of(rank: int) -> list[Tensor]:
    rng = torch.Generator().manual_seed(rank)
    shapes = (LOCAL, F, D), (LOCAL, F, D), (LOCAL, D, F)
    return [(torch.randn(shape, generator=rng) * shape[-1] ** -0.5).bfloat16().to(DEVICE) for shape in shapes]


def in_one_process(tokens: Sequence[Tokens]) -> list[list[Tensor]]:
    """y, and gradients of x, probs, w1, w3, w2, of each rank."""
    x, experts, probs, dy = (torch.cat(parts) for parts in zip(*tokens, strict=True))
    weights = [torch.cat(parts) for parts in zip(*(weights_of(rank) for rank in range(RANKS)), strict=True)]
    leaves = [t.requires_grad_() for t in (x, probs, *weights)]
    order, inverse, counts = sort_by_expert(experts, LOCAL * RANKS)
    w1, w3, w2 = weights
    y = expert_parallel_ffn(TokenReplicas(x, order, inverse, TOP_K), counts, w1, w3, w2, probs, recipe=RECIPE)
    y.backward(dy)
    lengths = [len(t.x) for t in tokens]
    split = [t.split(lengths) for t in (y.detach(), x.grad, probs.grad)]  # type: ignore[union-attr]
    split += [w.grad.chunk(RANKS) for w in leaves[2:]]  # type: ignore[union-attr]
    return [list(parts) for parts in zip(*split, strict=True)]


def driven(seed: int, rows: int) -> None:
    """A layer and its backward over programs that the device drives. rows: the capacity of a rank; a token that loses
    a row is NaN, and the gradients of the experts miss it."""
    tokens, ranks = [Tokens.of(seed, rank) for rank in range(RANKS)], Ranks()
    slots = capacity_of(rows, LOCAL, ALIGNMENT)
    sizes_of_rows = packed_width(D), 2 * D, slots
    memories = map_memory(*sizes_of_rows, ranks.meet, fault == "slots")

    def of_rank(rank: int) -> list[Any]:
        memory, (x, experts, probs, dy) = memories[rank], tokens[rank]
        order, _, counts = sort_by_expert(experts, LOCAL * RANKS)
        rounding, numbers = int(RECIPE.rounding), tuple(PLAIN.attributes)
        sizes = Sizes(rank, RANKS, LOCAL, slots, D, F, TOP_K, "bfloat16", rounding, numbers)
        call = DeviceCall(memory.rows(len(x), *sizes_of_rows), FFN, sizes, D, (None,) * 3, True)
        ctx, function = Context(), device_exchange._DeviceExperts
        y, totals = function.forward(ctx, x, probs, call, order, counts, *weights_of(rank))
        dx, dprobs, *_, dw1, dw3, dw2 = function.backward(ctx, dy, totals)
        return [y, dx, dprobs, dw1, dw3, dw2]

    found, want = ranks.run(of_rank), in_one_process(tokens)
    lost = [y.isnan().any(1).cpu() for y, *_ in found]
    assert any(map(torch.any, lost)) == (rows < MOST_TOKENS * TOP_K * RANKS), "rows beyond the capacity"
    for rank, (got, expected) in enumerate(zip(found, want, strict=True)):
        for i, (one, other) in enumerate(zip(got, expected, strict=True)):
            if i < 3:
                same(one.cpu()[~lost[rank]], other.cpu()[~lost[rank]], ("driven", seed, rank, i))
                assert i == 2 or one.cpu()[lost[rank]].isnan().all()
            elif not any(map(torch.any, lost)):
                same(one.cpu(), other.cpu(), ("driven", seed, rank, i))


def same(got: Tensor, want: Tensor, what: object) -> None:
    """On the CPU: a comparison on the GPU would be a kernel of torch."""
    assert got.shape == want.shape, what
    assert torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), what


def exchanged(seed: int, rows: Rows) -> None:
    """The kernels without overlap: experts that return the rows that they get, and their weights."""
    tokens, ranks = [Tokens.of(seed, rank) for rank in range(RANKS)], Ranks()
    capacity, nbytes = capacity_of(MOST_TOKENS * TOP_K * RANKS, LOCAL, ALIGNMENT), rows.nbytes.length
    memories = map_memory(nbytes, nbytes, capacity, ranks.meet)

    def of_rank(rank: int) -> tuple[Tensor, Tensor]:
        memory, (x, experts, probs, _) = memories[rank], tokens[rank]
        x = widened(x, rows)
        order, _, counts = sort_by_expert(experts, LOCAL * RANKS)
        own, nobody = memory.rows(len(x), nbytes, nbytes, capacity), cast(Any, None)
        call = PeerCall(own, Transfers(rows, rows, rows, rows), nobody, torch.bfloat16)
        own.write(x, rows)
        own.write_order(order, probs)
        operand, given = call.pull(rows, {"counts": memory.mapped.share_counts(counts)})
        call.push(rows, dequantized(operand), given["prob"], given)
        memory.mapped.barrier()
        return own.sums(given["sources"], rows, torch.bfloat16), own.numbers(given["sources"])

    for (y, weights), (x, _, probs, _) in zip(ranks.run(of_rank), tokens, strict=True):
        values = widened(x, rows).cpu()
        if rows.rounding is not None:
            values = through_mx(through_mx(values, rows.rounding), rows.rounding)
        total = torch.zeros(values.shape)
        for _ in range(TOP_K):
            total += values.float()
        same(y.cpu(), total.bfloat16(), rows)
        same(weights.cpu(), probs.cpu(), rows)


def widened(x: Tensor, rows: Rows) -> Tensor:
    """Tokens with as many values as the rows."""
    return x.repeat(1, -(-rows.width // D))[:, : rows.width].to(rows.dtype).contiguous()


def through_mx(x: Tensor, rounding: int) -> Tensor:
    q, sf = ops.quantize_row(x, rounding)
    return ops.dequantize(q, sf, str(x.dtype).removeprefix("torch."))


def routings(*seeds: int) -> None:
    for seed in seeds:
        driven(seed, MOST_TOKENS * TOP_K * RANKS)


def kernels() -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for rounding in (None, int(RECIPE.rounding)):
            for width, seeds in SEEDS_OF_WIDTH.items():
                for seed in seeds:
                    exchanged(seed, Rows(width, dtype, rounding))


PARTS: dict[str, Callable[[], None]] = {
    "driven": lambda: routings(1, 5),
    "edges": lambda: routings(0, 2, 3, 4),
    "overflow": lambda: driven(3, 8),
    "kernels": kernels,
}
"""By seeds of `routed`: a rank without tokens and any; all rows to one expert or rank, no tokens, and empty experts;
more rows than the capacity of a rank. And the kernels without overlap."""


def main(part: str, of_fault: str = "") -> None:
    global fault
    fault = of_fault
    assert not fault or fault in FAULTS, FAULTS
    differentiable.release_saved = lambda ctx: None  # takes a context of autograd alone
    prepared.Prepared = Separate  # type: ignore[misc]
    PARTS[part]()
    print(f"ran {part}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
