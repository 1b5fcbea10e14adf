"""What `make install-gpu` needs and this Python lacks. Prints the pip command that installs it, and exits with 1.

    pyproject.toml --> the packages of the build, and those that mxep imports --> present in this environment?

pyproject.toml has the versions. Of jaxlib, whose headers the build reads, any release will do: the module is for this
environment.
"""

import importlib.util
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
FRAMEWORKS = ("torch", "jax")
CMAKE = (3, 26)
FFI_HEADER = "include/xla/ffi/api/ffi.h"


def is_installed(package: str) -> bool:
    try:
        metadata.version(package)
    except metadata.PackageNotFoundError:
        return False
    return True


def cmake_version() -> tuple[int, ...]:
    """Of the cmake on the PATH, () without one."""
    if not (cmake := shutil.which("cmake")):
        return ()
    said = subprocess.run([cmake, "--version"], capture_output=True, text=True).stdout
    found = re.search(r"version (\d+)\.(\d+)", said)
    return tuple(map(int, found.groups())) if found else ()


def missing() -> list[str]:
    """The requirements that this environment lacks, as pip takes them; "torch" or "jax" alone is enough."""
    needed = [*PROJECT["build-system"]["requires"], *PROJECT["project"]["dependencies"]]
    lacks = [line for line in needed if not is_installed(re.match(r"[\w-]+", line)[0])]  # type: ignore[index]
    jaxlib = importlib.util.find_spec("jaxlib")
    if jaxlib and jaxlib.origin and not (Path(jaxlib.origin).parent / FFI_HEADER).exists():
        lacks += [line for line in needed if line.startswith("jaxlib")]
    if not (is_installed("cmake") or cmake_version() >= CMAKE):
        lacks.append(f"cmake>={'.'.join(map(str, CMAKE))}")
    if not any(map(is_installed, FRAMEWORKS)):
        lacks.append("torch (or jax) for CUDA")
    return lacks


def main() -> int:
    if not (lacks := missing()):
        return 0
    print(f"install-gpu: {sys.executable} lacks {', '.join(lacks)}", file=sys.stderr)
    packages = " ".join(f"'{line}'" for line in lacks if " " not in line)
    if packages:
        print(
            f"install-gpu: it downloads nothing itself; run {sys.executable} -m pip install {packages}", file=sys.stderr
        )
    if any(line.startswith("jaxlib") for line in lacks):
        print(
            "install-gpu: jaxlib is for its XLA headers, which the build reads; PyTorch never imports it",
            file=sys.stderr,
        )
    return 1


if __name__ == "__main__":
    sys.exit(main())
