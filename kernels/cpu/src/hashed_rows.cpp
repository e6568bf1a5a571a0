// Rows of a table that the n-grams of tokens choose (kernels/ops/hashed_rows.py).
//
// One thread, so that a GPU's stream can call it between two launches.
//
// Legend: T tokens, N tokens of the longest n-gram, C rows of a token, heads: rows of an n-gram of one length.
#include <cstring>

#include "api.h"
#include "common.h"

namespace moe {

struct HashedRows {
  int64_t tokens, longest, heads;
  int64_t row_bytes, row_stride, scale_bytes, scale_stride, part_rows;
  const uint8_t* const* parts;                  // of the table, part_rows rows each
  const uint8_t* scales;                        // may be null
  const int64_t *sizes, *firsts, *multipliers;  // [C], [C], [N]
  const int32_t* ids;                           // [T, N], the last token's first
  uint8_t *rows, *row_scales;                   // [T, C * row_bytes], [T, C * scale_bytes]
};

namespace {

const uint8_t* place(const HashedRows& h, int64_t row) {
  return h.parts[row / h.part_rows] + row % h.part_rows * h.row_stride;
}

void rows_of(const HashedRows& h, int64_t token, int64_t* out) {
  const int32_t* ids = h.ids + token * h.longest;
  uint64_t mixed = uint64_t(ids[0]) * uint64_t(h.multipliers[0]);
  for (int64_t back = 1; back < h.longest; back++) {
    mixed ^= uint64_t(ids[back]) * uint64_t(h.multipliers[back]);
    for (int64_t head = 0; head < h.heads; head++) {
      const int64_t column = (back - 1) * h.heads + head;
      out[column] = h.firsts[column] + int64_t(mixed % uint64_t(h.sizes[column]));
      __builtin_prefetch(place(h, out[column]));
    }
  }
}

void copy_rows(const HashedRows& h, int64_t token, const int64_t* rows) {
  const int64_t columns = (h.longest - 1) * h.heads;
  for (int64_t i = 0; i < columns; i++) {
    const int64_t to = token * columns + i;
    std::memcpy(h.rows + to * h.row_bytes, place(h, rows[i]), size_t(h.row_bytes));
    if (h.scales)
      std::memcpy(h.row_scales + to * h.scale_bytes, h.scales + rows[i] * h.scale_stride, size_t(h.scale_bytes));
  }
}

}  // namespace
}  // namespace moe

API void moe_hashed_rows(void* data) {
  const auto& h = *static_cast<const moe::HashedRows*>(data);
  const int64_t columns = (h.longest - 1) * h.heads;
  int64_t* rows = moe::scratch<int64_t>(moe::ROWS, 2 * columns);
  if (h.tokens) moe::rows_of(h, 0, rows);
  for (int64_t t = 0; t < h.tokens; t++) {  // the rows of the next token are on their way while these are copied
    if (t + 1 < h.tokens) moe::rows_of(h, t + 1, rows + (t + 1) % 2 * columns);
    moe::copy_rows(h, t, rows + t % 2 * columns);
  }
}
