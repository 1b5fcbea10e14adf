"""Ops that work row by row, or matrix by matrix, on arrays that a mesh splits: each device runs the op on its part.

automatic axes   attributes of the custom call: XLA divides a call that they name along its leading dims
explicit axes    a shard_map over the axes that the types have in the leading dims

The dims behind them are whole: a scale or a sum covers blocks of them, and parts of such a dim are gathered. Every
other op reads rows of several devices, and the program gathers its inputs (`call.whole`). A Triton kernel is launched
with a grid for all rows, which XLA cannot divide: on automatic axes of a GPU it is gathered too.
"""

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from ...core_kernels.launch import ArrayType, KernelOp

_BY_ROWS = (
    "quantize_row", "quantize_row_packed", "quantize_rowwise", "quantize_blockwise", "quantize_row_fold",
    "dequantize", "fold_rows", "swiglu", "swiglu_row", "swiglu_row_fold", "swiglu_blockwise", "swiglu_bwd",
    "swiglu_bwd_row", "swiglu_blockwise_bwd",
)  # fmt: skip
_BY_MATRICES = (
    "quantize_col",
    "quantize_both",
    "quantize_matrix_fold",
    "quantize_matrix_fold_t",
    "quantize_squares",
    "quantize_squares_both",
)
WHOLE_DIMS: dict[str, int] = {name: dims for dims, names in ((1, _BY_ROWS), (2, _BY_MATRICES)) for name in names}
"""The dims at the end of the op's first input that its outputs read as a whole; the dims in front divide the work."""

Shape = tuple[int, ...]


def _leading(op: KernelOp, inputs: Sequence[Shape]) -> int:
    """The dims that divide the work: none for an op with group ends, which count the rows of all devices."""
    first = inputs[0]
    if op.optional_ends and inputs[-1] != (0,):
        return 0
    return max(len(first) - WHOLE_DIMS.get(op.name, len(first)), 0)


def _has(shape: Shape, leading: Shape) -> bool:
    return shape[: len(leading)] == leading


def _divisible(outputs: Sequence[Shape], leading: Shape) -> bool:
    """An empty output has no rows to divide."""
    return all(_has(shape, leading) or 0 in shape for shape in outputs)


# --- Automatic axes ---


def attributes(op: KernelOp, inputs: Sequence[Shape], outputs: Sequence[Shape]) -> dict[str, ir.Attribute] | None:
    """What tells XLA to divide a custom call of the op, whose target is registered as batch partitionable."""
    leading = inputs[0][: _leading(op, inputs)]
    known = all(isinstance(size, int) for size in chain(*inputs, *outputs))  # not the symbols of jax.export
    if not leading or not known or not _divisible(outputs, leading):
        return None
    sizes = list(leading)

    def dims(shapes: Sequence[Shape]) -> str:
        """A name per dim: shared for the leading ones, its own for every other."""
        texts = []
        for shape in shapes:
            shared = len(leading) if _has(shape, leading) else 0
            own = range(len(sizes), len(sizes) + len(shape) - shared)
            sizes.extend(shape[shared:])
            texts.append(f"[{', '.join(_name(i) for i in chain(range(shared), own))}]")
        return ", ".join(texts)

    rule = f"({dims(inputs)})->({dims(outputs)})"
    named = ", ".join(f"{_name(i)}={size}" for i, size in enumerate(sizes))
    whole = ", ".join(_name(i) for i in range(len(leading), len(sizes)))
    text = f"#sdy.op_sharding_rule<{rule} {{{named}}} need_replication={{{whole}}}, custom>"
    count = ir.StringAttr.get(str(len(leading)))
    return {
        "sdy.sharding_rule": ir.Attribute.parse(text),
        "mhlo.frontend_attributes": ir.DictAttr.get({"num_batch_dims": count}),
    }


def _name(i: int) -> str:
    """Shardy's names of factors: i to z, then z_1, z_2 and so on."""
    return chr(ord("i") + i) if i < 18 else f"z_{i - 17}"


# --- Explicit axes ---


def alike(arrays: Sequence[Any], dims: int) -> tuple[Any, ...]:
    """The arrays with their first `dims` dims split over explicit axes like the first array with such a split, and
    whole in the other dims. Arrays of other sizes are whole; None is returned as None."""
    sharding, spec = _split_of(arrays, dims)
    if spec is None:
        return tuple(arrays)
    leading = arrays[0].shape[:dims]
    parts = tuple(spec if x is not None and _has(x.shape, leading) else PartitionSpec() for x in arrays)
    return tuple(x if x is None else _moved(x, sharding.mesh, part) for x, part in zip(arrays, parts, strict=True))


def over_parts(
    op: KernelOp, run: Callable[..., tuple[jax.Array, ...]], arrays: Sequence[jax.Array], outputs: Sequence[ArrayType]
) -> tuple[jax.Array, ...] | None:
    """run(*arrays) by each device on its part; None if no explicit axis splits the leading dims.

    Empty arrays stay on their side of the shard_map: jaxlib 0.11.2 aborts the process when one crosses."""
    dims = _leading(op, [x.shape for x in arrays])
    leading = arrays[0].shape[:dims]
    sharding, spec = _split_of(arrays, dims)
    if spec is None or 0 in leading or not _divisible([out.shape for out in outputs], leading):
        return None
    arrays, mesh = alike(arrays, dims), sharding.mesh
    crossing = [x for x in arrays if x.size]

    def local(*parts: jax.Array) -> tuple[jax.Array, ...]:
        rest = iter(parts)
        written = run(*(next(rest) if x.size else jnp.zeros(x.shape, x.dtype) for x in arrays))
        return tuple(x for x in written if x.size)

    in_specs = tuple(spec if _has(x.shape, leading) else PartitionSpec() for x in crossing)
    out_specs = tuple(spec for out in outputs if 0 not in out.shape)
    axes = {axis for axis, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    results = iter(jax.shard_map(local, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names=axes)(*crossing))
    return tuple(jnp.zeros(out.shape, out.dtype) if 0 in out.shape else next(results) for out in outputs)


def _split_of(arrays: Sequence[Any], dims: int) -> tuple[Any, PartitionSpec | None]:
    for x in arrays:
        if x is not None and (parts := tuple(jax.typeof(x).sharding.spec)[:dims]) and any(parts):
            return jax.typeof(x).sharding, PartitionSpec(*parts)
    return None, None


def _moved(x: jax.Array, mesh: Any, spec: PartitionSpec) -> jax.Array:
    spec = PartitionSpec(*spec, *(None,) * (len(x.shape) - len(spec)))
    return x if jax.typeof(x).sharding.spec == spec else jax.reshard(x, NamedSharding(mesh, spec))
