"""Conversion of a model's experts to a recipe, in place: parameters, names and state dict stay the model's own.

model --modules--> experts that an adapter knows --checks of all--> each gets the recipe --> ConversionReport

experts                                              what changes
GroupedExperts of this package                       its `recipe`
transformers: use_experts_implementation             `forward`, of the instance
transformers: Llama4TextMoe                          `forward`, of the instance
torchtitan: GroupedExperts, by its parameters        `forward`, of the instance
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.recipe import Recipe
from ..layer.moe import GroupedExperts
from ..ops.checks import check_autocast
from ..products.ffn import grouped_swiglu_ffn

OP = "convert_moe"
Filter = Callable[[nn.Module, str], bool]
TITAN = ("w1_EFD", "w3_EFD", "w2_EDF"), ("w1", "w3", "w2")
"""Names of the parameters of torchtitan's experts, release 0.3 and before."""
NAMED = 4
"""Experts that an error names."""
DECORATED = "has_gate", "has_bias", "is_transposed", "is_concatenated"
"""Attributes that transformers' `use_experts_implementation` gives to an experts module."""


class ConvertedExperts(NamedTuple):
    """A module that `convert_moe` has converted.

    Attributes:
        name: of the module, as in `named_modules`.
        library: "mxep", "transformers" or "torchtitan".
        num_experts: E.
        dim: D.
        hidden_dim: F.
        gate: "kernel", or "module" where the model's own function computes it, in bf16.
    """

    name: str
    library: str
    num_experts: int
    dim: int
    hidden_dim: int
    gate: str


class ConversionReport(NamedTuple):
    """What `convert_moe` has done; `print` shows it as a table.

    Attributes:
        recipe: of the converted modules.
        converted: a row per converted module.
        others: names of modules with 3-dim weights that run as before, because the filter left them out or no adapter
            knows them.
    """

    recipe: Recipe
    converted: tuple[ConvertedExperts, ...]
    others: tuple[str, ...]

    def __str__(self) -> str:
        width = max(len(row.name) for row in self.converted)
        lines = [f"{len(self.converted)} modules run recipe {self.recipe.name!r}"]
        for row in self.converted:
            sizes = f"E {row.num_experts:4}  D {row.dim:6}  F {row.hidden_dim:6}"
            lines.append(f"  {row.name:{width}}  {row.library:12}  {sizes}  gate: {row.gate}")
        return "\n".join([*lines, *(f"  {name}  runs as before" for name in self.others)])


class _Adapter(NamedTuple):
    library: str
    gate: str
    down: Tensor
    transposed: bool
    parameters: tuple[str, ...]
    forward: Callable[..., Any] | None
    """None: the module has a recipe."""


