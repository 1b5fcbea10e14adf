"""Products of rows with outliers: scales by row, balanced, stepped, blockwise, and bf16, in turn on one GPU; the folds
of x; and the layer, of normal data, with each fold and in bf16.

    python -m benchmarks.outliers --commit <40 digits> --out FILE

    x, w bf16, a kind of data --quantize, fold--> operands --product--> error bound, dB from full precision --> rate

Lines of JSON: `ratio` is the time of the product, or the fold, with one scale per row divided by its own; of a layer,
the time of the plain bf16 layer divided by its own. `of_normal` is the time of the product of normal data with one
scale per row divided by its own: outlier channels make that product flush values, and zeros take less power. `zeros`
is the share of them in x and in w. `us` and these ratios are of launches between pauses, `in_a_row` of launches that
follow each other and keep the card at its power limit. `sqnr_db` is that of 256 rows against bf16 operands multiplied
in fp64. `apart`: the share of 32 rows and 128 of K of x with a block apart.
"""

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch
from mxep.core_kernels.fold.report import share_apart
from mxep.core_kernels.formats import WEIGHT_HEADROOM
from mxep.core_kernels.recipe import FOLDED, Recipe
from mxep.torch_frontend import ops
from mxep.torch_frontend.balanced import GroupedRows, balanced
from mxep.torch_frontend.weights import Balanced
from torch import Tensor

from .cases.error_check import FP8_CHAIN, rows_error
from .cases.moe_layer import check, layer_inputs, our_torch_layer, plain_torch_layer, torch_programs
from .cases.shapes import H200, MoELayer
from .figures.device_timing import Sample, events, in_a_row, torch_end
from .figures.results import Run, gpu_name
from .peers.grouped_gemm import grouped_bf16

SIZES = ((131072, 2048, 7168, 32), (32768, 4096, 14336, 8))
"""M, N, K and G of the products of gate or up, and of down."""
CHANNELS = slice(992, 1024)
ROWS = 256
NORMAL, BALANCED = "grouped_mm_fold, normal data", "grouped_mm_fold, balanced"
Operand = tuple[Tensor, Tensor]


def _channels(x: Tensor, w: Tensor, octaves: int, both: bool = True) -> None:
    x[:, CHANNELS] *= 2.0**octaves
    if both:
        w[..., CHANNELS] *= 2.0**-octaves


def _scattered(x: Tensor, w: Tensor) -> None:
    every = x.shape[1] // 32
    x[:, ::every] *= 2.0**14
    w[..., ::every] *= 2.0**-14


def _student(x: Tensor, w: Tensor) -> None:
    x.copy_(torch.distributions.StudentT(torch.tensor(3.0, device=x.device)).sample(x.shape))


def _half(x: Tensor, w: Tensor) -> None:
    x[:, x.shape[1] // 2 :] *= 2.0**8


KINDS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "normal": lambda x, w: None,
    "channels 2^12": partial(_channels, octaves=12),
    "channels 2^14": partial(_channels, octaves=14),
    "channels 2^16": partial(_channels, octaves=16),
    "channels 2^16, of x alone": partial(_channels, octaves=16, both=False),
    "channels 2^14 in 32 blocks": _scattered,
    "Student's t, 3 degrees": _student,
    "half of K 2^8": _half,
}


