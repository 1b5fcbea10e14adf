"""Everything that needs no GPU, one part after the other: `make check-all`.

    lint, wheel, manylinux, sdist, docs, test (slow ones too), faults, sanitize, frozen, coverage
        --> a line of each: passed or FAILED, seconds, last line

All parts run. Exits with 1 if one has failed. 90 minutes on two cores at most.
"""

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]


class Part(NamedTuple):
    name: str
    command: Sequence[str]


PARTS = [
    Part("lint", ["make", "lint"]),
    Part("wheel", ["make", "wheel", "CUDA=ON"]),
    Part("manylinux", ["make", "manylinux"]),  # the wheels of the part before
    Part("sdist", ["make", "sdist"]),
    Part("docs", ["make", "docs"]),
    Part("test", ["make", "test", "MARKED="]),
    Part("faults", ["make", "faults"]),
    Part("sanitize", ["make", "sanitize", "FUZZ=120"]),  # ten minutes of random calls without FUZZ
    Part("frozen", ["make", "frozen", "ARGS=--only cpu --only ptx --only sass"]),
    # Last: it builds the extension to count lines. Of `make test`: a line that only slow tests run is not covered.
    Part("coverage", ["make", "coverage"]),
]


def run(part: Part) -> tuple[bool, str]:
    """Print the output of a part as it comes. Returns whether it passed, and its closing line."""
    closing, begin = "", time.monotonic()
    environment = {**os.environ, "CI": "true"}  # the number of skipped tests is checked
    with subprocess.Popen(
        part.command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            closing = line.strip() or closing
    passed = process.returncode == 0
    seconds = time.monotonic() - begin
    return passed, f"{part.name:10}{'passed' if passed else 'FAILED':8}{seconds:6.0f} s  {closing}"


def main(parts: Sequence[Part]) -> int:
    ran = []
    for part in parts:
        ran.append(run(part))
        print(ran[-1][1], flush=True)
    print("", *(line for _, line in ran), sep="\n")
    return int(not all(passed for passed, _ in ran))


if __name__ == "__main__":
    sys.exit(main(PARTS))
