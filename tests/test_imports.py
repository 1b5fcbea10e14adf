"""The allowed imports, read from the source; and a test that importing one framework does not import the other.

core_kernels   -> standard library, numpy, triton       an oracle: numpy, ml_dtypes, formats and other oracles alone
cpp_bindings   -> its own extension
torch_frontend -> core_kernels, cpp_bindings, torch     transformers and torchtitan in a file each, which no other
                                                        imports outside of functions
jax_frontend   -> core_kernels, cpp_bindings, jax       jax_triton in one file, inside a function

Inside core_kernels a family imports itself, the shared files and the families below it; C++ and CUDA headers follow
the same arrows.

    quantize   permute   routing   scale_layout
       ^
       |---- combine <-- peer (its oracle)
       '---- fold <---- grouped_gemm, swiglu --> quantize                reference --> the oracles of all families
             fold ----> permute

    oracle.py --> formats, oracles     kernel.py --> formats, shared Triton functions, kernels     plan.py --> no kernel
"""

import ast
import re
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

CORE = ROOT / "core_kernels"
BELOW = {
    "quantize": set(),
    "permute": set(),
    "routing": set(),
    "scale_layout": set(),
    "fold": {"quantize", "permute"},
    "swiglu": {"quantize", "fold"},
    "router": {"swiglu", "grouped_gemm"},
    "combine": {"quantize"},
    "peer": {"combine"},
    "grouped_gemm": {"quantize", "fold"},
}
"""The families that each family may import."""
BELOW["reference"] = set(BELOW)
SHARED_TRITON = {"formats", "mx_math", "tokens"}
"""The files at the top of core_kernels that a Triton kernel may import."""
CPP_SHARED = {"cpu", "cuda"}
"""The folders of C++ and CUDA files that all families share."""


class Import(NamedTuple):
    module: str  # dotted, from the root of the repository for our own
    lazy: bool  # inside a function


def imports(path: Path) -> Iterator[Import]:
    """Every import of the file; `from ..core_kernels import formats` reads as `core_kernels.formats`."""
    package = path.relative_to(ROOT).parent.parts

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, lazy) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                base = [*package[: len(package) - child.level + 1]] if child.level else []
                base += [child.module] if child.module else []
                yield from (Import(".".join([*base, alias.name]), lazy) for alias in child.names)
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from visit(child, lazy or inside)

    return visit(ast.parse(path.read_text()), False)


def top(module: str) -> str:
    return module.partition(".")[0]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_oracle(path: Path) -> bool:
    return path.parent.name == "reference" or path.name.startswith("oracle")


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_its_room_allows(path: Path) -> None:
    room = path.relative_to(ROOT).parts[0]
    allowed = ROOMS[room] | {room} | sys.stdlib_module_names
    if room == "core_kernels" and is_oracle(path):
        allowed = allowed - {"triton"} | {"ml_dtypes"}
    for module, lazy in imports(path):
        if (room, path.name, top(module)) == ("jax_frontend", "nnx.py", "flax"):
            continue  # which no other file imports
        if top(module) == "jax_triton":
            assert (room, lazy) == ("jax_frontend", True), f"{module}: only lazily, in the JAX frontend"
            continue
        if top(module) in ("transformers", "torchtitan"):
            only = f"torch_frontend/{top(module)}.py"
            assert name_of(path) == only, f"{module}: in {only} alone"
            continue
        assert top(module) in allowed, f"{module}: {room} may import {sorted(ROOMS[room])}"


def core_imports(path: Path) -> Iterator[tuple[str, str]]:
    """(folder or "", file) of every import of core_kernels: "fold", "plan" or "", "formats"."""
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "core_kernels":
            continue
        if (CORE / f"{parts[1]}.py").exists():
            yield "", parts[1]
        else:
            assert (CORE / parts[1] / f"{parts[2]}.py").exists(), f"{module}: import a file, then its names"
            yield parts[1], parts[2]


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=name_of)
def test_a_family_imports_itself_and_families_below_it(path: Path) -> None:
    """Files at the top of core_kernels import each other, and the registry imports plans; oracles import formats and
    oracles, kernels no plan, plans no kernel: a machine without triton can ask every op for its shapes."""
    family = path.parent.name if path.parent != CORE else ""
    for folder, file in core_imports(path):
        assert file != "registry" or folder, "the registry is for frontends"
        if path.name == "registry.py":
            assert not folder or file.startswith("plan"), f"{folder}.{file}: plans"
        elif path.name.startswith("plan"):
            assert not file.startswith("kernel"), f"{folder}.{file}: KernelOp names its kernel"
        if path.name == "registry.py":
            continue
        if not family:
            assert folder == "", f"{folder}.{file}: a shared file imports no family"
        elif folder not in ("", family):
            assert folder in BELOW[family], f"{folder}.{file}: {family} may import {sorted(BELOW[family])}"
        if is_oracle(path):
            assert file == "formats" or is_oracle(CORE / folder / f"{file}.py"), f"{file}: formats and oracles"
        if path.name.startswith("kernel"):
            allowed = file.startswith("kernel") if folder else file in SHARED_TRITON
            assert allowed, f"{folder}.{file}: {sorted(SHARED_TRITON)} and kernels"


