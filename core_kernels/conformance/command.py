"""The command `python -m mxep.conformance`."""

import argparse
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from .backend import load
from .runner import run
from .table import show, to_json


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a backend's table; returns 1 if a case differs, and 2 if the backend cannot be loaded or no case ran."""
    parser = argparse.ArgumentParser("python -m mxep.conformance", description=__doc__)
    parser.add_argument("backend", help="a module with functions such as quantize_row, or with a dict OPS")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report there too")
    parser.add_argument("-k", default="", metavar="PART", help="run the cases with this part of a name alone")
    given = parser.parse_args(arguments)
    if given.json and (given.json.is_dir() or not given.json.absolute().parent.is_dir()):
        parser.error(f"--json: got {given.json}; allowed: a file in a folder that exists")
    sys.path.insert(0, "")  # as for a module that `python -m` runs
    try:
        backend = load(given.backend)
    except (Exception, SystemExit) as error:  # whatever the module raises: some end where a GPU is missing
        print("".join(traceback.format_exception_only(error)).strip(), file=sys.stderr)
        return 2
    report = run(backend, given.k)
    print(show(report))
    if given.json:
        given.json.write_text(json.dumps(to_json(report), indent=1) + "\n")
    return int(not report.agrees) if report.ran else 2
