"""Every op once on small ragged inputs, for compute-sanitizer: `compute-sanitizer python sanitize.py cuda triton`.

The inputs are made on the CPU and the outputs are dropped: no kernel but ours runs. CUDA C++ runs its edges as well.
"""

import sys

import torch
from cases import CASES
from mxep import cpp_bindings
from mxep.torch_frontend import force_implementation


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
