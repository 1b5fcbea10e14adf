"""The public boundary of the ops: what is refused, and where they run. Their bytes: tests/conformance."""

import subprocess
import sys
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from mxep.jax_frontend import capabilities, ops
from mxep.jax_frontend.ops import call as calls

from ...cases import sample, sample_arrays


def floats(*shape: int, seed: int = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.bfloat16)


ENDS = jnp.array([32, 64], jnp.int32)


def gradient(x: jax.Array, group_ends: jax.Array = ENDS) -> tuple[jax.Array, ...]:
    return ops.swiglu_bwd_fold(x, x, x, jnp.zeros(0), group_ends)


Q, SF = jnp.zeros((64, 64), jnp.uint8), jnp.zeros((64, 2), jnp.uint8)


@pytest.mark.parametrize("jit", [False, True])
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ops.quantize_row(floats(4, 33)), ValueError, "quantize_row: x: got last dim = 33; .*multiples of 32"),
        (lambda: ops.quantize_row(jnp.zeros((4, 32), jnp.float16)), TypeError, "quantize_row: x: got dtype float16"),
        (lambda: ops.quantize_row(floats(32)), ValueError, "2 or 3 dims"),
        (lambda: ops.quantize_row(floats(4, 32), rounding="nearest"), ValueError, "'rceil', 'floor'"),
        (lambda: ops.quantize_row([[1.0] * 32]), TypeError, "quantize_row: x: got list; allowed: a jax array"),
        (lambda: ops.quantize_col(floats(33, 32)), ValueError, "quantize_col: x"),
        (lambda: ops.dequantize(Q, SF[:, :1]), ValueError, "dequantize: sf"),
        (lambda: ops.dequantize(Q, SF, out_dtype="float16"), TypeError, "dequantize: out_dtype"),
        (lambda: ops.permute_rows(floats(4, 32), jnp.zeros(4, jnp.uint32)), TypeError, "row_map: got dtype uint32"),
        (lambda: ops.permute_mx(jnp.zeros((4, 64), jnp.uint8), ENDS), ValueError, "rows of 64 bytes"),
        (lambda: ops.sort_by_expert(ENDS, 0), ValueError, "num_experts: got 0"),
        (
            lambda: ops.slot_map(ENDS, ENDS, jnp.zeros(0), 3),
            ValueError,
            "slot_map: top_k: got 3; allowed: divisors of 2",
        ),
        (lambda: ops.row_map(ENDS, num_rows=64, num_local_experts=3), ValueError, "ep_degree"),
        (lambda: ops.row_map(ENDS, num_rows=64, num_local_experts=2, alignment=16), ValueError, "alignment: got 16"),
        (lambda: ops.quantize_both_fold(floats(4, 32), ENDS), ValueError, "quantize_both_fold: x: got dim 0 = 4"),
        (lambda: ops.quantize_both_fold(floats(64, 32), floats(2)), TypeError, "group_ends: got dtype bfloat16"),
        (lambda: gradient(floats(4, 32)), ValueError, "swiglu_bwd_fold: gate: got dim 0 = 4; .*pad the groups"),
        (lambda: gradient(floats(32, 40)), ValueError, "swiglu_bwd_fold: gate: got last dim = 40"),
        (lambda: gradient(floats(32, 32), floats(2)), TypeError, "swiglu_bwd_fold: group_ends: got dtype bfloat16"),
        (lambda: ops.grouped_mm_bf16(floats(64, 32), floats(2, 32, 64), ENDS), ValueError, "contraction dim"),
        (lambda: ops.grouped_mm_bf16(floats(64, 32), floats(3, 32, 32), ENDS), ValueError, "one end per group"),
    ],
)
def test_a_bad_argument_is_named_while_tracing(call, error, message, jit: bool) -> None:
    with pytest.raises(error, match=message):
        jax.jit(call)() if jit else call()


def test_a_call_before_does_not_change_what_is_refused() -> None:
    """3, 3.0 and True were one key of the checks that are kept."""
    ids = jnp.zeros(4, jnp.int32)
    ops.sort_by_expert(ids, 3)
    ops.sort_by_expert(ids, 1)
    for wrong in (3.0, True):
        with pytest.raises(TypeError, match=f"sort_by_expert: num_experts: got {wrong}; allowed: an int"):
            ops.sort_by_expert(ids, wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [name for name, op in ops.OPS.items() if "group_ends" in op.inputs])
