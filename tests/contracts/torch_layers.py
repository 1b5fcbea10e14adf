"""Layers of the table in PyTorch, what is compared of them, and the contracts of one row.

Logits and gates are exact: tokens, router and gate are small multiples of powers of two, so that their fp32 products
have the same sums in any order. The tests are then about mxep, and not about the order in which a BLAS adds.
"""

from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import ExpertParallel, MoE, PeerMemory, RouterConfig, SharedExpert
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from .table import Row

DIM, HIDDEN, EXPERTS, TOP_K, TOKENS = 64, 96, 8, 2, 48
Named = dict[str, Tensor]


def recipe_of(name: str) -> Recipe:
    return Recipe.parse("mxfp8", compute="fold") if name == "folded" else Recipe.parse(name)


def grid(*shape: int, seed: int, step: float, most: int) -> Tensor:
    """Multiples of `step`, at most `most` of them."""
    return torch.randint(-most, most + 1, shape, generator=torch.Generator().manual_seed(seed)) * step


def layer_of(row: Row, device: str, recompute: bool = False) -> MoE:
    """The same weights in every process and for every exchange."""
    extras, shared = row["extras"], None
    if extras in ("shared", "gated"):
        shared = SharedExpert(HIDDEN, gate=extras == "gated")
    torch.manual_seed(0)
    options: dict[str, Any] = {"dtype": getattr(torch, row["dtype"]), "shared": shared, "bias": extras == "biases"}
    router = RouterConfig(TOP_K, bias=extras == "biases", prob_in=row["prob_in"])  # type: ignore[arg-type]
    moe = MoE(DIM, HIDDEN, EXPERTS, router, recipe=recipe_of(row["recipe"]), recompute=recompute, **options)
    exact = {"router.weight": (EXPERTS, DIM), "router.bias": (EXPERTS,), "shared_gate.weight": (1, DIM)}
    with torch.no_grad():
        for name, p in moe.named_parameters():
            if name in exact:
                p.copy_(grid(*exact[name], seed=len(name), step=1 / 16, most=8))
            elif name.startswith("experts.b"):
                p.normal_()
    return moe.to(device)


def tokens(row: Row, device: str, seed: int = 1, number: int = TOKENS) -> Tensor:
    return grid(number, DIM, seed=seed, step=1 / 8, most=32).to(device, getattr(torch, row["dtype"]))


def local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step(moe: nn.Module, x: Tensor, dy: Tensor, run: Callable[..., Any] | None = None, aux: float = 1.0) -> Named:
    """y, the rows of each expert, the auxiliary loss, and the gradients of x and of the parameters, of this rank. aux:
    the gradient of the auxiliary loss."""
    x = x.detach().clone().requires_grad_()
    y, stats = moe(x) if run is None else run(moe, x)
    names, parameters = zip(*moe.named_parameters(), strict=True)
    grads = torch.autograd.grad([y, stats.aux_loss], [x, *parameters], [dy, torch.full_like(stats.aux_loss, aux)])
    found = {"y": y.detach(), "counts": stats.counts, "aux_loss": stats.aux_loss.detach()}
    return found | {name: local(g) for name, g in zip(("x", *names), grads, strict=True)}


def same(got: Named, want: Named, what: object) -> None:
    """All bytes, with the name of each tensor that differs."""
    assert got.keys() == want.keys()
    bytes_of = [{name: t.reshape(-1).view(torch.uint8) for name, t in each.items()} for each in (got, want)]
    others = [name for name in got if not torch.equal(bytes_of[0][name], bytes_of[1][name])]
    assert not others, (what, others)


def near(got: Tensor, want: Tensor, bound: float, what: object) -> None:
    """The largest difference, as a share of the largest value."""
    share = ((got - want).abs().max() / want.abs().max()).item()
    assert share <= bound, (what, share)


# --- replay -----------------------------------------------------------------------------------------------------


def keep_collectives(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    kept = "c10d" in str(op) or "all_to_all" in str(op)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


REPLAYS: dict[str, Callable[..., Any]] = {
    "checkpoint": partial(checkpoint, use_reentrant=False),
    "selective": partial(
        checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, keep_collectives)
    ),
}
"""`recompute` is an argument of the layer."""


# --- a row of the table ---------------------------------------------------------------------------------------------


def style_of(exchange: str, memory: Callable[[], PeerMemory] | None) -> ExpertParallel:
    _, _, how = exchange.partition("deduplicate ")
    transport = memory() if memory is not None and exchange == "PeerMemory" else None
    return ExpertParallel(gradients="sum", transport=transport, deduplicate=how or None)  # type: ignore[arg-type]


