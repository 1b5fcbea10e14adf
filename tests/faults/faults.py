"""The seeded faults: at least one per op family, language and frontend. `run.py` applies them one at a time."""

from typing import NamedTuple


class Fault(NamedTuple):
    """`old`, which stands once in `file`, becomes `new`; a test of the selection has to fail.

    interpreter: the selection runs in Triton's interpreter. A C++ file is compiled anew.
    """

    says: str
    file: str
    old: str
    new: str
    tests: str
    interpreter: bool = False


FAULTS = (
    # Triton
    Fault(
        "quantize: scales one block to the right",
        "core_kernels/quantize/kernel.py",
        "        kb = k0 // BLOCK_MX + tl.arange",
        "        kb = k0 // BLOCK_MX + 1 + tl.arange",
        "tests/kernels/test_triton_quantize.py",
        interpreter=True,
    ),
    Fault(
        "fold: NaN scales count as the largest",
        "core_kernels/fold/kernel.py",
        "counts = (kb < K // BLOCK_MX)[None, :] & (byte != NAN_BYTE)",
        "counts = (kb < K // BLOCK_MX)[None, :] & (byte >= 0)",
        "tests/conformance/test_fold.py -k nan_block",
        interpreter=True,
    ),
    Fault(
        "fold: gathered rows begin their scales one byte early",
        "core_kernels/fold/kernel.py",
        "sf_tile = tl.load(first + K + kb[None, :]",
        "sf_tile = tl.load(first + K - 1 + kb[None, :]",
        "tests/conformance/test_fold_permute.py -k rows_of_any",
        interpreter=True,
    ),
    Fault(
        "permute: packed rows lie one scale too close together",
        "core_kernels/permute/kernel.py",
        "_gather(packed, row_map, R, P, q, K, K + scales, TILES",
        "_gather(packed, row_map, R, P, q, K, K + scales - 1, TILES",
        "tests/kernels/test_triton_permute.py",
        interpreter=True,
    ),
    Fault(
        "router: of equal scores the higher expert is first",
        "core_kernels/router/kernel.py",
        "return key.to(tl.int64) * 1024 + (1023 - place)",
        "return key.to(tl.int64) * 1024 + place",
        "tests/conformance/test_router.py -k in_order",
        interpreter=True,
    ),
    Fault(
        "routing: an expert without tokens gets no block",
        "core_kernels/routing/kernel.py",
        "tl.maximum(tl.cdiv(tl.sum(n, 0), alignment), 1) * alignment",
        "tl.cdiv(tl.sum(n, 0), alignment) * alignment",
        "tests/conformance/test_routing.py -k row_map",
        interpreter=True,
    ),
    Fault(
        "combine: rows without their probabilities",
        "core_kernels/combine/kernel.py",
        "acc += p[:, None] * x",
        "acc += x",
        "tests/conformance/test_combine.py -k 'test_combine and not bwd'",
        interpreter=True,
    ),
    Fault(
        "scale_layout: rows of a tile in their own order",
        "core_kernels/scale_layout/kernel.py",
        "byte // 4 % 4 * 32 + byte // 16",
        "byte // 16 * 4 + byte // 4 % 4",
        "tests/conformance/test_scale_layout.py",
        interpreter=True,
    ),
    Fault(
        "swiglu: derivative of another function",
        "core_kernels/swiglu/kernel.py",
        "(sig + steep * (1.0 - sig))",
        "(sig + steep * sig)",
        "tests/conformance/test_swiglu.py -k test_backward",
        interpreter=True,
    ),
    Fault(
        "grouped_gemm: weights of the first group for all",
        "core_kernels/grouped_gemm/kernel_folded.py",
        "row, weight_row = m.to(tl.int64), group.to(tl.int64) * N + n",
        "row, weight_row = m.to(tl.int64), n.to(tl.int64)",
        "tests/conformance/test_grouped_gemm_folded.py -k 'grouped_mm_fold and ragged_tiles'",
        interpreter=True,
    ),
    # C++
    Fault(
        "quantize: one scale per row, and values that are not divided by it",
        "core_kernels/quantize/cpu.cc",
        "e4m3_from_f32(to_f32(x[i]) * inverse)",
        "e4m3_from_f32(to_f32(x[i]))",
        "tests/conformance/test_quantize_rowwise.py -k cpp",
    ),
    Fault(
        "fold: a chunk forgets the larger scales before it",
        "core_kernels/fold/cpu.cc",
        "max_span(largest, token == group.begin",
        "max_span(0, token == group.begin",
        "tests/conformance/test_grouped_gemm_folded.py -k 'fold_groups and cpp'",
    ),
    Fault(
        "fold: padding among gathered rows is the first row",
        "core_kernels/fold/cpu_both.cc",
        "const int64_t from = map[row + r] * width;",
        "const int64_t from = std::max(map[row + r], 0) * width;",
        "tests/conformance/test_fold_permute.py -k 'rise and cpp'",
    ),
    Fault(
        "routing: all ranks' rows begin with the first rank's",
        "core_kernels/routing/cpu.cc",
        "if (rank_rows) start = rank * rank_rows;",
        "if (rank_rows) start = 0;",
        "tests/conformance/test_routing.py -k 'row_map and cpp'",
    ),
    Fault(
        "routing: padding rows are those of slot 0",
        "core_kernels/routing/cpu.cc",
        "std::fill_n(slots, padded, -1);",
        "std::fill_n(slots, padded, 0);",
        "tests/conformance/test_routing.py -k 'slot_map and cpp'",
    ),
    Fault(
        "router: the second term of the gradient is that of the first",
        "core_kernels/router/cpu.cc",
        "magnitude(high) < kInf ? x[e] - high : 0.0f",
        "magnitude(high) < kInf ? high : 0.0f",
        "tests/conformance/test_router.py -k 'two_terms and cpp'",
    ),
    Fault(
        "combine: the gradient of padding rows is not written",
        "core_kernels/combine/cpu.cc",
        "if (order[r] < 0) std::memset(bytes",
        "if (order[r] < -1) std::memset(bytes",
        "tests/conformance/test_combine.py -k 'bwd and cpp'",
    ),
    Fault(
        "swiglu: the gradient of the probability is of the last columns alone",
        "core_kernels/swiglu/cpu.cc",
        "if (prob) dprob[row] += sum;",
        "if (prob) dprob[row] = sum;",
        "tests/conformance/test_swiglu.py -k cpp",
    ),
    # torch
    Fault(
        "torch, CPU product: the row after the last group is not written",
        "torch_frontend/_cpu_gemm.py",
        "out[end:] = 0",
        "out[end + 1 :] = 0",
        "tests/conformance/test_grouped_gemm.py -k 'rows_past_the_end and torch'",
    ),
    Fault(
        "torch, SwiGLU FFN: the gradient of x uses w1 twice",
        "torch_frontend/ffn.py",
        "dgate, gate_t, dup, up_t",
        "dgate, gate_t, dup, gate_t",
        "tests/torch_frontend/test_ffn.py -k close_to_fp64",
    ),
    Fault(
        "torch, SwiGLU FFN: the gradient of w2 reads the gradient of up in place of h",
        "torch_frontend/ffn.py",
        "self.glu, self.hidden = None, MX(h_q_t, h_sf_t)",
        "self.glu, self.hidden = None, MX(*up[2:])",
        "tests/torch_frontend/test_ffn.py",
    ),
    Fault(
        "torch, expert parallelism: the router's gradient is not reduced over the ranks",
        "torch_frontend/shards.py",
        "total = all_reduce(grads[0].contiguous(), group_named(ctx.group_name))",
        "total = grads[0]",
        "tests/torch_frontend/test_expert_parallel.py",
    ),
    Fault(
        "torch, router: the experts' gradient of the tokens is lost",
        "torch_frontend/router.py",
        "return product.to(a.dtype) if total is None else torch.add(product, total, out=torch.empty_like(total))",
        "return product.to(a.dtype)",
        "tests/torch_frontend/test_router.py -k meet",
    ),
    Fault(
        "torch, overlapped experts: the padding of groups keeps what was in memory",
        "torch_frontend/overlap.py",
        "zero_each(padding)",
        "padding.clear()",
        "tests/torch_frontend/test_expert_parallel.py",
    ),
    Fault(
        "torch, copy engines: two receivers read from one GPU at a time",
        "torch_frontend/copy_engines.py",
        "after = (peer + self.way",
        "after = (peer - self.way",
        "tests/torch_frontend/test_copy_engines.py",
    ),
    Fault(
        "torch, experts that recompute: gate and up without their biases",
        "torch_frontend/ffn.py",
        "pair_of_products(rows, (gate[0], up[0]), group_ends, BF16, biases)",
        "pair_of_products(rows, (gate[0], up[0]), group_ends, BF16, (None, None))",
        "tests/torch_frontend/test_layer_bytes.py -k same_bytes",
    ),
    Fault(
        "exchange: rows of a rank lie in a group where those of the rank before do",
        "core_kernels/exchange.py",
        "destination = starts + _before(rows, axis=0)",
        "destination = starts + 0 * _before(rows, axis=0)",
        "tests/test_exchange_ranks.py",
    ),
    Fault(
        "torch, expert parallelism: no rows of a token but its first are added to its gradient",
        "torch_frontend/weighted_combine.py",
        "token_of(order, slots.shape[1])",
        "token_of(order, 1)",
        "tests/torch_frontend/test_combine.py -k values_and_gradients",
    ),
    Fault(
        "torch, a token once per rank: its replicas on a rank are numbered from the first rank's copies on",
        "torch_frontend/replicas.py",
        "(row[place] - first[rank]) * top_k",
        "row[place] * top_k",
        "tests/torch_frontend/test_expert_parallel.py -k 'replicas and routings'",
    ),
    Fault(
        "peer memory: the rows of a rank lie where those of the ranks before do",
        "core_kernels/peer/kernel.py",
        "before += tl.where(s < rank, n, 0)",
        "before += tl.where(s < 0, n, 0)",
        "tests/kernels/test_triton_peer.py -k layout",
        interpreter=True,
    ),
    Fault(
        "torch, peer memory: the backward reads rows that the next layer has written",
        "torch_frontend/peer_exchange.py",
        "save(ctx, call.kept(state))",
        "save(ctx, state)",
        "tests/torch_frontend/test_peer_memory.py",
    ),
    Fault(
        "torch, peer memory: padding is what the leg before left there",
        "torch_frontend/peer_exchange.py",
        'memory.launch("clear", at.capacity // plan.BLOCK,',
        'memory.launch("clear", 0,',
        "tests/torch_frontend/test_peer_memory.py",
    ),
    # JAX
    Fault(
        "JAX, a token once per rank: copies of a token that no replica fits are sent",
        "jax_frontend/replicas.py",
        "place = jnp.where(sent, exchange",
        "place = jnp.where(exchange.slots >= -1, exchange",
        "tests/jax_frontend/test_replicas.py -k dropped",
    ),
    Fault(
        "JAX, expert parallelism: one row less than the capacity is sent",
        "jax_frontend/ep.py",
        "jnp.minimum(jnp.cumsum(counts, axis=1), capacity)",
        "jnp.minimum(jnp.cumsum(counts, axis=1), capacity - 1)",
        "tests/jax_frontend/test_ep.py -k rows_arrive",
    ),
    Fault(
        "JAX, peer memory: rows of the next rank begin where those of rank 0 end",
        "jax_frontend/peer_exchange.py",
        "+ jnp.cumsum(fitting, 2) - fitting",
        "+ fitting[..., :1] * jnp.minimum(jnp.arange(ranks), 1)",
        "tests/jax_frontend/test_peer_memory.py -k results",
    ),
    Fault(
        "JAX, peer memory: rows of all ranks in the wrong order",
        "jax_frontend/peer_memory.py",
        "lax.all_gather(lax.bitcast_convert_type(x, bits), across, tiled=True)",
        "lax.all_gather(lax.bitcast_convert_type(x, bits), across, tiled=True)[::-1]",
        "tests/jax_frontend/test_peer_memory.py -k across",
    ),
    Fault(
        "torch: a rank that needs no gradient of its rows is not told",
        "torch_frontend/_counts.py",
        "return needs * (x.requires_grad",
        "return 0 * (x.requires_grad",
        "tests/torch_frontend/test_ep_errors.py",
    ),
    Fault(
        "JAX, CPU weight gradient: scales of chunks of another group",
        "jax_frontend/_cpu_gemm.py",
        "begin // SPAN + group + (first - begin) // SPAN",
        "begin // SPAN + (first - begin) // SPAN",
        "tests/conformance/test_grouped_gemm_folded.py -k 'grouped_wgrad_fold and hot_columns and jax'",
    ),
    Fault(
        "JAX, SwiGLU FFN: the gradient of x uses w1 twice",
        "jax_frontend/ffn.py",
        "sum_of_input_gradients(dgate, w1, dup, w3",
        "sum_of_input_gradients(dgate, w1, dup, w1",
        "tests/jax_frontend/test_ffn.py -k formula",
    ),
    Fault(
        "shard_moe: gradients of experts are a sum over the expert ranks",
        "torch_frontend/fsdp.py",
        "parallelize_module(layer.experts, experts, style)",
        'parallelize_module(layer.experts, experts, MXFP8ExpertParallel(gradients="sum"))',
        "tests/torch_frontend/test_fsdp.py",
    ),
    Fault(
        "schedule of products: flat tiles for one row more than they have",
        "core_kernels/grouped_gemm/schedule.cuh",
        "rest != 0 && rest <= kM / 2",
        "rest != 0 && rest <= kM / 2 + 1",
        "tests/kernels/test_schedule.py",
    ),
    Fault(
        "sums of Hopper's tensor cores: products are cut one bit higher",
        "core_kernels/grouped_gemm/oracle_sm90.py",
        "FRACTION = 13",
        "FRACTION = 12",
        "tests/conformance/test_oracle_sm90.py",
    ),
    Fault(
        "cost model: what a run adds is a share of its time",
        "benchmarks/ep_model.py",
        "unhidden * max(d.local + d.travel - total, 0)",
        "unhidden * total",
        "tests/test_ep_model.py",
    ),
    Fault(
        "metrics: rows are quantized on three of their four ways",
        "core_kernels/metrics.py",
        "if recipe.sends_mx(leg) else bf16",
        "if recipe.sends_mx(leg) or (recipe.mx and leg == 'combine') else bf16",
        "tests/torch_frontend/test_metrics.py",
    ),
)