def convert_moe(model: nn.Module, recipe: Recipe | str = "mxfp8", filter_fn: Filter | None = None) -> ConversionReport:
    """Run the experts of a model with a recipe, from the next forward on; routers and everything else stay as they are.

    Converted experts can be converted again. The experts of other libraries get a `forward` of their instance, which
    deepcopy and pickle keep; `del module.forward` undoes it, and transformers' `set_experts_implementation` has no
    effect on it.

    Args:
        model: with experts of this package, of transformers (those that `register_experts` names, and Llama 4) or of
            torchtitan; bf16 or fp32, on any device, "meta" too.
        recipe: a `Recipe` or its name.
        filter_fn: filter_fn(module, name) is False for experts that stay as they are; None converts all.

    Returns:
        The converted modules and the others.

    Raises:
        ValueError: there are no experts, the filter leaves none, or D or F is no multiple of 32. Nothing is changed
            then, nor by another error.
        TypeError: dtypes, arguments.
        NotImplementedError: a release of transformers that is not tested.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(32, 32), GroupedExperts(32, 64, num_experts=4, recipe="bf16"))
        >>> print(convert_moe(model, "mxfp8"))
        1 modules run recipe 'mxfp8'
          1  mxep          E    4  D     32  F     64  gate: kernel
    """
    if not isinstance(model, nn.Module):
        fail(TypeError, OP, "model", type(model).__name__, "allowed: a torch.nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        fail(TypeError, OP, "filter_fn", repr(filter_fn), "allowed: filter_fn(module, name) -> bool, or None")
    recipe = Recipe.parse(recipe)
    known = {name: (m, adapter) for name, m in model.named_modules() if (adapter := adapter_of(m)) is not None}
    if not known:
        allowed = "allowed: experts of mxep, of transformers or of torchtitan"
        fail(ValueError, OP, "model", f"{type(model).__name__} without such experts", allowed)
    chosen = {name: found for name, found in known.items() if filter_fn is None or filter_fn(found[0], name)}
    if not chosen:
        names = ", ".join(repr(name) for name in [*known][:NAMED]) + ", ..." * (len(known) > NAMED)
        fail(ValueError, OP, "filter_fn", "False for all", f"allowed: True for one of {names}")
    rows = tuple(_checked(name, module, adapter) for name, (module, adapter) in chosen.items())
    for module, adapter in chosen.values():
        if adapter.forward is None:
            module.recipe = recipe  # type: ignore[assignment]
        else:
            module.forward = partial(adapter.forward, module, recipe=recipe)
    return ConversionReport(recipe, rows, tuple(_others(model, chosen)))


def adapter_of(module: Any) -> _Adapter | None:
    """How a module's experts are converted; None without experts."""
    if isinstance(module, GroupedExperts):
        return _Adapter("mxep", "kernel", module.w2, False, ("w1", "w3", "w2"), None)
    if all(hasattr(module, name) for name in DECORATED):
        from . import transformers

        transformers.check_version(OP)
        packed, forward = transformers.packed_weights(module), transformers.experts_forward
        names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    elif type(module).__name__ == "Llama4TextMoe":
        from . import transformers

        transformers.check_version(OP)
        packed, forward = transformers.llama4_weights(module), transformers.llama4_forward
        names = ("experts.gate_up_proj", "experts.down_proj")
    else:
        return _titan_adapter(module)
    gate = "module" if callable(packed.gate) else "kernel"
    return _Adapter("transformers", gate, packed.down, packed.transposed, names, forward)


def _titan_adapter(module: Any) -> _Adapter | None:
    if not any(kind.__name__ == "GroupedExperts" for kind in type(module).__mro__):
        return None
    names = next((names for names in TITAN if set(names) == set(module._parameters)), None)
    if names is None:
        return None
    return _Adapter("torchtitan", "kernel", getattr(module, names[2]), False, names, titan_forward)


def titan_forward(
    module: Any, x: Tensor, num_tokens_per_expert: Tensor, *, recipe: Recipe, pad_token_groups: bool = True
) -> Tensor:
    """The forward of torchtitan's experts: rows x (R, D), sorted by expert, and counts (E,) -> (R, D) of x's dtype.

    Args:
        pad_token_groups: as in `grouped_swiglu_ffn`; not for groups of whole blocks.
    """
    check_autocast(type(module).__name__, x)
    names = next(names for names in TITAN if names[0] in module._parameters)
    parameters = (getattr(module, name) for name in names)
    w1, w3, w2 = (w.to_local() if isinstance(w, DTensor) else w for w in parameters)
    options: dict[str, Any] = {"recipe": recipe, "pad_token_groups": pad_token_groups}
    return grouped_swiglu_ffn(x, w1, w3, w2, group_sizes=num_tokens_per_expert, **options).to(x.dtype)


def _checked(name: str, module: Any, adapter: _Adapter) -> ConvertedExperts:
    """The row of the report; raises for experts that the kernels cannot multiply."""
    for parameter in adapter.parameters:
        dtype = module.get_parameter(parameter).dtype
        if dtype not in (torch.bfloat16, torch.float32):
            fail(TypeError, OP, f"{name}.{parameter}", f"dtype {dtype}", "allowed: bfloat16 or float32")
    experts, d, f = adapter.down.shape
    d, f = (f, d) if adapter.transposed else (d, f)
    for size, value in (("D", d), ("F", f)):
        if value % BLOCK:
            allowed = f"allowed: multiples of {BLOCK}; leave the module out with filter_fn"
            fail(ValueError, OP, name, f"{size} = {value}", allowed)
    own = vars(module).get("forward")
    if own is not None and getattr(own, "func", None) is not adapter.forward:
        allowed = "allowed: the class's; convert before hooks and parallelism, or leave the module out with filter_fn"
        fail(ValueError, OP, f"{name}.forward", "a function of the instance", allowed)
    return ConvertedExperts(name, adapter.library, experts, d, f, adapter.gate)


def _others(model: nn.Module, chosen: dict[str, Any]) -> list[str]:
    """Names of modules with 3-dim floating-point parameters outside of the chosen ones, without convolutions."""
    inside = tuple(f"{name}." for name in chosen)
    others = []
    for name, module in model.named_modules():
        if isinstance(module, nn.Conv1d | nn.ConvTranspose1d) or name in chosen or name.startswith(inside):
            continue
        if any(p.dim() == 3 and p.is_floating_point() for p in module.parameters(recurse=False)):
            others.append(name)
    return others
