"""One bad argument per call, of every public function, class and op: it raises an error that names the function, the
argument, what came and what is allowed, or fuzz_returns.py says why it returns. ../bad_values.py says what is drawn.

PUBLIC   name -> (call, valid arguments)      arrays as bad_values.Array; floats get a gradient, which is asked for
OPS      name -> valid arguments              from the schemas; what the schema itself refuses, PyTorch says
"""

import re
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from mxep import torch_frontend as mt
from mxep.core_kernels.formats import Rounding
from mxep.core_kernels.policy.numerics import NumericsReport
from mxep.torch_frontend import MXTensor, ops
from mxep.torch_frontend.exchange.all_to_all import a2a_dispatch
from mxep.torch_frontend.integrations.torchao import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    bf16_grouped_mm,
    fp8_rowwise_grouped_mm,
    mxfp8_grouped_mm,
    permute_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
    unpermute_hp_fwd_mxfp8_bwd,
)
from mxep.torch_frontend.ops.checks import FLOATS
from mxep.torch_frontend.products.weights import QuantizedWeights
from mxep.torch_frontend.routing.permute import spread_rows
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from ... import bad_values
from ...bad_values import Array
from ...may_return import Listed, by_argument, verdict
from ...public_names import importable
from ..ops.test_ops import CASES
from .fuzz_arguments import (
    activated,
    array,
    floats,
    ints,
    of_elements,
    packed,
    product,
    route,
    sent,
    sent_replicas,
    tensor,
    unpacked,
    with_biases,
)
from .fuzz_returns import ROWS

SEED, NUMBER, ALL = 0, {"public": 1500, "ops": 1000}, 10**6
"""Cases that are drawn: a third of the cases of public functions; `make check-all` has all."""

RECORDS = {
    "NumericsReport",
    "Capability",
    "MoEStats",
    "TokenReplicas",
    "Route",
    "Routing",
    "RowMap",
    "ExpertOrder",
    "MoEMetrics",
    "ConversionReport",
    "ConvertedExperts",
    "LinearReport",
    "ConvertedLinear",
}
"""Tuples that check nothing by themselves."""
SAME = {"ScaleCalculationMode", "_to_mxfp8_then_scaled_grouped_mm"}
"""Other names of what is in the table."""
RUNS_AS = {"permute_q_sf": "permute_mx"}
NO_ARGUMENTS = {"ops", "debug_checks", "RECIPES"}
OF_MODULES = {"shard_moe", "clip_grad_norm_", "MoERecorder", "convert_moe", "convert_linear", "freeze_weights"}
"""Their arguments are modules and meshes: test_fsdp.py, test_metrics.py, test_convert.py and
test_convert_linear.py have the wrong ones."""
OVER_RANKS = {"expert_parallel_ffn", "expert_parallel_mm", "PeerMemory"}
"""They need several ranks: ep_errors.py and test_peer_memory.py have the wrong arguments."""


def _entered(context: Any) -> None:
    with context:
        pass


PRODUCT: dict[str, Any] = {"A": floats(64, 32), "B_t": floats(2, 64, 32), "offs": ints(32, 64)}
OUT = {"out_dtype": torch.bfloat16}
EXCHANGE: dict[str, Any] = {"input": floats(6, 32), "output_splits": [6], "input_splits": [6]}
SCALES = {"scaling_mode": "rceil", "block_size": 32}
STATS = mt.MoEStats(torch.tensor([3, 1]), torch.tensor(1.0), torch.tensor(0))
SIZES: dict[str, Any] = {"dim": 32, "hidden_dim": 64, "num_experts": 2}
ROUTE: dict[str, Any] = {
    "score_func": "sigmoid", "normalize": True, "route_scale": 2.5, "num_groups": 1, "top_k_groups": 1,
    "group_score": "max", "force_balance": False,
}  # fmt: skip
MX_PARTS = {"q": array(ops.quantize_row(torch.ones(4, 64))[0]), "sf": array(ops.quantize_row(torch.ones(4, 64))[1])}
WAYS = {"row_map": ints(2, -1, 0, 1), "inverse": ints(2, 3, 0)}

