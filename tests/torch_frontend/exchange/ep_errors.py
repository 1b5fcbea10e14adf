"""What is wrong on one of two ranks raises on both, and nothing waits; run by test_ep_errors.py and, over NCCL, by
tests/gpu/exchange/test_ranks.py.

Each check gives one rank a bad argument, or the two ranks arguments that contradict each other. A rank that is not told
waits for the other until the time-out, which ends it.
"""

import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from mxep.core_kernels.policy.recipe import RECIPES
from mxep.core_kernels.swiglu.activation import SwiGLU
from mxep.torch_frontend import (
    ExpertParallel,
    MoE,
    MXTensor,
    RouterConfig,
    SharedExpert,
    TokenReplicas,
    sort_by_expert,
)
from mxep.torch_frontend.exchange.combine import combine
from mxep.torch_frontend.exchange.counts import Request
from mxep.torch_frontend.exchange.dispatch import dispatch, dispatch_over
from mxep.torch_frontend.exchange.shards import Ranks
from mxep.torch_frontend.integrations.torchao import (
    a2a_combine_hp_fwd_mxfp8_bwd,
    a2a_dispatch_mxfp8_fwd_hp_bwd,
    to_mxfp8_a2a_dequant,
)
from mxep.torch_frontend.overlap.expert_parallel import expert_parallel_ffn, expert_parallel_mm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from ...layer_options import layer_options

RANKS, E, D = 2, 4, 64
RANK, DEVICE, GROUP = 0, torch.device("cpu"), "default"
X, COUNTS = torch.ones(6, D).bfloat16(), torch.tensor([1, 2, 3, 0])


def begin(rank: int) -> None:
    """Its number, its device and its tensors."""
    global RANK, DEVICE, GROUP, X, COUNTS
    assert dist.group.WORLD is not None
    RANK, GROUP = rank, dist.group.WORLD.group_name
    DEVICE = torch.device("cuda", RANK) if dist.get_backend() == "nccl" else torch.device("cpu")
    X, COUNTS = X.to(DEVICE), COUNTS.to(DEVICE)


def raises(words: str, others_words: str, run: Callable[[], object], error: type[Exception] = ValueError) -> None:
    """`run` raises `error` with `words` on rank 0, and ValueError with `others_words` on rank 1."""
    wanted = (error, words) if RANK == 0 else (ValueError, others_words)
    with pytest.raises(wanted[0], match=re.escape(wanted[1])):
        run()


def send(**changed: Any) -> None:
    """`dispatch` with these arguments on rank 0, and with right ones on rank 1."""
    mine = {"rows": X, "counts": COUNTS, "probs": None} | (changed if RANK == 0 else {})
    ranks = Ranks(GROUP, RANKS, E, DEVICE.type)
    dispatch_over(Request("test", mine["rows"], mine["counts"], RECIPES["mxfp8"], ranks, mine["probs"]))


def bad_arguments_of_dispatch() -> None:
    told = "dispatch: counts: got -1 from rank 0; allowed: counts of at least 0 from every rank; rank"
    order = torch.arange(6, dtype=torch.int32, device=DEVICE)
    for error, words, arguments in (
        (TypeError, "counts: got a NoneType; allowed: a torch.Tensor", {"counts": None}),
        (TypeError, "counts: got a list", {"counts": [1, 2, 3, 0]}),
        (TypeError, "counts: got dtype torch.float32; allowed: int32", {"counts": COUNTS.float()}),
        (
            ValueError,
            "counts: got shape (6,); allowed: (4,)",
            {"counts": torch.ones(6, device=DEVICE).long()},
        ),
        (
            ValueError,
            "got [7, -1, 0, 0], in total 6; allowed: counts of",
            {"counts": torch.tensor([7, -1, 0, 0], device=DEVICE)},
        ),
        (TypeError, "rows: got dtype torch.float16", {"rows": X.half()}),
        (ValueError, "rows: got shape (6, 40); allowed: (M, K) with K a multiple of 32", {"rows": X[:, :40]}),
        (TypeError, "rows: got a NoneType", {"rows": None}),
        (ValueError, "inverse: got shape (6,); allowed: (12,)", {"rows": TokenReplicas(X, order, order, 2)}),
        (ValueError, "probs: got shape (5,); allowed: (6,)", {"probs": torch.ones(5, device=DEVICE)}),
    ):
        raises(words, told, lambda arguments=arguments: send(**arguments), error)
    more = torch.tensor([1, 2, 3, 1], device=DEVICE)  # found where the ranks read the counts of all
    raises("in total 7; allowed: counts of at least 0, a total of 6", "counts: got bad arguments on rank 0; allowed:",
           lambda: send(counts=more))  # fmt: skip
    rows, probs = X.clone().requires_grad_(), torch.ones(6, device=DEVICE)
    for name, here, weights in (("gradients", "rows", None), ("probs", "given", probs)):
        words = f"{name}: got none on rank 1; allowed: {here}, as here"
        raises(
            words, f"{name}: got {here} on rank 0; allowed: none, as here", lambda w=weights: send(rows=rows, probs=w)
        )


