"""Expert-parallel training in MXFP8, step by step; docs/concepts/expert_parallel.md explains the steps.

    torchrun --standalone --nproc-per-node 2 -m examples.expert_parallel_tutorial                   # on a CPU, Gloo
    torchrun --standalone --nproc-per-node 4 -m examples.expert_parallel_tutorial --device gpu      # a GPU each, NCCL
    python -m examples.expert_parallel_tutorial                                                     # one rank

On GPUs the sizes are taken from DeepSeek-V3's experts: dim 7168, hidden 2048, 32 experts, 131072 tokens of all ranks.
`--style library` runs the same layer with `ExpertParallel` in place of the five steps; results are bitwise equal.

    x (T, D) --norm, router--> experts and weights of each token --sort, replicate--> rows (T k, D) bf16
        1  quantize and send   T k rows --> M received rows [q | sf]     all-to-all, 1.03 bytes a value
        2  permute and pad     M rows   --> groups (P, D) MXFP8          one padded group per local expert
        3  multiply            groups   --> groups (P, D) bf16           w1, w3, SwiGLU, w2
        4  un-permute          groups   --> M rows bf16                  without the padding
        5  send back           M rows   --> T k rows bf16                all-to-all, 2 bytes a value
    y (T, D) = weighted sum of each token's k rows
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.torch_frontend import (
    ExpertParallel,
    MXTensor,
    RouterConfig,
    grouped_swiglu_ffn,
    route,
    sort_by_expert,
    weighted_combine,
)
from mxep.torch_frontend.integrations.torchao import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    permute_mxfp8_fwd_hp_bwd,
    unpermute_hp_fwd_mxfp8_bwd,
)
from mxep.torch_frontend.routing.permute import spread_rows
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from .ranks import leave

PROG = "examples.expert_parallel_tutorial"
MX_RECIPES = tuple(name for name, recipe in RECIPES.items() if recipe.mx)
CPU_SIZES = {"dim": 64, "hidden_dim": 96, "num_experts": 8, "top_k": 2, "tokens": 512}
GPU_SIZES = {"dim": 7168, "hidden_dim": 2048, "num_experts": 32, "top_k": 1, "tokens": 131072}


class Experts(nn.Module):
    """Step 3. Three weights with the experts as dim 0, written for one device."""

    def __init__(self, dim: int, hidden_dim: int, num_experts: int, recipe: str) -> None:
        super().__init__()
        self.recipe = recipe
        shapes = (hidden_dim, dim), (hidden_dim, dim), (dim, hidden_dim)
        weights = [torch.randn(num_experts, *shape) * shape[1] ** -0.5 for shape in shapes]
        self.w1, self.w3, self.w2 = (nn.Parameter(w.bfloat16()) for w in weights)

    def forward(self, groups: Tensor, padded_counts: Tensor) -> Tensor:
        w1, w3, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in (self.w1, self.w3, self.w2))
        ends = torch.cumsum(padded_counts, 0, dtype=torch.int32)
        # Groups are whole blocks of 32 rows already: nothing is padded again.
        return grouped_swiglu_ffn(groups, w1, w3, w2, ends, recipe=self.recipe, pad_token_groups=False)


class FiveSteps(ParallelStyle):
    """Steps 1 and 2 before the experts, 4 and 5 after them. table: shapes and bytes of the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.table: list[str] = []
        self.describing = True

    def dispatch(self, module: nn.Module, inputs: Any, mesh: DeviceMesh) -> tuple[Tensor, Tensor]:
        rows, counts = inputs
        group, ranks = mesh.get_group(), mesh.size()
        received = torch.empty_like(counts)
        dist.all_to_all_single(received, counts, group=group)
        # The host reads how many rows are sent to each rank and received from it.
        self.sent, self.received = (c.view(ranks, -1).sum(1).tolist() for c in (counts, received))
        # 1  Quantize and send: each row is sent as its D E4M3 bytes and D / 32 scale bytes, in one collective.
        arrived = a2a_dispatch_mxfp8_fwd_hp_bwd(rows, self.received, self.sent, group_name=group)
        # 2  Permute and pad: one group of rows per local expert, a multiple of 32 rows.
        local = counts.shape[0] // ranks
        self.shape, groups, self.indices, padded_counts, _ = permute_mxfp8_fwd_hp_bwd(arrived, received, ranks, local)
        me = mesh.get_local_rank()
        self.describe("  rows of this rank", rows)
        self.describe("1 quantize and send", arrived, sum(self.sent) - self.sent[me])
        self.describe("2 permute and pad", groups)
        return groups, padded_counts

    def combine(self, module: nn.Module, groups: Any, mesh: DeviceMesh) -> Tensor:
        # 4  Un-permute: the received order again, without the padding.
        rows = unpermute_hp_fwd_mxfp8_bwd(groups, self.indices, self.shape)
        # 5  Send back in bf16. In the backward the gradient takes this way quantized.
        back = a2a_combine_hp_fwd_mxfp8_bwd(rows, self.sent, self.received, group_name=mesh.get_group())
        me = mesh.get_local_rank()
        self.describe("3 multiply", groups)
        self.describe("4 un-permute", rows)
        self.describe("5 send back", back, sum(self.received) - self.received[me])
        self.describing = False
        return back

    def describe(self, step: str, x: Tensor, leaving: int | None = None) -> None:
        """A line of the table. leaving: rows that this rank sent to others."""
        if self.describing:
            mx = isinstance(x, MXTensor)
            row_nbytes = x.shape[1] + x.shape[1] // 32 if mx else x.shape[1] * x.element_size()
            kind = "MXFP8" if mx else str(x.dtype).removeprefix("torch.")
            line = f"{step:21}{tuple(x.shape)!s:17}{kind:10}{x.shape[0] * row_nbytes:>14,} bytes"
            sent = "" if leaving is None else f", sent to others: {leaving * row_nbytes:,}"
            self.table.append(line + sent)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        def shard(name: str, module: nn.Module, mesh: DeviceMesh) -> None:
            for name, weight in list(module.named_parameters(recurse=False)):
                module.register_parameter(name, nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])))

        return distribute_module(module, device_mesh, shard, cast(Any, self.dispatch), cast(Any, self.combine))


