"""A layer over PeerMemory in a CUDA graph, forward and backward, on all ranks; run by ranks.py."""

from collections.abc import Callable

import torch
from mxep.torch_frontend import ExpertParallel, MoE, PeerMemory, RouterConfig
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

TOKENS, DIM, HIDDEN, LOCAL, TOP_K = 500, 256, 384, 4, 3
RECIPES = ("mxfp8", "mxfp8_wgrad_with_hp", "bf16")


def layer(mesh: DeviceMesh, carrier: PeerMemory | None, recipe: str) -> MoE:
    torch.manual_seed(0)
    moe = MoE(DIM, HIDDEN, LOCAL * mesh.size(), RouterConfig(TOP_K), recipe=recipe, dtype=torch.bfloat16, device="cuda")
    parallelize_module(moe, mesh, ExpertParallel(transport=carrier))
    return moe


def tokens(seed: int, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
    """x and dy of this rank, of another routing for every seed."""
    rng = torch.Generator("cuda").manual_seed(10 * seed + mesh.get_local_rank())
    x, dy = torch.randn(2, TOKENS, DIM, generator=rng, device="cuda", dtype=torch.bfloat16)
    return x.contiguous().requires_grad_(), dy.contiguous()


def step(moe: MoE, x: Tensor, dy: Tensor) -> list[Tensor]:
    y, stats = moe(x)
    found = [y.detach(), stats.counts, *torch.autograd.grad(y, (x, *moe.parameters()), dy)]
    return [t.to_local() if isinstance(t, DTensor) else t for t in found]


def same(got: list[Tensor], want: list[Tensor], what: object) -> None:
    for i, (one, other) in enumerate(zip(got, want, strict=True)):
        assert torch.equal(one, other), (what, i)


def no_synchronisation(mesh: DeviceMesh, memory: PeerMemory, recipe: str) -> None:
    """A step without a graph; torch raises where the host waits for the GPU."""
    moe, inputs = layer(mesh, memory, recipe), tokens(0, mesh)
    step(moe, *inputs)
    torch.cuda.set_sync_debug_mode("error")
    try:
        step(moe, *inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def graph(mesh: DeviceMesh, memory: PeerMemory, recipe: str) -> None:
    """Captured once, replayed on tokens of other routings, against eager steps without a transport."""
    moe, plain, (x, dy) = layer(mesh, memory, recipe), layer(mesh, None, recipe), tokens(0, mesh)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            same(step(moe, x, dy), step(plain, x, dy), "eager")
    torch.cuda.current_stream().wait_stream(side)
    captured_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured_graph, capture_error_mode="thread_local"):
        captured = step(moe, x, dy)
    for seed in (1, 2, 3):
        others = tokens(seed, mesh)
        want = step(plain, *others)
        with torch.no_grad():
            x.copy_(others[0])
            dy.copy_(others[1])
        captured_graph.replay()
        same(captured, want, seed)
    same(step(moe, *tokens(4, mesh)), step(plain, *tokens(4, mesh)), "eager after a graph")
    memory.overflow()


def rounds_in_a_graph(mesh: DeviceMesh, memory: PeerMemory) -> None:
    """The error comes before the call does anything, and the next step is right."""
    moe, plain, inputs = layer(mesh, memory, "mxfp8"), layer(mesh, None, "mxfp8"), tokens(0, mesh)
    step(moe, *inputs)
    error = None
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"), torch.no_grad():
            moe(inputs[0])
    except RuntimeError as found:
        error = found
    assert "state PeerMemory(on_overflow='nan')" in str(error), error
    same(step(moe, *inputs), step(plain, *inputs), "after the error")


def no_growth_in_a_graph(mesh: DeviceMesh, memory: PeerMemory) -> None:
    moe, (x, _) = layer(mesh, memory, "mxfp8"), tokens(0, mesh)
    error = None
    try:
        with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"), torch.no_grad():
            moe(x)
    except RuntimeError as found:
        error = found
    assert "needs more than any before, in a graph" in str(error), error


def checks(mesh: Callable[[], DeviceMesh], opened: Callable[..., PeerMemory]) -> dict[str, Callable[[], None]]:
    """opened: new memory of the mesh's group with a capacity of so many rows."""
    return {
        **{
            f"no synchronisation, {r}": lambda r=r: no_synchronisation(mesh(), opened(None, on_overflow="nan"), r)
            for r in RECIPES
        },
        **{f"graph, {r}": lambda r=r: graph(mesh(), opened(None, on_overflow="nan"), r) for r in RECIPES},
        "graph of stated rows": lambda: graph(mesh(), opened(TOKENS * TOP_K * 3 // 2, on_overflow="nan"), "mxfp8"),
        "no rounds in a graph": lambda: rounds_in_a_graph(mesh(), opened(TOKENS * TOP_K * mesh().size())),
        "no growth in a graph": lambda: no_growth_in_a_graph(mesh(), opened(None, on_overflow="nan")),
    }
