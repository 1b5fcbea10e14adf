"""Train the small MoE language model in PyTorch, experts sharded over the ranks.

    torchrun --standalone --nproc-per-node 2 -m examples.training.train_torch --ep 2 --recipe mxfp8 --out runs/torch
    python -m examples.training.train_torch --preset h200 --recipe mxfp8 --out runs/h200      # one process, one GPU

A rank is a process, on a GPU of its own (NCCL) or on the CPU (Gloo). It holds E / ep experts and all dense weights, and
trains on its slice of the batch:

    loss            = mean over ranks of the mean over a rank's tokens
    dense gradient  = mean over ranks (one all-reduce of one flat buffer)
    expert gradient = sum over the tokens of all ranks, which arrive by all-to-all, divided by ep
                      (ExpertParallel with gradients="mean")
"""

import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from mxep.torch_frontend import ExpertParallel, MoE
from mxep.torch_frontend.layer.metrics import MoERecorder
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module

from .checkpoint import Checkpoint
from .config import Config, is_decayed, is_expert, learning_rates
from .data import Text
from .flags import parse_args, parser
from .lock import locked
from .loop import train
from .model_torch import Transformer
from .ranks import leave

PROG = "examples.training.train_torch"


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a tensor. It shares memory with the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def gradient(param: Tensor) -> Tensor:
    """This rank's shard of a parameter's gradient. It shares memory with the gradient."""
    assert param.grad is not None, "the parameter has no gradient"
    return local(param.grad)


def unsharded(tensor: Tensor) -> Tensor:
    """The full tensor. Collective for a DTensor: every rank calls it."""
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def device_of(device: str) -> torch.device:
    """The device of this process: the GPU of its LOCAL_RANK, or the CPU."""
    return torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if device == "gpu" else torch.device("cpu")


