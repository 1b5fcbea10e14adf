"""Public docstrings have Google sections that fit the signatures, and their examples run.

Args:           every parameter, and no other name; `Attributes:` in place of it for records
Returns:        where something is returned
Raises:         TITLES has the order of the sections
Example:        of functions, exported classes and their methods
Source:
"""

import dataclasses
import doctest
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from enum import EnumType
from types import ModuleType
from typing import Any, NoReturn

import pytest
from mxep import core_kernels, jax_frontend, torch_frontend
from mxep.core_kernels import policy, registry

from ..public_names import importable, public_names

TITLES = ("Args", "Attributes", "Returns", "Yields", "Raises", "Example", "Source")

CALLED_BY_USERS = {
    "MoE": ("forward", "cached_weights"),
    "GroupedExperts": ("forward", "cached_weights"),
    "MXLinear": ("forward", "cached_weights"),
    "PeerMemory": ("overflow",),
    "MXArray": ("from_bytes", "from_packed", "quantize", "dequantize", "packed"),
}
"""Of these classes users call these methods alone; the package calls the others."""
LAYERS = ("init", "apply", "sharded_apply", "specs")
"""The functions of `jax_frontend.moe`."""
SHARED = [
    *(module.name for module in pkgutil.iter_modules(policy.__path__, f"{policy.__name__}.")),
    *(f"{core_kernels.__name__}.{name}" for name in ("dispatch", "formats", "swiglu.activation")),
    "mxep.cpp_bindings",
]
"""Modules of both frontends. The tests of each frontend run the examples of its own."""


