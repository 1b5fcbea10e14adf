"""`make faults` runs rarely: the functions and the tokens that it changes are in today's code."""

from pathlib import Path

import pytest

from .fault import Drop, Fault, Swap, Unwrap
from .faults import FAULTS

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
    assert (ROOT / "tests" / fault.tests.split()[0].split("::")[0]).exists()


@pytest.mark.parametrize(
    ("where", "change", "old", "new"),
    [
        ("x.py:Class.method", Swap("+", "-"), "add(a + b, b) + b", "add(a - b, b) + b"),
        ("x.py:Class.method", Swap("+", "-", 1), "add(a + b, b) + b", "add(a + b, b) - b"),
        ("x.py:other", Swap("+", "-"), "return a + b", "return a - b"),
        ("x.py:Class.method", Unwrap("add", 1), "add(a + b, b) + b", "a + b + b"),
        ("x.py:Class.method", Drop("add"), "        add(a)  #", "        pass  #"),
        ("x.cc:f", Swap("1", "0"), "a += 1;", "a += 0;"),
        ("x.cc:f", Swap("+", "-"), "return a + 1", "return a - 1"),
        ("x.cc:f", Swap("+=", "="), "{ a += 1; }", "{ a = 1; }"),
    ],
)
def test_changes(where: str, change: Swap | Unwrap | Drop, old: str, new: str) -> None:
    source = PYTHON if where.startswith("x.py") else CPP
    assert Fault("", where, change, "").applied(source) == source.replace(old, new)


def test_a_token_that_is_not_there() -> None:
    for where, change in (("x.py:other", Swap("-", "+")), ("x.cc:f", Swap("+", "-", 1)), ("x.py:other", Drop("add"))):
        with pytest.raises(IndexError):
            Fault("", where, change, "").applied(PYTHON if where.startswith("x.py") else CPP)
