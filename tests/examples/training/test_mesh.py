"""The JAX training step on a mesh of data x experts equals the step of one device, also as one scan, in parts and with
remat; sharded checkpoints are read on another mesh."""

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from examples.training.checkpoint import Checkpoint
from examples.training.config import PRESETS
from examples.training.sharded_checkpoint import ShardedCheckpoints
from examples.training.train_jax import Options, Trainer, mesh_of, shapes_of, spec
from examples.training.weights import initial_weights

# Without the auxiliary loss, which is no mean over the parts of a batch; jax_frontend/layer/test_sharded.py has its
# gradient.
CONFIG = replace(PRESETS["tiny"], aux_loss_weight=0.0)


def start() -> Checkpoint:
    weights = initial_weights(CONFIG)
    zeros = {name: np.zeros(array.shape, array.dtype) for name, array in weights.items()}
    return Checkpoint(0, weights, zeros, zeros)


@cache
def steps(ep: int, options: Options) -> tuple[list[dict[str, float]], Checkpoint]:
    trainer = Trainer(CONFIG, "bf16", ep, start(), "cpu", options)
    draw = np.random.default_rng(0)
    batches = draw.integers(0, 256, (3, CONFIG.batch_size, CONFIG.seq_len + 1), dtype=np.int32)
    values = [{name: float(v) for name, v in trainer.step(i, batch).items()} for i, batch in enumerate(batches)]
    assert trainer._step._cache_size() == 1, "no array changes its place"
    state = trainer.state(len(batches))
    assert state is not None
    return values, state


@pytest.mark.parametrize(
    ("options", "rel_aux", "rel_weights"),
    [(Options(dp=2), 1e-5, 1e-2), (Options(dp=2, remat="rows", scan_layers=True, accumulate=2), 0.05, 1e-2)],
    ids=["whole", "a scan of remat over parts of a batch"],
)
def test_a_mesh_trains_as_one_device(options: Options, rel_aux: float, rel_weights: float) -> None:
    # Measured: losses and norms within 2.1e-6; weights within 4.2e-4 of the way from their start, and 3.1e-3 in parts,
    # whose gradients bf16 rounds one by one; the auxiliary loss within 2.4e-7, and 7.2e-3. With AVX512-BF16 the
    # embedding is within 3.9e-3, all of it one value. Its gradient is a thousandth of the others' median, another
    # rounding changes it by its own size, and AdamW takes whole steps of either sign.
    one, mesh = steps(1, Options()), steps(2, options)
    for a, b in zip(one[0], mesh[0], strict=True):
        assert b["aux_loss"] == pytest.approx(a["aux_loss"], rel=rel_aux)
        np.testing.assert_allclose([b[n] for n in ("loss", "grad_norm")], [a[n] for n in ("loss", "grad_norm")], 1e-5)
    for name, first in initial_weights(CONFIG).items():
        way = np.linalg.norm(one[1].weights[name] - first)
        assert np.linalg.norm(mesh[1].weights[name] - one[1].weights[name]) <= rel_weights * way, name


def test_a_sharded_checkpoint_is_read_on_another_mesh(tmp_path: Path) -> None:
    run, options = {"steps": 5, "seed": 0}, Options(dp=2, scan_layers=True, sharded=True)
    trainer = Trainer(CONFIG, "bf16", 2, start(), "cpu", options)
    state = trainer.state(3)
    assert state is not None
    sharded_checkpoints(tmp_path, 2, 2).save(tmp_path, state, run)
    reader = sharded_checkpoints(tmp_path, 1, 4)
    found = reader.load(tmp_path, run)
    assert found is not None
    assert found.step == 3
    name = "blocks.*.moe.experts.w1"
    experts = found.weights[name]
    assert experts.sharding.spec == P(None, "expert")
    assert experts.addressable_shards[0].data.shape == (2, CONFIG.num_experts // 4, CONFIG.hidden_dim, CONFIG.dim)
    for tree, want in ((found.weights, state.weights), (found.first, state.first), (found.second, state.second)):
        assert tree.keys() == want.keys()
        for n in want:
            np.testing.assert_array_equal(tree[n], want[n])
    again = Trainer(CONFIG, "bf16", 4, found, "cpu", replace(options, dp=1))
    assert again.params[name].sharding == experts.sharding
    for other, message in (({"steps": 2}, "--steps: got 2 with --resume"), ({"seed": 1}, "seed is 0 there and 1 here")):
        with pytest.raises(ValueError, match=message):
            reader.load(tmp_path, run | other)
    assert sharded_checkpoints(tmp_path / "empty", 1, 1).load(tmp_path, run) is None


def sharded_checkpoints(out: Path, dp: int, ep: int) -> ShardedCheckpoints:
    mesh = mesh_of(dp, ep)
    return ShardedCheckpoints(out, shapes_of(CONFIG, True), lambda name: NamedSharding(mesh, spec(name)), True)
