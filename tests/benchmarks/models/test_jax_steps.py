"""The benchmark of models in JAX on a CPU, at small sizes. The figures mean nothing."""

import doctest
import re
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
import transformers
from mxep.jax_frontend import lower_for

from benchmarks import __main__, readme
from benchmarks.cases.error_check import sqnr_db
from benchmarks.cases.models import check, model_jax, parts, parts_jax, sizes, training_jax
from benchmarks.cases.models.model_jax import RAGGED_DOT, Products
from benchmarks.cases.models.parts_jax import Operation
from benchmarks.cases.models.training import Batches
from benchmarks.clocks import device_timing, training_steps
from benchmarks.figures import results
from benchmarks.figures.tables import table_models
from benchmarks.models import jax_steps

BATCHES = Batches(sequences=2, length=32, micro_batches=2, steps=1)


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sample of everything."""
    monkeypatch.setattr(device_timing, "BATCH_US", 1)
    monkeypatch.setattr(device_timing, "SETTLE_S", 0)
    monkeypatch.setattr(device_timing, "in_a_row", partial(device_timing.in_a_row, rounds=2, groups=1))
    monkeypatch.setattr(jax_steps, "training_steps", partial(training_steps.training_steps, rounds=2, steps=1))
    monkeypatch.setattr(jax_steps, "MUCH_SLOWER", float("inf"))  # times of a CPU mean nothing
    monkeypatch.setattr(check, "CHECKED_STEPS", 2)


def training(name: str, layers: int = 1, batches: Batches = BATCHES) -> training_jax.Training:
    return training_jax.Training(sizes.small(sizes.MODELS[name]), layers, batches, "xla")


def test_a_model_is_checked_compared_and_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "qwen3-30b-a3b"
    lines = list(jax_steps.lines([name], {name: sizes.small(sizes.MODELS[name])}, BATCHES))
    (best,) = {str(line.case["peer_is"]) for line in lines}
    assert best in jax_steps.BF16
    assert {line.case["candidate"] for line in lines} | {best} == set(jax_steps.CANDIDATES)
    for line in lines:
        assert (line.op, line.frontend, line.peer, line.n) == ("model_step", "jax", "best_bf16", 1)
        assert line.parts_us
        assert line.peer_parts_us
        assert line.parts_us.keys() == line.peer_parts_us.keys() == {*parts.PARTS, "idle"}
        for part in ("router", "products", "attention", "dense", "norms", "head and loss", "clipping", "optimizer"):
            assert line.parts_us[part] > 0, part
        assert (line.parts_us["quantization"] > 0) == str(line.case["candidate"]).startswith("mxfp8")
        error: dict[str, Any] = {**line.error}
        assert error["loss"] <= check.MAX_LOSS_DIFFERENCE
        if error["grade"] != "reference":
            assert error["sqnr_db"] >= check.MIN_GRADIENT_DB[str(line.case["candidate"])]
        assert (line.largest_group or 0) > 1.1
        assert line.dense_ratio is not None
        assert (line.dense_ratio == 1) == (line.case["candidate"] != "mxfp8_dense")
    monkeypatch.setattr(results, "RESULTS", tmp_path)
    for line in lines:
        assert results.row(results.cells(line))
        results.record(results.Run("1x GPU", "a" * 40), line, tmp_path / "h200.jsonl")
    assert len(results.newest("h200", table_models.is_model)) == len(lines)
    table = readme.performance()
    assert table.count(", JAX | ") == 3 * len(lines) + 1  # candidate and peer; shares of the peer too


def as_transformers(model: Any, params: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Weights and gradients of transformers, by our names and in our layouts."""
    found: dict[str, torch.Tensor] = {}
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "moe_norm", "gate": "router"}
    names |= {f"{short}_proj": short for short in "qkvo"}
    for name, weight in model.named_parameters():
        of, rest = params[name], name.split(".")
        if name == "model.embed_tokens.weight":
            found["embed"] = of
        elif name == "model.norm.weight":
            found["norm"] = of
        elif name == "lm_head.weight":
            found["head"] = of.T
        elif rest[-1] == "gate_up_proj":
            prefix = f"layers.{rest[2]}.experts"
            found[f"{prefix}.w1"], found[f"{prefix}.w3"] = of.chunk(2, dim=1)
        elif rest[-1] == "down_proj":
            found[f"layers.{rest[2]}.experts.w2"] = of
        else:
            short = names.get(rest[-2], rest[-2])
            found[f"layers.{rest[2]}.{short}"] = of.T if short in {"q", "k", "v", "o"} else of
        assert weight.shape == of.shape
    return found


