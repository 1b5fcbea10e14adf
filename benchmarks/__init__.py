"""One runner for every figure of the project: `python -m benchmarks`."""
