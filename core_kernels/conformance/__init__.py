"""Compares an MX library with the definition of every byte: `python -m mxep.conformance my_package.backend`."""
