"""The allowed imports, read from the source; and a test that importing one framework does not import the other.

core_kernels   -> standard library, numpy, triton       an oracle: numpy, ml_dtypes, formats and other oracles alone
cpp_bindings   -> its own extension
torch_frontend -> core_kernels, cpp_bindings, torch     transformers and torchtitan in a file each, which no other
                                                        imports outside of functions
jax_frontend   -> core_kernels, cpp_bindings, jax       jax_triton in one file, inside a function

Inside a frontend an import points to the same room or to one before it:

    ops < products < routing < exchange < overlap < layer < integrations

Inside core_kernels a family imports itself, the shared files and the families below it; so do folders of a family.
C++ and CUDA headers follow the same arrows. The files of `policy` are for frontends alone.

    quantize   permute   routing   scale_layout
       ^
       |---- combine      peer --> fold, grouped_gemm, swiglu
       '---- fold <---- grouped_gemm, swiglu --> quantize                reference --> the oracles of all families
             fold ----> permute

    oracle.py --> formats, oracles     kernel.py --> formats, shared Triton functions, kernels     plan.py --> no kernel
    cases.py --> formats, oracles and cases of any family, and no file imports it but another cases.py
    conformance --> oracles and cases of all families, and the registry: numpy and ml_dtypes alone
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
PARTS = {
    "core_kernels": {"numpy", "triton"},
    "cpp_bindings": {"cpp_bindings"},
    "torch_frontend": {"numpy", "torch", "core_kernels", "cpp_bindings"},
    "jax_frontend": {"numpy", "jax", "core_kernels", "cpp_bindings"},
}
FRONTENDS = ("torch_frontend", "jax_frontend")
ROOMS = ("ops", "products", "routing", "exchange", "overlap", "layer", "integrations")
"""Folders of a frontend; a file imports its own room and those before it."""
FILES = [path for part in PARTS for path in sorted((ROOT / part).rglob("*.py"))]

CORE = ROOT / "core_kernels"
BELOW = {
    "policy": {"router"},
    "quantize": set(),
    "permute": set(),
    "routing": set(),
    "scale_layout": set(),
    "fold": {"quantize", "permute"},
    "swiglu": {"quantize", "fold"},
    "router": {"swiglu", "grouped_gemm"},
    "combine": {"quantize"},
    "peer": {"fold", "swiglu", "grouped_gemm"},
    "grouped_gemm": {"quantize", "fold"},
}
"""The families that each family may import."""
BELOW["reference"] = set(BELOW) - {"policy"}
BELOW["conformance"] = set(BELOW) - {"policy"}
INSIDE = {
    "fold": ("", "both", "matrix", "gathered"),
    "swiglu": ("", "backward", "folded"),
    "grouped_gemm": ("", "schedule", "exact", "folded", "blockwise"),
    "peer": ("", "programs", "group"),
}
"""Folders of a family, "" its own files; a file imports its own folder and those before it."""
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


def is_cases(path: Path) -> bool:
    return path.name == "cases.py"


def is_conformance(path: Path) -> bool:
    return path.parent == CORE / "conformance"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_imports_only_what_its_part_allows(path: Path) -> None:
    part = path.relative_to(ROOT).parts[0]
    allowed = PARTS[part] | {part} | sys.stdlib_module_names
    if part == "core_kernels" and (is_oracle(path) or is_cases(path) or is_conformance(path)):
        allowed = allowed - {"triton"} | {"ml_dtypes"}
    for module, lazy in imports(path):
        if top(module) == "flax" and name_of(path).startswith("jax_frontend/integrations/nnx"):
            continue  # which no other file imports
        if top(module) == "jax_triton":
            assert (part, lazy) == ("jax_frontend", True), f"{module}: only lazily, in the JAX frontend"
            continue
        if top(module) == "pytest":
            assert name_of(path) == "core_kernels/conformance/pytest_plugin.py", f"{module}: in the plugin alone"
            continue
        if top(module) in ("transformers", "torchtitan"):
            only = f"torch_frontend/integrations/{top(module)}.py"
            assert name_of(path) == only, f"{module}: in {only} alone"
            continue
        assert top(module) in allowed, f"{module}: {part} may import {sorted(PARTS[part])}"


def rooms_of(frontend: str) -> list[str]:
    """The frontend's folders, in the order of ROOMS."""
    folders = {path.parent.name for path in (ROOT / frontend).glob("*/__init__.py")}
    assert folders <= set(ROOMS), f"{frontend}: folders that ROOMS lacks: {sorted(folders - set(ROOMS))}"
    return [room for room in ROOMS if room in folders]