@pytest.mark.parametrize("name", jax_steps.NAMES)
def test_loss_and_gradients_of_transformers(name: str) -> None:
    """In fp32 there, from the same weights; roundings change no choice of experts with this seed and one layer."""
    model = sizes.small(sizes.MODELS[name])
    torch.manual_seed(1)
    theirs = getattr(transformers, f"{model.kind}ForCausalLM")(model.config(1))
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(parameter.bfloat16())
    ours = training(name, batches=BATCHES._replace(micro_batches=1))
    weights = as_transformers(theirs, dict(theirs.named_parameters()))
    shapes = model_jax.shapes(ours.sizes)
    assert {of: tuple(w.shape) for of, w in weights.items()} == model_jax.named_shapes(ours.sizes)
    leaves = [jnp.asarray(weights[of].detach().numpy(), jnp.bfloat16) for of in model_jax.named_shapes(ours.sizes)]
    params = jax.tree.unflatten(jax.tree.structure(shapes, is_leaf=lambda leaf: isinstance(leaf, tuple)), leaves)
    run = partial(training_jax.micro_batch, sizes=ours.sizes, products=Products(RAGGED_DOT),
                  tokens=ours.batches.tokens, attention="xla")  # fmt: skip
    ids = ours.ids[0][0]
    got, loss = jax.jit(run)(params, jax.tree.map(jnp.zeros_like, params), ids)

    tokens = torch.from_numpy(jax.device_get(ids).astype("int64"))
    logits = theirs(tokens[:, :-1]).logits
    want = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    want.backward()
    assert float(loss) == pytest.approx(want.item(), rel=1e-4)
    gradients = as_transformers(theirs, {of: p.grad for of, p in theirs.named_parameters()})
    ends = torch.arange(1, 1 + ours.sizes.experts)
    db = {of: sqnr_db([torch.from_dlpack(g)], [gradients[of]], ends) for of, g in model_jax.named(got).items()}
    assert min(db.values()) >= 33, db  # 35.6 measured over three seeds, where all choices are equal


def test_gradients_are_added_and_a_training_starts_again() -> None:
    one = training("qwen3-30b-a3b", batches=BATCHES._replace(sequences=1))  # the head's are added once
    one.compile({"recipe_bf16": Products("bf16")})
    one.restart(1e-3)
    once = one.gradients("recipe_bf16")
    for _ in range(2):
        one.accumulate("recipe_bf16", 1)
    for name, twice in model_jax.named(one.grads).items():
        assert bool((twice == 2 * once[name]).all()), name
    one.restart(1e-3)
    first = [float(sum(map(float, one.step("recipe_bf16").losses))) for _ in range(2)]
    assert not any(bool(leaf.any()) for leaf in jax.tree.leaves(one.grads))
    one.restart(1e-3)
    assert [float(sum(map(float, one.step("recipe_bf16").losses))) for _ in range(2)] == first
    assert first[1] < first[0]  # the same tokens again
    assert {leaf.dtype.name for leaf in jax.tree.leaves(one.moments)} == {"bfloat16", "int32"}
    assert one.peak_nbytes("recipe_bf16") > 8 * sum(one.weights.values())


