"""Every case of every C++ op; the cases of any size with few rows; then the same with one broken integer each.

    python -m tests.sanitize.run_cases      prints the number of calls of each kind

tests/conformance compares the values. Here outputs are not read: a sanitizer ends the process, at any access outside of
an array and any undefined operation.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from mxep.core_kernels.cases import Case

from ..cases import CASES, TABLES
from .call import CPP_OPS, Array, call, require_numpy_alone

ROWS = (0, 1, 32, 33)
BROKEN = (-(2**31), -2, -1, 1, 31, 33, 97, 2**30, 2**31 - 1)
"""In place of the first and of the last value of an end, a map or a count, of 32 rows."""


def of_cpp(table: dict[str, Case]) -> dict[str, Case]:
    return {name: case for name, case in table.items() if case.op in CPP_OPS}


def broken(arrays: Sequence[Array]) -> Iterator[list[Array]]:
    for i, x in enumerate(arrays):
        if x.dtype == np.int32 and x.size:
            for value in BROKEN:
                for place in (0, -1):
                    copy = x.copy()
                    copy.flat[place] = value
                    yield [*arrays[:i], copy, *arrays[i + 1 :]]


def main() -> None:
    require_numpy_alone()
    done: Counter[str] = Counter()

    def run(kind: str, case: Case, arrays: Sequence[Array], options: dict[str, Any], shift: int = 0) -> None:
        done[kind] += 1
        try:
            call(CPP_OPS[case.op], arrays, options, shift)
        except ValueError as error:
            if kind != "broken" or not str(error).startswith(f"{case.op}: "):
                raise AssertionError(f"{kind}: {case}") from error
            done["refused"] += 1

    conformance = {name: case for table in TABLES for name, case in table.CONFORMANCE.items()}
    for case in of_cpp(CASES | conformance).values():
        for shift in (0, 1):
            run("cases", case, case.arrays(), case.options_of(), shift)
    for case in of_cpp(CASES).values():
        for rows in ROWS:
            m = -(-rows // case.multiple) * case.multiple
            run("edges", case, case.arrays(1, m), case.options_of(m))
        arrays = case.arrays(2, 32)
        for changed in broken(arrays):
            run("broken", case, changed, case.options_of(32))
        op = CPP_OPS[case.op]
        if op.optional_ends and len(arrays) < len(op.inputs):
            for end in (*ROWS, *BROKEN):
                run("broken", case, [*arrays, np.array([0, end], np.int32)], case.options_of(32))
    print(", ".join(f"{kind}: {number}" for kind, number in done.items()))


if __name__ == "__main__":
    main()
