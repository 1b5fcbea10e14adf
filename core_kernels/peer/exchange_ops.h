// The kernels of an exchange that the device drives, between two meetings of the ranks; programs/ffn.py draws it.
//
//   counts of all ranks, order and weights of each --find_home--> home, weights of this rank's rows
//   packed MXFP8 rows in the memory of the tokens' ranks --pull_fold--> MX rows and folded rows of the experts
//   bf16 rows of the experts --push_rows--> slot [token][k] in the memory of the token's rank
//
// `home` (P, 2) int32: the rank of a row's token, -1 for padding, and its slot there. Memory of peers has one layout on
// all ranks: addresses (R, 2) int32 are the 64-bit addresses of its first byte, and attrs have offsets from there.
#pragma once

#include "cuda/ops.h"

namespace mxep::cuda {

// in: counts (R, E) int32, group_ends (G,) of this rank's padded groups, addresses. out: home, weights (P,) fp32.
// attrs: this rank, the offsets of the order (slots,) int32 and of the weights in the order, fp32, and slots. A row
// without a slot in the order, -1 behind the rows of its rank, is like padding.
void find_home(const Call& call, cudaStream_t stream);

// in: home, group_ends, addresses. out: q (P, K), sf (P, K/32), qf (P, K), row_sf (P,).
// attrs: the offset of packed rows (T, K + K/32), replicas of a token, CTAs. Padding becomes zeros. K % 512 is 0.
void pull_fold(const Call& call, cudaStream_t stream);

// in: rows (P, D) bf16, numbers (P,) fp32 or (0,), home, group_ends, addresses of slots and of numbers. out: none.
// attrs: the offsets of the slots (T k, D) and of (T k,) fp32, CTAs.
void push_rows(const Call& call, cudaStream_t stream);

inline constexpr CudaOp kExchangeOps[] = {
    {"find_home", 3, 2, 4, find_home, 900},
    {"pull_fold", 3, 4, 3, pull_fold, 900},
    {"push_rows", 6, 0, 3, push_rows, 900},
};

constexpr int64_t kLongestPulled = 8192, kLongestPushed = 16384;  // values, bytes of a row

}  // namespace mxep::cuda
