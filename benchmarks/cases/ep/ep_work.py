"""One measurement of expert parallelism: the work of all ranks, and its peer."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist
from mxep.torch_frontend.overlap.peer_memory import PeerMemory
from torch import Tensor

from ..case import Tensors

PEER, BF16_WIRE, IN_TURN = "bf16", "bf16 wire", "in turn"
"""The plain pipeline; the same with our GEMMs; ours without a transport."""
ONCE, SUMMED = "deduplicate dispatch", "deduplicate both"
"""IN_TURN with a token once to each rank, with the same bytes, and with one partial sum back."""
IN_ROUNDS = "peer memory, in rounds"
"""Over a transport; weight gradients of a split expert are sums of rounded ones."""


class Work(NamedTuple):
    """op: "ep" or "ep_layer". case: sizes and options. flops: of the forward, and of both directions.
    outputs: names of the results of `step`. forwards: PEER, BF16_WIRE, IN_TURN, of a layer ONCE and SUMMED, and the
    transports. step: a forward -> its result and all gradients. groups: local experts that have rows; torch does not
    define the weight gradients of the others."""

    op: str
    case: Mapping[str, object]
    flops: tuple[int, int]
    outputs: tuple[str, ...]
    forwards: Mapping[str, Callable[[], Tensor]]
    step: Callable[[Callable[[], Tensor]], Tensors]
    groups: Tensor
    min_sqnr_db: float

    @property
    def transports(self) -> list[str]:
        return [name for name in self.forwards if name not in (PEER, BF16_WIRE, IN_TURN, ONCE, SUMMED, IN_ROUNDS)]


def held_nbytes(memory: PeerMemory) -> int:
    """The bytes of mapped memory of this rank, which torch's allocator does not count."""
    buffer = memory.mapped.buffer
    return buffer.starts[-1] if buffer is not None else 0


def check(work: Work) -> dict[str, float]:
    """Bytes of the runs over a transport in one round against the run without one, on all ranks; SQNR in dB of the
    result and of all gradients against the peer. Returns the least dB of each run; IN_TURN stands for all runs with its
    bytes. Raises AssertionError on all ranks alike."""
    want = work.step(work.forwards[IN_TURN])
    for name in (*work.transports, *({ONCE} & work.forwards.keys())):
        for _ in range(2):  # the second call reuses buffers
            got = work.step(work.forwards[name])
            wrong = torch.stack([(a != b).sum() for a, b in zip(got, want, strict=True)])
            dist.all_reduce(wrong)  # every rank raises: the others would wait for one that has ended
            if wrong.any():
                values = dict(zip(work.outputs, wrong.tolist(), strict=True))
                raise AssertionError(f"{work.op}: {name}: differs from the run without a transport: {values}")
            del got
    peer = work.step(work.forwards[PEER])
    others = [name for name in (BF16_WIRE, SUMMED, IN_ROUNDS) if name in work.forwards]
    rounded = [(name, work.step(work.forwards[name])) for name in others]
    found: dict[str, float] = {}
    for name, got in (*rounded, (IN_TURN, want)):
        least = torch.stack([_sqnr_db(work, a, b) for a, b in zip(got, peer, strict=True)]).nan_to_num(nan=-torch.inf)
        dist.all_reduce(least, op=dist.ReduceOp.MIN)
        db = dict(zip(work.outputs, least.tolist(), strict=True))
        if not min(db.values()) >= work.min_sqnr_db:
            raise AssertionError(f"{work.op}: {name}: {db} dB from bf16; expected {work.min_sqnr_db} or more")
        found[name] = round(min(db.values()), 1)
    return found


def _sqnr_db(work: Work, got: Tensor, want: Tensor) -> Tensor:
    got, want = (x.detach()[work.groups] if x.ndim == 3 else x.detach() for x in (got, want))
    signal = noise = torch.zeros((), dtype=torch.float64, device=got.device)
    for a, b in zip(got.split(2**14 if got.ndim == 2 else 1), want.split(2**14 if want.ndim == 2 else 1), strict=True):
        signal = signal + b.double().square().sum()
        noise = noise + (a.double() - b.double()).square().sum()
    # No rows here: nothing to compare.
    return 10 * torch.log10(signal / noise) if got.numel() else signal.new_tensor(200.0)
