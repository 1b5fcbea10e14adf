"""`python -m mxep.conformance my_package.backend` compares an MX library with the definition of every byte.

docs/conformance.md has the functions of a backend. The plugin of pytest is mxep.core_kernels.conformance.pytest_plugin.
"""

import sys

from mxep.core_kernels.conformance.backend import Backend, load, of_module
from mxep.core_kernels.conformance.command import main
from mxep.core_kernels.conformance.report import Report
from mxep.core_kernels.conformance.runner import run
from mxep.core_kernels.conformance.table import show, to_json

__all__ = ["Backend", "Report", "load", "main", "of_module", "run", "show", "to_json"]

if __name__ == "__main__":
    sys.exit(main())
