"""The list of ops, by name.

    core_kernels/<family>/**/plan*.py --> OPS --> torch.ops.mxep and torch_frontend.ops
                                           --> jax_frontend.ops
                                           --> capabilities, conformance backends, tests

An op of a listed module is in OPS; a new module of plans is added to `_PLANS`.
"""

import inspect
import re
from typing import Any

from .combine import plan as combine
from .fold import plan as fold
from .fold.both import plan as plan_both
from .fold.both import plan_blockwise as plan_blockwise_fold
from .fold.gathered import plan_permute as fold_permute
from .fold.gathered import plan_requantize
from .fold.matrix import plan as plan_matrix
from .grouped_gemm.blockwise import plan as grouped_gemm_blockwise
from .grouped_gemm.exact import plan as grouped_gemm
from .grouped_gemm.exact import plan_kn
from .grouped_gemm.folded import plan as plan_folded
from .grouped_gemm.folded import plan_pair as plan_folded_pair
from .launch import KernelOp
from .permute import plan as permute
from .quantize import plan as quantize
from .quantize import plan_blockwise as quantize_blockwise
from .router import plan as router
from .router import plan_logits as router_logits
from .routing import plan as routing
from .scale_layout import plan as scale_layout
from .swiglu import plan as swiglu
from .swiglu import plan_blockwise as swiglu_blockwise
from .swiglu.folded import plan as swiglu_fold
from .swiglu.folded import plan_bwd as swiglu_bwd_fold

_PLANS = (
    *(quantize, quantize_blockwise, permute, router, router_logits, routing),
    *(fold, plan_both, plan_blockwise_fold, plan_matrix, plan_requantize, fold_permute),
    scale_layout,
    *(combine, swiglu, swiglu_blockwise, swiglu_fold, swiglu_bwd_fold),
    *(grouped_gemm, plan_kn, plan_folded, plan_folded_pair, grouped_gemm_blockwise),
)
OPS: dict[str, KernelOp] = {
    op.name: op for module in _PLANS for op in vars(module).values() if isinstance(op, KernelOp)
}


def signature(op: KernelOp, array: Any, result: Any) -> inspect.Signature:
    """The signature of a frontend's function: arrays, then options, each by position or by name."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arrays = [inspect.Parameter(name, kind, annotation=array) for name in op.inputs]
    if op.optional_ends:
        arrays[-1] = arrays[-1].replace(default=None)
    options = [option.replace(kind=kind) for option in op.options.values()]
    return inspect.Signature([*arrays, *options], return_annotation=result)


def docstring(op: KernelOp, functions: str) -> str:
    """The docstring of a frontend's function. Examples call `functions`, "torch" or "jnp"."""
    return re.sub(r"\bxp\.", f"{functions}.", inspect.cleandoc(op.doc))
