"""The experts of Hugging Face transformers as an implementation of its registry.

    register_experts() --> ALL_EXPERTS_FUNCTIONS["mxfp8"]
    model.set_experts_implementation("mxfp8") --> every experts module calls it: packed_experts.py

The model keeps its modules, parameters and state dict, and transformers' routers choose the experts.
"""

from functools import partial
from typing import Any

from torch import Tensor, nn

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import RECIPES, Recipe
from ...core_kernels.swiglu.activation import PLAIN, SwiGLU
from ..ops.mx_tensor import MXTensor
from .packed_experts import PackedExperts, packed_experts

try:
    import transformers
    from transformers.activations import SiLUActivation
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
except ImportError as error:
    raise ImportError(
        "mxep.torch_frontend.integrations.transformers: transformers 5.17 to 5.23 is missing; install it with "
        "`pip install 'mxep[transformers]'`"
    ) from error

TESTED = (5, 17), (5, 23)
"""The first and the last release that the tests ran with. A later one may have experts with options that this file does
not read."""


def check_version(op: str) -> None:
    """Raise NotImplementedError unless transformers is a release in `TESTED`."""
    (first, last), version = TESTED, transformers.__version__
    if not first <= tuple(int(part) for part in version.split(".")[:2]) <= last:
        oldest, newest = (".".join(map(str, release)) for release in TESTED)
        allowed = f"allowed: {oldest} to {newest}; pip install 'mxep[transformers]'"
        fail(NotImplementedError, op, "transformers", version, allowed)


def register_experts(recipe: Recipe | str = "mxfp8", name: str | None = None) -> str:
    """Register a recipe as an experts implementation of transformers.

    After it, `model.set_experts_implementation(name)` and `from_pretrained(..., experts_implementation=name)` work for
    every model whose experts are decorated with `use_experts_implementation`, such as Mixtral, Qwen3-MoE, DeepSeek-V3
    and GPT-OSS. Llama 4's experts are not: transformers ignores the setting there, and `convert_moe` converts them.
    Tokens, parameters and the result are bf16 or fp32; D and F are multiples of 32. The expert id num_experts gives
    zeros: so transformers' expert parallelism marks the experts of other ranks.

    Args:
        recipe: a `Recipe` or its name.
        name: of the implementation; None is the recipe's name.

    Returns:
        The name of the implementation.

    Raises:
        TypeError: a recipe or a name of another type.
        ValueError: an unknown recipe, or a name that transformers or another recipe has.
        NotImplementedError: a release of transformers that is not tested.

    Example:
        >>> register_experts()
        'mxfp8'
        >>> import torch
        >>> from transformers import MixtralConfig, MixtralForCausalLM
        >>> sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_local_experts": 2}
        >>> heads = {"num_attention_heads": 1, "num_key_value_heads": 1, "vocab_size": 32}
        >>> model = MixtralForCausalLM(MixtralConfig(**sizes, **heads))
        >>> model.set_experts_implementation("mxfp8")
        >>> model(torch.zeros(1, 4, dtype=torch.int64)).logits.shape
        torch.Size([1, 4, 32])
    """
    op, recipe = "register_experts", Recipe.parse(recipe)
    check_version(op)
    name = recipe.name if name is None else name
    if not isinstance(name, str):
        fail(TypeError, op, "name", repr(name), "allowed: a str, or None for the recipe's name")
    before: Any = ALL_EXPERTS_FUNCTIONS.get(name)
    if name == "eager" or (before is not None and getattr(before, "func", None) is not experts_forward):
        fail(ValueError, op, "name", repr(name), "allowed: a name that transformers does not have")
    if before is not None and before.keywords["recipe"] != recipe:
        allowed = f"allowed: the recipe of that name, {before.keywords['recipe']}; or pass another name"
        fail(ValueError, op, "name", f"{name!r} for {recipe}", allowed)
    if name in RECIPES and RECIPES[name] != recipe:
        fail(ValueError, op, "name", f"{name!r} for {recipe}", f"allowed: {RECIPES[name]}; or pass another name")
    ALL_EXPERTS_FUNCTIONS.register(name, partial(experts_forward, recipe=recipe))
    return name


