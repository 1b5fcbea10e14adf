"""A seeded fault."""

from typing import NamedTuple


class Fault(NamedTuple):
    """`old`, which is once in `file`, becomes `new`; a test of the selection has to fail.

    interpreter: the selection runs in Triton's interpreter. A C++ file is compiled anew.
    """

    says: str
    file: str
    old: str
    new: str
    tests: str
    interpreter: bool = False