SIX_ROWS = {"rows": floats(6, 32), "counts": ints(1, 2, 3, 0)}


PUBLIC: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "grouped_mm": (
        mt.grouped_mm,
        {
            "x": floats(64, 32), "w": floats(2, 64, 32), "group_ends": ints(32, 64), "recipe": "mxfp8",
            "bias": floats(2, 64), **OUT, "pad_token_groups": True, "group_sizes": None,
        },
    ),
    "linear": (
        mt.linear, {"x": floats(64, 32), "w": floats(96, 32), "bias": floats(96), "recipe": "mxfp8", **OUT}
    ),
    "MXLinear": (mt.MXLinear, {"in_features": 32, "out_features": 64, "bias": True, "recipe": "mxfp8"}),
    "MXLinear.forward": (lambda x: mt.MXLinear(32, 64)(x), {"x": floats(5, 32)}),
    "dispatch": (sent, {**SIX_ROWS, "recipe": "mxfp8", "group": ""}),
    "dispatch.TokenReplicas": (
        sent_replicas, {"rows": floats(2, 32), "order": ints(1, 0, 2, 3), "inverse": ints(1, 0, 2, 3), "top_k": 2}
    ),
    "dispatch_probs": (
        lambda probs: mt.dispatch_probs(probs, route("mxfp8")), {"probs": floats(2, 2, dtype="float32")}
    ),
    "combine": (
        lambda groups, probs, out_dtype: mt.combine(groups, route("bf16"), probs, out_dtype=out_dtype),
        {"groups": floats(128, 32), "probs": floats(2, 2, dtype="float32"), **OUT},
    ),
    "sort_by_expert": (
        mt.sort_by_expert,
        {"expert_ids": Array(np.array([[1, 0], [0, 1], [1, 0]]), "int32"), "num_experts": 2},
    ),
    "a2a_dispatch": (a2a_dispatch, {**EXCHANGE, "group_name": ""}),
    "mxfp8_grouped_mm": (
        product(mxfp8_grouped_mm),
        {
            **PRODUCT, "bias": floats(2, 64), **OUT, "kernel_preference": "auto",
            "wgrad_with_hp": True, "scale_calculation_mode": "rceil",
            "pad_token_groups_for_grouped_mm": True, "compute": "exact",
        },
    ),
    "bf16_grouped_mm": (product(bf16_grouped_mm), {**PRODUCT, **OUT}),
    "fp8_rowwise_grouped_mm": (product(fp8_rowwise_grouped_mm), {**PRODUCT, **OUT}),
    "grouped_swiglu_ffn": (
        mt.grouped_swiglu_ffn,
        {
            "x": floats(64, 32), "w1": floats(2, 96, 32), "w3": floats(2, 96, 32), "w2": floats(2, 32, 96),
            "group_ends": ints(32, 64), "prob": floats(64, dtype="float32"), "recipe": "mxfp8",
            "biases": None, "pad_token_groups": False, "group_sizes": None,
        },
    ),
    "grouped_swiglu_ffn.biases": (
        with_biases, {"b1": floats(2, 96), "b3": floats(2, 96), "b2": floats(32)},
    ),
    "SwiGLU": (activated, {"alpha": 1.702, "limit": 7.0, "offset": 1.0}),
    "unpack_expert_weights": (
        unpacked,
        {
            "gate_up": floats(2, 64, 192), "down": floats(2, 96, 64), "gate_up_bias": floats(2, 192),
            "down_bias": floats(2, 64), "interleaved": True, "transposed": True,
        },
    ),
    "pack_expert_weights": (
        packed,
        {
            "w1": floats(2, 96, 64), "w3": floats(2, 96, 64), "w2": floats(2, 64, 96), "b1": floats(2, 96),
            "b3": floats(2, 96), "b2": floats(2, 64), "interleaved": True, "transposed": False,
        },
    ),
    "quantize_weights": (mt.quantize_weights, {"w": floats(2, 64, 32), "recipe": "mxfp8", "frozen": False}),
    "QuantizedWeights.with_values": (
        lambda values: mt.quantize_weights(torch.ones(2, 64, 32)).with_values(values), {"values": floats(2, 64, 32)}
    ),
    "numerics_report": (
        lambda **given: mt.numerics_report(mt.MoE(32, 64, 2, mt.RouterConfig(1)), **given),
        {"x": floats(5, 32), "dout": floats(5, 32)}
    ),
    "swiglu": (mt.swiglu, {"gate": floats(5, 7), "up": floats(5, 7), "prob": floats(5, dtype="float32")}),
    "gather_rows": (mt.gather_rows, {"x": floats(3, 32), **WAYS}),
    "spread_rows": (
        spread_rows, {"x": floats(2, 32), "order": ints(2, 0, 1, 3), "inverse": ints(1, 2, 0, 3), "top_k": 2}
    ),
    "weighted_combine": (
        mt.weighted_combine,
        {
            "rows": floats(4, 32), "probs": floats(2, 2, dtype="float32"),
            "slots": array(torch.tensor([[2, 0], [3, 1]])), "order": ints(1, 3, 0, 2), **OUT,
        },
    ),
    "permute_mxfp8_fwd_hp_bwd": (
        permute_mxfp8_fwd_hp_bwd,
        {
            "mx_tensor": floats(6, 32), "num_tokens_per_expert": ints(1, 2, 3, 0), "ep_degree": 2,
            "num_local_experts": 2, "group_size_multiple_of": 32, "use_mxfp8": True, "use_triton_for_bwd": True,
        },
    ),
    "unpermute_hp_fwd_mxfp8_bwd": (
        unpermute_hp_fwd_mxfp8_bwd,
        {"input": floats(4, 32), "permuted_indices": ints(2, -1, 0, 1), "padded_shape": (4, 32)},
    ),
    "a2a_dispatch_mxfp8_fwd_hp_bwd": (a2a_dispatch_mxfp8_fwd_hp_bwd, {**EXCHANGE, "group_name": "", **SCALES}),
    "a2a_combine_hp_fwd_mxfp8_bwd": (
        a2a_combine_hp_fwd_mxfp8_bwd, {**EXCHANGE, "group_name": "", **SCALES, "mxfp8_bwd": False}
    ),
    "to_mxfp8_a2a_dequant": (to_mxfp8_a2a_dequant, {**EXCHANGE, "group": ""}),
    "MXTensor": (MXTensor, {**MX_PARTS, "orig_dtype": torch.bfloat16}),
    "MXTensor.quantize": (MXTensor.quantize, {"x": floats(4, 64), "rounding": "rceil", "packed": True}),
    "MXTensor.from_packed": (
        MXTensor.from_packed,
        {"packed": array(ops.quantize_row_packed(torch.ones(4, 64))), "orig_dtype": torch.bfloat16},
    ),
    "MXTensor.dequantize": (
        lambda output_dtype: MXTensor.quantize(torch.ones(4, 64)).dequantize(output_dtype),
        {"output_dtype": torch.float32},
    ),
    "MXTensor.to_mx": (
        MXTensor.to_mx,
        {
            "data_hp": floats(4, 64), "elem_dtype": torch.float8_e4m3fn, "block_size": 32, "scaling_mode": "floor",
            "act_quant_kwargs": None, "is_swizzled_scales": False,
        },
    ),
    "MXTensor.from_qdata_and_scales": (
        of_elements,
        {
            "qdata": MX_PARTS["q"], "scales": MX_PARTS["sf"], "orig_dtype": torch.bfloat16, "block_size": 32,
            "act_quant_kwargs": None, "is_swizzled_scales": False,
        },
    ),
    "Recipe": (
        mt.Recipe,
        {
            "name": "mine", "operands": "mxfp8", "wgrad_with_hp": True, "rounding": "rceil", "compute": "exact",
            "alignment": 32,
        },
    ),
    "Recipe.parse": (
        lambda recipe, alignment: mt.Recipe.parse(recipe, alignment=alignment), {"recipe": "mxfp8", "alignment": 64}
    ),
    "Rounding": (lambda rounding: Rounding.parse(rounding), {"rounding": "rceil"}),
    "GroupedExperts": (mt.GroupedExperts, {**SIZES, "recipe": "mxfp8"}),
    "GroupedExperts.forward": (
        lambda **given: mt.GroupedExperts(32, 64, 2)(**given),
        {"groups_PD": floats(64, 32), "padded_counts": ints(32, 32), "probs_P": floats(64, dtype="float32")},
    ),
    "MoE": (
        mt.MoE,
        {
            **SIZES, "router": mt.RouterConfig(1), "shared": mt.SharedExpert(64), "recipe": "mxfp8", "bias": True,
            "activation": mt.SwiGLU(), "recompute": True,
        },
    ),
    "MoE.forward": (lambda x: mt.MoE(32, 64, 2, mt.RouterConfig(1))(x), {"x": floats(5, 32)}),
    "MoE.forward.routed": (
        lambda **given: mt.MoE(32, 64, 2, mt.RouterConfig(1))(**given),
        {
            "x": floats(5, 32), "experts": Array(np.array([[0], [1], [0], [1], [0]]), "int64"),
            "weights": floats(5, 1, dtype="float32"),
        },
    ),
    "RouterConfig": (
        mt.RouterConfig, {"top_k": 1, "bias": True, "selection_bias": True, "prob_in": "combine", **ROUTE}
    ),
    "SharedExpert": (mt.SharedExpert, {"hidden_dim": 64, "gate": True}),
    "MoEStats.metrics": (
        lambda **given: torch.tensor(STATS.metrics(**given)["imbalance"]),
        {"dim": 32, "recipe": "mxfp8", "ranks": 2, "prob_in": "swiglu"},
    ),
    "route": (
        lambda **given: mt.route(**given).weights,
        {"logits": floats(5, 2), "router": mt.RouterConfig(1), "selection_bias": floats(2, dtype="float32")},
    ),
    "update_selection_bias": (
        mt.update_selection_bias, {"selection_bias": floats(2, dtype="float32"), "counts": ints(3, 4), "rate": 0.1}
    ),
    "ExpertParallel": (mt.ExpertParallel, {"recipe": "mxfp8", "gradients": "mean"}),
    "capabilities": (mt.capabilities, {"device": "cpu"}),
    "force_implementation": (
        lambda implementation: _entered(mt.force_implementation(implementation)), {"implementation": "cpp"}
    ),
}  # fmt: skip

