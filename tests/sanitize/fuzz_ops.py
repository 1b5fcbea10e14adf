"""Random calls of the C++ ops, valid and slightly invalid: python -m tests.sanitize.fuzz_ops --seconds 10

    a case = (seed, number) --> op, arrays, options of DRAWS
        a third of them: one value, shape, dtype or option is replaced    --> an error of the op, or any result
        the others     --> the bytes of the definition, or its bound for a sum; an error of C++ is a failure

A failure prints the case and the command that runs it alone. It runs in a process of its own, so that the end of the
process by a sanitizer is a failure as any other.
"""

import argparse
import itertools
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
from mxep.core_kernels.cases import Rng, fixed
from mxep.core_kernels.conformance.check import BOUNDS, Definition, same_bytes, with_rest

from ..conformance import check
from .call import CPP_OPS, Array, call, require_numpy_alone, types_of
from .draws import DRAWS, any_of

MOST_BYTES = 1 << 25
"""Of the outputs of a call with a replaced option, which could be any number."""
MOST_FINITE = 2.0**24
"""Of values whose sums are compared: no product and no sum of them overflows."""
INTEGERS = (-(2**31), -33, -2, -1, 0, 1, 31, 32, 33, 97, 2**30, 2**31 - 1)
OPTIONS = (-1, 0, 1, 2, 33, 2**31, 2**63, 0.5, float("nan"), float("inf"), "x", None)


class Fuzzed(NamedTuple):
    """A drawn call. change: the replaced part, "" if the call is valid."""

    op: str
    arrays: list[Array]
    options: dict[str, Any]
    change: str
    shift: int
    threads: int | None

    def __str__(self) -> str:
        shapes = ", ".join(f"{x.dtype.name}{x.shape}" for x in self.arrays)
        return f"{self.op}({shapes}) {self.options} {self.change} shift={self.shift} threads={self.threads}"


def replace_value(rng: Rng, arrays: list[Array], options: dict[str, Any]) -> str:
    integers = [i for i, x in enumerate(arrays) if x.dtype == np.int32 and x.size]
    if not integers:
        return ""
    i = any_of(rng, integers)
    place, value = int(rng.integers(arrays[i].size)), any_of(rng, INTEGERS)
    arrays[i] = arrays[i].copy()
    arrays[i].flat[place] = value
    return f"value {place} of array {i} is {value}"


def replace_shape(rng: Rng, arrays: list[Array], options: dict[str, Any]) -> str:
    i = int(rng.integers(len(arrays)))
    x, kind = arrays[i], int(rng.integers(4))
    axis = int(rng.integers(x.ndim))
    if kind == 0 and x.shape[axis]:
        arrays[i] = np.delete(x, -1, axis)
    elif kind == 1:
        arrays[i] = np.concatenate([x, x], axis)
    elif kind == 2:
        arrays[i] = x[None]
    else:
        arrays[i] = x.view(np.uint8)
    return f"array {i} was {x.dtype.name}{x.shape}"


def replace_option(rng: Rng, arrays: list[Array], options: dict[str, Any]) -> str:
    if not options:
        return ""
    name, value = any_of(rng, sorted(options)), any_of(rng, OPTIONS)
    was, options[name] = options[name], value
    return f"{name} was {was}"


def drop_array(rng: Rng, arrays: list[Array], options: dict[str, Any]) -> str:
    arrays.pop()
    return "without the last array"


CHANGES: Sequence[Callable[..., str]] = (replace_value, replace_value, replace_shape, replace_option, drop_array)


def draw(seed: int, number: int, ops: Sequence[str]) -> Fuzzed:
    rng = np.random.default_rng([seed, number])
    op = ops[number % len(ops)]
    arrays, options = DRAWS[op](rng)
    change = any_of(rng, CHANGES)(rng, arrays, options) if rng.random() < 1 / 3 else ""
    arrays = [np.ascontiguousarray(x).reshape(x.shape) for x in arrays]
    return Fuzzed(op, arrays, options, change, int(rng.integers(2)), any_of(rng, (None, 1, 2, 3)))


