"""Ranks of PeerMemory on a CPU whose exchange overlaps, as of peer_ranks.py; run by test_device_exchange.py."""

from collections.abc import Callable

from mxep.core_kernels.peer.programs import ffn
from mxep.torch_frontend import PeerMemory
from mxep.torch_frontend.overlap import device_exchange

from . import ep_device, ep_device_mm, ep_rounds, peer_ranks
from .peer_ranks import files, opened

__all__ = ["begin", "checks", "files", "opened"]


def mix() -> PeerMemory:
    return opened(None)


def begin(rank: int) -> None:
    peer_ranks.begin(rank)
    device_exchange.runs_on = lambda device: True
    ffn.takes_ffn = lambda *sizes: True
    ep_device.count_runs()


def checks(ranks: int) -> dict[str, Callable[[], object]]:
    of = peer_ranks.world, opened, mix
    return ep_device.checks(*of) | ep_device_mm.checks(*of) | ep_rounds.checks(True, opened)
