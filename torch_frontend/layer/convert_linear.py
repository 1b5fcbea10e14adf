"""Conversion of a model's `torch.nn.Linear` to `MXLinear`, in place: each module becomes one of the other class.

modules --role, size, filter_fn--> chosen --checks of all--> module.__class__ = MXLinear --> LinearReport

The module itself is kept, and with it its parameters, their names, its hooks, and every reference to it. Layers that
read the same x share its operands (`SharedRows`). core_kernels/policy/linear.py has the rules.
"""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ...core_kernels.formats import BLOCK
from ...core_kernels.launch import fail
from ...core_kernels.policy.linear import same_rows, why_unconverted
from ...core_kernels.policy.recipe import Recipe
from ..products.linear import SharedRows
from .linear import MXLinear

OP = "convert_linear"
Filter = Callable[[nn.Module, str], bool | None]


class ConvertedLinear(NamedTuple):
    """A module that `convert_linear` has converted.

    Attributes:
        name: of the module, as in `named_modules`.
        in_features: K.
        out_features: N.
        same_rows: names of the other modules that share the operands of x.
    """

    name: str
    in_features: int
    out_features: int
    same_rows: tuple[str, ...]


class LinearReport(NamedTuple):
    """What `convert_linear` has done; `print` shows it as a table.

    Attributes:
        recipe: of the converted modules.
        converted: a row per converted module.
        others: (name, reason) of every other Linear, which runs as before.
    """

    recipe: Recipe
    converted: tuple[ConvertedLinear, ...]
    others: tuple[tuple[str, str], ...]

    def __str__(self) -> str:
        names = [row.name for row in self.converted] + [name for name, _ in self.others]
        width = max(map(len, names))
        lines = [f"{len(self.converted)} modules run recipe {self.recipe.name!r}"]
        for row in self.converted:
            shared = f"  x with {', '.join(row.same_rows)}" if row.same_rows else ""
            lines.append(f"  {row.name:{width}}  K {row.in_features:6}  N {row.out_features:6}{shared}".rstrip())
        return "\n".join([*lines, *(f"  {name:{width}}  runs as before: {reason}" for name, reason in self.others)])


