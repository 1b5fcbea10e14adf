"""Expert parallelism as a ParallelStyle: experts sharded over a mesh, tokens dispatched to them and combined.

    parallelize_module(moe, mesh, ExpertParallel())             the layer: experts sharded, router replicated
    parallelize_module(moe.experts, mesh, ExpertParallel())     its experts alone; the router stays the caller's
    parallelize_module(experts, mesh, ExpertParallel(...))      another module of experts, by two forward hooks:

        (rows, counts[, probs]) --dispatch--> experts.forward(groups, padded_counts[, probs]) --combine--> rows
                                 before         weights: DTensor, Shard(0)                    after

`MoE` itself calls dispatch, experts and combine, or overlap/expert_parallel.py; the hooks serve modules of other
packages alone.
"""

from collections.abc import Iterable
from typing import Any, Literal, get_args

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.distributed.tensor.placement_types import Placement

from ...core_kernels.launch import fail
from ...core_kernels.policy.deduplicate import Deduplicate, check_deduplicate
from ...core_kernels.policy.recipe import Recipe
from ..exchange.combine import combine
from ..exchange.counts import Request
from ..exchange.exchange import AllToAll
from ..exchange.process_groups import agree
from ..exchange.route import Route
from ..exchange.shards import Ranks
from ..ops.mx_tensor import MXTensor
from ..ops.private import name_of_group
from ..overlap.expert_parallel import choose_exchange, require_no_weighted_sum
from ..overlap.peer_memory import PeerMemory
from .moe import GroupedExperts, MoE

Gradients = Literal["mean", "sum"]


