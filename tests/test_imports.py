"""Who may import whom, read from the source; and that one framework never drags in the other.

core_kernels   -> standard library, numpy, triton       oracle*: ml_dtypes, and of core_kernels formats and oracles
cpp_bindings   -> its own extension
torch_frontend -> core_kernels, cpp_bindings, torch
jax_frontend   -> core_kernels, cpp_bindings, jax       jax_triton in one file, inside a function
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
ROOMS = {
    "core_kernels": {"numpy", "triton"},
    "cpp_bindings": {"cpp_bindings"},
    "torch_frontend": {"numpy", "torch", "core_kernels", "cpp_bindings"},
    "jax_frontend": {"numpy", "jax", "core_kernels", "cpp_bindings"},
}
FILES = [path for room in ROOMS for path in sorted((ROOT / room).rglob("*.py"))]


class Import(NamedTuple):
    module: str  # dotted, from the root of the repository for our own
    lazy: bool  # inside a function


def imports(path: Path) -> Iterator[Import]:
    """Every import of the file; `from ..core_kernels import formats` reads as `core_kernels.formats`."""
    package = path.relative_to(ROOT).parent.parts

    def walk(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = [*package[: len(package) - child.level + 1]] if child.level else []
                base += [child.module] if child.module else []
                yield from (Import(".".join([*base, alias.name]), lazy) for alias in child.names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from walk(child, lazy or inside)

    return walk(ast.parse(path.read_text()), False)


def top(module: str) -> str:
    return module.partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_room_allows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = ROOMS[room] | {room} | sys.stdlib_module_names
    oracle = room == "core_kernels" and path.name.startswith("oracle")
    if oracle:
        allowed = allowed - {"triton"} | {"ml_dtypes"}
    for module, lazy in imports(path):
        if top(module) == "jax_triton":
            assert (room, lazy) == ("jax_frontend", True), f"{module}: only lazily, in the JAX frontend"
            continue
        assert top(module) in allowed, f"{module}: {room} may import {sorted(ROOMS[room])}"
        if oracle and top(module) == "core_kernels":
            assert module.startswith(("core_kernels.formats.", "core_kernels.oracle")), f"{module}: formats and oracles"


def test_jax_triton_is_named_in_one_file() -> None:
    users = [path.name for path in FILES if any(top(module) == "jax_triton" for module, _ in imports(path))]
    assert len(users) <= 1, users


def test_the_frontends_use_the_same_file_names() -> None:
    """Who knows one frontend finds everything in the other; `parallel` is torch's own word (ParallelStyle)."""
    torch_files, jax_files = ({path.name for path in (ROOT / room).glob("*.py")} for room in list(ROOMS)[2:])
    shared = {"__init__.py", "_call.py", "_device.py", "ops.py", "ep.py", "moe.py"}
    assert shared <= torch_files, shared - torch_files
    assert shared <= jax_files, shared - jax_files


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("mxep.torch_frontend", ["jax", "jaxlib", "jax_triton"]),
        ("mxep.jax_frontend", ["torch", "jax_triton"]),
        ("mxep.core_kernels.oracle", ["torch", "jax", "triton"]),
    ],
)
def test_importing_does_not_drag_in(module: str, forbidden: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {forbidden} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr
