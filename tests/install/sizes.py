"""The files of a release: bytes, and the digest that a download is compared with.

    python tests/install/sizes.py FOLDER        FOLDER/*.whl, FOLDER/cpu/*.whl, FOLDER/*.tar.gz

Prints a line for each file. Exits with 1 without a file, or if a file is above the bound of its kind or of another
version than pyproject.toml has.
"""

import hashlib
import sys
import tomllib
from pathlib import Path

BOUNDS = {"*.whl": 3_500_000, "cpu/*.whl": 1_200_000, "*.tar.gz": 2_500_000}
"""Files -> most bytes. Measured at 0.1.0: 2.75 MB with CUDA kernels for two architectures, 0.97 MB without, 1.57 MB of
sources. Symbols that are not stripped, another architecture or stored figures would exceed them."""


def main(folder: Path) -> int:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    wrong, found = [], 0
    for pattern, bound in BOUNDS.items():
        for file in sorted(folder.glob(pattern)):
            found += 1
            content = file.read_bytes()
            print(f"{len(content):9,} bytes  sha256 {hashlib.sha256(content).hexdigest()}  {file}")
            if len(content) > bound:
                wrong.append(f"{file}: {len(content):,} bytes, allowed: {bound:,}")
            if not file.name.startswith((f"mxep-{project['version']}-", f"mxep-{project['version']}.tar")):
                wrong.append(f"{file}: not of version {project['version']}; remove it")
    if not found:
        wrong.append(f"{folder}: no wheel and no sdist; `make wheel` and `make sdist` build them")
    print(*wrong, sep="\n", end="\n" if wrong else "", file=sys.stderr)
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
