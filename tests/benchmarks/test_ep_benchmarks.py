"""The benchmark of expert parallelism on two CPU ranks, at small sizes: every check, candidate, line and table. The
figures mean nothing."""

import doctest
import json
import os
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend.overlap.peer_memory import PeerMemory

from benchmarks import ep, ep_jax, readme
from benchmarks.cases import chosen_experts, shapes
from benchmarks.cases.ep import ep_layer, ep_work, expert_parallel
from benchmarks.clocks import device_timing
from benchmarks.figures import results

ROOT = Path(__file__).parents[2]
RANKS = 2
HOWS = ("bf16 wire", "in turn")
OF_LAYERS = (*HOWS, "deduplicate dispatch", "deduplicate both")
# Formulas as written: compiling them for a CPU takes longer than the rest.
SCRIPT = """
import sys
from dataclasses import asdict
from functools import partial
from json import dumps
from pathlib import Path
import torch
torch.compile = lambda f, **_: f
torch.set_num_threads(1)
from benchmarks import ep
from benchmarks.clocks import device_timing, ranks
from examples.training.ranks import leave
device_timing.BATCH_US, device_timing.SETTLE_S = 1, 0
ranks.in_a_row = partial(ranks.in_a_row, rounds=2, groups=1)
out = Path(sys.argv[1])
runs = [(["mxfp8"], "balanced"), (["layer", "mxfp8_wgrad_with_hp"], "one_expert"), (["mxfp8"], "dirichlet")]
for only, routing in runs:
    lines = list(ep.lines(only, routing))
    with (out / f"lines{ep.dist.get_rank()}").open("a") as file:
        file.writelines(dumps(asdict(line)) + "\\n" for line in lines)
leave()
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the lines of both ranks."""
    out = tmp_path_factory.mktemp("ep")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    common = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(RANKS)}
    processes = [
        subprocess.Popen([sys.executable, "-c", SCRIPT, str(out)], env={**common, "RANK": str(rank)}, cwd=ROOT,
                         stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for rank in range(RANKS)
    ]  # fmt: skip
    try:
        errors = [process.communicate(timeout=200)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0] * RANKS, "\n".join(errors)
    return out


@pytest.fixture(scope="module")
def rows(measured: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in (measured / "lines0").read_text().splitlines()]


@pytest.mark.slow
def test_every_candidate_is_a_line_of_the_first_rank(rows: list[dict[str, Any]], measured: Path) -> None:
    assert (measured / "lines1").read_text() == ""
    found = {(row["op"], row["case"]["how"], row["case"]["routing"]) for row in rows}
    layers, products = (("ep_layer_fwd", "ep_layer_fwd_bwd"), ("ep_fwd", "ep_fwd_bwd"))
    asked = (layers + products, "balanced"), (layers, "one_expert"), (layers + products, "dirichlet")
    assert found == {
        (op, how, routing)
        for ops, routing in asked for op in ops for how in (OF_LAYERS if op in layers else HOWS)
    }  # fmt: skip
    assert all(row["error"]["sqnr_db"] >= 21 and row["peer"] == "bf16" for row in rows)


@pytest.mark.slow
def test_the_tables_have_a_row_per_candidate(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for row in rows:
        results.record(results.Run("2x GPU", "a" * 40), results.Line(**row), tmp_path / "h200_ep.jsonl")
    text = readme.DOCUMENTS[ROOT / "docs" / "results" / "expert_parallel.md"]()
    product, layer = text.split("### The whole layer")
    assert (product.count("\n| 256,"), layer.count("\n| 96,")) == (4, 12)
    assert product.count(" / ") > layer.count("| no transport |") == 3


def test_the_layer_in_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the forward alone compiles for as long."""
    monkeypatch.setattr(ep_jax, "RECIPES", ("mxfp8",))
    monkeypatch.setattr(ep_jax, "HOWS", {"jit": ep_jax.HOWS["jit"]})
    monkeypatch.setattr(ep_jax, "STEPS", {"ep_layer_fwd_bwd": ep_jax.STEPS["ep_layer_fwd_bwd"]})
    monkeypatch.setattr(device_timing, "BATCH_US", 1)
    monkeypatch.setattr(device_timing, "SETTLE_S", 0)
    monkeypatch.setattr(device_timing, "in_a_row", partial(device_timing.in_a_row, rounds=2, groups=1))
    found = list(ep_jax.lines([], "balanced"))
    assert [(line.op, line.case["ranks"], line.error["grade"]) for line in found] == [
        ("ep_layer_fwd_bwd", 2, "sqnr_db")
    ]
    with pytest.raises(ValueError, match=r"^ep_jax: routing: got odd; allowed: balanced, one_expert, dirichlet"):
        list(ep_jax.lines([], "odd"))


def test_names_select_the_exchanges_of_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every one has a name; with a routing that is not balanced none has a capacity, which would drop rows."""
    monkeypatch.setattr(ep_jax, "_Inputs", lambda *_: SimpleNamespace(lines=lambda recipe, how: [(recipe, how)]))
    assert [how for _, how in ep_jax.lines(["mxfp8"])] == list(ep_jax.HOWS)
    assert [how for _, how in ep_jax.lines(["mxfp8", "deduplicate"])] == list(ep_jax.WAYS["deduplicate"])
    found = [how for _, how in ep_jax.lines(["mxfp8"], "dirichlet")]
    assert found == ["jit", "jit, deduplicate dispatch", "jit, deduplicate both", *ep_jax.WAYS["peer_memory"][:2]]


@pytest.fixture
def alone(tmp_path: Path) -> Any:
    """A process group of this process."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_rows_that_do_not_travel_and_noise_are_errors(alone: None) -> None:
    group, device = torch.distributed.group.WORLD, torch.device("cpu")
    assert group is not None
    shape, recipe = expert_parallel.TINY[0], Recipe.parse("mxfp8")
    right = expert_parallel.work(shape, "balanced", recipe, {}, device)
    lost = lambda: right.forwards[ep_work.IN_TURN]() * 2  # noqa: E731
    work = right._replace(forwards={**right.forwards, "nothing": lost})
    with pytest.raises(AssertionError, match=r"^ep: nothing: differs from the run without a transport: \{'y': \d+, "):
        ep_work.check(work)
    assert min(ep_work.check(right).values()) >= expert_parallel.MIN_SQNR_DB
    with pytest.raises(AssertionError, match=r"^ep: bf16 wire: \{'y': .*\} dB from bf16; expected 40 or more$"):
        ep_work.check(right._replace(min_sqnr_db=40))
    exact = {**right.forwards, "bf16 wire": right.forwards["bf16"]}
    with pytest.raises(
        AssertionError, match=rf"^ep: {ep_work.IN_TURN}: \{{'y': .*\}} dB from bf16; expected 40 or more$"
    ):
        ep_work.check(right._replace(min_sqnr_db=40, forwards=exact))


def test_the_peak_has_the_memory_of_the_transport(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = object.__new__(PeerMemory)  # its constructor needs a GPU
    memory.mapped = SimpleNamespace(buffer=None)  # type: ignore[assignment]
    assert ep_work.held_nbytes(memory) == 0
    memory.mapped.buffer = SimpleNamespace(starts=(0, 32, 64))  # type: ignore[assignment]
    assert ep_work.held_nbytes(memory) == 64
    monkeypatch.setattr(device_timing, "BATCH_US", 1)
    monkeypatch.setattr(device_timing, "SETTLE_S", 0)
    monkeypatch.setattr(ep, "peak_nbytes", lambda run: (run(), 1000)[1])
    work = expert_parallel.work(expert_parallel.TINY[0], "balanced", Recipe.parse("mxfp8"), {}, torch.device("cpu"))
    work = work._replace(forwards={**work.forwards, "over peers": work.forwards[ep_work.IN_TURN]})
    forward, both = ep._measured(work, {"over peers": memory}, torch.device("cpu"))[-2:]
    assert (both.case["how"], both.peak_nbytes, both.peer_peak_nbytes) == ("over peers", 1064, 1000)
    assert (forward.peak_nbytes, forward.peer_peak_nbytes) == (None, None)


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(chosen_experts)
    assert found.attempted
    assert not found.failed


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(96, 8, 2), (64, 64, 6), (100, 12, 8), (50, 4, 3)])
def test_a_token_chooses_each_expert_once(tokens: int, experts: int, top_k: int) -> None:
    for routing in chosen_experts.ROUTINGS:
        places = chosen_experts.places(routing, tokens, experts, top_k, rank=1)
        assert (np.sort(places, axis=1) == np.arange(experts)).all()
    rows = (chosen_experts.places("balanced", tokens, experts, top_k, rank=0) < top_k).sum(0)
    assert np.ptp(rows) <= (0 if (tokens, experts) != (50, 4) and tokens * top_k % experts == 0 else top_k)
    rows = (chosen_experts.places("one_expert", tokens, experts, top_k, rank=0) < top_k).sum(0)
    assert rows[0] == round(tokens * min(0.3 * top_k, 1))
    first, second = (chosen_experts.places("balanced", tokens, experts, top_k, rank) for rank in (0, 1))
    assert (first != second).any()


@pytest.mark.parametrize("experts", [8, 64, 256])
@pytest.mark.parametrize("routing", chosen_experts.ROUTINGS)
def test_logits_choose_what_the_routing_says(routing: str, experts: int) -> None:
    shape = shapes.MoELayer(64, 256, 32, experts, 6)
    x = ep_layer.tokens_of(shape, routing, 1, torch.device("cpu"))
    logits = torch.nn.functional.linear(x, torch.eye(experts, shape.dim, dtype=x.dtype))
    places = chosen_experts.places(routing, shape.tokens, experts, shape.top_k, rank=1)
    assert (logits.argsort(dim=1, descending=True).numpy() == np.argsort(places, axis=1)).all()


def test_rows_of_a_product() -> None:
    for routing in chosen_experts.ROUTINGS:
        for rank in range(2):
            rows = chosen_experts.counts(routing, 131072, 16, rank)
            assert sum(rows) == 131072
            assert not [n for n in rows if n % 32]
    assert chosen_experts.counts("balanced", 131072, 16, 0) == [8192] * 16
    assert chosen_experts.counts("one_expert", 131072, 16, 0)[0] == pytest.approx(0.3 * 131072, abs=32)
    shares = [np.array(chosen_experts.counts("dirichlet", 131072, 16, rank)) / 131072 for rank in range(2)]
    assert np.abs(shares[0] - shares[1]).max() < 0.02  # one popularity
    assert shares[0].max() > 2 / 16