def test_the_update_is_torchs() -> None:
    """Moments in bf16, whose arithmetic is in fp32."""
    key = jax.random.key(0)
    params = {"w": jax.random.normal(key, (32, 64), jnp.bfloat16)}
    weight = torch.nn.Parameter(torch.from_dlpack(params["w"]).clone())
    optimizer = torch.optim.AdamW([weight], lr=1e-2, fused=True)
    moments = training_jax._moments(params)
    update = jax.jit(training_jax.update)
    for step in range(1, 4):
        gradient = 0.02 * jax.random.normal(jax.random.fold_in(key, step), (32, 64), jnp.bfloat16)
        weight.grad = torch.from_dlpack(gradient).clone()
        optimizer.step()
        params, zeros, moments, norm = update(params, {"w": gradient}, moments, jnp.float32(1e-2))
        assert not zeros["w"].any()
        assert float(norm) == pytest.approx(float(weight.grad.float().norm()), rel=1e-5)
        assert float(norm) < training_jax.MAX_NORM
    close = partial(torch.testing.assert_close, rtol=2**-7, atol=1e-6)  # an ulp of bf16
    close(torch.from_dlpack(params["w"]), weight.detach())
    state = optimizer.state[weight]
    for got, want in ((moments[0].mu["w"], state["exp_avg"]), (moments[0].nu["w"], state["exp_avg_sq"])):
        close(torch.from_dlpack(got), want)
    large = jax.random.normal(key, (32, 64), jnp.bfloat16)
    _, _, moments, norm = update(params, {"w": large}, training_jax._moments(params), jnp.float32(1e-2))
    assert float(norm) > 40
    assert float(jnp.linalg.norm(moments[0].mu["w"].astype(jnp.float32))) == pytest.approx(0.1, rel=2e-3)  # 0.1 of 1


def test_tokens_whose_gradients_are_checked() -> None:
    """A dense operand of at most 4 GiB."""
    for name, expected in (("mixtral-8x7b", (2, 4096)), ("qwen3-30b-a3b", (1, 1024))):
        of = model_jax.sizes_of(sizes.MODELS[name].config(1))
        batches = jax_steps.checked_batches(of, jax_steps.BATCHES)
        assert (batches.sequences, batches.length) == expected
        assert (batches.micro_batches, batches.steps) == (1, 1)