def experts_forward(
    module: nn.Module, x: Tensor, top_k_index: Tensor, top_k_weights: Tensor, *, recipe: Recipe
) -> Tensor:
    """The forward of an experts module: x (T, D), top_k_index and top_k_weights (T, K) -> (T, D) of x's dtype."""
    op, packed = type(module).__name__, packed_weights(module)
    _check_sizes(op, packed)
    return packed_experts(op, x, top_k_index, top_k_weights, packed, recipe)


def _check_sizes(op: str, packed: PackedExperts) -> None:
    """Raise ValueError, in the names of the model's configuration, for sizes that are not whole blocks."""
    d, f = packed.down.shape[1:] if not packed.transposed else packed.down.shape[:0:-1]
    for name, size in (("hidden_size", d), ("intermediate_size", f)):
        if size % BLOCK:
            got, allowed = f"{name} {size}", f"allowed: multiples of {BLOCK}; other sizes run 'grouped_mm'"
            fail(ValueError, op, "set_experts_implementation", got, allowed)


def implementation_of(module: Any) -> dict[str, Any] | None:
    """The options of the implementation that an experts module runs; None unless `register_experts` made it."""
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    run: Any = ALL_EXPERTS_FUNCTIONS.get(name)
    return run.keywords if getattr(run, "func", None) is experts_forward else None


def packed_weights(module: Any) -> PackedExperts:
    """The weights of a module decorated with `use_experts_implementation`, which has the decorator's options as
    attributes. Frozen ones, MXTensors, are not transposed: `freeze_weights` quantizes along the dim of the product."""
    first = module.gate_up_proj if module.has_gate else module.up_proj
    first_bias = (module.gate_up_proj_bias if module.has_gate else module.up_proj_bias) if module.has_bias else None
    down_bias = module.down_proj_bias if module.has_bias else None
    norm = module.post_expert_norm if getattr(module, "has_post_expert_norm", False) else None
    gate, interleaved = _gate_of(module), not module.is_concatenated
    transposed = module.is_transposed and not isinstance(module.down_proj, MXTensor)
    return PackedExperts(first, module.down_proj, first_bias, down_bias, gate, transposed, interleaved, norm)


def _gate_of(module: Any) -> Any:
    """A SwiGLU where the module's gate is known to be one, else the module's own function."""
    if not module.has_gate:
        return module.act_fn
    gate = type(module)._apply_gate
    if gate.__module__ == ALL_EXPERTS_FUNCTIONS.__class__.__module__ and is_silu(module.act_fn):
        return PLAIN
    if gate.__module__ == "transformers.models.gpt_oss.modeling_gpt_oss":
        return SwiGLU(alpha=module.alpha, limit=module.limit, offset=1.0)
    return module._apply_gate


def is_silu(function: Any) -> bool:
    return isinstance(function, nn.SiLU | SiLUActivation)


def llama4_forward(module: Any, hidden_states: Tensor, *, recipe: Recipe) -> tuple[Tensor, Tensor]:
    """The forward of Llama4TextMoe, whose experts take every token: each expert takes its own, weighted before it."""
    x = hidden_states.reshape(-1, module.hidden_dim)
    scores, logits = module.router(x)
    experts = logits.topk(module.top_k, dim=1).indices
    weights = scores.gather(1, experts)
    packed = llama4_weights(module)
    routed = packed_experts(type(module).__name__, x, experts, weights, packed, recipe, weigh_input=True)
    return module.shared_expert(x) + routed, logits


def llama4_weights(module: Any) -> PackedExperts:
    """The weights of a Llama4TextMoe."""
    experts = module.experts

    def gate(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return up * experts.act_fn(gate)

    activation = PLAIN if is_silu(experts.act_fn) else gate
    transposed = not isinstance(experts.down_proj, MXTensor)
    return PackedExperts(experts.gate_up_proj, experts.down_proj, None, None, activation, transposed)