def test_every_family_is_listed() -> None:
    folders = {path.name for path in CORE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(BELOW)
    assert all(below <= set(BELOW) for below in BELOW.values())


SOURCES = sorted(path for path in CORE.rglob("*.*") if path.suffix in (".h", ".cc", ".cuh", ".cu"))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_cpp_file_includes_its_family_and_families_below_it(path: Path) -> None:
    family = path.parent.name if path.parent != CORE else ""
    for include in re.findall(r'#include "([^"]+)"', path.read_text()):
        assert (CORE / include).exists(), f"{include}: includes begin at core_kernels"
        folder = include.partition("/")[0] if "/" in include else ""
        if family in BELOW:
            assert folder in {"", family} | CPP_SHARED | BELOW[family], f"{include}: {family} includes {BELOW[family]}"
        else:
            assert folder in ("", family), f"{include}: a shared file includes no family"


def test_jax_triton_is_named_in_one_file() -> None:
    users = [path.name for path in FILES if any(top(module) == "jax_triton" for module, _ in imports(path))]
    assert len(users) <= 1, users


NOT_BELOW_PRODUCTS = {
    "torch_frontend": {
        "exchange": {"_counts", "_ranks", "combine", "dispatch", "ep", "exchange", "replicas", "route", "shards"},
        "overlap": {
            "collectives", "copy_engines", "expert_parallel", "local_experts", "overlap", "peer_exchange",
            "peer_memory", "planned_exchange", "symmetric", "transport",
        },
        "layer": {"experts", "fsdp", "metrics", "moe", "numerics", "parallel"},
    },
    "jax_frontend": {
        "exchange": {
            "combine", "dispatch", "ep", "local", "peer_exchange", "peer_memory", "replicas", "route", "rows",
        },
        "layer": {"metrics", "moe", "moe_params", "numerics", "shared_gate"},
    },
}  # fmt: skip
"""Rooms of a frontend above its products, and their files."""


def reached(path: Path) -> set[Path]:
    """The file, the files of its frontend that it imports, and those that these import."""
    room, found, todo = path.relative_to(ROOT).parts[0], set(), [path]
    while todo:
        path = todo.pop()
        if path not in found:
            found.add(path)
            names = (module.split(".") for module, _ in imports(path) if top(module) == room)
            files = ((ROOT / "/".join(parts[:depth])).with_suffix(".py") for parts in names for depth in (2, 3))
            todo += [file for file in files if file.exists()]
    return found


PRODUCTS = {"torch_frontend": ("grouped_mm", "ffn"), "jax_frontend": ("grouped_mm", "ffn", "ragged_dot")}


@pytest.mark.parametrize(("room", "name"), [(room, name) for room, names in PRODUCTS.items() for name in names])
def test_a_product_reaches_no_exchange_and_no_layer(room: str, name: str) -> None:
    (path,) = (ROOT / room).rglob(f"{name}.py")
    below = {file.stem for file in reached(path)}
    assert {"products", "weights"} < below
    for above, files in NOT_BELOW_PRODUCTS[room].items():
        assert not below & files, f"{above}: {sorted(below & files)}"


ONLY_TORCH = {
    "_counts.py", "_differentiable.py", "_direct.py", "_ranges.py", "_ranks.py", "_register.py", "_settings.py",
    "_torch_private.py", "backward_operands.py", "collectives.py", "convert.py", "copy_engines.py", "exchange.py",
    "expert_parallel.py", "experts.py", "fsdp.py", "gathered_rows.py", "local_experts.py", "mx_tensor.py", "overlap.py",
    "packed_experts.py", "packed_ffn.py", "parallel.py", "planned_exchange.py", "shards.py", "symmetric.py",
    "torchtitan.py", "transformers.py", "transport.py",
}  # fmt: skip
ONLY_JAX = {
    "_derivatives.py", "_jax_private.py", "_mesh.py", "_shapes.py", "_split.py", "_triton.py",
    "gathers.py", "local.py", "moe_params.py", "mx_array.py", "nnx.py", "overflow.py", "ragged_dot.py", "remat.py",
    "rows.py", "shared_gate.py",
}  # fmt: skip
"""Tensor subclasses, modules, process groups, tensors that a backward frees and torchao's signatures in torch; arrays,
meshes, parameters as trees, static capacities, jax.lax.ragged_dot and roundings that XLA keeps in JAX."""


def test_the_frontends_use_the_same_file_names() -> None:
    """A function of both frontends is in files of the same name."""
    torch_files, jax_files = ({path.name for path in (ROOT / room).glob("*.py")} for room in list(ROOMS)[2:])
    assert torch_files - jax_files == ONLY_TORCH
    assert jax_files - torch_files == ONLY_JAX


@pytest.mark.parametrize(
    ("module", "forbidden"),
    [
        ("mxep.torch_frontend", ["jax", "jaxlib", "jax_triton", "transformers", "torchtitan"]),
        ("mxep.jax_frontend", ["torch", "jax_triton"]),
        *(
            (f"mxep.core_kernels.{family}.oracle", ["torch", "jax", "triton"])
            for family in sorted(set(BELOW) - {"reference"})
        ),
    ],
)
def test_importing_does_not_drag_in(module: str, forbidden: list[str]) -> None:
    code = f"import sys, {module}; print([m for m in {forbidden} if m in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr
