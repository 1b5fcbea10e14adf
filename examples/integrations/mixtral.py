"""Mixtral of Hugging Face transformers in four stages, sharded, with weights from a checkpoint or from a seed.

    stage   layer of experts                                  experts           products
    0       transformers' own, a loop over all experts        on every rank     bf16, two per expert
    1       `MoE`, a loop over the experts of a rank          over "ep"         bf16, three per expert
    2       `MoE`, torch's grouped product                    over "ep"         bf16, three
    3       `MoE`, the fused feed-forward                     over "ep"         MXFP8, three; MXFP8 rows between ranks,
                                                                              on GPUs overlapped with GEMMs

    meta model --replace the layers--> --shard: FSDP2, and `shard_moe` from stage 1--> --weights--> on the devices

Weights are fp32 and are multiplied in bf16 or MXFP8. Every stage has the same ones.
"""

import json
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from mxep.torch_frontend import ExpertParallel, GroupedExperts, MoE, PeerMemory, RouterConfig, shard_moe, swiglu
from mxep.torch_frontend.exchange.shards import sharded
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, MixtralConfig, MixtralForCausalLM
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer

STAGES = (
    "loop over experts, no expert parallelism",
    "expert parallelism, loop over experts",
    "expert parallelism, grouped product in bf16",
    "expert parallelism, MXFP8, fused feed-forward",
)
SIZES: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 256,
        "num_attention_heads": 4, "num_key_value_heads": 2,
    },
    "layer": {},  # the defaults of MixtralConfig are the sizes of Mixtral 8x7B
}  # fmt: skip
SEQUENCES = {"tiny": (2, 128), "layer": (2, 4096)}  # of a rank, and their length
WEIGHT_NBYTES = 16  # fp32: weight, gradient and the two moments of AdamW


# --- the experts -------------------------------------------------------------------------------------------


def grouped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """Each group of rows times the transpose of its expert's matrix, in one call of torch."""
    return F.grouped_mm(x, w.mT, offs=ends)


def looped(x: Tensor, w: Tensor, ends: Tensor) -> Tensor:
    """The same, one product per expert. The host waits for the ends."""
    first, parts = 0, []
    for matrix, last in zip(w.unbind(), ends.tolist(), strict=True):
        parts.append(F.linear(x[first:last], matrix))
        first = last
    parts.append(x.new_zeros(x.shape[0] - first, w.shape[1]))  # rows past the last group
    return torch.cat(parts)


class PlainExperts(GroupedExperts):
    """The experts of stages 1 and 2: three products by `product`, with SwiGLU in one kernel between them."""

    product: Callable[[Tensor, Tensor, Tensor], Tensor] = staticmethod(grouped)

    def forward(self, groups_PD: Any, padded_counts: Tensor, probs_P: Any = None, quantized: Any = None) -> Tensor:
        ends = padded_counts.cumsum(0, dtype=torch.int32)
        w1, w3, w2 = (sharded(w, self.expert_parallel).to(groups_PD.dtype) for w in (self.w1, self.w3, self.w2))
        h = swiglu(self.product(groups_PD, w1, ends), self.product(groups_PD, w3, ends))
        return self.product(h, w2, ends)


