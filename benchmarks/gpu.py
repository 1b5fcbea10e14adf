"""`python -m benchmarks gpu`: everything that is measured on one GPU.

    host_overhead                        gpu_ops.py           what an eager torch op costs the host
    families of ops that a copy bounds   gpu_ops.py           quantize, fold, permute, routing, swiglu, combine
    grouped_gemm                         gpu_grouped_gemm.py  the grouped products and their gradients
    moe_layer                            gpu_moe_layer.py     the whole layer
    sonic_moe                            gpu_moe_layer.py     the whole layer against SonicMoE, where it is installed

A case or a peer that fails is printed; the run measures the others and then ends with an error.
"""

from collections.abc import Iterator, Sequence

from mxep.core_kernels.launch import fail

from . import gpu_grouped_gemm, gpu_moe_layer, gpu_ops
from .cases import moe_layer
from .cases.ops import families
from .cases.products import grouped_gemm
from .cases.shapes import H200, Shapes
from .clocks import device_timing
from .clocks.device_timing import Each
from .figures.failures import guarded
from .figures.results import Line

FAMILIES = {
    "host_overhead": ("host_overhead",),
    **families.OPS,
    "grouped_gemm": grouped_gemm.OPS,
    "moe_layer": moe_layer.OPS,
    "sonic_moe": (moe_layer.SONIC_OP,),
}
"""Family -> names of the ops measured. `--only` takes both."""
NAMES = (*FAMILIES, *(name for names in FAMILIES.values() for name in names))


def ops_named(only: Sequence[str]) -> tuple[str, ...]:
    """The ops that names of ops and of families select; all ops without a name.

    >>> ops_named(["moe_layer", "combine"])
    ('combine', 'moe_layer_fwd', 'moe_layer_fwd_bwd')

    Raises ValueError for an unknown name.
    """
    ops = [name for names in FAMILIES.values() for name in names]
    if unknown := set(only) - {*ops, *FAMILIES}:
        fail(ValueError, "gpu", "ops", ", ".join(sorted(unknown)), f"allowed: {', '.join(sorted({*ops, *FAMILIES}))}")
    selected = {*only, *(name for family in set(only) & set(FAMILIES) for name in FAMILIES[family])}
    return tuple(name for name in ops if not only or name in selected)


def lines(
    only: Sequence[str], shapes: Shapes = H200, device: str = "cuda", each: Each = device_timing.events
) -> Iterator[Line]:
    """Check and measure every op, or those named. Raises RuntimeError at the end if anything failed.

    shapes, device, each (the clock of torch programs): other than the defaults only in tests, on a CPU.
    """
    named = ops_named(only)
    failures: list[str] = []
    if "host_overhead" in named:
        yield from guarded("host_overhead", gpu_ops.host_lines(device, failures), failures)
    yield from gpu_ops.lines(named, shapes.layer, device, each, failures)
    yield from gpu_grouped_gemm.lines(named, shapes.products, device, each, failures)
    yield from gpu_moe_layer.lines(named, shapes.moe_layers, shapes.uneven, device, each, failures)
    if moe_layer.SONIC_OP in named:
        yield from gpu_moe_layer.sonic_lines(shapes.moe_layers, device, failures)
    if failures:
        raise RuntimeError("gpu: " + "; ".join(failures))
