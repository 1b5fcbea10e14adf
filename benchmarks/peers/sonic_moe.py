"""SonicMoE's layer in bf16, forward and both gradients, on a Hopper GPU where the package `sonic-moe` is installed.

x (T, D) --bf16 router, top-k kernel--> p, experts (T, k) --GEMM that gathers its rows, SwiGLU at its end--> (T k, F)
         --GEMM--> (T k, D) --sum of each token's rows--> y (T, D)

Its GEMM reads w1 and w3 as one weight with alternating rows. Its kernels are compiled where they are called, and the
fastest of a few configurations runs: all its configurations take minutes.
"""

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .moe_layer import Weights, torch_experts

NAME = "sonic_moe"
Tensors = tuple[Tensor, ...]
# Tile rows and columns, and whether two warp groups alternate. Up to 0.1.0 SonicMoE chose among these by F alone:
# moe_config.py of December 2025. 128 x 192 is quack's default.
GEMM_TILES = ((128, 256, False), (128, 192, True))
SWIGLU_GRADIENT_TILES = ((128, 128, True), (128, 192, True))
# Columns, rows of a token and warps of the kernel that sums rows. Top-2 prunes the blocks of eight rows.
SUM_BLOCKS = ((1024, 2, 4), (2048, 2, 8), (512, 8, 4), (1024, 8, 8))
CONFIGURATIONS = "2 configurations per GEMM, at most 4 per sum of rows"


class SonicWeights(NamedTuple):
    """bf16 leaves: router (E, D), w13 (E, 2 F, D) with a row of w1 before each row of w3, w2 (E, D, F)."""

    router: Tensor
    w13: Tensor
    w2: Tensor


def has_sonic_moe() -> bool:
    return find_spec("sonicmoe") is not None


def version() -> str:
    return metadata.version("sonic-moe")


def sonic_weights(weights: Weights) -> SonicWeights:
    """Copies in SonicMoE's layout."""
    router, w1, w3, w2 = (w.detach() for w in weights)
    w13 = torch.stack((w1, w3), 2).flatten(1, 2)
    return SonicWeights(*(w.clone().requires_grad_() for w in (router, w13, w2)))


def plain_gradients(gradients: SonicWeights) -> Weights:
    """Views of the gradients in the layout of the plain layer."""
    router, w13, w2 = gradients
    return Weights(router, w13[:, ::2], w13[:, 1::2], w2)


def _gemm_configs(epilogue: str | None = None, tune_coop: bool = True) -> list[Any]:
    """In place of quack's function, which returns up to 44 configurations for Hopper."""
    config = import_module("quack.gemm_config").GemmConfig
    tiles = SWIGLU_GRADIENT_TILES if epilogue == "dgated" else GEMM_TILES
    return [
        config(tile_m=m, tile_n=n, pingpong=alternate, cluster_m=2, cluster_n=1, is_dynamic_persistent=False)
        for m, n, alternate in tiles
    ]


@cache
def _sonic_moe() -> Any:
    """The package, with few configurations and without processes that compile."""
    if "quack.gemm_interface" in sys.modules:
        raise RuntimeError("sonic_moe: got quack.gemm_interface imported before; expected it not imported")
    gemm_config: Any = import_module("quack.gemm_config")
    gemm_config._get_sm90_configs = _gemm_configs  # read when quack.gemm_interface is imported
    import_module("quack.autotuner").Autotuner._precompile = lambda *_, **__: None
    package = import_module("sonicmoe")
    sums = import_module("sonicmoe.functional.reduction_over_k_gather").token_gather_sum_kernel
    config = import_module("triton").Config
    sums.configs = [
        config({"BLOCK_H": columns, "BLOCK_K": rows}, num_warps=warps, num_stages=4)
        for columns, rows, warps in SUM_BLOCKS
    ]
    return package


def sonic_layer(x: Tensor, weights: SonicWeights, top_k: int) -> Tensor:
    """x (T, D) bf16 -> y (T, D)."""
    sonic = _sonic_moe()
    router, w13, w2 = weights
    # (2 F, D, E) and (D, F, E), views whose expert has the largest stride. 0, a stream, is read nowhere.
    y, _, _ = sonic.moe_TC_softmax_topk_layer(
        x, router, w13.permute(1, 2, 0), None, w2.permute(1, 2, 0), None, top_k, 0
    )
    return y


def sonic_step(x: Tensor, weights: Weights, dy: Tensor, top_k: int) -> Callable[[], Tensors]:
    """A step of SonicMoE's layer on copies of the weights: y and the gradients of x, router, w1, w3, w2."""
    leaves = sonic_weights(weights)

    def step() -> Tensors:
        y = sonic_layer(x, leaves, top_k)
        dx, *gradients = torch.autograd.grad(y, (x, *leaves), dy)
        return y.detach(), dx, *plain_gradients(SonicWeights(*gradients))

    return step


def reference_layer(x: Tensor, weights: Weights, top_k: int) -> Tensor:
    """The plain layer with SonicMoE's choice of experts: of equal bf16 logits, which are frequent, the lower index."""
    logits = F.linear(x, weights.router).float()
    logits, experts = (found[:, :top_k] for found in logits.sort(dim=-1, descending=True, stable=True))
    return torch_experts(x, experts, logits.softmax(-1), weights)
