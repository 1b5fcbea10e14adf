"""The checks of four ranks of a model under `shard_moe`, against one process, by name; test_fsdp.py runs them."""

import re
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mxep.torch_frontend import ExpertParallel, MoE, clip_grad_norm_, shard_moe
from mxep.torch_frontend.integrations.frozen import freeze_weights
from mxep.torch_frontend.layer.metrics import MoERecorder
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from . import ep_training
from .ep_training import whole
from .fsdp_checkpoints import checkpoints_between_degrees
from .fsdp_model import (
    TOKENS,
    Block,
    D,
    Model,
    batch,
    fresh,
    gradients,
    loss_of,
    mesh_of,
    mine,
    require_equal,
    require_near,
    sharded,
    train,
    whole_weights,
)


def trains_as_one_process(ep: int, recipe: str, steps: int) -> None:
    """Steps of SGD with momentum, every gradient clipped: a wrong scale of any gradient shows."""
    alone, model = fresh(recipe=recipe), sharded(ep, recipe=recipe)
    start, sgd = whole_weights(alone), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    want, got = train(alone, lambda tokens: tokens, steps, sgd), train(model, mine, steps, sgd)
    assert min(want) > 0.5
    # Measured: 1.9e-7.
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=0)
    require_near(whole_weights(model), whole_weights(alone), start)


def optimizers(ep: int) -> None:
    """AdamW with all parameters in one group. eps keeps a gradient of 0 from having a sign."""
    alone, model = fresh(), sharded(ep)
    start, adamw = whole_weights(alone), partial(torch.optim.AdamW, lr=1e-2, eps=1e-2)
    train(alone, lambda tokens: tokens, 2, adamw)
    train(model, mine, 2, partial(adamw, foreach=True))
    require_near(whole_weights(model), whole_weights(alone), start)


def accumulates(ep: int) -> None:
    """Two microbatches, the first without communication over data, are one batch."""
    alone, model = fresh(), sharded(ep)
    loss_of(alone, batch(0)).backward()
    for last, part in enumerate(mine(batch(0)).chunk(2)):
        model.set_requires_gradient_sync(bool(last))
        (loss_of(model, part) / 2).backward()
    require_near(gradients(model), gradients(alone))


def holds_weights(ep: int) -> None:
    """As the page does: experts that stay gathered and quantized for three microbatches have the bytes of experts that
    are gathered and quantized in each, and a sharded one is refused with the remedy."""
    found = []
    for held in (False, True):
        model = sharded(ep, recipe="mxfp8", prob_in="swiglu")
        experts = [module.experts for module in model.modules() if isinstance(module, MoE)] if held else []
        if held:
            words = r"w1: got a shard .*; under FSDP2 call `unshard\(\)` before"
            with pytest.raises(ValueError, match=words), experts[0].cached_weights():
                pass
        with ExitStack() as blocks:
            for each in experts:
                each.set_reshard_after_forward(False, recurse=False)
                each.set_reshard_after_backward(False, recurse=False)
                each.unshard()
                blocks.enter_context(each.cached_weights())
            for number, part in enumerate(mine(batch(0)).chunk(3)):
                model.set_requires_gradient_sync(number == 2)
                (loss_of(model, part) / 3).backward()
        for each in experts:
            each.set_reshard_after_forward(True, recurse=False)
            each.set_reshard_after_backward(True, recurse=False)
            each.reshard()
        found.append(gradients(model))
        train(model, mine, 1, partial(torch.optim.SGD, lr=0.1))
        found[-1] |= whole_weights(model)
    require_equal(*found)


def deduplicates(ep: int) -> None:
    """A token sent once to each rank gives the same bytes of gradients."""
    mesh, want = mesh_of(ep), None
    for options in ({}, {"deduplicate": "dispatch"}):
        model = shard_moe(fresh(recipe="mxfp8"), mesh, [Block], style=ExpertParallel(**options))
        loss_of(model, mine(batch(0))).backward()
        want = want or gradients(model)
        require_equal(gradients(model), want)


def recomputes(ep: int) -> None:
    """Activation checkpointing changes no bit: of whole blocks, and without the all-to-alls, which are kept."""

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = "all_to_all" in str(op)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    found = []
    for options in (None, {}, {"context_fn": partial(create_selective_checkpoint_contexts, policy)}):
        model = sharded(ep, recipe="mxfp8")
        if options is not None:
            model.run = partial(checkpoint, use_reentrant=False, **options)
        loss_of(model, mine(batch(0))).backward()
        found.append(gradients(model))
    for other in found[1:]:
        assert all(torch.equal(other[name], g) for name, g in found[0].items())


