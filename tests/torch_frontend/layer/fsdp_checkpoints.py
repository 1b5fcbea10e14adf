"""Checkpoints of a sharded model and its optimizer, loaded with other degrees; run by fsdp_ranks.py."""

import shutil
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mxep.torch_frontend import shard_moe
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from .ep_training import whole
from .fsdp_model import (
    Block,
    Model,
    batch,
    mesh_of,
    mine,
    require_equal,
    sharded,
    train,
    whole_weights,
)


def checkpoints_between_degrees() -> None:
    """Weights and moments saved at EP 4, then EP 2, and one process: the same bits, and the same answer."""
    found = [tempfile.mkdtemp()] if dist.get_rank() == 0 else [""]
    dist.broadcast_object_list(found)
    folder = Path(found[0])
    model = sharded(4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, mine, 1, lambda _: optimizer)
    want, logits = state_of(model, optimizer), model(batch(9))
    save(model, optimizer, folder / "4")
    with torch.device("meta"):
        model = Model()
    shard_moe(model, mesh_of(2), [Block]).to_empty(device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    load(model, optimizer, folder / "4")
    require_equal(state_of(model, optimizer), want)
    torch.testing.assert_close(model(batch(9)), logits, rtol=2**-8, atol=1e-6)
    save(model, optimizer, folder / "2")
    alone = Model()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    load(alone, optimizer, folder / "2")
    require_equal(state_of(alone, optimizer), want)
    torch.testing.assert_close(alone(batch(9)), logits, rtol=2**-8, atol=1e-6)
    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    moments = {
        f"{name}.{key}": whole(value).clone()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    return whole_weights(model) | moments


def save(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, moments = get_state_dict(model, optimizer)
    saved = dcp.async_save({"model": weights, "optimizer": moments}, checkpoint_id=folder)
    saved.result()


def load(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> None:
    weights, moments = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": moments}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
