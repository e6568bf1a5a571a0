// Keys of a block where products read them, and memory of the next block.
#pragma once

#include "gemm.h"

namespace moe {

constexpr int64_t SPLIT = 512;
constexpr int64_t MOST_KEYS = 128, FEW = 8;  // of a block; up to FEW columns swap the operands (see attention.h)
constexpr int64_t MOST_BLOCKS = SPLIT / 64;  // of a split

// Keys of a block by rows, in one part or two (the second continues the channels of the first). Every group of
// `piece` rows has its own address, so that whole pages are read in place.
struct Keys {
  const char* data[2][MOST_KEYS / LANES];
  int64_t stride[2][MOST_KEYS / LANES], steps[2], piece;
  int parts;

  const char* row(int part, int64_t i) const {
    return data[part][i / piece] + i % piece * stride[part][i / piece];
  }
};

// Rows of a piece of the keys: as many as a product wants in place. Few columns pack keys row by row: a page of 16 rows
// is never copied there.
template <class T>
inline int64_t piece_rows(int64_t columns) {
  return columns <= FEW ? LANES : row_multiple(T{});
}

// Rows of the products of few columns.
template <class T>
inline int64_t few_rows(int64_t columns) {
  return ceil_div(columns, row_unit(T{})) * row_unit(T{});
}

// Memory of the next block, prefetched a few lines at a time between this block's products: the context is scattered
// over pages, where hardware prefetching does not help.
struct Ahead {
  const char* rows[2 * SPLIT];
  int64_t count = 0, lines = 0, row = 0, line = 0;

  int64_t total() const { return count * lines; }
  void fetch(int64_t n) {
    for (; n > 0 && row < count; row++) {
      const int64_t stop = std::min(lines, line + n);
      n -= stop - line;
      for (; line < stop; line++) __builtin_prefetch(rows[row] + line * 64, 0, 2);
      if (line < lines) return;
      line = 0;
    }
  }
};

}  // namespace moe
