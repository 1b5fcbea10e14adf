"""The layers of layers.py in PyTorch, on one process, on the GPU where there is one."""

from functools import partial

import torch
from mxep.torch_frontend import MoE

from ...conformance.backends.torch import DEVICE, to_torch
from ..hashes import digits_of
from ..records import INPUTS, Case, Entry
from .layers import LAYERS, Layer


def cases() -> dict[str, Case]:
    record = "gpu" if DEVICE.type == "cuda" else "cpu_products"
    return {f"torch layer {name}": Case(record, partial(entry, layer)) for name, layer in LAYERS.items()}


def module(layer: Layer) -> MoE:
    dtype = to_torch(layer.parameters["router.weight"]).dtype
    options = layer.arguments | {"recompute": layer.recompute, "dtype": dtype, "device": DEVICE}
    moe = MoE(*layer.sizes, **options)
    moe.load_state_dict({name: to_torch(value) for name, value in layer.parameters.items()})
    return moe


def results(moe: MoE, x: torch.Tensor, dy: torch.Tensor, *chosen: torch.Tensor) -> dict[str, torch.Tensor]:
    """y, the statistics and the gradients of (y dy).sum() + aux_loss. chosen: experts and weights, or none."""
    leaves = {"x": x, **dict(moe.named_parameters())} | ({"weights": chosen[1]} if chosen else {})
    for leaf in leaves.values():
        leaf.requires_grad_()
    y, stats = moe(x, *chosen)
    outputs, cotangents = [y], [dy]
    if not chosen:
        outputs, cotangents = [y, stats.aux_loss], [dy, torch.ones_like(stats.aux_loss)]
    grads = torch.autograd.grad(outputs, tuple(leaves.values()), cotangents, allow_unused=bool(chosen))
    return {"y": y, **stats._asdict(), **{name: g for name, g in zip(leaves, grads, strict=True) if g is not None}}


def entry(layer: Layer) -> Entry:
    found = results(module(layer), *map(to_torch, (layer.x, layer.dy, *layer.chosen)))
    return {INPUTS: layer.digits, **{name: digits_of(value) for name, value in found.items()}}
