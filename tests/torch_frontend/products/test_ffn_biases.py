"""The feed-forward with biases and a clamped SwiGLU: bit for bit the functions it is made of, and fp64 autograd."""

import pytest
import torch
from mxep.torch_frontend import SwiGLU, grouped_mm, grouped_swiglu_ffn, swiglu
from torch import Tensor

from ...compare import sqnr_db
from .test_ffn import HIDDEN, ROWS, RUNS, D, ends, operands, randn

CLAMPED = SwiGLU(alpha=1.702, limit=1.5, offset=1.0)  # a limit that one value in ten exceeds
GPT_OSS = SwiGLU(alpha=1.702, limit=7.0, offset=1.0)
BIASES = {"b1": HIDDEN, "b3": HIDDEN, "b2": D}
DOUT = randn(ROWS, D, seed=7).bfloat16()


def with_biases(dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    drawn = {name: randn(3, n, seed=20 + i).to(dtype) for i, (name, n) in enumerate(BIASES.items())}
    return operands() | {name: b.requires_grad_() for name, b in drawn.items()}


def run(inputs: dict[str, Tensor], activation: SwiGLU = CLAMPED, **options) -> Tensor:
    others = {name: t for name, t in inputs.items() if name not in BIASES}
    b1, b3, b2 = (inputs.get(name) for name in BIASES)
    return grouped_swiglu_ffn(**others, group_ends=ends(), biases=(b1, b3, b2), activation=activation, **options)


def gradients(out: Tensor, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    leaves = {name: t for name, t in inputs.items() if t.requires_grad}
    return dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), DOUT), strict=True))


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("recipe", RUNS)
def test_fusing_changes_no_bit(recipe: str, pad: bool) -> None:
    """Without prob; of x, whose gradient is rounded once instead of three times, in fp32."""
    inputs = {name: t for name, t in with_biases().items() if name != "prob"}
    options = {"recipe": RUNS[recipe], "pad_token_groups": pad}

    def composed(x, w1, w3, w2, b1, b3, b2):
        gate, up = (grouped_mm(x, w, ends(), bias=b, **options) for w, b in ((w1, b1), (w3, b3)))
        return grouped_mm(swiglu(gate, up, activation=CLAMPED), w2, ends(), bias=b2, **options)

    got, want = run(inputs, **options), composed(**inputs)
    assert torch.equal(got, want)
    of, wanted = gradients(got, inputs), gradients(want, inputs)
    assert sqnr_db(of.pop("x"), wanted.pop("x")) > 49  # measured: 50.4
    for name, value in of.items():
        assert value.dtype == inputs[name].dtype
        assert torch.equal(value, wanted[name]), name


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "mxfp8 folded"])
@pytest.mark.parametrize("trained", [("b1",), ("b3", "w2"), ("b2",), ("prob",), ("w1", "b1"), ("x", "b3")])
def test_frozen_inputs_get_nothing_and_the_rest_the_same(recipe: str, trained: tuple[str, ...]) -> None:
    everything, inputs = with_biases(), with_biases()
    wanted = gradients(run(everything, recipe=RUNS[recipe]), everything)
    for name, t in inputs.items():
        t.requires_grad_(name in trained)
    got = gradients(run(inputs, recipe=RUNS[recipe]), inputs)
    assert set(got) == set(trained)
    assert all(torch.equal(value, wanted[name]) for name, value in got.items())


def test_a_bias_for_all_groups_gets_the_sum_of_theirs() -> None:
    inputs = with_biases(torch.float32)
    shared = inputs | {name: inputs[name][0].detach().clone().requires_grad_() for name in BIASES}
    each = shared | {name: shared[name].detach().expand(3, -1).clone().requires_grad_() for name in BIASES}
    of, wanted = (gradients(run(given), given) for given in (shared, each))
    for name in BIASES:
        torch.testing.assert_close(of[name], wanted[name].sum(0), rtol=1e-6, atol=1e-6)


def test_whole_graph() -> None:
    torch._dynamo.reset()
    inputs = with_biases()
    compiled = torch.compile(lambda given: run(given), fullgraph=True, backend="aot_eager")
    want, got = run(inputs), compiled(inputs)
    assert torch.equal(got, want)
    of, wanted = gradients(got, inputs), gradients(want, inputs)
    assert all(torch.equal(value, wanted[name]) for name, value in of.items())


BAD = {
    "two": (TypeError, "biases: got 2 items; allowed: None, or a tuple", {"biases": (None, None)}),
    "list": (TypeError, "biases: got list; allowed: None, or a tuple", {"biases": [None, None, None]}),
    "activation": (TypeError, "activation: got 'gelu'; allowed: a SwiGLU", {"activation": "gelu"}),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_input(name: str) -> None:
    error, message, options = BAD[name]
    x, w1, w3, w2, _ = (t.detach() for t in operands().values())
    with pytest.raises(error, match=message):
        grouped_swiglu_ffn(x, w1, w3, w2, ends(), **options)
