"""Ops by name, in either frontend: the `call` that a case's program takes."""

from typing import Any

import jax
from mxep.jax_frontend import ops as jax_ops
from mxep.jax_frontend.ops import call as jax_launch
from mxep.torch_frontend import ops as torch_ops
from torch import Tensor

from .case import Tensors


def torch_call(op: str, *tensors: Tensor, **options: Any) -> Tensors:
    outputs = getattr(torch_ops, op)(*tensors, **options)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def jax_call(op: str, *arrays: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    return jax_launch.call(jax_ops.OPS[op], *arrays, **options)
