"""No call expands a tuple whose members have no names: `f(*args)` does not say what f gets."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
BAD = """
def pair(x) -> tuple[int, str]: ...
def backward(ctx, dy, known: tuple[int, str]):
    name, args = "a", (1, dy)
    f(*args), f(*known), f(*pair(1)), f(*ctx.saved_tensors), f(*ctx.rest), f(*known[:1])
"""
GOOD = """
def run(ctx, *args: int, sizes: tuple[int, ...], x, named: Named):
    a, b = ctx.saved_tensors
    tensors = [a, b]
    f(*args, *sizes, *x.shape[:-1], *tensors, *named, *Named.of(x), *(a for _ in x))
"""


def is_unnamed(annotation: ast.expr | None) -> bool:
    """Whether it is a tuple of a fixed length."""
    text = "" if annotation is None else ast.unparse(annotation)
    return text.startswith("tuple[") and not text.endswith(", ...]")


def assigned(target: ast.expr, value: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for one, of_one in zip(target.elts, value.elts, strict=False):
            yield from assigned(one, of_one)
    yield ast.unparse(target), value


def expansions(source: str) -> Iterator[str]:
    """Tuples that a call expands: of a display, a result, a parameter, a slice, or the state of an autograd context."""
    functions = [f for f in ast.walk(ast.parse(source)) if isinstance(f, ast.FunctionDef)]
    unnamed = {f.name for f in functions if is_unnamed(f.returns)}
    returned = lambda x: isinstance(x, ast.Call) and ast.unparse(x.func).rpartition(".")[2] in unnamed  # noqa: E731
    for function in functions:
        nodes, of = list(ast.walk(function)), function.args
        pairs = [p for a in nodes if isinstance(a, ast.Assign) for p in assigned(a.targets[0], a.value)]
        names = {name for name, value in pairs if isinstance(value, ast.Tuple) or returned(value)}
        names |= {a.arg for a in of.args + of.kwonlyargs if is_unnamed(a.annotation)}
        stars = [a.value for c in nodes if isinstance(c, ast.Call) for a in c.args if isinstance(a, ast.Starred)]
        for star, text in ((star, ast.unparse(star)) for star in stars):
            part = isinstance(star, ast.Subscript) and isinstance(star.slice, ast.Slice) and ".shape[" not in text
            if text in names or returned(star) or part or text.startswith("ctx."):
                yield f"*{text}"


def test_no_call_expands_an_unnamed_tuple() -> None:
    assert sorted(expansions(BAD)) == ["*args", "*ctx.rest", "*ctx.saved_tensors", "*known", "*known[:1]", "*pair(1)"]
    assert list(expansions(GOOD)) == []
    folders = ("core_kernels", "cpp_bindings", "jax_frontend", "torch_frontend")
    sources = {str(p): p.read_text() for folder in folders for p in (ROOT / folder).rglob("*.py")}
    assert len(sources) > 200
    assert {path: found for path, source in sources.items() if (found := list(expansions(source)))} == {}
