"""The definition of every op by the op's name, from the oracles of all families.

A definition remembers its results: every backend of a test asks for them, with arrays of the same bytes.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from functools import wraps
from typing import Any

import numpy as np
from mxep.core_kernels.combine import oracle as combine
from mxep.core_kernels.fold import oracle as fold
from mxep.core_kernels.grouped_gemm.blockwise import oracle as grouped_gemm_blockwise
from mxep.core_kernels.grouped_gemm.exact import oracle as grouped_gemm
from mxep.core_kernels.grouped_gemm.folded import oracle as oracle_folded
from mxep.core_kernels.permute import oracle as permute
from mxep.core_kernels.quantize import oracle as quantize
from mxep.core_kernels.quantize import oracle_blockwise as quantize_blockwise
from mxep.core_kernels.router import oracle as router
from mxep.core_kernels.routing import oracle as routing
from mxep.core_kernels.scale_layout import oracle as scale_layout
from mxep.core_kernels.swiglu import oracle as swiglu

ORACLES = (
    *(quantize, quantize_blockwise, permute, router, routing, scale_layout, swiglu, combine, fold),
    *(grouped_gemm, oracle_folded, grouped_gemm_blockwise),
)


RESULTS: OrderedDict[Any, Any] = OrderedDict()
MOST_RESULTS = 160
"""More than the tests of a file have on one backend."""


def key_of(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return repr(value)
    return value.shape, value.dtype.name, hashlib.sha1(value.tobytes()).digest()


def remembered(define: Callable) -> Callable:
    @wraps(define)
    def call(*arguments: Any, **options: Any) -> Any:
        key = define, *map(key_of, arguments), *((name, key_of(value)) for name, value in options.items())
        RESULTS[key] = RESULTS.pop(key) if key in RESULTS else define(*arguments, **options)
        if len(RESULTS) > MOST_RESULTS:
            RESULTS.popitem(last=False)
        return RESULTS[key]

    return call


DEFINITIONS: dict[str, Callable] = {
    name: remembered(value) for oracle in ORACLES for name, value in vars(oracle).items() if callable(value)
}
