"""Four ranks: each runs every check below over gloo until one fails; started by test_expert_parallel.py.

arguments: RANKS PORT OUT      PORT: of the store; OUT/rank{rank}: the checks that passed, one per line
"""

import gc
import os
import re
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from functools import cache, partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import (
    Collectives,
    CopyEngines,
    ExpertParallel,
    MoE,
    MXTensor,
    RouterConfig,
    SharedExpert,
    dispatch,
)
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
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from ...layer_options import layer_options
from ..forked import fork_ranks
from ..integrations import ep_torchao
from ..layer import ep_training, ep_tutorial, ep_weights
from ..overlap import ep_overlap
from . import ep_repeated, ep_replicas

D, HIDDEN, E, TOP_K, TOKENS = 64, 96, 8, 2, 48
RANKS = int(sys.argv[1])
RANK = fork_ranks(RANKS)


def sqnr_db(got: Tensor, want: Tensor) -> float:
    got, want = got.double(), want.double()
    return (10 * torch.log10(want.square().sum() / (got - want).square().sum())).item()


@cache
def mesh_of(ep: int) -> DeviceMesh:
    """This rank's group of `ep` consecutive ranks, one for all checks: a thread of every group polls 100 times a
    second."""
    return init_device_mesh("cpu", (RANKS // ep, ep), mesh_dim_names=("replica", "ep"))["ep"]


def parallel_layer(
    ep: int, recipe: Recipe | str = "mxfp8_wgrad_with_hp", seed: int = 0, transport=None, deduplicate=None, **options
) -> tuple[MoE, DeviceMesh]:
    torch.manual_seed(seed)
    moe, mesh = MoE(D, HIDDEN, E, recipe=recipe, **layer_options(TOP_K, **options)), mesh_of(ep)
    carried = None if transport is None else transport(mesh.get_group())
    style = ExpertParallel(gradients="sum", transport=carried, deduplicate=deduplicate)
    parallelize_module(moe.experts, mesh, style)
    return moe, mesh


def batch(seed: int = 1) -> Tensor:
    return torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(seed))


def raises(error: type[Exception], words: str, run: Callable[[], object]) -> None:
    with pytest.raises(error, match=re.escape(words)):
        run()


RUNS = {name: recipe for name, recipe in ep_overlap.RUNS.items() if name != "bf16 in all transfers"}


def equal_to_dense(ep: int, run: str, prob_in) -> None:
    """Tokens distributed over the ranks give the answer and the gradients of one process with all tokens."""
    recipe = RUNS[run]
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
    x = (batch()[: 0 if RANK == 1 else 12]).clone().requires_grad_()
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
    x = batch()[RANK * 8 : RANK * 8 + 8]

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


def compiled_layer(prob_in, deduplicate) -> None:
    """The whole layer with its collectives is one graph once Dynamo may capture the splits; else it is several.

    Compiled by the first two ranks: the other two would compile the same programs. Several graphs are compiled where a
    token goes once to each rank, which has the most steps: a graph takes seconds.
    """
    x = batch()[RANK * 8 : RANK * 8 + 8]
    eager, _ = parallel_layer(2, prob_in=prob_in, deduplicate=deduplicate)
    compiled, _ = parallel_layer(2, prob_in=prob_in, deduplicate=deduplicate)
    if RANK >= 2:
        return
    leaf = x.clone().requires_grad_()
    want, _ = eager(leaf)
    want.square().sum().backward()
    for whole in (True, False) if deduplicate == "dispatch" else (True,):
        torch._dynamo.reset()
        again = x.clone().requires_grad_()
        with torch._dynamo.config.patch(capture_scalar_outputs=whole):
            got, _ = torch.compile(compiled, fullgraph=whole, backend="aot_eager")(again)
            got.square().sum().backward()
        assert torch.equal(got, want)
        assert torch.equal(again.grad, leaf.grad)


def bad_input() -> None:
    mesh = mesh_of(4)
    name, x = mesh.get_group().group_name, batch()[:8]
    send = a2a_dispatch_mxfp8_fwd_hp_bwd
    fair = [2, 2, 2, 2]
    raises(ValueError, "input_splits: got [2, 2, 2, 1], in total 7; allowed: a total of 8",
           lambda: send(x, fair, [2, 2, 2, 1], name))  # fmt: skip
    raises(ValueError, "output_splits: got [4, 4]; allowed: 4 counts", lambda: send(x, [4, 4], fair, name))
    raises(ValueError, "input_splits: got [9, -1, 0, 0]", lambda: send(x, fair, [9, -1, 0, 0], name))
    raises(ValueError, "block_size: got 16; allowed: 32", lambda: send(x, fair, fair, name, block_size=16))
    raises(TypeError, "input: got dtype torch.float16", lambda: send(x.half(), fair, fair, name))
    raises(ValueError, "allowed: (M, K) with K a multiple of 32", lambda: send(x[:, :40], fair, fair, name))
    raises(TypeError, "input: got an MXTensor", lambda: send(MXTensor.quantize(x), fair, fair, name))
    torch.manual_seed(0)
    odd = MoE(D, HIDDEN, 6, RouterConfig(TOP_K))
    raises(ValueError, "w1: got 6 experts; allowed: a number of experts that the mesh of 4 ranks divides",
           lambda: parallelize_module(odd.experts, mesh, ExpertParallel()))  # fmt: skip
    assert not isinstance(odd.experts.w1, DTensor)
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "ep"))
    raises(ValueError, "device_mesh: got 2 dims", lambda: ExpertParallel()._apply(odd.experts, grid))
    raises(ValueError, "recipe", lambda: ExpertParallel("bf16")._apply(odd.experts, mesh))
    style = ExpertParallel(transport=Collectives(), gradients="sum")
    halves = mesh_of(2)
    raises(ValueError, "transport: got one of group", lambda: style._apply(odd.experts, halves))
    raises(ValueError, "transport: got", lambda: style._apply(nn.Bilinear(4, 4, 4), mesh))
    raises(NotImplementedError, "CopyEngines: group: got no CUDA", lambda: CopyEngines(mesh.get_group()))
    raises(ValueError, "recipe: got 'fp4'", lambda: ExpertParallel("fp4"))
    moe, _ = parallel_layer(4)
    raises(ValueError, "parallel already", lambda: parallelize_module(moe.experts, mesh, ExpertParallel()))
    rows = x.bfloat16()
    raises(
        ValueError, "padded_counts: got shape (3,); allowed: (2,)", lambda: moe.experts(rows, torch.tensor([4, 4, 0]))
    )
    exchange = partial(dispatch, rows, group=name)
    raises(ValueError, "(E,) with E a multiple of 4", lambda: exchange(torch.tensor([4, 4, 0])))
    raises(ValueError, "dispatch: counts", lambda: exchange(torch.ones(E, dtype=torch.int32)[:4] * 3))


