"""The C++ kernels, once for every framework.

    run("quantize_row", [x], [q, sf], [rounding, satfinite])   DLPack arrays on the CPU, written in place
    ffi_targets()["quantize_row"]                              the same op as an XLA FFI capsule

The CUDA C++ kernels, for the ops where Triton is not fast enough; a build without nvcc has none:

    CudaLaunch(exchange, 0, "quantize_col", [x], [q_t, sf_t], attrs)    made once from types, then called with tensors
    cuda_ffi_targets()["quantize_col"]                         the same op as an XLA FFI capsule
    CudaProgram(exchange, 0, types, steps)                     several ops on two streams, launched by one call
    peer_ffi_targets()["combine"]                              an op whose rows are on the GPUs of a PeerGroup

A build without CUDA kernels warns at the first op on a Hopper GPU (`warn_without_cuda`).

Callers check arguments and size outputs with `KernelOp.signature` first; nothing here checks them again. `attrs` are
the values of `Signature.attrs`, for CUDA `Launch.cuda_attrs`. Users call the frontends.
"""

import warnings

try:
    from ._ops import (
        MOST_PEERS,
        SIGNAL_PAD_BYTES,
        CudaLaunch,
        CudaProgram,
        Exchange,
        MappedRegion,
        PeerGroup,
        cuda_archs,
        cuda_ffi_targets,
        cuda_op_archs,
        ffi_targets,
        num_threads,
        peer_ffi_targets,
        peer_region,
        run,
    )
except ImportError as error:
    raise ImportError(
        "mxep.cpp_bindings: the C++ extension is missing or was built for another Python; "
        "build it with `pip install .` (a C++20 compiler is all it needs)"
    ) from error

__all__ = [
    "CUDA_OPS",
    "MOST_PEERS",
    "SIGNAL_PAD_BYTES",
    "CudaLaunch",
    "CudaProgram",
    "Exchange",
    "MappedRegion",
    "PeerGroup",
    "cuda_archs",
    "cuda_ffi_targets",
    "cuda_op_archs",
    "ffi_targets",
    "num_threads",
    "peer_ffi_targets",
    "peer_region",
    "run",
    "warn_without_cuda",
    "why_not_cuda",
]

CUDA_OPS = tuple(cuda_op_archs)
"""The ops of the CUDA table. They run on every GPU that `cuda_op_archs` lists for them, except for sizes with
`Launch.cuda_unsupported`."""


def why_not_cuda(op: str, capability: tuple[int, int]) -> str:
    """Why the op has no CUDA C++ kernel on a GPU of this compute capability; "" where it has one.

    Args:
        op: the name of an op.
        capability: compute capability of the GPU, (9, 0) on Hopper.

    Returns:
        The reason.

    Example:
        >>> why_not_cuda("row_map", (9, 0))
        'allowed: triton; this build has no CUDA kernel for it'
    """
    if not cuda_archs:
        return "allowed: triton; this build has no CUDA kernels, `make install-gpu` makes one with nvcc"
    if op not in CUDA_OPS:
        return "allowed: triton; this build has no CUDA kernel for it"
    if capability not in cuda_op_archs[op]:
        archs = ", ".join(f"sm_{major}{minor}" for major, minor in cuda_op_archs[op])
        return f"allowed: triton; its CUDA kernel was compiled for {archs}, this is sm_{capability[0]}{capability[1]}"
    return ""


def warn_without_cuda(capability: tuple[int, int] | None) -> None:
    """Warn that Triton runs every op on a Hopper GPU, if this build has no CUDA kernels.

    Python's filter shows the warning once per frontend, since each calls this function on one line.

    Args:
        capability: The compute capability of the GPU, or None without a GPU.
    """
    if capability == (9, 0) and not cuda_archs:
        warnings.warn(
            "mxep: this build has no CUDA kernels, so Triton runs every op on this sm_90 GPU. Measured on an H200: "
            "bf16 grouped GEMMs in Triton reached 0.7 to 0.8 of the rate of torch._grouped_mm (commit 95fb47a). "
            "fold_groups took 1.0 to 3.2 times as long in Triton as in CUDA C++ (nine cases, commit f2edb52). MXFP8 "
            "GEMMs in Triton have no stored measurement. `make install-gpu` compiles the kernels with nvcc 13.0 or "
            "newer; they run with an NVIDIA driver of 580 or newer.",
            RuntimeWarning,
            stacklevel=2,
        )
