#include <algorithm>
#include <string>
#include <vector>

#include "cpu/errors.h"
#include "cpu/ops.h"
#include "cpu/parallel.h"

namespace mxep {
namespace {

constexpr int64_t kTileRows = 128, kTileScales = 4;

// The rows of the row-major scales that one tile of 128 padded rows holds.
struct RowTile {
  int64_t first = 0, rows = 0;
};

std::vector<RowTile> row_tiles(const char* op, const Array& group_ends, int64_t rows, int64_t tiles) {
  const int32_t* ends = group_ends.as<const int32_t>();
  std::vector<RowTile> out;
  int64_t start = 0;
  for (int64_t g = 0; g < group_ends.dim(0); ++g) {
    if (ends[g] < start || ends[g] > rows)
      bad_value(op, "group_ends", ends[g], g, "non-decreasing ends from 0 up to " + std::to_string(rows));
    for (; start < ends[g]; start = std::min<int64_t>(start + kTileRows, ends[g]))
      out.push_back({start, std::min<int64_t>(kTileRows, ends[g] - start)});
  }
  out.resize(tiles);
  return out;
}

// Calls visit(byte of the blocked layout, byte of the row-major layout) for every scale of a row tile.
template <typename Visit>
void each_scale(const RowTile& tile, int64_t index, int64_t scales, const Visit& visit) {
  const int64_t across = (scales + kTileScales - 1) / kTileScales;
  for (int64_t r = 0; r < tile.rows; ++r) {
    const int64_t row = index * across * 512 + r % 32 * 16 + r / 32 * 4;
    for (int64_t s = 0; s < scales; ++s)
      visit(row + s / kTileScales * 512 + s % kTileScales, (tile.first + r) * scales + s);
  }
}

}  // namespace

void block_scales(const Call& call) {
  const int64_t scales = call.in[0].dim(1), padded = call.out[0].dim(1), count = call.out[0].dim(0) / kTileRows;
  const auto tiles = row_tiles("block_scales", call.in[1], call.in[0].dim(0), count);
  const uint8_t* sf = call.in[0].as<const uint8_t>();
  uint8_t* blocked = call.out[0].as<uint8_t>();
  parallel_ranges(count, kTileRows * padded, [=, &tiles](int64_t begin, int64_t end) {
    std::fill_n(blocked + begin * kTileRows * padded, (end - begin) * kTileRows * padded, 0);
    for (int64_t t = begin; t < end; ++t)
      each_scale(tiles[t], t, scales, [=](int64_t to, int64_t from) { blocked[to] = sf[from]; });
  });
}

void unblock_scales(const Call& call) {
  const int64_t rows = call.out[0].dim(0), scales = call.out[0].dim(1), count = call.in[0].dim(0) / kTileRows;
  const auto tiles = row_tiles("unblock_scales", call.in[1], rows, count);
  const uint8_t* blocked = call.in[0].as<const uint8_t>();
  uint8_t* sf = call.out[0].as<uint8_t>();
  int64_t real = 0;
  for (const RowTile& tile : tiles) real += tile.rows;
  std::fill_n(sf + real * scales, (rows - real) * scales, 0);
  parallel_ranges(count, kTileRows * scales, [=, &tiles](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t)
      each_scale(tiles[t], t, scales, [=](int64_t from, int64_t to) { sf[to] = blocked[from]; });
  });
}

}  // namespace mxep
