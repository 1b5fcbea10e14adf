"""Runs every op once on small ragged inputs: `compute-sanitizer python -m tests.gpu.sanitize cuda triton`.

CUDA C++ also runs the edge cases. The inputs are made on the CPU and the outputs are not read, so only kernels of this
package run.
"""

import sys

import torch
from mxep import cpp_bindings
from mxep.torch_frontend import force_implementation

from .cases import CASES


def main(implementations: list[str]) -> None:
    for name, case in CASES.items():
        implementation = "cuda" if case.op in cpp_bindings.CUDA_OPS else "triton"
        if implementation not in implementations:
            continue
        for m in (96, *case.edges) if implementation == "cuda" else (96,):
            inputs = case.inputs(m=m)
            with force_implementation(implementation):
                case.torch(*inputs, m=m)
        torch.cuda.synchronize()
        print(f"ran {name} in {implementation}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
