"""A model with Mixture-of-Experts layers under FSDP2 and expert parallelism, and the norm of its gradients.

mesh (data, experts), e.g. 2 x 4           every rank has tokens of its own
  experts' weights     Shard(0) over "experts" (ExpertParallel), then FSDP2 over "data"
  all other weights    FSDP2 over all ranks, data and experts flattened

                       sum over "experts" / its size     mean over "data"
  expert gradient      (the layer's backward)            (FSDP2's reduce-scatter)     = mean over all ranks
  other gradients                                        FSDP2's mean over all ranks  = mean over all ranks
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import parallelize_module

from ...core_kernels.launch import fail
from ..ops.checks import check_flag
from ..ops.private import flattened
from .experts import GroupedExperts, SharedFFN
from .linear import MXLinear
from .moe import MoE
from .parallel import ExpertParallel, require_values
from .quantized_gather import QuantizedGather, why_values

OP = "shard_moe"
DATA_DIMS = {"dp", "dp_shard", "dp_shard_mod_ep", "fsdp", "efsdp", "edp", "data", "data_parallel"}
EXPERT_DIMS = {"ep", "dp_shard_in_ep", "expert", "experts", "expert_parallel"}
"""Names of mesh dims, of torchtitan, torchao, transformers and Megatron among others."""


def shard_moe(
    model: nn.Module,
    mesh: DeviceMesh,
    units: Iterable[type[nn.Module]] = (),
    *,
    style: ExpertParallel | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
    quantized_gather: bool = False,
) -> nn.Module:
    """Shard a model with `MoE` layers over a mesh of two named dims, (data, experts); returns the model.

    Parameters become DTensors: of the experts over both dims, of the rest over one dim of all ranks. A rank's loss is
    the mean over its tokens. Every gradient is the gradient of the mean of the ranks' losses: no divide factor is
    needed, over gloo or NCCL. `set_requires_gradient_sync(False)` of the model accumulates without communication over
    the data dim. One optimizer, fused or foreach, takes all parameters; clip with `clip_grad_norm_` of this package.
    Each rank keeps the shards of its own initial weights.

    Args:
        model: contains one `MoE` or more; or is one. Parameters are plain and on the mesh's device, or on "meta".
        mesh: `init_device_mesh(device, (D, E), mesh_dim_names=("dp", "ep"))`, of all ranks or, with pipeline
            parallelism, of a stage's. E divides the number of experts; D and E may be 1. Every rank passes tokens of
            its own. Dims in the other order are taken by their names, if one of them is in `DATA_DIMS` or `EXPERT_DIMS`
            of this file; dims with other names are (data, experts).
        units: classes of modules, usually the transformer block, that FSDP2 gathers one at a time; the model itself is
            always one. Without units all weights outside of the experts are gathered at once.
        style: how rows are sent to experts. On the GPUs of one host, overlapped with the products:
            `ExpertParallel(transport=PeerMemory(mesh["ep"].get_group()))`. None is `ExpertParallel()`. Its gradients
            are "mean".
        mp_policy: of FSDP2's `fully_shard`. Experts never cast their inputs, which are MXFP8 or bf16 rows and fp32
            weights.
        offload_policy: of FSDP2's `fully_shard`.
        reshard_after_forward: of FSDP2's `fully_shard`.
        quantized_gather: FSDP2 gathers the experts as the bytes that their products read, one per weight in a forward
            and one in a backward, and not as values. Outputs and gradients have the same bits. Parameters, gradients
            and checkpoints stay as they are. Weights of which a rank has a part of a matrix are gathered as values,
            with a warning.

    Returns:
        `model`, sharded in place.

    Raises:
        TypeError: for arguments of another type, before anything is sharded.
        ValueError: before anything is sharded, for a mesh of other dims, without names or with two names of one kind, a
            model without `MoE`, units that the model does not contain, a style whose gradients are sums, experts that
            are sharded already, weights of `freeze_weights`, a number of experts that E does not divide, and
            quantized_gather with an offload_policy to the CPU.

    Example:
        >>> def sharded(model, Block):  # under torchrun, for example on 8 GPUs
        ...     mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("dp", "ep"))
        ...     return shard_moe(model, mesh, [Block])
    """
    if not isinstance(model, nn.Module):
        fail(TypeError, OP, "model", type(model).__name__, "allowed: a module with MoE layers")
    for name, value, kinds in (
        ("mesh", mesh, DeviceMesh),
        ("mp_policy", mp_policy, MixedPrecisionPolicy | None),
        ("offload_policy", offload_policy, OffloadPolicy | None),
        ("reshard_after_forward", reshard_after_forward, bool | int | None),
    ):
        if not isinstance(value, kinds):
            fail(TypeError, OP, name, repr(value), f"allowed: {getattr(kinds, '__name__', kinds)}")
    if not isinstance(units, Iterable):
        fail(TypeError, OP, "units", repr(units), "allowed: classes of modules, in a list")
    layers, blocks = _check(model, mesh, tuple(units))
    style = ExpertParallel() if style is None else style
    allowed = "allowed: an ExpertParallel with gradients='mean', or None"
    if not isinstance(style, ExpertParallel):
        fail(TypeError, OP, "style", repr(style), allowed)
    if style.gradients != "mean":
        fail(ValueError, OP, "style", f"gradients={style.gradients!r}", allowed)
    check_flag(OP, "quantized_gather", quantized_gather)
    if quantized_gather and isinstance(offload_policy, CPUOffloadPolicy):
        allowed = "allowed: None with quantized_gather, which quantizes on the device of the products"
        fail(ValueError, OP, "offload_policy", type(offload_policy).__name__, allowed)
    data, experts = (mesh[name] for name in _dims(mesh))
    options: dict[str, Any] = {} if offload_policy is None else {"offload_policy": offload_policy}
    options |= {"reshard_after_forward": reshard_after_forward}
    policy = mp_policy or MixedPrecisionPolicy()
    rows_policy = replace(policy, cast_forward_inputs=False, output_dtype=None)
    as_bytes = _gathered_as_bytes(model, data.size(), experts.size(), mesh.device_type) if quantized_gather else ()
    for layer in layers:
        parallelize_module(layer.experts, experts, style)
        place = _placement(data.size())
        fully_shard(layer.experts, mesh=data, mp_policy=rows_policy, shard_placement_fn=place, **options)
        if layer.experts in as_bytes:
            QuantizedGather(layer.experts.recipe, rows_policy.param_dtype).install(layer.experts)
    everyone = flattened(mesh)
    for module in (*blocks, model):
        place = _placement(everyone.size())  # a shared expert is a single one
        fully_shard(module, mesh=everyone, mp_policy=policy, shard_placement_fn=place, **options)
    return model


def _placement(ranks: int) -> Callable[[nn.Parameter], Shard | None]:
    """Whole experts per rank where they divide, else a part of each expert; None is FSDP2's default, Shard(0)."""

    def place(weight: nn.Parameter) -> Shard | None:
        local = weight.to_local() if isinstance(weight, DTensor) else weight
        parts = local.dim() == 3 and local.shape[0] % ranks != 0 and local.shape[1] % ranks == 0
        return Shard(1) if parts else None

    return place


