"""The layers of layers.RANKED in PyTorch, on two processes over gloo: without a transport.

The hash of a result is the hash of the ranks' hashes, in order. Only rank 0 has it.
"""

import os
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist
from mxep.torch_frontend import ExpertParallel
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from ...conformance.backends.torch import to_torch
from ..hashes import digits_of, digits_of_text
from ..records import INPUTS, Case, Entry
from .layers import RANKED, RANKS, RankedLayer
from .layers_torch import module, results

PARTS = (slice(0, 40), slice(40, None))
"""The tokens of each rank."""


def fork_ranks(ranks: int) -> int:
    """Return in every rank with its number. The calling process waits for them, and exits with 1 if one has failed."""
    children = []
    for rank in range(ranks):
        child = os.fork()
        if child == 0:
            return rank
        children.append(child)
    failed = [os.waitpid(child, 0)[1] for child in children]
    os._exit(any(failed))


def start(store: str) -> int:
    """Fork the ranks. Returns the rank of this process; the one that called waits for its ranks and exits."""
    rank = fork_ranks(RANKS)
    torch.set_num_threads(1)
    options = {"rank": rank, "world_size": RANKS, "timeout": timedelta(seconds=120)}
    dist.init_process_group("gloo", init_method=f"file://{store}", **options)
    return rank


def end() -> None:
    dist.barrier()  # a rank that leaves while another still sends to it breaks its connection
    os._exit(0)  # gloo's threads may still drop tensors, which aborts while Python ends


def cases() -> dict[str, Case]:
    return {f"torch ranks {name}": Case("cpu_products", partial(entry, ranked)) for name, ranked in RANKED.items()}


def entry(ranked: RankedLayer) -> Entry:
    layer, mesh = ranked.layer, init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    moe = module(layer)
    parallelize_module(moe, mesh, ExpertParallel(deduplicate=ranked.deduplicate))
    x, dy = (to_torch(value[PARTS[dist.get_rank()]]) for value in (layer.x, layer.dy))
    found = {}
    for name, value in results(moe, x, dy).items():
        local = value.to_local() if isinstance(value, DTensor) else value
        of_ranks = [""] * RANKS
        dist.all_gather_object(of_ranks, digits_of(local))
        found[name] = digits_of_text(" ".join(of_ranks))
    return {INPUTS: layer.digits, **found}
