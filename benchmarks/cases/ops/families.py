"""The op families that a device copy bounds, each with the ops that it measures.

The grouped GEMMs and the layer have separate runs: grouped_gemm.py and moe_layer.py.
"""

from collections.abc import Iterator

from mxep.core_kernels.cases import Layer

from ..case import Call, Case
from . import combine, fold, permute, quantize, router, routing, swiglu

_MODULES = {"quantize": quantize, "fold": fold, "permute": permute, "router": router, "routing": routing,
            "swiglu": swiglu, "combine": combine}  # fmt: skip
OPS = {family: tuple(dict.fromkeys(timed.name for timed in module.TIMED)) for family, module in _MODULES.items()}
"""Family -> names of the ops measured."""
NAMES = tuple(name for names in OPS.values() for name in names)


def cases(layer: Layer, call: Call, device: str, only: tuple[str, ...] = NAMES) -> Iterator[Case]:
    """Every case, or the cases of the ops named. A family of which no op is named builds no inputs."""
    for family, names in OPS.items():
        if set(only) & set(names):
            yield from (case for case in _MODULES[family].cases(layer, call, device) if case.name in only)
