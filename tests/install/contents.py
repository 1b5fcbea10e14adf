"""The files of a wheel: of the packages every tracked file but the sources of C++, the extension, and the metadata.

    python tests/install/contents.py WHEEL ...

Exits with 1 if a wheel has another file, or lacks one. A file that git does not track is another file.
"""

import re
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parents[2]
PACKAGES = ("core_kernels", "cpp_bindings", "torch_frontend", "jax_frontend")
COMPILED = {".cc", ".h", ".cu", ".cuh", ".def"}
AT_THE_TOP = {"version.py": "__init__.py", "doctor.py": "doctor.py", "conformance.py": "conformance.py",
              "core_kernels/py.typed": "py.typed"}  # fmt: skip
EXTENSION = r"mxep/cpp_bindings/_ops\.[\w.-]+\.so"
METADATA = {"METADATA", "WHEEL", "RECORD", "licenses/LICENSE"}


def expected() -> set[str]:
    """The wheel's files but for the extension and the metadata."""
    tracked = subprocess.run(["git", "ls-files", *PACKAGES], cwd=ROOT, capture_output=True, text=True, check=True)
    sources = {name for name in tracked.stdout.splitlines() if PurePosixPath(name).suffix not in COMPILED}
    return {f"mxep/{name}" for name in sources} | {f"mxep/{name}" for name in AT_THE_TOP.values()}


def differences(names: Iterable[str]) -> list[str]:
    """A line for each file too many or too few, in order."""
    found = set(names)
    extensions = {name for name in found if re.fullmatch(EXTENSION, name)}
    metadata = {name for name in found if name.partition("/")[0].endswith(".dist-info")}
    lines = [f"{name}: not expected" for name in found - extensions - metadata - expected()]
    lines += [f"{name}: missing" for name in expected() - found]
    if len(extensions) != 1:
        lines.append(f"{EXTENSION}: got {len(extensions)} files, expected 1")
    of = {name.partition("/")[2] for name in metadata}
    lines += [f"*.dist-info/{name}: {'missing' if name in METADATA else 'not expected'}" for name in of ^ METADATA]
    return sorted(lines)


def main(wheels: list[str]) -> int:
    wrong = []
    for wheel in wheels:
        names = zipfile.ZipFile(wheel).namelist()
        found = differences(name for name in names if not name.endswith("/"))
        print(f"{wheel}: {len(names)} files, {len(found)} of them wrong")
        wrong += found
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return int(bool(wrong) or not wheels)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