def test_an_eager_call_checks_group_ends(name: str) -> None:
    """Before it runs: the products of jax.numpy would clip them. Inside jit they have no values yet."""
    op, (types, options) = ops.OPS[name], sample(ops.OPS[name])
    given = dict(zip(op.inputs, map(jnp.asarray, sample_arrays(op)), strict=True))
    rows, multiple = op.signature(*types, **options).tokens

    def run(ends: jax.Array) -> object:
        return getattr(ops, name)(**given | {"group_ends": ends}, **options)

    wrong = dict.fromkeys((-1, rows + 1), f"non-decreasing ends from 0 up to {rows},")
    for end, allowed in (wrong | ({rows - 1: "multiples of 32;"} if multiple > 1 else {})).items():
        ends = np.full(max(len(given["group_ends"]), 1), end, np.int32)  # optional ones may be none
        for array in (ends, jnp.asarray(ends)):
            with pytest.raises(ValueError, match=rf"^{name}: group_ends: got \[{end}\b.*\]; allowed: {allowed}"):
                run(array)
        jax.eval_shape(run, ends)


@pytest.mark.parametrize("ends", [[32, 32, 64], [512, 640], [0]])
@pytest.mark.parametrize("options", [{"rounding": 0, "satfinite": False}, {"rounding": 1, "satfinite": True}])
@pytest.mark.parametrize("name", ["quantize_both_fold", "swiglu_bwd_fold"])
def test_a_composed_fold_has_the_bytes_of_its_kernel(name: str, ends: list[int], options: dict) -> None:
    op, x, group_ends = ops.OPS[name], floats(672, 64), jnp.array(ends, jnp.int32)
    arrays = (x, group_ends) if name == "quantize_both_fold" else (x, x, x, jnp.ones(672), group_ends)
    composed = jax.jit(partial(op.compose, calls.call, **options))(*arrays)
    outputs = composed, jax.jit(partial(calls.call, op, **options))(*arrays)
    for got, want in zip(*(op.specified(arrays, found) for found in outputs), strict=True):
        np.testing.assert_array_equal(got, want)


def test_vmap_is_refused() -> None:
    with pytest.raises(NotImplementedError, match=r"quantize_row: transform: got jax\.vmap"):
        jax.vmap(ops.quantize_row)(floats(2, 32, 32))


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_shard_map_with_its_defaults_sees_what_varies(axis_type: AxisType) -> None:
    """check_vma=True needs outputs that are marked as varying, the tile loops of the grouped GEMM included."""
    mesh = Mesh(np.array(jax.devices("cpu")[:4]), ("ep",), axis_types=(axis_type,))
    lhs, rhs_t, ends = floats(256, 64), floats(2, 96, 64), jnp.array([20, 64], jnp.int32)

    def local(lhs, rhs_t, ends):
        return ops.grouped_mm_mx(*ops.quantize_row(lhs), *ops.quantize_row(rhs_t), ends)

    sharded = jax.shard_map(local, mesh=mesh, in_specs=(P("ep"), P(), P()), out_specs=P("ep"))
    placed = jax.device_put((lhs, rhs_t, ends), tuple(NamedSharding(mesh, s) for s in (P("ep"), P(), P())))
    expected = jnp.concatenate([local(part, rhs_t, ends) for part in jnp.split(lhs, 4)])
    np.testing.assert_array_equal(jax.jit(sharded)(*placed), expected)


def test_capabilities_name_what_runs() -> None:
    cpu = capabilities("cpu")
    assert cpu.keys() == ops.OPS.keys()
    assert (cpu["permute_mx"].uses, cpu["grouped_mm_mx"].uses.split()[1]) == ("cpp", "matmul")
    assert "lower_for" in capabilities("cuda")["quantize_row"].absent["triton"]
    with pytest.raises(ValueError, match="tpu"):
        capabilities("tpu")


@pytest.mark.parametrize(
    ("missing", "message"),
    [("jax", "pip install 'mxep[jax]'"), ("mxep.cpp_bindings._ops", "the C++ extension is missing")],
)
def test_a_missing_part_is_named(missing: str, message: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import mxep.jax_frontend"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ran.returncode != 0
    assert "ImportError" in ran.stderr
    assert message in ran.stderr


def test_export_is_told_of_the_kernels() -> None:
    """As the module's docstring says."""
    kernels = [jax.export.DisabledSafetyCheck.custom_call(f"mxep.{op}") for op in ops.OPS]
    exported = jax.export.export(jax.jit(ops.quantize_row), disabled_checks=kernels)
    x = floats(2, 64)
    for got, want in zip(exported(x).call(x), ops.quantize_row(x), strict=True):
        np.testing.assert_array_equal(got, want)
