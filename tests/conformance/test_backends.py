"""Which backend runs which op: the table, and that nobody is missing from it."""

import os

import pytest
from mxep.core_kernels import grouped_gemm, oracle, permute, quantize, routing
from mxep.core_kernels.launch import KernelOp

from . import backends

BYTES = {
    *("quantize_row", "quantize_row_packed", "quantize_col", "quantize_both", "dequantize"),
    *("permute_rows", "permute_mx", "sort_by_expert", "row_map"),
}
PRODUCTS = {"grouped_mm_mx", "grouped_mm_bf16", "grouped_wgrad_mx", "grouped_wgrad_bf16"}
OPS_OF = {"cpp": BYTES, "triton": BYTES | PRODUCTS, "torch": BYTES | PRODUCTS, "jax": BYTES | PRODUCTS}


def test_the_backends_of_this_process() -> None:
    expected = {"triton"} if os.environ.get("TRITON_INTERPRET") == "1" else {"cpp", "torch", "jax"}
    assert set(backends.NAMES) == expected


@pytest.mark.parametrize("name", backends.NAMES)
def test_a_backend_has_every_op(name: str) -> None:
    assert set(backends.ops(name)) == OPS_OF[name]


def test_every_op_is_in_the_table_and_in_the_oracle() -> None:
    modules = (quantize, permute, routing, grouped_gemm)
    ops = {op.name for module in modules for op in vars(module).values() if isinstance(op, KernelOp)}
    assert ops == BYTES | PRODUCTS
    assert all(callable(getattr(oracle, name)) for name in ops)
