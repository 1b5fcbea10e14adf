"""The checks of ranks that gather experts as bytes: the bits of ranks that gather them as values; by name, run by
test_fsdp.py."""

import re
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend import GroupedExperts, MoE, clip_grad_norm_, shard_moe
from mxep.torch_frontend.layer import quantized_gather
from mxep.torch_frontend.ops import private
from mxep.torch_frontend.products.forms.mx import MXForm
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from .fsdp_checkpoints import load, save
from .fsdp_model import (
    HIDDEN,
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
    whole_weights,
)

MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
PARTS = "quantized_gather: weights gathered as values: blocks.0.moe.shared_expert and 1 more: a rank has a part"


def made(quantized: bool, ep: int, policy: MixedPrecisionPolicy | None = MIXED, **options: Any) -> Any:
    """recompute: the experts multiply again in the backward. checkpointed: whole blocks. prefetched: by hand."""
    sharding = {name: options.pop(name) for name in ("reshard_after_forward",) if name in options}
    recompute, checkpointed, prefetched = (
        options.pop(name, False) for name in ("recompute", "checkpointed", "prefetched")
    )
    model: Any = fresh(**{"recipe": "mxfp8", "prob_in": "swiglu"} | options)
    with pytest.warns(UserWarning, match=re.escape(PARTS)) if quantized else nullcontext():
        shard_moe(model, mesh_of(ep), [Block], mp_policy=policy, quantized_gather=quantized, **sharding)
    if checkpointed:
        model.run = partial(checkpoint, use_reentrant=checkpointed == "reentrant")
    first, second = experts_of(model)
    for each in (first, second):
        each.recompute = recompute
    if prefetched:
        first.set_modules_to_forward_prefetch([second])
        second.set_modules_to_backward_prefetch([first])
    return model


def experts_of(model: nn.Module) -> list[Any]:
    return [module.experts for module in model.modules() if isinstance(module, MoE)]


@contextmanager
def gathered() -> Iterator[list[str]]:
    """The operands of each weight that models made in the block gather: "k", "n" or "kn"."""
    found: list[str] = []

    def noted(shape: torch.Size, along_k: Any, along_n: Any) -> quantized_gather.Sent:
        found.append("k" * (along_k is not None) + "n" * (along_n is not None))
        return sent(shape, along_k, along_n)

    sent = quantized_gather.Sent
    with mock.patch.object(quantized_gather, "Sent", noted):
        yield found


