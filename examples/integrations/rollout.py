"""Train a small model, write its experts as MXFP8 bytes, and generate with log-probabilities of the training forward.

    python examples/integrations/rollout.py --out runs/rollout        # on a GPU, or on a CPU

Reinforcement learning compares the log-probabilities of the generator and of the trainer. Here they are equal, bit for
bit: a token's output in `MoE` does not depend on the other tokens of the call, and every other op has equal shapes in
each forward of the whole, padded sequence. docs/determinism.md has the contracts.

With a KV cache a forward has one token. The program then prints the difference, and for each op how many rows differ
where this op alone has one row instead of all.

The recipe multiplies exactly ("compute"): dequantized bytes, quantized again, have equal values, and equal products.
"""

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mxep.torch_frontend import MoE, MXTensor, Recipe, RouterConfig
from torch import Tensor, nn

VOCAB, DIM, HIDDEN, EXPERTS, TOP_K, LENGTH, PROMPT = 128, 64, 96, 8, 2, 48, 8
EXPERT_WEIGHTS = ("moe.experts.w1", "moe.experts.w3", "moe.experts.w2")
RECIPE = Recipe.parse("mxfp8", compute="exact")


class Model(nn.Module):
    """One decoder layer, for one sequence (T,) at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(VOCAB, DIM), nn.Embedding(LENGTH, DIM)
        self.qkv, self.out, self.head = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM), nn.Linear(DIM, VOCAB)
        self.norm1, self.norm2 = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.moe = MoE(DIM, HIDDEN, EXPERTS, RouterConfig(TOP_K), recipe=RECIPE)

    def forward(self, tokens: Tensor, cache: list[Tensor] | None = None) -> Tensor:
        """Log-probabilities (T, VOCAB) of the next token. cache: keys and values of earlier tokens, extended here."""
        return self.steps(tokens, cache)["log_softmax"].log_softmax(-1)

    def steps(self, tokens: Tensor, cache: list[Tensor] | None = None) -> dict[str, Tensor]:
        """The input of each op, and k and v."""
        seen: dict[str, Tensor] = {}
        first = len(cache[0]) if cache else 0
        x = self.embed(tokens) + self.positions.weight[first : first + len(tokens)]
        seen["norm1"] = x
        seen["qkv"] = self.norm1(x)
        q, *kv = self.qkv(seen["qkv"]).chunk(3, -1)
        if cache is not None:
            kv = [torch.cat([old, new]) for old, new in zip(cache, kv, strict=True)] if cache else kv
            cache[:] = kv
        seen["attention"], seen["k"], seen["v"] = q, *kv
        seen["out"] = attention(q, *kv)
        seen["norm2"] = x = x + self.out(seen["out"])
        seen["moe"] = self.norm2(x)
        seen["head"] = x = x + self.moe(seen["moe"])[0]
        seen["log_softmax"] = self.head(x)
        return seen


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention of the last len(q) tokens, one head."""
    mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device).tril(len(k) - len(q))
    return F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=mask[None])[0]


def train(model: Model, tokens: Tensor, steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(steps):
        first = step * LENGTH % (len(tokens) - LENGTH - 1)
        loss = F.nll_loss(model(tokens[first : first + LENGTH]), tokens[first + 1 : first + LENGTH + 1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step in (0, steps - 1):
            print(f"step {step}: loss {loss.item():.3f}")


def write(model: Model, path: Path) -> None:
    """The experts' weights as bytes and scales, the other weights as they are."""
    state: dict[str, Any] = dict(model.state_dict())
    for name in EXPERT_WEIGHTS:
        quantized = MXTensor.quantize(state[name])
        state[name] = {"q": quantized.q, "sf": quantized.sf}
    torch.save(state, path)


def read(path: Path, device: torch.device) -> Model:
    state = torch.load(path, map_location=device, weights_only=True)
    for name in EXPERT_WEIGHTS:
        state[name] = MXTensor(state[name]["q"], state[name]["sf"], torch.float32).dequantize()
    model = Model().to(device)
    model.load_state_dict(state)
    return model.eval()


@torch.no_grad()
def generate(model: Model, prompt: Tensor, cached: bool) -> tuple[Tensor, Tensor]:
    """A sequence of LENGTH tokens and the log-probability of each token after the prompt; greedy."""
    tokens, chosen = F.pad(prompt, (0, LENGTH - len(prompt))), []
    cache: list[Tensor] = []
    for position in range(len(prompt), LENGTH):
        if cached:
            new = tokens[len(cache[0]) if cache else 0 : position]
            of_next = model(new, cache)[-1]
        else:
            of_next = model(tokens)[position - 1]  # causal: the padding after it has no effect
        tokens[position] = of_next.argmax()
        chosen.append(of_next.max())
    return tokens, torch.stack(chosen)


@torch.no_grad()
def rows_that_differ(model: Model, tokens: Tensor) -> dict[str, tuple[int, float]]:
    """For each op, of one row in place of all and with equal inputs: how many rows differ, and the largest change."""
    seen = model.steps(tokens)
    k, v = seen["k"], seen["v"]
    by_rows: dict[str, Callable[[Tensor], Tensor]] = {
        "norm1": model.norm1, "qkv": model.qkv, "out": model.out, "norm2": model.norm2,
        "moe": lambda x: model.moe(x)[0], "head": model.head, "log_softmax": lambda x: x.log_softmax(-1),
    }  # fmt: skip
    found = {}
    for name in ("norm1", "qkv", "attention", "out", "norm2", "moe", "head", "log_softmax"):
        x = seen[name]
        if name == "attention":
            whole, rows = attention(x, k, v), [attention(x[t : t + 1], k[: t + 1], v[: t + 1]) for t in range(len(x))]
        else:
            whole, rows = by_rows[name](x), [by_rows[name](x[t : t + 1]) for t in range(len(x))]
        change = (torch.cat(rows) - whole).abs()
        found[name] = int(change.any(1).sum()), change.max().item()
    return found


def main(argv: Sequence[str] | None = None) -> None:
    flags = argparse.ArgumentParser(prog="rollout.py", description="Equal log-probabilities in training and rollout.")
    flags.add_argument("--out", type=Path, required=True, help="folder of the written weights")
    flags.add_argument("--steps", type=int, default=30, metavar="N")
    args = flags.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    torch.manual_seed(0)
    model = Model().to(device)
    text = torch.tensor(list(Path(__file__).read_bytes()), device=device).clamp(max=VOCAB - 1)
    train(model, text, args.steps)
    write(model, args.out / "model.pt")
    generator = read(args.out / "model.pt", device)

    tokens, generated = generate(generator, text[:PROMPT], cached=False)
    after = range(PROMPT - 1, LENGTH - 1)
    trained = model(tokens)[after, tokens[PROMPT:]]
    assert trained.requires_grad
    assert torch.equal(trained, generated), (trained - generated).abs().max()
    print(f"whole sequences: {len(generated)} log-probabilities are equal to the training forward, bit for bit")

    same, cached = generate(generator, text[:PROMPT], cached=True)
    of_same = model(same)[after, same[PROMPT:]]
    print(f"KV cache: the largest difference of a log-probability is {(of_same - cached).abs().max().item():.1e}")
    print(f"{'one row instead of all':24}{'rows that differ':>18}{'largest':>10}")
    for name, (rows, largest) in rows_that_differ(generator, tokens).items():
        print(f"{name:24}{rows:>12} of {LENGTH}{largest:10.1e}")


if __name__ == "__main__":
    main()
