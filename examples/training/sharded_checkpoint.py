"""Sharded checkpoints of train_jax, by Orbax: every process writes and reads the parts of its own devices.

FOLDER/<step>/arrays   weights and AdamW's moments, as they are sharded on the mesh
              run      step and config, JSON

A run with another mesh reads the same checkpoint: each device reads the parts that it has there.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from jax.sharding import Sharding

from .checkpoint import KEEP, Checkpoint, check_same_run

Shapes = Mapping[str, tuple[int, ...]]


class ShardedCheckpoints:
    """`load` and `save` of the loop. shapes: of every weight. sharding_of: the place of a weight and its moments.
    scan_layers: whether the weights of all layers are stacked, which a later run has to repeat."""

    def __init__(self, folder: Path, shapes: Shapes, sharding_of: Callable[[str], Sharding], scan_layers: bool) -> None:
        options = ocp.CheckpointManagerOptions(max_to_keep=KEEP, enable_async_checkpointing=False)
        self.layout = {"scan_layers": scan_layers}
        self.folder = folder.absolute()
        self.manager = ocp.CheckpointManager(self.folder, options=options)
        self.like = {
            name: jax.ShapeDtypeStruct(shape, "float32", sharding=sharding_of(name)) for name, shape in shapes.items()
        }

    def load(self, _out: Path, config: Mapping[str, Any]) -> Checkpoint | None:
        """The last checkpoint on this run's mesh, None without one. Raises ValueError for one of another config."""
        step = self.manager.latest_step()
        if step is None:
            return None
        meta = self.manager.restore(step, args=ocp.args.Composite(run=ocp.args.JsonRestore()))["run"]
        check_same_run(self.folder / str(step), meta, {**config, **self.layout})
        trees = dict.fromkeys(("weights", "first", "second"), self.like)
        found = self.manager.restore(step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(trees)))
        return Checkpoint(step, **found["arrays"])

    def save(self, _out: Path, state: Checkpoint, config: Mapping[str, Any]) -> None:
        """Collective: every process calls it."""
        trees = {"weights": state.weights, "first": state.first, "second": state.second}
        run = ocp.args.JsonSave({"step": state.step, "config": {**config, **self.layout}})
        self.manager.save(state.step, args=ocp.args.Composite(arrays=ocp.args.StandardSave(trees), run=run))
