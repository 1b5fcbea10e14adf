"""torchtitan's routed experts with a recipe, through its registry of overrides.

    --override.imports mxep.torch_frontend.integrations.torchtitan.routed_experts    experts and dispatcher
    --override.imports mxep.torch_frontend.integrations.torchtitan.experts           experts, with any dispatcher

    x (T, D), scores (T, K), ids (T, K) --Dispatcher--> groups (P, D) --Experts--> (P, D) --Dispatcher--> y (T, D)
                                        by rank and expert                                weighted by the scores

Router, load balancing, shared experts, parameters and their names stay torchtitan's.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..exchange.all_to_all import TokenReplicas
from ..exchange.combine import combine
from ..exchange.counts import Request
from ..exchange.dispatch import dispatch_over
from ..exchange.route import Route
from ..exchange.shards import ALONE, Ranks
from ..ops.private import name_of_group
from ..routing.permute import sort_by_expert
from .convert import titan_forward

TESTED = "0.3.0"
"""The release that the tests ran with."""

try:
    import torchtitan

    if torchtitan.__version__ != TESTED:  # first: in other releases the classes below are other ones
        allowed = f"allowed: {TESTED}; pip install 'mxep[torchtitan]'"
        fail(
            NotImplementedError,
            "mxep.torch_frontend.integrations.torchtitan",
            "torchtitan",
            torchtitan.__version__,
            allowed,
        )
    from torchtitan.config import derive, override
    from torchtitan.models.common.moe import GroupedExperts, RoutedExperts
    from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher, LocalTokenDispatcher
except ModuleNotFoundError as error:
    raise ImportError(
        f"mxep.torch_frontend.integrations.torchtitan: torchtitan {TESTED} is missing ({error}); install it with "
        "`pip install 'mxep[torchtitan]'`"
    ) from error
except ImportError as error:  # a name that an older torch has not
    raise ImportError(
        f"mxep.torch_frontend.integrations.torchtitan: torchtitan {TESTED} does not import with torch "
        f"{torch.__version__} ({error}); tested with torch 2.13"
    ) from error


class Experts(GroupedExperts):
    """torchtitan's experts with its parameters, multiplied with a recipe.

    padded: the groups are whole blocks of 32 rows, as the groups of `Dispatcher` are.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(GroupedExperts.Config):
        recipe: Recipe
        padded: bool

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe, self.padded = config.recipe, config.padded

    def forward(self, x_RD: Tensor, num_tokens_per_expert_E: Tensor) -> Tensor:
        return titan_forward(self, x_RD, num_tokens_per_expert_E, recipe=self.recipe, pad_token_groups=not self.padded)


class Sent(NamedTuple):
    """What `Dispatcher.combine` needs of its `dispatch`."""

    route: Route
    scores_TK: Tensor


