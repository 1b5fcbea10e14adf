"""Train a small MoE language model in one file: FSDP2 and expert parallelism by `shard_moe`, checkpoints by DCP.

    torchrun --standalone --nproc-per-node 4 examples/training/torch_fsdp_ep.py --ep 2 --out runs/fsdp
    torchrun --standalone --nproc-per-node 4 examples/training/torch_fsdp_ep.py --ep 4 --out runs/fsdp --resume

A GPU per rank, or the CPU where torch finds no GPU, with smaller sizes. Ranks form a mesh of (ranks / ep, ep): experts
are sharded over both dims, all other weights over all ranks. The batch of a step depends on the step alone, so that a
run resumes with any number of ranks and any --ep. The text is --data, a file; without it the Python files of the
standard library. One token is one byte.
"""

import argparse
import math
import os
import shutil
import sys
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.torch_frontend import MoE, MoEStats, RouterConfig, clip_grad_norm_, shard_moe
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

VOCABULARY = 256
AUX_LOSS_WEIGHT = 0.01
SIZES = {  # on a CPU, on GPUs
    "layers": (2, 4),
    "dim": (64, 2048),
    "hidden_dim": (96, 768),
    "heads": (4, 16),
    "experts": (8, 32),
    "top_k": (2, 8),
    "length": (64, 2048),
    "batch": (16, 32),
}


