"""The public names of a package: `from .module import name as name` in its __init__.py."""

import ast
import inspect
from types import ModuleType


def public_names(package: ModuleType) -> set[str]:
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(package))) if isinstance(node, ast.ImportFrom)]
    return {alias.asname for node in imports for alias in node.names if alias.asname == alias.name}
