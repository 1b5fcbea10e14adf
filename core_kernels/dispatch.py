"""Facts of GPU architectures, and the choice of the implementation that runs an op.

    compute capability --> Arch      name, whose tiles, whether recipes fold, which matrix instructions
    op, Device, forced --> choose --> implementation and the architecture of its plan, or NotImplementedError

"cpp"     C++: every op on a CPU. The framework's own matmul multiplies there, on operands dequantized in C++.
"cuda"    CUDA C++: on a GPU, for the ops and architectures that the build has machine code for.
"triton"  Triton: on a GPU, for all ops and sizes that CUDA C++ does not take. An op without a Triton kernel is composed
          of other ops. On a CPU the interpreter of Triton runs the kernels where it is forced and the framework has it.

Both frontends ask this file, so both give the same answer on the same device. Nothing here imports a framework: a
frontend describes the device that its framework reports.
"""

from typing import Literal, NamedTuple, get_args

from .launch import KernelOp, fail

Implementation = Literal["cpp", "cuda", "triton"]
IMPLEMENTATIONS: tuple[Implementation, ...] = get_args(Implementation)


class Arch(NamedTuple):
    """Facts of an architecture.

    Attributes:
        name: "sm_90".
        tiles: the architecture whose tiles its Triton kernels take (tiles.py).
        folds: whether recipes with compute="auto" multiply folded operands.
        upcasts: whether exact MXFP8 products multiply operands that a separate kernel dequantizes to bf16.
        tcgen05: whether its tensor cores multiply E4M3 by E8M0 scales and keep sums in tensor memory.
        hw_cast: whether it converts E4M3 and computes in bf16 in hardware. The interpreter of Triton does neither.
    """

    name: str
    tiles: str
    folds: bool = False
    upcasts: bool = False
    tcgen05: bool = False
    hw_cast: bool = True


GPUS: dict[tuple[int, int], Arch] = {
    (8, 9): Arch("sm_89", tiles="sm_90"),
    (9, 0): Arch("sm_90", tiles="sm_90", folds=True, upcasts=True),
    (10, 0): Arch("sm_100", tiles="sm_100", tcgen05=True),
    (10, 3): Arch("sm_103", tiles="sm_100", tcgen05=True),
    (12, 0): Arch("sm_120", tiles="sm_90"),
    (12, 1): Arch("sm_121", tiles="sm_90"),
}
"""Compute capability -> facts of the GPUs that mxep runs on.

GPUs below 8.9 have no E4M3 conversion. Triton 3.6 compiles nothing for 11.0 and 13.0. The largest tiles of Hopper
take 96 KiB of shared memory; GPUs of 8.9 and 12.x have 99 KiB.
"""

CAPABILITIES = {arch.name: capability for capability, arch in GPUS.items()}
"""Name -> compute capability."""

_BY_NAME = {
    "cpu": Arch("cpu", tiles=""),
    "interpreter": Arch("interpreter", tiles="interpreter", hw_cast=False),
    **{arch.name: arch for arch in GPUS.values()},
}


class Device(NamedTuple):
    """A device as a frontend's framework reports it.

    Attributes:
        name: for error messages.
        platform: "cpu" or "cuda"; no op runs on another.
        capability: compute capability of a GPU, (9, 0) on Hopper.
    """

    name: str
    platform: str
    capability: tuple[int, int] | None = None


class Choice(NamedTuple):
    """The implementation that runs an op.

    Attributes:
        implementation: "cpp", "cuda" or "triton".
        arch: the architecture that its launch is planned for.
    """

    implementation: Implementation
    arch: str


class Capability(NamedTuple):
    """What runs an op on a device.

    Attributes:
        uses: the implementation that runs and its architecture, or the ops that the op is composed of; "" if nothing
            runs.
        absent: implementation -> reason, for each implementation that cannot run.
    """

    uses: str
    absent: dict[Implementation, str]


def arch_name(capability: tuple[int, int]) -> str:
    """Name of a GPU architecture, known or not.

    Args:
        capability: compute capability, (9, 0) on Hopper.

    Returns:
        The name.

    Example:
        >>> arch_name((9, 0))
        'sm_90'
    """
    major, minor = capability
    return f"sm_{major}{minor}"


def facts(arch: str) -> Arch:
    """Facts of an architecture by its name. A GPU that mxep does not run on has a name and no facts.

    Args:
        arch: the name of an architecture: "cpu", "sm_90".

    Returns:
        The facts.

    Example:
        >>> facts("sm_90").folds, facts("cpu").folds
        (True, False)
    """
    return _BY_NAME.get(arch) or Arch(arch, tiles="")