@pytest.mark.parametrize("path", [path for path in FILES if name_of(path).startswith(FRONTENDS)], ids=name_of)
def test_an_import_of_a_frontend_points_down(path: Path) -> None:
    frontend, *folders, _ = path.relative_to(ROOT).parts
    rooms = rooms_of(frontend)
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] != frontend or not folders:
            continue
        assert parts[1] in rooms, f"{module}: import a module of a room"
        below = rooms[: rooms.index(folders[0]) + 1]
        assert parts[1] in below, f"{module}: {folders[0]} may import {below}"


def core_imports(path: Path) -> Iterator[tuple[str, str]]:
    """(folder or "", file) of every import of core_kernels: "fold/both", "plan" or "", "formats"."""
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] != "core_kernels":
            continue
        files = [n for n in range(2, len(parts) + 1) if CORE.joinpath(*parts[1:n]).with_suffix(".py").exists()]
        assert files, f"{module}: import a file, then its names"
        yield "/".join(parts[1 : files[-1] - 1]), parts[files[-1] - 1]


def family_of(folder: str) -> str:
    return folder.partition("/")[0]


def check_folders(folder: str, imported: str) -> None:
    """Folders below core_kernels of a file and of what it imports."""
    family = family_of(folder)
    if family_of(imported) != family:
        assert family_of(imported) in BELOW[family], f"{imported}: {family} may import {sorted(BELOW[family])}"
    elif family in INSIDE:
        order = INSIDE[family]
        below = order[: order.index(folder.partition("/")[2]) + 1]
        assert imported.partition("/")[2] in below, f"{imported}: {folder} may import {below}"


@pytest.mark.parametrize("path", sorted(CORE.rglob("*.py")), ids=name_of)
def test_a_family_imports_itself_and_families_below_it(path: Path) -> None:
    """Files at the top of core_kernels import each other, and the registry imports plans; oracles import formats and
    oracles, kernels no plan, plans no kernel: a machine without triton can ask every op for its shapes."""
    own = str(path.parent.relative_to(CORE)) if path.parent != CORE else ""
    for folder, file in core_imports(path):
        assert file != "registry" or folder or is_conformance(path), "the registry is for frontends and conformance"
        if path.name == "registry.py":
            assert not folder or file.startswith("plan"), f"{folder}.{file}: plans"
        elif path.name.startswith("plan"):
            assert not file.startswith("kernel"), f"{folder}.{file}: KernelOp names its kernel"
        if path.name == "registry.py":
            continue
        if not own:
            assert folder == "", f"{folder}.{file}: a shared file imports no family"
        elif folder:
            assert is_cases(path) or is_conformance(path) or file != "cases", f"{folder}.{file}: cases are for tests"
            if not is_cases(path):
                check_folders(own, folder)
        if is_cases(path):
            allowed = file in ("cases", "formats") or is_oracle(CORE / folder / f"{file}.py")
            assert allowed, f"{file}: formats, oracles and cases"
        if is_oracle(path):
            assert file == "formats" or is_oracle(CORE / folder / f"{file}.py"), f"{file}: formats and oracles"
        if path.name.startswith("kernel"):
            allowed = file.startswith("kernel") if folder else file in SHARED_TRITON
            assert allowed, f"{folder}.{file}: {sorted(SHARED_TRITON)} and kernels"


def test_every_family_is_listed() -> None:
    folders = {path.name for path in CORE.iterdir() if (path / "__init__.py").exists()}
    assert folders == set(BELOW)
    assert all(below <= set(BELOW) for below in BELOW.values())
    inside = {path.parent for path in CORE.rglob("*.*") if "__pycache__" not in path.parts}
    nested = {family: {folder.name for folder in inside if folder.parent == CORE / family} for family in BELOW}
    assert {family: names for family, names in nested.items() if names} == {
        family: set(order) - {""} for family, order in INSIDE.items()
    }


