"""The benchmark of expert parallelism on two CPU ranks, at small sizes: every check, candidate, line and table, and the
picture of a step. The figures mean nothing."""

import doctest
import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mxep.core_kernels.policy.recipe import Recipe
from mxep.torch_frontend.overlap.copy_engines import CopyEngines

from benchmarks import ep, ep_jax, readme
from benchmarks.cases import chosen_experts, shapes
from benchmarks.cases.ep import ep_layer, ep_wire, ep_work, expert_parallel
from benchmarks.clocks import device_timing
from benchmarks.figures import results, timeline
from benchmarks.figures.tables import table_ep
from benchmarks.figures.timeline import Event

ROOT = Path(__file__).parents[2]
RANKS = 2
HOWS = ("bf16 wire", "in turn", "collectives")
OF_LAYERS = (*HOWS, "deduplicate dispatch", "deduplicate both")
# Formulas as written: compiling them for a CPU takes longer than the rest.
SCRIPT = """
import sys
from dataclasses import asdict
from json import dumps
from pathlib import Path
import torch
torch.compile = lambda f, **_: f
torch.set_num_threads(1)
from benchmarks import ep
from examples.training.ranks import leave
out = Path(sys.argv[1])
runs = [(["mxfp8"], "balanced"), (["layer", "mxfp8_wgrad_with_hp"], "one_expert"), (["mxfp8"], "dirichlet")]
for only, routing in runs:
    lines = list(ep.lines(only, routing, rounds=1))
    with (out / f"lines{ep.dist.get_rank()}").open("a") as file:
        file.writelines(dumps(asdict(line)) + "\\n" for line in lines)
assert not list(ep.lines(["layer", "mxfp8", "collectives"], trace=out / "trace.json"))
leave()
"""


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the lines of both ranks and the trace of the first one."""
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
def test_a_run_over_a_transport_has_its_parts(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        parts = row["stages_us"]
        assert (parts is not None) == (row["case"]["how"] == "collectives")
        if parts:
            assert parts.keys() == {"wire", "products", "without_wire", "exposed"}
            assert parts["exposed"] == pytest.approx(row["us"] - parts["without_wire"], abs=0.1)
            assert min(parts["wire"], parts["products"]) > 0


@pytest.mark.slow
def test_the_tables_have_a_row_per_candidate(
    rows: list[dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for row in rows:
        results.record(results.Run("2x GPU", "a" * 40), results.Line(**row), tmp_path / "h200_ep.jsonl")
    text = readme.DOCUMENTS[ROOT / "docs" / "results" / "expert_parallel.md"]()
    product, layer = text.split("### The whole layer")
    assert (product.count("\n| 256,"), layer.count("\n| 96,")) == (6, 15)
    assert product.count(" / ") > layer.count("| `Collectives` |") == 3


def test_the_layer_in_jax(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward; the forward alone compiles for as long."""
    monkeypatch.setattr(ep_jax, "RECIPES", ("mxfp8",))
    monkeypatch.setattr(ep_jax, "HOWS", {"jit": ep_jax.HOWS["jit"]})
    monkeypatch.setattr(ep_jax, "STEPS", {"ep_layer_fwd_bwd": ep_jax.STEPS["ep_layer_fwd_bwd"]})
    batches = device_timing.batches
    monkeypatch.setattr(device_timing, "batches", lambda programs, calls, samples: batches(programs, 1, samples=1))
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
    assert found == ["jit", "jit, deduplicate dispatch", "jit, deduplicate both", "jit, peer memory"]


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
    work = expert_parallel.work(shape, "balanced", recipe, {"nothing": ep_wire.NoWire(group)}, device)
    with pytest.raises(AssertionError, match=r"^ep: nothing: differs from the run without a transport: \{'y': \d+, "):
        ep_work.check(work)
    right = work._replace(forwards={name: f for name, f in work.forwards.items() if name != "nothing"})
    assert min(ep_work.check(right).values()) >= expert_parallel.MIN_SQNR_DB
    with pytest.raises(AssertionError, match=r"^ep: bf16 wire: \{'y': .*\} dB from bf16; expected 40 or more$"):
        ep_work.check(right._replace(min_sqnr_db=40))
    exact = {**right.forwards, "bf16 wire": right.forwards["bf16"]}
    with pytest.raises(
        AssertionError, match=rf"^ep: {ep_work.IN_TURN}: \{{'y': .*\}} dB from bf16; expected 40 or more$"
    ):
        ep_work.check(right._replace(min_sqnr_db=40, forwards=exact))


