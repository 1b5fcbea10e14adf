"""The parts of docs/api that are written while the site is built: the public names of both frontends, and the ops.

<frontend>/__init__.py --table of the docstring, imports--> api/<frontend>.md, api/shared.md: directives of mkdocstrings
core_kernels/registry.py OPS --> build/docs/ops.py: one function per op --> api/ops.md

mkdocstrings reads sources and imports nothing, so neither torch nor jax nor the compiled extension is needed.
"""

import ast
import inspect
import re
import sys
from collections.abc import Callable
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from core_kernels.launch import KernelOp  # noqa: E402
from core_kernels.registry import OPS, docstring, signature  # noqa: E402

STUBS = ROOT / "build" / "docs" / "ops.py"
NOTE = "`make docs` writes the docstrings here."
FRONTENDS = {"torch_frontend": "PyTorch", "jax_frontend": "JAX"}


class Array:
    """The name of an array in the signatures of ops: `torch.Tensor` or `jax.Array`."""


def modules_of(tree: ast.Module, package: str) -> dict[str, str]:
    """The module of each name that `from .module import name` brings."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            parts = ["mxep", package][: 3 - node.level] + ([node.module] if node.module else [])
            found |= {alias.name: ".".join(parts) for alias in node.names}
    return found


def constant(tree: ast.Module, name: str) -> Any:
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == name:
            return ast.literal_eval(node.value)
    raise ValueError(f"{name} is not assigned")


def groups_of(doc: str) -> dict[str, dict[str, list[str]]]:
    """Title -> name -> members, from the table of a frontend's docstring: "The layer   moe (init, apply), MoE"."""
    groups: dict[str, dict[str, list[str]]] = {}
    for line in doc.split("\n\n")[1].splitlines():
        names = re.findall(r"(\w+)(?: \(([^)]*)\))?(?:, |$)", line[15:])
        groups[line[:15].strip()] = {name: re.findall(r"\b(\w+)\b", inside) for name, inside in names}
    return groups


def directive(path: str, **options: Any) -> str:
    """A block of mkdocstrings."""
    lines = [f"::: {path}"]
    if options:
        lines += ["    options:", *(f"      {name}: {value}" for name, value in options.items())]
    return "\n".join(lines) + "\n"


def is_shared(path: str) -> bool:
    return path.startswith("mxep.core_kernels.")


def is_module(path: str) -> bool:
    return (ROOT / f"{path.removeprefix('mxep.').replace('.', '/')}.py").is_file()


def shared_names() -> dict[str, str]:
    """Path -> name of everything that both frontends export from the same file."""
    trees = {frontend: ast.parse((ROOT / frontend / "__init__.py").read_text()) for frontend in FRONTENDS}
    paths = {}
    for frontend, tree in trees.items():
        elsewhere = {
            f"mxep.{module}.{name}": name for module, names in constant(tree, "_ELSEWHERE").items() for name in names
        }
        paths |= {f"{module}.{name}": name for name, module in modules_of(tree, frontend).items()} | elsewhere
    return {path: name for path, name in sorted(paths.items(), key=lambda item: item[1].lower()) if is_shared(path)}


def shared_page() -> str:
    return "\n".join(directive(path, heading_level=2) for path in shared_names())


def frontend_page(frontend: str) -> str:
    """All names that a user may import, in the groups of the docstring."""
    tree = ast.parse((ROOT / frontend / "__init__.py").read_text())
    modules = modules_of(tree, frontend)
    lines = []
    for title, names in groups_of(ast.get_docstring(tree) or "").items():
        lines.append(f"## {title}\n")
        for name, members in names.items():
            path = f"{modules[name]}.{name}"
            if name == "ops":
                lines.append("`ops` has one function per kernel: [the ops](ops.md).\n")
            elif is_shared(path):
                lines.append(f"[`{name}`][{path}] is the same in both frontends.\n")
            else:
                lines.append(directive(path, **({"members": members} if is_module(path) else {})))
    lines.append("## In other modules\n")
    for module, names in constant(tree, "_ELSEWHERE").items():
        if is_shared(f"mxep.{module}"):
            lines += [
                f"[`{name}`][mxep.{module}.{name}] is in `mxep.{module}`, for both frontends.\n" for name in names
            ]
        else:
            lines += [
                f"### {module.removeprefix(f'{frontend}.')}\n",
                *(directive(f"mxep.{module}.{name}", heading_level=4) for name in names),
            ]
    return "\n".join(lines)


def stub(op: KernelOp) -> str:
    """The op as the source of a Python function without a body."""
    array, text = "Array", docstring(op, "torch")
    taken = inspect.signature(op.check).parameters
    result = "tuple[" + ", ".join([array] * len(op.outputs)) + "]" if len(op.outputs) > 1 else array
    arguments = [f"{name}: {array}" for name in op.inputs]
    for name, option in signature(op, array, result).parameters.items():
        if name not in op.inputs:
            kind = inspect.formatannotation(taken[name].annotation).rpartition(".")[2]
            default = getattr(option.default, "name", None)
            shown = f"Rounding.{default}" if default else repr(option.default)
            arguments.append(f"{name}: {kind}" + ("" if option.default is option.empty else f" = {shown}"))
    return f"def {op.name}({', '.join(arguments)}) -> {result}:\n    {ast.unparse(ast.Constant(text))}\n"


def family(op: KernelOp) -> str:
    return op.check.__module__.split(".")[1]


def ops_page() -> str:
    """One section per family, in the order of the registry."""
    lines = []
    for title, ops in groupby(OPS.values(), key=family):
        lines += [f"## {title}\n", *(directive(f"ops.{op.name}") for op in ops)]
    return "\n".join(lines)


def on_startup(command: str, dirty: bool) -> None:
    STUBS.parent.mkdir(parents=True, exist_ok=True)  # mkdocstrings drops a path that does not exist


def on_pre_build(config: Any) -> None:
    STUBS.write_text("\n\n".join(["from enum import IntEnum", *(stub(op) for op in OPS.values())]))


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    if (write := PARTS.get(page.file.src_uri)) is None:
        return markdown
    if NOTE not in markdown:
        raise PluginError(f"{page.file.src_uri} lacks the sentence {NOTE}")
    return markdown.replace(NOTE, write())


PARTS: dict[str, Callable[[], str]] = {
    **{f"api/{frontend}.md": partial(frontend_page, frontend) for frontend in FRONTENDS},
    "api/shared.md": shared_page,
    "api/ops.md": ops_page,
}
"""Page -> what is added to it."""