class Dispatcher(AllToAllTokenDispatcher):
    """Tokens to the ranks of their experts and back, in MXFP8 in the all-to-alls that the recipe names."""

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        recipe: Recipe

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.recipe = config.recipe

    def dispatch(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> tuple[Tensor, Tensor, Any]:
        order, inverse, counts = sort_by_expert(topk_expert_ids_TK, self.num_experts)
        tokens = TokenReplicas(x_TD.to(torch.bfloat16), order, inverse, self.top_k)
        groups, padded_counts, route = dispatch_over(Request("dispatch", tokens, counts, self.recipe, self._ranks()))
        return groups, padded_counts, Sent(route, topk_scores_TK)

    def combine(self, routed_output_RD: Tensor, metadata: Any, x_TD: Tensor) -> Tensor:
        return combine(routed_output_RD, metadata.route, metadata.scores_TK.float(), out_dtype=x_TD.dtype)

    def _ranks(self) -> Ranks:
        mesh = self.ep_mesh
        if mesh is None:
            return ALONE
        return Ranks(name_of_group(mesh.get_group()), mesh.size(), self.num_experts, mesh.device_type)


def _recipe(op: str, recipe: Recipe | str, mxfp8_all_to_all: "list[str] | tuple[str, ...] | None") -> Recipe:
    recipe = Recipe.parse(recipe)
    if mxfp8_all_to_all is None:
        return recipe
    if not isinstance(mxfp8_all_to_all, list | tuple):
        fail(
            TypeError,
            op,
            "mxfp8_all_to_all",
            repr(mxfp8_all_to_all),
            'allowed: a list such as ["dispatch", "combine_grad"], or None',
        )
    return Recipe.parse(recipe, mxfp8_all_to_all=tuple(mxfp8_all_to_all))


def _experts(op: str, config: GroupedExperts.Config, recipe: Recipe, padded: bool) -> Experts.Config:
    if type(config) is not GroupedExperts.Config:
        got = type(config).__qualname__
        allowed = "allowed: GroupedExperts.Config, SwiGLU without bias; without a converter or another override of it"
        fail(TypeError, op, "inner_experts", got, allowed)
    for name in ("dim", "hidden_dim"):
        size = getattr(config, name)
        if size % BLOCK:
            fail(ValueError, op, name, size, f"allowed: multiples of {BLOCK}")
    return derive(config, Experts.Config, recipe=recipe, padded=padded)


@override(target=RoutedExperts.Config, description="mxep: experts and token dispatcher with a recipe")
def routed_experts(
    config: RoutedExperts.Config,
    recipe: Recipe | str = "mxfp8",
    mxfp8_all_to_all: "list[str] | tuple[str, ...] | None" = None,
) -> RoutedExperts.Config:
    """The override of torchtitan's routed experts: `Experts` and `Dispatcher` with one recipe.

    Args:
        config: of torchtitan's routed experts.
        recipe: a `Recipe` or its name.
        mxfp8_all_to_all: `Recipe.mxfp8_all_to_all`, the all-to-alls that send MXFP8 rows; None is the recipe's choice,
            tokens to the experts and the gradients of their outputs. torchtitan's command line has both as JSON:
            `--override.imports 'mxep.torch_frontend.integrations.torchtitan.routed_experts={"recipe": "mxfp8",
            "mxfp8_all_to_all": ["dispatch"]}'`.

    Returns:
        The config of the override.

    Raises:
        TypeError: experts or dispatchers of another kind, which `experts` or another override may serve.
        ValueError: sizes that are no multiples of 32, unknown recipes and unknown all-to-alls.

    Example:
        >>> from torchtitan.models.common.config_utils import make_routed_experts_config
        >>> sizes = {"dim": 64, "hidden_dim": 96, "num_experts": 4, "top_k": 2}
        >>> config = make_routed_experts_config(**sizes, param_init={}, comm_backend="standard")
        >>> routed_experts(config, mxfp8_all_to_all=["dispatch"]).token_dispatcher.recipe.mxfp8_all_to_all
        ('dispatch',)
    """
    op = "routed_experts"
    chosen = _recipe(op, recipe, mxfp8_all_to_all)
    dispatcher = config.token_dispatcher
    if type(dispatcher) not in (AllToAllTokenDispatcher.Config, LocalTokenDispatcher.Config):
        allowed = "allowed: dispatchers of the standard backend; with another use the override `experts`"
        fail(TypeError, op, "token_dispatcher", type(dispatcher).__qualname__, allowed)
    config.inner_experts = _experts(op, config.inner_experts, chosen, padded=True)
    config.token_dispatcher = derive(dispatcher, Dispatcher.Config, recipe=chosen)
    return config


@override(target=GroupedExperts.Config, description="mxep: experts with a recipe")
def experts(config: GroupedExperts.Config, recipe: Recipe | str = "mxfp8") -> Experts.Config:
    """The override of torchtitan's experts alone, for dispatchers that send bf16 rows and pad no groups.

    Args:
        config: of torchtitan's experts.
        recipe: a `Recipe` or its name.

    Returns:
        The config of the override.

    Raises:
        TypeError: as `routed_experts`.
        ValueError: as `routed_experts`.

    Example:
        >>> config = experts(GroupedExperts.Config(dim=64, hidden_dim=96, num_experts=4), "bf16")
        >>> config.recipe.name
        'bf16'
    """
    return _experts("experts", config, Recipe.parse(recipe), padded=False)
