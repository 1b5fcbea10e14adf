"""Steps of a small layer in one process, and what the process holds: memory, descriptors, threads.

    python -m tests.frontends.long_run torch|jax cpu|gpu STEPS SETTLED

Prints JSON: `Held` after SETTLED steps and after STEPS. The number of tokens of a PyTorch step changes, and with it the
rows of each expert; in JAX the rows of each expert change alone.
"""

import gc
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

D, F, E, TOP_K, TOKENS = 64, 64, 4, 2, 32
Step = Callable[[int], object]


OF_A_THREAD = 2 * 2**20
"""Bytes that a thread brings: its stack, and its part of the heap. Measured: 1.4 MiB."""


class Held(NamedTuple):
    """By a process. resident: bytes of memory. on_device: bytes of a GPU's memory, 0 on a CPU."""

    resident: int
    descriptors: int
    threads: int
    on_device: int = 0


def held(on_device: int = 0) -> Held:
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return Held(
        pages * os.sysconf("SC_PAGE_SIZE"),
        len(os.listdir("/proc/self/fd")),
        len(os.listdir("/proc/self/task")),
        on_device,
    )


def measure(step: Step, steps: int, settled: int, on_device: Callable[[], int] = lambda: 0) -> tuple[Held, Held]:
    """What this process holds after `settled` steps and after all."""
    for number in range(settled):
        step(number)
    before = held(on_device())
    for number in range(settled, steps):
        step(number)
    return before, held(on_device())


def require_no_growth(before: Held, after: Held, limit: int, pool: int = 0) -> None:
    """limit: of the growth of resident memory, in bytes. pool: threads that may still start, each with its memory."""
    started = after.threads - before.threads
    assert started <= pool, (before, after)
    assert after.resident - before.resident < limit + max(started, 0) * OF_A_THREAD, (before, after)
    assert after.descriptors == before.descriptors, (before, after)
    assert after.on_device == before.on_device, (before, after)


def torch_steps(device: str) -> tuple[Step, Callable[[], int]]:
    import torch
    from mxep.torch_frontend import MoE, RouterConfig

    device = {"gpu": "cuda"}.get(device, device)
    torch.manual_seed(0)
    torch.set_num_threads(1)
    moe = MoE(D, F, E, RouterConfig(TOP_K), device=device)
    optimizer = torch.optim.AdamW(moe.parameters(), lr=1e-3)

    def step(number: int) -> None:
        y, _ = moe(torch.randn(TOKENS + number % 7, D, device=device))
        y.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step, torch.cuda.memory_allocated if device == "cuda" else lambda: 0


def jax_steps(device: str) -> tuple[Step, Callable[[], int]]:
    import jax
    import numpy as np
    from mxep.jax_frontend import MoEConfig, RouterConfig, moe

    config = MoEConfig(D, F, E, RouterConfig(TOP_K))
    where = jax.devices(device)[0]
    state = [jax.device_put(moe.init(jax.random.key(0), config), where)]
    generator = np.random.default_rng(0)

    def loss(params, x):
        y = moe.apply(params, x, config)[0]
        return (y.astype("float32") ** 2).mean()

    @jax.jit
    def update(params, x):
        found, grads = jax.value_and_grad(loss)(params, x)
        return found, jax.tree.map(lambda p, g: p - 1e-3 * g, params, grads)

    def step(number: int) -> None:
        x = jax.device_put(generator.standard_normal((TOKENS, D), dtype=np.float32), where)
        found, state[0] = update(state[0], x)
        float(found)

    return step, lambda: (where.memory_stats() or {}).get("bytes_in_use", 0)


FRONTENDS = {"torch": torch_steps, "jax": jax_steps}


def main(frontend: str, device: str, steps: str, settled: str) -> None:
    step, on_device = FRONTENDS[frontend](device)
    print(json.dumps(measure(step, int(steps), int(settled), on_device)))


if __name__ == "__main__":
    main(*sys.argv[1:])
