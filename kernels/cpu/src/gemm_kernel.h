// The register-blocked kernel behind gemm.h, for every machine without matrix tiles: MR rows x NR panels of C stay in
// registers over the whole of K. Included by the file of each dtype.
#pragma once

#include "gemm.h"
#include "vec.h"

namespace moe {

// Widest tile in panels, and rows of tiles of 4, 2 and 1 panels, by the register count: accumulators + one B vector per
// panel + one of A.
#if defined(MOE_AVX512)
constexpr int TILE_PANELS = 4, TILE_ROWS = 6, PAIR_ROWS = 12, SINGLE_ROWS = 16;
#else
constexpr int TILE_PANELS = 1, TILE_ROWS = 1, PAIR_ROWS = 2, SINGLE_ROWS = WIDTH == 8 ? 6 : 4;
#endif

// One step: a unit of A, broadcast, times a unit of each of 16 columns, in `PARTS_OF_UNIT` multiply-adds. `BYTES`: those
// of a unit of A; without a bf16 dot product A is float (see `widened`).
template <class T>
struct Dot;

template <>
struct Dot<float> {
  static constexpr int PARTS_OF_UNIT = 1, BYTES = 4;
  using B = F16;
  using A = vf;
  static INLINE B columns(const uint32_t* p, int) { return load(reinterpret_cast<const float*>(p)); }
  static INLINE A broadcast(const char* p, int) {
    float x;
    std::memcpy(&x, p, 4);
    return x - vf{};
  }
  static INLINE void add(F16& c, const A& a, const B& b) { PARTS_LOOP c.v[i] = fma(a, b.v[i], c.v[i]); }
};

#if defined(MOE_AVX512_BF16)
template <>
struct Dot<bf16> {
  static constexpr int PARTS_OF_UNIT = 1, BYTES = 4;
  using B = __m512bh;
  using A = B;
  static INLINE B columns(const uint32_t* p, int) { return (__m512bh)_mm512_loadu_si512(p); }
  static INLINE A broadcast(const char* p, int) {
    int unit;
    std::memcpy(&unit, p, 4);
    return (__m512bh)_mm512_set1_epi32(unit);
  }
  static INLINE void add(F16& c, const A& a, const B& b) {
    c.v[0] = (vf)_mm512_dpbf16_ps((__m512)c.v[0], a, b);
  }
};
template <class T, bool BY_STEPS>
const char* widened(const char* a, int64_t&, int64_t, int64_t) {
  return a;
}
#else
template <>
struct Dot<bf16> {
  static constexpr int PARTS_OF_UNIT = 2, BYTES = 8;
  using B = F16;
  using A = vf;
  static INLINE B columns(const uint32_t* p, int part) { return part == 0 ? load_even(p) : load_odd(p); }
  static INLINE A broadcast(const char* p, int part) { return Dot<float>::broadcast(p + 4 * part, 0); }
  static INLINE void add(F16& c, const A& a, const B& b) { Dot<float>::add(c, a, b); }
};
// A as the kernel reads it: bf16 as float, because a float of memory is broadcast by its load. `lda` becomes that of the
// copy, whose rows do not start in the same sets of the L1 cache.
template <class T, bool BY_STEPS>
const char* widened(const char* a, int64_t& lda, int64_t m, int64_t steps) {
  if (PER_UNIT<T> == 1) return a;
  const int64_t lines = BY_STEPS ? steps : m, width = PER_UNIT<T> * (BY_STEPS ? m : steps);
  const int64_t stride = ceil_div(width, LANES) * LANES + LANES;
  float* copy = scratch<float>(WIDENED, lines * stride);
  for (int64_t i = 0; i < lines; i++) {
    const bf16* row = reinterpret_cast<const bf16*>(a + i * lda);
    int64_t j = 0;
    for (; j + LANES <= width; j += LANES) store(copy + i * stride + j, load(row + j));
    for (; j < width; j++) copy[i * stride + j] = to_float(row[j]);
  }
  lda = stride * 4;
  return reinterpret_cast<const char*>(copy);
}
#endif

// Prefetches of a tile while it computes: in its first `steps` steps one line of each panel from `first` on, `stride`
// apart; afterwards the same from `then` on.
struct Fetch {
  int64_t steps, stride;
  const uint32_t *first, *then;
};
// Prefetch distance in steps when B streams from memory: more where a tile has fewer lines in a step.
template <int NR>
constexpr int64_t NEAR = NR < 4 ? 64 : 24;

// Results of a type other than float are rounded to it where they are stored.
template <class C>
constexpr bool ROUNDED = PER_UNIT<C> == 2;

// BY_STEPS: layout of A's units, see gemm.h. Rounded results go to memory, whose lines are prefetched.
template <class T, int MR, int NR, bool BY_STEPS, class C = float>
__attribute__((noinline)) void tile(const char* a, int64_t lda, const uint32_t* b, int64_t panel, int64_t steps, C* c,
                                    int64_t ldc, bool accumulate, const Fetch& fetch) {
  F16 sums[MR][NR];
  if constexpr (ROUNDED<C>) {
#pragma GCC unroll 16
    for (int m = 0; m < MR; m++)
      for (int n = 0; n < NR; n += 2) __builtin_prefetch(c + m * ldc + n * LANES, 1, 2);
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) sums[m][n] = !ROUNDED<C> && accumulate ? load(c + m * ldc + n * LANES) : zero();

  // Rows in threes from one pointer each: row + {0, 1, 2} * lda are free addressing modes.
  constexpr int GROUPS = (MR + 2) / 3, LINES = MR <= 2 ? NR : NR < 2 ? 1 : 2;
  const char* row[GROUPS];
#pragma GCC unroll 6
  for (int g = 0; g < GROUPS; g++) row[g] = a + 3 * g * lda;
  const char* unit = a;
  const uint32_t* line = fetch.first;
  int64_t stop = std::min(fetch.steps, steps);
  for (int64_t k = 0; k < steps; stop = steps, line = fetch.then)
    for (; k < stop; k++) {
#pragma GCC unroll 4
      for (int n = 0; n < LINES; n++) __builtin_prefetch(line + n * fetch.stride, 0, 2);
#pragma GCC unroll 2
      for (int part = 0; part < Dot<T>::PARTS_OF_UNIT; part++) {
        typename Dot<T>::B columns[NR];
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) columns[n] = Dot<T>::columns(b + n * panel, part);
#pragma GCC unroll 16
        for (int m = 0; m < MR; m++) {
          const char* from = BY_STEPS ? unit + Dot<T>::BYTES * m : row[m / 3] + (m % 3) * lda;
          const auto left = Dot<T>::broadcast(from, part);
#pragma GCC unroll 4
          for (int n = 0; n < NR; n++) Dot<T>::add(sums[m][n], left, columns[n]);
        }
      }
      b += LANES;
      line += LANES;
      if (BY_STEPS) {
        unit += lda;
      } else {
#pragma GCC unroll 6
        for (int g = 0; g < GROUPS; g++) row[g] += Dot<T>::BYTES;
      }
    }
#pragma GCC unroll 16
  for (int m = 0; m < MR; m++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) store(c + m * ldc + n * LANES, sums[m][n]);
}

