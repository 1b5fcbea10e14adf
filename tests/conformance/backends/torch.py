"""The PyTorch frontend's public ops."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from mxep.torch_frontend import ops

from .arrays import to_numpy, to_torch


def run(name: str, *inputs: np.ndarray, **options: Any) -> Any:
    results = getattr(ops, name)(*map(to_torch, inputs), **options)
    return tuple(map(to_numpy, results)) if isinstance(results, tuple) else to_numpy(results)


OPS: dict[str, Callable] = {name: partial(run, name) for name in ops.OPS}
