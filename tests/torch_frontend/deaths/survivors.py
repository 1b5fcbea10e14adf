"""What the ranks tell that survive the death of one, and what every such death has to leave: nothing."""

import time
from pathlib import Path
from types import ModuleType

from ...ranks.fixture import StartRanks
from .ep_deaths import LIMIT, RANKS, VICTIM, Survivor

SLACK = 10
"""Seconds from the end of the limit to the error: 0.03 measured; a loaded machine of two cores takes longer."""


def survivors(start_ranks: StartRanks, module: ModuleType, death: str) -> dict[int, Survivor]:
    """By rank. They have ended within the limit, and no process and no shared memory is left."""
    found = start_ranks(module, RANKS, limit=60).run(death, lost={VICTIM})
    told = {rank: found[rank] for rank in range(RANKS) if rank != VICTIM}
    end = time.monotonic() + SLACK
    for survivor in told.values():
        assert survivor.left == []
        assert survivor.seconds < LIMIT + SLACK
        while any(map(_runs, survivor.pids)):
            assert time.monotonic() < end, "a process is left"
            time.sleep(0.01)
    return told


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