SOURCES = sorted(path for path in CORE.rglob("*.*") if path.suffix in (".h", ".cc", ".cuh", ".cu"))


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_cpp_file_includes_its_family_and_families_below_it(path: Path) -> None:
    own = str(path.parent.relative_to(CORE)) if path.parent != CORE else ""
    for include in re.findall(r'#include "([^"]+)"', path.read_text()):
        assert (CORE / include).exists(), f"{include}: includes begin at core_kernels"
        folder = include.rpartition("/")[0]
        if family_of(own) not in BELOW:
            assert folder in ("", own), f"{include}: a shared file includes no family"
        elif folder not in {"", *CPP_SHARED}:
            check_folders(own, folder)


def test_jax_triton_is_named_in_one_file() -> None:
    users = [path.name for path in FILES if any(top(module) == "jax_triton" for module, _ in imports(path))]
    assert len(users) <= 1, users


ONLY_TORCH: dict[str, set[str]] = {
    "ops": {"differentiable", "direct", "mx_tensor", "ranges", "register", "settings"},
    "products": {"backward_operands", "gathered_rows", "gathered_weights"},
    "exchange": {"counts", "exchange", "process_groups", "shards"},
    "layer": {"cached_weights", "convert_linear", "experts", "fsdp", "metrics", "parallel", "quantized_gather"},
    "integrations": {"convert", "frozen", "packed_experts", "packed_ffn", "torchtitan", "transformers"},
}
ONLY_JAX: dict[str, set[str]] = {
    "ops": {"derivatives", "mesh", "mx_array", "remat", "shapes", "split", "triton"},
    "products": {"gathers", "ragged_dot"},
    "routing": {"overflow"},
    "exchange": {
        "device_exchange",
        "local",
        "peer_exchange",
        "peer_experts",
        "peer_memory",
        "peer_rows",
        "processes",
        "rounds",
        "rows",
    },
    "layer": {"moe_layer", "moe_params", "shared_gate"},
    "integrations": {"nnx", "nnx_linear"},
}
"""Tensor subclasses, modules, process groups and torchao's signatures in torch; arrays, meshes, parameters as trees,
static capacities, jax.lax.ragged_dot and roundings that XLA keeps in JAX."""


@pytest.mark.parametrize("room", ROOMS)
def test_the_frontends_use_the_same_file_names(room: str) -> None:
    """A function of both frontends is in files of the same name."""
    rooms = [ROOT / part / room for part in FRONTENDS]
    torch_files, jax_files = ({str(p.relative_to(r).with_suffix("")) for p in r.rglob("*.py")} for r in rooms)
    if torch_files and jax_files:
        assert torch_files - jax_files == ONLY_TORCH.get(room, set())
        assert jax_files - torch_files == ONLY_JAX.get(room, set())


FOLDERS = sorted(
    {path.parent for part in (*PARTS, "tests", "benchmarks") for path in (ROOT / part).rglob("*") if path.is_file()}
)
MOST_FILES = 15


@pytest.mark.parametrize("folder", [f for f in FOLDERS if f.name != "__pycache__"], ids=name_of)
def test_a_folder_is_read_at_a_glance(folder: Path) -> None:
    """At most MOST_FILES files; none begins with one underscore but the extension and its types."""
    names = [path.name for path in folder.iterdir() if path.is_file() and path.suffix not in (".so", ".pyc")]
    assert len(names) <= MOST_FILES, sorted(names)
    assert not [name for name in names if re.match(r"_[a-z]", name) and name != "_ops.pyi"]


@pytest.mark.parametrize(
    ("modules", "forbidden"),
    [
        # torch imports triton itself, through torch._dynamo, wherever it is installed.
        (["torch_frontend"], ["jax", "jaxlib", "jax_triton", "flax", "transformers", "torchtitan"]),
        (["jax_frontend"], ["torch", "triton", "jax_triton", "flax"]),
        (
            [
                "conformance",
                *(
                    ".".join(path.relative_to(ROOT).with_suffix("").parts)
                    for path in sorted((*CORE.rglob("oracle.py"), *CORE.rglob("cases.py")))
                ),
            ],
            ["torch", "jax", "triton"],
        ),
    ],
    ids=["torch_frontend", "jax_frontend", "oracles, cases and conformance"],
)
def test_importing_does_not_drag_in(modules: list[str], forbidden: list[str]) -> None:
    """In one process for all oracles and cases: none of them does if all of them do not."""
    lines = [f"import mxep.{module}" for module in modules]
    code = "\n".join(["import sys", *lines, f"print([m for m in {forbidden} if m in sys.modules])"])
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (ran.stdout.strip(), ran.returncode) == ("[]", 0), ran.stderr
