"""JAX and PyTorch in whole processes: the commands of a turn, medians over turns, the fastest exchange as peer, and
the table."""

from pathlib import Path
from typing import Any

import pytest
from mxep.jax_frontend import MoEConfig  # noqa: F401 -- JAX before the benchmark, which counts torch's GPUs

from benchmarks import ep_alternating
from benchmarks.figures import results, speed
from benchmarks.figures.tables import table_ep

SIZES = {"tokens": 16384, "dim": 7168, "hidden_dim": 2048, "num_experts": 32, "top_k": 8}
CASE = {**SIZES, "ranks": 2, "routing": "balanced", "recipe": "mxfp8"}


def row(frontend: str, how: str, us: float, **changes: Any) -> dict[str, Any]:
    peer = {"torch": "bf16", "jax": "bf16_recipe"}[frontend]
    found = results.Line(
        op="ep_layer_fwd_bwd", frontend=frontend, case={**CASE, "how": how}, us=us, spread=0.1, n=10, nbytes=0, flops=1,
        of_roof=None, roof=None, peer=peer, peer_us=99.0, ratio=1.0, peak_nbytes=2**30 if frontend == "jax" else 2**31,
        error={"grade": "sqnr_db", "sqnr_db": 23.0},
    )  # fmt: skip
    return {**vars(found), "hardware": "2x GPU", "commit": "0" * 40, "date": "2026-01-01", "versions": {}} | changes


TURNS = [
    *(row("torch", "bf16 wire", us) for us in (1.0, 1.0)),
    *(row("torch", "in turn", us) for us in (45.0, 46.0)),
    *(row("torch", "peer memory", us) for us in (39.0, 39.5)),
    *(row("jax", "jit", us) for us in (54.0, 56.0)),
    *(row("jax", "jit, peer memory", us) for us in (38.0, 39.0)),
]


def test_lines_of_jax_have_the_fastest_exchange_of_torch_beside_them() -> None:
    """Medians over the turns. Products over bf16 all-to-alls are no exchange."""
    found = {line.case["how"]: line for line in ep_alternating.compared(TURNS)}
    assert found.keys() == {"jit", "jit, peer memory"}
    line = found["jit, peer memory"]
    assert (line.us, line.peer_us, line.ratio, line.n) == (38.5, 39.25, round(39.25 / 38.5, 3), 20)
    assert line.spread == 0.1  # of a turn; the medians of the turns differ by less
    assert (line.peer, line.case["peer_is"], line.peak_nbytes, line.peer_peak_nbytes) == (
        "torch_best", "peer memory", 2**30, 2**31,
    )  # fmt: skip
    other = [row("torch", "peer memory", 1.0, case={**CASE, "dim": 2048, "how": "peer memory"})]
    with pytest.raises(RuntimeError, match=r"^ep_alternating: torch: got no line of .*7168"):
        list(ep_alternating.compared([*other, row("jax", "jit", 1.0)]))


def test_a_process_that_fails_is_an_error_with_its_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second turn runs the frontends the other way round."""
    ran: list[str] = []

    def run(command: list[str]) -> tuple[int, str]:
        ran.append("torch" if "ep" in command else "jax")
        return int(len(ran) == 4), "something\nout of memory"

    monkeypatch.setattr(ep_alternating, "run", run)
    with pytest.raises(RuntimeError, match=r"(?s)torch: got exit status 1 of turn 2\n.*out of memory"):
        list(ep_alternating.lines(["mxfp8"]))
    assert ran == ["torch", "jax", "jax", "torch"]


def test_the_commands_of_a_turn() -> None:
    """Each frontend is told the names that it knows."""
    only = ["mxfp8", "peer memory", "peer_memory"]
    torch, jax = ep_alternating.commands(only, "dirichlet", Path("lines")).values()
    assert torch[torch.index("--only") + 1] == "layer,mxfp8,peer memory"
    assert jax[jax.index("--only") + 1] == "mxfp8,peer_memory"
    assert torch[-6:] == jax[-6:] == ["--routing", "dirichlet", "--commit", "0" * 40, "--out", "lines"]
    assert "--only" not in ep_alternating.commands([], "balanced", Path("lines"))["jax"]


def test_the_table_and_the_headlines() -> None:
    """These lines are in a table of their own, and no headline."""
    lines = [{**TURNS[0], **vars(line)} for line in ep_alternating.compared(TURNS)]
    text = table_ep.tables(lines)
    assert "### The whole layer" not in text
    assert (
        "| 16384, 7168/2048, 32, 8 | `PeerMemory` | `PeerMemory` | 0.0 / 0.0 (1.02x) | 2.0 / 1.0 | 20 | 23.0 |" in text
    )
    assert not list(speed.headlines([], lines))