def trained(
    model: Any, steps: int = 2, microbatches: int = 1, held: bool = False, by_hand: bool = False, **adamw: Any
) -> dict[str, Tensor]:
    """Losses, norms, gradients and weights of all steps, and the logits of an evaluation. by_hand: `unshard` before a
    forward."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, **adamw)
    found: dict[str, Tensor] = {}
    for step in range(steps):
        with ExitStack() as blocks:
            for each in experts_of(model) if held else ():
                blocks.enter_context(each.cached_weights())
            for at, part in enumerate(mine(batch(step)).chunk(microbatches)):
                model.set_requires_gradient_sync(at == microbatches - 1)
                for each in experts_of(model) if by_hand else ():
                    each.unshard()
                loss = loss_of(model, part) / microbatches
                loss.backward()
                found[f"{step}.{at}.loss"] = loss.detach()
        found |= {f"{step}.{name}": g for name, g in gradients(model).items()}
        found[f"{step}.norm"] = clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        found |= {f"{step}.new.{name}": w for name, w in whole_weights(model).items()}
    with torch.no_grad():
        found["logits"] = model(batch(9))
    return found


TRAINING = "steps", "fused", "foreach", "microbatches", "by_hand"


def same_bits(ep: int, words: str = "k n", public: bool = False, held: bool = False, **options: Any) -> None:
    """words: what is gathered of a weight. public: without private names of torch. held: in `cached_weights`."""
    training = {name: options.pop(name) for name in TRAINING if name in options}
    want = trained(made(False, ep, **options), **training)
    begin = private._public_begin_gather if public else quantized_gather.begin_gather
    with gathered() as found, mock.patch.object(quantized_gather, "begin_gather", begin):
        require_equal(trained(made(True, ep, **options), held=held, **training), want)
    losses = [loss.item() for name, loss in want.items() if name.endswith("loss")]
    assert len(set(losses)) == len(losses)
    assert set(found) == set(words.split()), set(found)


def quantizes_once() -> None:
    """Within a block each weight is quantized once, however often it is gathered."""
    calls = []

    def counted(*args: Any) -> Any:
        calls.append(args)
        return quantize(*args)

    quantize = quantized_gather.QuantizedGather._quantized
    with mock.patch.object(quantized_gather.QuantizedGather, "_quantized", counted):
        model = made(True, 1)
        for held in (True, False):
            calls.clear()
            with gathered() as found, ExitStack() as blocks:
                for each in experts_of(model) if held else ():
                    blocks.enter_context(each.cached_weights())
                for part in mine(batch(0)).chunk(3):
                    loss_of(model, part).backward()
            assert len(found) == 2 * 3 * 2 * 3  # forward and backward, weights, layers, microbatches
            assert len(calls) == (0 if held else len(found))


def checkpointing_gathers_again_once() -> None:
    """The first backward has gathered for the gradients alone when it finds that it runs the forward again."""
    model = made(True, 1, checkpointed=True)
    counts = []
    for step in range(2):
        with gathered() as found:
            loss_of(model, mine(batch(step))).backward()
        counts.append({word: found.count(word) for word in ("k", "n", "kn")})
    first, second = counts
    assert first["n"] > 0
    assert second == {"k": 6, "n": 0, "kn": 6}, second


class CountedGather:
    """FSDP2's all-gather, and the bytes that it writes."""

    def __init__(self) -> None:
        self.nbytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.nbytes += output_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def bytes_of_a_step() -> None:
    """A forward and a backward gather 33 bytes of 32 values each, and not 64."""
    for quantized, nbytes in ((False, 64), (True, 33)):
        model = made(quantized, 1)
        experts, gather = experts_of(model)[0], CountedGather()
        experts.set_custom_all_gather(gather)
        loss_of(model, mine(batch(0))).backward()
        weights = sum(w.numel() for w in experts.parameters() if w.dim() == 3)
        biases = sum(b.numel() for b in experts.parameters() if b.dim() == 2)
        assert gather.nbytes == 2 * (weights // 32 * nbytes + 2 * biases)


def checkpoints() -> None:
    """A checkpoint of ranks that gather bytes is one of ranks that gather values, and the reverse; a model on "meta"
    still gathers bytes after `to_empty`, and one whose parameters a state dict replaces."""
    found = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(found)
    folder = Path(found[0])
    models, wants = {}, {}
    for quantized in (False, True):
        model = models[quantized] = made(quantized, 1)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loss_of(model, mine(batch(0))).backward()
        optimizer.step()
        optimizer.zero_grad()
        for name, value in model.state_dict().items():
            local = value.to_local()
            assert type(local) is Tensor, name
            assert not local.__dict__, name
        save(model, optimizer, folder / str(quantized))
        wants[quantized] = model(batch(9)).detach()
    assert torch.equal(wants[False], wants[True])
    for quantized in (False, True):
        with torch.device("meta"):
            model = Model("mxfp8", "swiglu")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            shard_moe(model, mesh_of(1), [Block], mp_policy=MIXED, quantized_gather=quantized).to_empty(device="cpu")
        first, _ = experts_of(model)
        with gathered() as words:
            first.unshard()
        assert words == (["kn"] * 3 if quantized else [])
        first.reshard()
        load(model, torch.optim.AdamW(model.parameters(), lr=1e-2), folder / str(not quantized))
        with gathered() as words:
            assert torch.equal(model(batch(9)), wants[True])
        assert len(words) == (6 if quantized else 0)
    model = made(True, 1)
    model.load_state_dict({name: w.clone() for name, w in models[False].state_dict().items()}, assign=True)
    with gathered() as words:
        assert torch.equal(model(batch(9)), wants[True])
    assert set(words) == {"k"}
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


class OwnExperts(GroupedExperts):
    def forward(self, groups_PD: Tensor, padded_counts: Any, probs_P: Tensor | None = None) -> Tensor:
        return super().forward(groups_PD, padded_counts, probs_P)


def gathers_values() -> None:
    """Where a rank has no whole experts, or their products read bf16; the warning names them."""
    ranks = dist.get_world_size()
    for ep, words, options in (
        (ranks, "blocks.0.moe.experts and 1 more: one data rank, which gathers nothing", {"recipe": "mxfp8"}),
        (1, f"2 experts, which {ranks} data ranks do not divide", {"recipe": "mxfp8", "experts": 2}),
        (1, "experts and 1 more: recipe 'bf16', which multiplies bf16", {"recipe": "bf16"}),
        (1, "values: blocks.0.moe.experts: a forward of their own; ", {"recipe": "mxfp8", "own": True}),
    ):
        own = options.pop("own", False)
        model = fresh(**options)
        if own:
            experts_of(model)[0].__class__ = OwnExperts
        with pytest.warns(UserWarning, match=re.escape(words)):
            shard_moe(model, mesh_of(ep), [Block], quantized_gather=True)
        with gathered() as found:
            loss_of(model, mine(batch(0))).backward()
        assert set(found) == ({"k", "n"} if own else set())  # of the other block
    upcast = MXForm("mx", 0, True, upcasts=True)  # compute="exact" on Hopper
    with mock.patch.object(quantized_gather, "format_of", return_value=upcast):
        why = quantized_gather.why_values(experts_of(fresh(recipe="mxfp8"))[0], 8, ranks, torch.device("cpu"))
    assert why == "recipe 'mxfp8', which multiplies bf16"


WRITTEN = "w1: got a write within the block"


def write_and_gather(experts: Any) -> None:
    with torch.no_grad():
        experts.w1.add_(1)
    with pytest.raises(RuntimeError, match=WRITTEN):
        experts.unshard()


def refused() -> None:
    """Arguments, before anything is sharded; and what bytes cannot do."""
    bad: tuple[tuple[type[Exception], str, dict[str, Any]], ...] = (
        (TypeError, "quantized_gather: got 'mxfp8'; allowed: bool", {"quantized_gather": "mxfp8"}),
        (ValueError, "offload_policy: got CPUOffloadPolicy; allowed: None with quantized_gather",
         {"quantized_gather": True, "offload_policy": CPUOffloadPolicy(pin_memory=False)}),
    )  # fmt: skip
    for error, words, options in bad:
        model = Model()
        with pytest.raises(error, match=re.escape(words)):
            shard_moe(model, mesh_of(1), [Block], **options)
        assert not any(isinstance(p, DTensor) for p in model.parameters())
    model = made(True, 1)
    first, second = experts_of(model)
    with pytest.raises(RuntimeError, match=WRITTEN), first.cached_weights():
        write_and_gather(first)
    second.unshard()
    with pytest.raises(ValueError, match=r"w1: got unsharded weights; allowed: .* before `unshard\(\)`"):
        second.cached_weights().__enter__()
    with pytest.raises(NotImplementedError, match="got weights gathered as bytes"):
        second.w1.to_local().add(1)
    assert "GatheredWeights(shape=(8, 96, 64), dtype=torch.bfloat16)" in repr(second.w1)
    assert torch.equal(torch.zeros_like(second.w1.to_local()), torch.zeros(8, HIDDEN, D, dtype=torch.bfloat16))
    second.reshard()


VARIANTS: dict[str, dict[str, Any]] = {
    "mixed": {"foreach": True, "steps": 4},
    "fp32": {"policy": None, "fused": True},
    "kept": {"reshard_after_forward": False, "words": "kn"},
    "accumulated": {"microbatches": 2},
    "held": {"microbatches": 2, "held": True},
    "recomputed": {"recompute": True, "words": "k kn n"},
    "checkpointed": {"checkpointed": True, "words": "k kn n"},
    "reentrant": {"checkpointed": "reentrant", "words": "k kn"},
    "prefetched": {"prefetched": True},
    "by_hand": {"by_hand": True, "words": "kn n k"},
    "public": {"public": True, "words": "kn"},
    "fold": {"recipe": Recipe.parse("mxfp8", compute="fold")},
    "wgrad_with_hp": {"recipe": "mxfp8_wgrad_with_hp"},
    "rowwise": {"recipe": "fp8_rowwise"},
    "blockwise": {"recipe": "fp8_blockwise"},
}


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    """Of two ranks, which are both data ranks, the ones that mix most; of four, with two expert ranks, all."""
    names = ("mixed", "held", "checkpointed") if ranks == 2 else VARIANTS
    found: dict[str, Callable[[], object]] = {
        f"same_bits_{name}": partial(same_bits, ranks // 2, **VARIANTS[name]) for name in names
    }
    if ranks == 2:
        return found | {
            "quantizes_once": quantizes_once,
            "checkpointing_gathers_again_once": checkpointing_gathers_again_once,
            "bytes_of_a_step": bytes_of_a_step,
            "checkpoints": checkpoints,
            "refused": refused,
        }
    return found | {"same_bits_four_data_ranks": partial(same_bits, 1), "gathers_values": gathers_values}