def _normal(size: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    m, n, k, g = size
    w = torch.randn(g, n, k, device="cuda") / k**0.5
    return torch.randn(m, k, device="cuda", dtype=torch.bfloat16), w.bfloat16()


def _by_row(mx: Operand, mx_w: Operand) -> tuple[Operand, Operand]:
    return ops.fold_rows(*mx), ops.fold_rows(*mx_w, WEIGHT_HEADROOM)


def _zeros(codes: Tensor) -> float:
    return round(((codes[:ROWS] & 0x7F) == 0).float().mean().item(), 4)


def compare(kind: str, size: tuple[int, int, int, int], samples: int):
    """One dict per product, and per fold."""
    m, n, k, g = size
    normal = _by_row(*map(ops.quantize_row, _normal(size)))
    x, w = _normal(size)
    KINDS[kind](x, w)
    ends = (torch.arange(1, g + 1, device="cuda") * (m // g)).int()
    full = x[:ROWS].double() @ w[0].double().T
    mx, mx_w = ops.quantize_row(x), ops.quantize_row(w)
    by_row = _by_row(mx, mx_w)
    steps = ops.fold_rows_stepped(*mx), ops.fold_rows_stepped(*mx_w)
    blocks = ops.quantize_blockwise(x), ops.quantize_squares(w)
    rows = GroupedRows(mx[0], mx[1], ends)
    own, other = rows.level(), GroupedRows.of_weights(*mx_w).level()
    even, (even_w,) = balanced(Balanced(*mx), [Balanced(*mx_w)], ends)
    candidates = {
        "grouped_mm_fold": lambda: ops.grouped_mm_fold(*by_row[0], *by_row[1], ends),
        BALANCED: lambda: ops.grouped_mm_fold(*even, *even_w, ends),
        "grouped_mm_fold_stepped": lambda: ops.grouped_mm_fold_stepped(*steps[0], *steps[1], ends),
        "grouped_mm_blockwise": lambda: ops.grouped_mm_blockwise(*blocks[0], *blocks[1], ends),
        "torch_grouped_mm_bf16": lambda: grouped_bf16(x, w, ends),
    }
    timed = candidates | {NORMAL: lambda: ops.grouped_mm_fold(*normal[0], *normal[1], ends)}
    per_block = tuple((q, sf.mT.contiguous()) for q, _, sf, _ in steps)
    errors = {
        "grouped_mm_fold": rows_error((candidates["grouped_mm_fold"](),), *by_row, ends, FP8_CHAIN),
        BALANCED: rows_error((candidates[BALANCED](),), even, even_w, ends, FP8_CHAIN),
        "grouped_mm_fold_stepped": rows_error(
            (candidates["grouped_mm_fold_stepped"](),), per_block[0], per_block[1], ends, FP8_CHAIN
        ),
    }
    db = {}
    for name, run in candidates.items():
        noise = run()[:ROWS].double() - full
        db[name] = (10 * torch.log10(full.square().sum() / noise.square().sum())).item()
    paused, following = (
        events(timed, samples),
        in_a_row({name: (run, torch_end("cuda")) for name, run in timed.items()}),
    )

    def figures(times: Mapping[str, Sample], name: str) -> dict[str, float]:
        ratio, of_normal = (round(times[base].us / times[name].us, 3) for base in ("grouped_mm_fold", NORMAL))
        return {"us": times[name].us, "spread": times[name].spread, "ratio": ratio, "of_normal": of_normal}

    for name in candidates:
        yield {
            "op": name, "M": m, "N": n, "K": k, "G": g, "data": kind, **figures(paused, name),
            "tflops": round(2 * m * n * k / paused[name].us / 1e6), "in_a_row": figures(following, name),
            "zeros": [_zeros(by_row[0][0]), _zeros(by_row[1][0][0])], "sqnr_db": round(db[name], 1),
            "apart": round(share_apart(steps[0][3].cpu().numpy(), k // 32, m), 4), "error": errors.get(name),
        }  # fmt: skip
    ways = {
        "fold_rows": lambda: ops.fold_rows(*mx),
        "fold_rows_balanced": lambda: rows.folded(own, other),
        "span_levels, group_levels": rows.level,
        "fold_rows_stepped": lambda: ops.fold_rows_stepped(*mx),
    }
    folds = events(ways, samples)
    for name, sample in folds.items():
        yield {
            "op": name, "M": m, "K": k, "data": kind, "us": sample.us, "spread": sample.spread,
            "ratio": round(folds["fold_rows"].us / sample.us, 3),
        }  # fmt: skip


def layers(shape: MoELayer, samples: int):
    """One dict per layer, forward and backward, of equal weights that are quantized in every step."""
    op = "moe_layer_fwd_bwd"
    inputs = {name: layer_inputs(shape, "cuda", Recipe.parse("mxfp8", compute=name)) for name in FOLDED}
    programs = {name: torch_programs(our_torch_layer(of), of)[op] for name, of in inputs.items()}
    reference = torch_programs(plain_torch_layer(inputs["fold"], torch.float32), inputs["fold"])[op]()
    errors = {name: check(of, reference, programs[name]()) for name, of in inputs.items()}
    del reference
    programs["plain_torch_bf16"] = torch_programs(plain_torch_layer(inputs["fold"]), inputs["fold"])[op]
    times = events(programs, samples)
    for name, sample in times.items():
        yield {
            "op": op, **shape._asdict(), "layer": name, "us": sample.us, "spread": sample.spread,
            "ratio": round(times["plain_torch_bf16"].us / sample.us, 3), "error": errors.get(name),
        }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.outliers")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--samples", type=int, default=12)
    args = parser.parse_args()
    torch.manual_seed(0)
    run = asdict(Run(f"1x {gpu_name()}", args.commit))
    measurements = [partial(compare, kind, size, args.samples) for size in SIZES for kind in KINDS]
    measurements += [partial(layers, shape, args.samples) for shape in H200.moe_layers]
    with args.out.open("a") as file:
        for measure in measurements:
            for line in measure():
                file.write(json.dumps({**run, **line}) + "\n")
                print({name: value for name, value in line.items() if name != "error"}, flush=True)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