class SplitExperts(ParallelStyle):
    """Weights as DTensors, and nothing else, as styles of other packages for their own experts have them."""

    def __init__(self, dim: int) -> None:
        self.dim = dim

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, w in list(module.named_parameters()):
            module.register_parameter(name, nn.Parameter(distribute_tensor(w, device_mesh, [Shard(self.dim)])))
        return module


def other_styles() -> None:
    """A layer that another style has sharded says so, and so does one that is given a DTensor."""
    mesh, x = mesh_of(2), batch()[:8]
    plans = {
        "MoE: parameters: got a DTensor (8, 64) with (Shard(dim=0),)": {
            "router": ColwiseParallel(), "experts": ExpertParallel(),
        },
        "MoE: parameters: got a DTensor (8, 64) with (Shard(dim=1),)": {"router": RowwiseParallel()},
        "GroupedExperts: parameters: got a DTensor (8, 96, 64) with (Shard(dim=0),)": {"experts": SplitExperts(0)},
        "MoE: parameters: got a DTensor (1, 64, 64) with (Shard(dim=1),)": {"shared_expert": SplitExperts(1)},
    }  # fmt: skip
    for words, plan in plans.items():
        moe = parallelize_module(MoE(D, HIDDEN, E, RouterConfig(TOP_K), shared=SharedExpert(64)), mesh, plan)
        raises(TypeError, f"{words} of another style; allowed: plain tensors, or parallelize_module(", partial(moe, x))
    moe = MoE(D, HIDDEN, E, RouterConfig(TOP_K))
    raises(
        TypeError,
        "MoE: x: got a DTensor; allowed: this rank's tensor",
        lambda: moe(distribute_tensor(x, mesh, [Replicate()])),
    )
    moe = fully_shard(MoE(D, HIDDEN, E, RouterConfig(TOP_K)), mesh=mesh)
    raises(ValueError, "module: got w1 as a DTensor; allowed: plain parameters; apply this style first",
           lambda: parallelize_module(moe, mesh, ExpertParallel()))  # fmt: skip


def group_that_is_gone() -> None:
    """As after destroy_process_group and another init_process_group."""
    group = dist.new_group([0, 1])
    if RANK >= 2:
        return
    mesh = DeviceMesh.from_group(group, "cpu")
    styles = ExpertParallel(), ExpertParallel(transport=Collectives(group))
    layers = [parallelize_module(MoE(D, HIDDEN, E, RouterConfig(TOP_K)), mesh, style) for style in styles]
    dist.destroy_process_group(group)
    for moe in layers:
        words = f"MoE: group: got '{group.group_name}', which has been destroyed; allowed: a group that exists"
        raises(RuntimeError, words, partial(moe, batch()[:8]))