def mixed_precision(ep: int) -> None:
    """bf16 weights in the products, fp32 gradients; weights of rows, which are fp32, are not cast."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    alone, model = fresh(prob_in="swiglu").bfloat16(), sharded(ep, policy, prob_in="swiglu")
    loss_of(alone, batch(0)).backward()
    loss_of(model, mine(batch(0))).backward()
    got = gradients(model)
    assert {g.dtype for g in got.values()} == {torch.float32}
    for name, want in gradients(alone).items():
        noise = (got[name] - want.float()).square().sum()
        db = 10 * torch.log10(want.float().square().sum() / noise)
        # Measured: 52.6 dB, the rounding of the other side's gradients to bf16; less 4.6. Twice the gradient is at 0.
        assert db > 48, (name, db)


def dims_by_name() -> None:
    """A mesh whose dims are in the other order: experts are sharded over the dim of their name."""
    mesh, alone = init_device_mesh("cpu", (2, 2), mesh_dim_names=("experts", "data")), fresh()
    model = shard_moe(fresh(), mesh, [Block])
    for block in model.blocks:
        experts = block.moe.experts
        assert experts.expert_parallel.group_name == mesh["experts"].get_group().group_name
        assert experts.w1.device_mesh.mesh_dim_names == ("data", "experts")
    for each, part in ((alone, lambda tokens: tokens), (model, mine)):
        loss_of(each, part(batch(0))).backward()
    require_near(gradients(model), gradients(alone))


def experts_in_parts() -> None:
    """One expert per expert rank and two data ranks: FSDP2 shards within the expert."""
    alone, model = fresh(experts=2), sharded(2, experts=2)
    moe = model.blocks[0].moe
    assert [p.dim for p in moe.experts.w1.placements] == [1, 0]
    assert [p.dim for p in moe.shared_expert.w1.placements] == [1]
    loss_of(alone, batch(0)).backward()
    loss_of(model, mine(batch(0))).backward()
    require_near(gradients(model), gradients(alone))


def metrics_of_ranks() -> None:
    """The counts are of all tokens of the expert ranks, the same on each."""
    model = sharded(4, recipe="mxfp8")
    with MoERecorder(model, numerics=True) as recorder:
        loss_of(model, mine(batch(0))).backward()
        layers, scalars = recorder.read(), recorder.scalars()
    assert list(layers) == ["blocks.0.moe", "blocks.1.moe"]
    for layer in layers.values():
        assert sum(layer["tokens_per_expert"]) == 2 * TOKENS
        assert layer["wire_nbytes"] == 2 * TOKENS * 2 * (2 * D + D + D // 32)
    assert scalars["imbalance"] == max(layer["imbalance"] for layer in layers.values())
    assert 0 <= scalars["gradients_flushed"] < 0.1


def norms_over_meshes() -> None:
    """Of gradients on two meshes and a plain one: the norm of all their values."""
    model, plain = sharded(2), nn.Parameter(torch.ones(3))
    loss_of(model, mine(batch(0))).backward()
    plain.grad = torch.full((3,), 2.0)
    parameters = [*model.parameters(), plain]
    flat = torch.cat([whole(p.grad).reshape(-1) for p in parameters]).double()
    for norm_type in (1.0, 2.0, float("inf")):
        got = clip_grad_norm_(iter(parameters), 1e9, norm_type)
        assert type(got) is Tensor
        torch.testing.assert_close(got, flat.norm(norm_type).float(), rtol=1e-4, atol=0)
    plain.grad[0] = torch.nan
    with pytest.raises(RuntimeError, match="non-finite"):
        clip_grad_norm_(parameters, 1.0, error_if_nonfinite=True)


def pipeline_of_two_stages() -> None:
    """1F1B over four microbatches. A stage's mesh is a slice of two of the four ranks."""
    mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "ep"))
    at, part = mesh.get_local_rank("pp"), mesh.get_local_rank("ep")
    x = torch.randn(TOKENS, D, generator=torch.Generator().manual_seed(0))
    alone, block = fresh().blocks, nn.Sequential(fresh().blocks[at])
    F.mse_loss(alone[1](alone[0](x)), x.roll(1, -1)).backward()
    shard_moe(block, mesh["dp", "ep"], [Block])
    stage = PipelineStage(block, at, 2, torch.device("cpu"), group=mesh["pp"].get_group())
    mine = x.chunk(2)[part]
    arguments = {"target": mine.roll(1, -1)} if at else {}
    Schedule1F1B(stage, n_microbatches=4, loss_fn=F.mse_loss).step(*(() if at else (mine,)), **arguments)
    want = {f"0.{name}": g for name, g in gradients(alone[at]).items()}
    require_near(gradients(block), want)


