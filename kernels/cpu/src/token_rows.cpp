// Token rows of dispatch and combine between ranks and experts: routing, packed copies, and weighted sums.
//
// A decode step has few rows per layer, so each function is one call.
// Legend: T tokens of this rank, N tokens received, K choices per token, S positions per sum, R ranks, E local experts,
// D hidden, M rows of the experts' batch.
#include "vec.h"

namespace moe {
namespace {

constexpr double COPIED = 0.1, SUMMED = 0.15;  // nanoseconds per byte and per element

// Counted from the first local expert; -1 for experts of other ranks, and for none.
INLINE int32_t local_id(int32_t id, int64_t first, int64_t num_local) {
  const int64_t local = int64_t(id) - first;
  return uint64_t(local) < uint64_t(num_local) ? int32_t(local) : -1;
}

// Writes the ids counted from `first`; returns whether any is local. `to` may be `from`.
INLINE bool localize(const int32_t* from, int32_t* to, int64_t top_k, int64_t first, int64_t num_local) {
  bool any = false;
  for (int64_t k = 0; k < top_k; k++) {
    const int32_t local = local_id(from[k], first, num_local);
    to[k] = local;
    any |= local >= 0;
  }
  return any;
}

// One sum: out [D] of `count` rows, weighted if weights are given.
template <class T>
void sum_row(const T* const* rows, const float* weights, int64_t count, T* out, int64_t hidden) {
  constexpr int64_t STEP = 4 * LANES;
  int64_t i = 0;
  for (; i + STEP <= hidden; i += STEP) {
    F16 sums[4] = {zero(), zero(), zero(), zero()};
    for (int64_t s = 0; s < count; s++) {
      const F16 weight = set1(weights[s]);
      for (int j = 0; j < 4; j++) sums[j] = fma(load(rows[s] + i + j * LANES), weight, sums[j]);
    }
    for (int j = 0; j < 4; j++) store(out + i + j * LANES, sums[j]);
  }
  for (; i < hidden; i += LANES) {
    F16 total = zero();
    for (int64_t s = 0; s < count; s++) total = fma(load_some(rows[s] + i, hidden - i), set1(weights[s]), total);
    store_some(out + i, total, hidden - i);
  }
}

template <class T>
void sum_rows(const T* rows, int64_t ld, const int64_t* positions, int64_t width, const float* weights,
              int64_t ld_weights, T* out, int64_t count, int64_t hidden) {
  parallel_ranges(count, double(hidden * width) * SUMMED, [&](int64_t from, int64_t to) {
    const T** found = scratch<const T*>(ROWS, width);
    float* scales = scratch<float>(WEIGHTS, width);
    for (int64_t n = from; n < to; n++) {
      int64_t valid = 0;
      for (int64_t s = 0; s < width; s++) {
        const int64_t position = positions[n * width + s];
        if (position < 0) continue;
        found[valid] = rows + position * ld;
        scales[valid++] = weights == nullptr ? 1.f : weights[n * ld_weights + s];
      }
      sum_row(found, scales, valid, out + n * hidden, hidden);
    }
  });
}

}  // namespace
}  // namespace moe

using namespace moe;

// Whether every id of [T, K] is in -1..experts-1 and no token repeats an expert. `wide`: ids are int64, else int32.
API int moe_rows_check(int wide, const void* ids, int64_t ld, int64_t tokens, int64_t top_k, int64_t experts) {
  auto run = [&](auto a) {
    using T = decltype(a);
    for (int64_t t = 0; t < tokens; t++) {
      const T* row = static_cast<const T*>(ids) + t * ld;
      for (int64_t k = 0; k < top_k; k++) {
        if (row[k] < -1 || row[k] >= experts) return 0;
        if (row[k] >= 0 && std::find(row, row + k, row[k]) != row + k) return 0;
      }
    }
    return 1;
  };
  return wide ? run(int64_t()) : run(int32_t());
}

// counts [R]: tokens per target rank; positions [T, R]: row index in the send buffer, by rank, then by token.
API void moe_rows_route(const int32_t* ids, int64_t ld, int64_t tokens, int64_t top_k, int64_t num_local, int64_t ranks,
                        const uint8_t* takes_part, int64_t* counts, int64_t* positions) {
  std::fill(positions, positions + tokens * ranks, int64_t(-1));
  std::fill(counts, counts + ranks, int64_t(0));
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t k = 0; k < top_k; k++) {
      const int64_t id = ids[t * ld + k], rank = id / num_local;
      if (id < 0 || rank >= ranks || !takes_part[rank] || positions[t * ranks + rank] >= 0) continue;
      positions[t * ranks + rank] = counts[rank]++;
    }
  for (int64_t rank = 0, before = 0; rank < ranks; before += counts[rank++])
    for (int64_t t = 0; t < tokens; t++) {
      int64_t& position = positions[t * ranks + rank];
      if (position >= 0) position += before;
    }
}

