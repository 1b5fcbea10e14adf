"""The public names of a frontend, and all names that a user may import."""

from importlib import import_module
from types import ModuleType
from typing import Any


def public_names(frontend: ModuleType) -> set[str]:
    return set(frontend.__all__)


def modules_of_names(frontend: ModuleType) -> dict[str, str]:
    """Names that are not at the top, and the module that the error of the frontend says."""
    return {name: f"mxep.{module}" for module, names in frontend._ELSEWHERE.items() for name in names}


def importable(frontend: ModuleType) -> dict[str, Any]:
    """The values of all names."""
    elsewhere = {name: getattr(import_module(module), name) for name, module in modules_of_names(frontend).items()}
    return {name: getattr(frontend, name) for name in public_names(frontend)} | elsewhere
