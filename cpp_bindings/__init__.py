"""The C++ kernels, once for every framework.

    run("quantize_row", [x], [q, sf], [rounding, satfinite])   DLPack arrays on the CPU, written in place
    ffi_targets()["quantize_row"]                              the same op as an XLA FFI capsule

Callers must plan first (`KernelOp.plan`): it checks arguments and sizes the outputs, which nothing here does again.
`attrs` is `Launch.attrs`. Users call the frontends.
"""

try:
    from ._ops import ffi_targets, num_threads, run, set_num_threads
except ImportError as error:
    raise ImportError(
        "mxep.cpp_bindings: the C++ extension is missing or was built for another Python; "
        "build it with `pip install .` (a C++20 compiler is all it needs)"
    ) from error

__all__ = ["ffi_targets", "num_threads", "run", "set_num_threads"]