def require_known(argument: str, implementation: object) -> None:
    """Check an argument of `force_implementation`.

    Args:
        argument: the argument that an error names.
        implementation: its value.

    Raises:
        ValueError: another implementation.
    """
    if implementation not in (*IMPLEMENTATIONS, None):
        allowed = f"allowed: {', '.join(map(repr, IMPLEMENTATIONS))}, None"
        fail(ValueError, argument, "implementation", repr(implementation), allowed)


def absent(device: Device, no_cuda: str = "", no_triton: str = "") -> dict[Implementation, str]:
    """Implementation -> the reason why it cannot run on the device.

    Args:
        device: of a frontend.
        no_cuda: why the build has no CUDA C++ for the op on this GPU; "" where it has.
        no_triton: why the framework cannot run Triton on this device; "" where it can.

    Returns:
        The reasons, by implementation.
    """
    if device.platform == "cpu":
        reasons = {"cuda": "allowed: a GPU; on a CPU 'cpp' runs", "triton": no_triton}
    elif device.platform != "cuda":
        return dict.fromkeys(IMPLEMENTATIONS, "allowed: cpu and cuda")
    elif device.capability not in GPUS:
        return dict.fromkeys(IMPLEMENTATIONS, _unknown())
    else:
        reasons = {"cpp": "allowed: a CPU; on a GPU 'cuda' and 'triton' run", "cuda": no_cuda, "triton": no_triton}
    return {implementation: reason for implementation in IMPLEMENTATIONS if (reason := reasons.get(implementation))}


def _unknown() -> str:
    names = ", ".join(arch.name for arch in GPUS.values())
    return f"allowed: {names}; on a CPU the C++ kernels run: move the arrays there"


def choose(
    op: KernelOp, device: Device, forced: Implementation | None, no_cuda: str = "", no_triton: str = ""
) -> Choice:
    """The implementation that runs an op on a device.

    Args:
        op: of the registry.
        device: of a frontend.
        forced: the implementation that must run; None leaves the choice to the order of preference.
        no_cuda: as for `absent`. After planning: why CUDA C++ does not take the sizes.
        no_triton: as for `absent`.

    Returns:
        The implementation and the architecture.

    Raises:
        NotImplementedError: nothing runs, or the forced implementation does not.
    """
    reasons = absent(device, no_cuda, no_triton)
    order = (forced,) if forced else ("cpp",) if device.platform == "cpu" else ("cuda", "triton")
    for implementation in order:
        if implementation not in reasons:
            return Choice(implementation, _planned_for(device, implementation))
    got = device.name if device.capability in (None, *GPUS) else arch_name(device.capability)
    got += f" with {forced!r} forced" if forced else ""
    fail(NotImplementedError, op.name, "device", got, reasons[order[-1]])


def _planned_for(device: Device, implementation: Implementation) -> str:
    if device.capability is not None:
        return GPUS[device.capability].tiles
    return "cpu" if implementation == "cpp" else "interpreter"


def capability(
    op: KernelOp,
    device: Device,
    forced: Implementation | None,
    no_cuda: str = "",
    no_triton: str = "",
    matmul: str = "",
) -> Capability:
    """What runs an op on a device, and why the other implementations do not.

    Args:
        op: of the registry.
        device: of a frontend.
        forced: as for `choose`.
        no_cuda: as for `absent`.
        no_triton: as for `absent`.
        matmul: for an op without a C++ kernel, the function of the framework that multiplies on a CPU; "" for other
            ops.

    Returns:
        What runs, and the reasons.
    """
    reasons = absent(device, no_cuda, no_triton)
    if matmul and device.platform == "cpu":
        reasons["cpp"] = f"grouped products have no C++ kernel; on a CPU {matmul} multiplies"
    try:
        implementation, arch = choose(op, device, forced, no_cuda, no_triton)
    except NotImplementedError:
        return Capability("", reasons)
    if implementation == "cpp":
        return Capability(f"{matmul} on operands dequantized in C++" if matmul else "cpp", reasons)
    if implementation == "triton" and op.compose:
        return Capability(", ".join(part.name for part in op.parts), reasons)
    name = arch if device.capability is None else arch_name(device.capability)
    where = name if name == arch else f"{name} with the tiles of {arch}"
    return Capability(f"{implementation}, {where}", reasons)
