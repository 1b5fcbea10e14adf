"""Two calls that break the contract of a C++ op. Each must end its process with the report of a sanitizer.

python -m tests.sanitize EXTENSION tests.sanitize.seeded            starts both, and fails if one survives
python -m tests.sanitize EXTENSION tests.sanitize.seeded write      makes one
"""

import subprocess
import sys

import numpy as np
from mxep import cpp_bindings

EXPECTED = {
    "write": ("AddressSanitizer: heap-buffer-overflow", "in mxep::permute_rows"),
    "overflow": ("runtime error: signed integer overflow: 1 + 9223372036854775807",),
}
"""The parts of each report."""


def write() -> None:
    """An output that is one byte shorter than the input's row."""
    row = np.arange(33, dtype=np.uint8)[None]
    cpp_bindings.run("permute_rows", [row, np.zeros(1, np.int32)], [np.empty((1, 32), np.uint8)], [])


def overflow() -> None:
    """An alignment that the plan refuses; a group of one row is padded to it."""
    outputs = [np.empty(n, np.int32) for n in (64, 1, 1, 1)]
    cpp_bindings.run("row_map", [np.ones(1, np.int32)], outputs, [1, 2**63 - 1, 0])


def main() -> int:
    if sys.argv[1:]:
        {"write": write, "overflow": overflow}[sys.argv[1]]()
        return 0
    missing = []
    for name, parts in EXPECTED.items():
        ran = subprocess.run([*sys.orig_argv, name], stderr=subprocess.PIPE, text=True)
        if ran.returncode == 0 or not all(part in ran.stderr for part in parts):
            missing.append(f"{name}: no report of {parts}, but:\n{ran.stderr}")
    print(*missing or ["both seeded errors were reported"], sep="\n")
    return len(missing)


if __name__ == "__main__":
    sys.exit(main())
