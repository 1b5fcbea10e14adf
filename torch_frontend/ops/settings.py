"""Settings for the extent of a `with` block, per thread and per asyncio task.

    with force_implementation("triton"):     the value of the innermost open block holds
        with debug_checks(): ...

Blocks may end in any order: each removes its own value. Autograd runs the backward of GPU tensors in threads of its
own; differentiable.py carries the settings of the forward there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Setting(Generic[T]):
    """A value of the current context, `default` outside of all blocks. get() returns it: every call of an op does."""

    def __init__(self, name: str, default: T) -> None:
        self.default = default
        # One (marker, value) per block: two blocks with equal values are told apart.
        self.blocks: ContextVar[tuple[tuple[object, T], ...]] = ContextVar(f"mxep_{name}_blocks", default=())
        self.innermost: ContextVar[T] = ContextVar(f"mxep_{name}", default=default)
        self.get = self.innermost.get

    @contextmanager
    def within(self, value: T) -> Iterator[None]:
        block = (object(), value)
        self._open((*self.blocks.get(), block))
        try:
            yield
        finally:
            self._open(tuple(other for other in self.blocks.get() if other is not block))

    def _open(self, blocks: tuple[tuple[object, T], ...]) -> None:
        self.blocks.set(blocks)
        self.innermost.set(blocks[-1][1] if blocks else self.default)


forced: Setting[Any] = Setting("forced", None)
"""The value of `force_implementation`."""
debug: Setting[bool] = Setting("debug", False)
"""Whether a `debug_checks` block is open."""

Snapshot = tuple[Any, bool]


def snapshot() -> Snapshot:
    """The current settings, for `restored`."""
    return forced.get(), debug.get()


@contextmanager
def restored(settings: Snapshot) -> Iterator[None]:
    """Within the block the settings of a snapshot hold."""
    with forced.within(settings[0]), debug.within(settings[1]):
        yield
