"""The checks of two ranks of dense layers: FSDP2, tensor parallelism with torch's own styles, both and checkpoints."""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mxep.torch_frontend import MXLinear, Recipe, convert_linear
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.utils.checkpoint import checkpoint

from ...compare import sqnr_db

RANKS = 2
FOLD = Recipe.parse("mxfp8", compute="fold")
TOKENS, D, F = 64, 64, 256


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(D)
        self.up, self.gate = nn.Linear(D, F), nn.Linear(D, F)
        self.down = nn.Linear(F, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


def model(recipe: str | Recipe = FOLD, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    found = nn.Sequential(Block(), Block())
    for p in found.parameters():
        if p.dim() == 1:
            nn.init.normal_(p)
    convert_linear(found, lambda module, name: True, recipe)
    return found


def batch(rows: int = TOKENS) -> Tensor:
    return torch.randn(2, rows, D, generator=torch.Generator().manual_seed(1))


def whole(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def trained(net: nn.Module, tokens: Callable[[Tensor], Tensor], steps: int = 2) -> dict[str, Tensor]:
    """The last gradients and the weights, after steps of SGD."""
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    grads: dict[str, Tensor] = {}
    for _ in range(steps):
        sgd.zero_grad()
        (net(tokens(batch())) ** 2).mean().backward()
        grads = {f"{name}.grad": whole(p.grad).clone() for name, p in net.named_parameters() if p.grad is not None}
        sgd.step()
    return grads | {name: whole(p) for name, p in net.named_parameters()}


def near(got: dict[str, Tensor], want: dict[str, Tensor], db: float) -> None:
    assert got.keys() == want.keys()
    found = {name: sqnr_db(got[name], value) for name, value in want.items()}
    assert min(found.values()) > db, found


def mine(x: Tensor) -> Tensor:
    """This rank's half of the batch."""
    return x.chunk(RANKS)[dist.get_rank()]


def mesh() -> DeviceMesh:
    return init_device_mesh("cpu", (RANKS,), mesh_dim_names=("one",))


def fsdp(recipe: str, reshard: bool) -> None:
    """Ranks with half of the tokens each train as one process does with all. dB measured at least 139, less 10."""
    alone, net = model(recipe), model(recipe)
    for block in net:
        fully_shard(block, mesh=mesh(), reshard_after_forward=reshard)
    fully_shard(net, mesh=mesh())
    assert isinstance(net[0].up, MXLinear)
    assert isinstance(net[0].up.weight, DTensor)
    near(trained(net, mine), trained(alone, lambda x: x), 129.0)


def fsdp_in_bf16_with_checkpointing() -> None:
    """The same bytes with and without recomputation, of bf16 parameters that FSDP2 gathers."""
    results = []
    for recompute in (False, True):
        net = model()
        for block in net:
            fully_shard(block, mesh=mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        run = partial(_recomputed, net) if recompute else net
        out = run(mine(batch()))
        assert out.dtype == torch.bfloat16
        out.float().pow(2).mean().backward()
        results.append([whole(p.grad) for p in net.parameters() if p.grad is not None])
    assert all(torch.equal(g, w) for g, w in zip(*results, strict=True))


def _recomputed(net: nn.Sequential, x: Tensor) -> Tensor:
    for block in net:
        x = checkpoint(block, x, use_reentrant=False)  # type: ignore[assignment]
    return x


TENSOR = {"up": ColwiseParallel, "gate": ColwiseParallel, "down": RowwiseParallel}


def tensor_parallel(recipe: str) -> None:
    """torch's styles, by columns and by rows, with biases. dB of weights and gradients of one process: measured at
    least 40.4, less 3. Partial sums differ in their last bits, which rounds some values of the next layer's operands to
    another code."""
    alone, net = model(recipe), model(recipe)
    for block in net:
        parallelize_module(block, mesh(), {name: style() for name, style in TENSOR.items()})
    assert isinstance(net[0].down, MXLinear)
    assert net[0].down.weight.placements == (Shard(1),)
    near(trained(net, lambda x: x), trained(alone, lambda x: x), 37.4)


def column_parallel_has_the_bytes_of_one_process() -> None:
    """A rank's outputs are columns of the whole: x is quantized along K, of which every rank has all."""
    alone, net = model(), model()
    for block in net:
        parallelize_module(block, mesh(), {"up": ColwiseParallel(output_layouts=Replicate())})
    assert torch.equal(net[0].up(batch()), alone[0].up(batch()))


def sequence_parallel() -> None:
    """Norms and sums on parts of the sequence, which up and gate gather. dB measured: 136, less 10."""
    alone, net = model(), model()
    for block in net:
        plan = {
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "gate": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1), use_local_output=False),
        }
        parallelize_module(block, mesh(), plan)
    parallelize_module(net, mesh(), PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)))
    ids = batch()
    out = net(ids)
    assert isinstance(out, DTensor)
    near({"out": whole(out)}, {"out": whole(alone(ids))}, 126.0)


