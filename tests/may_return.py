"""Lists of the values of bad_values.py that may return, per argument: any other that returns was taken in silence.

    ROWS   ("call.argument call.argument ...", May, May, ...)     names with * of `fnmatch`; an argument has one row

Every call of a list returns, else it is struck from the list. This file imports no framework.
"""

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from .bad_values import Case


class May(NamedTuple):
    """Names of bad values that return, and the reason."""

    why: str
    names: tuple[str, ...]


Rows = Sequence[tuple[str | May, ...]]


def may(why: str, *names: str) -> May:
    return May(why, names)


def all_and_one(*numbers: object) -> tuple[str, ...]:
    """The names of arrays of one number, and of those with one such number."""
    return tuple(f"{how} {number}" for number in numbers for how in ("all", "one"))


NONE = may("None is an option, or the default", "None")
ALONE = may("this process alone", "None", "''")
NUMBERS = may("computed as IEEE numbers", *all_and_one("nan", "inf", "-inf", "3e+38"))
LARGE = may("a large number is finite", *all_and_one("3e+38"))
FLOAT32 = may("rows and weights are bf16 or fp32", "float32")
BFLOAT16 = may("rows and weights are bf16 or fp32", "bfloat16")
INT32 = may("indices are int32 or int64", "int32")
INT64 = may("indices are int32 or int64", "int64")
INTEGERS = may("counts and identities have any integer dtype", "int8", "uint8", "int64")
REAL = may("an int is a real number too", "type int", "type float")
ROWS_MORE = may("leading dims are rows", "a dim more")
ROWS_LESS = may("leading dims are rows", "a dim less")
EMPTY = may("nothing to do", "all dims = 0")
NO_VALUES = may("an array of no values is none", "dim 0 = 0", "all dims = 0")
ONE_FOR_ALL = may("one bias for all experts", "a dim less")
NO_ROWS = may("groups without rows", "all 0")
SHORT = may("groups of a row, which are padded, or need no padding", "all 1")
FEWER_GROUPS = may("fewer groups", "dim 0 - 1", "dim 0 = 0", "dim 0 = 1", "all dims = 0")
MORE_GROUPS = may("groups that end where the last one does", "dim 0 + 1", "dim 0 * 2", "dim 0 * 2 + 32", "dim 0 = 0")
COUNTS = may("any counts", *all_and_one(0, 1, 2**30, 2**31 - 1))
BITS = may("bits", *all_and_one(-1, -(2**31), 2**30, 2**31 - 1, 1, 0))


def _sizes(dim: int, why: str, *changes: str) -> May:
    return may(why, *(f"dim {dim} {change}" for change in changes))


def any_size(dim: int) -> May:
    return _sizes(dim, "a free dim", "+ 1", "- 1", "* 2", "* 2 + 32", "= 1", "= 0")


def larger(dim: int) -> May:
    return _sizes(dim, "a free dim, beyond what the other arguments need", "+ 1", "* 2", "* 2 + 32")


def blocks(dim: int) -> May:
    return _sizes(dim, "a free dim of whole blocks", "* 2", "* 2 + 32", "= 0")


def more_blocks(dim: int) -> May:
    return _sizes(dim, "a free dim of whole blocks, one or more", "* 2", "* 2 + 32")


Listed = dict[str, dict[str, str]]
"""argument -> name of a bad value -> why it may return"""


def by_argument(rows: Rows, arguments: Collection[str]) -> Listed:
    """For each "call.argument" the bad values that may return, with the reason. Every name fits an argument, and no
    argument is in two rows."""
    listed: Listed = {}
    for names, *values in rows:
        assert isinstance(names, str)
        for pattern in names.split():
            found = [argument for argument in arguments if fnmatchcase(argument, pattern)]
            assert found, f"{pattern} is no argument"
            for argument in found:
                assert argument not in listed, f"{argument} is in two rows"
                listed[argument] = {name: of.why for of in values if isinstance(of, May) for name in of.names}
    return listed


def verdict(may: Listed, case: Case, returned: bool) -> str:
    """The error of a call that returned, or raised as it should; "" if the list says the same."""
    why = may.get(f"{case.call}.{case.argument}", {}).get(case.bad.name)
    if returned == (why is not None):
        return ""
    return "returned, and no list says why" if returned else f"raised, and a list says why it returns: {why}"