def test_the_peak_has_the_memory_of_the_transport(alone: None, monkeypatch: pytest.MonkeyPatch) -> None:
    engines = object.__new__(CopyEngines)  # its constructor needs a GPU
    engines.rank = 1
    buffer: Any = SimpleNamespace(of_rank=[torch.empty(32), torch.empty(16)])
    engines.buffers = {"experts": buffer, "tokens": None}
    assert ep_work.held_nbytes(engines) == 64
    monkeypatch.setattr(ep, "peak_nbytes", lambda run: (run(), 1000)[1])
    monkeypatch.setattr(ep, "held_nbytes", lambda transport: 64)
    forward, both = list(ep.lines(["product", "mxfp8"], rounds=1))[-2:]
    assert (both.case["how"], both.peak_nbytes, both.peer_peak_nbytes) == ("collectives", 1064, 1000)
    assert (forward.peak_nbytes, forward.peer_peak_nbytes) == (None, None)


@pytest.mark.parametrize("module", [chosen_experts, table_ep, timeline])
def test_examples_in_docstrings(module: Any) -> None:
    found = doctest.testmod(module)
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


def synthetic() -> list[dict[str, Any]]:
    """The forward is marked from 10 to 30 on the host; stream 7 has kernels, stream 9 copies from a peer."""

    def kernel(name: str, ts: float, dur: float, launched: float, cat: str = "kernel", stream: int = 7) -> None:
        number = len(events)
        events.append({"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": launched, "dur": 1,
                       "args": {"correlation": number}})  # fmt: skip
        events.append({"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur,
                       "args": {"correlation": number, "stream": stream}})  # fmt: skip

    events: list[dict[str, Any]] = [
        {"ph": "X", "cat": "user_annotation", "name": timeline.MARK, "ts": 10, "dur": 20, "args": {}},
        {"ph": "M", "name": "process_name"},
    ]
    kernel("ncclDevKernel_AllReduce", 1, 5, 0)  # the barrier before
    kernel("void mxep::cuda::(anonymous namespace)::quantize_tiles<...>", 20, 10, 12)
    kernel("Memcpy DtoD (Device -> Device)", 25, 20, 14, "gpu_memcpy", 9)
    kernel("void mxep::cuda::sm90::(anonymous namespace)::grouped_gemm_fp8_nt<RowScales>", 45, 30, 16)
    kernel("Memcpy DtoD (Device -> Device)", 76, 2, 18, "gpu_memcpy")
    events.append({"ph": "X", "cat": "gpu_memcpy", "name": "Memcpy PtoP (Device -> Device)", "ts": 79, "dur": 6,
                   "args": {"correlation": 1000, "stream": 9}})  # fmt: skip
    kernel("combine_bwd_row_kernel", 100, 10, 31)
    kernel("void mxep::cuda::(anonymous namespace)::backward_rows<...>", 110, 5, 32)
    kernel("ncclDevKernel_SendRecv", 112, 10, 33, stream=11)
    return events


def test_the_lanes_of_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": synthetic()}))
    events = timeline.read(path)
    assert events == [
        Event("forward", "other kernels", "quantize", 0, 10),
        Event("forward", "copies/wire", "copies from peers", 5, 25),
        Event("forward", "GEMMs", "GEMMs", 25, 55),
        Event("forward", "copies/wire", "rows of this rank", 56, 58),
        Event("forward", "copies/wire", "copies from peers", 59, 65),  # of an unknown launch, after the host returned
        Event("backward", "other kernels", "sum over replicas", 80, 90),
        Event("backward", "other kernels", "SwiGLU", 90, 95),
        Event("backward", "copies/wire", "all-to-all", 92, 102),
    ]
    found = {line[:36].strip(): line[36:].split() for line in timeline.table(events).splitlines()}
    assert found["GEMMs: GEMMs"] == ["0.030", "0.000"]
    assert found["copies/wire without a kernel"] == ["0.023", "0.007"]
    assert found["from the first to the last"] == ["0.065", "0.022"]
    timeline.draw(events, tmp_path / "trace.svg")
    text = (tmp_path / "trace.svg").read_text()
    assert all(word in text for word in (*timeline.LANES, *timeline.DIRECTIONS, "copies from peers"))
    path.write_text(json.dumps({"traceEvents": synthetic()[1:]}))
    with pytest.raises(ValueError, match=r"^timeline: path: got trace.json with 0 marks of a forward and nothing aft"):
        timeline.read(path)


@pytest.mark.slow
def test_a_step_on_a_cpu_has_its_stages(measured: Path) -> None:
    events = timeline.read(measured / "trace.json")
    found = {(event.direction, event.stage) for event in events}
    stages = ("GEMMs", "quantize", "SwiGLU", "sum over replicas", "router", "all-to-all")
    assert found >= {(direction, stage) for direction in timeline.DIRECTIONS for stage in stages}
    assert {event.stage for event in events} <= timeline.COLORS.keys()