def sections(doc: str) -> dict[str, str]:
    """The text of each section by its title, and of the rest by ""."""
    parts = re.split(rf"^({'|'.join(TITLES)}):\n", doc, flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def entries(section: str) -> list[str]:
    """The names of a section whose lines are `    name: text`, continued with a deeper indentation."""
    return [line.partition(":")[0].strip().lstrip("*") for line in section.splitlines() if re.match(r"    \S", line)]


def parameters(documented: Any) -> list[str]:
    if isinstance(documented, EnumType):
        return list(documented.__members__)
    if not isinstance(getattr(documented, "__total__", None), bool):  # not a TypedDict
        return [name for name in inspect.signature(documented).parameters if name not in ("self", "cls")]
    return list(documented.__annotations__)


def is_record(documented: Any) -> bool:
    """Whether a class only has fields, which functions of mxep fill."""
    return isinstance(documented, type) and (
        dataclasses.is_dataclass(documented) or issubclass(documented, tuple | dict)
    )


def faults(documented: Any, needs_example: bool) -> Iterator[str]:
    """The missing and wrong parts of the docstring of a function or class."""
    found = sections(inspect.cleandoc(documented.__doc__ or ""))
    if not found[""].strip():
        yield "no summary"
    if list(found)[1:] != [title for title in TITLES if title in found]:
        yield f"sections in another order: {list(found)[1:]}"
    named = entries(found.get("Args", found.get("Attributes", "")))
    if named != (taken := parameters(documented)):
        missing, unknown = [n for n in taken if n not in named], [n for n in named if n not in taken]
        yield f"Args: missing {missing}, unknown {unknown}" if missing or unknown else f"Args: order {named}"
    if not isinstance(documented, type):
        returned = inspect.signature(documented).return_annotation
        if returned not in (None, "None", NoReturn) and not found.keys() & {"Returns", "Yields"}:
            yield "no Returns"
    for error in entries(found.get("Raises", "")):
        if not re.fullmatch(r"\w+Error", error):
            yield f"Raises: {error!r} is no error"
    if needs_example and ">>>" not in found.get("Example", ""):
        yield "no Example"


def documented_names(frontend: ModuleType) -> dict[str, tuple[Any, bool]]:
    """Functions, classes and methods by name, and whether each needs an example."""
    exported, names = public_names(frontend), dict(importable(frontend))
    if frontend is jax_frontend:
        names |= {f"moe.{name}": getattr(frontend.moe, name) for name in LAYERS}
    found: dict[str, tuple[Any, bool]] = {}
    for name, value in names.items():
        if not (inspect.isfunction(value) or isinstance(value, type)):
            continue
        found[name] = value, name in exported or not is_record(value)
        if isinstance(value, type) and name in exported:
            methods = {method: getattr(value, method) for method in vars(value) if not method.startswith("_")}
            called = CALLED_BY_USERS.get(name, methods)
            found |= {f"{name}.{m}": (f, True) for m, f in methods.items() if m in called and inspect.isroutine(f)}
    return found


def shared_names() -> dict[str, tuple[Any, bool]]:
    """Functions, classes and methods of the modules of both frontends; the frontends' exports are among them."""
    found: dict[str, tuple[Any, bool]] = {}
    for module in map(importlib.import_module, SHARED):
        defined = {n: v for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
        for name, value in defined.items():
            if name.startswith("_") or not (inspect.isfunction(value) or isinstance(value, type)):
                continue
            methods = vars(value) if isinstance(value, type) and "__total__" not in vars(value) else {}
            found |= {f"{name}.{m}": (getattr(value, m), False) for m in methods if not m.startswith("_")}
            found[name] = value, False
    return {name: case for name, case in found.items() if inspect.isroutine(case[0]) or isinstance(case[0], type)}


CASES = [
    pytest.param(documented, needs_example, id=f"{frontend.__name__.removeprefix('mxep.')}.{name}")
    for frontend in (torch_frontend, jax_frontend)
    for name, (documented, needs_example) in sorted(documented_names(frontend).items())
]
CASES += [pytest.param(*case, id=name) for name, case in sorted(shared_names().items())]


@pytest.mark.parametrize(("documented", "needs_example"), CASES)
def test_the_sections_fit_the_signature(documented: Any, needs_example: bool) -> None:
    assert not list(faults(documented, needs_example))


@pytest.mark.parametrize("op", registry.OPS.values(), ids=lambda op: op.name)
def test_the_documentation_of_an_op(op: registry.KernelOp) -> None:
    found = sections(registry.docstring(op, "torch"))
    assert entries(found["Args"]) == [*op.inputs, *op.options]
    assert not [name for name in op.outputs if name not in found["Returns"]]
    assert entries(found["Raises"]) == ["ValueError", "TypeError"]
    assert ">>>" in found["Example"]
    assert list(found)[1:] == [title for title in TITLES if title in found]


@pytest.mark.parametrize("module", SHARED)
def test_examples_of_shared_modules(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def scale(x: int, y: int) -> int:
    """Multiply.

    Args:
        x: an integer.
        y: an integer.

    Returns:
        The product.

    Example:
        >>> scale(2, 3)
        6
    """
    return x * y


@pytest.mark.parametrize(
    ("old", "new", "fault"),
    [
        ("", "", ""),
        ("    y: an integer.\n", "", "missing ['y']"),
        ("    y: an", "    z: an", "unknown ['z']"),
        ("    x: an integer.\n    y: an", "    x, y: an", "unknown ['x, y']"),
        ("Args:\n", "Inputs:\n", "missing ['x', 'y']"),
        ("Returns:\n    The product.\n", "", "no Returns"),
        (">>> ", "", "no Example"),
        ("Example:\n", "Raises:\n    Nothing: ever.\n\nExample:\n", "'Nothing' is no error"),
        ("Args:\n", "Source:\n    A paper.\n\nArgs:\n", "another order"),
    ],
)
def test_faults_are_found(old: str, new: str, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    doc = inspect.cleandoc(scale.__doc__ or "")
    assert old in doc
    monkeypatch.setattr(scale, "__doc__", doc.replace(old, new, 1) if old else doc)
    found = list(faults(scale, True))
    assert (fault in found[0]) if fault else not found
