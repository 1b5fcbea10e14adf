"""The list of ops, by name.

    core_kernels/<family>/plan*.py --> OPS --> torch.ops.mxep and torch_frontend.ops
                                           --> jax_frontend.ops
                                           --> capabilities, conformance backends, tests

An op of a listed module is in OPS; a new module of plans is added to `_PLANS`.
"""

import inspect
import re
from typing import Any

from .combine import plan as combine
from .fold import plan as fold
from .fold import plan_both, plan_matrix, plan_requantize
from .fold import plan_permute as fold_permute
from .grouped_gemm import plan as grouped_gemm
from .grouped_gemm import plan_blockwise as grouped_gemm_blockwise
from .grouped_gemm import plan_folded, plan_folded_pair, plan_kn
from .launch import KernelOp
from .permute import plan as permute
from .quantize import plan as quantize
from .quantize import plan_blockwise as quantize_blockwise
from .router import plan as router
from .router import plan_logits as router_logits
from .routing import plan as routing
from .scale_layout import plan as scale_layout
from .swiglu import plan as swiglu
from .swiglu import plan_bwd_fold as swiglu_bwd_fold
from .swiglu import plan_fold as swiglu_fold

_PLANS = (
    *(quantize, quantize_blockwise, permute, router, router_logits, routing),
    *(fold, plan_both, plan_matrix, plan_requantize, fold_permute),
    scale_layout,
    *(combine, swiglu, swiglu_fold, swiglu_bwd_fold),
    *(grouped_gemm, plan_kn, plan_folded, plan_folded_pair, grouped_gemm_blockwise),
)
OPS: dict[str, KernelOp] = {
    op.name: op for module in _PLANS for op in vars(module).values() if isinstance(op, KernelOp)
}


def signature(op: KernelOp, array: Any, result: Any) -> inspect.Signature:
    """The signature of a frontend's function: arrays, then options, each by position or by name."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    arrays = [inspect.Parameter(name, kind, annotation=array) for name in op.inputs]
    options = [option.replace(kind=kind) for option in op.options.values()]
    return inspect.Signature([*arrays, *options], return_annotation=result)


def docstring(op: KernelOp, functions: str) -> str:
    """The docstring of a frontend's function. Examples call `functions`, "torch" or "jnp"."""
    return re.sub(r"\bxp\.", f"{functions}.", inspect.cleandoc(op.doc))