def compiled_tensor_parallel() -> None:
    net, eager = model(), model()
    for of in (net, eager):
        for block in of:
            parallelize_module(block, mesh(), {name: style() for name, style in TENSOR.items()})
    program = torch.compile(net, fullgraph=True, backend="aot_eager")
    near(trained(program, lambda x: x), {f"_orig_mod.{n}": v for n, v in trained(eager, lambda x: x).items()}, 100.0)


def replicated_weights() -> None:
    """Plain DTensors without a style: rows of x on the ranks, or whole; whole blocks of 32 on each. The same values."""
    alone = model()[0].up
    layer = model()[0].up
    parallelize_module(layer, mesh(), ColwiseParallel())
    x = batch()[0]
    for name, p in list(layer.named_parameters()):
        plain = nn.Parameter(dist_replicated(whole(p)))
        layer.register_parameter(name, plain)
    layer._forward_pre_hooks.clear()
    layer._forward_hooks.clear()
    for placement in (Shard(0), Replicate()):
        given = x.chunk(RANKS)[dist.get_rank()] if placement.is_shard() else x
        out = layer(DTensor.from_local(given, mesh(), [placement]))
        assert out.placements == (placement,)
        out.sum().backward()
        alone(x).sum().backward()
        near(
            {name: whole(p.grad) for name, p in layer.named_parameters()},
            {name: whole(p.grad) for name, p in alone.named_parameters()},
            100.0,
        )
        layer.zero_grad()
        alone.zero_grad()


def dist_replicated(x: Tensor) -> DTensor:
    return DTensor.from_local(x, mesh(), [Replicate()])


def checkpoints() -> None:
    """Names and values are a Linear's: a sharded checkpoint of a converted model loads into a plain, whole model."""
    net = model()
    for block in net:
        fully_shard(block, mesh=mesh())
    folder = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(folder)
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder[0])
    torch.manual_seed(5)
    plain = nn.Sequential(Block(), Block())
    state = plain.state_dict()
    dcp.load({"model": state}, checkpoint_id=folder[0])
    plain.load_state_dict(state)
    for name, value in model().state_dict().items():
        assert torch.equal(plain.state_dict()[name], value)
    assert Path(folder[0]).is_dir()


def what_is_refused() -> None:
    net = model()
    parallelize_module(net[0], mesh(), {"up": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"0\.up\.weight: got a DTensor with \(Shard\(dim=0\),\); .*convert first"):
        convert_linear(net, lambda module, name: True)
    with pytest.raises(ValueError, match=r"cached_weights: weight: got a DTensor"), net[0].up.cached_weights():
        pass
    plain = model()
    fully_shard(plain, mesh=mesh())
    with pytest.raises(ValueError, match=r"\.weight: got a DTensor with .*; allowed: plain parameters; convert first"):
        convert_linear(plain, lambda module, name: True)
    with pytest.raises(TypeError, match=r"MXLinear: weight: got a plain tensor with others that are DTensors"):
        net[0].down(DTensor.from_local(torch.ones(4, F), mesh(), [Replicate()]))
    narrow = nn.Sequential(MXLinear(64, 32))
    parallelize_module(narrow, mesh(), {"0": ColwiseParallel()})
    with pytest.raises(ValueError, match=r"MXLinear: w: got N = 16; allowed: positive multiples of 32"):
        narrow(torch.ones(4, 64))


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    found: dict[str, Callable[[], object]] = {
        f"fsdp/{recipe}": partial(fsdp, recipe, recipe == "mxfp8") for recipe in ("mxfp8", "fp8_rowwise")
    }
    found |= {f"tensor_parallel/{recipe}": partial(tensor_parallel, recipe) for recipe in ("mxfp8", "fp8_blockwise")}
    others = (
        fsdp_in_bf16_with_checkpointing, column_parallel_has_the_bytes_of_one_process, sequence_parallel,
        compiled_tensor_parallel, replicated_weights, checkpoints, what_is_refused,
    )  # fmt: skip
    return found | {check.__name__: check for check in others}
