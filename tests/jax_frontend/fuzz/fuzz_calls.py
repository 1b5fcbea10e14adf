"""A call of every public function and op of the JAX frontend that returns. To import this file compiles programs."""

import inspect
from datetime import timedelta
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec
from mxep import jax_frontend as mxep
from mxep.core_kernels.formats import Rounding
from mxep.jax_frontend import MoEConfig, MXArray, RouterConfig, ops
from mxep.jax_frontend.exchange.all_to_all import plan_exchange

from ...cases import sample, sample_arrays
from ...public_names import importable
from ..references import normal

M, K, N, F, G, T, TOP_K = 64, 64, 32, 32, 2, 32, 2
X, W = normal(M, K), normal(G, N, K, seed=1)
W1, W2 = normal(G, F, K, seed=2), normal(G, K, F, seed=3)
GATE, PROB, NONE = normal(M, F, seed=4), jnp.full(M, 0.5), jnp.zeros(0)
ENDS, COUNTS = jnp.array([32, 64], jnp.int32), jnp.array([30, 34], jnp.int32)
MX = MXArray.quantize(X)
Q, SF, Q_T, SF_T = ops.quantize_both(X)
WQ, WSF = ops.quantize_row(W)
XF, WF = ops.fold_rows(Q, SF), ops.fold_rows(WQ, WSF)
TF = ops.fold_groups(Q_T, SF_T, ENDS)
PACKED = ops.quantize_row_packed(X)
IDS = jnp.arange(M, dtype=jnp.int32) % G
ORDER, INVERSE, _ = ops.sort_by_expert(IDS, G)
SLOTS, TOKEN_PROBS, DY = INVERSE.reshape(T, TOP_K), jnp.full((T, TOP_K), 0.5), normal(T, K, seed=5)
GROUPS, _, ROUTE = mxep.dispatch(
    mxep.TokenReplicas(DY, ORDER, INVERSE, TOP_K), jnp.bincount(IDS, length=G), recipe="bf16"
)
EXCHANGE = plan_exchange(COUNTS, None, num_rows=M)
MAPS = ops.row_map(COUNTS, num_rows=M, num_local_experts=G)
PADDED = normal(MAPS.row_map.shape[0], K, seed=6)
BLOCKED = ops.block_scales(SF, ENDS)
CONFIG = MoEConfig(K, F, num_experts=G, router=RouterConfig(top_k=1))
PARAMS = {"router": normal(G, K, dtype="float32"), "experts": {"w1": W1, "w3": W1, "w2": W2}}
MESH = jax.make_mesh((1, 1), ("data", "expert"), (AxisType.Auto,) * 2, devices=jax.devices("cpu")[:1])
MEMORY = mxep.PeerMemory(MESH, "expert")
HELD = mxep.quantize_weights(W)
SCALES = {"rounding": "rceil", "satfinite": False}
GLU = {"gate": GATE, "up": GATE, "prob": PROB}
NUMBERS = {"alpha": 1.702, "limit": 7.0, "offset": 1.0}
PRODUCT = {"recipe": "mxfp8", "mx_grad": False, "pad_token_groups": True}
ROUTING = {
    "score_func": "sigmoid", "normalize": True, "route_scale": 2.5, "num_groups": 1, "top_k_groups": 1,
    "group_score": "max", "force_balance": False,
}  # fmt: skip
PERMUTED = {"num_tokens_per_expert": COUNTS, "group_size_multiple_of": 32}


def products(names: str, *operands: jax.Array) -> dict[str, Any]:
    return dict(zip(names.split(), operands, strict=True)) | {"group_ends": ENDS, "out_dtype": "float32"}