struct RecordPart {
  const char* data;
  int64_t ld, bytes, offset;  // row stride, row size and offset in the record, in bytes
};

// Token t's record begins at bases[r] + positions[t, r] * record_bytes of `out`, for every target rank r.
API void moe_rows_pack(const RecordPart* parts, int64_t num_parts, int64_t tokens, const int64_t* positions,
                       int64_t ranks, const int64_t* bases, int64_t record_bytes, char* out) {
  parallel_ranges(tokens, double(record_bytes * ranks) * COPIED, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++)
      for (int64_t rank = 0; rank < ranks; rank++) {
        const int64_t position = positions[t * ranks + rank];
        if (position < 0) continue;
        char* record = out + bases[rank] + position * record_bytes;
        for (const RecordPart* p = parts; p != parts + num_parts; p++)
          std::memcpy(record + p->offset, p->data + t * p->ld, size_t(p->bytes));
      }
  });
}

// Of counts[r] records from begins[r] of `memory`: compacts those with a local expert, with ids counted from `first`;
// taken[r] of them.
API void moe_rows_take(const char* memory, int64_t ranks, const int64_t* begins, const int64_t* counts,
                       int64_t record_bytes, int64_t ids_offset, int64_t top_k, int64_t first, int64_t num_local,
                       char* out, int64_t* taken) {
  for (int64_t rank = 0; rank < ranks; rank++) {
    taken[rank] = 0;
    for (int64_t n = 0; n < counts[rank]; n++) {
      const char* record = memory + begins[rank] + n * record_bytes;
      const int32_t* ids = reinterpret_cast<const int32_t*>(record + ids_offset);
      bool here = false;
      for (int64_t k = 0; k < top_k; k++) here |= local_id(ids[k], first, num_local) >= 0;
      if (!here) continue;
      std::memcpy(out, record, size_t(record_bytes));
      int32_t* local = reinterpret_cast<int32_t*>(out + ids_offset);
      localize(local, local, top_k, first, num_local);
      out += record_bytes;
      taken[rank]++;
    }
  }
}

API void moe_rows_localize(int32_t* ids, int64_t ld, int64_t rows, int64_t top_k, int64_t first, int64_t num_local) {
  for (int64_t n = 0; n < rows; n++) localize(ids + n * ld, ids + n * ld, top_k, first, num_local);
}

// Rows sorted by expert, then by token, then by choice: offsets [E + 1], positions [N, K] with -1 for no expert.
API void moe_rows_group(const int32_t* ids, int64_t ld, int64_t tokens, int64_t top_k, int64_t experts,
                        int32_t* offsets, int64_t* positions) {
  int64_t* next = scratch<int64_t>(SHARED_INDEX, experts + 1);
  std::fill(next, next + experts + 1, int64_t(0));
  for (int64_t n = 0; n < tokens; n++)
    for (int64_t k = 0; k < top_k; k++)
      if (ids[n * ld + k] >= 0) next[ids[n * ld + k] + 1]++;
  for (int64_t e = 0; e < experts; e++) next[e + 1] += next[e];
  for (int64_t e = 0; e <= experts; e++) offsets[e] = int32_t(next[e]);
  for (int64_t n = 0; n < tokens; n++)
    for (int64_t k = 0; k < top_k; k++) {
      const int32_t id = ids[n * ld + k];
      positions[n * top_k + k] = id >= 0 ? next[id]++ : -1;
    }
}

// Row n of data is copied to every row in positions [N, K].
API void moe_rows_spread(const char* data, int64_t ld_bytes, int64_t row_bytes, const int64_t* positions, int64_t tokens,
                         int64_t top_k, char* out) {
  parallel_ranges(tokens, double(row_bytes * top_k) * COPIED, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; n++)
      for (int64_t k = 0; k < top_k; k++) {
        const int64_t position = positions[n * top_k + k];
        if (position >= 0) std::memcpy(out + position * row_bytes, data + n * ld_bytes, size_t(row_bytes));
      }
  });
}

// out [N, D]: sum over s of weights[n, s] * rows[positions[n, s]]; null weights mean 1.
API void moe_rows_sum(int is_bf16, const void* rows, int64_t ld, const int64_t* positions, int64_t width,
                      const float* weights, int64_t ld_weights, void* out, int64_t count, int64_t hidden) {
  auto run = [&](auto a) {
    using T = decltype(a);
    sum_rows<T>(static_cast<const T*>(rows), ld, positions, width, weights, ld_weights, static_cast<T*>(out), count,
                hidden);
  };
  is_bf16 ? run(bf16()) : run(float());
}
