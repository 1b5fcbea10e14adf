"""A scratch copy of a commit, built separately: `make faults` changes it, `make frozen` compares with it."""

import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


class Scratch:
    """A worktree of a commit with an environment of its own, which takes all packages but mxep from this one.

    cuda: build the CUDA kernels too.
    """

    def __init__(self, root: Path, commit: str, cuda: bool) -> None:
        self.root, self.cuda = root, cuda
        _run(["git", "worktree", "add", "--quiet", "--detach", str(root), commit], ROOT)
        _run([sys.executable, "-m", "venv", ".venv"], root)
        self.python = str(root / ".venv" / "bin" / "python")
        packages = [path for path in sys.path if path.endswith("site-packages")]
        (site,) = (root / ".venv" / "lib").glob("python*/site-packages")
        (site / "shared.pth").write_text("\n".join(packages) + "\n")
        self.build()

    def build(self) -> None:
        pip = [self.python, "-m", "pip", "install", "--quiet", "--no-build-isolation", "--no-deps", "--editable", "."]
        _run([*pip, f"--config-settings=cmake.define.MXEP_CUDA={'ON' if self.cuda else 'OFF'}"], self.root)


@contextmanager
def scratch_of(commit: str = "HEAD", cuda: bool = False) -> Iterator[Scratch]:
    """A scratch copy that is removed at the end."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder) / "mxep"
        try:
            yield Scratch(root, commit, cuda)
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", str(root)], cwd=ROOT)


def environment() -> dict[str, str]:
    """This one's, with its tools on the PATH and without its packages."""
    tools = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}", "OMP_WAIT_POLICY": "passive"}


def _run(command: list[str], cwd: Path) -> None:
    ran = subprocess.run(command, cwd=cwd, env=environment(), capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"{shlex.join(command)}\n{ran.stdout}{ran.stderr}")