QUANTIZED = "lhs_q lhs_sf rhs_q rhs_sf"
FOLDED = "lhs_qf lhs_sf rhs_qf rhs_sf"
CALLS: dict[str, dict[str, Any]] = {
    "MXArray.from_bytes": {"q": Q, "sf": SF, "dtype": "bfloat16"},
    "MXArray.from_packed": {"packed": PACKED, "dtype": "bfloat16"},
    "MXArray.quantize": {"x": X, "rounding": "rceil"},
    "MXGradArray.wrap": {"value": X},
    "MoEConfig": {
        "dim": K,
        "hidden_dim": F,
        "num_experts": G,
        "router": mxep.RouterConfig(1),
        "shared": mxep.SharedExpert(F),
        "recipe": "mxfp8",
        "capacity_factor": 1.5,
        "bias": False,
        "activation": mxep.SwiGLU(),
        "deduplicate": "dispatch",
        "transport": None,
        "on_overflow": "drop",
    },
    "PeerMemory": {"mesh": MESH, "axis_name": "expert", "timeout": timedelta(minutes=1)},
    "QuantizedWeights.with_values": {"values": W},
    "a2a_combine_hp_fwd_mxfp8_bwd": {
        "input": X,
        "exchange": EXCHANGE,
        "rounding": Rounding.RCEIL,
        "mxfp8_bwd": True,
    },
    "a2a_dispatch": {"input": X, "exchange": EXCHANGE},
    "a2a_dispatch_mxfp8_fwd_hp_bwd": {"input": X, "exchange": EXCHANGE, "rounding": "rceil"},
    "capabilities": {"platform": "cpu"},
    "combine": {"groups": GROUPS, "route": ROUTE, "probs": TOKEN_PROBS, "out_dtype": "float32"},
    "dense": {"x": X, "w": W[0].T, "bias": normal(N), "recipe": "mxfp8", "out_dtype": "float32"},
    "sharded_dense": {
        "x": X,
        "w": W[0].T,
        "bias": normal(N),
        "x_spec": PartitionSpec("data"),
        "w_spec": PartitionSpec("data"),
        "recipe": "mxfp8",
        "out_dtype": "float32",
        "mesh": MESH,
    },
    "dispatch": {
        "rows": X,
        "counts": COUNTS,
        "recipe": "mxfp8",
        "axis_name": None,
        "capacity_factor": 1.5,
        "deduplicate": None,
        "transport": MEMORY,
        "on_overflow": "nan",
    },
    "dispatch_probs": {"probs": TOKEN_PROBS, "route": ROUTE},
    "force_implementation": {"implementation": "cpp"},
    "gather_rows": {"x": X, "row_map": MAPS.row_map, "inverse": MAPS.inverse, "across": None},
    "grouped_swiglu_ffn": {
        "x": X,
        "w1": W1,
        "w3": W1,
        "w2": W2,
        "group_ends": ENDS,
        "group_sizes": None,
        "prob": PROB,
        "biases": None,
        **PRODUCT,
        "activation": mxep.SwiGLU(),
    },
    "lower_for": {"arch": "sm_90"},
    "moe.apply": {
        "params": PARAMS,
        "x": X,
        "config": CONFIG,
        "experts": IDS[:, None],
        "weights": PROB[:, None],
        "selection_bias": None,
        "axis_name": None,
        "token_axes": None,
        "tensor_axis": None,
    },
    "moe.sharded_apply": {
        "params": PARAMS,
        "x": X,
        "config": CONFIG,
        "tokens": PartitionSpec(("data", "expert")),
        "expert_axis": "expert",
        "fsdp_axis": "data",
        "tensor_axis": None,
        "mesh": MESH,
        "experts": None,
        "weights": None,
        "selection_bias": None,
    },
    "moe.specs": {"config": CONFIG, "expert_axis": "expert", "fsdp_axis": "data", "tensor_axis": "tensor"},
    "moe.init": {"key": jax.random.key(0), "config": CONFIG, "dtype": "float32"},
    "grouped_mm": {
        "x": X,
        "w": W,
        "group_ends": ENDS,
        "group_sizes": None,
        "bias": normal(G, N),
        "out_dtype": "float32",
        **PRODUCT,
    },
    "permute": {"x": X, **PERMUTED},
    "permute_mxfp8_fwd_hp_bwd": {"mx": MX, **PERMUTED},
    "plan_exchange": {"counts": COUNTS, "axis_name": None, "num_rows": M, "capacity": 40},
    "quantize_weights": {"w": W, "recipe": "mxfp8", "frozen": False},
    "ragged_dot_mxfp8": {
        "lhs": X,
        "rhs": W.mT,
        "group_sizes": COUNTS,
        "recipe": "mxfp8",
        "precision": None,
        "group_offset": None,
        "out_sharding": None,
        "preferred_element_type": "float32",
    },
    "route": {"logits": normal(M, G), "router": mxep.RouterConfig(1), "selection_bias": jnp.zeros(G)},
    "RouterConfig": {"top_k": 1, **ROUTING, "bias": True, "selection_bias": True, "prob_in": "combine"},
    "SharedExpert": {"hidden_dim": F, "gate": True},
    "sort_by_expert": {"expert_ids": IDS.reshape(T, TOP_K), "num_experts": G},
    "spread_rows": {"x": DY, "order": ORDER, "inverse": INVERSE, "top_k": TOP_K, "across": None},
    "SwiGLU": NUMBERS,
    "swiglu": {**GLU, "activation": mxep.SwiGLU(limit=7.0)},
    "unpack_expert_weights": {
        "gate_up": normal(G, K, 2 * N),
        "down": normal(G, N, K),
        "gate_up_bias": normal(G, 2 * N),
        "down_bias": normal(G, K),
        "interleaved": True,
        "transposed": True,
    },
    "to_mxfp8_a2a_dequant": {"input": X, "exchange": EXCHANGE, "rounding": "rceil", "reverse": False},
    "unpermute_hp_fwd_mxfp8_bwd": {"input": PADDED, "maps": MAPS, "across": None},
    "update_selection_bias": {"selection_bias": jnp.zeros(G), "counts": COUNTS, "rate": 0.1},
    "weighted_combine": {
        "rows": X,
        "probs": TOKEN_PROBS,
        "slots": SLOTS,
        "order": ORDER,
        "out_dtype": "float32",
        "rounding": "rceil",
        "across": None,
    },
    "export_checks": {},
    "ops.block_scales": {"sf": SF, "group_ends": ENDS},
    "ops.combine": {"rows": X, "slots": SLOTS, "probs": TOKEN_PROBS, "out_dtype": "float32"},
    "ops.combine_bwd": {"dy": DY, "rows": X, "slots": SLOTS, "order": ORDER, "probs": TOKEN_PROBS},
    "ops.dequantize": {"q": Q, "sf": SF, "out_dtype": "float32"},
    "ops.fold_groups": {"q": Q_T, "sf": SF_T, "group_ends": ENDS},
    "ops.fold_rows": {"q": Q, "sf": SF, "group_ends": ENDS, "headroom": 1},
    "ops.grouped_mm_bf16": {**products("lhs rhs_t", X, W), "clear_rest": True},
    "ops.grouped_mm_bf16_kn": {**products("lhs rhs", X, W.mT), "clear_rest": True},
    "ops.grouped_mm_fold": {**products(FOLDED, *XF, *WF), "clear_rest": True},
    "ops.grouped_mm_fold_bias": {
        **products(FOLDED, *XF, *WF),
        "bias": normal(G, N, dtype="float32"),
        "clear_rest": True,
    },
    "ops.grouped_mm_mx": {**products(QUANTIZED, Q, SF, WQ, WSF), "clear_rest": True},
    "ops.grouped_wgrad_bf16": products("lhs rhs", GATE, X),
    "ops.grouped_wgrad_bf16_t": products("lhs_t rhs_t", GATE.T, X.T),
    "ops.grouped_wgrad_fold": products(FOLDED, *TF, *TF),
    "ops.grouped_wgrad_mx": products(QUANTIZED, Q_T, SF_T, Q_T, SF_T),
    "ops.permute_mx": {"packed": PACKED, "row_map": MAPS.row_map},
    "ops.permute_rows": {"x": X, "row_map": MAPS.row_map},
    "ops.quantize_both": {"x": X, **SCALES},
    "ops.quantize_both_fold": {"x": X, "group_ends": ENDS, **SCALES},
    "ops.quantize_col": {"x": X, **SCALES},
    "ops.quantize_row": {"x": X, **SCALES},
    "ops.quantize_row_fold": {"x": X, "group_ends": ENDS, **SCALES, "headroom": 1},
    "ops.quantize_row_packed": {"x": X, **SCALES},
    "ops.quantize_rowwise": {"x": X, "group_ends": ENDS, **SCALES},
    "ops.row_map": {"counts": COUNTS, "num_rows": M, "num_local_experts": G, "alignment": 32, "rank_rows": M},
    "ops.sort_by_expert": {"expert_ids": IDS, "num_experts": G},
    "ops.swiglu": {**GLU, "group_ends": ENDS, **NUMBERS},
    "ops.swiglu_bwd": {"dh": GATE, **GLU, "group_ends": ENDS, **NUMBERS},
    "ops.swiglu_bwd_all": {"dh": GATE, **GLU, **SCALES, **NUMBERS},
    "ops.swiglu_bwd_both": {"dh": GATE, **GLU, **SCALES, **NUMBERS},
    "ops.swiglu_bwd_col": {"dh": GATE, **GLU, **SCALES, **NUMBERS},
    "ops.swiglu_bwd_row": {"dh": GATE, **GLU, **SCALES, **NUMBERS},
    "ops.swiglu_col": {**GLU, **SCALES, **NUMBERS},
    "ops.swiglu_row": {**GLU, **SCALES, **NUMBERS},
    "ops.swiglu_row_fold": {**GLU, "group_ends": ENDS, **SCALES, **NUMBERS},
    "ops.unblock_scales": {"blocked": BLOCKED, "group_ends": ENDS, "num_rows": M, "num_scales": K // 32},
}
for _name, _op in ops.OPS.items():
    if f"ops.{_name}" not in CALLS:
        _defaults = {key: option.default for key, option in _op.options.items()}
        _arrays = dict(zip(_op.inputs, map(jnp.asarray, sample_arrays(_op)), strict=True))
        CALLS[f"ops.{_name}"] = {**_arrays, **_defaults, **sample(_op)[1]}
# Records, whose fields nobody checks before a function takes them; what core_kernels' own tests fuzz; and the report
# and the metrics, which read values and are no functions of jit (tests/frontends/test_numerics_report.py,
# tests/frontends/test_metrics.py).
RECORDS = {
    "NumericsReport", "numerics_report", "MoEMetrics",
    "Capability", "Exchange", "ExpertOrder", "MXArray", "MXGradArray", "MoEStats", "QuantizedWeights", "RowMap",
    "FrozenWeights", "save_mx_rows",
    "Recipe", "Rounding", "Route", "Routing", "TokenReplicas",
    "pack_expert_weights",  # tests/frontends/test_expert_blocks.py
}  # fmt: skip


IMPORTABLE = importable(mxep)


def function(name: str) -> Any:
    if name == "QuantizedWeights.with_values":
        return HELD.with_values
    first, *rest = name.split(".")
    found = IMPORTABLE[first]
    for part in rest:
        found = getattr(found, part)
    return found


NAMES = {
    *(name.removeprefix("ops.") for name in CALLS), *ops.OPS, "with_values", "Recipe", "Rounding",
}  # fmt: skip
PARAMETERS = {
    *(parameter for call in CALLS for parameter in inspect.signature(function(call)).parameters),
    *(name for op in ops.OPS.values() for name in op.inputs),
    *("operands", "compute", "wgrad_with_hp", "alignment"),
}
