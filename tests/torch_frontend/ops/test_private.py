"""Private names of torch: all in one file of a room, and the same bytes without any of them."""

import ast
import json
import subprocess
import sys

import pytest

from . import without_private
from .without_private import FILES, HALVES, PACKAGE


def digests(*what: str) -> dict[str, str]:
    """The digests of without_private.py, by what is hidden."""
    run = subprocess.run([sys.executable, without_private.__file__, *what], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_a_layer_has_the_same_bytes_without_all() -> None:
    found = digests("cpu")
    assert len(found[""]) == 64, found[""]
    assert found["all"] == found[""]


@pytest.mark.slow
def test_a_layer_without_half_of_them_and_ranks_without_all_have_the_same_bytes() -> None:
    found = digests("cpu", "more")
    want, ranks, without = (found.pop(name) for name in ("", "ranks", "ranks all"))
    assert len(want) == 64, want
    assert found == dict.fromkeys(HALVES, want)
    assert len(set(ranks.split())) == 2, ranks  # other tokens on every rank
    assert without == ranks


def test_no_other_file_names_a_private_part_of_torch() -> None:
    for path in {*PACKAGE.rglob("*.py")} - {PACKAGE / file for file in FILES}:
        tree = ast.parse(path.read_text())
        assert not list(private_names(tree)), path
        assert "private" not in [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)], path


def test_private_names_are_found() -> None:
    source = "import torch._x\nfrom torch.a import _b\nfrom torch import _C as c\ntorch.a._d.e\nx._version\ny._base\n"
    found = list(private_names(ast.parse(source + "from . import _ours\nself._own\nTensor._new(x)\ntorch.a.b\n")))
    assert found == ["torch._x", "torch.a._b", "torch._C", "torch.a._d.e", "x._version", "y._base", "Tensor._new"]


TENSOR_ATTRIBUTES = ("_version", "_base")


def private_names(tree: ast.AST) -> list[str]:
    """Dotted names below torch with a part that begins with one underscore; private attributes of tensors."""
    names = []
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in sorted(ast.walk(tree), key=lambda n: getattr(n, "lineno", 0)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names += [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute) and id(node) not in inner:
            names.append(ast.unparse(node))
    return [name for name in names if is_private(name)]


def is_private(name: str) -> bool:
    parts = name.split(".")
    if parts[0] in ("torch", "Tensor", "dist", "nn"):
        return any(part.startswith("_") and not part.startswith("__") for part in parts)
    return parts[-1] in TENSOR_ATTRIBUTES