RETURNS = (
    Tensor,
    tuple,
    dict,
    QuantizedWeights,
    NumericsReport,
    torch.nn.Module,
    mt.Recipe,
    Rounding,
    mt.RouterConfig,
    mt.SharedExpert,
    mt.ExpertParallel,
    type(None),
)


@cache
def op_table() -> dict[str, dict[str, Any]]:
    """The valid arguments of test_ops.py by name; options that it leaves out have their defaults."""
    table = {}
    for name, arguments in CASES.items():
        schema = getattr(torch.ops.mxep, name).default._schema.arguments
        given = [array(value) if isinstance(value, Tensor) else value for value in arguments()]
        given += [argument.default_value for argument in schema[len(given) :]]
        table[f"ops.{name}"] = dict(zip([argument.name for argument in schema], given, strict=True))
    return table


def outcome(case: bad_values.Case) -> str:
    """What is wrong with what the call does; "" if nothing is."""
    returned, wrong = run(case)
    return wrong or verdict(listed(), case, returned)


@cache
def listed() -> Listed:
    """ROWS by argument."""
    calls = {**calls_of("public"), **calls_of("ops")}
    return by_argument(ROWS, [f"{name}.{argument}" for name, good in calls.items() for argument in good])


def run(case: bad_values.Case) -> tuple[bool, str]:
    """Whether the call returns, and what is wrong with its result or its error; "" if nothing is."""
    public = case.call in PUBLIC
    name = case.call.removeprefix("ops.")
    call, good = PUBLIC[name] if public else (getattr(torch.ops.mxep, name), op_table()[case.call])
    given = {name: tensor(value) for name, value in (good | {case.argument: case.bad.value}).items()}
    torch.manual_seed(0)
    try:
        if not public:
            return True, strange(call(**given))
        leaves = [x.requires_grad_() for x in given.values() if isinstance(x, Tensor) and x.dtype in FLOATS]
        result = call(**given)
        if leaves:
            backward(result)
        return True, strange(result)
    except Exception as error:
        if not public and re.search(r"mxep(::|\.)\w+|Overflow when unpacking", str(error)):
            return False, ""  # refused by the schema, or by the class of the tensor
        names = {name, name.split(".")[0], "Recipe", RUNS_AS.get(name)}
        said = bad_values.complaint(error, names, good.keys())
        return False, "" if said.startswith("says not") and "; allowed: " in said else said


