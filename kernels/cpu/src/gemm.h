// The one matrix kernel of this library: C[m][16 np] (+)= A[m][K] B, B in panels (see common.h), C in float.
//
// Every element of C is one chain of multiply-adds over K from first to last, independent of m, np and the tiling, and
// `accumulate` continues a chain. So a row is batch-invariant, bit for bit.
#pragma once

#include "common.h"

namespace moe {

// A by rows, `lda` bytes apart, each of `steps` units. `panel` is the distance of B's panels in units. `ahead`, if
// given, is B of the next call (same panels and steps): it is prefetched into the L2 cache. Without it, nothing is
// prefetched: B was written just before.
template <class T>
void gemm(const void* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t np, int64_t steps, float* c,
          int64_t ldc, bool accumulate, const uint32_t* ahead = nullptr);

// The first rows of gemm of four panels, rounded to T in place of C: as many as fill the largest tiles. Returns their
// number; 0 where results are better written in other blocks, as by matrix tiles.
template <class T>
int64_t gemm_rounded(const void* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t steps, T* c,
                     int64_t ldc, const uint32_t* ahead);
template <>
inline int64_t gemm_rounded(const void*, int64_t, int64_t, const uint32_t*, int64_t, int64_t, float*, int64_t,
                            const uint32_t*) {
  return 0;
}

// A by steps: unit (row, step) at a[step * lda + row]. m must be a multiple of 4.
template <class T>
void gemm_by_steps(const uint32_t* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t np,
                   int64_t steps, float* c, int64_t ldc, bool accumulate);

// Panels of B per call of gemm_by_steps: all if each call transposes A, else few.
int64_t panels_by_steps(bf16);
inline int64_t panels_by_steps(float) { return 4; }

// While one exists on a thread, that thread's products keep the configuration of the matrix tiles: setting it takes as
// long as several small products. No code of others runs within it.
struct KeepTiles {
  KeepTiles();
  ~KeepTiles();
  KeepTiles(const KeepTiles&) = delete;
};

// parallel() for tasks that multiply.
template <class Body>
void parallel_products(int64_t tasks, const Body& body) {
  parallel(tasks, [&](int64_t task) {
    const KeepTiles keep;
    body(task);
  });
}

// Elements of K read at once: rows of A must be readable, and zero, up to a multiple of this.
int64_t k_multiple(bf16);
// Preferred row count of A.
int64_t row_multiple(bf16);
int64_t row_multiple(float);
inline int64_t k_multiple(float) { return 1; }
// Most rows of a task of a product of many rows: one row of tiles, whose results are written in the order of memory, which
// the processor prefetches, and not in strips of a few lines.
int64_t stripe_rows(bf16);
inline int64_t stripe_rows(float) { return INT64_MAX; }
// Keys of a block of attention, at most 128: tiles read and write the sums of all values once for each block.
int64_t key_block(bf16);
inline int64_t key_block(float) { return 64; }
// Columns of attention whose scores, weights and sums are computed together: with tiles so few that those of heads of
// up to 256 values stay in the L1 cache.
int64_t column_block(bf16);
inline int64_t column_block(float) { return 1 << 20; }
// Few rows are best rounded up to this: products of 1 and of 4 rows in turn would each configure the matrix tiles.
int64_t row_unit(bf16);
inline int64_t row_unit(float) { return 1; }

template <class T>
inline int64_t padded_k(int64_t k) {
  return ceil_div(k, k_multiple(T{})) * k_multiple(T{});
}
template <class T>
inline int64_t steps_of(int64_t k) {
  return padded_k<T>(k) / PER_UNIT<T>;
}

// One panel from up to 16 rows of K elements (missing rows and the steps beyond K are zero): weights and queries.
template <class T>
void pack_rows(const T* const* rows, int64_t count, int64_t k, int64_t steps, uint32_t* out);

// Panels whose columns are channels and whose K runs over `count` rows (attention values), zero up to `steps`.
template <class T>
void pack_values(const T* const* rows, int64_t count, int64_t channels, int64_t steps, uint32_t* out);

}  // namespace moe