PROGRAMS = (
    (2, "mxfp8_wgrad_with_hp", "mean", "combine"),
    (4, "mxfp8", "mean", "swiglu"),
    (2, "bf16", "sum", "combine"),
    (2, "bf16", "mean", "input"),
)
CHECKS: dict[str, Callable[[], None]] = {
    **{
        f"equal_to_dense[{ep}-{run}-{prob_in}]": partial(equal_to_dense, ep, run, prob_in)
        for ep in (1, 2, 4)
        for run in RUNS
        for prob_in in ("combine", "swiglu")
    },
    "reload_between_degrees": reload_between_degrees,
    "tutorial_flow": lambda: ep_tutorial.tutorial_flow(mesh_of(2), RANK),
    "empty_rank_and_hot_expert": empty_rank_and_hot_expert,
    "wire_of_a2a_dequant": wire_of_a2a_dequant,
    "dispatch_is_one_collective": dispatch_is_one_collective,
    "a_token_is_quantized_once": a_token_is_quantized_once,
    "several_layers_and_recomputation": several_layers_and_recomputation,
    "saved_of_sharded_experts": lambda: ep_weights.saved_of_sharded_experts(parallel_layer),
    "nothing_saved_of_gathered_weights": lambda: ep_weights.nothing_saved_of_gathered_weights(RANKS),
    "writes_to_the_local_part": lambda: ep_weights.writes_to_the_local_part(parallel_layer),
    "collectives_on_the_weight": ep_weights.collectives_on_the_weight,
    **{
        f"ranks_train_as_one_process[{ep}-{'-'.join(how)}]": lambda ep=ep, how=how: (
            ep_training.ranks_train_as_one_process(mesh_of(ep), *how)
        )
        for ep, *how in PROGRAMS
    },
    "sharded_twice[bf16]": partial(ep_training.sharded_twice, "bf16"),
    "sharded_twice[mxfp8]": partial(ep_training.sharded_twice, "mxfp8"),
    "sharded_twice[overlapped]": partial(ep_training.sharded_twice, "mxfp8", overlapped=True),
    "one_norm_one_optimizer": lambda: ep_training.one_norm_one_optimizer(mesh_of(2)),
    "saved_moved_and_cast": lambda: ep_training.saved_moved_and_cast(mesh_of(4)),
    **{
        f"overlapped[{ep}-{name}]": lambda ep=ep, how=how: how(ep_overlap.Poisoned(mesh_of(ep).get_group()))
        for ep in (2, 4)
        for name, how in ep_overlap.CHECKS.items()
    },
    **{
        f"overlapped_layer[{ep}-{prob_in}]": partial(ep_overlap.layer, parallel_layer, ep, prob_in)
        for ep, prob_in in ((2, "combine"), (4, "swiglu"))
    },
    **{
        f"replicas[{ep}-{name}]": lambda ep=ep, how=how: how(mesh_of(ep).get_group())
        for ep in (2, 4)
        for name, how in ep_replicas.CHECKS.items()
    },
    **{
        f"replicas_of_a_layer[{ep}-{prob_in}]": partial(ep_replicas.layer, parallel_layer, ep, prob_in)
        for ep, prob_in in ((2, "combine"), (4, "swiglu"))
    },
    **{
        f"repeated_experts[{prob_in}-{how}]": lambda of=(prob_in, how): ep_repeated.same_as_two_experts(
            mesh_of(2), *of, "mxfp8"
        )
        for prob_in, how in ep_repeated.OVER_RANKS
    },
    "bad_input": bad_input,
    "other_styles": other_styles,
    "group_that_is_gone": group_that_is_gone,
    **{
        f"compiled_layer[{prob_in}-{how}]": partial(compiled_layer, prob_in, how)
        for prob_in, how in (("combine", None), ("swiglu", None), ("swiglu", "dispatch"), ("combine", "both"))
    },
    # By the first two ranks, as above.
    "compiled_names_of_torchao": lambda: ep_torchao.compiled_names(mesh_of(2).get_group()) if RANK < 2 else None,
}


def main(port: str, out: str) -> None:
    torch.set_num_threads(1)
    # A rank that waits this long waits for one that failed.
    options = {"rank": RANK, "world_size": RANKS, "timeout": timedelta(seconds=120)}
    dist.init_process_group("gloo", store=dist.TCPStore("127.0.0.1", int(port)), **options)
    for name, check in CHECKS.items():
        try:
            check()
        except Exception:
            # The other ranks may wait inside this check's collectives: leaving breaks their connections.
            sys.exit(f"rank {RANK}: {name}\n{traceback.format_exc()}")
        with Path(out, f"rank{RANK}").open("a") as passed:
            passed.write(name + "\n")
        dist.barrier()
    os._exit(0)  # gloo's threads may still drop tensors, which aborts while Python ends


if __name__ == "__main__":
    main(*sys.argv[2:])
