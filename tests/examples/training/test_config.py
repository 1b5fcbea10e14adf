"""Schedule, initial weights, their names, and the sizes of the presets."""

import doctest
import math

import numpy as np
import pytest

from examples.training import config, throughput
from examples.training.config import PRESETS, Config, is_decayed, is_expert, learning_rates, rope_tables
from examples.training.model_torch import Transformer
from examples.training.throughput import flops_per_token, weights_per_token
from examples.training.weights import initial_weights, weight_shapes

TINY = PRESETS["tiny"]


def test_learning_rates_warm_up_and_decay_along_a_cosine():
    rates = learning_rates(Config(steps=14, warmup_steps=4, peak_lr=1.0, final_lr=0.2))
    np.testing.assert_allclose(rates[:5], [0.25, 0.5, 0.75, 1.0, 1.0])
    assert rates[9] == pytest.approx(0.6)  # middle of the cosine
    assert rates[-1] == pytest.approx(0.2 + 0.4 * (1 + np.cos(0.9 * np.pi)))
    assert (np.diff(rates[4:]) < 0).all()


def test_the_final_rate_holds_after_the_schedule():
    rates = learning_rates(Config(steps=20, schedule_steps=14, warmup_steps=4, peak_lr=1.0, final_lr=0.2))
    np.testing.assert_array_equal(
        rates[:14], learning_rates(Config(steps=14, warmup_steps=4, peak_lr=1.0, final_lr=0.2))
    )
    np.testing.assert_allclose(rates[14:], 0.2)


def test_rope_is_a_rotation_by_position():
    cos, sin = rope_tables(TINY)
    assert cos.shape == sin.shape == (TINY.seq_len, TINY.head_dim // 2)
    np.testing.assert_allclose(cos[:, 0] + 1j * sin[:, 0], np.exp(1j * np.arange(TINY.seq_len)), atol=1e-6)
    np.testing.assert_allclose(cos**2 + sin**2, 1, atol=1e-6)


def test_names_and_shapes_match_the_torch_model():
    model = Transformer(TINY, "bf16")
    assert {n: tuple(p.shape) for n, p in model.named_parameters()} == weight_shapes(TINY)
    assert set(model.state_dict()) == set(weight_shapes(TINY))


def test_initial_weights_depend_on_the_seed_alone():
    small = PRESETS["small"]
    weights, again = initial_weights(small), initial_weights(small)
    assert all(np.array_equal(weights[n], again[n]) for n in weights)
    assert weights["blocks.0.attn.qkv.weight"].std() == pytest.approx(small.dim**-0.5, rel=0.02)
    assert weights["embed.weight"].std() == pytest.approx(1, rel=0.02)
    assert weights["head.weight"].std() == pytest.approx(0.02, rel=0.02)
    assert (weights["norm.weight"] == 1).all()
    assert not np.array_equal(weights["head.weight"], initial_weights(Config(seed=1))["head.weight"])


def test_experts_are_sharded_and_matrices_are_decayed():
    shapes = weight_shapes(TINY)
    assert {n.rsplit(".", 1)[-1] for n in shapes if is_expert(n)} == {"w1", "w2", "w3"}
    assert {n for n, shape in shapes.items() if not is_decayed(shape)} == {n for n in shapes if "norm" in n}


@pytest.mark.parametrize("module", [config, throughput])
def test_examples_in_docstrings(module):
    results = doctest.testmod(module)
    assert results.attempted
    assert not results.failed


@pytest.mark.parametrize("name", PRESETS)
def test_a_token_meets_all_matrices_but_the_embedding_and_the_experts_of_others(name):
    preset = PRESETS[name]
    sizes = {weight: math.prod(shape) for weight, shape in weight_shapes(preset).items() if is_decayed(shape)}
    idle = sum(n for weight, n in sizes.items() if is_expert(weight)) * (1 - preset.top_k / preset.num_experts)
    assert weights_per_token(preset) == sum(sizes.values()) - sizes["embed.weight"] - idle


def test_h200_has_a_billion_weights_of_which_a_token_meets_a_fifth():
    h200 = PRESETS["h200"]
    assert sum(map(math.prod, weight_shapes(h200).values())) == 982_476_288
    assert weights_per_token(h200) == 189_333_504
    # A causal token attends to seq_len / 2 positions on average: scores and values, forward and twice backward.
    attention = 3 * 2 * 2 * h200.num_layers * h200.dim * h200.seq_len / 2
    assert flops_per_token(h200) == 6 * weights_per_token(h200) + attention