class ExpertParallel(ParallelStyle):
    """Shard experts over a one-dimensional mesh; every rank has tokens of its own.

    `parallelize_module(module, mesh, style)` takes one of these modules:

    - A `MoE`. Its experts become DTensors with `Shard(0)`. Its router, shared expert and shared gate become DTensors
      with `Replicate()`. All have the values of the mesh's first rank, so that all ranks start alike.
    - `GroupedExperts`: the same without a router.
    - Another module whose own parameters have experts as dim 0. The caller passes `module(rows, counts)`, with rows
      (M, K) sorted by expert, or TokenReplicas, and counts (E,) of any integer dtype. Hooks dispatch them, and the
      module's forward receives (groups, padded_counts): groups (P, K), an MXTensor if the recipe quantizes,
      padded_counts (E / ranks,) int32. A third argument, probabilities as in `dispatch_probs`, is passed on as (P,).
      The call returns the result of `combine`: (M, N) for rows, the sum over each token's replicas (T, N) for
      TokenReplicas.

    The backward reduces the gradients of the router and of the shared expert over the mesh. All weights of a layer are
    DTensors of one mesh, so `clip_grad_norm_` and foreach or fused optimizers take them together. Plain tensors outside
    of the layer need another group of parameters and another call.

    With FSDP2 shard the experts over the other dim of the mesh, `fully_shard(moe.experts, mesh=mesh["dp"])`, apply this
    style to `moe.experts`, and leave the router to the caller. DistributedDataParallel takes no DTensors and raises
    errors of torch: "Operator c10d.broadcast_.default does not have a sharding strategy registered" or
    "aten.cat.default got mixed torch.Tensor and DTensor". `shard_moe` takes its place.

    Args:
        recipe: A Recipe or its name; None is the module's own `recipe`, or "mxfp8".
        gradients: The meaning of a sharded or replicated weight's gradient. "mean": the gradient of the mean of the
            ranks' losses, as DistributedDataParallel and FSDP compute it for dense weights. A rank's loss is the mean
            over its tokens, and the caller averages the gradients of all other weights. "sum": the gradient of the sum
            of the ranks' losses. A rank's loss is a sum over its tokens divided by the number of tokens of all ranks,
            and the caller sums the other gradients. Another module of experts takes "sum" alone: this style does not
            see how it reads its weights.
        transport: None: dispatch, experts and combine one after the other, as `torch.compile` needs them for a whole
            graph. A `PeerMemory` of the mesh's group, of GPUs of one host: kernels read and write rows of the other
            GPUs during the products. The bytes are the same, but for weight gradients of an expert that it splits over
            rounds. A MoE and its experts take a transport.
        deduplicate: None, "dispatch" or "both", how often a token is sent to a rank with several of its experts, as in
            `dispatch`. With a transport, and where a row is one replica (prob_in="input"), None alone.

    Raises:
        ValueError: For names that are not allowed. `parallelize_module` raises it on all ranks: when the mesh does not
            divide the experts, when the mesh has more than one dim, when `recipe` contradicts the module's own, for
            modules without experts, for weights of `freeze_weights`, and when these differ between ranks.
        TypeError: For values of another type.

    Example:
        >>> style = ExpertParallel(gradients="mean")  # parallelize_module(moe, mesh, style)
    """

    def __init__(
        self,
        recipe: Recipe | str | None = None,
        gradients: Gradients = "mean",
        transport: PeerMemory | None = None,
        deduplicate: Deduplicate = None,
    ) -> None:
        super().__init__()
        check_deduplicate("ExpertParallel", deduplicate)
        if transport is not None and not isinstance(transport, PeerMemory):
            fail(TypeError, "ExpertParallel", "transport", repr(transport), "allowed: a PeerMemory, or None")
        self.transport = transport
        self.deduplicate: Deduplicate = deduplicate
        self.recipe = None if recipe is None else Recipe.parse(recipe)
        if gradients not in get_args(Gradients):
            allowed = "allowed: 'mean' or 'sum'"
            fail(ValueError, "ExpertParallel", "gradients", repr(gradients), allowed)
        self.gradients = gradients

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        experts = module.experts if isinstance(module, MoE) else module
        ours = isinstance(experts, GroupedExperts)
        own = getattr(experts, "recipe", None)
        recipe = self.recipe or Recipe.parse(own or "mxfp8")
        self._check_on_all_ranks(module, experts, own, recipe, device_mesh)
        ranks = Ranks(
            name_of_group(device_mesh.get_group()),
            device_mesh.size(),
            next(experts.parameters(recurse=False)).shape[0],
            device_mesh.device_type,
            device_mesh.size() if self.gradients == "mean" else 1,
        )
        _distribute(experts, device_mesh, Shard(0))
        if isinstance(module, MoE):
            _distribute(module.router, device_mesh, Replicate())
            for shared in (module.shared_expert, module.shared_gate):
                if shared is not None:
                    _distribute(shared, device_mesh, Replicate())
            if module.shared_expert is not None:
                module.shared_expert.all_ranks = ranks
        if not ours:
            hooks = _Hooks(recipe, ranks, self.deduplicate)
            experts.register_forward_pre_hook(hooks.before)
            experts.register_forward_hook(hooks.after, always_call=True)
        experts.expert_parallel = ranks  # type: ignore[assignment]
        if ours and ranks.degree > 1:
            experts.exchange = choose_exchange(self.transport, self.deduplicate)
        return module

    def _check_on_all_ranks(
        self, module: nn.Module, experts: nn.Module, own: Any, recipe: Recipe, mesh: DeviceMesh
    ) -> None:
        """Raise on all ranks if one rank's arguments are wrong or the ranks' layers differ."""
        error = None
        try:
            self._check(module, experts, own, recipe, mesh)
        except (TypeError, ValueError) as found:
            if mesh.ndim != 1:  # no group
                raise
            error = found
        parameters = _describe(experts.named_parameters(recurse=False))
        carried = self.transport and self.transport.config_key
        arguments = {"recipe": recipe, "gradients": self.gradients, "transport": carried, "parameters": parameters}
        arguments["deduplicate"] = self.deduplicate
        if isinstance(module, MoE):
            others = [(n, p) for n, p in module.named_parameters() if not n.startswith("experts.")]
            arguments |= {"prob_in": module.router_config.prob_in, "other parameters": _describe(others)}
        if isinstance(experts, GroupedExperts):
            arguments["activation"] = experts.activation
        agree("ExpertParallel", name_of_group(mesh.get_group()), arguments, error, "module")

    def _check(self, module: nn.Module, experts: nn.Module, own: Any, recipe: Recipe, mesh: DeviceMesh) -> None:
        op, ours = "ExpertParallel", isinstance(experts, GroupedExperts)
        if own is not None and Recipe.parse(own) != recipe:
            fail(ValueError, op, "recipe", recipe, f"allowed: the module's own, {own}, or None")
        if getattr(experts, "expert_parallel", None) is not None:
            fail(ValueError, op, "module", "experts that are parallel already", "allowed: once")
        parameters = dict(experts.named_parameters(recurse=False))
        require_values(op, "module", module.named_parameters(recurse=isinstance(module, MoE)))
        for name, parameter in parameters.items():
            if isinstance(parameter, DTensor):
                allowed = "allowed: plain parameters; apply this style first, and fully_shard or other styles after it"
                fail(ValueError, op, "module", f"{name} as a DTensor", allowed)
        numbers = {p.shape[0] if p.dim() else 0 for p in parameters.values()}
        shapeless = all(p.dim() < 2 for p in parameters.values()) or isinstance(experts, nn.Linear)
        if len(numbers) != 1 or shapeless:
            got = f"a {type(experts).__name__} with parameters {', '.join(parameters) or 'of submodules alone'}"
            allowed = "allowed: a MoE, its experts, or a module whose own parameters have experts as dim 0"
            inside = [name for name, part in experts.named_modules() if isinstance(part, MoE | GroupedExperts)]
            allowed += f"; here {inside[0]!r}" if inside else ""
            fail(ValueError, op, "module", got, allowed)
        if not ours and self.gradients != "sum":
            allowed = f"allowed: gradients='sum' for a {type(experts).__name__}; MoE and GroupedExperts take both"
            fail(ValueError, op, "gradients", repr(self.gradients), allowed)
        if self.transport is not None and not ours:
            allowed = f"allowed: None for a {type(experts).__name__}; a MoE and its experts take a transport"
            fail(ValueError, op, "transport", repr(self.transport), allowed)
        if self.transport is not None and isinstance(module, MoE):
            require_no_weighted_sum(op, "module", module.router_config.prob_in)
        if self.deduplicate is not None and self.transport is not None:
            allowed = "allowed: None with a transport, which sends a row per replica to its final place"
            fail(ValueError, op, "deduplicate", repr(self.deduplicate), allowed)
        if self.deduplicate is not None and isinstance(module, MoE) and module.router_config.prob_in == "input":
            allowed = "allowed: None with prob_in='input', whose replicas have a row each"
            fail(ValueError, op, "deduplicate", repr(self.deduplicate), allowed)
        if mesh.ndim != 1:
            fail(ValueError, op, "device_mesh", f"{mesh.ndim} dims", 'allowed: one dim; pick it with mesh["ep"]')
        if self.transport is not None and self.transport.group.group_name != name_of_group(mesh.get_group()):
            got, allowed = f"one of group {self.transport.group.group_name!r}", "allowed: one of the mesh's group"
            fail(ValueError, op, "transport", got, f"{allowed}, mesh.get_group()")
        for name, parameter in parameters.items():
            if parameter.shape[0] % mesh.size():
                allowed = f"allowed: a number of experts that the mesh of {mesh.size()} ranks divides"
                fail(ValueError, op, name, f"{parameter.shape[0]} experts", allowed)


