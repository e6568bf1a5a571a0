// Permute and unpermute of token rows between ranks and experts: routing, packed copies, and weighted sums.
//
// A decode step has few rows per layer, so each function is one call.
// Legend: T tokens of this rank, N tokens received, K choices per token, S positions per sum, R ranks, E local experts,
// D hidden, M rows of the experts' batch.
#include "permutation.h"

namespace moe {
namespace {

constexpr double COPIED = 0.1;  // nanoseconds per byte

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
                        const uint8_t* takes_part, int64_t* counts, int32_t* positions) {
  std::fill(positions, positions + tokens * ranks, int32_t(-1));
  std::fill(counts, counts + ranks, int64_t(0));
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t k = 0; k < top_k; k++) {
      const int64_t id = ids[t * ld + k], rank = id / num_local;
      if (id < 0 || rank >= ranks || !takes_part[rank] || positions[t * ranks + rank] >= 0) continue;
      positions[t * ranks + rank] = int32_t(counts[rank]++);
    }
  for (int64_t rank = 0, before = 0; rank < ranks; before += counts[rank++])
    for (int64_t t = 0; t < tokens; t++) {
      int32_t& position = positions[t * ranks + rank];
      if (position >= 0) position += int32_t(before);
    }
}

struct RecordPart {
  const char* data;
  int64_t ld, bytes, offset;  // row stride, row size and offset in the record, in bytes
};

// Token t's record begins at bases[r] + positions[t, r] * record_bytes of `out`, for every target rank r.
API void moe_rows_pack(const RecordPart* parts, int64_t num_parts, int64_t tokens, const int32_t* positions,
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

API void moe_rows_group(const int32_t* ids, int64_t ld, int64_t tokens, int64_t top_k, int64_t experts,
                        int32_t* offsets, int32_t* positions) {
  int32_t* next = scratch<int32_t>(SHARED_INDEX, experts);
  sort_pairs(ids, ld, tokens, top_k, experts, offsets, next, positions, nullptr);
}

// Row n of data is copied to every row in positions [N, S].
API void moe_rows_permute(const char* data, int64_t ld_bytes, int64_t row_bytes, const int32_t* positions,
                          int64_t tokens, int64_t width, char* out) {
  parallel_ranges(tokens, double(row_bytes * width) * COPIED, [&](int64_t from, int64_t to) {
    for (int64_t n = from; n < to; n++)
      for (int64_t s = 0; s < width; s++) {
        const int64_t position = positions[n * width + s];
        if (position >= 0) std::memcpy(out + position * row_bytes, data + n * ld_bytes, size_t(row_bytes));
      }
  });
}

API void moe_rows_combine(int is_bf16, const void* rows, int64_t ld, const int32_t* positions, int64_t width,
                          const float* weights, int64_t ld_weights, const void* sum, int64_t lds, void* out,
                          int64_t tokens, int64_t hidden) {
  auto run = [&](auto a) {
    using T = decltype(a);
    combine_rows(static_cast<const T*>(rows), ld, positions, width, weights, ld_weights, static_cast<const T*>(sum),
                 lds, static_cast<T*>(out), tokens, hidden);
  };
  is_bf16 ? run(bf16()) : run(float());
}
