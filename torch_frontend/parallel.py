"""Expert parallelism as a ParallelStyle: experts sharded over a mesh, tokens sent to them and back.

parallelize_module(moe.experts, mesh, MXFP8ExpertParallel())

(rows, counts[, probs]) --dispatch--> experts.forward(groups, padded_counts[, probs]) --combine--> rows
                         before         w1, w2, w3: DTensor, Shard(0)                   after
"""

from collections.abc import Callable
from typing import Any

import torch
import torch._dynamo.config as dynamo_config
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle

from ..core_kernels.launch import fail
from ..core_kernels.recipe import Recipe
from .ep import Route, combine, dispatch, dispatch_probs

# A graph that ends in MX rows is traced for MX gradients, but theirs are plain (pytorch/pytorch#172556),
# and the other way round for one that begins where they end. So unless Dynamo may keep the splits as
# symbols and trace on, the two run outside compiled graphs.
_dispatch_eagerly: Callable[..., Any] = torch.compiler.disable(dispatch)
_combine_eagerly: Callable[..., Any] = torch.compiler.disable(combine)
_probs_eagerly: Callable[..., Any] = torch.compiler.disable(dispatch_probs)

DEFAULT_RECIPE = "mxfp8_wgrad_with_hp"


class MXFP8ExpertParallel(ParallelStyle):
    """Shard a module of experts over a one-dimensional mesh and route tokens around its forward.

    The module's own parameters have experts as dim 0 and become DTensors with `Shard(0)`; every rank
    must hold the same values before. Its forward is called as `module(rows, counts)` with rows (M, K)
    sorted by expert, or TokenCopies, and counts (E,) of any integer dtype, and runs on `(groups, padded_counts)`:
    groups (P, K), an MXTensor if the recipe quantizes, padded_counts (E / ranks,) int32. Probabilities (M,) float32
    as a third argument travel with the rows and arrive as (P,), zeros for padding.

    recipe: a Recipe or its name; None: the module's own `recipe`, or "mxfp8_wgrad_with_hp".

    Raises ValueError when the mesh does not divide the experts, when the mesh has more than one dim,
    or when `recipe` contradicts the module's own.
    """

    def __init__(self, recipe: Recipe | str | None = None) -> None:
        super().__init__()
        self.recipe = None if recipe is None else Recipe.parse(recipe)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        own = getattr(module, "recipe", None)
        recipe = self.recipe or Recipe.parse(own or DEFAULT_RECIPE)
        if own is not None and Recipe.parse(own) != recipe:
            fail(ValueError, "MXFP8ExpertParallel", "recipe", recipe, f"allowed: the module's own, {own}, or None")
        if getattr(module, "expert_parallel", None) is not None:
            fail(ValueError, "MXFP8ExpertParallel", "module", "experts that are parallel already", "allowed: once")
        if device_mesh.ndim != 1:
            allowed = 'allowed: one dim; pick it with mesh["ep"]'
            fail(ValueError, "MXFP8ExpertParallel", "device_mesh", f"{device_mesh.ndim} dims", allowed)
        ranks = device_mesh.size()
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.shape[0] % ranks:
                allowed = f"allowed: a number of experts that the mesh of {ranks} ranks divides"
                fail(ValueError, "MXFP8ExpertParallel", name, f"{parameter.shape[0]} experts", allowed)
        _shard(module, device_mesh)
        group_name = device_mesh.get_group().group_name
        routes: list[Route] = []

        def before(module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
            rows, counts, *probs = args
            whole = dynamo_config.capture_scalar_outputs
            send, send_probs = (dispatch, dispatch_probs) if whole else (_dispatch_eagerly, _probs_eagerly)
            groups, padded_counts, route = send(rows, counts, recipe, group_name, ranks)
            routes.append(route)
            return groups, padded_counts, *(send_probs(p, route) for p in probs)

        def after(module: nn.Module, args: tuple[Any, ...], groups: Tensor | None) -> Tensor | None:
            # Called after a failed forward too (groups is None), so that no route outlives its call.
            route = routes.pop() if routes else None
            receive = combine if dynamo_config.capture_scalar_outputs else _combine_eagerly
            return None if groups is None or route is None else receive(groups, route)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)
        module.expert_parallel = ranks  # type: ignore[assignment]
        return module


def _shard(module: nn.Module, mesh: DeviceMesh) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        sharded = nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)]), requires_grad=parameter.requires_grad)
        module.register_parameter(name, sharded)