class Layer(nn.Module):
    """norm, router, experts and the residual; norm and router are dense weights, equal on all ranks."""

    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.num_experts, self.top_k = sizes.num_experts, sizes.top_k
        self.norm = nn.RMSNorm(sizes.dim)
        self.router = nn.Linear(sizes.dim, sizes.num_experts, bias=False)
        self.experts = Experts(sizes.dim, sizes.hidden_dim, sizes.num_experts, sizes.recipe)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        experts, weights, _ = route(self.router(normed), RouterConfig(self.top_k))
        order, inverse, counts = sort_by_expert(experts, self.num_experts)
        rows = spread_rows(normed.bfloat16(), order, inverse, self.top_k)
        rows = self.experts(rows, counts)  # the style's hooks run around the module
        return x + weighted_combine(rows, weights, inverse.view(-1, self.top_k), order, out_dtype=torch.float32)


def train(sizes: argparse.Namespace, mesh: DeviceMesh) -> None:
    rank, ranks, device = mesh.get_local_rank(), mesh.size(), torch.device(mesh.device_type)
    torch.manual_seed(0)  # the same dense weights on every rank; experts are scattered from rank 0
    with device:
        layer = Layer(sizes)
    style = FiveSteps() if sizes.style == "steps" else ExpertParallel(sizes.recipe, gradients="sum")
    parallelize_module(layer.experts, mesh, style)
    dense = [*layer.norm.parameters(), *layer.router.parameters()]
    optimizer = torch.optim.SGD(layer.parameters(), lr=sizes.lr, foreach=False)
    for step in range(sizes.steps):
        # All ranks draw the whole batch, so that a run does not depend on the number of ranks.
        batch = torch.randn(sizes.tokens, sizes.dim, generator=torch.Generator(device).manual_seed(step), device=device)
        x = batch.chunk(ranks)[rank].clone()
        del batch
        start = time.perf_counter()
        # A sum over this rank's tokens divided by all tokens: the sum over the ranks is the mean over the batch.
        # Experts have seen the tokens of all ranks already, dense weights add their gradients up.
        loss = (layer(x) - x.roll(1, -1)).square().sum() / (sizes.tokens * sizes.dim)
        loss.backward()
        for parameter in dense:
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        value, seconds = total.item(), time.perf_counter() - start
        if rank == 0:
            if step == 0 and isinstance(style, FiveSteps):
                print("\n".join(style.table), flush=True)
            print(f"step {step}: loss {value:.6f}, {sizes.tokens / seconds:,.0f} tokens/s", flush=True)
    weights = torch.cat([p.detach().flatten() for p in dense])
    everyones = [torch.empty_like(weights) for _ in range(ranks)]
    dist.all_gather(everyones, weights)
    if not all(torch.equal(weights, other) for other in everyones):
        sys.exit(f"{PROG}: error: the dense weights of the ranks differ")
    if rank == 0:
        print(f"dense weights are equal on {ranks} rank(s)", flush=True)


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    flags = argparse.ArgumentParser(prog=PROG, description="Expert-parallel training in MXFP8, step by step.")
    flags.add_argument("--device", choices=("cpu", "gpu"), default="cpu")
    flags.add_argument("--style", choices=("steps", "library"), default="steps", help="the five steps by hand, or not")
    flags.add_argument("--recipe", choices=MX_RECIPES, default="mxfp8_wgrad_with_hp")
    flags.add_argument("--steps", type=int, default=5, metavar="N")
    flags.add_argument("--lr", type=float, default=4.0)
    for name in CPU_SIZES:
        help_ = f"default: {CPU_SIZES[name]}, on GPUs {GPU_SIZES[name]}"
        flags.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=help_)
    args = flags.parse_args(argv)
    for name, size in (GPU_SIZES if args.device == "gpu" else CPU_SIZES).items():
        given = getattr(args, name)
        setattr(args, name, size if given is None else given)
        if given is not None and given < 1:
            flags.error(f"--{name.replace('_', '-')}: got {given}; allowed: at least 1")
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if args.num_experts % ranks or args.tokens % ranks:
        flags.error(
            f"got {args.num_experts} experts and {args.tokens} tokens; allowed: multiples of {ranks}, the ranks"
        )
    return args


def main(argv: Sequence[str] | None = None) -> None:
    args = parse_args(argv)
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        os.environ.setdefault(name, value)  # torchrun sets these
    device = "cuda" if args.device == "gpu" else "cpu"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    mesh = init_device_mesh(device, (int(os.environ["WORLD_SIZE"]),), mesh_dim_names=("ep",))
    train(args, mesh)
    leave()


if __name__ == "__main__":
    main()