def strange(result: Any) -> str:
    return "" if isinstance(result, RETURNS) else f"returned {result!r}"


def backward(result: Any) -> None:
    for out in result if isinstance(result, tuple) else (result,):
        if isinstance(out, Tensor) and out.requires_grad:
            (out.dequantize() if isinstance(out, MXTensor) else out).sum().backward()


EXOTIC: dict[str, Callable[[Tensor], Any]] = {
    "sparse": lambda x: x.to_sparse(),
    "meta": lambda x: x.to("meta"),
    "nested": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "MXTensor": lambda x: MXTensor.quantize(torch.ones(x.shape[0], 32)),
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "float4": lambda x: torch.zeros(x.shape, dtype=torch.uint8).view(torch.float4_e2m1fn_x2),
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else torch.stack([x, x], 1)[:, 0],
}
"""What else a tensor can be, made of the valid one."""


def exotic_cases(calls: dict[str, dict[str, Any]]) -> list[bad_values.Case]:
    cases = [
        bad_values.Case(name, argument, bad_values.Bad("exotic", make(tensor(good)), kind))
        for name, arguments in calls.items()
        for argument, good in arguments.items()
        if isinstance(good, Array)
        for kind, make in EXOTIC.items()
    ]
    return [case for case in cases if case.bad.name != "transposed" or not case.bad.value.is_contiguous()]