def page() -> None:
    """The program of docs/guides/fsdp.md."""
    text = (Path(__file__).parents[3] / "docs" / "guides" / "fsdp.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    exec(program, {"__name__": "page"})


def refused() -> None:
    """Before anything is sharded, and with the remedy."""
    pair = mesh_of(2)

    def raises(words: str, error: type[Exception] = ValueError, **changed: Any) -> None:
        model = changed.pop("model", Model())
        arguments = {"mesh": pair, "units": [Block]} | changed
        with pytest.raises(error, match=re.escape(words)):
            shard_moe(model, **arguments)
        assert not any(isinstance(p, DTensor) for p in model.parameters())

    raises("mesh: got 1 dims named ('ep',); allowed: two dims with names", mesh=pair["ep"])
    raises("mesh: got 2 dims named None", mesh=init_device_mesh("cpu", (2, 2)))
    for kind, names in (("data", ("dp", "fsdp")), ("experts", ("ep", "experts"))):
        twice = DeviceMesh.from_group(
            [pair["dp"].get_group(), pair["ep"].get_group()], "cpu", pair.mesh, mesh_dim_names=names
        )
        raises(f"mesh: got two dims of {kind}, {names}; allowed: one of data and one of experts", mesh=twice)
    raises("mesh: got 6 experts in blocks.0.moe; allowed: numbers that the 4 ranks", model=Model(experts=6),
           mesh=mesh_of(4))  # fmt: skip
    raises("model: got a Linear without MoE; allowed: a model with MoE layers", model=nn.Linear(2, 2))
    raises("units: got Conv2d, of which the model has none; allowed: ['Block', ", units=[nn.Conv2d])
    raises("units: got MoE; allowed: classes of modules around MoE", units=[MoE])
    raises("units: got 'Block'; allowed: classes of modules", TypeError, units=["Block"])
    raises("Block'>; allowed: classes of modules, in a list", TypeError, units=Block)
    raises("style: got gradients='sum'; allowed: an ExpertParallel", style=ExpertParallel(gradients="sum"))
    raises("style: got 'swiglu'; allowed: an ExpertParallel", TypeError, style="swiglu")
    raises("mesh: got 'cuda'; allowed: DeviceMesh", TypeError, mesh="cuda")
    raises("mp_policy: got 'bf16'; allowed: ", TypeError, mp_policy="bf16")
    raises("offload_policy: got 'cpu'; allowed: ", TypeError, offload_policy="cpu")
    raises("reshard_after_forward: got 'yes'; allowed: ", TypeError, reshard_after_forward="yes")
    frozen = Model(recipe="mxfp8")
    freeze_weights(frozen.blocks[1].moe.experts.requires_grad_(False))
    words = "shard_moe: model: got blocks.1.moe.experts.w1 as an MXTensor; allowed: values of bf16 or fp32"
    raises(words, model=frozen)
    with pytest.raises(TypeError, match="model: got list; allowed: a module"):
        shard_moe([Model()], pair)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="ExpertParallel: transport: got 'nvlink'; allowed: a PeerMemory, or None"):
        ExpertParallel(transport="nvlink")  # type: ignore[arg-type]
    for model, words in ((sharded(2), "a model under FSDP2 already"), (Model(), "w1 as a DTensor")):
        if "DTensor" in words:
            parallelize_module(model.blocks[1].moe.experts, pair["ep"], ExpertParallel())
        with pytest.raises(ValueError, match=words):
            shard_moe(model, pair)


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    offload = CPUOffloadPolicy(pin_memory=False)
    return {
        "trains_as_one_process": partial(trains_as_one_process, 2, "mxfp8_wgrad_with_hp", 5),
        "optimizers": partial(optimizers, 2),
        "accumulates": partial(accumulates, 2),
        "holds_weights": partial(holds_weights, 2),
        "deduplicates": partial(deduplicates, 2),
        "recomputes": partial(recomputes, 2),
        "mixed_precision": partial(mixed_precision, 2),
        "one_data_rank": lambda: ep_training.one_data_rank(mesh_of(ranks), None),
        "one_data_rank_offloaded": lambda: ep_training.one_data_rank(mesh_of(ranks), offload),
        "dims_by_name": dims_by_name,
        "experts_in_parts": experts_in_parts,
        "checkpoints_between_degrees": checkpoints_between_degrees,
        "metrics_of_ranks": metrics_of_ranks,
        "norms_over_meshes": norms_over_meshes,
        "pipeline_of_two_stages": pipeline_of_two_stages,
        "page": page,
        "refused": refused,
    }