// Results that are rounded have rows of full tiles alone.
template <class T, int NR, bool BY_STEPS, class C>
void tile_column(const char* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t steps, C* c,
                 int64_t ldc, bool accumulate, const uint32_t* ahead) {
  constexpr int FULL = NR == 4 ? TILE_ROWS : NR == 2 ? PAIR_ROWS : SINGLE_ROWS;
  const int64_t row_bytes = BY_STEPS ? Dot<T>::BYTES : lda;
  // A single tile prefetches its own B, and at the end the beginning of the next B. Of several tiles, the first ones
  // prefetch all of the next B, one or two panels each, while B itself comes from cache.
  const int64_t share = m <= FULL ? 0 : m <= 3 * FULL ? 2 : 1;
  const uint32_t* own = b + NEAR<NR> * LANES;
  int64_t done = 0, fetched = 0;
  auto run = [&](auto rows) {
    constexpr int MR = decltype(rows)::value;
    Fetch fetch{steps, panel, own, own};
    if (share == 0) {
      if (MR > 2) fetch.stride = (NR - 1) * panel;
      if (ahead) fetch = {std::max<int64_t>(steps - NEAR<NR>, 0), fetch.stride, own, ahead};
    } else if (ahead && fetched < NR) {
      fetch.first = ahead + fetched * panel;
      fetch.stride = (share - 1) * panel;
      fetched += share;
    }
    tile<T, MR, NR, BY_STEPS>(a + done * row_bytes, lda, b, panel, steps, c + done * ldc, ldc, accumulate, fetch);
    done += MR;
  };
  if constexpr (BY_STEPS) {
    if constexpr (FULL == 6 && NR == 1)
      while (m - done >= 6 && m - done != 8) run(std::integral_constant<int, 6>());
    while (done < m) run(std::integral_constant<int, 4>());
  } else if constexpr (FULL == 6 && NR == 1) {  // the last two tiles have about equally many rows
    while (m - done >= 2 * FULL || m - done == FULL) run(std::integral_constant<int, FULL>());
    const int64_t rest = m - done;
    auto few = [&](int64_t rows) {
      switch (rows) {
#define CASE(rows) case rows: return run(std::integral_constant<int, rows>());
        CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1)
#undef CASE
      }
    };
    few(rest > FULL ? ceil_div(rest, 2) : rest);
    few(m - done);
  } else {
    while (m - done >= FULL) run(std::integral_constant<int, FULL>());
    if constexpr (FULL == 16)
      if (m - done >= 8) run(std::integral_constant<int, 8>());
    if constexpr (FULL == 16)
      if (m - done >= 6) run(std::integral_constant<int, 6>());
    switch (m - done) {
#define CASE(rows)                                                               \
  case rows:                                                                     \
    if constexpr (!ROUNDED<C> && rows < FULL && (FULL == PAIR_ROWS || rows < 6)) \
      run(std::integral_constant<int, rows>());                                  \
    break;
      CASE(11) CASE(10) CASE(9) CASE(8) CASE(7) CASE(6) CASE(5) CASE(4) CASE(3) CASE(2) CASE(1)
#undef CASE
    }
  }
}

