"""A seeded fault: a function, and what changes in it.

where     file:function     a method is Class.name; C++ too
change    Swap or Unwrap
tests     a selection below tests/, one of which has to fail
"""

import ast
import io
import re
import tokenize
from pathlib import Path
from typing import NamedTuple

CPP_TOKEN = re.compile(
    r"""//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])'|[A-Za-z_]\w*|\d[\w.]*"""
    r"""|<<=|>>=|[-+*/%&|^=!<>]=|&&|\|\||<<|>>|\+\+|--|->|::|\S""",
    re.DOTALL,
)
Span = tuple[int, int]
"""Of characters of a file."""


class Swap(NamedTuple):
    """A token, the `number`th of its kind in the function from 0 on, becomes `new`."""

    old: str
    new: str
    number: int = 0


class Unwrap(NamedTuple):
    """A call of `name` becomes its first argument."""

    name: str
    number: int = 0


class Fault(NamedTuple):
    says: str
    where: str
    change: Swap | Unwrap
    tests: str

    @property
    def file(self) -> str:
        return self.where.partition(":")[0]

    @property
    def family(self) -> str:
        """The ops of a folder of core_kernels, a room of a frontend, or cpp_bindings."""
        return "/".join(Path(self.file).parts[:-1][:2])

    @property
    def interpreter(self) -> bool:
        """A kernel in Triton: the selection runs in its interpreter."""
        return Path(self.file).name.startswith("kernel")

    @property
    def compiled(self) -> bool:
        return self.file.endswith(".cc")

    def applied(self, source: str) -> str:
        """The file's text with the fault."""
        function = self.where.partition(":")[2]
        (begin, end), new = self._python(source, function) if self.file.endswith(".py") else self._cpp(source, function)
        return source[:begin] + new + source[end:]

    def _cpp(self, source: str, function: str) -> tuple[Span, str]:
        assert isinstance(self.change, Swap), self.where
        begin, end = cpp_function(source, function)
        found = [m.span() for m in CPP_TOKEN.finditer(source, begin, end) if m[0] == self.change.old]
        return found[self.change.number], self.change.new

    def _python(self, source: str, function: str) -> tuple[Span, str]:
        lines = [0, *(m.end() for m in re.finditer("\n", source))]

        def span(node: ast.AST) -> Span:
            begin, end = (lines[line - 1] + column for line, column in ends(node))
            return begin, end

        node = python_function(ast.parse(source), function)
        change, (begin, end) = self.change, span(node)
        if isinstance(change, Swap):
            tokens = tokenize.generate_tokens(io.StringIO(source).readline)
            found = [(lines[t.start[0] - 1] + t.start[1], lines[t.end[0] - 1] + t.end[1])
                     for t in tokens if t.string == change.old]  # fmt: skip
            return [(b, e) for b, e in found if begin <= b < end][change.number], change.new
        call = sorted((n for n in ast.walk(node) if called(n) == change.name), key=span)[change.number]
        assert isinstance(call, ast.Call)
        begin, end = span(call.args[0])
        return span(call), source[begin:end]


def ends(node: ast.AST) -> tuple[Span, Span]:
    """(line, column) of the begin and of the end. Sources are ASCII where faults are."""
    assert isinstance(node, ast.expr | ast.stmt)
    assert node.end_lineno is not None
    assert node.end_col_offset is not None
    return (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def called(node: ast.AST) -> str | None:
    function = node.func if isinstance(node, ast.Call) else None
    return (
        function.attr
        if isinstance(function, ast.Attribute)
        else function.id
        if isinstance(function, ast.Name)
        else None
    )


def python_function(node: ast.AST, name: str) -> ast.AST:
    for part in name.split("."):
        kinds = ast.FunctionDef, ast.ClassDef
        (node,) = (n for n in ast.walk(node) if isinstance(n, kinds) and n.name == part)
    return node


def cpp_function(source: str, name: str) -> Span:
    """From the name of its first definition to the end of its body."""
    tokens = [token for token in CPP_TOKEN.finditer(source) if not token[0].startswith(("//", "/*"))]
    words = [token[0] for token in tokens]

    def closing(opening: int) -> int:
        depth = 0
        for i in range(opening, len(words)):
            depth += (words[i] in "([{") - (words[i] in ")]}")
            if not depth:
                return i
        raise ValueError(f"{name}: a bracket is not closed")

    for i, word in enumerate(words):
        if word == name and words[i + 1] == "(":
            body = closing(i + 1) + 1
            body += words[body] == "const"
            if words[body] == "{":
                return tokens[i].start(), tokens[closing(body)].end()
    raise ValueError(f"no definition of {name}")
