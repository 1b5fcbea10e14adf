"""`torchrun --nproc-per-node 2 -m benchmarks fsdp`: steps of a few MoE layers under `shard_moe`, whose experts FSDP2
gathers as bytes (`quantized_gather=True`), against the same with values; over Gloo at a small size where there is no
GPU.

    model   layers of x + moe(norm(x)), weights fp32, mixed precision bf16; every rank has tokens of its own
    mesh    data ranks x expert ranks: all ranks are data ranks; of four ranks also 2 x 2

    bytes of loss and sharded gradients: equal
    back-to-back steps: bytes | values    forward and backward, median of the slowest rank
"""

import gc
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from mxep.core_kernels.launch import fail
from mxep.torch_frontend import MoE, RouterConfig, shard_moe
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from ..cases.byte_check import differing
from ..cases.shapes import MoELayer
from ..clocks import ranks
from ..clocks.device_timing import peak_nbytes
from ..ep import join, named, rank_device
from ..figures.results import Line

RECIPE = "mxfp8"


class Layers(NamedTuple):
    number: int
    layer: MoELayer


H200 = {
    "mixtral-8x7b": Layers(2, MoELayer(8192, 4096, 14336, 8, 2)),
    "qwen3-30b-a3b": Layers(4, MoELayer(8192, 2048, 768, 128, 8)),
}
TINY = {
    "mixtral-8x7b": Layers(2, MoELayer(64, 64, 96, 8, 2)),
    "qwen3-30b-a3b": Layers(2, MoELayer(64, 64, 32, 16, 8)),
}
NAMES = tuple(H200)


def lines(only: Sequence[str]) -> Iterator[Line]:
    """Lines of rank 0; nothing on the other ranks. only: models; [] is all."""
    device = rank_device()
    join("fsdp", device)
    if unknown := set(only) - set(NAMES):
        fail(ValueError, "fsdp", "only", ", ".join(sorted(unknown)), f"allowed: {', '.join(NAMES)}")
    for name in named(only, NAMES):
        for data, experts in meshes(dist.get_world_size()):
            mesh = init_device_mesh(device.type, (data, experts), mesh_dim_names=("dp", "ep"))
            line = _measured(name, mesh, device)
            if dist.get_rank() == 0:
                yield line
            gc.collect()
            if device.type == "cuda":
                torch.cuda.empty_cache()


def meshes(ranks: int) -> tuple[tuple[int, int], ...]:
    """Data ranks and expert ranks."""
    if ranks == 1:
        fail(ValueError, "fsdp", "ranks", "1", "allowed: two or more, of which each gathers experts of the others")
    return ((4, 1), (2, 2)) if ranks == 4 else ((ranks, 1),)


class Block(nn.Module):
    def __init__(self, layer: MoELayer, device: torch.device) -> None:
        super().__init__()
        _, d, f, e, k = layer
        self.norm = nn.RMSNorm(d, device=device, dtype=torch.float32)
        router = RouterConfig(k, force_balance=True)
        self.moe = MoE(d, f, e, router, recipe=RECIPE, dtype=torch.float32, device=device)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.moe(self.norm(x))[0]


class CountedGather:
    """FSDP2's all-gather, and the bytes that it writes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.nbytes += output_tensor.nbytes
        # Its new name, all_gather_single, is not in torch 2.11.
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


class Side:
    """The model with experts gathered as bytes, if quantized, or as values; the same weights on both sides."""

    def __init__(self, layers: Layers, mesh: DeviceMesh, device: torch.device, quantized: bool) -> None:
        torch.manual_seed(0)
        blocks: list[Any] = [Block(layers.layer, device) for _ in range(layers.number)]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        self.model = nn.Sequential(*blocks)
        shard_moe(self.model, mesh, [Block], mp_policy=policy, quantized_gather=quantized)
        self.gather = CountedGather()
        for block in blocks:
            block.moe.experts.set_custom_all_gather(self.gather)
        tokens = torch.Generator(device).manual_seed(dist.get_rank())
        size = layers.layer.tokens, layers.layer.dim
        self.x = torch.randn(*size, generator=tokens, device=device, dtype=torch.bfloat16)

    def backward(self) -> Tensor:
        """The loss; parameters have their gradients."""
        loss = self.model(self.x).float().square().mean()
        loss.backward()
        return loss.detach()

    def step(self) -> None:
        self.backward()
        self.model.zero_grad()

    def results(self) -> tuple[dict[str, Tensor], int]:
        """Loss and this rank's gradients, and the bytes that experts are gathered as."""
        before = self.gather.nbytes
        found = {"loss": self.backward()}
        for name, parameter in self.model.named_parameters():
            gradient = parameter.grad
            assert isinstance(gradient, DTensor), name
            found[name] = gradient.to_local()
        self.model.zero_grad()
        return found, self.gather.nbytes - before


def check(ours: Side, theirs: Side) -> tuple[int, int]:
    """The gathered bytes of both sides. Raises AssertionError on all ranks alike, if the loss or a gradient has other
    bytes on one side, or if ours gathers as many bytes."""
    (got, nbytes), (want, peer_nbytes) = ours.results(), theirs.results()
    wrong = torch.tensor([differing(got[name], want[name]) for name in want], device=ours.x.device)
    dist.all_reduce(wrong)  # every rank raises: the others would wait for one that has ended
    if wrong.any():
        found = {name: n for name, n in zip(want, wrong.tolist(), strict=True) if n}
        raise AssertionError(f"fsdp: values that differ from experts gathered as values: {found}")
    if nbytes >= peer_nbytes:
        raise AssertionError(f"fsdp: got {nbytes} gathered bytes; expected less than the {peer_nbytes} of values")
    return nbytes, peer_nbytes


def _measured(name: str, mesh: DeviceMesh, device: torch.device) -> Line:
    layers = (H200 if device.type == "cuda" else TINY)[name]
    ours, theirs = (Side(layers, mesh, device, quantized) for quantized in (True, False))
    nbytes, peer_nbytes = check(ours, theirs)
    times = ranks.in_a_row({"bytes": ours.step, "values": theirs.step}, device)
    peak, peer_peak = (ranks.largest(peak_nbytes(side.step), device) for side in (ours, theirs))
    sample, peer = times["bytes"], times["values"]
    layer = layers.layer
    return Line(
        op="fsdp_gather_step",
        frontend="torch",
        case={
            "model": name, "layers": layers.number, **layer._asdict(), "ranks": mesh.size(),
            "mesh": f"{mesh['dp'].size()} x {mesh['ep'].size()}", "recipe": RECIPE,
        },
        us=sample.us,
        spread=sample.spread,
        n=sample.n,
        nbytes=nbytes,
        flops=3 * 2 * 3 * layers.number * layer.tokens * layer.top_k * layer.dim * layer.hidden_dim,
        of_roof=None,
        roof=None,
        peer="gathered_values",
        peer_us=peer.us,
        ratio=round(peer.us / sample.us, 3),
        peak_nbytes=peak,
        error={"grade": "exact", "bytes_that_differ": 0},
        peer_nbytes=peer_nbytes,
        peer_peak_nbytes=peer_peak,
    )  # fmt: skip