def _gathered_as_bytes(model: nn.Module, data_ranks: int, ranks: int, device_type: str) -> list[GroupedExperts]:
    """The experts that FSDP2 gathers as bytes; warns of the other modules that quantize their weights."""
    chosen, others = [], dict[str, list[str]]()
    for name, module in model.named_modules():
        if isinstance(module, SharedFFN | MXLinear):
            why = "a rank has a part of each matrix"
        elif isinstance(module, GroupedExperts) and type(module).forward is not GroupedExperts.forward:
            why = "a forward of their own"
        elif isinstance(module, GroupedExperts):
            why = why_values(module, module.num_experts // ranks, data_ranks, torch.device(device_type))
        else:
            continue
        if why is None:
            chosen.append(module)
        else:
            others.setdefault(why, []).append(name)
    if others:
        more = {why: f" and {len(names) - 1} more" if names[1:] else "" for why, names in others.items()}
        found = "; ".join(f"{names[0]}{more[why]}: {why}" for why, names in others.items())
        warnings.warn(f"{OP}: quantized_gather: weights gathered as values: {found}", stacklevel=3)
    return chosen


def _dims(mesh: DeviceMesh) -> tuple[str, str]:
    """The names of the dims of data and of experts."""
    if mesh.ndim != 2 or mesh.mesh_dim_names is None:
        got = f"{mesh.ndim} dims named {mesh.mesh_dim_names}"
        allowed = 'allowed: two dims with names; init_device_mesh(device, (D, E), mesh_dim_names=("dp", "ep"))'
        fail(ValueError, OP, "mesh", got, allowed)
    first, second = mesh.mesh_dim_names
    for kind, names in (("data", DATA_DIMS), ("experts", EXPERT_DIMS)):
        if {first, second} <= names:
            got, allowed = (
                f"two dims of {kind}, {(first, second)}",
                'allowed: one of data and one of experts, ("dp", "ep")',
            )
            fail(ValueError, OP, "mesh", got, allowed)
    return (second, first) if first in EXPERT_DIMS or second in DATA_DIMS else (first, second)


def _check(model: nn.Module, mesh: DeviceMesh, units: tuple[type[nn.Module], ...]) -> tuple[list[MoE], list[nn.Module]]:
    """The layers, and the units without the model itself."""
    name_of_experts = _dims(mesh)[1]
    layers = {name: module for name, module in model.named_modules() if isinstance(module, MoE)}
    if not layers:
        allowed = "allowed: a model with MoE layers; fully_shard alone shards other models"
        fail(ValueError, OP, "model", f"a {type(model).__name__} without MoE", allowed)
    for unit in units:
        if not (isinstance(unit, type) and issubclass(unit, nn.Module)):
            fail(TypeError, OP, "units", repr(unit), "allowed: classes of modules")
        if not any(isinstance(module, unit) for module in model.modules()):
            kinds = sorted({type(module).__name__ for module in model.modules()})
            fail(ValueError, OP, "units", f"{unit.__name__}, of which the model has none", f"allowed: {kinds}")
        if issubclass(unit, (MoE, GroupedExperts)):
            allowed = "allowed: classes of modules around MoE, whose experts are a unit of their own"
            fail(ValueError, OP, "units", unit.__name__, allowed)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule):
            fail(
                ValueError, OP, "model", f"{name or 'a model'} under FSDP2 already", "allowed: a model not yet sharded"
            )
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            fail(ValueError, OP, "model", f"{name} as a DTensor", "allowed: plain parameters; call shard_moe first")
    require_values(OP, "model", model.named_parameters())
    ranks = mesh[name_of_experts].size()
    for name, layer in layers.items():
        if layer.num_experts % ranks:
            got = f"{layer.num_experts} experts in {name or 'the model'}"
            fail(ValueError, OP, "mesh", got, f"allowed: numbers that the {ranks} ranks of {name_of_experts!r} divide")
    # Inner units first: a parameter belongs to the innermost one.
    blocks = [module for module in model.modules() if isinstance(module, units) and module is not model]
    return list(layers.values()), blocks[::-1]