def require_values(op: str, argument: str, parameters: Iterable[tuple[str, Tensor]]) -> None:
    """Raise for the bytes of `freeze_weights`, which no rank can have a part of."""
    for name, parameter in parameters:
        if isinstance(parameter, MXTensor):
            allowed = "allowed: values of bf16 or fp32, frozen by requires_grad_(False) without freeze_weights; "
            allowed += "8-bit weights are whole on every rank, without expert parallelism (docs/guides/lora.md)"
            fail(ValueError, op, argument, f"{name} as an MXTensor", allowed)


def _describe(parameters: Iterable[tuple[str, Tensor]]) -> str:
    return ", ".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in parameters)


class _Hooks:
    """dispatch before and combine after the forward of a module of experts that is written for one device."""

    def __init__(self, recipe: Recipe, ranks: Ranks, deduplicate: Deduplicate) -> None:
        self.recipe, self.ranks, self.exchange = recipe, ranks, AllToAll(deduplicate)
        self.routes: list[Route] = []  # of the forwards that have begun and not ended

    def before(self, module: nn.Module, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
        if len(args) not in (2, 3):
            allowed = "allowed: (rows, counts), or (rows, counts, probs)"
            fail(TypeError, "ExpertParallel", "module", f"called with {len(args)} arguments", allowed)
        rows, counts, probs = args if len(args) == 3 else (*args, None)
        request = Request("ExpertParallel", rows, counts, self.recipe, self.ranks, probs)
        groups, prob, route = self.exchange.dispatch(request)
        self.routes.append(route)
        return (groups, route.row_map.padded_counts) if prob is None else (groups, route.row_map.padded_counts, prob)

    def after(self, module: nn.Module, args: tuple[Any, ...], groups: Tensor | None) -> Tensor | None:
        # The hook runs after a failed forward too (groups is None), so that no route outlives its call.
        route = self.routes.pop() if self.routes else None
        return None if groups is None or route is None else combine(groups, route)


def _distribute(module: nn.Module, mesh: DeviceMesh, placement: Placement) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        spread = nn.Parameter(distribute_tensor(parameter, mesh, [placement]), requires_grad=parameter.requires_grad)
        module.register_parameter(name, spread)
