"""Cost of an eager call besides the kernel: memory and host time."""

from functools import partial

import jax
import pytest
import torch
from mxep.torch_frontend import ops

from benchmarks.clocks import device_timing
from benchmarks.figures.bars import host_limit

from .cases import CASES, to_numpy


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("m", [96, 4096])
def test_a_call_allocates_only_outputs_and_scratch(name: str, m: int) -> None:
    case = CASES[name]
    inputs = case.inputs(m=m)
    outputs = case.torch(*inputs, m=m)  # compiles
    nbytes = sum(out.nbytes for out in outputs) + case.scratch(inputs)
    del outputs
    assert device_timing.peak_nbytes(lambda: case.torch(*inputs, m=m)) == nbytes


@pytest.mark.parametrize("name", CASES)
def test_xla_allocates_only_scratch(name: str) -> None:
    """The 1024 bytes cover a table of output addresses and the constants that replace empty arrays."""
    case = CASES[name]
    inputs = case.inputs(m=4096)
    compiled = case.jitted(4096).lower(*map(to_numpy, inputs)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 1024 + case.scratch(inputs)


def test_the_profiler_sees_the_kernels_of_both_frameworks() -> None:
    case = CASES["quantize_row"]
    inputs = case.inputs(m=4096)
    arrays = tuple(map(to_numpy, inputs))
    programs = {
        "torch": (lambda: case.torch(*inputs, m=4096), lambda _: torch.cuda.synchronize()),
        "jax": (lambda: case.jitted(4096)(*arrays), jax.block_until_ready),
    }
    samples = device_timing.kernels(programs, calls=3, samples=1)
    assert all(sample.us > 0 for sample in samples.values()), samples
    with pytest.raises(RuntimeError, match="kernels: nothing: the profiler saw nothing run on a GPU"):
        device_timing.kernels({"nothing": (lambda: None, lambda _: None)}, calls=3)


@pytest.fixture(scope="module")
def host_us() -> dict[str, float]:
    """Host time of every op. The ops take turns, so that a slow moment of the machine affects all of them."""
    calls = {}
    for name, case in CASES.items():
        calls[name] = partial(getattr(ops, case.op), *case.inputs(), **case.options_of())
        calls[name]()  # compiles
    return {name: float(sample.us) for name, sample in device_timing.host(calls, torch.cuda.synchronize).items()}


@pytest.mark.parametrize("name", CASES)
def test_host_time(name: str, host_us: dict[str, float], record_property) -> None:
    us = host_us[name]
    margin = host_limit(CASES[name].op) - us
    record_property("host_us", us)
    print(f"{name}: {us:.1f} us, {margin:.1f} us below the limit")
    assert margin > 0, f"{name}: {us:.1f} us of host time, {-margin:.1f} us over the limit"
