"""Energy of a step among steps that follow each other, from the counter of the driver (NVML).

The counter has millijoules since the driver was loaded. It advances a few times to some tens of times a second, so a
stretch of steps begins and ends where it advances.
"""

import ctypes
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from .device_timing import Step, alternating, settle

STRETCH_S = 1.0
ROUNDS = 2
Counter = Callable[[], int]
"""Returns millijoules."""


def counter() -> Counter | None:
    """The energy counter of torch's current GPU; None without a GPU, without NVML, or if the GPU has no counter."""
    if not torch.cuda.is_available():
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
    uuid = f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
    if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(device)):
        return None

    def read() -> int:
        if status := nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)):
            raise RuntimeError(f"energy: nvmlDeviceGetTotalEnergyConsumption: got status {status}; expected 0")
        return millijoules.value

    try:
        read()
    except RuntimeError:  # a GPU before Volta
        return None
    return read


def joules(steps: Mapping[str, Step], read: Counter | None) -> dict[str, float]:
    """Joules of a step of each candidate, over `ROUNDS` stretches of `STRETCH_S`, every other round backwards.

    The device is never idle between two readings. {} without a counter.
    """
    if read is None:
        return {}
    found: dict[str, list[tuple[int, int]]] = {name: [] for name in steps}
    for round_ in range(ROUNDS):
        for name, step in alternating(steps, round_):
            found[name].append(_stretch(*step, read))
    return {
        name: round(sum(mj for mj, _ in stretches) / sum(calls for _, calls in stretches) / 1e3, 4)
        for name, stretches in found.items()
    }


def _stretch(run: Callable[[], Any], end: Callable[[Any], Callable[[], object]], read: Counter) -> tuple[int, int]:
    """Millijoules between the first and the last advance of the counter, and the steps between them."""
    wait, _, _ = settle(run, end)
    calls, before, start = 0, read(), time.perf_counter()
    advances: list[tuple[int, int]] = []
    while time.perf_counter() - start < STRETCH_S or len(advances) < 2:
        following = end(run())
        wait()
        wait, calls, now = following, calls + 1, read()
        if now != before:
            advances.append((now, calls))
            before = now
        elif time.perf_counter() - start > 10 * STRETCH_S:
            raise RuntimeError(f"energy: got a counter that stays at {now} mJ; expected one that advances")
    wait()
    (first, at), (last, until) = advances[0], advances[-1]
    return last - first, until - at
