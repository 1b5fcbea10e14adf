"""The ops: all cases of tests/gpu/cases.py through a frontend, on the GPU where there is one.

Several sizes and two seeds in PyTorch; in JAX, which compiles each size, the seeds. Of an op with group ends the rows
are hashed up to the last end.
"""

from functools import partial
from typing import Any

from mxep.core_kernels.launch import ArrayType, KernelOp
from mxep.core_kernels.registry import OPS

from ...cases import PRODUCTS
from ...gpu.cases import CASES, DEVICE
from ...gpu.cases import Case as OpCase
from ..hashes import Hash
from ..records import INPUTS, Case, Entry

ROWS, SEEDS = 96, (0, 1)
MANY = 4096 if DEVICE == "cuda" else 1024


def cases(frontend: str) -> dict[str, Case]:
    return {
        f"{frontend} {name}": Case(record_of(case.op), partial(entry, frontend, case)) for name, case in CASES.items()
    }


def record_of(op: str) -> str:
    return "gpu" if DEVICE == "cuda" else "cpu_products" if op in PRODUCTS else "cpu"


def entry(frontend: str, case: OpCase) -> Entry:
    op, runs = OPS[case.op], [(seed, ROWS) for seed in SEEDS]
    if frontend == "torch":
        runs += [(0, m) for m in (*case.edges, MANY)]
    inputs, outputs = Hash(), {name: Hash() for name in op.outputs}
    for seed, m in runs:
        given = case.inputs(seed, m)
        for tensor in given:
            inputs.add(tensor)
        results = case.torch(*given, m=m) if frontend == "torch" else case.jax(*given, m=m)
        for found, result in zip(
            outputs.values(), up_to_the_last_end(op, given, results, case.options_of(m)), strict=True
        ):
            found.add(result)
    return {INPUTS: inputs.digits, **{name: found.digits for name, found in outputs.items()}}


def up_to_the_last_end(op: KernelOp, inputs: Any, outputs: Any, options: dict[str, Any]) -> list[Any]:
    """The outputs without what they have for tokens past the last group, in their first or their last dim."""
    types = (ArrayType(tuple(x.shape), str(x.dtype).removeprefix("torch.")) for x in inputs)
    tokens = op.signature(*types, **options).tokens
    ends = inputs[op.inputs.index("group_ends") :][0] if tokens and len(inputs) == len(op.inputs) else ()
    if tokens is None or not len(ends):
        return list(outputs)
    end = int(ends[-1])

    def cut(output: Any) -> Any:
        sides = (0, output.ndim - 1)
        return output[tuple(slice(end if i in sides and n == tokens[0] else n) for i, n in enumerate(output.shape))]

    return list(map(cut, outputs))