def ranks_of_a_layer_that_differ() -> None:
    """Options with which a rank reads rows, changed on one rank after the layers were compared: all raise before rows
    are sent, and the layer works again when the options agree."""
    mesh = init_device_mesh(DEVICE.type, (RANKS,))
    x = torch.randn(4, D, device=DEVICE).requires_grad_()
    weights = torch.ones(4, 2, device=DEVICE)
    chosen = torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0]], device=DEVICE)

    def layer(**of_style: Any) -> MoE:
        torch.manual_seed(0)
        moe = MoE(D, 96, E, RouterConfig(2, bias=True), device=DEVICE)
        return parallelize_module(moe, mesh, ExpertParallel(**of_style))

    def differs(moe: MoE, name: str, here: object, there: object, *call: Tensor) -> None:
        words = f"dispatch: {name}: got {{}} on rank {{}}; allowed: {{}}, as here"
        raises(words.format(there, 1, here), words.format(here, 0, there), lambda: moe(x, *call))

    for how in ("dispatch", "both"):
        moe, first = layer(deduplicate=how), chosen[:, :1].contiguous()
        differs(moe, "top_k", 1, 2, *((first, weights[:, :1]) if RANK == 0 else (chosen, weights)))
        assert moe(x, first, weights[:, :1])[0].isfinite().all()
    moe = layer()
    # A row per replica takes any number of experts per token.
    assert moe(x, *((chosen[:, :1], weights[:, :1]) if RANK == 0 else (chosen, weights)))[0].isfinite().all()
    differs(moe, "routing", "the caller", "the router", *((chosen, weights) if RANK == 0 else ()))
    if RANK == 0:
        moe.router_config = replace(moe.router_config, prob_in="combine")
    differs(moe, "prob_in", "combine", "swiglu")
    moe.router_config = replace(moe.router_config, prob_in="swiglu")
    if RANK == 0:
        moe.experts.recipe = RECIPES["bf16"]
    raises("dispatch: recipe: got name='mxfp8'", "dispatch: recipe: got name='bf16'", lambda moe=moe: moe(x))
    moe.experts.recipe = RECIPES["mxfp8"]
    moe.router.weight.requires_grad_(RANK == 1)
    everything = "router.weight, router.bias, experts.w1, experts.w2, experts.w3"
    differs(moe, "parameters", everything.removeprefix("router.weight, "), everything)
    moe.router.weight.requires_grad_()
    bias, moe.router.bias = moe.router.bias, None if RANK == 0 else moe.router.bias
    differs(moe, "router.bias", False, True)
    moe.router.bias = bias
    moe(x)[0].sum().backward()


def experts_that_nobody_agreed_on() -> None:
    """`dispatch` by hand: what ranks disagree on is named, and a bad argument raises before the counts are sent."""

    def by_hand(rows: object = X, counts: object = COUNTS) -> None:
        mine = (rows, counts) if RANK == 0 else (X, COUNTS)
        dispatch(*mine, group=GROUP)  # type: ignore[arg-type]

    told = "dispatch: rows: got bad arguments on rank 0; allowed: valid arguments on all ranks; rank 0 raises the"
    raises("rows: got dtype torch.float16", told, lambda: by_hand(X.half()), TypeError)
    raises("experts: got 4 on rank 1; allowed: 2", "experts: got 2 on rank 0; allowed: 4",
           lambda: by_hand(counts=torch.tensor([3, 3], device=DEVICE)))  # fmt: skip
    by_hand()
    for words, others_words, rows, options in (
        ("rows: got 64 values of torch.bfloat16 on rank 1; allowed: 96", "rows: got 96 values of torch.float32 on",
         torch.ones(6, 96, device=DEVICE), {}),
        ("rows: got 64 values of torch.bfloat16 on rank 1", "rows: got 64 values of torch.float32 on rank 0",
         X.float(), {}),
        ("recipe: got name='mxfp8', operands=", "recipe: got name='bf16', operands=", X, {"recipe": "bf16"}),
    ):  # fmt: skip
        mine = (rows, options) if RANK == 0 else (X, {})
        raises(words, others_words, lambda mine=mine: dispatch(mine[0], COUNTS, group=GROUP, **mine[1]))
    by_hand()
    for words, option in (("recipe: got 'mxfp9'", "recipe"), ("deduplicate: got 'mxfp9'", "deduplicate")):
        mine = {option: "mxfp9"} if RANK == 0 else {}
        raises(words, told, lambda mine=mine: dispatch(X, COUNTS, group=GROUP, **mine))
    order, inverse, counts = sort_by_expert(torch.zeros(6, 2, dtype=torch.int32, device=DEVICE), E)
    tokens = TokenReplicas(X, order, inverse, 2)
    for ours, theirs in (("dispatch", None), ("both", "dispatch")):
        mine = ours if RANK == 0 else theirs
        raises(f"deduplicate: got {theirs} on rank 1; allowed: {ours}", f"got {ours} on rank 0; allowed: {theirs}",
               lambda mine=mine: dispatch(tokens, counts, group=GROUP, deduplicate=mine))  # fmt: skip
    mine = (tokens, counts) if RANK else (X, COUNTS)
    raises("deduplicate: got 'dispatch'; allowed: None for rows", told,
           lambda: dispatch(*mine, group=GROUP, deduplicate="dispatch"))  # fmt: skip


