"""The README's table of results: bf16 and MXFP8, each row the range over the sizes that are stored."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ..cases.shapes import H200
from .tables.table_ep import TORCH_BEST
from .tables.table_models import OURS, is_model
from .tables.table_moe_layer import PLAIN, in_a_row
from .tables.table_sonic_moe import SONIC, is_against_sonic

Row = dict[str, Any]
HEAD = ("forward and backward", "bf16", "mxep", "bf16 / mxep", "dB", "n", "card; commit, date")
RECIPE = "mxfp8"
PRODUCT = {**H200.products.large[0]._asdict(), "recipe": RECIPE}
"""131072 rows, 8 experts of 7168 x 2048: one rank's share of a layer as large as DeepSeek-V3's."""
RANKS = 2
"""The most GPUs whose lines are of the newest kernels."""
HOWS = {
    "peer memory": "`PeerMemory`",
    "peer memory, in a graph": "`PeerMemory` in a CUDA graph",
    "jit": "JAX, all-to-all, relative to its recipe `bf16`",
    "jit, peer memory, capacity": "JAX, `PeerMemory` with a capacity, relative to its recipe `bf16`",
}
LAYER_KERNELS = (
    "combine",
    "fold",
    "grouped_gemm",
    "permute",
    "quantize",
    "router",
    "routing",
    "scale_layout",
    "swiglu",
)
PRODUCT_KERNELS = ("fold", "grouped_gemm", "quantize", "scale_layout")
EP_KERNELS = (*LAYER_KERNELS, "peer")


class Headline(NamedTuple):
    """A row of the table. kernels: the folders of core_kernels that the lines time."""

    what: str
    rows: list[Row]
    kernels: tuple[str, ...]


def sizes_of(case: Row) -> tuple[int, ...]:
    return tuple(case[name] for name in ("tokens", "dim", "hidden_dim", "num_experts", "top_k"))


def _layer_lines(rows: Sequence[Row]) -> list[Row]:
    """Of random routing, weights quantized in every step, without graphs."""
    return [row for row in rows if row["op"] == "moe_layer_fwd_bwd" and row["case"]["recipe"] == RECIPE
            and not {"weights", "launch", "routing"} & row["case"].keys()]  # fmt: skip


def layers(rows: Sequence[Row]) -> list[Row]:
    """Back-to-back steps in PyTorch against plain bf16, of each size that is stored."""
    of = _layer_lines(rows)
    found = (in_a_row([row for row in of if sizes_of(row["case"]) == sizes]) for sizes in H200.moe_layers)
    return [row for row in found if row]


def bf16_layers(layer: Row, rows: Sequence[Row]) -> list[Row]:
    """The lines of a layer in PyTorch against every bf16 peer, timed in the same rounds."""
    return [row for row in _layer_lines(rows) if row["frontend"] == "torch" and row["case"] == layer["case"]
            and row["commit"] == layer["commit"] and row["case"].get("clock")]  # fmt: skip


def _best_bf16(rows: Sequence[Row]) -> list[Row]:
    """Per size the line against the fastest bf16 peer; [] unless every size has more than the plain one."""
    of = [bf16_layers(layer, rows) for layer in layers(rows)]
    return [min(peers, key=lambda row: row["peer_us"]) for peers in of] if all(len(peers) > 1 for peers in of) else []


def _in_jax(rows: Sequence[Row]) -> list[Row]:
    return [row for row in _layer_lines(rows) if row["frontend"] == "jax" and row["peer"] == PLAIN
            and sizes_of(row["case"]) in H200.moe_layers]  # fmt: skip


def _against_sonic(rows: Sequence[Row]) -> list[Row]:
    return [row for row in rows if is_against_sonic(row["op"]) and row["peer"] == SONIC]


def _models(rows: Sequence[Row]) -> list[Row]:
    """Whole training steps of models on one GPU, in both frontends."""
    return [row for row in rows if is_model(row["op"]) and row["case"]["gpus"] == 1
            and row["case"]["candidate"] == OURS]  # fmt: skip


def _product(rows: Sequence[Row]) -> list[Row]:
    """Forward and both gradients of a grouped product, with all quantization."""
    of = [row for row in rows if row["op"] == "grouped_mm_autograd" and row["peer"] == "torch_grouped_mm_bf16"]
    return [row for row in of if {**row["case"], "implementation": ""} == {**PRODUCT, "implementation": ""}]


def _parallel(rows: Sequence[Row], how: str) -> list[Row]:
    """A layer on `RANKS` GPUs, of each size."""
    return [row for row in rows if row["op"] == "ep_layer_fwd_bwd" and row["case"]["ranks"] == RANKS
            and row["case"]["recipe"] == RECIPE and row["case"]["routing"] == "balanced" and row["case"]["how"] == how
            and row["peer"] != TORCH_BEST and sizes_of(row["case"]) in H200.moe_layers]  # fmt: skip


def headlines(rows: Sequence[Row], parallel: Sequence[Row]) -> Iterator[Headline]:
    """The rows of the table that have lines. parallel: the lines of several GPUs."""
    found = [
        Headline("MoE layer, plain bf16", layers(rows), LAYER_KERNELS),
        Headline("MoE layer, best bf16", _best_bf16(rows), LAYER_KERNELS),
        Headline("MoE layer of SonicMoE in bf16", _against_sonic(rows), LAYER_KERNELS),
        Headline("training step of a model, best bf16", _models(rows), LAYER_KERNELS),
        Headline("MoE layer in JAX, plain bf16 in PyTorch", _in_jax(rows), LAYER_KERNELS),
        Headline("grouped GEMM with its quantization, single calls", _product(rows), PRODUCT_KERNELS),
        *(Headline(f"{RANKS} GPUs, {name}", _parallel(parallel, how), _kernels(how)) for how, name in HOWS.items()),
    ]
    return (headline for headline in found if headline.rows)


def _kernels(how: str) -> tuple[str, ...]:
    return EP_KERNELS if "peer memory" in how else LAYER_KERNELS


def _range(values: Sequence[float], form: str) -> str:
    low, high = (format(f(values), form) for f in (min, max))
    return low if low == high else f"{low} to {high}"


def _amounts(what: str, of: Headline, bf16: Sequence[float], ours: Sequence[float]) -> tuple[str, ...]:
    """A row of the table."""
    db = [row["error"].get("peer_sqnr_db", row["error"]["sqnr_db"]) for row in of.rows]
    runs = dict.fromkeys(f"{r['hardware']}; {r['commit'][:7]}, {r['date']}" for r in of.rows)
    ratio = _range([a / b for a, b in zip(bf16, ours, strict=True)], ".2f")
    n = _range([row["n"] for row in of.rows], "d")
    return what, _range(bf16, ".1f"), _range(ours, ".1f"), f"{ratio}x", _range(db, ".1f"), n, "<br>".join(runs)


def _cells(of: Headline) -> Iterator[tuple[str, ...]]:
    """The row of times; of a layer against plain bf16 peak memory and joules too."""
    yield _amounts(f"{of.what}, ms", of, *([row[key] / 1e3 for row in of.rows] for key in ("peer_us", "us")))
    if not of.what.startswith("MoE layer,"):
        return
    for what, key, unit in (("peak memory, GiB", "peak_nbytes", 2**30), ("energy of a step, J", "joules", 1)):
        if all(row.get(key) and row.get(f"peer_{key}") for row in of.rows):
            yield _amounts(f"{of.what}: {what}", of, *([r[k] / unit for r in of.rows] for k in (f"peer_{key}", key)))


def table(rows: Sequence[Row], parallel: Sequence[Row]) -> str:
    """The table and what its words mean. "" without a layer."""
    if not layers(rows):
        return ""
    cells = [row for headline in headlines(rows, parallel) for row in _cells(headline)]
    sizes = "; ".join("/".join(map(str, sizes)) for sizes in H200.moe_layers)
    sonic = len(_against_sonic(rows))
    few = f" SonicMoE: {sonic} of the sizes, [few configurations](docs/results/performance.md)." if sonic else ""
    named = dict.fromkeys(f"{row['case']['model']} ({row['case']['layers']} layers)" for row in _models(rows))
    models = f" Models, in PyTorch or JAX: {', '.join(named)}." if named else ""
    return "\n".join([
        *(f"| {' | '.join(row)} |" for row in (HEAD, ("---",) * len(HEAD), *cells)),
        "",
        f"A range is over the sizes (tokens/D/F/experts/k) {sizes}; on {RANKS} GPUs over the first two, tokens per "
        "GPU, bf16 with NCCL's all-to-alls. Layers: back-to-back steps; JAX's all-to-all: two calls. Medians of n "
        "samples, both sides alternate in one run. Plain bf16 is a layer [without fused passes]"
        "(benchmarks/peers/moe_layer.py); best bf16 is the faster of it and recipe `bf16` of mxep. dB: SQNR of the "
        "worst of output and gradients relative to bf16, of a model of the weights' gradients."
        f"{few}{models}",
    ])  # fmt: skip