@torch.no_grad()
def clip_grad_norm_(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """`torch.nn.utils.clip_grad_norm_` for parameters on several meshes, and for plain ones; returns the total norm.

    torch's own raises if the gradients are DTensors of different meshes, as after `shard_moe`. Arguments and result are
    torch's: the gradients are scaled in place so that their norm is at most max_norm, and the norm before that is a
    scalar, the same plain tensor on every rank. One reduction per mesh and dim. Plain parameters count as equal on all
    ranks. All ranks pass the same parameters in the same order.

    Args:
        parameters: a tensor or an iterable of tensors, the same in the same order on all ranks.
        max_norm: the largest norm of the gradients after the call.
        norm_type: p of the p-norm; may be infinity.
        error_if_nonfinite: raise if the norm is infinite or NaN.
        foreach: as in `torch.nn.utils.clip_grad_norm_`.

    Returns:
        The norm before the call, a scalar, the same plain tensor on every rank.

    Raises:
        RuntimeError: if error_if_nonfinite and the norm is infinite or NaN.

    Example:
        >>> weight = nn.Parameter(torch.ones(3))
        >>> weight.grad = torch.tensor([0.0, 3.0, 4.0])
        >>> clip_grad_norm_([weight], max_norm=1.0), weight.grad
        (tensor(5.), tensor([0.0000, 0.6000, 0.8000]))
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for parameter in [parameters] if isinstance(parameters, Tensor) else parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            by_mesh.setdefault(mesh, []).append(parameter)
    norms = []
    for group in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None], norm_type, False, foreach)
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = nn.utils.get_total_norm(norms, norm_type, error_if_nonfinite, foreach)
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total, foreach)
    return total
