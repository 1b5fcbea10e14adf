"""Frozen weights of a model in 8 bits, in place: the base of LoRA, without dense values and without gradients.

weight, frozen --quantized along K--> MXTensor, 1.03 bytes per weight --> a parameter of the same name

module                                    parameters
MXLinear (`convert_linear`)               weight
GroupedExperts of this package            w1, w3, w2
experts of transformers and torchtitan    as `convert_moe` names them
"""

from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..layer.linear import MXLinear
from ..layer.moe import GroupedExperts
from ..ops.mx_tensor import MXTensor
from .convert import adapter_of

OP = "freeze_weights"


class _Weights(NamedTuple):
    """Of a module: the names of its weights in the model, and their recipe. transposed: they are stored (..., K, N)."""

    recipe: Recipe
    names: tuple[str, ...]
    transposed: bool = False


@torch.no_grad()
def freeze_weights(model: nn.Module) -> tuple[str, ...]:
    """Replace the frozen weights of a model's MXFP8 layers by their bytes, 1.03 per weight, in place.

    The weights of `MXLinear` and of experts that run a recipe are replaced, if they do not require a gradient: call
    `convert_linear` and `convert_moe` or `register_experts`, then `model.requires_grad_(False)` or PEFT's
    `get_peft_model`, then this. Each becomes a parameter of the same name, an `MXTensor`; one weight is quantized at a
    time. The forward is bitwise the same. The input gradient is the gradient of the dequantized weights. Biases,
    embeddings, norms and routers stay as they are. docs/guides/lora.md says what takes such parameters.

    Args:
        model: bf16 or fp32, on any device, "meta" too. Experts whose weights are (E, D, 2F), as of GPT-OSS and Llama 4,
            get bytes of (E, 2F, D): the state dict then has the shapes of the bytes.

    Returns:
        The names of the replaced parameters.

    Raises:
        ValueError: there is no frozen weight, a recipe without MXFP8 operands, a DTensor. Nothing is changed then.
        TypeError: another argument.

    Example:
        >>> model = torch.nn.Sequential(MXLinear(64, 64), MXLinear(64, 64)).requires_grad_(False)
        >>> freeze_weights(model)
        ('0.weight', '1.weight')
        >>> sum(p.nbytes for w in model.parameters() if isinstance(w, MXTensor) for p in (w.q, w.sf)) / (2 * 64 * 64)
        1.03125
    """
    if not isinstance(model, nn.Module):
        fail(TypeError, OP, "model", type(model).__name__, "allowed: a torch.nn.Module")
    found = (_weights_of(name, module) for name, module in model.named_modules())
    chosen = [weights for weights in found if weights is not None and _is_frozen(model, weights)]
    if not chosen:
        allowed = "allowed: MXLinear or converted experts, after model.requires_grad_(False)"
        fail(ValueError, OP, "model", f"{type(model).__name__} without a frozen weight of a recipe", allowed)
    for weights in chosen:
        _check(model, weights)
    for recipe, names, transposed in chosen:
        for name in names:
            owner, _, attribute = name.rpartition(".")
            w = model.get_parameter(name)
            frozen = MXTensor.quantize(w.mT.contiguous() if transposed else w, recipe.rounding)
            setattr(model.get_submodule(owner), attribute, nn.Parameter(frozen, requires_grad=False))
    return tuple(name for weights in chosen for name in weights.names)


def _weights_of(name: str, module: Any) -> _Weights | None:
    """None unless the module multiplies its weights with a recipe."""
    if isinstance(module, MXLinear):
        return _Weights(module.recipe, _names(name, ("weight",)))
    adapter = adapter_of(module)
    if adapter is None:
        return None
    names = _names(name, adapter.parameters)
    if isinstance(module, GroupedExperts):
        return _Weights(module.recipe, names)
    options = getattr(vars(module).get("forward"), "keywords", None)  # of `convert_moe`
    if options is None and adapter.library == "transformers":
        from .transformers import implementation_of

        options = implementation_of(module)
    return None if options is None else _Weights(options["recipe"], names, adapter.transposed)


def _names(module: str, parameters: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.{parameter}".lstrip(".") for parameter in parameters)


def _is_frozen(model: nn.Module, weights: _Weights) -> bool:
    """Whether no weight of the module requires a gradient, and none has been replaced."""
    parameters = map(model.get_parameter, weights.names)
    return not any(w.requires_grad or isinstance(w, MXTensor) for w in parameters)


def _check(model: nn.Module, weights: _Weights) -> None:
    """Raise unless the weights can be quantized."""
    for name in weights.names:
        if not weights.recipe.mx:
            allowed = "allowed: 'mxfp8' or 'mxfp8_wgrad_with_hp'"
            fail(ValueError, OP, name, f"recipe {weights.recipe.name!r}", allowed)
        if isinstance(w := model.get_parameter(name), DTensor):
            fail(ValueError, OP, name, f"a DTensor with {w.placements}", "allowed: plain parameters")
