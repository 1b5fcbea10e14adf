"""Applies each seeded fault to a scratch copy of HEAD and runs the tests that must catch it: `make faults`.

    HEAD --> worktree, build --> selections pass --.-- fault --[C++: build]--> tests --> caught | missed --.
                                                   '<---------------------- next ----------------------------'

Prints a line per fault. Exits with 1 if a fault is missed, and with an error if its text or its selection of tests does
not fit the code. `make test` does not run it. Arguments pick the faults whose line contains one of them.
"""

import os
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from .fault import Fault
from .faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
PASSED, FAILED = 0, 1  # of pytest; other codes are errors of the run itself


class Scratch:
    """A worktree of HEAD with an environment of its own, which takes all packages but mxep from this one."""

    def __init__(self, folder: Path) -> None:
        self.root = folder / "mxep"
        run(["git", "worktree", "add", "--quiet", "--detach", str(self.root), "HEAD"], ROOT)
        run([sys.executable, "-m", "venv", ".venv"], self.root)
        self.python = str(self.root / ".venv" / "bin" / "python")
        packages = [path for path in sys.path if path.endswith("site-packages")]
        (site,) = (self.root / ".venv" / "lib").glob("python*/site-packages")
        (site / "shared.pth").write_text("\n".join(packages) + "\n")
        self.build()

    def build(self) -> None:
        pip = [self.python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--editable", "."]
        run([*pip, "--config-settings=cmake.define.MXEP_CUDA=OFF"], self.root)

    def tests(self, selections: list[str], interpreter: bool) -> int:
        """pytest's exit code; stops at the first failure."""
        mode = {"TRITON_INTERPRET": "1"} if interpreter else {}
        for selection in selections:
            command = [self.python, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *shlex.split(selection)]
            ran = subprocess.run(command, cwd=self.root, env={**environment(), **mode}, capture_output=True, text=True)
            if ran.returncode != PASSED:
                self.output = ran.stdout[-2000:] + ran.stderr[-500:]
                return ran.returncode
        return PASSED

    def apply(self, fault: Fault) -> int:
        """The exit code of the selection with the fault in the code."""
        path = self.root / fault.file
        source = path.read_text()
        if source.count(fault.old) != 1:
            raise SystemExit(f"{fault.says}: {fault.file} has {source.count(fault.old)} times {fault.old!r}, not 1")
        compiled = path.suffix == ".cc"
        path.write_text(source.replace(fault.old, fault.new))
        try:
            if compiled:
                self.build()
            return self.tests([fault.tests], fault.interpreter)
        finally:
            path.write_text(source)
            if compiled:
                self.build()


def environment() -> dict[str, str]:
    """This one's, with its tools on the PATH and without its packages."""
    tools = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "OMP_WAIT_POLICY": "passive"}


def run(command: list[str], cwd: Path) -> None:
    ran = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{ran.stdout}{ran.stderr}")


def main(picked: list[str]) -> int:
    faults = [f for f in FAULTS if not picked or any(part in f.says for part in picked)]
    missed = 0
    with tempfile.TemporaryDirectory() as folder:
        try:
            scratch = Scratch(Path(folder))
            for interpreter in (True, False):
                selections = sorted({f.tests for f in faults if f.interpreter == interpreter})
                if scratch.tests(selections, interpreter) != PASSED:
                    raise SystemExit(f"a selection fails without a fault:\n{scratch.output}")
            for fault in faults:
                begin = time.monotonic()
                code = scratch.apply(fault)
                result = {PASSED: "MISSED", FAILED: "caught"}.get(code, f"error {code}: {scratch.output}")
                missed += code != FAILED
                print(f"{result:8}{time.monotonic() - begin:6.0f} s  {fault.says}", flush=True)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(Path(folder) / "mxep")], cwd=ROOT)
    print(f"{len(faults) - missed} of {len(faults)} caught")
    return missed > 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