class Attention(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim, bias=False)
        self.out = nn.Linear(dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.attention_norm, self.moe_norm = nn.RMSNorm(sizes.dim), nn.RMSNorm(sizes.dim)
        self.attention = Attention(sizes.dim, sizes.heads)
        router = RouterConfig(sizes.top_k)
        self.moe = MoE(sizes.dim, sizes.hidden_dim, sizes.experts, router, recipe=sizes.recipe)

    def forward(self, x: Tensor) -> tuple[Tensor, MoEStats]:
        x = x + self.attention(self.attention_norm(x))
        y, stats = self.moe(self.moe_norm(x))
        return x + y, stats


class Model(nn.Module):
    def __init__(self, sizes: argparse.Namespace) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, sizes.dim)
        self.positions = nn.Embedding(sizes.length, sizes.dim)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.dim)
        self.head = nn.Linear(sizes.dim, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Logits (B, S, V), and the sum of the layers' auxiliary losses."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        aux_loss = torch.zeros((), device=x.device)
        for block in self.blocks:
            x, stats = block(x)
            aux_loss = aux_loss + stats.aux_loss
        return self.head(self.norm(x)), aux_loss


def read_text(path: Path | None) -> Tensor:
    """The bytes of a file, or of the standard library, as a uint8 vector."""
    if path is not None:
        return torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def batch_of(text: Tensor, step: int, sizes: argparse.Namespace, device: torch.device) -> tuple[Tensor, Tensor]:
    """This rank's rows of the batch of a step: inputs and targets, (B / ranks, S) each."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - sizes.length, (sizes.batch, 1), generator=generator)
    windows = text[starts + torch.arange(sizes.length + 1)].long()
    mine = windows.chunk(dist.get_world_size())[dist.get_rank()].to(device)
    return mine[:, :-1], mine[:, 1:]


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write folder/step. Every rank writes its shards; the name is the final one only when all have."""
    unfinished, finished = folder / "unfinished", folder / str(step)
    weights, moments = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": moments}, checkpoint_id=unfinished)  # type: ignore
    if dist.get_rank() == 0:
        shutil.rmtree(finished, ignore_errors=True)
        unfinished.rename(finished)
    dist.barrier()


def latest(folder: Path) -> int:
    """The step of the last checkpoint; 0 without one."""
    return max((int(path.name) for path in folder.glob("*") if path.name.isdecimal()), default=0)


def load(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Load a checkpoint of any number of ranks and any --ep."""
    weights, moments = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": moments}, checkpoint_id=folder / str(step))  # type: ignore
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=moments)


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks // args.ep, args.ep), mesh_dim_names=("dp", "ep"))
    torch.manual_seed(rank)  # each rank keeps the shards that it draws
    with device:
        model = Model(args)
    # fp32 weights and moments; products and activations in bf16, experts in the recipe; gradients reduced in fp32.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shard_moe(model, mesh, [Block], mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    if args.resume:
        load(args.out, args.start, model, optimizer)
    text = read_text(args.data)

    for step in range(args.start, args.steps):
        began = time.perf_counter()
        # A warm-up over a tenth of the steps, then a cosine to a tenth of the rate.
        done, warmup = step + 1, max(1, args.steps // 10)
        cosine = 0.55 + 0.45 * math.cos(math.pi * step / args.steps)
        optimizer.param_groups[0]["lr"] = args.lr * min(done / warmup, cosine)

        tokens, targets = batch_of(text, step, args, device)
        logits, aux_loss = model(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
        (loss + AUX_LOSS_WEIGHT * aux_loss).backward()
        norm = clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()

        mean = loss.detach()
        dist.all_reduce(mean)
        value, seconds = mean.item() / ranks, time.perf_counter() - began
        if rank == 0:
            speed = args.batch * args.length / seconds
            print(f"step {done}: loss {value:.4f}, gradient {norm.item():.3f}, {speed:,.0f} tokens/s", flush=True)
        if args.checkpoint_every and (done % args.checkpoint_every == 0 or done == args.steps):
            save(args.out, done, model, optimizer)


def parse_args(argv: Sequence[str] | None, device: str, ranks: int) -> argparse.Namespace:
    flags = argparse.ArgumentParser(prog="torch_fsdp_ep.py", description="Train a small MoE model: FSDP2 x EP.")
    flags.add_argument("--out", type=Path, required=True, help="folder of the checkpoints")
    flags.add_argument("--data", type=Path, metavar="FILE", help="text (default: the standard library)")
    flags.add_argument("--ep", type=int, default=1, metavar="N", help="ranks that share the experts (default: 1)")
    flags.add_argument("--recipe", choices=tuple(RECIPES), default="mxfp8")
    flags.add_argument("--steps", type=int, default=100, metavar="N")
    flags.add_argument("--lr", type=float, default=1e-3)
    flags.add_argument("--checkpoint-every", type=int, default=50, metavar="N", help="0: none")
    flags.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    for name, (of_cpu, of_gpu) in SIZES.items():
        size = of_cpu if device == "cpu" else of_gpu
        flags.add_argument(f"--{name.replace('_', '-')}", type=int, default=size, metavar="N", help=f"default: {size}")
    args = flags.parse_args(argv)
    for name, value, divisor in (
        ("ep", ranks, args.ep),
        ("experts", args.experts, args.ep),
        ("batch", args.batch, ranks),
    ):
        if divisor < 1 or value % divisor:
            flags.error(f"--{name}: {divisor} does not divide {value}; {ranks} ranks, --ep {args.ep}")
    for name, low in {**dict.fromkeys(SIZES, 1), "steps": 1, "checkpoint_every": 0}.items():
        if getattr(args, name) < low:
            flags.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}; allowed: at least {low}")
    for name, bad, allowed in (
        ("dim", args.dim % 32, "multiples of 32"),
        ("hidden_dim", args.hidden_dim % 32, "multiples of 32"),
        ("heads", args.dim % args.heads, f"divisors of --dim {args.dim}"),
        ("top_k", args.top_k > args.experts, f"1 to {args.experts} experts"),
    ):
        if bad:
            flags.error(f"--{name.replace('_', '-')}: got {getattr(args, name)}; allowed: {allowed}")
    if args.data and (not args.data.is_file() or args.data.stat().st_size <= args.length):
        flags.error(f"--data: got {args.data}; allowed: a file of more than --length {args.length} bytes")
    args.start = latest(args.out)
    if args.resume and not args.start:
        flags.error(f"--resume: {args.out} has no checkpoint; allowed: the --out of an earlier run")
    if args.start and not args.resume:
        flags.error(f"--out: {args.out} already holds a run; pass --resume to continue it, or another folder")
    if args.start >= args.steps:
        flags.error(f"--steps: got {args.steps}; allowed: more than {args.start}, the step of the last checkpoint")
    return args


def main(argv: Sequence[str] | None = None) -> None:
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    args = parse_args(argv, device.type, int(os.environ["WORLD_SIZE"]))
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    train(args, device)
    dist.barrier()
    if not on_gpu:
        # A thread of Gloo that outlives the group can abort Python's finalization: end the process before it.
        sys.stdout.flush()
        os._exit(0)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
