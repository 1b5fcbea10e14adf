"""Every op of the registry as a function on jax arrays: plain bytes in and out, no gradients.

    q, sf = quantize_row(x)                 help(quantize_row): shapes, dtypes, options, errors
    quantize_both(x).q_t                    several outputs are a namedtuple with the names of the op's outputs

E4M3 data (`q`) and E8M0 scales (`sf`) are uint8. All functions are pure, trace under jit, shard_map and remat, and
raise ValueError (shape, value) or TypeError (dtype) while tracing. `rounding` is a `Rounding` or its name,
`out_dtype` a dtype or its name. The differentiable functions are in mxep.jax_frontend. In a jit that shards its
arrays without shard_map, each device runs an op of `split.WHOLE_DIMS` on its rows; the inputs of others are gathered.

`jax.export.export` takes the kernels, which are custom calls, by name: `export_checks()` lists them.
"""

from collections import namedtuple
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from jax.export import register_namedtuple_serialization

from ...core_kernels import registry
from ...core_kernels.formats import Rounding
from ...core_kernels.launch import KernelOp
from ...core_kernels.registry import OPS
from . import launch as launch  # registers the lowering of every op
from .call import call as _call

__all__ = [*OPS, "OPS", "ExpertOrder", "RowMap"]  # pyright: ignore[reportUnsupportedDunderAll] -- from the registry


class RowMap(NamedTuple):
    """The rows of the padded expert-major buffer; read by `permute_*` and, backwards, by `unpermute_*`.

    Attributes:
        row_map: (P,) int32. Padded row i is received row row_map[i], -1 for padding.
        inverse: (R,) int32. Received row j is padded row inverse[j], -1 where no token was received.
        padded_counts: (G,) int32, rows of each local expert with padding.
        group_ends: (G,) int32, the end of each group.
    """

    row_map: jax.Array
    inverse: jax.Array
    padded_counts: jax.Array
    group_ends: jax.Array


class ExpertOrder(NamedTuple):
    """The order of slots by expert; all int32.

    Attributes:
        order: (T,), slots grouped by expert, stable.
        inverse: (T,), the position of each slot.
        counts: (E,), slots of each expert.
    """

    order: jax.Array
    inverse: jax.Array
    counts: jax.Array


_RESULTS = {"row_map": RowMap, "sort_by_expert": ExpertOrder}
_ANNOTATIONS = {"rounding": Rounding | str, "out_dtype": jax.typing.DTypeLike}


def _function(op: KernelOp) -> Callable[..., Any]:
    result: Any = jax.Array
    if len(op.outputs) > 1:
        result = _RESULTS.get(op.name) or namedtuple(f"{op.name}_result", op.outputs, module=__name__)
        register_namedtuple_serialization(result, serialized_name=f"mxep.{result.__name__}")
    signature = registry.signature(op, jax.Array, result)
    parameters = [p.replace(annotation=_ANNOTATIONS.get(p.name, p.annotation)) for p in signature.parameters.values()]
    signature = signature.replace(parameters=parameters)

    def function(*arguments: Any, **named: Any) -> Any:
        try:
            given = signature.bind(*arguments, **named).arguments
        except TypeError as error:
            raise TypeError(f"{op.name}: {error}") from None
        arrays = [given.pop(name, None) for name in op.inputs]
        if op.optional_ends and arrays[-1] is None:
            del arrays[-1]
        outputs = _call(op, *arrays, **given)
        return outputs[0] if result is jax.Array else result(*outputs)

    function.__name__ = function.__qualname__ = op.name
    function.__doc__ = registry.docstring(op, "jnp")
    function.__signature__ = signature  # pyright: ignore[reportFunctionMemberAccess]
    return function


globals().update({name: _function(op) for name, op in OPS.items()})
if TYPE_CHECKING:

    def __getattr__(name: str) -> Callable[..., Any]:
        """An op of the registry."""
        raise AttributeError(name)
