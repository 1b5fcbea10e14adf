"""A process of a JAX program on two CPUs, of which the last one gets a signal after five steps; run by test_deaths.py.

python -m tests.jax_frontend.exchange.die PORT PROCESS SIGNAL
"""

import os
import signal
import sys

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from mxep.jax_frontend import MoEConfig, RouterConfig, moe

PROCESSES, HEARTBEAT = 2, 10
"""HEARTBEAT: seconds without a sign of life, after which the other processes end."""


def main(port: str, process: str, ending: str) -> None:
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    address = f"127.0.0.1:{port}"
    jax.distributed.initialize(address, PROCESSES, int(process), heartbeat_timeout_seconds=HEARTBEAT)
    mesh, config = Mesh(np.array(jax.devices()), ("ep",)), MoEConfig(64, 64, 4, RouterConfig(2))

    def on_mesh(array: np.ndarray, spec: PartitionSpec) -> jax.Array:
        return jax.make_array_from_callback(array.shape, NamedSharding(mesh, spec), lambda at: array[at])

    tokens = PartitionSpec("ep")
    params = jax.tree.map(lambda p: on_mesh(np.asarray(p), PartitionSpec()), moe.init(jax.random.key(0), config))
    x = on_mesh(np.ones((32, 64), np.float32), tokens)

    @jax.jit
    def step(params, x):
        y = moe.sharded_apply(params, x, config, tokens=tokens, expert_axis="ep", mesh=mesh)[0]
        return (y.astype("float32") ** 2).mean()

    grads = jax.jit(jax.grad(step))
    for _ in range(5):
        jax.block_until_ready(grads(params, x))
    print("five steps", flush=True)
    if int(process) == PROCESSES - 1:
        os.kill(os.getpid(), signal.Signals[ending])
    while True:
        jax.block_until_ready(grads(params, x))


if __name__ == "__main__":
    main(*sys.argv[1:])
