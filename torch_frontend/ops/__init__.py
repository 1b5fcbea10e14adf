"""Every op of the registry as a typed op `torch.ops.mxep.<name>`.

    mxep::quantize_row(Tensor x, int rounding=0, bool satfinite=False) -> (Tensor, Tensor)
                       inputs    options                                outputs

In a schema `rounding` is the int of a `Rounding` and a dtype is a name ("bfloat16"). Ops take and return raw bytes and
have no gradient; the differentiable functions are in mxep.torch_frontend. `help(ops.quantize_row)` shows the shapes,
dtypes and errors of an op.
"""

import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ...core_kernels import registry
from ...core_kernels.formats import BLOCK, Rounding
from ...core_kernels.launch import KernelOp, require_dtype, require_multiple, require_rank, require_shape
from ...core_kernels.permute import plan as permute
from ...core_kernels.registry import OPS
from .call import RUN, require_tensor, with_ends
from .call import call as _call
from .launch import array_type, as_bytes, check_devices, check_float8, packed_buffer
from .register import register as _register

__all__ = [*OPS, "OPS", "permute_q_sf"]  # pyright: ignore[reportUnsupportedDunderAll] -- defined from the registry

_SCHEMA_TYPES = {int: "SymInt", bool: "bool", float: "float", str: "str", Rounding: "int"}


def schema(op: KernelOp) -> str:
    """The typed schema of an op: tensors, then options with their defaults."""
    arguments = [f"Tensor {name}" for name in op.inputs]
    if op.optional_ends:
        arguments[-1] = f"Tensor? {op.inputs[-1]}=None"
    for name, option in op.options.items():
        argument = f"{_SCHEMA_TYPES[option.annotation]} {name}"
        if option.default is not option.empty:
            default = int(option.default) if option.annotation is Rounding else option.default
            argument += f'="{default}"' if isinstance(default, str) else f"={default}"
        arguments.append(argument)
    outputs = ", ".join("Tensor" for _ in op.outputs)
    return f"({', '.join(arguments)}) -> {outputs if len(op.outputs) == 1 else f'({outputs})'}"


def _define(op: KernelOp) -> Callable[..., Any]:
    num_inputs, names = len(op.inputs), tuple(op.options)

    def fake(*args: Any) -> Any:
        args = with_ends(op, args)
        tensors = args[:num_inputs]
        check_devices(op.name, op.inputs[0], tensors[0].device, **dict(zip(op.inputs, tensors, strict=True)))
        # Not `op.signature`: its cache hashes shapes, and symbolic sizes have no hash.
        types = (array_type(t.shape, t.dtype) for t in tensors)
        out = op.check(*types, **dict(zip(names, args[num_inputs:], strict=False))).out
        check_float8(op.name, op.inputs, [t.dtype for t in tensors])
        device = tensors[0].device
        outputs = tuple(torch.empty(a.shape, dtype=getattr(torch, a.dtype), device=device) for a in out)
        return outputs[0] if len(outputs) == 1 else outputs

    # The dispatcher passes arguments by position and leaves out trailing ones that equal their defaults.
    return _documented(_register(op.name, schema(op), RUN[op.name], fake), op)


def _documented(overload: Callable[..., Any], op: KernelOp) -> Callable[..., Any]:
    """The overload itself, with the signature and the documentation of the op: a wrapper would cost time."""
    result = Tensor if len(op.outputs) == 1 else tuple[(Tensor,) * len(op.outputs)]
    signature = registry.signature(op, Tensor, result)
    parameters = [
        p.replace(annotation=int, default=int(p.default)) if p.annotation is Rounding else p
        for p in signature.parameters.values()
    ]
    overload.__signature__ = signature.replace(parameters=parameters)  # pyright: ignore[reportFunctionMemberAccess]
    shown = inspect.Signature([p.replace(annotation=p.empty) for p in parameters])
    returned = ", ".join(op.outputs)
    overload.__doc__ = f"{op.name}{shown} -> {returned}\n\n{registry.docstring(op, 'torch')}"
    return overload


globals().update({op.name: _define(op) for op in OPS.values()})
if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """An op of the registry."""
        raise AttributeError(name)


def _checked_q_sf(q: Tensor, sf: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    op = "permute_q_sf"
    for name, tensor in (("q", q), ("sf", sf), ("row_map", row_map)):
        require_tensor(op, name, tensor)
    check_float8(op, ("q", "sf"), (q.dtype, sf.dtype))
    q, sf = as_bytes(q), as_bytes(sf)
    types = [array_type(t.shape, t.dtype) for t in (q, sf, row_map)]
    for name, array in zip(("q", "sf"), types, strict=False):
        require_dtype(op, name, array, "uint8")
        require_rank(op, name, array, 2)
    require_multiple(op, "q", q.shape[1], BLOCK, "last dim")
    require_shape(op, "sf", types[1], (q.shape[0], q.shape[1] // BLOCK), "one scale per 32 values of q's last dim")
    permute.check_map(op, types[2])
    return q, sf


def _permute_q_sf(q: Tensor, sf: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    q, sf = _checked_q_sf(q, sf, row_map)
    packed = packed_buffer(q, sf)
    q, sf = _call(permute.permute_mx, torch.cat([q, sf], dim=1) if packed is None else packed, row_map)
    return q, sf


def _fake_permute_q_sf(q: Tensor, sf: Tensor, row_map: Tensor) -> tuple[Tensor, Tensor]:
    q, sf = _checked_q_sf(q, sf, row_map)
    rows = row_map.shape[0]
    return q.new_empty((rows, q.shape[1]), dtype=torch.uint8), sf.new_empty((rows, sf.shape[1]), dtype=torch.uint8)


permute_q_sf = _register(
    "permute_q_sf", "(Tensor q, Tensor sf, Tensor row_map) -> (Tensor, Tensor)", _permute_q_sf, _fake_permute_q_sf
)
permute_q_sf.__doc__ = """permute_q_sf(q, sf, row_map) -> q, sf

Gather MXFP8 rows: row i of the results is row row_map[i] of q and sf, zeros where row_map[i] is -1.

Views of packed rows, as an all-to-all returns them, are read in place; separate q and sf are packed first.

Args:
    q: (R, K) uint8 or float8_e4m3fn, K a multiple of 32.
    sf: (R, K/32) uint8 or float8_e8m0fnu.
    row_map: (P,) int32, -1 to R - 1.

Returns:
    q (P, K) and sf (P, K/32), uint8.

Raises:
    ValueError: shape, on a CPU also a row that does not exist.
    TypeError: dtype.

Example:
    >>> q, sf = ops.quantize_row(torch.full((1, 32), 3.0))
    >>> ops.permute_q_sf(q, sf, torch.tensor([-1, 0], dtype=torch.int32))[1].tolist()
    [[0], [120]]
"""
