"""The checks of four ranks over gloo, by name; test_expert_parallel.py runs them."""

from collections.abc import Callable
from functools import partial

import torch.distributed as dist

from ..integrations import ep_torchao
from ..layer import ep_training, ep_tutorial, ep_weights
from . import ep_layer, ep_refused, ep_repeated, ep_replicas
from .ep_world import mesh_of, parallel_layer

PROGRAMS = (
    (2, "mxfp8_wgrad_with_hp", "mean", "combine"),
    (4, "mxfp8", "mean", "swiglu"),
    (2, "bf16", "sum", "combine"),
    (2, "bf16", "mean", "input"),
)
SLOW = ("compiled_layer[combine-both]",)
"""The other compiled layers, and replicas without a compiler, run the same code."""


def compiled_names_of_torchao() -> None:
    """By the first two ranks: the other two would compile the same programs."""
    group = mesh_of(2).get_group()
    if dist.get_rank() < 2:
        ep_torchao.compiled_names(group)


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    return {
        **{
            f"equal_to_dense[{run}-{prob_in}]": partial(ep_layer.equal_to_dense, run, prob_in)
            for run in ("mxfp8 folded", "mxfp8 in all transfers")
            for prob_in in ("combine", "swiglu")
        },
        "reload_between_degrees": ep_layer.reload_between_degrees,
        "tutorial_flow": lambda: ep_tutorial.tutorial_flow(mesh_of(2), dist.get_rank()),
        "empty_rank_and_hot_expert": ep_layer.empty_rank_and_hot_expert,
        "wire_of_a2a_dequant": ep_layer.wire_of_a2a_dequant,
        "dispatch_is_one_collective": ep_layer.dispatch_is_one_collective,
        "a_token_is_quantized_once": ep_layer.a_token_is_quantized_once,
        "several_layers_and_recomputation": ep_layer.several_layers_and_recomputation,
        "saved_of_sharded_experts": lambda: ep_weights.saved_of_sharded_experts(parallel_layer),
        "nothing_saved_of_gathered_weights": lambda: ep_weights.nothing_saved_of_gathered_weights(ranks),
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
        "one_norm_one_optimizer": lambda: ep_training.one_norm_one_optimizer(mesh_of(2)),
        "saved_moved_and_cast": lambda: ep_training.saved_moved_and_cast(mesh_of(4)),
        **{
            f"replicas[{ep}-{name}]": lambda ep=ep, how=how: how(mesh_of(ep).get_group())
            for ep in (2, 4)
            for name, how in ep_replicas.CHECKS.items()
            if ep == 4 or name == "subset"
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
        "bad_input": ep_refused.bad_input,
        "other_styles": ep_refused.other_styles,
        "group_that_is_gone": ep_refused.group_that_is_gone,
        **{
            f"compiled_layer[{prob_in}-{how}]": partial(ep_layer.compiled_layer, prob_in, how, whole)
            for prob_in, how, whole in (
                ("combine", None, True),
                ("swiglu", "dispatch", False),
                ("combine", "both", True),
            )
        },
        "compiled_names_of_torchao": compiled_names_of_torchao,
    }
