"""Zero rows, one row, partial tiles; outputs with old contents; CTAs that loop over tiles."""

from collections.abc import Callable
from unittest import mock

import pytest
import torch
from mxep.core_kernels.swiglu.folded.plan_bwd import LONGEST_ROW
from mxep.torch_frontend import force_implementation, ops
from mxep.torch_frontend.ops import call
from mxep.torch_frontend.ops.launch import Outputs

from .cases import CASES, DEVICE, EDGES, same_bytes


@pytest.mark.parametrize(("name", "m"), EDGES)
def test_torch_and_jax_give_the_same_bytes_for_few_rows(name: str, m: int) -> None:
    case = CASES[name]
    inputs = case.inputs(m=m)
    outputs = case.torch(*inputs, m=m), case.jax(*inputs, m=m)
    same_bytes(*(case.specified(inputs, found) for found in outputs))


def poisoned(byte: int, run: Callable[[], tuple[torch.Tensor, ...]]) -> tuple[torch.Tensor, ...]:
    """The outputs of `run` in buffers that held `byte` before. 0xFF is NaN in every float dtype and -1 in int32."""

    def allocate(outputs: Outputs, index: int) -> tuple[torch.Tensor, ...]:
        filled = [torch.empty(s, dtype=d, device=index) for s, d in zip(outputs.shapes, outputs.dtypes, strict=True)]
        for out in filled:
            out.view(-1).view(torch.uint8).fill_(byte)
        return tuple(filled)

    with mock.patch.object(call, "allocate", allocate):
        return run()


@pytest.mark.parametrize(("name", "m"), [*EDGES, *((name, 96) for name in CASES)])
def test_every_specified_byte_of_every_output_is_written(name: str, m: int) -> None:
    case = CASES[name]
    inputs = case.inputs(m=m)
    outputs = (poisoned(byte, lambda: case.torch(*inputs, m=m)) for byte in (0xFF, 0x5A))
    same_bytes(*(case.specified(inputs, found) for found in outputs))


@pytest.mark.parametrize("shape", [(82_016, 2016), (2, 40_960, 2048)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantize_both_equals_row_and_col_on_large_inputs(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Large enough for CTAs that loop over squares of tiles (up to 160 SMs). The last tiles are partial."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(shape, generator=rng, device=DEVICE)
    x *= torch.exp2(3 * torch.randn(*shape[:-1], 1, generator=rng, device=DEVICE))
    x = x.to(dtype)
    got = poisoned(0xFF, lambda: ops.quantize_both(x))
    want = (*ops.quantize_row(x), *ops.quantize_col(x))
    assert all(torch.equal(g.view(torch.uint8), w.view(torch.uint8)) for g, w in zip(got, want, strict=True))


@pytest.mark.parametrize("to", ["", "_row", "_col", "_both", "_all"])
def test_dprob_of_rows_without_columns_is_zero(to: str) -> None:
    """More rows than one wave of CTAs processes."""
    prob = torch.ones(64_000, device=DEVICE)
    none = torch.empty(len(prob), 0, dtype=torch.bfloat16, device=DEVICE)
    dprob = poisoned(0xFF, lambda: getattr(ops, f"swiglu_bwd{to}")(none, none, none, prob))[-1]
    assert dprob.eq(0).all()


@pytest.mark.parametrize("f", [32, 96, 544, 1408])
def test_dprob_does_not_depend_on_the_kernel(f: int) -> None:
    """Few groups with many rows run another kernel than many: a chunk of experts has the bytes of all experts."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    dh, gate, up = (torch.randn(4096, f, generator=rng, device=DEVICE).bfloat16() for _ in range(3))
    prob = torch.rand(4096, generator=rng, device=DEVICE)
    with force_implementation("cuda"):
        want = ops.swiglu_bwd_all(dh, gate, up, prob)[-1]
        ends = torch.full((1,), 4096, dtype=torch.int32, device=DEVICE)
        got = ops.swiglu_bwd_fold(dh, gate, up, prob, ends)[-1]
    assert torch.equal(got.view(torch.uint8), want.view(torch.uint8))


@pytest.mark.parametrize("f", [LONGEST_ROW, LONGEST_ROW + 32, 49152])
def test_swiglu_bwd_fold_of_long_rows(f: int) -> None:
    """The kernel has the longest row in shared memory; longer rows are folded by other kernels."""
    rng = torch.Generator(DEVICE).manual_seed(0)
    dh, gate, up = (torch.randn(64, f, generator=rng, device=DEVICE).bfloat16() for _ in range(3))
    prob, ends = torch.rand(64, generator=rng, device=DEVICE), torch.full((1,), 64, dtype=torch.int32, device=DEVICE)
    arrays = dh, gate, up, prob, ends
    with force_implementation("triton"):
        want = ops.swiglu_bwd_fold(*arrays)
    same_bytes(ops.swiglu_bwd_fold(*arrays)[:-1], want[:-1])