class Trainer:
    """A model, its optimizer and the training step. Gradients and moments are sharded like their weight."""

    def __init__(self, config: Config, recipe: str, ep: int, start: Checkpoint, device: str) -> None:
        self.config, self.ep, self.device = config, ep, device_of(device)
        self.rank = dist.get_rank() if ep > 1 else 0
        with self.device:
            self.model = Transformer(config, recipe).to(self.device)  # tables made of numpy arrays are on the CPU
        if ep > 1:
            mesh = init_device_mesh(self.device.type, (ep,), mesh_dim_names=("ep",))
            for layer in self.model.modules():
                if isinstance(layer, MoE):
                    parallelize_module(layer.experts, mesh, ExpertParallel(recipe, gradients="mean"))
        self.recorder = MoERecorder(self.model)
        on_gpu = device == "gpu"
        self.params = dict(self.model.named_parameters())
        self.dense = [p for name, p in self.params.items() if not is_expert(name)]
        self.experts = [p for name, p in self.params.items() if is_expert(name)]
        self.optimizer = torch.optim.AdamW(
            [  # a foreach update cannot mix tensors and DTensors, so experts are a group of their own
                {"params": [p for p in self.dense if is_decayed(p.shape)]},
                {"params": [p for p in self.dense if not is_decayed(p.shape)], "weight_decay": 0.0},
                {"params": self.experts},
            ],
            betas=(config.beta1, config.beta2),
            eps=config.adam_eps,
            weight_decay=config.weight_decay,
            fused=on_gpu,  # on a GPU one kernel, without temporaries of the weights' size
        )
        self.rates = learning_rates(config)
        for name, param in self.params.items():
            with torch.no_grad():
                local(param).copy_(self.shard(name, start.weights[name]))
            moments = {"exp_avg": start.first[name], "exp_avg_sq": start.second[name]}
            state = {key: torch.zeros_like(param) for key in moments}
            for key, array in moments.items():
                local(state[key]).copy_(self.shard(name, array))
            # The fused update reads the step on the device, the other one on the CPU.
            count = torch.tensor(float(start.step), device=self.device if on_gpu else None)
            self.optimizer.state[param] = {"step": count, **state}

    @property
    def is_writer(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        return "cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device)

    def peak_nbytes(self) -> int:
        return 0 if self.device.type == "cpu" else torch.cuda.max_memory_allocated(self.device)

    def shard(self, name: str, array: np.ndarray) -> Tensor:
        """This rank's shard of an unsharded weight or moment."""
        tensor = torch.from_numpy(array)
        return tensor.chunk(self.ep)[self.rank] if is_expert(name) else tensor

    def tokens(self, batch: np.ndarray) -> Tensor:
        """This rank's sequences of a global batch, int64."""
        tokens = torch.from_numpy(np.split(batch, self.ep)[self.rank]).long()
        if self.device.type == "cpu":
            return tokens
        return tokens.pin_memory().to(self.device, non_blocking=True)  # without pinning the host waits for the GPU

    def step(self, step: int, batch: np.ndarray) -> dict[str, Tensor]:
        """One update. Returns loss, aux_loss and balance over all ranks, and the norm of the gradient."""
        self.recorder.reset()  # of the evaluations before it
        loss, aux_loss = self.model.loss(self.tokens(batch))
        (loss + self.config.aux_loss_weight * aux_loss).backward()

        dense, experts = ([gradient(p) for p in params] for params in (self.dense, self.experts))
        expert_sum = torch.stack([grad.square().sum() for grad in experts]).sum()
        # One collective per step: the dense gradients and three scalars share one buffer.
        flat = torch.cat([*(grad.flatten() for grad in dense), torch.stack((loss, aux_loss, expert_sum)).detach()])
        if self.ep > 1:
            dist.all_reduce(flat)
        *means, loss, aux_loss, expert_sum = flat.split([grad.numel() for grad in dense] + [1, 1, 1])
        for grad, mean in zip(dense, means, strict=True):
            grad.copy_(mean.view_as(grad)).div_(self.ep)
        norm = (torch.stack([grad.square().sum() for grad in dense]).sum() + expert_sum).sqrt()
        scale = (self.config.max_grad_norm / norm).clamp(max=1.0)
        for grad in dense + experts:
            grad.mul_(scale)
        for group in self.optimizer.param_groups:
            group["lr"] = float(self.rates[step])
        self.optimizer.step()
        self.optimizer.zero_grad()
        found = {"loss": loss / self.ep, "aux_loss": aux_loss / self.ep, "grad_norm": norm}
        balance = self.recorder.scalars()
        return found | {name: balance[name] for name in ("imbalance", "dead_experts")}

    @torch.no_grad()
    def evaluate(self, text: Text) -> float:
        """Mean loss over the held-out windows."""
        total, count = torch.zeros((), device=self.device), 0
        for batch in text.eval_batches():
            total += self.model.loss(self.tokens(batch))[0] * len(batch) / self.ep
            count += len(batch)
        if self.ep > 1:
            dist.all_reduce(total)
        return total.item() / count

    def state(self, step: int) -> Checkpoint | None:
        """Unsharded weights and moments after `step` updates, None on ranks that do not write them.

        Collective: every rank calls it."""
        moments = {name: self.optimizer.state[param] for name, param in self.params.items()}
        trees = (
            self.params,
            {name: moment["exp_avg"] for name, moment in moments.items()},
            {name: moment["exp_avg_sq"] for name, moment in moments.items()},
        )
        arrays: list[dict[str, np.ndarray]] = [{}, {}, {}]
        for tree, found in zip(trees, arrays, strict=True):
            for name, tensor in tree.items():
                whole = unsharded(tensor)
                if self.is_writer:
                    found[name] = whole.cpu().numpy()
        return Checkpoint(step, *arrays) if self.is_writer else None


def find_device(requested: str | None) -> str:
    """The requested device, "cpu" or "gpu"; else a GPU if there is one. Exits where the requested GPU is missing."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = requested or ("gpu" if found else "cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if device == "gpu" and local_rank >= found:
        sys.exit(
            f"{PROG}: error: --device: got gpu for process {local_rank} of this machine, which has {found} GPU(s) for "
            "PyTorch; allowed: cpu, or one GPU per process"
        )
    return device


def start_ranks(ep: int, device: str) -> None:
    """Join the process group. Exits when the number of processes is not `ep`."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != ep:
        sys.exit(
            f"{PROG}: error: --ep: got {ep} with {world} process(es); allowed: one process per rank: "
            f"torchrun --standalone --nproc-per-node {ep} -m {PROG} --ep {ep} ..."
        )
    if device == "gpu":
        torch.cuda.set_device(device_of(device))
    if ep > 1 and device == "gpu":
        dist.init_process_group("nccl", device_id=device_of(device))
    elif ep > 1:
        dist.init_process_group("gloo")


def of_rank_0(args: Namespace, value: bool) -> bool:
    """The value of rank 0, in every rank. A collective."""
    told = torch.tensor(value, dtype=torch.int32, device=device_of(args.device))
    if args.ep > 1:
        dist.broadcast(told, 0)
    return bool(told)


def main(argv: Sequence[str] | None = None) -> None:
    args, config = parse_args(parser(PROG), argv)
    args.device = find_device(args.device)
    start_ranks(args.ep, args.device)
    with locked(PROG, args, args.ep == 1 or dist.get_rank() == 0, partial(of_rank_0, args)):
        train("torch", args, config, Trainer)
    if args.ep > 1:
        leave()


if __name__ == "__main__":
    main()
