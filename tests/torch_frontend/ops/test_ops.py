"""Every kernel as a custom op: opcheck, whole graphs, bytes, and errors that say what to do."""

from functools import partial
from itertools import product

import pytest
import torch
import torch._dynamo.testing
from mxep.core_kernels.launch import KernelOp
from mxep.torch_frontend import MXTensor, debug_checks, ops
from mxep.torch_frontend.ops import call
from mxep.torch_frontend.ops.launch import packed_buffer
from torch import Tensor
from torch.library import opcheck

from ...cases import sample, sample_arrays
from ...conformance.backends.arrays import to_torch
from ..inputs import ints, rows


def mx(*shape: int) -> tuple[Tensor, Tensor]:
    return ops.quantize_row(rows(*shape))


def u8(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


SLOTS, ORDER = ints(2, -1, 0, 4).view(2, 2), ints(2, -1, 0, -1, 3)


def sampled(op: KernelOp) -> tuple:
    options = {name: option.default for name, option in op.options.items()} | sample(op)[1]
    return *map(to_torch, sample_arrays(op)), *options.values()


CASES = {name: partial(sampled, op) for name, op in ops.OPS.items()}
CASES["permute_q_sf"] = lambda: (*mx(5, 64), ints(4, -1, 0))


@pytest.mark.parametrize("op", ops.OPS.values(), ids=lambda op: op.name)
def test_the_sample_of_an_op_is_valid(op: KernelOp) -> None:
    getattr(ops, op.name)(*sampled(op))


@pytest.mark.parametrize("name", CASES)
def test_opcheck(name: str) -> None:
    opcheck(getattr(ops, name), CASES[name](), test_utils=("test_schema", "test_faketensor"))


# All ops are registered by one function.
TRACED_OFTEN = ("quantize_row", "row_map", "grouped_mm_mx", "swiglu_bwd_fold")
traced = pytest.mark.parametrize(
    "name", [name if name in TRACED_OFTEN else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)


@traced
def test_opcheck_of_autograd_and_traces(name: str) -> None:
    opcheck(getattr(ops, name), CASES[name](), test_utils=("test_autograd_registration", "test_aot_dispatch_dynamic"))


@traced
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


def test_nothing_of_an_op_is_compiled_where_a_graph_breaks() -> None:
    """Inside `try` the rest of the frame runs as it is, and what that calls is looked at frame by frame."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounter()

    def quantize(x: Tensor) -> tuple[Tensor, Tensor]:
        try:
            torch._dynamo.graph_break()
            return ops.quantize_row(x)
        finally:
            pass

    x = rows(4, 64)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            assert all(
                torch.equal(g, w) for g, w in zip(torch.compile(quantize, backend=counter)(x), quantize(x), strict=True)
            )
    assert counter.frame_count == 0


def test_schemas_are_typed() -> None:
    assert str(torch.ops.mxep.row_map.default._schema) == (
        "mxep::row_map(Tensor counts, SymInt num_rows, SymInt num_local_experts, SymInt alignment=32, "
        "SymInt rank_rows=0) -> (Tensor, Tensor, Tensor, Tensor)"
    )


E4M3, E8M0 = torch.float8_e4m3fn, torch.float8_e8m0fnu


def test_float8_views_are_bytes() -> None:
    q, sf = mx(4, 64)
    assert torch.equal(ops.dequantize(q.view(E4M3), sf.view(E8M0)), ops.dequantize(q, sf))
    packed = torch.cat([q, sf], 1)
    for dtype in (E4M3, E8M0):  # rows of bytes are moved as they are
        assert torch.equal(ops.permute_rows(packed.view(dtype), ints(1)), packed[1:2])


@pytest.mark.parametrize("name", [name for name, op in ops.OPS.items() if "uint8" in {x.dtype for x in sample(op)[0]}])
def test_float8_of_the_other_kind_is_refused(name: str) -> None:
    """Elements are E4M3 and scales E8M0. Packed rows, which hold both, and levels are uint8 alone."""
    op, options = ops.OPS[name], sample(ops.OPS[name])[1]
    given = dict(zip(op.inputs, map(to_torch, sample_arrays(op)), strict=True))
    for argument in (argument for argument, x in given.items() if x.dtype == torch.uint8):
        is_scale = argument.endswith("sf") or argument in ("target", "blocked")
        right = E8M0 if is_scale else None if argument in ("packed", "levels", "own", "other") else E4M3
        for dtype, device in product((E4M3, E8M0), ("cpu", "meta")):
            views = given | {argument: given[argument].view(dtype)}
            run = partial(getattr(ops, name), *(x.to(device) for x in views.values()), **options)
            if dtype == right:
                run()
                continue
            allowed = "torch.uint8" if right is None else f"torch.uint8 or {right}"
            with pytest.raises(TypeError, match=f"^{name}: {argument}: got dtype {dtype}; allowed: {allowed}$"):
                run()


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
    found = packed_buffer(q, sf)
    assert found is not None
    assert (found.data_ptr(), found.shape) == (packed.data_ptr(), packed.shape)
    assert packed_buffer(q.contiguous(), sf.contiguous()) is None
    assert packed_buffer(q, packed.clone()[:, 64:]) is None
    for parts in ((q, sf), (q.contiguous(), sf.contiguous())):
        for got, want in zip(ops.permute_q_sf(*parts, row_map), ops.permute_mx(packed, row_map), strict=True):
            assert torch.equal(got, want)


A, W = rows(4, 32), rows(2, 8, 32)
NO_PROB = torch.empty(0)
P = torch.full((2, 2), 0.5)


def bwd(**changed: Tensor) -> tuple[Tensor, ...]:
    """Arguments of combine_bwd, one of them changed."""
    arguments = {"dy": rows(2, 7), "rows": rows(5, 7), "slots": SLOTS, "order": ORDER, "probs": P}
    return tuple((arguments | changed).values())


# Dtypes and shapes of every argument: ../fuzz.
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
        (ValueError, r"row_map: got 7", "permute_rows", (A, ints(7))),
        (ValueError, r"slots: got 4 at index 3; .* row below 4", "combine", (rows(4, 7), SLOTS, P)),
        (ValueError, r"order: got 4 at index 1; .* slot below 4", "combine_bwd", bwd(order=ints(2, 4, 0, -1, 3))),
        (ValueError, r"order: got 1 at index 1; .* gives this row", "combine_bwd", bwd(order=ints(2, 1, 0, -1, 3))),
        (ValueError, r"slots: got 4 at index 3; .* gives this slot", "combine_bwd", bwd(order=ints(2, -1, 0, -1, -1))),
        (ValueError, r"headroom: got 8; allowed: 0 to 7", "fold_rows", (*mx(4, 64), None, 8)),
        (ValueError, r"headroom: got -1; allowed: 0 to 7", "quantize_row_fold", (rows(4, 64), None, 0, False, -1)),
        (ValueError, r"group_ends: got \[32, 48\]", "fold_groups", (u8(4, 64), u8(4, 2), ints(32, 48))),
        (ValueError, r"x: got dim 0 = 4; .*pad the groups", "quantize_both_fold", (A, ints(0))),
        (ValueError, r"group_ends: got \[32, 80\]; allowed: mult", "quantize_both_fold", (rows(96, 32), ints(32, 80))),
        (ValueError, r"group_ends: got \[128\]; .* up to 96", "quantize_both_fold", (rows(96, 32), ints(128))),
        (ValueError, r"group_ends: got \[48\]", "grouped_wgrad_fold", (*(u8(8, 64), u8(1, 8)) * 2, ints(48))),
        (ValueError, r"row_map: got 7", "permute_mx", (ops.quantize_row_packed(A), ints(7))),
        (ValueError, r"group_ends: got \[3, 2\]", "block_scales", (mx(4, 64)[1], ints(3, 2))),
        (ValueError, r"group_ends: got \[3, 5\]", "unblock_scales", (torch.zeros(256, 4).byte(), ints(3, 5), 4, 2)),
        (ValueError, r"num_rows: got -1", "unblock_scales", (torch.zeros(128, 4).byte(), ints(3), -1, 2)),
        (ValueError, r"gate: got dim 0 = 4; .*pad the groups", "swiglu_bwd_fold", (*[A] * 3, NO_PROB, ints(0))),
        (
            ValueError,
            r"group_ends: got \[32, 80\]; allowed: mult",
            "swiglu_bwd_fold",
            (*[rows(96, 32)] * 3, NO_PROB, ints(32, 80)),
        ),
        (
            ValueError,
            r"group_ends: got \[128\]; .* up to 96",
            "swiglu_bwd_fold",
            (*[rows(96, 32)] * 3, NO_PROB, ints(128)),
        ),
        (ValueError, r"expert_ids: got 4", "sort_by_expert", (ints(4), 4)),
        (ValueError, r"alignment: got 33", "row_map", (ints(2, 1), 3, 2, 33)),
        (ValueError, r"alignment: got 33", "slot_map", (ints(2, 1), ints(0, 1, 2), NO_PROB, 1, 33)),
        (
            TypeError,
            f"sf: got dtype {E4M3}; allowed: torch.uint8 or {E8M0}",
            "permute_q_sf",
            (u8(4, 64), u8(4, 2).view(E4M3), ints(0)),
        ),
        (ValueError, r"top_k: got 2; allowed: divisors of 3", "slot_map", (ints(2, 1), ints(0, 1, 2), NO_PROB, 2)),
        (ValueError, r"top_k: got 0", "slot_map", (ints(2, 1), ints(0, 1, 2), NO_PROB, 0)),
    ],
)
def test_bad_input(error: type[Exception], message: str, op: str, args: tuple) -> None:
    with pytest.raises(error, match=f"{op}: {message}"):
        getattr(ops, op)(*args)


@pytest.mark.parametrize(
    ("message", "op", "args"),
    [
        (r"permute_rows: row_map: got 0 to 4; .* below 4", "permute_rows", (A, ints(0, 4))),
        (r"combine: slots: got -2 to 1; .* below 5", "combine", (rows(5, 7), ints(1, -2).view(1, 2), P)),
        (r"combine_bwd: order: got -1 to 4; .* below 4", "combine_bwd", bwd(order=ints(2, 4, 0, -1, 3))),
    ],
)
def test_what_debug_checks_read_on_a_gpu(message: str, op: str, args: tuple) -> None:
    with pytest.raises(ValueError, match=message):
        call._check_maps(ops.OPS[op], args)


def test_a_raw_op_has_no_silent_gradient() -> None:
    y = ops.dequantize(*ops.quantize_row(rows(2, 64).requires_grad_()))
    assert not y.requires_grad
    x = rows(2, 64).requires_grad_()
    with pytest.raises(NotImplementedError, match="gradient: got a request for it; ops have no gradient: use"):
        ops.permute_rows(x, ints(0)).sum().backward()


def test_debug_checks_end_with_their_block() -> None:
    cuda = torch.device("cuda")
    assert not call.checks_values(cuda)
    with debug_checks():
        assert call.checks_values(cuda)
    assert not call.checks_values(cuda)
    assert call.checks_values(torch.device("cpu"))


def test_mx_tensors_do_not_reach_raw_ops() -> None:
    with pytest.raises(NotImplementedError, match="dequantize"):
        ops.quantize_row(MXTensor.quantize(rows(2, 64)))
