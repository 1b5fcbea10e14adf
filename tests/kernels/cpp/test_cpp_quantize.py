"""The C++ quantizers against the oracle on exhaustive and awkward inputs; conformance has the ordinary cases."""

import threading
from functools import partial

import jax
import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mxep import cpp_bindings
from mxep.core_kernels import oracle_math
from mxep.core_kernels.fold import oracle as fold_oracle
from mxep.core_kernels.fold import plan as fold
from mxep.core_kernels.fold.both import plan as both_fold
from mxep.core_kernels.fold.matrix import plan as matrix_fold
from mxep.core_kernels.formats import BLOCK, Rounding
from mxep.core_kernels.launch import ArrayType
from mxep.core_kernels.quantize import oracle as quantize_oracle
from mxep.core_kernels.quantize import plan as quantize
from mxep.core_kernels.swiglu import oracle as swiglu_oracle
from mxep.core_kernels.swiglu.folded.plan_bwd import swiglu_bwd_fold

from ...compare import same_bytes

BF16 = np.dtype(ml_dtypes.bfloat16)
EVERY_BF16 = np.arange(1 << 16, dtype=np.uint16)
RULES = [
    pytest.param({"rounding": rounding, "satfinite": satfinite}, id=f"{rounding.name}{'-satfinite' * satfinite}")
    for rounding in Rounding
    for satfinite in (False, True)
]


def bf16(bits: np.ndarray) -> np.ndarray:
    return bits.astype(np.uint16).view(BF16)


@pytest.mark.parametrize("rule", RULES)
def test_every_bf16_as_amax(cpp_op, rule):
    """Block i holds pattern i, its negative and smaller magnitudes."""
    magnitude = EVERY_BF16[:, None] & 0x7FFF
    smaller = np.random.default_rng(0).random((1 << 16, BLOCK)) * (magnitude + 1)
    x = smaller.astype(np.uint16) ^ np.uint16(0x8000) * (np.arange(BLOCK, dtype=np.uint16) % 2)
    x[:, 5] = EVERY_BF16
    same_bytes(cpp_op(quantize.quantize_row, bf16(x), **rule), quantize_oracle.quantize_row(bf16(x), **rule))


@pytest.mark.parametrize("amax", [2.0**-126, 2.0**-118 * 1.75, 2.0**-9, 1.0, 448.0, 3.0e38])
@pytest.mark.parametrize("rounding", list(Rounding))
def test_every_bf16_as_element(cpp_op, amax, rounding):
    """31 patterns per block with one amax; larger patterns are replaced by the amax."""
    top = np.array(amax, BF16).view(np.uint16)
    elements = np.where(top >= (EVERY_BF16 & 0x7FFF), EVERY_BF16, top)
    elements = np.pad(elements, (0, -len(elements) % (BLOCK - 1))).reshape(-1, BLOCK - 1)
    x = bf16(np.concatenate([np.full((len(elements), 1), top), elements], axis=1))
    same_bytes(cpp_op(quantize.quantize_row, x, rounding=rounding), quantize_oracle.quantize_row(x, rounding=rounding))


