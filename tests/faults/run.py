"""Applies each seeded fault to a scratch copy of HEAD and runs the tests that must catch it: `make faults`.

    HEAD --> worktree, build --> selections pass --.-- fault --[C++: build]--> tests --> caught | missed --.
                                                   '<---------------------- next ----------------------------'

Prints a line per fault. Exits with 1 if a fault is missed, and with an error if its text or its selection of tests does
not fit the code. `make test` does not run it. Arguments pick the faults whose line contains one of them.
"""

import shlex
import subprocess
import sys
import time
from typing import NamedTuple

from ..scratch import Scratch, environment, scratch_of
from .fault import Fault
from .faults import FAULTS

PASSED, FAILED = 0, 1  # of pytest; other codes are errors of the run itself


class Run(NamedTuple):
    """pytest's exit code and the last line that it printed."""

    code: int
    output: str = ""


def tests(scratch: Scratch, selections: list[str], interpreter: bool) -> Run:
    """Stops at the first failure."""
    mode = {"TRITON_INTERPRET": "1"} if interpreter else {}
    for selection in selections:
        command = [scratch.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(selection)]
        ran = subprocess.run(command, cwd=scratch.root, env={**environment(), **mode}, capture_output=True, text=True)
        if ran.returncode != PASSED:
            return Run(ran.returncode, ran.stdout[-2000:] + ran.stderr[-500:])
    return Run(PASSED)


def apply(scratch: Scratch, fault: Fault) -> Run:
    """The selection with the fault in the code."""
    path = scratch.root / fault.file
    source = path.read_text()
    if source.count(fault.old) != 1:
        raise SystemExit(f"{fault.says}: {fault.file} has {source.count(fault.old)} times {fault.old!r}, not 1")
    compiled = path.suffix == ".cc"
    path.write_text(source.replace(fault.old, fault.new))
    try:
        if compiled:
            scratch.build()
        return tests(scratch, [fault.tests], fault.interpreter)
    finally:
        path.write_text(source)
        if compiled:
            scratch.build()


def main(picked: list[str]) -> int:
    faults = [f for f in FAULTS if not picked or any(part in f.says for part in picked)]
    missed = 0
    with scratch_of() as scratch:
        for interpreter in (True, False):
            selections = sorted({f.tests for f in faults if f.interpreter == interpreter})
            ran = tests(scratch, selections, interpreter)
            if ran.code != PASSED:
                raise SystemExit(f"a selection fails without a fault:\n{ran.output}")
        for fault in faults:
            begin = time.monotonic()
            ran = apply(scratch, fault)
            result = {PASSED: "MISSED", FAILED: "caught"}.get(ran.code, f"error {ran.code}: {ran.output}")
            missed += ran.code != FAILED
            print(f"{result:8}{time.monotonic() - begin:6.0f} s  {fault.says}", flush=True)
    print(f"{len(faults) - missed} of {len(faults)} caught")
    return missed > 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
