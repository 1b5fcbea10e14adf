"""The seeded faults: one for each family of ops, and one for each room of the frontends. `run.py` applies them one at a
time. Each is subtle: it changes the bytes of a corner, and no error is raised.
"""

from .fault import Fault, Swap, Unwrap

# Kernels in Triton, kernels in C++ for a CPU, and a header of CUDA kernels that its test compiles for a CPU.
KERNELS = (
    Fault("scales of every tile of a row are stored as the first tile's",
          "core_kernels/quantize/kernel.py:_quantize_rows", Swap("//", "%", 1),
          "kernels/interpreter/test_triton_quantize.py -k 'test_bytes and quantize_row'"),
    Fault("row 0 of the input is padding", "core_kernels/permute/kernel.py:_gather", Swap(">=", ">", 1),
          "kernels/interpreter/test_triton_permute.py -k permute_mx"),
    Fault("a score of -0 is below a score of 0", "core_kernels/router/kernel.py:candidates", Swap("0.0", "value", 1),
          "conformance/routing/test_router.py -k in_order"),
    Fault("an expert without tokens has no block of padding", "core_kernels/routing/kernel.py:row_map_kernel",
          Unwrap("maximum"), "kernels/interpreter/test_triton_routing.py -k row_map"),
    Fault("the padding of a group's last tile has scales of the next group",
          "core_kernels/scale_layout/kernel.py:block_kernel", Swap("end", "M", 1),
          "conformance/quantize/test_cases_layout.py -k 'block_scales and ragged'"),
    Fault("a gate equal to the limit has no gradient", "core_kernels/swiglu/kernel.py:_gradients", Swap(">", ">="),
          "conformance/swiglu/test_cases_bwd.py -k 'swiglu_bwd-limit_of_7'"),
    Fault("a span forgets the larger scales of the spans before it", "core_kernels/fold/cpu.cc:fold_groups",
          Swap("largest", "0", 2), "conformance/fold/test_cases.py -k 'cpp and every_length'"),
    Fault("the last columns of a dot product replace its partial sums", "core_kernels/combine/cpu.cc:dot",
          Swap("+=", "=", 2), "kernels/cpp/test_cpp_combine.py -k 'partial_sums and 17'"),
    Fault("the last rows of a group are in flat tiles that are too low for them",
          "core_kernels/grouped_gemm/schedule/tile_choice.h:choose_tiles", Swap("2", "1", 1),
          "kernels/headers/test_schedule.py -k 80"),
)  # fmt: skip
# What both frontends use.
SHARED = (
    Fault("metrics: one rank sends rows to itself", "core_kernels/policy/metrics.py:describe", Swap("1", "0", 2),
          "torch_frontend/layer/test_metrics.py"),
    Fault("a call that was prepared for other strides is used again", "cpp_bindings/exchange.cc:layouts",
          Swap("strides", "shape"), "kernels/cpp/test_cpp_bindings.py -k other_layouts"),
)  # fmt: skip
TORCH = (
    Fault("a backward in another thread has the settings of that thread",
          "torch_frontend/ops/differentiable.py:differentiable", Swap("==", "is not"),
          "torch_frontend/ops/test_settings.py -k another_thread"),
    Fault("the second of two folded products has the scales of the first one's weights",
          "torch_frontend/products/forms/fold.py:folded_sum", Swap("w2", "w", 2),
          "torch_frontend/products/test_ffn.py -k 'any_ends and folded'"),
    Fault("the gradient of the tokens has no part of the experts", "torch_frontend/routing/router.py:_Router.backward",
          Swap("dx", "None", 2), "torch_frontend/routing/test_router.py -k meet"),
    Fault("the router's gradient is not reduced over the ranks",
          "torch_frontend/exchange/shards.py:_ReduceGradient.backward", Unwrap("all_reduce"),
          "torch_frontend/exchange/test_expert_parallel.py -k '[2-mxfp8_wgrad_with_hp-mean-combine]'"),
    Fault("peer memory: the order has the slot of the first row behind the rows of a rank",
          "torch_frontend/overlap/rank_rows.py:RankRows.write_order", Swap("1", "0"),
          "torch_frontend/overlap/test_peer_memory.py -k 'two and routings'"),
    Fault("cached weights: a parameter in other memory is multiplied as its old bytes",
          "torch_frontend/layer/cached_weights.py:_state", Swap("data_ptr", "dim"),
          "torch_frontend/products/test_cached_weights.py -k writes_within"),
    Fault("packed experts: probabilities have no gradient where x and gate_up need none",
          "torch_frontend/integrations/packed_ffn.py:PackedNeeds.dh", Swap("prob", "x"),
          "torch_frontend/integrations/test_packed_ffn.py -k 'weights_apart and bf16'"),
)  # fmt: skip
JAX = (
    Fault("CPU weight gradient: a group's first block has a scale of the group before",
          "jax_frontend/ops/cpu_gemm.py:_dequantize_spans", Swap("<=", "<"),
          "conformance/grouped_gemm/test_cases_folded.py -k 'grouped_wgrad_fold and hot_columns and jax'"),
    Fault("weights along K are folded without headroom",
          "jax_frontend/products/forms/fold.py:FoldForm.along_rows", Swap("WEIGHT_HEADROOM", "0"),
          "jax_frontend/products/test_weights.py -k 'one_way and bfloat16 and rceil'"),
    Fault("the weights of all rows of a token with a lost row have NaN gradients",
          "jax_frontend/routing/overflow.py:nan_gradients_of_probs", Swap("lost", "_of_rows(lost)", 2),
          "jax_frontend/routing/test_overflow.py -k weight_of"),
    Fault("the row that fills the capacity is dropped", "jax_frontend/exchange/all_to_all.py:lay_out",
          Swap("capacity", "(capacity - 1)", 3), "jax_frontend/exchange/test_ep.py -k 'rows_arrive and 3'"),
    Fault("every rank of a tensor axis adds the bias", "jax_frontend/layer/moe_layer.py:RankExperts.__call__",
          Swap("==", ">="), "jax_frontend/layer/test_sharded.py -k tensor_parallel_experts"),
    Fault("interleaved gate and up are packed as halves", "jax_frontend/integrations/layouts.py:_joined",
          Swap("2", "1"), "frontends/test_expert_blocks.py -k inverse_of"),
)  # fmt: skip
FAULTS = (*KERNELS, *SHARED, *TORCH, *JAX)
