"""A step without memory raises, and the next one has the right bytes. XLA allocates the memory of forward and backward
at once, before a step."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import gc, json, resource
from pathlib import Path
import jax
import numpy as np
from mxep.jax_frontend import MoEConfig, RouterConfig, moe

config = MoEConfig(256, 512, 8, RouterConfig(2))
params = moe.init(jax.random.key(0), config)
x = jax.device_put(np.random.default_rng(0).standard_normal((512, 256), dtype=np.float32))
step = jax.jit(jax.value_and_grad(lambda p, x: (moe.apply(p, x, config)[0].astype("float32") ** 2).mean(), (0, 1)))

def mapped():
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()

def bytes_of(results):
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(results)]

want, found = bytes_of(step(params, x)), []
for margin in (0, 2**24, 2**30):
    gc.collect()
    before, error = mapped(), ""
    resource.setrlimit(resource.RLIMIT_AS, (before + margin, resource.RLIM_INFINITY))
    try:
        results = [jax.block_until_ready(step(params, x)) for _ in range(3)]  # more than XLA has kept
    except jax.errors.JaxRuntimeError as failure:
        error = str(failure)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    results = None
    gc.collect()
    left = mapped() - before
    found.append((error, left, bytes_of(step(params, x)) == want))
print(json.dumps(found))
"""
MIB = 2**20


@pytest.mark.slow
def test_a_step_without_memory_leaves_nothing() -> None:
    # Memory of this size is mapped on its own. A pool of OpenMP that cannot start ends the process.
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=Path(__file__).parents[3], env={**os.environ, **environment},
        capture_output=True, text=True,
    )  # fmt: skip
    assert not run.returncode, run.stderr[-8000:]
    *without, enough = json.loads(run.stdout)
    for error, left, same in without:
        assert error.startswith("RESOURCE_EXHAUSTED: Out of memory allocating ")
        assert left < MIB
        assert same
    assert enough[0] == ""
    assert enough[2]
