"""`make faults` runs rarely: the functions and the tokens that it changes are in today's code, each family has a fault,
and a fault that no test catches is reported."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from .fault import Fault, Swap, Unwrap
from .faults import FAULTS
from .run import count_missed

ROOT = Path(__file__).parents[2]
PYTHON = """
class Class:
    def method(self, a, b):
        add(a)  # a + b
        return add(a + b, b) + b

def other(a, b):
    return a + b
"""
CPP = """
int f(int a);
// f(x) {
int g() { return f(1); }
int f(int a) const {
  if (a) { a += 1; }  // a += 2
  return a + 1;
}
"""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.says)
def test_a_fault_changes_todays_code(fault: Fault) -> None:
    source = (ROOT / fault.file).read_text()
    changed = fault.applied(source)
    assert changed != source
    if fault.file.endswith(".py"):
        compile(changed, fault.file, "exec")
    assert (ROOT / "tests" / fault.tests.split()[0]).exists()


def test_each_family_has_one_fault() -> None:
    kernels, frontends = ROOT / "core_kernels", ("torch_frontend", "jax_frontend")
    families = {f"core_kernels/{plan.relative_to(kernels).parts[0]}" for plan in kernels.rglob("plan.py")}
    families |= {f"{name}/{room.parent.name}" for name in frontends for room in ROOT.glob(f"{name}/*/__init__.py")}
    assert sorted(fault.family for fault in FAULTS) == sorted(families | {"core_kernels/policy", "cpp_bindings"})


def test_a_fault_that_no_test_catches_is_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a small repository: one fault is caught, one is in a function without a test, one has a test that fails in any
    case, one a test that does not exist."""
    # Two faults of equal size within a second: Python would take the bytecode of the first for the second.
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code, test = tmp_path / "sums.py", tmp_path / "tests" / "test_sums.py"
    test.parent.mkdir()
    code.write_text("def add(a, b):\n    return a + b\n\n\ndef subtract(a, b):\n    return a - b\n")
    test.write_text(
        "from sums import add\n\n\ndef test_add():\n    assert add(2, 1) == 3\n\n\ndef test_no():\n    assert 0\n"
    )
    scratch = SimpleNamespace(root=tmp_path, python=sys.executable)
    change = {"add": Swap("+", "-"), "subtract": Swap("-", "+")}
    faults = [
        Fault("", f"sums.py:{name}", change[name], f"test_sums.py -k {tests}")
        for name, tests in (("add", "test_add"), ("subtract", "test_add"), ("add", "test_no"), ("add", "test_none"))
    ]
    assert count_missed(scratch, faults) == 3  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "sums.py:add: : caught by test_sums.py::test_add\n" in printed
    assert "sums.py:subtract: : MISSED\n" in printed
    assert printed.count("its tests fail without it\n") == 2
    assert printed.endswith("1 of 4 caught\n")
    assert "a + b" in code.read_text()


@pytest.mark.parametrize(
    ("where", "change", "old", "new"),
    [
        ("x.py:Class.method", Swap("+", "-"), "add(a + b, b) + b", "add(a - b, b) + b"),
        ("x.py:Class.method", Swap("+", "-", 1), "add(a + b, b) + b", "add(a + b, b) - b"),
        ("x.py:other", Swap("+", "-"), "return a + b", "return a - b"),
        ("x.py:Class.method", Unwrap("add", 1), "add(a + b, b) + b", "a + b + b"),
        ("x.cc:f", Swap("1", "0"), "a += 1;", "a += 0;"),
        ("x.cc:f", Swap("+", "-"), "return a + 1", "return a - 1"),
        ("x.cc:f", Swap("+=", "="), "{ a += 1; }", "{ a = 1; }"),
    ],
)
def test_changes(where: str, change: Swap | Unwrap, old: str, new: str) -> None:
    source = PYTHON if where.startswith("x.py") else CPP
    assert Fault("", where, change, "").applied(source) == source.replace(old, new)


def test_a_token_that_is_not_there() -> None:
    for where, change in (("x.py:other", Swap("-", "+")), ("x.cc:f", Swap("+", "-", 1)), ("x.py:other", Unwrap("add"))):
        with pytest.raises(IndexError):
            Fault("", where, change, "").applied(PYTHON if where.startswith("x.py") else CPP)
