"""A backend: a module with functions of numpy arrays, by the names of the ops.

A module has `OPS`, a dict of functions by name, or plain functions with these names. A function takes the arrays of the
op in order, and the options that it has by keyword. It raises NotImplementedError for a call that it lacks.
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module, metadata
from typing import Any

import numpy as np

from ..cases import Arrays, Case
from ..formats import Rounding
from ..launch import fail
from .definitions import DEFINITIONS

MODE = ("rounding", "satfinite")
"""The options of a quantization. A function without them has one rule, which it claims or which is found."""


class LackingError(Exception):
    """A backend does not offer a call: the reason."""


@dataclass(frozen=True)
class Backend:
    """name: of the module. ops: functions by name. marks: attributes of the module, such as FP8_TENSOR_CORES.

    mode: rounding and satfinite of functions without these options, as far as the module claims them. versions: of
    its PACKAGES. source: where formulas are transcribed from, "" for the library itself.
    """

    name: str
    ops: Mapping[str, Callable]
    marks: Mapping[str, Any] = field(default_factory=dict)
    mode: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)

    @property
    def source(self) -> str:
        return self.marks.get("SOURCE", "")

    def offers(self, what: str) -> bool:
        """Whether it has an op, an optional function or a mark."""
        return what in self.ops or bool(self.marks.get(what, False))

    def fixed(self, op: str) -> list[str]:
        """The options of `MODE` that the definition has and the function lacks."""
        return [name for name in MODE if name in defaults(op) and not _accepts(self.ops[op], name)]

    def call(self, case: Case, arrays: Arrays, mode: Mapping[str, Any]) -> tuple[Any, ...]:
        """The outputs of a case for its arrays. mode: the rule of a function that has one.

        Raises:
            LackingError: no such op, an option that the function lacks, a call that it does not implement.
            TypeError: an output that is no numpy array.
        """
        function = self.ops.get(case.op)
        if function is None:
            raise LackingError(f"no function {case.op}")
        allowed, options = defaults(case.op) | dict(mode), case.options_of()
        for name in [name for name in options if not _accepts(function, name)]:
            value = options.pop(name)
            if value != allowed[name]:
                if name in mode:
                    raise LackingError(f"a case of another rule than {show_mode(mode)}")
                raise LackingError(f"no option {name}={value!r}")
        try:
            with np.errstate(all="ignore"):  # overflow and NaN are among the cases
                # Copies, since cases share their arrays and a function may write to them.
                got = function(*(np.array(x, order="C") for x in arrays), **options)
        except NotImplementedError as error:
            raise LackingError(str(error) or "not implemented") from None
        outputs = tuple(got) if isinstance(got, tuple | list) else (got,)
        for i, x in enumerate(outputs):
            if not isinstance(x, np.ndarray):
                fail(
                    TypeError,
                    case.op,
                    f"output {i}",
                    f"{type(x).__module__}.{type(x).__name__}",
                    "allowed: a numpy array",
                )
        return outputs


def show_mode(mode: Mapping[str, Any]) -> str:
    """RCEIL, or FLOOR, satfinite; a part of it where the function has one of the options."""
    said = [Rounding(mode["rounding"]).name] if "rounding" in mode else []
    if "satfinite" in mode:
        said += ["satfinite"] if mode["satfinite"] else ["not satfinite"] if not said else []
    return ", ".join(said)


def defaults(op: str) -> dict[str, Any]:
    """The options of the definition with their defaults."""
    parameters = inspect.signature(DEFINITIONS[op]).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}


def _accepts(function: Callable, option: str) -> bool:
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # of a function in C without a signature
        return False
    return any(p.name == option or p.kind is p.VAR_KEYWORD for p in parameters)


def _require_functions(ops: Mapping[str, Callable]) -> None:
    """Raise unless these are functions by the names of ops."""
    if unknown := [op for op in ops if op not in DEFINITIONS]:
        allowed = f"allowed: {', '.join(sorted(DEFINITIONS))}"
        fail(ValueError, "mxep.conformance", "OPS", ", ".join(map(repr, unknown)), allowed, hint="rename or remove it")
    for op, function in ops.items():
        if not callable(function):
            fail(TypeError, "mxep.conformance", f"OPS[{op!r}]", type(function).__name__, "allowed: a function")


def of_module(name: str, module: Any) -> Backend:
    """The backend of a module.

    Args:
        name: of the report.
        module: functions by the names of ops, or `OPS`; optional `ROUNDING`, `SATFINITE`, `PACKAGES` and `SOURCE`.

    Returns:
        The backend.

    Raises:
        ValueError: a module without a function of an op, an unknown op in `OPS`, or a wrong claim.
        TypeError: an `OPS` that is no dict of functions, or a `SATFINITE` that is no bool.
        ImportError: one of its `PACKAGES` is not installed.

    Example:
        >>> from types import ModuleType
        >>> module = ModuleType("mine")
        >>> module.permute_rows = lambda x, row_map: x[row_map]
        >>> of_module("mine", module).offers("permute_rows")
        True
    """
    marks = vars(module)
    ops = marks.get("OPS")
    if ops is None:
        ops = {op: marks[op] for op in DEFINITIONS if callable(marks.get(op))}
    elif not isinstance(ops, Mapping):
        fail(TypeError, "mxep.conformance", "OPS", type(ops).__name__, "allowed: a dict of functions by name")
    else:
        _require_functions(ops)
    if not ops.keys() & DEFINITIONS.keys():
        allowed = "allowed: a module with functions such as quantize_row, or with a dict OPS"
        fail(ValueError, "mxep.conformance", "backend", f"{name!r} without a function of an op", allowed)
    mode = {}
    if "ROUNDING" in marks:
        mode["rounding"] = Rounding.parse(marks["ROUNDING"], "mxep.conformance", "ROUNDING")
    if "SATFINITE" in marks:
        mode["satfinite"] = marks["SATFINITE"]
        if not isinstance(mode["satfinite"], bool):
            fail(TypeError, "mxep.conformance", "SATFINITE", repr(mode["satfinite"]), "allowed: True or False")
    versions = {package: metadata.version(package) for package in marks.get("PACKAGES", ())}
    return Backend(name, ops, marks, mode, versions)


def load(name: str) -> Backend:
    """The backend of the module `name`.

    Args:
        name: dotted, of a module that Python can import.

    Returns:
        The backend.

    Raises:
        ImportError: no such module, or as of `of_module`.
        ValueError: a name that is no module's, or as of `of_module`.
        TypeError: as of `of_module`.

    Example:
        >>> sorted(load("mxep.core_kernels.scale_layout.oracle").ops)
        ['block_scales', 'unblock_scales']
    """
    if not all(part.isidentifier() for part in name.split(".")):
        fail(
            ValueError, "mxep.conformance", "backend", repr(name), "allowed: a dotted name, such as my_package.backend"
        )
    return of_module(name, import_module(name))
