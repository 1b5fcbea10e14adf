"""Applies each seeded fault to a scratch copy of HEAD and runs the tests that must catch it: `make faults`.

    HEAD --> worktree, build --> selections pass --.-- fault --[C++: build]--> tests --> caught | missed --.
                                                   '<---------------------- next ----------------------------'

Prints a line per fault: the first test that caught it. Exits with 1 if a fault is missed, or if its selection of tests
fails without it. `make test` does not run it. Arguments pick the faults whose line contains one of them.
"""

import re
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

from ..scratch import Scratch, environment, scratch_of
from .fault import Fault
from .faults import FAULTS

PASSED, FAILED = 0, 1  # of pytest; other codes are errors of the run itself


class Run(NamedTuple):
    """pytest's exit code and the last lines that it printed."""

    code: int
    output: str = ""

    def result(self) -> str:
        if self.code != FAILED:
            return "MISSED" if self.code == PASSED else f"error {self.code}: {self.output}"
        found = re.search(r"^FAILED tests/(.+?)(?: - |$)", self.output, re.MULTILINE)
        return f"caught by {found[1] if found else self.output}"


def tests(scratch: Scratch, selection: str, interpreter: bool) -> Run:
    """Stops at the first failure."""
    mode = {"TRITON_INTERPRET": "1"} if interpreter else {}
    arguments = ["-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(f"tests/{selection}")]
    command, env = [scratch.python, *arguments], {**environment(), **mode}
    ran = subprocess.run(command, cwd=scratch.root, env=env, capture_output=True, text=True)
    return Run(ran.returncode, ran.stdout[-2000:] + ran.stderr[-500:])


def apply(scratch: Scratch, fault: Fault) -> Run:
    """The selection with the fault in the code. The next C++ fault, or none, builds without it."""
    path = scratch.root / fault.file
    source = path.read_text()
    path.write_text(fault.applied(source))
    try:
        if fault.compiled:
            scratch.build()
        return tests(scratch, fault.tests, fault.interpreter)
    finally:
        path.write_text(source)


def count_missed(scratch: Scratch, faults: Sequence[Fault]) -> int:
    """Print a line per fault."""
    missed, failing = 0, set()
    for selection, interpreter in sorted({(f.tests, f.interpreter) for f in faults}):
        ran = tests(scratch, selection, interpreter)
        if ran.code != PASSED:
            failing.add((selection, interpreter))
            print(f"{selection}: fails without a fault:\n{ran.output}", flush=True)
    # The extension keeps the last C++ fault: these come last.
    for fault in sorted(faults, key=lambda fault: fault.compiled):
        begin = time.monotonic()
        result = "its tests fail without it"
        if (fault.tests, fault.interpreter) not in failing:
            result = apply(scratch, fault).result()
        missed += not result.startswith("caught")
        print(f"{time.monotonic() - begin:4.0f} s  {fault.where}: {fault.says}: {result}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} caught")
    return missed


def main(picked: list[str]) -> int:
    faults = [f for f in FAULTS if not picked or any(part in f"{f.where} {f.says}" for part in picked)]
    with scratch_of() as scratch:
        return count_missed(scratch, faults) > 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
