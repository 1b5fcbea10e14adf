// The kernels of an exchange that the device drives, between two meetings of the ranks; programs/ffn.py draws it.
//
//   counts of all ranks, order of this rank --lay_out--> groups of this rank, its rows without a place
//   counts of all ranks, order and weights of each --find_home--> home, weights of this rank's rows
//   packed MXFP8 rows in the memory of the tokens' ranks --pull_fold--> MX rows and folded rows of the experts
//   rows of any bytes in the memory of the tokens' ranks --pull_rows--> rows of the experts
//   rows of the experts --push_rows--> slot [token][k] in the memory of the token's rank
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
// attrs: the offsets of the slots (T k, D) and of (T k,) fp32, CTAs. 2 D is a multiple of 16, at most kLongestRow.
void push_rows(const Call& call, cudaStream_t stream);

// in: counts (R, E) int32, addresses. out: group_ends (G,) int32 of this rank's padded groups, at most `rows`; sources
// (slots,) int32; totals (E,) int32, rows of all ranks; worst (R, 2) int32, which is read too: the most rows beyond
// `rows` that a rank has had, and the rows of its groups then.
// attrs: this rank, rows of an operand, rows that a group has whole blocks of, whether rows beyond are of a later round
// and no loss, the offset of the order, -1 behind the rows of this rank, and what `sources` has for a slot whose row
// has no place; it has its number for the others.
void lay_out(const Call& call, cudaStream_t stream);

// in: home, group_ends, addresses. out: (P, A) and (P, B) uint8, the first A bytes of each row and the B bytes after.
// attrs: the offset of rows (T, W), replicas of a token, W, CTAs. Padding becomes zeros. A and W are multiples of 16, W
// at most kLongestRow.
void pull_rows(const Call& call, cudaStream_t stream);

inline constexpr CudaOp kExchangeOps[] = {
    {"find_home", 3, 2, 4, find_home, 0}, {"pull_fold", 3, 4, 3, pull_fold, 0}, {"push_rows", 6, 0, 3, push_rows, 0},
    {"lay_out", 2, 4, 6, lay_out, 0},     {"pull_rows", 3, 2, 4, pull_rows, 0},
};

constexpr int64_t kLongestRow = 48 * 1024;  // bytes: a ring of two warps has two stages

}  // namespace mxep::cuda
