"""The benchmark of models on a CPU, at small sizes: every model is checked, timed, profiled and reported. The figures
mean nothing."""

import doctest
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks import __main__, readme
from benchmarks.cases.models import check, fit, parts, sizes, text, training
from benchmarks.cases.models.parts import Op
from benchmarks.clocks import device_timing, energy, training_steps
from benchmarks.clocks.timing import Sample
from benchmarks.figures import bars, results
from benchmarks.figures.tables import table_models
from benchmarks.models import torch_steps as models

BATCHES = training.Batches(sequences=1, length=32, micro_batches=2, steps=1)
PUBLISHED = {"mixtral-8x7b": 46.7, "qwen3-30b-a3b": 30.5, "deepseek-v2-lite": 15.7, "deepseek-v3": 671.0,
             "gpt-oss-120b": 116.8}  # fmt: skip
"""Billions of weights."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One sample of everything, layers as written, and the registry of transformers as before."""
    monkeypatch.setattr(torch, "compile", lambda f, **_: f)
    monkeypatch.setattr(device_timing, "BATCH_US", 1)
    monkeypatch.setattr(device_timing, "SETTLE_S", 0)
    monkeypatch.setattr(device_timing, "in_a_row", partial(device_timing.in_a_row, rounds=2, groups=1))
    monkeypatch.setattr(models, "training_steps", partial(training_steps.training_steps, rounds=2, steps=1))
    monkeypatch.setattr(check, "CHECKED_STEPS", 2)
    before, threads = dict(ALL_EXPERTS_FUNCTIONS._global_mapping), torch.get_num_threads()
    torch.set_num_threads(1)  # small products: threads wait for each other
    yield
    torch.set_num_threads(threads)
    ALL_EXPERTS_FUNCTIONS._global_mapping.clear()
    ALL_EXPERTS_FUNCTIONS._global_mapping.update(before)


def measured(*names: str) -> list[results.Line]:
    of = {name: sizes.small(sizes.MODELS[name]) for name in names}
    return list(models.lines(names, of, BATCHES, "cpu"))