def huge(case: bad_values.Case) -> bool:
    """Sizes that are allowed and take more memory than a test has."""
    sizes = ("dim", "hidden_dim", "num_experts", "in_features", "out_features")
    return case.argument in sizes and case.bad.value in (2**31 - 1, 2**31)


def calls_of(table: str) -> dict[str, dict[str, Any]]:
    return op_table() if table == "ops" else {name: good for name, (_, good) in PUBLIC.items()}


def check(cases: list[bad_values.Case]) -> None:
    wrong = [f"{case}: {said}" for case in cases if not huge(case) and (said := outcome(case))]
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("table", ["public", "ops"])
def test_valid_arguments(table: str) -> None:
    """Without this a table of wrong arguments would pass: every call would raise, and well."""
    for name, good in calls_of(table).items():
        call = PUBLIC[name][0] if table == "public" else getattr(torch.ops.mxep, name.removeprefix("ops."))
        call(**{argument: tensor(value) for argument, value in good.items()})


@pytest.mark.parametrize("table", ["public", "ops"])
def test_one_bad_argument(table: str) -> None:
    check(bad_values.draw(calls_of(table), NUMBER[table], SEED))


@pytest.mark.slow
def test_all_bad_arguments_of_public_functions() -> None:
    check(bad_values.draw(calls_of("public"), ALL, SEED))


@pytest.mark.parametrize("table", ["public", "ops"])
def test_one_tensor_of_another_kind(table: str) -> None:
    check(exotic_cases(calls_of(table)))


def test_the_values_of_fake_tensors_are_not_read() -> None:
    """A memory estimator runs without values. Experts are left out: PyTorch reads values to initialise them; and so is
    the report, which is of values."""
    with FakeTensorMode() as mode:
        for name, (call, good) in PUBLIC.items():
            if not name.startswith(("MoE", "MXLinear", "GroupedExperts", "numerics_report")):
                given = {argument: tensor(value) for argument, value in good.items()}
                call(**{k: mode.from_tensor(v) if isinstance(v, Tensor) else v for k, v in given.items()})


def test_nothing_is_forgotten() -> None:
    known = {name.split(".")[0] for name in PUBLIC} | RECORDS | SAME | NO_ARGUMENTS | OF_MODULES | OVER_RANKS
    assert importable(mt).keys() - known == set()
    assert {name.removeprefix("ops.") for name in op_table()} == {*ops.OPS, "permute_q_sf"}