def convert_linear(model: nn.Module, filter_fn: Filter | None = None, recipe: Recipe | str = "mxfp8") -> LinearReport:
    """Run the Linear layers of a model with a recipe, from the next forward on: each becomes an `MXLinear`, in place.

    Modules, parameters, names and state dict are the same ones: checkpoints of before and after are interchangeable,
    and optimizers and hooks keep what they refer to. Convert before `fully_shard`, `parallelize_module` and
    torch.compile. A model on "meta" converts too. Converted modules can be converted again. Embeddings, norms, heads,
    routers and layers too small to gain run as before.

    Args:
        model: bf16 or fp32, on any device.
        filter_fn: filter_fn(module, name) of each Linear: True converts it whatever its name and size, False leaves it,
            None leaves it to the rules: no head, by its name or `get_output_embeddings()`; no router, by its name; N K
            / (N + K) of at least 1024, where layers that read the same x, such as q_proj, k_proj and v_proj, count as
            one. torchao's filters return True and False.
        recipe: a `Recipe` or its name.

    Returns:
        The converted modules; every other Linear with the reason.

    Raises:
        ValueError: no Linear is left to convert, a chosen weight is tied, sharded, or has a dim that is no multiple of
            32. Nothing is changed then, nor by another error.
        TypeError: dtypes, arguments.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.Linear(2048, 10))
        >>> print(convert_linear(model, recipe="mxfp8"))
        1 modules run recipe 'mxfp8'
          0  K   2048  N   2048
          1  runs as before: N = 10 is no positive multiple of 32
    """
    if not isinstance(model, nn.Module):
        fail(TypeError, OP, "model", type(model).__name__, "allowed: a torch.nn.Module")
    if filter_fn is not None and not callable(filter_fn):
        fail(TypeError, OP, "filter_fn", repr(filter_fn), "allowed: filter_fn(module, name) -> bool or None, or None")
    recipe = Recipe.parse(recipe)
    linears = {name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    if not linears:
        fail(ValueError, OP, "model", f"{type(model).__name__} without a torch.nn.Linear", "allowed: one with Linears")
    sizes = {name: (module.out_features, module.in_features) for name, module in linears.items()}
    groups, head, reasons = same_rows(sizes), _head(model), {}
    for name, module in linears.items():
        asked = None if filter_fn is None else filter_fn(module, name)
        if asked is not None:
            reasons[name] = "" if asked else "filter_fn returns False"
        elif type(module) not in (nn.Linear, MXLinear):
            reasons[name] = f"a {type(module).__name__}"
        else:
            reasons[name] = "a head" if module is head else why_unconverted(name, sizes, groups)
    chosen = {name: module for name, module in linears.items() if not reasons[name]}
    if not chosen:
        found = "; ".join(f"{name or 'model'}: {why}" for name, why in [*reasons.items()][:4])
        allowed = "allowed: a Linear that gains; filter_fn returns True for a Linear to convert whatever its size"
        fail(ValueError, OP, "model", f"no Linear to convert: {found}", allowed)
    for name, module in chosen.items():
        _check(module, name)
    _check_tied(model, chosen)
    for module in chosen.values():
        module.__class__ = MXLinear
        module.recipe, module.shared_rows = recipe, None  # type: ignore[assignment]
    shared = [[name for name in group if name in chosen] for group in groups]
    for group in shared:
        rows = SharedRows(len(group)) if len(group) > 1 else None
        for name in group:
            chosen[name].shared_rows = rows  # type: ignore[assignment]
    others = {name: tuple(other for other in group if other != name) for group in shared for name in group}
    rows = (ConvertedLinear(n, m.in_features, m.out_features, others.get(n, ())) for n, m in chosen.items())
    return LinearReport(recipe, tuple(rows), tuple((name, why) for name, why in reasons.items() if why))


def _head(model: nn.Module) -> nn.Module | None:
    get = getattr(model, "get_output_embeddings", None)
    return get() if callable(get) else None  # type: ignore[return-value]


def _check(module: nn.Linear, name: str) -> None:
    """Raise unless the module can become an MXLinear."""
    if type(module) not in (nn.Linear, MXLinear):
        allowed = "allowed: torch.nn.Linear itself; a subclass has a forward of its own"
        fail(TypeError, OP, name, f"a {type(module).__name__}", allowed)
    for size, value in (("N", module.out_features), ("K", module.in_features)):
        if value % BLOCK or not value:
            allowed = f"allowed: positive multiples of {BLOCK}; leave the module out with filter_fn"
            fail(ValueError, OP, name, f"{size} = {value}", allowed)
    for of, parameter in module.named_parameters(recurse=False):
        if isinstance(parameter, DTensor):
            allowed = "allowed: plain parameters; convert first, then fully_shard or parallelize_module"
            fail(ValueError, OP, f"{name}.{of}", f"a DTensor with {parameter.placements}", allowed)
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            fail(TypeError, OP, f"{name}.{of}", f"dtype {parameter.dtype}", "allowed: bfloat16 or float32")
    if "forward" in vars(module):
        allowed = "allowed: the class's; convert first, or leave the module out with filter_fn"
        fail(ValueError, OP, f"{name}.forward", "a function of the instance", allowed)


def _check_tied(model: nn.Module, chosen: Iterable[str]) -> None:
    """Raise if a chosen weight has a second name, of which another module makes another use."""
    names: dict[int, list[str]] = {}
    for module_name, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            names.setdefault(id(parameter), []).append(f"{module_name}.{name}".lstrip("."))
    by_name = {of[0]: of for of in names.values()} | {each: of for of in names.values() for each in of}
    for name in chosen:
        weight = f"{name}.weight".lstrip(".")
        others = [other for other in by_name.get(weight, []) if other != weight]
        if others:
            allowed = "allowed: a weight of its own; leave the module out with filter_fn, or untie the weights"
            fail(ValueError, OP, weight, f"a weight tied to {', '.join(others)}", allowed)
