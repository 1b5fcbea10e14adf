"""A thread and task has its own settings, whatever the order in which blocks end; a backward has its forward's."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from mxep.torch_frontend import debug_checks, force_implementation
from mxep.torch_frontend.integrations.torchao import mxfp8_grouped_mm
from mxep.torch_frontend.ops import direct, settings
from mxep.torch_frontend.ops.call import checks_values
from mxep.torch_frontend.ops.device import forced

CUDA = torch.device("cuda")
BLOCKS: dict[str, tuple[Callable[[], AbstractContextManager[None]], Callable[[], object], object, object]] = {
    "debug_checks": (debug_checks, lambda: checks_values(CUDA), False, True),
    "force_implementation": (lambda: force_implementation("cpp"), forced, None, "cpp"),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_end_in_any_order(name: str) -> None:
    block, state, default, inside = BLOCKS[name]
    one, other = block(), block()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert state() == inside
    other.__exit__(None, None, None)
    assert state() == default


def test_the_innermost_block_that_has_not_ended_says() -> None:
    outer, inner = force_implementation("cpp"), force_implementation(None)
    outer.__enter__()
    inner.__enter__()
    assert forced() is None
    inner.__exit__(None, None, None)
    assert forced() == "cpp"
    outer.__exit__(None, None, None)


@pytest.mark.parametrize("name", BLOCKS)
def test_other_threads_and_tasks_have_their_own(name: str) -> None:
    block, state, default, inside = BLOCKS[name]
    seen = []
    with block():
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()
    assert seen == [default]

    async def task(within: bool, here: asyncio.Event, there: asyncio.Event) -> object:
        if not within:
            await there.wait()
            return state()
        with block():
            here.set()
            await asyncio.sleep(0)
            return state()

    async def both() -> list[object]:
        entered = asyncio.Event()
        return await asyncio.gather(task(True, entered, entered), task(False, entered, entered))

    assert asyncio.run(both()) == [inside, default]
    assert state() == default


def test_a_backward_in_another_thread_runs_in_the_settings_of_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    """As autograd's threads do for GPU tensors."""
    seen = []
    real = direct.quantize_row
    monkeypatch.setattr(direct, "quantize_row", lambda *args: seen.append(settings.snapshot()) or real(*args))
    leaf = torch.randn(32, 64).requires_grad_()
    with force_implementation("cpp"), debug_checks():
        y = mxfp8_grouped_mm(leaf, torch.randn(1, 32, 64).mT, torch.tensor([32], dtype=torch.int32))
    seen.clear()
    thread = threading.Thread(target=lambda: y.sum().backward())
    thread.start()
    thread.join()
    assert set(seen) == {("cpp", True)}
    assert settings.snapshot() == (None, False)
