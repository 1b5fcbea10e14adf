"""CONTRIBUTING: its files exist, its walks follow the imports, and the answers to "Where is ..." define their names.

    walk      file, file, ...                  a file before it imports or includes each file, or names it
    answer    question -> file: name           the frontend imports the file, and the file defines the name
    room      in the order of tests/test_imports.py

A path is relative to the root, or to the frontend of its walk or column.
"""

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from ..test_imports import CORE, FRONTENDS, ROOMS, ROOT, imports

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
SUFFIX = r"\.(?:py|cc|cu|cuh|h|def)"
CODE = re.compile(r"`([^`]+)`")


def found(name: str, *folders: str) -> Path | None:
    """The file of a path in the root or in one of the frontends."""
    return next((path for folder in ("", *folders) if (path := ROOT / folder / name).is_file()), None)


def section(page: str, title: str) -> str:
    return re.split(r"\n#", page.partition(f"\n{title}")[2].partition("\n")[2])[0]


def is_file(code: str) -> bool:
    return re.fullmatch(rf"[\w./]+{SUFFIX}", code) is not None


def file_of(module: str) -> Path | None:
    """The file of `torch_frontend.ops.call.RUN`, a module or a name in it."""
    parts = module.split(".")
    for n in range(len(parts), 0, -1):
        if path := found("/".join(parts[:n]) + ".py") or found("/".join([*parts[:n], "__init__.py"])):
            return path
    return None


def named_modules(path: Path) -> Iterator[Path]:
    """Files that strings name: `import_module(f".forms.{name}")`, and the kernel of a plan, "fold.kernel:function"."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.Constant) or not isinstance(node.value, str):
            continue
        if folder := re.fullmatch(r"\.(\w+)\.", node.value):
            yield from (path.parent / folder[1]).glob("*.py")
        elif kernel := re.fullmatch(r"([\w.]+):\w+", node.value):
            yield from filter(Path.is_file, [CORE / f"{kernel[1].replace('.', '/')}.py"])


@cache
def reached(path: Path) -> frozenset[Path]:
    """What a file imports. C++: what it includes, directly or not. The list of an op table: the files of its ops."""
    text = path.read_text()
    if path.suffix == ".py":
        own = {file for module, _ in imports(path) if (file := file_of(module))} | {*named_modules(path)}
        if path == ROOT / "cpp_bindings" / "__init__.py":
            own |= {*path.parent.glob("*.cc")}  # of the extension
        return frozenset(own)
    if path.suffix == ".def":
        ops = "|".join(re.findall(r"^MXEP_\w+\((\w+)", text, re.MULTILINE))
        kernels = CORE.rglob("*.cu" if path.parent.name == "cuda" else "*.cc")
        return frozenset(file for file in kernels if re.search(rf"^void ({ops})\(const Call&", file.read_text(), re.M))
    direct = {
        file for name in re.findall(r'#include "(.+)"', text) if (file := found(name, "core_kernels", "cpp_bindings"))
    }
    return frozenset(direct.union(*map(reached, direct)))


@cache
def below(frontend: str) -> frozenset[Path]:
    """All Python files that the frontend imports, directly or not."""
    done: set[Path] = set()
    new = {ROOT / frontend / "__init__.py"}
    while new:
        done |= new
        new = {file for path in new for file in reached(path) if file.suffix == ".py"} - done
    return frozenset(done)


def defines(path: Path, name: str) -> bool:
    if path.suffix != ".py":
        return re.search(rf"\b(class|struct|void) {name}\b", path.read_text()) is not None
    names: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return name in names


def walks(page: str) -> dict[str, list[str]]:
    """Frontend -> the files of its walk, in order: the code before the colon of each step."""
    of = {"torch_frontend": "### PyTorch", "jax_frontend": "### JAX"}
    steps = {name: re.findall(r"^\d+\. (.*?): ", section(page, title), re.MULTILINE) for name, title in of.items()}
    return {name: [code for step in lines for code in CODE.findall(step)] for name, lines in steps.items()}


def answers(page: str) -> list[tuple[str, str, str, list[str]]]:
    """(question, frontend, file, names) of each answer."""
    rows = [line.strip("| ").split(" | ") for line in section(page, "## Where is ...").splitlines() if "`" in line]
    listed = []
    for question, *cells in rows:
        for frontend, cell in zip(FRONTENDS, cells, strict=True):
            for code in CODE.findall(cell):
                if is_file(code):
                    listed.append((question, frontend, code, []))
                else:
                    listed[-1][-1].append(code)
    return listed


def errors(page: str) -> list[str]:
    """Why the page misleads its reader."""
    wrong = [
        f"{code}: no such file"
        for code in CODE.findall(page)
        if "/" in code and is_file(code) and not found(code, *FRONTENDS)
    ]
    for frontend, names in walks(page).items():
        paths = [found(name, frontend) for name in names]
        for n, path in enumerate(paths[1:], 1):
            if path is None or not any(before and path in reached(before) for before in paths[:n]):
                wrong.append(f"{frontend}: {names[n]}: no file before it imports it")
    for question, frontend, name, defined in answers(page):
        path = found(name, frontend)
        if path is None or (path.suffix == ".py" and path not in below(frontend)):
            wrong.append(f"{question}: {name}: {frontend} does not import it")
        elif missing := [of for of in defined if not defines(path, of)]:
            wrong.append(f"{question}: {name} does not define {missing}")
        if not defined:
            wrong.append(f"{question}: {name}: no name")
    return wrong


def test_the_page_leads_to_the_code() -> None:
    assert not errors(PAGE)


def test_the_page_is_short() -> None:
    lines = PAGE.splitlines()
    assert len(lines) <= 150
    assert not [line for line in lines if len(line) > 160]


def test_the_page_has_walks_down_to_a_kernel_and_twelve_answers() -> None:
    for names in walks(PAGE).values():
        assert len(names) > 20
        assert {"cpp_bindings/cuda.cc", "core_kernels/grouped_gemm/folded/cuda_fp8_sm90.cu"} <= set(names)
    assert len({question for question, *_ in answers(PAGE)}) == 12


def test_the_rooms_are_in_the_order_of_imports() -> None:
    assert tuple(re.findall(r"^\| `(\w+)` \|", section(PAGE, "### Rooms of a frontend"), re.MULTILINE)) == ROOMS


def test_a_wrong_page_is_found() -> None:
    for right, wrong in (
        ("`exchange/counts.py`", "`exchange/count.py`"),  # no such file
        ("1. `layer/parallel.py`", "1. `layer/metrics.py`"),  # a file that does not import what follows
        ("`ends_of`", "`end_of`"),  # a name that the file does not define
    ):
        assert right in PAGE
        assert errors(PAGE.replace(right, wrong)), wrong