def compare(of: Fuzzed, got: Sequence[Array]) -> None:
    """Assert that the outputs are as defined. A sum in any order is compared for values without overflow."""
    case = fixed(of.op, *of.arrays, **of.options)
    summed = any(of.op.startswith(name) for name in BOUNDS)
    floats = [np.abs(x.astype(np.float32)) for x in of.arrays if x.dtype.kind not in "iu"]
    floats += [np.abs(np.float32(x)) for x in of.options.values() if isinstance(x, float)]
    with np.errstate(all="ignore"):
        if not summed or all((x < MOST_FINITE)[np.isfinite(x)].all() for x in floats):
            check.as_defined("cpp", case, got)
        else:
            of_case = Definition(case)
            same_bytes(with_rest(case, of_case.arrays, got, of_case.want)[:-1], of_case.want[:-1])


def planned_bytes(of: Fuzzed) -> int:
    """Of the outputs, by the plan."""
    op = CPP_OPS[of.op]
    out = op.signature(*types_of(op.complete(tuple(of.arrays), np.zeros(0, np.int32))), **of.options).out
    return sum(int(np.prod(x.shape, dtype=object)) * np.dtype(x.dtype).itemsize for x in out)


def require_named(of: Fuzzed, error: Exception) -> None:
    if not str(error).startswith(f"{of.op}: "):
        raise AssertionError("the error does not begin with the op") from error


def run_case(of: Fuzzed) -> str:
    """How the call ended: "compared", "returned" a result that nothing defines, or refused."""
    try:
        size = planned_bytes(of)
    except (ValueError, TypeError) as error:
        require_named(of, error)
        return "refused by the plan"
    if of.change and size > MOST_BYTES:
        return "too large"
    try:
        got = call(CPP_OPS[of.op], of.arrays, of.options, of.shift, of.threads)
    except ValueError as error:
        require_named(of, error)
        if not of.change:
            raise AssertionError("refused valid values") from error
        return "refused by C++"
    if of.change:
        return "returned"
    compare(of, got)
    return "compared"


def run_cases(
    seed: int, numbers: Iterable[int], ops: Sequence[str], until: float, say: Callable[[str], object]
) -> Counter[tuple[str, str]]:
    """The number of calls of each op by their end. say: called with the text of a case before it runs."""
    ended: Counter[tuple[str, str]] = Counter()
    for number in numbers:
        if time.monotonic() > until:
            break
        case = draw(seed, number, ops)
        say(f"case {number}: {case}")
        ended[case.op, run_case(case)] += 1
    return ended


def summary(ended: Mapping[tuple[str, str], int]) -> str:
    by_end: Counter[str] = Counter()
    for (_, end), number in ended.items():
        by_end[end] += number
    return ", ".join(f"{number} {end}" for end, number in by_end.most_common())


def watch(command: Sequence[str]) -> str | None:
    """Run the command, which prints a line per case before it runs. Prints other lines, and the case if it fails.

    Returns "case NUMBER" of a failure, "" before the first case, None without a failure.
    """
    last = ""
    with subprocess.Popen([*command, "--in-this-process"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("case "):
                last = line
            else:
                print(line, end="", flush=True)
    if process.returncode:
        print(f"FAILED in {last}" if last else "FAILED before the first case")
    return last.split(":")[0] if process.returncode else None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", type=int, help="the number of one case, to run it alone")
    parser.add_argument("--in-this-process", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if not args.in_this_process:
        failed = watch(sys.orig_argv)
        if failed:
            how = "tests/sanitize/sanitize.sh" if "tests.sanitize" in sys.orig_argv else "python -m"
            print(f"run it again: {how} tests.sanitize.fuzz_ops --seed {args.seed} --{failed}")
        return int(failed is not None)
    require_numpy_alone()
    numbers = itertools.count() if args.case is None else [args.case]
    ended = run_cases(args.seed, numbers, sorted(DRAWS), time.monotonic() + args.seconds, partial(print, flush=True))
    print(f"seed {args.seed}: {summary(ended)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
