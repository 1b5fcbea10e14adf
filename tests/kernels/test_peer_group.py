"""The groups of core_kernels/peer/group/group.h that need no GPU: without members."""

import gc
import weakref

from mxep import cpp_bindings


class Memory:
    """Stands for signal pads and maps."""


def test_a_group_keeps_its_memory_and_nothing_longer() -> None:
    memory = Memory()
    held = weakref.ref(memory)
    group = cpp_bindings.PeerGroup(2**40, [], 1000, memory)
    group.test()
    del memory
    gc.collect()
    assert held() is not None
    del group
    gc.collect()
    assert held() is None