def test_a_slow_ragged_dot_is_not_measured_in_the_whole_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a candidate whose gradients are wrong is an error; the others are measured."""
    monkeypatch.setattr(jax_steps, "MUCH_SLOWER", 0.0)
    few = {name: jax_steps.CANDIDATES[name] for name in ("recipe_bf16", "mxfp8", RAGGED_DOT)}
    monkeypatch.setattr(jax_steps, "CANDIDATES", few)
    monkeypatch.setitem(check.MIN_GRADIENT_DB, "mxfp8", 60.0)
    of = {"mixtral-8x7b": sizes.small(sizes.MODELS["mixtral-8x7b"])}
    with pytest.raises(RuntimeError, match=r"^models: mixtral-8x7b: gradients of mxfp8 in JAX$"):
        assert list(jax_steps.lines((), of, BATCHES)) == []  # the best bf16 alone
    said = capsys.readouterr()
    assert "dB; expected 60.0 or more" in said.err
    assert "ragged_dot is not measured in the whole model" in said.out
    assert "tokens/s: recipe_bf16 " in said.out


@pytest.mark.parametrize(("name", "products"), jax_steps.CANDIDATES.items())
def test_programs_for_a_gpu(name: str, products: Products) -> None:
    """What the candidates differ in, in the program of a micro-batch for Hopper."""
    with lower_for("sm_90"):
        text = training("qwen3-30b-a3b").trace(products).lower(lowering_platforms=("cuda",)).as_text()
    found = Counter(re.findall(r"mxep\.cuda\.(\w+)", text))
    # Of the experts two; of q, k, v and o their outputs and the gradients of their rows, which are quantized, too.
    expected = {"mxfp8": (2, 0), "mxfp8_dense": (2 + 8, 8)}.get(name, (0, 0))
    assert (found["grouped_mm_fold"], found["quantize_both_fold"]) == expected
    assert (found["grouped_mm_bf16"] > 0) == (name == "recipe_bf16")
    assert ("ragged_dot" in text) == (name == RAGGED_DOT)


PART_OF = [
    ("nvjet", "jit(micro_batch)/jvp(dense)/dot_general", "", "dense"),
    ("fold", "jit(micro_batch)/transpose(jvp(dense))/mxep_kernel", "mxep.cuda.quantize_both_fold", "dense"),
    ("fold", "jit(micro_batch)/jvp(mxep.experts)/mxep_kernel", "mxep.cuda.quantize_both_fold", "quantization"),
    ("mm", "jit(micro_batch)/jvp(mxep.experts)/mxep_kernel", "mxep.cuda.grouped_mm_fold", "products"),
    ("route", "jit(micro_batch)/jvp()/mxep_kernel", "triton_kernel_call", "router"),
    ("sort", "jit(micro_batch)/jvp()/mxep_kernel", "mxep.cuda.sort_by_expert", "dispatch"),
    ("nvjet", "jit(micro_batch)/jvp(mxep.route)/dot_general", "", "router"),
    ("nvjet", "jit(micro_batch)/transpose(jvp(experts))/ragged_dot_general", "", "products"),
    ("fusion", "jit(micro_batch)/jvp(experts)/jit(silu)/logistic", "", "activation"),
    ("fusion", "jit(micro_batch)/jvp(experts)/scatter-add", "", "dispatch"),
    ("fusion", "jit(micro_batch)/transpose(jvp(checkpoint))/rematted_computation/norms/mul", "", "norms"),
    ("cudnn", "jit(micro_batch)/jvp(attention)/dot_product_attention_fwd", "__cudnn$fmha", "attention"),
    ("nvjet", "jit(micro_batch)/head and loss/while/body/closed_call/jvp()/dot_general", "", "head and loss"),
    ("fusion", "jit(update)/clipping/reduce_sum", "", "clipping"),
    ("fusion", "jit(update)/optimizer/mul", "", "optimizer"),
    ("fusion", "jit(micro_batch)/add", "", "other"),
    ("memset", "", "", "other"),
]


@pytest.mark.parametrize(("kernel", "path", "target", "part"), PART_OF)
def test_parts(kernel: str, path: str, target: str, part: str) -> None:
    assert parts_jax.part_of(kernel, Operation(path, target)) == part


def test_kernels_of_a_gpu_are_of_its_streams() -> None:
    event = SimpleNamespace(name="nvjet", duration_ns=2000.0, stats=[("hlo_module", "jit_f"), ("hlo_op", "dot.3")])
    memset = SimpleNamespace(name="Memset", duration_ns=1000.0, stats=[])
    line = lambda name: SimpleNamespace(name=name, events=[event, memset])  # noqa: E731
    plane = lambda name, *lines: SimpleNamespace(name=name, lines=[line(of) for of in lines])  # noqa: E731
    profile = SimpleNamespace(planes=[plane("/host:CPU", "python"),
                                           plane("/device:GPU:0", "Stream #7(Compute)", "XLA Ops")])  # fmt: skip
    assert list(parts_jax.kernels_of(profile, True)) == [("nvjet", "dot.3", 2.0), ("Memset", "", 1.0)]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["models", "--frontend", "jax", "--only", "deepseek-v3"],
            "got deepseek-v3; allowed in models: mixtral",
        ),
        (
            ["models", "--frontend", "jax"],
            "section: got models; allowed: ep, ep_jax, ep_alternating, fsdp, this machine has no GPU",
        ),
        (["gpu", "models", "--frontend", "jax"], "--frontend: got section gpu; allowed: models"),
        (["--frontend", "jax"], "--frontend: got section gpu; allowed: models"),
    ],
)
def test_arguments(
    arguments: list[str], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results, "gpu_name", lambda: None)
    monkeypatch.setattr("sys.argv", ["benchmarks", *arguments])
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.setenv(name, "")  # written by main
    with pytest.raises(SystemExit):
        __main__.main()
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("module", [model_jax, parts_jax])
def test_examples_in_docstrings(module: Any) -> None:
    assert not doctest.testmod(module).failed