def counts_of_two_dtypes() -> None:
    """int64 on one rank, int32 and uint8 on the other: counts are sent as int32."""
    for mine in (COUNTS, COUNTS.int(), COUNTS.to(torch.uint8)):
        counts = mine if RANK else COUNTS
        groups, padded, route = dispatch(X, counts, group=GROUP)
        assert (route.output_splits, route.input_splits) == ([3, 3], [3, 3])
        assert padded.tolist() == [32, 32]
        assert torch.equal(combine(groups.dequantize(), route), X)  # type: ignore[attr-defined]


def bad_arguments_of_an_all_to_all() -> None:
    fair: list[int] = [3, 3]
    for function in (a2a_dispatch_mxfp8_fwd_hp_bwd, a2a_combine_hp_fwd_mxfp8_bwd, to_mxfp8_a2a_dequant):

        def both(x: object = X, received: object = fair, sent: object = fair, function: Callable = function) -> Tensor:
            return function(*((x, received, sent) if RANK == 0 else (X, fair, fair)))

        told = f"{function.__name__}: input: got bad arguments on rank 0; allowed: valid arguments on all ranks; rank 0"
        raises("input: got a NoneType; allowed: a torch.Tensor", told, lambda both=both: both(None), TypeError)
        raises("input_splits: got a NoneType", told, lambda both=both: both(sent=None), TypeError)
        raises("output_splits: got a int", told, lambda both=both: both(received=3), TypeError)
        raises("output_splits: got a Tensor; allowed: a list of ints; call .tolist()", told,
               lambda both=both: both(received=torch.tensor(3)), TypeError)  # fmt: skip
        raises("input_splits: got [9, -3]; allowed: 2 counts", told, lambda both=both: both(sent=[9, -3]))
        raises("output_splits: got [2, 3]; allowed: 3 from rank 0, what this rank sends itself", told,
               lambda both=both: both(received=[2, 3]))  # fmt: skip
        pair = "output_splits: got 4 from rank 1 on rank 0; allowed: 3, its input_splits there"
        raises(pair, pair, lambda both=both: both(received=[3, 4]))
        for other in (X.float(), X.float()[:, :32]):  # the second has rows of as many bytes
            here, there = f"{other.shape[1]} values of torch.float32", "64 values of torch.bfloat16"
            raises(f"input: got {there} on rank 1; allowed: {here}, as here",
                   f"input: got {here} on rank 0; allowed: {there}", lambda both=both, x=other: both(x))  # fmt: skip
        assert both().shape == X.shape


def groups_that_are_none() -> None:
    """Found by each rank alone: what is no group has no ranks to tell."""
    one = dist.new_group([0])
    for group, error, words in (
        (7, TypeError, "group_name: got 7; allowed: a group of this rank, its name, or None"),
        ("nowhere", ValueError, "group_name: got 'nowhere'; allowed: the name of a group of this rank"),
        (one if RANK else 1.5, TypeError, "a group that this rank is not in" if RANK else "group_name: got 1.5"),
    ):
        with pytest.raises(error, match=re.escape(words)):
            a2a_dispatch_mxfp8_fwd_hp_bwd(X, [3, 3], [3, 3], group)  # type: ignore[arg-type]


