// Permute and unpermute: pairs (token, choice) sorted by expert, and weighted sums of rows.
// Legend: T tokens, K choices per token, S positions per token, E experts, D hidden, M rows.
#pragma once

#include "vec.h"

namespace moe {

// Counted from the first local expert; -1 for experts of other ranks, and for none.
INLINE int32_t local_id(int32_t id, int64_t first, int64_t num_local) {
  const int64_t local = int64_t(id) - first;
  return uint64_t(local) < uint64_t(num_local) ? int32_t(local) : -1;
}

// Rows sorted by expert, then by token, then by choice: offsets [E + 1]; positions [T, K], -1 for ids outside 0..E-1;
// the token of each row in `token_of`, unless null. `next` [E] is scratch.
inline void sort_pairs(const int32_t* ids, int64_t ld, int64_t tokens, int64_t top_k, int64_t experts, int32_t* offsets,
                       int32_t* next, int32_t* positions, int32_t* token_of) {
  std::fill(offsets, offsets + experts + 1, 0);
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t k = 0; k < top_k; k++) {
      const int32_t expert = local_id(ids[t * ld + k], 0, experts);
      if (expert >= 0) offsets[expert + 1]++;
    }
  for (int64_t e = 0; e < experts; e++) {
    next[e] = offsets[e];
    offsets[e + 1] += offsets[e];
  }
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t k = 0; k < top_k; k++) {
      const int32_t expert = local_id(ids[t * ld + k], 0, experts), row = expert >= 0 ? next[expert]++ : -1;
      positions[t * top_k + k] = row;
      if (token_of && row >= 0) token_of[row] = int32_t(t);
    }
}

// out [T, D]: sum over s, in this order, of weights[t, s] * rows[positions[t, s]]; null weights mean 1. With `sum`
// [T, D] the rounded total is added to it.
template <class T>
void combine_rows(const T* rows, int64_t ld, const int32_t* positions, int64_t width, const float* weights,
                  int64_t ld_weights, const T* sum, int64_t lds, T* out, int64_t tokens, int64_t hidden) {
  constexpr int64_t STEP = 4 * LANES, LINE = 64 / int64_t(sizeof(T));
  parallel_ranges(tokens, double(width * hidden) * 0.1, [&](int64_t from, int64_t to) {
    const T** found = scratch<const T*>(ROWS, width);
    float* scales = scratch<float>(WEIGHTS, width);
    for (int64_t t = from; t < to; t++) {
      const int32_t *mine = positions + t * width, *next = t + 1 < to ? mine + width : mine;
      int64_t valid = 0;
      for (int64_t s = 0; s < width; s++) {
        if (mine[s] < 0) continue;
        found[valid] = rows + mine[s] * ld;
        scales[valid++] = weights ? weights[t * ld_weights + s] : 1.f;
      }
      auto finish = [&](F16 total, int64_t i) {
        if (sum) total = round_to(total, T{}) + load_some(sum + t * lds + i, hidden - i);
        store_some(out + t * hidden + i, total, hidden - i);
      };
      int64_t i = 0;
      for (; i + STEP <= hidden; i += STEP) {
        for (int64_t s = 0; s < width; s++)  // rows are in expert order
          if (next[s] >= 0)
            for (int64_t j = 0; j < STEP; j += LINE) __builtin_prefetch(rows + next[s] * ld + i + j);
        F16 totals[4] = {zero(), zero(), zero(), zero()};
        for (int64_t s = 0; s < valid; s++) {
          const F16 weight = set1(scales[s]);
          for (int j = 0; j < 4; j++) totals[j] = fma(load(found[s] + i + j * LANES), weight, totals[j]);
        }
        for (int j = 0; j < 4; j++) finish(totals[j], i + j * LANES);
      }
      for (; i < hidden; i += LANES) {
        F16 total = zero();
        for (int64_t s = 0; s < valid; s++) total = fma(load_some(found[s] + i, hidden - i), set1(scales[s]), total);
        finish(total, i);
      }
    }
  });
}

}  // namespace moe
