"""The work of a training step, and the share of a GPU's peak that it reaches.

    FLOPs of a token = 6 * weights in its products + 6 * num_layers * seq_len * dim

6: a multiply-add forward and two backward. A product of weights counts the top_k experts of a token; the lookup in the
embedding is none. Attention: the scores and their product with the values are 2 seq_len dim multiply-adds per token and
layer without a mask, half of it with the causal one.
"""

from .config import Config

# Dense bf16 peak in FLOP/s, by the name of the device (NVIDIA's datasheets). The peak of FP8 is twice that. The share
# refers to bf16 in every recipe, since attention, router and head multiply bf16 or fp32.
BF16_PEAK = {"NVIDIA H100 80GB HBM3": 989e12, "NVIDIA H200": 989e12}


def weights_per_token(config: Config) -> int:
    """Weights that multiply one token: attention, router, its top_k experts, head.

    >>> weights_per_token(Config(dim=32, hidden_dim=64, num_layers=1, num_experts=4, top_k=2, vocab_size=256))
    24704
    """
    attention = 4 * config.dim**2
    experts = config.top_k * 3 * config.dim * config.hidden_dim
    return config.num_layers * (attention + config.dim * config.num_experts + experts) + config.dim * config.vocab_size


def flops_per_token(config: Config) -> int:
    """Forward and backward, attention included.

    >>> config = Config(dim=32, hidden_dim=64, num_layers=1, num_experts=4, top_k=2, vocab_size=256, seq_len=128)
    >>> flops_per_token(config) - 6 * weights_per_token(config)
    24576
    """
    return 6 * weights_per_token(config) + 6 * config.num_layers * config.seq_len * config.dim


def rates(config: Config, tokens_per_s: float, device: str, ranks: int) -> dict[str, float]:
    """TF/s of each GPU, and their share of the device's bf16 peak where the peak is known.

    >>> config = Config(dim=2048, hidden_dim=1408, num_layers=4, num_experts=32, top_k=4, seq_len=2048)
    >>> rates(config, 200_000.0, "NVIDIA H200", ranks=1)
    {'tflops': 267.7, 'of_bf16_peak': 0.271}
    """
    per_gpu = tokens_per_s * flops_per_token(config) / ranks
    found = {"tflops": round(per_gpu / 1e12, 1)}
    return found | ({"of_bf16_peak": round(per_gpu / BF16_PEAK[device], 3)} if device in BF16_PEAK else {})