def recorded(lines: list[results.Line], folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The lines as a later run of the document generator reads them."""
    monkeypatch.setattr(results, "RESULTS", folder)
    for line in lines:
        assert results.row(results.cells(line))
        results.record(results.Run("1x GPU", "a" * 40), line, folder / "h200.jsonl")
    return results.newest("h200", table_models.is_model)


@pytest.mark.parametrize("name", sizes.MODELS)
def test_every_model_is_checked_compared_and_reported(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = measured(name)
    best = {line.case["peer_is"] for line in lines}
    assert len(best) == 1
    assert best <= set(models.BF16)
    assert {line.case["candidate"] for line in lines} | best == set(models.CANDIDATES)
    for line in lines:
        assert (line.op, line.frontend, line.peer, line.n) == ("model_step", "torch", "best_bf16", 1)
        assert line.case["model"] == name
        assert line.parts_us
        assert line.peer_parts_us
        assert line.parts_us.keys() == line.peer_parts_us.keys() == {*parts.PARTS, "idle"}
        assert sum(line.parts_us.values()) >= line.us * 0.999  # idle is the rest of the step
        for part in ("dispatch", "products", "dense", "head and loss", "clipping", "optimizer"):
            assert line.parts_us[part] > 0, part
        assert (line.parts_us["quantization"] > 0) == (line.case["candidate"] == "mxfp8")
        if line.error["grade"] != "reference":
            error: dict[str, Any] = {**line.error}
            assert error["sqnr_db"] >= check.MIN_GRADIENT_DB[str(line.case["candidate"])]
            assert error["loss"] <= check.MAX_LOSS_DIFFERENCE
        assert (line.largest_group or 0) > 1.1  # real text: groups are not equal
    rows = recorded(lines, tmp_path, monkeypatch)
    assert len(rows) == len(lines)
    table = readme.performance()
    assert table.count(f"\n| `{name}` | 2 of ") == len(lines)
    assert table.count(f"\n| `{name}` | `") == len(lines) + 1  # shares of the best bf16 too


def test_no_line_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    assert table_models.table(results.newest("h200", table_models.is_model)) == ""
    assert readme.performance() == ""


@pytest.mark.parametrize("name", sizes.MODELS)
def test_published_sizes(name: str) -> None:
    model = sizes.MODELS[name]
    with torch.device("meta"):
        config = getattr(transformers, f"{model.kind}Config")(num_hidden_layers=model.layers, **model.sizes)
        whole = getattr(transformers, f"{model.kind}ForCausalLM")(config)
    assert round(sum(p.numel() for p in whole.parameters()) / 1e9, 1) == PUBLISHED[name]
    assert sizes.experts_of(config) == model.experts
    assert sizes.experts_of(model.config(1)) == (32 if name == "deepseek-v3" else model.experts)


def test_a_wrong_candidate_is_an_error_and_the_others_are_measured(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights of the routing half as large, in one candidate."""
    right = ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    wrong: Any = lambda module, x, indices, weights: right(module, x, indices, weights / 2)  # noqa: E731
    ALL_EXPERTS_FUNCTIONS.register("half", wrong)
    monkeypatch.setitem(models.CANDIDATES, "mxfp8", "half")
    of, lines = {"mixtral-8x7b": sizes.small(sizes.MODELS["mixtral-8x7b"])}, []
    with pytest.raises(RuntimeError, match=r"^models: mixtral-8x7b: gradients of mxfp8$"):
        lines.extend(models.lines((), of, BATCHES, "cpu"))
    assert "dB; expected 18.9 or more" in capsys.readouterr().err


def test_losses_that_differ_are_an_error() -> None:
    assert check.losses_error("mxfp8", [4.0, 3.0], [4.0, 3.0015]) == 0.0005
    with pytest.raises(AssertionError, match=r"expected 0.26% at most"):
        check.losses_error("mxfp8", [4.0, 3.0], [4.0, 3.01])
    with pytest.raises(AssertionError):
        check.losses_error("mxfp8", [float("nan")], [4.0])


def test_a_training_starts_again() -> None:
    """The same losses from the same weights, which a step changes."""
    models.register_experts("bf16")
    one = training.Training(sizes.small(sizes.MODELS["gpt-oss-120b"]), 1, BATCHES, "cpu", 1e-3)
    one.use("bf16")
    first = [float(one.step()) for _ in range(2)]
    one.restart(1e-3)
    assert [float(one.step()) for _ in range(2)] == first
    assert first[1] < first[0]  # the same tokens again
    assert {s["exp_avg"].dtype for s in one.optimizer.state.values()} == {torch.bfloat16}


def test_head_and_loss_of_one_sequence_at_a_time() -> None:
    """Loss and gradients of the model's own forward."""
    models.register_experts("bf16")
    one = training.Training(sizes.small(sizes.MODELS["mixtral-8x7b"]), 1, BATCHES._replace(sequences=2), "cpu", 1e-3)
    one.model.float()
    one.use("grouped_mm")
    ids = one.ids[0, 0]
    got = one.micro_batch(ids, training.nullcontext) * one.batches.micro_batches
    gradient = one.model.model.layers[0].mlp.experts.down_proj.grad * one.batches.micro_batches
    one.optimizer.zero_grad()
    logits = one.model(ids[:, :-1]).logits
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
    want.backward()
    torch.testing.assert_close(got, want.detach())
    torch.testing.assert_close(gradient, one.model.model.layers[0].mlp.experts.down_proj.grad)


MM = [[4096, 2048], [2048, 512]]
PART_OF: list[tuple[str, tuple[Op, ...], str]] = [
    ("void cutlass::device_kernel<...GroupProblemShape...>", (Op("aten::_grouped_mm", []),), "products"),
    ("void cutlass::device_kernel<...GroupProblemShape...>", (), "products"),
    ("mm_fold", (Op("mxep::grouped_mm_fold_pair"), Op("CompiledFunction")), "products"),
    ("fold", (Op("mxep::quantize_both_fold"),), "quantization"),
    ("fold", (Op("mxep::fold_rows"),), "quantization"),
    ("swiglu", (Op("mxep::swiglu_row_fold"),), "activation"),
    ("gather", (Op("mxep::permute_mx_fold"),), "quantization"),
    ("gather", (Op("mxep::permute_rows"),), "dispatch"),
    ("sum", (Op("mxep::combine"),), "dispatch"),
    ("count", (Op("mxep::sort_by_expert"),), "dispatch"),
    ("nvjet", (Op("aten::mm", MM),), "dense"),
    ("nvjet", (Op("aten::mm", [[4096, 2048], [2048, 128]]),), "router"),
    ("flash_fwd", (Op("aten::_flash_attention_forward"), Op("aten::_scaled_dot_product_flash_attention")), "attention"),
    ("cudnn", (Op("aten::_scaled_dot_product_cudnn_attention_backward"),), "attention"),
    ("triton_tem_fused_flex_attention_0", (), "attention"),
    ("triton_red_fused__to_copy__unsafe_view_add_mean_mul_pow_rsqrt_2", (), "norms"),
    ("triton_red_fused__to_copy_add_div_expand_mul_pow_sum_view_3", (), "norms"),
    ("triton_poi_fused_mul_silu_split_5", (), "activation"),
    ("triton_per_fused__softmax__to_copy_3", (), "router"),
    ("triton_poi_fused_add_arange_floor_divide_index_index_put_mul_view_4", (), "dispatch"),
    ("triton_poi_fused_add_cat_mul_neg_slice_transpose_1", (), "attention"),
    ("gatherTopK", (Op("aten::topk"),), "router"),
    ("radixSort", (Op("aten::sort"),), "dispatch"),
    ("memset", (Op("aten::zero_"),), "other"),
]


@pytest.mark.parametrize(("kernel", "ops", "part"), PART_OF)
def test_parts(kernel: str, ops: tuple[Op, ...], part: str) -> None:
    assert parts.part_of(kernel, ops, experts=128) == part


def test_kernels_of_a_profile_are_counted_once() -> None:
    """A product, a kernel of Triton in a range of its own name, one without an op, and a range on the device."""
    kind = {name: SimpleNamespace(name=name) for name in ("CPU", "CUDA")}

    def launch(name: str, around: Any, *kernels: tuple[str, float]) -> Any:
        launched = [SimpleNamespace(name=of, duration=us) for of, us in kernels]
        event = SimpleNamespace(name=name, cpu_parent=around, kernels=launched, input_shapes=[[4, 2], []])
        event.device_type = kind["CPU"]
        return event

    def device(name: str, us: float, annotation: bool = False) -> Any:
        return SimpleNamespace(device_type=kind["CUDA"], name=name, device_time=us, is_user_annotation=annotation)

    outer = launch("mxep.experts", None, ("mxep.experts", 60.0))
    events = [
        *(outer, launch("aten::mm", outer, ("gemm", 30.0)), launch("triton_fused_0", outer, ("triton_fused_0", 20.0))),
        *(device("gemm", 30.0), device("triton_fused_0", 20.0), device("memset", 10.0)),
        device("mxep.experts", 60.0, annotation=True),
    ]
    seen: Any = SimpleNamespace(events=lambda: events)
    found = list(parts.kernels_of(seen, "cuda"))
    ops = [Op("aten::mm", [[4, 2]]), Op("mxep.experts", [[4, 2]])]
    assert found == [("gemm", ops, 30.0), ("triton_fused_0", [], 20.0), ("memset", [], 10.0)]


def test_layers_fill_the_memory() -> None:
    memory = fit.Memory(saved=7_000, peak=20_000)
    for total in range(200_000, 400_000, 7_777):
        layers = fit.layers_that_fit(total, 5_000, 1_000, memory, most=60)
        peak = [fit.BYTES_PER_WEIGHT * (5_000 + n * 1_000) + 20_000 + n * 7_000 for n in (layers - 1, layers)]
        assert peak[0] <= 0.9 * total < peak[1]
    assert fit.layers_that_fit(1 << 40, 5_000, 1_000, memory, most=60) == 60
    assert fit.layers_that_fit(1, 5_000, 1_000, memory, most=60) == 1


def test_steps_are_launched_ahead_and_energy_is_of_the_counted_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step of "a" takes 2 s at 300 W, of "b" 3 s at 500 W."""
    now, joules, seen = [0.0], [0.0], []
    monkeypatch.setattr(training_steps.time, "perf_counter", lambda: now[0])

    def step(name: str, seconds: float, watts: float) -> device_timing.Step:
        def wait() -> None:
            seen.append(f"{name} ends")
            now[0] += seconds
            joules[0] += seconds * watts

        return lambda: seen.append(name), lambda _: wait

    read: energy.Counter = lambda: round(1000 * joules[0])  # noqa: E731
    found = training_steps.training_steps({"a": step("a", 2, 300), "b": step("b", 3, 500)}, read)
    assert found["a"] == training_steps.Steps(Sample(2e6, 0.0, 10), 600.0)
    assert found["b"] == training_steps.Steps(Sample(3e6, 0.0, 10), 1500.0)
    assert seen[:5] == ["a", "a", "a ends", "a", "a ends"]
    assert seen.count("b") == seen.count("b ends") == 4 * (2 + 5)
    assert [name for name in seen[::14] if "ends" not in name] == ["a", "b", "b", "a", "a", "b", "b", "a"]


@pytest.mark.parametrize(
    ("model", "ratio", "ceiling", "said"),
    [
        ("mixtral-8x7b", 1.41, 2.0, "x 1.4: 1.41 ok"),
        ("mixtral-8x7b", 1.39, 1.4, "x 1.4: 1.39 MISSED"),
        ("deepseek-v3", 1.2, 1.25, "of the ceiling 0.95: 0.96 ok"),
        ("qwen3-30b-a3b", 1.1, 1.25, "of the ceiling 0.95: 0.88 MISSED"),
        ("gpt-oss-120b", 1.1, 1.25, ""),
    ],
)
def test_bars(model: str, ratio: float, ceiling: float, said: str) -> None:
    case = {"model": model, "candidate": "mxfp8"}
    row = {"op": "model_step", "frontend": "torch", "peer": "best_bf16", "case": case, "ratio": ratio}
    assert str(bars.bar({**row, "ceiling": ceiling}) or "") == said
    assert bars.bar({**row, "ceiling": ceiling, "case": {**case, "candidate": "recipe_bf16"}}) is None


def test_a_line_of_an_op_has_no_field_of_models(tmp_path: Path) -> None:
    line = results.Line("x", "torch", {}, 1.0, 0.0, 1, 0, 0, None, None, "copy", 1.0, 1.0, None, {})
    results.record(results.Run("1x GPU", "a" * 40), line, tmp_path / "x.jsonl")
    assert "parts_us" in asdict(line)
    assert "parts_us" not in (tmp_path / "x.jsonl").read_text()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["models"], "section: got models; allowed: ep, ep_jax, ep_alternating, fsdp, this machine has no GPU"),
        (["models", "--only", "llama"], "--only: got llama; allowed in models: deepseek-v2-lite"),
        (["models", "--shape", "tokens=8,dim=32,hidden_dim=32,num_experts=2,top_k=1"], "--shape: got section models"),
    ],
)
def test_arguments(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "gpu_name", lambda: None)
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    with pytest.raises(SystemExit):
        __main__.main()
    assert said in capsys.readouterr().err


def test_every_rank_refuses_jax(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Rank 0 ran JAX, and the others torch, whose collectives waited."""
    monkeypatch.setattr(__main__, "BY_TORCHRUN", True)
    monkeypatch.setattr("sys.argv", ["benchmarks", "models", "--frontend", "jax"])
    with pytest.raises(SystemExit):
        __main__.main()
    assert "--frontend: got jax by torchrun; allowed: python -m benchmarks models" in capsys.readouterr().err


@pytest.mark.parametrize("module", [fit, parts, text])
def test_examples_in_docstrings(module: Any) -> None:
    found = doctest.testmod(module)
    assert found.attempted
    assert not found.failed
