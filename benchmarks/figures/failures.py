"""A failed case or peer is printed and recorded; the run goes on and ends with an error."""

import sys
import traceback
from collections.abc import Iterator
from typing import Any


def failed(what: str, failures: list[str]) -> None:
    """Print the exception being handled and record `what`."""
    failures.append(what)
    print(f"FAILED: {what}", file=sys.stderr)
    traceback.print_exc()


def guarded(what: str, items: Iterator[Any], failures: list[str]) -> Iterator[Any]:
    """The items up to the first exception, which is recorded as `what`."""
    try:
        yield from items
    except Exception:
        failed(what, failures)
