"""A layer over ranks against the same layer in one process, and what is sent; run by ep_ranks.py."""

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mxep.torch_frontend import ExpertParallel, MoE, MXTensor, RouterConfig
from mxep.torch_frontend.exchange.route import Route
from mxep.torch_frontend.integrations.torchao import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
)
from mxep.torch_frontend.ops import direct
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from ..layer.ep_training import sqnr_db
from ..overlap import ep_overlap
from .ep_refused import raises
from .ep_world import HIDDEN, TOKENS, TOP_K, D, E, batch, mesh_of, parallel_layer


def equal_to_dense(run: str, prob_in) -> None:
    """Tokens distributed over the ranks give the answer and the gradients of one process with all tokens. Other
    recipes and numbers of ranks: tests/conformance/layer."""
    recipe, ep = ep_overlap.RUNS[run], dist.get_world_size()
    torch.manual_seed(0)
    dense = MoE(D, HIDDEN, E, RouterConfig(TOP_K, prob_in=prob_in), recipe=recipe)
    moe, mesh = parallel_layer(ep, recipe, prob_in=prob_in)
    x, dy = batch().requires_grad_(), batch(2)
    mine = slice(mesh.get_local_rank() * TOKENS // ep, (mesh.get_local_rank() + 1) * TOKENS // ep)
    want, _ = dense(x)
    want.backward(dy)
    x_mine = x.detach()[mine].clone().requires_grad_()
    got, _ = moe(x_mine)
    got.backward(dy[mine])
    # The same bytes meet the same weights; only the sum over the tokens of a weight's gradient is ordered otherwise.
    pairs = {"y": (got, want[mine]), "x": (x_mine.grad, x.grad[mine])}
    router = moe.router.weight.grad
    assert router is not None
    dist.all_reduce(router, group=mesh.get_group())
    pairs["router"] = (router, dense.router.weight.grad)
    for name, w in moe.experts.named_parameters():
        assert isinstance(w.grad, DTensor)
        experts = slice(mesh.get_local_rank() * E // ep, (mesh.get_local_rank() + 1) * E // ep)
        pairs[name] = (w.grad.to_local(), getattr(dense.experts, name).grad[experts])
    for name, (one, other) in pairs.items():
        # Measured: equal bit for bit. A value that rounds to another bf16 leaves less than 90 dB.
        assert sqnr_db(one, other) > 100, (name, sqnr_db(one, other))


def reload_between_degrees() -> None:
    """EP 4 -> EP 2 -> EP 1: the same full state dict, and the same answer, bit for bit."""
    options = StateDictOptions(full_state_dict=True)
    first, _ = parallel_layer(4, seed=3)
    state = get_model_state_dict(first, options=options)
    x, results = batch(), []
    for ep in (4, 2, 1):
        moe, _ = parallel_layer(ep, seed=ep)
        # A copy: loading replaces the entries by their shards.
        set_model_state_dict(moe, dict(state), options=options)
        again = get_model_state_dict(moe, options=options)
        assert again.keys() == state.keys()
        assert all(torch.equal(again[name], state[name]) for name in state)
        results.append(moe(x)[0])
        state = again
    alone = MoE(D, HIDDEN, E, RouterConfig(TOP_K))
    alone.load_state_dict(state)
    results.append(alone(x)[0])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=2**-8, atol=1e-6)


def empty_rank_and_hot_expert() -> None:
    """A rank without tokens, and one expert with all of them."""
    moe, mesh = parallel_layer(4)
    x = (batch()[: 0 if dist.get_rank() == 1 else 12]).clone().requires_grad_()
    nn.init.zeros_(moe.router.weight)  # ties: every token of every rank goes to the same two experts
    y, stats = moe(x)
    y.sum().backward()
    assert y.shape == x.shape
    assert sorted(stats.counts.tolist()) == [0] * 6 + [36, 36]  # of all ranks
    w = moe.experts.w1.grad
    assert isinstance(w, DTensor)
    full = w.redistribute(mesh, [Replicate()]).to_local()
    used = sum((full[e] != 0).any().item() for e in range(E))
    assert used == 2
    assert not full.isnan().any()


def wire_of_a2a_dequant() -> None:
    """MXFP8 values both ways, through a group whose ranks send uneven and empty parts."""
    mesh = mesh_of(2)
    me = mesh.get_local_rank()
    table = [[3, 0], [2, 4]]  # table[from][to]
    sent, received = table[me], [row[me] for row in table]
    x = torch.randn(sum(sent), D, generator=torch.Generator().manual_seed(me)).requires_grad_()
    others = [
        torch.randn(sum(table[r]), D, generator=torch.Generator().manual_seed(r)).split(table[r])[me] for r in (0, 1)
    ]
    y = to_mxfp8_a2a_dequant(x, received, sent, mesh.get_group())
    assert torch.equal(y, MXTensor.quantize(torch.cat(others)).dequantize())
    (dx,) = torch.autograd.grad(y, x, y.detach() * 1.7)
    (want,) = (MXTensor.quantize(MXTensor.quantize(x.detach()).dequantize() * 1.7).dequantize(),)
    assert torch.equal(dx, want)


def dispatch_is_one_collective() -> None:
    """Rows are sent packed, q and sf of received rows are views of one buffer, and bf16 rows are sent back."""
    mesh = mesh_of(2)
    name = mesh.get_group().group_name
    x = batch()[:8].bfloat16().requires_grad_()
    with torch.profiler.profile() as profile:
        mx = a2a_dispatch_mxfp8_fwd_hp_bwd(x, [4, 4], [4, 4], name)
    collectives = [event for event in profile.events() if event.name == "c10d::alltoall_base_"]
    assert len(collectives) == 1
    assert mx.q.untyped_storage().data_ptr() == mx.sf.untyped_storage().data_ptr()
    with torch.profiler.profile() as profile:
        back = a2a_combine_hp_fwd_mxfp8_bwd(batch()[:8].requires_grad_(), [4, 4], [4, 4], name)
        back.sum().backward()
    assert sum(event.name == "c10d::alltoall_base_" for event in profile.events()) == 2


def a_token_is_quantized_once() -> None:
    """For all of its copies; each copy's gradient is quantized on its way back."""
    moe, _ = parallel_layer(4)
    rows: list[int] = []
    real = direct.quantize_row_packed
    direct.quantize_row_packed = lambda x, *rest: rows.append(len(x)) or real(x, *rest)
    try:
        moe(batch())[0].sum().backward()
    finally:
        direct.quantize_row_packed = real
    assert rows == [TOKENS, TOKENS * TOP_K], rows


def several_layers_and_recomputation() -> None:
    """Two layers under one style object, a failed call in between, and activation checkpointing."""
    mesh, style = mesh_of(2), ExpertParallel()
    torch.manual_seed(0)
    layers = [MoE(D, HIDDEN, E, RouterConfig(TOP_K)), MoE(D, HIDDEN, E, RouterConfig(1))]
    for moe in layers:
        parallelize_module(moe.experts, mesh, style)
    x = batch()[dist.get_rank() * 8 : dist.get_rank() * 8 + 8]

    def run(x: Tensor) -> Tensor:
        return layers[1](layers[0](x)[0])[0]

    leaf = x.clone().requires_grad_()
    want = run(leaf)
    want.sum().backward()
    forward = layers[0].experts.forward
    layers[0].experts.forward = lambda *args: 1 / 0
    raises(ZeroDivisionError, "division", lambda: layers[0](x))
    layers[0].experts.forward = forward
    gc.collect()
    assert not any(isinstance(thing, Route) for thing in gc.get_objects()), "a failed call left its route behind"
    again = x.clone().requires_grad_()
    got = torch.utils.checkpoint.checkpoint(run, again, use_reentrant=False)
    got.sum().backward()
    assert torch.equal(got, want)
    assert torch.equal(again.grad, leaf.grad)


def compiled_layer(prob_in, deduplicate, whole: bool) -> None:
    """The whole layer with its collectives is one graph once Dynamo may capture the splits; else it is several.

    Compiled by the first two ranks: the other two would compile the same programs. A graph takes seconds.
    """
    x = batch()[dist.get_rank() * 8 : dist.get_rank() * 8 + 8]
    moe, _ = parallel_layer(2, prob_in=prob_in, deduplicate=deduplicate)
    if dist.get_rank() >= 2:
        return

    def step(layer: Callable[..., Any]) -> tuple[Tensor, Tensor]:
        leaf = x.clone().requires_grad_()
        got, _ = layer(leaf)
        return got, torch.autograd.grad(got.square().sum(), leaf)[0]

    want = step(moe)
    torch._dynamo.reset()
    with torch._dynamo.config.patch(capture_scalar_outputs=whole):
        assert all(map(torch.equal, step(torch.compile(moe, fullgraph=whole, backend="aot_eager")), want))