def awkward_fp32(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random bits, with one exponent per row of blocks, so that elements share a scale."""
    sign_and_mantissa = rng.integers(0, 1 << 32, shape, np.uint32) & np.uint32(0x807FFFFF)
    exponent = rng.integers(0, 255, (*shape[:-1], 1), np.uint32)
    below = np.minimum(rng.integers(0, 14, shape, np.uint32), exponent)
    return (sign_and_mantissa | (exponent - below) << np.uint32(23)).view(np.float32)


@pytest.mark.parametrize("rule", RULES)
def test_fp32_bits(cpp_op, rule):
    x = awkward_fp32(np.random.default_rng(1), (4096, BLOCK))
    x[:300, 0] = np.arange(0x04600001 - 150, 0x04600001 + 150, dtype=np.uint32).view(np.float32)  # see mx_math.h
    x[:300, 1:] *= np.float32(2.0**-30)
    x[300, 7], x[301, 7], x[302, :2] = np.inf, np.nan, (np.nan, -np.inf)
    same_bytes(cpp_op(quantize.quantize_row, x, **rule), quantize_oracle.quantize_row(x, **rule))


def test_fp32_ties(cpp_op):
    """Halfway between neighbouring E4M3 values, and the neighbouring fp32 values, with scales 2^-127 to 2^100."""
    values = oracle_math.E4M3_VALUES[:0x7F]
    middle = ((values[1:] + values[:-1]) / 2).astype(np.float32)
    near = np.concatenate([np.nextafter(middle, np.float32(0)), middle, np.nextafter(middle, np.float32(449))])
    near = np.concatenate([near, -near])
    near = np.pad(near, (0, -len(near) % (BLOCK - 1))).reshape(-1, BLOCK - 1)
    block = np.concatenate([np.full((len(near), 1), 448, np.float32), near], axis=1)
    x = np.concatenate([np.ldexp(block, e).astype(np.float32) for e in (-127, -126, -40, 0, 100)])
    same_bytes(cpp_op(quantize.quantize_row, x), quantize_oracle.quantize_row(x))


SHAPES = {
    "batch": st.sampled_from([(), (1,), (3,)]),
    "m": st.sampled_from([0, 32, 256, 288, 544]),
    "dtype": st.sampled_from([BF16, np.dtype(np.float32)]),
    "seed": st.integers(0, 99),
}


@given(k=st.sampled_from([0, 1, 31, 33, 100, 1056]), **SHAPES)
def test_cols_of_any_width(cpp_op, batch, m, k, dtype, seed):
    x = awkward_fp32(np.random.default_rng(seed), (*batch, m, k)).astype(dtype)
    same_bytes(cpp_op(quantize.quantize_col, x), quantize_oracle.quantize_col(x))


def all_ops(run, x: np.ndarray) -> tuple[np.ndarray, ...]:
    both = run(quantize.quantize_both, x)
    back = run(quantize.dequantize, *both[:2], out_dtype="float32")
    return *both, *run(quantize.quantize_row_packed, x), *back, *run(quantize.quantize_rowwise, x)


def oracle_ops(x: np.ndarray) -> tuple[np.ndarray, ...]:
    both = quantize_oracle.quantize_both(x)
    back = quantize_oracle.dequantize(*both[:2], out_dtype="float32")
    return *both, quantize_oracle.quantize_row_packed(x), back, *quantize_oracle.quantize_rowwise(x)


def subnormals() -> np.ndarray:
    """fp32 subnormals, enough of them for several threads; scales are 2^-127 and values below 2^-126."""
    bits = np.random.default_rng(2).integers(0, 1 << 23, (512, 512), np.uint32)
    return bits.view(np.float32)


def test_bytes_do_not_depend_on_threads(cpp_op, monkeypatch):
    x, run = awkward_fp32(np.random.default_rng(3), (1056, 1056)).astype(BF16), cpp_bindings.run
    want = oracle_ops(x)
    for threads in (1, 2, 3, 7):
        monkeypatch.setattr(cpp_bindings, "run", partial(run, num_threads=threads))
        same_bytes(all_ops(cpp_op, x), want)


def test_caller_that_flushes_subnormals(cpp_op):
    """The caller's floating-point mode neither affects the kernels nor is changed by them."""
    x, got = subnormals(), []

    def call_with_flush() -> None:  # in a separate thread: the mode is per thread
        torch.set_flush_denormal(True)
        got.append(x[0, 0] * np.float32(1))
        got.append(all_ops(cpp_op, x))
        got.append(x[0, 0] * np.float32(1))

    thread = threading.Thread(target=call_with_flush)
    thread.start()
    thread.join()
    assert x[0, 0] != 0
    assert got[0] == got[2] == 0, "this machine does not flush, the test shows nothing"
    same_bytes(got[1], oracle_ops(x))


def test_threads_made_while_the_caller_flushes_keep_subnormals():
    """torch's loops in the same thread reuse the OpenMP team that an op starts."""
    x, sums = torch.from_numpy(subnormals()), []
    out = [torch.empty(x.shape, dtype=torch.uint8), torch.empty(len(x), x.shape[1] // 32, dtype=torch.uint8)]

    def call_with_flush() -> None:
        torch.set_flush_denormal(True)
        cpp_bindings.run("quantize_row", [x], out, [0, 0], num_threads=2)
        torch.set_flush_denormal(False)
        sums.append(x + 0)

    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        thread = threading.Thread(target=call_with_flush)
        thread.start()
        thread.join()
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(sums[0], x)


def test_subnormals_under_jit():
    """XLA:CPU flushes subnormals in its threads; the op must not."""
    x = subnormals()
    jax.ffi.register_ffi_target("test_quantize_row", cpp_bindings.ffi_targets()["quantize_row"], platform="cpu")
    signature = quantize.quantize_row.signature(ArrayType(x.shape, "float32"))
    types = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in signature.out]
    attrs = np.array(list(signature.attrs.values()), np.int64)
    got = jax.jit(lambda x: jax.ffi.ffi_call("test_quantize_row", types)(x, attrs=attrs))(x)
    same_bytes([np.asarray(a) for a in got], quantize_oracle.quantize_row(x))


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("ends", [[608], [32, 32, 352], [288, 608], [0, 0], []], ids=str)
def test_both_operands_of_an_activation_between_guards(cpp_op, ends, dtype):
    x, group_ends = np.random.default_rng(4).standard_t(1, (608, 160)).astype(dtype), np.int32(ends)
    got = cpp_op(both_fold.quantize_both_fold, x, group_ends)
    want = fold_oracle.quantize_both_fold(x, group_ends)
    same_bytes(*(both_fold.quantize_both_fold.specified((x, group_ends), found) for found in (got, want)))


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("shape", [(32, 32), (3, 96, 160), (0, 32, 64)], ids=str)
@pytest.mark.parametrize("op", ["quantize_matrix_fold", "quantize_matrix_fold_t"])
def test_operands_of_a_weight_between_guards(cpp_op, op, shape, dtype):
    x = np.random.default_rng(4).standard_t(1, shape).astype(dtype)
    same_bytes(cpp_op(getattr(matrix_fold, op), x), getattr(fold_oracle, op)(x))


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bf16", "f32"])
@pytest.mark.parametrize("width", [32, 256, 288, 800])
@pytest.mark.parametrize("headroom", [0, 1, 7])
def test_rows_with_headroom_between_guards(cpp_op, headroom, width, dtype):
    x = np.random.default_rng(4).standard_t(1, (37, width)).astype(dtype)
    want = fold_oracle.quantize_row_fold(x, headroom=headroom)
    same_bytes(cpp_op(fold.quantize_row_fold, x, headroom=headroom), want)
    same_bytes(cpp_op(fold.fold_rows, *quantize_oracle.quantize_row(x), headroom=headroom), want)


@pytest.mark.parametrize("ends", [[64, 32], [48], [-32, 64], [128]], ids=str)
def test_both_operands_refuse_other_ends(cpp_op, ends):
    with pytest.raises(ValueError, match=r"quantize_both_fold: group_ends: got -?\d+ .* allowed: non-decreasing"):
        cpp_op(both_fold.quantize_both_fold, np.zeros((96, 32), np.float32), np.int32(ends))
    none = np.zeros((96, 32), BF16)
    with pytest.raises(ValueError, match=r"swiglu_bwd_fold: group_ends: got -?\d+ .* allowed: non-decreasing"):
        cpp_op(swiglu_bwd_fold, none, none, none, np.zeros(0, np.float32), np.int32(ends))


@pytest.mark.parametrize("ends", [[608], [32, 32, 352], [288, 608], [0, 0], []], ids=str)
def test_every_operand_of_swiglus_gradient_between_guards(cpp_op, ends):
    rng, prob = np.random.default_rng(4), np.zeros(0, np.float32)
    arrays = *(rng.standard_t(1, (608, 160)).astype(BF16) for _ in range(3)), prob, np.int32(ends)
    outputs = cpp_op(swiglu_bwd_fold, *arrays), swiglu_oracle.swiglu_bwd_fold(*arrays)
    same_bytes(*(swiglu_bwd_fold.specified(arrays, found) for found in outputs))
