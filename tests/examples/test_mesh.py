"""The JAX training step on a mesh of data x experts is that of one device."""

from dataclasses import replace

import numpy as np

from examples.checkpoint import Checkpoint
from examples.config import PRESETS
from examples.train_jax import Trainer
from examples.weights import initial_weights

CONFIG = replace(PRESETS["tiny"], num_layers=1)


def steps(dp: int, ep: int) -> tuple[list[dict[str, float]], Checkpoint]:
    weights = initial_weights(CONFIG)
    zeros = {name: np.zeros(array.shape, array.dtype) for name, array in weights.items()}
    trainer = Trainer(CONFIG, "bf16", ep, Checkpoint(0, weights, zeros, zeros), "cpu", dp=dp)
    draw = np.random.default_rng(0)
    batches = draw.integers(0, 256, (3, CONFIG.batch_size, CONFIG.seq_len + 1), dtype=np.int32)
    values = [{name: float(v) for name, v in trainer.step(i, batch).items()} for i, batch in enumerate(batches)]
    assert trainer._step._cache_size() == 1, "no array changes its place"
    state = trainer.state(len(batches))
    assert state is not None
    return values, state


def test_a_mesh_trains_as_one_device() -> None:
    # Measured: values within 1e-6, weights within 1e-4 of the way from their start.
    one, mesh = steps(1, 1), steps(2, 2)
    for a, b in zip(one[0], mesh[0], strict=True):
        np.testing.assert_allclose(list(b.values()), list(a.values()), rtol=1e-5)
    for name, start in initial_weights(CONFIG).items():
        way = np.linalg.norm(one[1].weights[name] - start)
        assert np.linalg.norm(mesh[1].weights[name] - one[1].weights[name]) <= 1e-3 * way, name
