"""Saves by Orbax, of which the files are copied before each file operation, as a kill would leave them.

    python -m tests.examples.training.sharded_saves OUT

OUT/run   checkpoints of steps 5 and 10, then, without space on the disk, of 15
    <n>   the files of OUT/run before the n-th operation of the save of step 10
stdout    JSON: for each n the operation and the step that a run resumes from; the error of the full disk
"""

import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from examples.training.checkpoint import Checkpoint
from examples.training.sharded_checkpoint import ShardedCheckpoints
from examples.training.weights import weight_shapes

from .faulty_saves import EVENTS, RUN, TINY, state

ATTEMPTS = 100


def checkpoints(folder: Path) -> ShardedCheckpoints:
    return ShardedCheckpoints(folder, weight_shapes(TINY), lambda _: sharding(), False)


def sharding() -> NamedSharding:
    return NamedSharding(Mesh(jax.devices(), ("x",)), PartitionSpec())


def on_devices(step: int) -> Checkpoint:
    arrays = state(step)
    weights, first, second = (
        {name: jax.device_put(array, sharding()) for name, array in tree.items()}
        for tree in (arrays.weights, arrays.first, arrays.second)
    )
    return Checkpoint(step, weights, first, second)


def loaded_step(folder: Path) -> int:
    """The step of the last complete checkpoint, whose bytes are right."""
    found = checkpoints(folder).load(folder, RUN)
    assert found is not None
    want = state(found.step)
    for ours, theirs in ((found.weights, want.weights), (found.first, want.first), (found.second, want.second)):
        for name, array in theirs.items():
            np.testing.assert_array_equal(np.asarray(ours[name]), array)
    return found.step


def copy(folder: Path, to: Path) -> None:
    """Again if a file is gone: threads of TensorStore, which have no audit events, lock and unlock meanwhile."""
    for attempt in range(ATTEMPTS):
        try:
            shutil.copytree(folder, to)
            return
        except (shutil.Error, FileNotFoundError):
            if attempt == ATTEMPTS - 1:
                raise
            shutil.rmtree(to, ignore_errors=True)


def main(out: Path) -> None:
    operations: list[str] = []
    active, folder = False, out / "run"

    def audit(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal active
        if active and event in EVENTS and str(arguments[0]).startswith(str(folder)):
            active = False  # the copy has operations of its own
            copy(folder, out / str(len(operations)))
            operations.append(f"{event.removeprefix('os.')} {Path(arguments[0]).relative_to(folder)}")
            active = True

    sys.addaudithook(audit)
    saves = checkpoints(folder)
    saves.save(folder, on_devices(5), RUN)
    ten = on_devices(10)
    active = True
    saves.save(folder, ten, RUN)
    active = False
    steps = [loaded_step(out / str(n)) for n in range(len(operations))]
    last = out / str(len(operations) - 1)
    checkpoints(last).save(last, ten, RUN)  # a run saves again what a kill has left without SHA256SUMS
    resumed = loaded_step(last)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))
    full = "none"
    try:
        saves.save(folder, on_devices(15), RUN)
    except OSError as error:
        full = str(error)
    told = {"operations": operations, "steps": steps, "resumed": resumed, "full": full, "after": loaded_step(folder)}
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
