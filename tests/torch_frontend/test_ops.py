"""Every kernel as a custom op: opcheck, whole graphs, bytes, and errors that say what to do."""

import os
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from mxep.torch_frontend import MXTensor, capabilities, debug_checks, force_implementation, ops
from torch import Tensor
from torch.library import opcheck


def rows(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def mx(*shape: int) -> tuple[Tensor, Tensor]:
    return ops.quantize_row(rows(*shape))


ENDS = ints(3, 3, 70)
CASES: dict[str, Callable[[], tuple]] = {
    "quantize_row": lambda: (rows(5, 64),),
    "quantize_row_packed": lambda: (rows(5, 64, dtype=torch.float32), 1),
    "quantize_col": lambda: (rows(2, 64, 7), 0, True),
    "quantize_both": lambda: (rows(32, 64),),
    "dequantize": lambda: (*mx(5, 64), "float32"),
    "permute_rows": lambda: (rows(5, 7), ints(4, -1, 0)),
    "permute_mx": lambda: (ops.quantize_row_packed(rows(5, 64)), ints(4, -1, 0)),
    "sort_by_expert": lambda: (ints(2, 0, 1, 2), 4),
    "row_map": lambda: (ints(2, 1, 1, 2), 6, 2),
    "fold_rows": lambda: mx(5, 64),
    "quantize_row_fold": lambda: (rows(5, 64), 1),
    "permute_mx_fold": lambda: (ops.quantize_row_packed(rows(5, 64)), ints(4, -1, 0)),
    "block_scales": lambda: (mx(80, 64)[1], ENDS),
    "unblock_scales": lambda: (ops.block_scales(mx(80, 64)[1], ENDS), ENDS, 80, 2),
    "grouped_mm_mx": lambda: (*mx(80, 64), *mx(3, 96, 64), ENDS),
    "grouped_mm_bf16": lambda: (rows(80, 40), rows(3, 24, 40), ENDS, "float32"),
    "grouped_wgrad_mx": lambda: (*mx(64, 96), *mx(32, 96), ints(32, 32, 64)),
    "grouped_wgrad_bf16": lambda: (rows(80, 40), rows(80, 24), ENDS),
    "permute_q_sf": lambda: (*mx(5, 64), ints(4, -1, 0)),
}


def test_every_kernel_has_a_case() -> None:
    assert set(CASES) == set(ops.OPS) | {"permute_q_sf"}


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    opcheck(getattr(ops, name), CASES[name]())


@pytest.mark.parametrize("name", CASES)
def test_whole_graph(name: str) -> None:
    op, args = getattr(ops, name), CASES[name]()
    torch._dynamo.reset()
    got = torch.compile(lambda *a: op(*a), fullgraph=True, backend="aot_eager")(*args)
    want = op(*args)
    pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
    assert all(torch.equal(g, w) for g, w in pairs)


def test_one_graph_for_all_numbers_of_rows() -> None:
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def quantize_and_back(x: Tensor) -> Tensor:
        return ops.dequantize(*ops.quantize_row(x))

    compiled = torch.compile(quantize_and_back, fullgraph=True, dynamic=True, backend=counter)
    for num_rows in (3, 4, 50):
        x = rows(num_rows, 64)
        assert torch.equal(compiled(x), quantize_and_back(x))
    assert counter.frame_count == 1


def test_schemas_are_typed() -> None:
    assert str(torch.ops.mxep.row_map.default._schema) == (
        "mxep::row_map(Tensor counts, SymInt num_rows, SymInt num_local_experts, SymInt alignment=32, "
        "SymInt rank_rows=0) -> (Tensor, Tensor, Tensor, Tensor)"
    )


def test_float8_views_are_bytes() -> None:
    q, sf = mx(4, 64)
    views = q.view(torch.float8_e4m3fn), sf.view(torch.float8_e8m0fnu)
    assert torch.equal(ops.dequantize(*views), ops.dequantize(q, sf))


def test_rows_past_the_last_end_are_zeros_and_their_nan_stays_out() -> None:
    a, w, ends = rows(6, 32), rows(2, 32, 32), ints(2, 4)
    poisoned = a.clone()
    poisoned[4:] = torch.nan
    want = ops.grouped_mm_bf16(a, w, ends)
    assert torch.equal(ops.grouped_mm_bf16(poisoned, w, ends), want)
    assert (want[4:] == 0).all()
    got = ops.grouped_mm_mx(*ops.quantize_row(poisoned), *ops.quantize_row(w), ends)
    assert torch.equal(got, ops.grouped_mm_mx(*ops.quantize_row(a), *ops.quantize_row(w), ends))
    assert torch.equal(ops.grouped_wgrad_bf16(poisoned, poisoned, ends), ops.grouped_wgrad_bf16(a, a, ends))


def test_packed_rows_are_read_where_they_lie() -> None:
    packed, row_map = ops.quantize_row_packed(rows(5, 64)), ints(4, -1, 0)
    q, sf = packed[:, :64], packed[:, 64:]
    assert ops._is_packed(q, sf)
    assert not ops._is_packed(q.contiguous(), sf.contiguous())
    assert not ops._is_packed(q, packed.clone()[:, 64:])
    for parts in ((q, sf), (q.contiguous(), sf.contiguous())):
        for got, want in zip(ops.permute_q_sf(*parts, row_map), ops.permute_mx(packed, row_map), strict=True):
            assert torch.equal(got, want)


A, W = rows(4, 32), rows(2, 8, 32)


@pytest.mark.parametrize(
    ("error", "message", "op", "args"),
    [
        (ValueError, r"x: got last dim = 40; allowed: multiples of 32", "quantize_row", (rows(2, 40),)),
        (ValueError, r"x: got dim -2 \(the scaled one\) = 2", "quantize_col", (rows(2, 64),)),
        (ValueError, r"x: got shape \(64,\)", "quantize_row", (rows(64),)),
        (TypeError, r"x: got dtype float16", "quantize_row", (rows(2, 64, dtype=torch.float16),)),
        (ValueError, r"x: .* call .contiguous\(\)", "quantize_row", (rows(64, 64).T,)),
        (ValueError, r"sf: got device meta; allowed: cpu", "dequantize", (mx(2, 64)[0], mx(2, 64)[1].to("meta"))),
        (ValueError, r"group_ends: got \[3, 2\]; allowed: non-decreasing", "grouped_mm_bf16", (A, W, ints(3, 2))),
        (ValueError, r"group_ends: got \[3, 5\]; .* up to 4", "grouped_mm_bf16", (A, W, ints(3, 5))),
        (ValueError, r"group_ends: got \[-1, 4\]", "grouped_wgrad_bf16", (A, A, ints(-1, 4))),
        (TypeError, r"group_ends: got dtype int64", "grouped_mm_bf16", (A, W, ints(3, 4).long())),
        (ValueError, r"row_map: got 7", "permute_rows", (A, ints(7))),
        (ValueError, r"K: got 0", "fold_rows", mx(4, 0)),
        (ValueError, r"sf: got shape", "fold_rows", (mx(4, 64)[0], mx(4, 32)[1])),
        (ValueError, r"row_map: got 7", "permute_mx_fold", (ops.quantize_row_packed(A), ints(7))),
        (ValueError, r"group_ends: got \[3, 2\]", "block_scales", (mx(4, 64)[1], ints(3, 2))),
        (ValueError, r"group_ends: got \[3, 5\]", "unblock_scales", (torch.zeros(256, 4).byte(), ints(3, 5), 4, 2)),
        (ValueError, r"blocked: got shape", "unblock_scales", (torch.zeros(128, 4).byte(), ints(3, 4), 4, 2)),
        (ValueError, r"num_rows: got -1", "unblock_scales", (torch.zeros(128, 4).byte(), ints(3), -1, 2)),
        (ValueError, r"expert_ids: got 4", "sort_by_expert", (ints(4), 4)),
        (ValueError, r"alignment: got 33", "row_map", (ints(2, 1), 3, 2, 33)),
    ],
)
def test_bad_input(error: type[Exception], message: str, op: str, args: tuple) -> None:
    with pytest.raises(error, match=f"{op}: {message}"):
        getattr(ops, op)(*args)


def test_a_raw_op_has_no_silent_gradient() -> None:
    y = ops.dequantize(*ops.quantize_row(rows(2, 64).requires_grad_()))
    assert not y.requires_grad
    x = rows(2, 64).requires_grad_()
    with pytest.raises(RuntimeError, match="no autograd formula"):
        ops.permute_rows(x, ints(0)).sum().backward()


def test_what_runs_and_why_the_rest_does_not() -> None:
    on_cpu = capabilities("cpu")
    assert set(on_cpu) == set(ops.OPS)
    assert on_cpu["quantize_row"].uses == "cpp"
    assert "torch.matmul" in on_cpu["grouped_mm_mx"].uses
    assert "interpreter" in on_cpu["quantize_row"].absent["triton"]
    nothing = capabilities("meta")["quantize_row"]
    assert nothing.uses == ""
    assert set(nothing.absent) == {"cpp", "triton"}


def test_a_forced_implementation_runs_or_raises() -> None:
    x = rows(2, 64)
    with force_implementation("triton"), pytest.raises(NotImplementedError, match=r"quantize_row: device: .*INTERPRET"):
        ops.quantize_row(x)
    with force_implementation("cpp"):
        forced = ops.quantize_row(x)
    assert torch.equal(forced[0], ops.quantize_row(x)[0])
    with (
        pytest.raises(ValueError, match="force_implementation: implementation: got 'cuda'"),
        force_implementation("cuda"),
    ):
        pass
    with pytest.raises(NotImplementedError, match="quantize_row: device: got meta"):
        ops.quantize_row._init_fn(x.to("meta"))


INTERPRETED = """
import torch
from mxep.torch_frontend import capabilities, force_implementation, ops
x = torch.randn(33, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
ids = torch.tensor([2, 0, 1, 2], dtype=torch.int32)
runs = [lambda: ops.quantize_row(x), lambda: ops.sort_by_expert(ids, 3), lambda: (ops.permute_rows(x, ids),)]
for run in runs:
    want = run()
    with force_implementation("triton"):
        assert capabilities()["quantize_row"].uses == "triton, interpreter"
        assert all(torch.equal(g, w) for g, w in zip(run(), want, strict=True))
"""


def test_triton_runs_on_a_cpu_under_its_interpreter() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    run = subprocess.run([sys.executable, "-c", INTERPRETED], env=environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_debug_checks_end_with_their_block() -> None:
    from mxep.torch_frontend import _call

    cuda = torch.device("cuda")
    assert not _call.checks_values(cuda)
    with debug_checks():
        assert _call.checks_values(cuda)
    assert not _call.checks_values(cuda)
    assert _call.checks_values(torch.device("cpu"))


def test_mx_tensors_do_not_reach_raw_ops() -> None:
    with pytest.raises(NotImplementedError, match="dequantize"):
        ops.quantize_row(MXTensor.quantize(rows(2, 64)))
