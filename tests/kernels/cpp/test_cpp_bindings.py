"""Both entry points of the C++ table: accepted arguments and error messages."""

import jax
import numpy as np
import pytest
import torch
from mxep import cpp_bindings
from mxep.core_kernels.registry import OPS

from ...cases import PRODUCTS, sample

CPP_OPS = [op for name, op in OPS.items() if name not in PRODUCTS]


def test_every_op_that_is_planned_is_in_the_table():
    assert set(cpp_bindings.ffi_targets()) == {op.name for op in CPP_OPS}


@pytest.mark.parametrize("op", CPP_OPS, ids=lambda op: op.name)
def test_table_and_plan_agree_on_the_number_of_arrays(op):
    arrays = [torch.zeros(1, dtype=torch.uint8)] * 12
    inputs, outputs = arrays[: len(op.inputs)], arrays[: len(op.outputs)]
    with pytest.raises(ValueError, match=f"{op.name}: inputs: got 12 arrays; allowed: {len(op.inputs)}$"):
        cpp_bindings.run(op.name, arrays, outputs, [])
    with pytest.raises(ValueError, match=f"{op.name}: outputs: got 12 arrays; allowed: {len(op.outputs)}$"):
        cpp_bindings.run(op.name, inputs, arrays, [])
    types, options = sample(op)
    attrs = op.signature(*types, **options).attrs
    with pytest.raises(ValueError, match=f"{op.name}: attrs: got 9; allowed: {len(attrs)}$"):
        cpp_bindings.run(op.name, inputs, outputs, [0] * 9)


def test_unknown_op():
    with pytest.raises(ValueError, match="run: name: got 'fold'; allowed: quantize_row, "):
        cpp_bindings.run("fold", [], [], [])


def test_strided_array():
    x = torch.zeros(4, 3).t()
    with pytest.raises(ValueError, match="permute_rows: input 0: layout: got a strided array; make it contiguous"):
        cpp_bindings.run("permute_rows", [x, torch.zeros(1, dtype=torch.int32)], [torch.zeros(1, 4)], [])


def test_other_dtype():
    with pytest.raises(TypeError, match="permute_rows: input 1: dtype: allowed: uint8, int32, bfloat16 or float32"):
        cpp_bindings.run("permute_rows", [torch.zeros(4, 4), torch.zeros(1).long()], [torch.zeros(1, 4)], [])


def test_output_that_cannot_be_written():
    out = np.zeros((1, 4), np.float32)
    out.flags.writeable = False
    with pytest.raises(TypeError):
        cpp_bindings.run("permute_rows", [torch.zeros(4, 4), torch.zeros(1, dtype=torch.int32)], [out], [])


@pytest.mark.parametrize("n", [0, -3])
def test_thread_counts(n):
    with pytest.raises(ValueError, match=f"run: num_threads: got {n}; allowed: at least 1"):
        cpp_bindings.run("fold_rows", [], [], [], n)


def test_refusals_reach_jax():
    jax.ffi.register_ffi_target("test_permute_rows", cpp_bindings.ffi_targets()["permute_rows"], platform="cpu")
    call = jax.ffi.ffi_call("test_permute_rows", jax.ShapeDtypeStruct((1, 4), np.float32))
    x = np.zeros((2, 4), np.float32)
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: permute_rows: row_map: got 9 at index 0"):
        jax.jit(lambda i: call(x, i, attrs=np.array([], np.int64)))(np.int32([9]))
    with pytest.raises(jax.errors.JaxRuntimeError, match="INVALID_ARGUMENT: permute_rows: attrs do not match"):
        jax.jit(lambda i: call(x, i, attrs=np.array([1], np.int64)))(np.int32([0]))


EXCHANGE = cpp_bindings.Exchange(torch.Tensor)
X = torch.zeros(4, 6)


def test_arrays_that_are_laid_out_alike_have_the_same_layouts():
    assert EXCHANGE.layouts((X, X)) == EXCHANGE.layouts((torch.ones(4, 6), torch.nn.Parameter(X)))


@pytest.mark.parametrize(
    "other",
    [(X,), (X, X, X), (X, X[:3]), (X, X.view(6, 4)), (X, X.view(24)), (X, X.int()), (X, torch.zeros(6, 4).t())],
    ids=["fewer", "more", "rows", "shape", "dims", "dtype", "strides"],
)
def test_arrays_that_differ_have_other_layouts(other):
    assert EXCHANGE.layouts(other) not in (None, EXCHANGE.layouts((X, X)))


@pytest.mark.parametrize("unknown", [X.to_sparse(), X.to("meta"), "x", None], ids=["sparse", "meta", "str", "None"])
def test_what_dlpack_has_no_words_for_has_no_layouts(unknown):
    assert EXCHANGE.layouts((X, unknown)) is None


def test_a_type_without_c_functions():
    with pytest.raises(TypeError, match=r"Exchange: type: got <class .list.>; allowed: .* from torch 2\.11 on"):
        cpp_bindings.Exchange(list)