template <class T, bool BY_STEPS>
void tiles(const char* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t np, int64_t steps, float* c,
           int64_t ldc, bool accumulate, const uint32_t* ahead = nullptr) {
  a = widened<T, BY_STEPS>(a, lda, m, steps);
  int64_t n = 0;
  auto run = [&](auto width) {
    constexpr int NR = decltype(width)::value;
    for (; np - n >= NR; n += NR)
      tile_column<T, NR, BY_STEPS>(a, lda, m, b + n * panel, panel, steps, c + n * LANES, ldc, accumulate,
                                   ahead ? ahead + n * panel : nullptr);
  };
  // Max rows of a two-panel tile in one pass: B is then read once.
  const bool once = !BY_STEPS && m > TILE_ROWS && m <= PAIR_ROWS;
  if constexpr (TILE_PANELS >= 4) {
    if (!once) run(std::integral_constant<int, 4>());
    run(std::integral_constant<int, 2>());
  } else if constexpr (!BY_STEPS) {  // chains enough to hide the latency of a multiply-add
    if (m <= TILE_ROWS) run(std::integral_constant<int, 4>());
    if (m <= PAIR_ROWS) run(std::integral_constant<int, 2>());
  }
  run(std::integral_constant<int, 1>());
}

// See gemm_rounded. Rows that take one pass over B are left to `tiles`.
template <class T>
int64_t rounded_tiles(const char* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t steps, T* c,
                      int64_t ldc, const uint32_t* ahead) {
  if constexpr (TILE_PANELS < 4) return 0;
  if (m <= PAIR_ROWS) return 0;
  const int64_t rows = m / TILE_ROWS * TILE_ROWS;
  a = widened<T, false>(a, lda, rows, steps);
  tile_column<T, TILE_PANELS, false>(a, lda, rows, b, panel, steps, c, ldc, false, ahead);
  return rows;
}