def replay_and_forwards(row: Row, made: Callable[[bool], nn.Module], x: Tensor, dy: Tensor) -> None:
    """made(recompute): the row's layer. Run to run, with a recomputed forward, and without a gradient."""
    moe = made(False)
    want = step(moe, x, dy)
    same(step(moe, x, dy), want, "run to run")
    same(step(made(row["replay"] == "recompute"), x, dy, REPLAYS.get(row["replay"])), want, "replay")
    same_forwards(moe, x, want["y"])


def inputs(row: Row, device: str) -> tuple[Tensor, Tensor]:
    """x and dy of all ranks."""
    x, dy = tokens(row, device), torch.randn(TOKENS, DIM, generator=torch.Generator().manual_seed(2))
    return x, dy.to(device, x.dtype)


def contracts_alone(row: Row, device: str) -> None:
    replay_and_forwards(row, partial(layer_of, row, device), *inputs(row, device))


def contracts_of_ranks(row: Row, mesh: DeviceMesh, memory: Callable[[], PeerMemory] | None = None) -> None:
    """The same on this rank of the mesh; then the results against one process with all tokens."""
    device, share_of = mesh.device_type, TOKENS // mesh.size()
    part = slice(mesh.get_local_rank() * share_of, (mesh.get_local_rank() + 1) * share_of)
    all_x, all_dy = inputs(row, device)

    def made(recompute: bool = False) -> nn.Module:
        return parallelize_module(layer_of(row, device, recompute), mesh, style_of(row["exchange"], memory))

    replay_and_forwards(row, made, all_x[part], all_dy[part])
    # The auxiliary loss of a rank is of its tokens.
    got = step(made(), all_x[part], all_dy[part], aux=0)
    like_one_process(got, step(layer_of(row, device), all_x, all_dy, aux=0), part, mesh, row)


def same_forwards(moe: Any, x: Tensor, y: Tensor) -> None:
    """`eval()` under `no_grad`, cached weights, and both, have the bits of the forward of training."""
    moe.eval()
    for held in (False, True):
        for recorded in (False, True):
            with ExitStack() as stack:
                if held:
                    stack.enter_context(moe.cached_weights())
                stack.enter_context(torch.set_grad_enabled(recorded))
                same({"y": moe(x)[0].detach()}, {"y": y}, (held, recorded))
    moe.train()


def like_one_process(got: Named, want: Named, part: slice, mesh: DeviceMesh, row: Row) -> None:
    """Of one process: y, counts, and the gradients of x and of the experts to the bit. Within a bound: sums over the
    tokens of all ranks, and all results of deduplicate="both", which rounds the sum of a rank to bf16."""
    want = {name: t[part] if name in ("y", "x") else t for name, t in want.items()}
    experts = {name: slice(mesh.get_local_rank() * len(t), None) for name, t in got.items() if name[:8] == "experts."}
    want |= {name: want[name][start][: len(got[name])] for name, start in experts.items()}
    rounded = set(got) - {"counts"} if row["exchange"] == "deduplicate both" else set()
    gated = {"y", "x"} if row["extras"] == "gated" else set()
    exact = {"y", "x", "counts", *experts} - rounded - gated
    same({n: got[n] for n in exact}, {n: want[n] for n in exact}, "one process")
    aux_loss = got["aux_loss"].clone()
    dist.all_reduce(aux_loss, group=mesh.get_group())
    got = {**got, "aux_loss": aux_loss / mesh.size()}
    for name in set(got) - exact:
        kind = "y" if name == "y" else "gradients"
        bound = (ROUNDED if name in rounded else SUMS)[kind][row["dtype"]]
        if name.startswith("shared_expert") and not recipe_of(row["recipe"]).wgrad_with_hp:
            bound = max(bound, OTHER_BLOCKS)
        near(got[name].float(), want[name].float(), bound, (name, row))


# Of the largest value of a tensor. Measured over the whole product on two ranks: 3.9e-9 for y; 2.1e-7 and, a rounding
# to bf16, 7.6e-3 for gradients.
SUMS = {"y": {"float32": 1e-6, "bfloat16": 2**-7}, "gradients": {"float32": 1e-6, "bfloat16": 2**-6}}
# Measured: 6.1e-3 for y, 0.11 for gradients: values that are rounded before they are quantized.
ROUNDED = {"y": {"float32": 0.01, "bfloat16": 0.01}, "gradients": {"float32": 0.15, "bfloat16": 0.15}}
# Measured: 2.9e-5. Blocks along the tokens of a rank in the gradient of a shared expert.
OTHER_BLOCKS = 1e-4
