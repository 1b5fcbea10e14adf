"""`python -m benchmarks cpu`: the C++ ops on the CPU, compared with a copy of as many bytes and with `torch.compile`.

    core    cpp_bindings.run and the compiled formula, both into existing outputs
    torch   the public op and the compiled formula; both allocate their outputs

Every case is checked before it is timed: a slice against the oracle, all bytes against the compiled formula. Inputs
are random and never zero.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from mxep import cpp_bindings
from mxep.torch_frontend import ops
from torch import Tensor

from .cases.cpu import NAMES, Case, Tensors, check, matrix_cases, moved, outputs_of, received_cases
from .cases.shapes import CPU, CpuShapes
from .figures.results import Line
from .figures.timing import interleaved


def measure(case: Case) -> Iterator[Line]:
    outputs, attrs = outputs_of(case.op, case.inputs, case.options)
    theirs, _ = outputs_of(case.op, case.inputs, case.options)
    torch.compiler.reset()  # Dynamo recompiles a function eight times at most, then runs it uncompiled
    compiled = torch.compile(case.formula, dynamic=False)

    def allocating(*inputs: Tensor) -> Tensors:
        fresh = tuple(torch.empty_like(out) for out in outputs)
        case.formula(*inputs, *fresh)
        return fresh

    compiled_allocating = torch.compile(allocating, dynamic=False)
    custom_op = getattr(ops, case.op.name)

    def run_core() -> None:
        cpp_bindings.run(case.op.name, case.inputs, outputs, attrs)

    def run_torch() -> Any:
        return custom_op(*case.inputs, **case.options)

    run_core()
    compiled(*case.inputs, *theirs)
    check(case, outputs, theirs)
    result = run_torch()
    check(case, outputs, result if isinstance(result, tuple) else (result,))
    check(case, outputs, compiled_allocating(*case.inputs))

    nbytes = moved(case, outputs)
    source, target = torch.randint(1, 255, (2, nbytes // 2), dtype=torch.uint8)
    frontends: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "core": (run_core, lambda: compiled(*case.inputs, *theirs)),
        "torch": (run_torch, lambda: compiled_allocating(*case.inputs)),
    }
    for frontend, (run, peer) in frontends.items():
        candidates = {"run": run, "torch_compile": peer}
        if case.by_bytes:
            candidates["copy"] = lambda: target.copy_(source)
        samples = interleaved(candidates)
        ours = samples.pop("run")
        copy = samples.get("copy")
        for name, sample in samples.items():
            yield Line(
                op=case.name,
                frontend=frontend,
                case={**case.shape, "threads": cpp_bindings.num_threads()},
                us=ours.us,
                spread=ours.spread,
                n=ours.n,
                nbytes=nbytes,
                flops=0,
                of_roof=round(copy.us / ours.us, 3) if copy else None,
                roof="copy" if copy else None,
                peer=name,
                peer_us=sample.us,
                ratio=round(sample.us / ours.us, 2),
                peak_nbytes=sum(out.nbytes for out in outputs),
                error={"grade": "exact", "bytes_that_differ": 0},
            )


def lines(only: Sequence[str], shapes: CpuShapes = CPU) -> Iterator[Line]:
    """The lines of every case, or of the ops named."""
    torch.set_num_threads(cpp_bindings.num_threads())
    named = only or NAMES
    for shape in shapes.matrices:
        yield from (line for case in matrix_cases(shape) if case.name in named for line in measure(case))
    for shape in shapes.received:
        yield from (line for case in received_cases(shape) if case.name in named for line in measure(case))