template <class T>
void pack_rows(const T* const* rows, int64_t count, int64_t k, int64_t steps, uint32_t* out) {
  constexpr int BLOCK = LANES * PER_UNIT<T>;
  alignas(64) static const uint32_t none[LANES] = {};
  alignas(64) uint32_t tail[LANES][LANES];
  alignas(64) uint32_t block[LANES][LANES];
  for (int64_t step = 0; step < steps; step += LANES) {
    const uint32_t* from[LANES];
    int64_t first = step * PER_UNIT<T>, here = std::min<int64_t>(BLOCK, k - first);
    for (int64_t i = 0; i < LANES; i++) {
      if (i >= count || here <= 0) {
        from[i] = none;
      } else if (here == BLOCK) {
        from[i] = reinterpret_cast<const uint32_t*>(rows[i] + first);
      } else {
        std::memset(tail[i], 0, sizeof tail[i]);
        std::memcpy(tail[i], rows[i] + first, size_t(here) * sizeof(T));
        from[i] = tail[i];
      }
    }
    if (steps - step >= LANES) {
      transpose(out + step * LANES, LANES, from);
    } else {
      transpose(block[0], LANES, from);
      std::memcpy(out + step * LANES, block, size_t(steps - step) * LANES * 4);
    }
  }
}

// 32 channels of the rows of one step, as units: 16 to `low`, 16 to `high` if there is a second panel.
INLINE void interleave(const float* const* row, uint32_t* low, uint32_t* high) {
  std::memcpy(low, row[0], LANES * 4);
  if (high) std::memcpy(high, row[0] + LANES, LANES * 4);
}
INLINE void interleave(const bf16* const* row, uint32_t* low, uint32_t* high) {
#if defined(MOE_AVX512)
  __m512i even = _mm512_loadu_si512(row[0]), odd = _mm512_loadu_si512(row[1]);
  // Lane i of the result: word i of even, word i of odd. Index bit 5 selects the source.
  const __m512i first = _mm512_add_epi32(_mm512_set1_epi32(0x00200000),
                                         _mm512_mullo_epi32(_mm512_set1_epi32(0x00010001),
                                                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
                                                                              13, 14, 15)));
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(0x00100010));
  _mm512_storeu_si512(low, _mm512_permutex2var_epi16(even, first, odd));
  if (high) _mm512_storeu_si512(high, _mm512_permutex2var_epi16(even, second, odd));
#else
  for (int i = 0; i < LANES; i++) low[i] = row[0][i].bits | uint32_t(row[1][i].bits) << 16;
  if (high)
    for (int i = 0; i < LANES; i++) high[i] = row[0][LANES + i].bits | uint32_t(row[1][LANES + i].bits) << 16;
#endif
}

// Channels outermost: each line of a row is read once and panels are written from end to end.
template <class T>
void pack_values(const T* const* rows, int64_t count, int64_t channels, int64_t steps, uint32_t* out) {
  alignas(64) static const T none[2 * LANES] = {};
  for (int64_t channel = 0; channel < channels; channel += 2 * LANES) {
    const int64_t here = channels - channel;
    uint32_t* low = out + channel / LANES * steps * LANES;
    uint32_t* high = here > LANES ? low + steps * LANES : nullptr;
    for (int64_t step = 0; step < steps; step++, low += LANES) {
      const T* source[PER_UNIT<T>];
      alignas(64) T edge[PER_UNIT<T>][2 * LANES];
      for (int i = 0; i < PER_UNIT<T>; i++) {
        const int64_t row = step * PER_UNIT<T> + i;
        source[i] = row < count ? rows[row] + channel : none;
        __builtin_prefetch(source[i] + 2 * LANES);  // the next line of this row, used after those of all other rows
        if (row < count && here < 2 * LANES) {
          std::memset(edge[i], 0, sizeof edge[i]);
          std::memcpy(edge[i], source[i], size_t(here) * sizeof(T));
          source[i] = edge[i];
        }
      }
      interleave(source, low, high ? high + step * LANES : nullptr);
    }
  }
}

}  // namespace moe