class MixtralMoE(MoE):
    """The layer in place of transformers' MixtralSparseMoeBlock, which returns no statistics."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)[0]


def replacement(config: MixtralConfig, stage: int) -> MixtralMoE:
    dim, hidden_dim, num_experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    top_k = config.num_experts_per_tok
    if stage == 3:
        return MixtralMoE(dim, hidden_dim, num_experts, RouterConfig(top_k), recipe="mxfp8")
    moe = MixtralMoE(dim, hidden_dim, num_experts, RouterConfig(top_k, prob_in="combine"), recipe="bf16")
    moe.experts = PlainExperts(dim, hidden_dim, num_experts, recipe="bf16")
    moe.experts.product = looped if stage == 1 else grouped
    return moe


# --- the model ---------------------------------------------------------------------------------------------


def build(config: MixtralConfig, stage: int, device: torch.device, ep: int, ranks: int, load: "Load") -> Any:
    """The sharded model on the device, with the weights of `load`; in training mode."""
    with torch.device("meta"):
        model: Any = MixtralForCausalLM(config)
        for layer in model.model.layers:
            if stage:
                layer.mlp = replacement(config, stage)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if stage:
        mesh = init_device_mesh(device.type, (ranks // ep, ep), mesh_dim_names=("dp", "ep"))
        style = ExpertParallel(transport=PeerMemory.choose(mesh["ep"].get_group())) if stage == 3 else None
        shard_moe(model, mesh, [MixtralDecoderLayer], style=style, mp_policy=policy)
    else:
        model.set_experts_implementation("eager")
        mesh = init_device_mesh(device.type, (ranks,), mesh_dim_names=("dp",))
        for module in (*model.model.layers, model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
    model.to_empty(device=device)
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)  # it has buffers, and no weights
    options = StateDictOptions(full_state_dict=True, strict=False)
    for name, parameter in list(model.named_parameters()):
        shape = tuple(parameter.shape)
        set_model_state_dict(model, {name: weight(name, shape, load)}, options=options)
    return model.train()


def layers_that_fit(config: MixtralConfig, ranks: int, tokens: int, memory: int) -> int:
    """Layers whose weights and activations take at most 0.8 of a device's bytes, at least one.

    A rank has its share of the state of all weights; of `tokens` tokens the activations of every layer, as stage 0
    saves them: attention and norms 40 D bytes, and a row of an expert 2 (4 F + 3 D); the logits; and one layer's
    weights gathered, in bf16 for the next layer too, with their gradients in fp32.
    """
    d, f, experts = config.hidden_size, config.intermediate_size, config.num_local_experts
    weights = 3 * experts * f * d + 3 * d * d
    saved = tokens * (40 * d + config.num_experts_per_tok * 2 * (4 * f + 3 * d))
    vocabulary = config.vocab_size * (2 * d * WEIGHT_NBYTES // ranks + 14 * tokens)
    free = 0.8 * memory - vocabulary - 8 * weights
    return max(1, min(32, int(free / (weights * WEIGHT_NBYTES / ranks + saved))))


# --- its weights -------------------------------------------------------------------------------------------

Load = Callable[[str, tuple[int, ...]], Tensor]
"""The weight of a name in a checkpoint, and of a shape, fp32 or bf16."""


def weight(name: str, shape: tuple[int, ...], load: Load) -> Tensor:
    """A parameter of the model, made of the checkpoint's weights: these have a name for every matrix of an expert."""
    name = name.replace(".mlp.router.", ".mlp.gate.").replace(".mlp.", ".block_sparse_moe.")
    prefix, dot, kind = name.rpartition(".experts.")
    if not dot:
        return load(name, shape)
    rows = shape[1] // 2 if kind == "gate_up_proj" else shape[1]
    kinds = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}.get(kind, (kind,))

    def matrices(expert: int) -> Iterator[Tensor]:
        for one in kinds:
            yield load(f"{prefix}.experts.{expert}.{one}.weight", (rows, shape[2]))

    return torch.stack([torch.cat(tuple(matrices(expert))) for expert in range(shape[0])])


def drawn(name: str, shape: tuple[int, ...], seed: int, device: torch.device) -> Tensor:
    """Ones for the gain of a norm, else normal values of variance 1 / columns. A weight depends on its name and the
    seed alone, and so neither on the stage nor on the ranks."""
    if len(shape) == 1:
        return torch.ones(shape, device=device)
    generator = torch.Generator(device).manual_seed((seed << 32) + zlib.crc32(name.encode()))
    return torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5


def random_weights(seed: int, device: torch.device) -> Load:
    return partial(drawn, seed=seed, device=device)


def files_of(folder: Path) -> dict[str, Path]:
    """The file of every weight in a checkpoint's folder; empty without safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        return {name: folder / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    files = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    return files


def checkpoint_weights(files: dict[str, Path], device: torch.device) -> Load:
    def load(name: str, shape: tuple[int, ...]) -> Tensor:
        with safe_open(files[name], "pt", device=str(device)) as file:
            found = file.get_tensor(name).float()
        if found.shape != shape:
            raise ValueError(f"--model: got {name} of shape {tuple(found.shape)}; allowed: {shape}, by config.json")
        return found

    return load


def read_config(folder: Path) -> tuple[MixtralConfig, dict[str, Path]]:
    """The config of a checkpoint and the file of every weight.

    Raises ValueError for a folder that is none, another architecture, and missing files or weights."""
    if not (folder / "config.json").is_file():
        raise ValueError(f"--model: got {folder}, without config.json; allowed: a folder of a Mixtral checkpoint")
    if not (folder / "tokenizer.json").is_file():
        raise ValueError(f"--model: got {folder}, without tokenizer.json; allowed: a folder with its tokenizer")
    try:
        config = AutoConfig.from_pretrained(folder)
    except OSError as error:
        raise ValueError(f"--model: got {folder}, whose config.json cannot be read; {error}") from error
    if not isinstance(config, MixtralConfig):
        raise ValueError(f"--model: got model_type {config.model_type!r}; allowed: 'mixtral'")
    for field, allowed in (("hidden_act", "silu"), ("router_jitter_noise", 0.0), ("tie_word_embeddings", False)):
        if getattr(config, field) != allowed:
            raise ValueError(f"--model: got {field} = {getattr(config, field)!r}; allowed: {allowed!r}")
    files = files_of(folder)
    experts = [f"experts.{i}.{w}" for i in range(config.num_local_experts) for w in ("w1", "w2", "w3")]
    layers = [f"model.layers.{i}.block_sparse_moe" for i in range(config.num_hidden_layers)]
    names = [f"{layer}.{part}.weight" for layer in layers for part in ("gate", *experts)]
    absent = [name for name in (*names, "lm_head.weight") if name not in files or not files[name].is_file()]
    if absent:
        allowed = "allowed: safetensors with the names of the hub; save_pretrained writes them"
        raise ValueError(f"--model: got {folder} without {absent[0]}; {allowed}")
    return config, files
