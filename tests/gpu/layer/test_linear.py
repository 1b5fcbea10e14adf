"""Dense layers on a GPU: one group of many spans, no synchronization, graphs, compiled programs, both frontends."""

from collections import Counter
from collections.abc import Callable

import jax
import pytest
import torch
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.jax_frontend import dense
from mxep.torch_frontend import MXLinear, Recipe, convert_linear, grouped_mm, linear, ops
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from ...compare import sqnr_db
from ..cases import DEVICE

K, N = 512, 768
FOLD = Recipe.parse("mxfp8", compute="fold")
RUNS = {**RECIPES, "mxfp8_folded": FOLD}
runs = pytest.mark.parametrize("run", RUNS)


def operands(rows: int, seed: int = 0, k: int = K, n: int = N) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, w, bias and dout; the magnitude of rows grows, so that the scales along the tokens do."""
    rng = torch.Generator(DEVICE).manual_seed(seed)
    x, w, bias, dout = (
        torch.randn(shape, generator=rng, device=DEVICE).bfloat16() for shape in ((rows, k), (n, k), (n,), (rows, n))
    )
    growth = torch.exp2(torch.arange(rows, device=DEVICE) // 256 % 5 * 1.0)[:, None].bfloat16()
    x, dout = x * growth, dout * growth
    return x.requires_grad_(), w.mul_(1).requires_grad_(), bias.requires_grad_(), dout


def step(function: Callable[..., Tensor], *args: Tensor) -> list[Tensor]:
    *leaves, dout = args
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def equal(got: list[Tensor], want: list[Tensor]) -> bool:
    return all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@runs
@pytest.mark.parametrize("rows", [0, 1, 33, 4096, 16384])
def test_one_group_of_the_grouped_product(run: str, rows: int) -> None:
    """The bytes of padded groups, whose passes along the tokens are other kernels."""
    args, recipe = operands(rows), RUNS[run]
    ends = torch.tensor([rows], device=DEVICE, dtype=torch.int32)
    got = step(lambda *of: linear(*of, recipe=recipe), *args)
    want = step(lambda x, w, bias: grouped_mm(x, w[None], ends, bias=bias, recipe=recipe), *args)
    assert equal(got[:3], want[:3])
    if rows:
        assert sqnr_db(got[3], args[3].double().sum(0)) > 50  # one bf16 rounding


def test_a_chain_of_spans_has_the_bytes_of_one_pass_after_the_other() -> None:
    """64 spans of 256 tokens of one group: scales by look-back, and by a kernel that walks the spans in order."""
    x, _, _, _ = operands(16384)
    ends = torch.tensor([16384], device=DEVICE, dtype=torch.int32)
    q, sf, q_t, sf_t = ops.quantize_both_fold(x.detach(), ends)
    assert equal(list(ops.fold_groups(*ops.quantize_col(x.detach()), ends)), [q_t, sf_t])
    assert equal(list(ops.quantize_row_fold(x.detach())), [q, sf])


@runs
@pytest.mark.parametrize("rows", [33, 4096])
def test_no_synchronization_and_a_graph_of_the_current_weights(run: str, rows: int) -> None:
    x, w, bias, dout = operands(rows)
    recipe = RUNS[run]

    def run_step() -> list[Tensor]:
        return step(lambda *of: linear(*of, recipe=recipe), x, w, bias, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run_step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.set_sync_debug_mode("error")
    try:
        before = run_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run_step()
    graph.replay()
    assert equal(captured, before)
    with torch.no_grad():
        w.mul_(3)
    graph.replay()
    assert equal(captured, run_step())
    assert not equal(captured, before)


def kernels(run: Callable[[], object]) -> Counter[str]:
    """How often the GPU runs each kernel and fill."""
    run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    return Counter(event.name for event in seen.events() or () if event.device_type.name == "CUDA")


@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9, reason="the launches of Hopper"
)
def test_a_step_launches_what_the_table_says() -> None:
    """The kernels of products/linear.py, and one of torch, which fills the group's end."""
    x, w, _, dout = operands(4096)
    found = kernels(lambda: step(lambda x, w: linear(x, w, recipe=FOLD), x, w, dout))
    ours = {name: n for name, n in found.items() if "mxep" in name}
    assert sum(ours.values()) == 9, found
    others = {name: n for name, n in found.items() if "mxep" not in name and "Memset" not in name}
    assert sum(others.values()) == 1, found


def test_layers_that_read_the_same_rows_quantize_them_once() -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q_proj, self.k_proj = (nn.Linear(K, n, bias=False, device=DEVICE).bfloat16() for n in (N, 128))

        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self.q_proj(x), self.k_proj(x)], -1)

    model = Heads()
    convert_linear(model, lambda module, name: True, FOLD)
    x, _, _, _ = operands(4096)
    dout = torch.ones(4096, N + 128, device=DEVICE, dtype=torch.bfloat16)

    def run() -> list[Tensor]:
        out = model(x)
        return [out.detach(), *torch.autograd.grad(out, (x, *model.parameters()), dout)]

    shared, found = run(), kernels(run)
    for module in (model.q_proj, model.k_proj):
        assert isinstance(module, MXLinear)
        module.shared_rows = None
    assert equal(run(), shared)
    assert sum(kernels(run).values()) > sum(found.values())


@pytest.mark.parametrize("rows", [33, 4096])
def test_a_compiled_layer_has_the_same_bytes(rows: int) -> None:
    torch._dynamo.reset()
    args = operands(rows)
    compiled = torch.compile(lambda *of: linear(*of, recipe=FOLD), fullgraph=True, dynamic=False)
    assert equal(step(compiled, *args)[:3], step(lambda *of: linear(*of, recipe=FOLD), *args)[:3])


def test_saved_memory_is_the_bytes_of_the_operands() -> None:
    """Of x its operand along the tokens, of w its operand along N: a byte for each value, and scales."""
    x, w, _, _ = operands(4096)
    linear(x, w, recipe=FOLD)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    out = linear(x, w, recipe=FOLD)
    saved = torch.cuda.memory_allocated() - before - out.nbytes
    operands_nbytes = x.numel() + w.numel()
    assert operands_nbytes <= saved <= 1.02 * operands_nbytes + 4096


@pytest.mark.parametrize("rows", [33, 4096])
def test_jax_has_the_bytes_of_torch(rows: int) -> None:
    x, w, bias, dout = operands(rows)
    want = step(lambda *of: linear(*of, recipe=FOLD), x, w, bias, dout)
    arrays = [jax.dlpack.from_dlpack(t.detach().contiguous()) for t in (x, w.T, bias, dout)]

    def run(x: jax.Array, w: jax.Array, bias: jax.Array, dout: jax.Array) -> tuple[jax.Array, ...]:
        out, backward = jax.vjp(lambda *of: dense(*of, recipe=FOLD), x, w, bias)
        dx, dw, _ = backward(dout)
        return out, dx, dw.T

    got = [torch.from_dlpack(a) for a in jax.jit(run)(*arrays)]
    assert equal(got, want[:3])