class Experts(nn.Module):
    """Rows come back as they went through the wire."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(E, D, D))

    def forward(self, groups: Tensor, padded_counts: Tensor, probs: Tensor | None = None) -> Tensor:
        assert isinstance(groups, MXTensor)
        return groups.dequantize()


def bad_arguments_of_parallel_experts() -> None:
    mesh, style = init_device_mesh(DEVICE.type, (RANKS,), mesh_dim_names=("ep",)), ExpertParallel(gradients="sum")
    for module, told in (
        (nn.Sequential(nn.Linear(D, D)), "a Sequential with parameters of submodules alone"),
        (nn.Linear(D, D, bias=False), "a Linear with parameters weight"),
        (
            nn.ModuleDict({"moe": MoE(D, 96, E, RouterConfig(1))}),
            "a ModuleDict with parameters of submodules alone.*; here 'moe'$",
        ),
    ):
        for chosen in (style, ExpertParallel()):
            with pytest.raises(ValueError, match=f"ExpertParallel: module: got {told}"):
                parallelize_module(module, mesh, chosen)
    with pytest.raises(ValueError, match=r"gradients: got 'mean'; allowed: gradients='sum' for a Experts"):
        parallelize_module(Experts(), mesh, ExpertParallel())
    module = nn.Linear(D, D) if RANK == 0 else Experts()
    raises("module: got a Linear with parameters weight", "module: got bad arguments on rank 0; allowed: valid",
           lambda: parallelize_module(module, mesh, style))  # fmt: skip
    module = MoE(D, 96, E if RANK == 0 else 2 * E, RouterConfig(1))
    raises("parameters: got w1 (8, 96, 64)", "parameters: got w1 (4, 96, 64)",
           lambda: parallelize_module(module, mesh, ExpertParallel()))  # fmt: skip
    module = MoE(D, 96, E, RouterConfig(1), recipe="bf16" if RANK == 0 else "mxfp8")
    raises("recipe: got name='mxfp8', operands=", "recipe: got name='bf16', operands=",
           lambda: parallelize_module(module, mesh, ExpertParallel()))  # fmt: skip
    router, w1 = "other parameters: got router.weight (4, 64) torch.float32", "parameters: got w1 (4, 96, 64) torch."
    for option, ours, theirs, of_ours, of_theirs in (
        ("prob_in", "combine", "swiglu", "prob_in: got combine", "prob_in: got swiglu"),
        ("activation", SwiGLU(limit=7.0), SwiGLU(), "activation: got limit=7.0", "activation: got limit=None"),
        ("dtype", torch.bfloat16, torch.float32, w1 + "bfloat16", w1 + "float32"),
        ("router_bias", True, False, f"{router}, router.bias (4,) torch.float32 on", f"{router} on"),
        ("shared", SharedExpert(32), None, f"{router}, shared_expert.w1 (1, 32, 64)", f"{router} on"),
    ):
        mine = MoE(D, 96, E, **layer_options(1, **{option: ours if RANK == 0 else theirs}))  # type: ignore[arg-type]
        raises(of_theirs, of_ours, lambda mine=mine: parallelize_module(mine, mesh, ExpertParallel()))
    style = ExpertParallel(deduplicate="both" if RANK == 0 else "dispatch")
    raises("deduplicate: got dispatch on rank 1", "deduplicate: got both on rank 0",
           lambda: parallelize_module(MoE(D, 96, E, RouterConfig(1)), mesh, style))  # fmt: skip
    moe = MoE(D, 96, E, RouterConfig(1, prob_in="input"))
    with pytest.raises(
        ValueError, match="ExpertParallel: deduplicate: got 'dispatch'; allowed: None with prob_in='input'"
    ):
        parallelize_module(moe, mesh, ExpertParallel(deduplicate="dispatch"))
    with pytest.raises(ValueError, match=r"deduplicate: got 'twice'; allowed: None, 'dispatch', 'both'"):
        ExpertParallel(deduplicate="twice")  # type: ignore[arg-type]
    once = parallelize_module(MoE(D, 96, E, RouterConfig(2)).to(DEVICE), mesh, ExpertParallel(deduplicate="dispatch"))
    for error, x in ((TypeError, X.half()), (ValueError, X[:, :32])):
        raises("MoE: x: got", "counts: got -1 from rank 0", lambda x=x: once(X if RANK else x), error)
    once(X)
    style = ExpertParallel(gradients="sum")
    meaning = "sum" if RANK == 0 else "mean"
    raises("gradients: got mean on rank 1", "gradients: got sum on rank 0",
           lambda: parallelize_module(MoE(D, 96, E, RouterConfig(1)), mesh,
                                      ExpertParallel(gradients=meaning)))  # fmt: skip
    experts = parallelize_module(Experts().to(DEVICE), mesh, style)
    with pytest.raises(TypeError, match=r"module: got called with 1 arguments; allowed: \(rows, counts\)"):
        experts(X)
    for error, counts in ((TypeError, None), (ValueError, COUNTS - 1), (ValueError, COUNTS[:3])):
        told = "counts: got -1 from rank 0"
        raises("dispatch: counts: got", told, lambda c=counts: experts(X, COUNTS if RANK else c), error)
    weights = torch.ones(6, device=DEVICE, dtype=torch.float32 if RANK else torch.bfloat16)
    raises("probs: got dtype torch.bfloat16", told, lambda: experts(X, COUNTS, weights), TypeError)
    layer = parallelize_module(MoE(D, 96, E, RouterConfig(1)).to(DEVICE), mesh, ExpertParallel())
    for error, x in ((TypeError, X.half()), (ValueError, X[:, :32]), (TypeError, None)):
        raises("MoE: x: got", told, lambda x=x: layer(X if RANK else x), error)
    layer(X)
    one, other = (experts(X, counts) for counts in (COUNTS, COUNTS.int() if RANK else COUNTS))
    assert torch.equal(one, other)


def bad_arguments_of_overlapped_experts() -> None:
    """Weights, counts and rows of one rank; no row is sent, and the next call works."""
    w, told = torch.ones(E // RANKS, 32, D, device=DEVICE), "dispatch: rows: got bad arguments on rank 0"
    for words, change in (
        ("w: got shape (2, 32, 48)", {"w": w[..., :48].contiguous()}),
        ("counts: got shape (2,); allowed: (4,)", {"counts": COUNTS[:2]}),
        ("rows: got shape (6, 48)", {"rows": X[:, :48]}),
        ("bias: got shape (3, 32)", {"bias": torch.ones(3, 32, device=DEVICE)}),
    ):
        arguments = {"rows": X, "w": w, "counts": COUNTS, "group": GROUP}
        mine = arguments | change if RANK == 0 else arguments
        raises(words, told, lambda mine=mine: expert_parallel_mm(**mine))
    mine = arguments | {"rows": X.clone().requires_grad_()} if RANK == 0 else arguments
    words = "gradients: got none on rank 1; allowed: rows, as here"
    raises(words, "gradients: got rows on rank 0; allowed: none", lambda: expert_parallel_mm(**mine))
    counts = torch.tensor([1, 1, 1, 2], device=DEVICE) if RANK == 0 else COUNTS
    words = "dispatch: counts: got [1, 1, 1, 2], in total 5", "dispatch: counts: got bad arguments on rank 0"
    raises(*words, lambda: expert_parallel_mm(X, w, counts, group=GROUP))
    trained = w.clone().requires_grad_(RANK == 0)
    words = "gradients: got none on rank 1; allowed: experts alone, as here"
    raises(
        words,
        "gradients: got experts alone on rank 0; allowed: none",
        lambda: expert_parallel_mm(X, trained, COUNTS, group=GROUP),
    )
    for words, change in (
        ("recipe: got 'mxfp9'", {"recipe": "mxfp9"}),
        ("transport: got 'peers'; allowed: a PeerMemory of the group, or None", {"transport": "peers"}),
    ):
        mine = {"group": GROUP} | (change if RANK == 0 else {})
        error = TypeError if "transport" in change else ValueError
        raises(words, told, lambda mine=mine: expert_parallel_mm(X, w, COUNTS, **mine), error)
    mine = {"prob_in": "input"} if RANK == 0 else {}
    weights = (torch.ones(E // RANKS, *shape, device=DEVICE) for shape in ((32, D), (32, D), (D, 32)))
    w1, w3, w2 = weights
    raises("prob_in: got 'input'", told, lambda: expert_parallel_ffn(X, COUNTS, w1, w3, w2, group=GROUP, **mine))
    assert expert_parallel_mm(X, w, COUNTS, group=GROUP).shape == (6, 32)


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    assert ranks == RANKS
    functions = (
        bad_arguments_of_overlapped_experts,
        bad_arguments_of_dispatch,
        ranks_of_a_layer_that_differ,
        experts_that_nobody_agreed_on,
        counts_of_two_dtypes,
        bad_arguments_of_an_all_to_all,
        groups_that_are_none,
        bad_arguments_of_parallel_experts,
    )
    return {function.__name__: function for function in functions}
