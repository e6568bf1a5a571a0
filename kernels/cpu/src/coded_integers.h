// Products of coded weights with integers: vpdpbusd, 64 products an instruction. Included by coded.cpp.
//
// Legend: M rows, K in-features, G groups, B blocks of K, MR x NR rows x panels of a tile.
// A row is K bytes `high`, K bytes `low` (element = 256 high + low, both signed), and its blocks. If some rows are
// multiplied by coded_floats.h, K bf16 of 256 high and K of low follow.
#pragma once

#include "coded_blocks.h"

#if defined(MOE_AVX512) && defined(__AVX512VNNI__)
#define MOE_VNNI 1
#define MOE_INTEGERS 1

namespace moe {

constexpr int64_t AHEAD = 1024;      // prefetch distance of a single panel in bytes
constexpr int64_t FAR_AHEAD = 4096;  // the same where streams are short: the processor's own prefetching starts late
inline int64_t floats_at(int64_t k, int64_t block) {
  return ceil_div(2 * k + int64_t(sizeof(RowBlock)) * (k / block), 64) * 64;
}

static void integer_row(const bf16* x, int64_t k, int64_t block, int64_t in_group, int32_t offset, char* out) {
  RowBlock* blocks = reinterpret_cast<RowBlock*>(out + 2 * k);
  float total = 0;
  for (int64_t b = 0; b < k / block; b++) {
    F16 most = zero();
    for (int64_t j = 0; j < block; j += LANES) {
      const F16 value = load_some(x + b * block + j, block - j);
      most = max(most, max(value, zero() - value));
    }
    const float largest = _mm512_reduce_max_ps((__m512)most.v[0]), scale = largest / LARGEST;
    const F16 inverse = set1(largest > 0 ? LARGEST / largest : 0.f);
    __m512i sum = _mm512_setzero_si512();
    for (int64_t j = 0; j < block; j += LANES) {
      const F16 value = load_some(x + b * block + j, block - j) * inverse;
      const __m512i q = _mm512_cvtps_epi32((__m512)value.v[0]);
      const __m512i low = _mm512_srai_epi32(_mm512_slli_epi32(q, 24), 24);
      const __m512i high = _mm512_srai_epi32(_mm512_sub_epi32(q, low), 8);
      sum = _mm512_add_epi32(sum, q);
      const int64_t here = std::min<int64_t>(LANES, block - j);
      const __mmask16 mask = __mmask16((1u << here) - 1);
      _mm512_mask_cvtepi32_storeu_epi8(out + b * block + j, mask, high);
      _mm512_mask_cvtepi32_storeu_epi8(out + k + b * block + j, mask, low);
    }
    const int32_t whole = _mm512_reduce_add_epi32(sum);
    total = (b % in_group == 0 ? 0.f : total) + scale * float(whole);
    blocks[b] = {scale, total, -offset * whole};
  }
}

// True if some of m rows are multiplied by tiles of bf16.
static bool by_floats(const Coding& form, int64_t m);
// Bytes of a row of m.
static int64_t row_bytes(const Coding& form, int64_t m, int64_t k) {
  return floats_at(k, block_of(form)) + (by_floats(form, m) ? 4 * k : 0) + 64;  // rows share no cache set
}
// Integers as floats: K of `high`, K of `low`.
static void float_row(const char* row, int64_t k, char* out);

static const char* integer_rows(const Coding& form, const void* x, int64_t* ldx, int64_t m, int64_t k,
                                Purpose purpose) {
  const int64_t block = block_of(form);
  const int32_t offset = IntegerTable(form).offset;
  return converted_rows(x, ldx, m, k, row_bytes(form, m, k), purpose, [&](const bf16* row, char* out) {
    integer_row(row, k, block, form.group / block, offset, out);
    if (by_floats(form, m)) float_row(out, k, out + floats_at(k, block));
  });
}

// The values of codes, in each 128 bits.
static INLINE __m512i lookup(const IntegerTable& table) {
  return _mm512_broadcast_i32x4(_mm_load_si128(reinterpret_cast<const __m128i*>(table.bytes)));
}

static INLINE __m512i quad(const char* p) {
  int bytes;
  std::memcpy(&bytes, p, 4);
  return _mm512_set1_epi32(bytes);
}

// Unsigned bytes of eight elements of 16 columns: elements 0 to 3, and 4 to 7.
template <int BITS>
static INLINE void take(const char* p, bool looked_up, __m512i table, __m512i* low, __m512i* high) {
  const __m512i codes = _mm512_loadu_si512(p);
  if constexpr (BITS == 8) {
    *low = codes, *high = _mm512_loadu_si512(p + 64);
  } else {
    const __m512i mask = _mm512_set1_epi8(15);
    *low = _mm512_and_si512(codes, mask), *high = _mm512_and_si512(_mm512_srli_epi16(codes, 4), mask);
    if (looked_up) *low = _mm512_shuffle_epi8(table, *low), *high = _mm512_shuffle_epi8(table, *high);
  }
}

template <int BITS, int MR, int NR>
__attribute__((noinline)) static void integer_tile(const Coding& form, const char* x, int64_t ldx, int64_t k,
                                                   const char* panels, int64_t panel, const char* next, float* c,
                                                   int64_t ldc) {
  const IntegerTable table(form);
  const __m512i bytes = lookup(table);
  const PanelAhead lines(panel, panels, next);
  const int64_t block = block_of(form), in_group = form.group / block;
  const int64_t step = OCTET * LANES * BITS / 8, codes = form.code_bytes(), group_bytes = form.group_bytes();
  F16 total[MR][NR];
  for (int i = 0; i < MR; i++)
    for (int n = 0; n < NR; n++) total[i][n] = zero();
  for (int64_t g = 0; g < k / form.group; g++) {
    const char* p = panels + g * group_bytes;
    F16 part[MR][NR];
    const float* sums[MR];
    for (int i = 0; i < MR; i++)
      for (int n = 0; n < NR; n++) part[i][n] = zero();
    for (int64_t b = g * in_group; b < (g + 1) * in_group; b++) {
      __m512i high[MR][NR], low[MR][NR];
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) {
          high[i][n] = _mm512_setzero_si512();
          low[i][n] = _mm512_set1_epi32(blocks_of(x + i * ldx, k)[b].start);
        }
      const char* row = x + b * block;
      for (int64_t j = 0; j < block; j += OCTET, p += step, row += OCTET) {
        __m512i first[NR], second[NR];
        const char* ahead = p + lines.from(p - panels);
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) {
          take<BITS>(p + n * panel, table.looked_up, bytes, &first[n], &second[n]);
          __builtin_prefetch(ahead + n * panel, 0, 2);
          if (BITS == 8) __builtin_prefetch(ahead + n * panel + 64, 0, 2);
        }
#pragma GCC unroll 4
        for (int i = 0; i < MR; i++) {
          const char* at = row + i * ldx;
          const __m512i h0 = quad(at), h1 = quad(at + 4), l0 = quad(at + k), l1 = quad(at + k + 4);
#pragma GCC unroll 4
          for (int n = 0; n < NR; n++) {
            high[i][n] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(high[i][n], first[n], h0), second[n], h1);
            low[i][n] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(low[i][n], first[n], l0), second[n], l1);
          }
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++) {
        const RowBlock* of_row = blocks_of(x + i * ldx, k) + b;
        const F16 scale = set1(of_row->scale);
        sums[i] = &of_row->total;
#pragma GCC unroll 4
        for (int n = 0; n < NR; n++) {
          F16 value;
          value.v[0] = (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high[i][n], 8), low[i][n]));
          part[i][n] = fma(scale, value, part[i][n]);
        }
      }
    }
    for (int n = 0; n < NR; n++) {
      const char* first = panels + n * panel;
      const GroupScale group(form, table.unit, first + g * group_bytes + codes, first, k, g);
      for (int i = 0; i < MR; i++) total[i][n] = group.add(part[i][n], sums[i], total[i][n]);
    }
  }
  for (int i = 0; i < MR; i++)
    for (int n = 0; n < NR; n++) store(c + i * ldc + n * LANES, total[i][n]);
}

// One row and one panel: a single stream of memory, and BLOCK known, so that a group is straight code. Of one row four
// panels at once save broadcasts, but each is a stream of its own, and reading them takes longer than the products.
template <int BITS, int BLOCK>
__attribute__((noinline)) static void integer_panel(const Coding& form, const char* x, int64_t k, const char* panel,
                                                    int64_t left, const char* next, int64_t far, float* c) {
  constexpr int64_t STEP = OCTET * LANES * BITS / 8;
  const IntegerTable table(form);
  const __m512i bytes = lookup(table);
  const int64_t in_group = form.group / BLOCK, codes = form.code_bytes(), group_bytes = form.group_bytes();
  const RowBlock* blocks = blocks_of(x, k);
  F16 total = zero();
  for (int64_t g = 0; g < k / form.group; g++) {
    const char* p = panel + g * group_bytes;
    const char* end = p + codes;
    F16 part = zero();
    for (int64_t b = g * in_group; b < (g + 1) * in_group; b++, p += BLOCK / OCTET * STEP) {
      const int64_t over = p - panel + far - left;
      const char *row = x + b * BLOCK, *ahead = over < 0 ? p + far : next + over;
      __m512i high = _mm512_setzero_si512(), low = _mm512_set1_epi32(blocks[b].start);
#pragma GCC unroll 16
      for (int64_t j = 0; j < BLOCK / OCTET; j++) {
        __m512i first, second;
        take<BITS>(p + j * STEP, table.looked_up, bytes, &first, &second);
        __builtin_prefetch(ahead + j * STEP, 0, 2);
        if (BITS == 8) __builtin_prefetch(ahead + j * STEP + 64, 0, 2);
        const char* at = row + j * OCTET;
        high = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(high, first, quad(at)), second, quad(at + 4));
        low = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(low, first, quad(at + k)), second, quad(at + k + 4));
      }
      if (BLOCK == 32) __builtin_prefetch(ahead + BLOCK / OCTET * STEP, 0, 2);  // the group's scales
      F16 value;
      value.v[0] = (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(_mm512_slli_epi32(high, 8), low));
      part = fma(set1(blocks[b].scale), value, part);
    }
    const float* sum = &blocks[(g + 1) * in_group - 1].total;
    total = GroupScale(form, table.unit, end, panel, k, g).add(part, sum, total);
  }
  store(c, total);
}

template <int BITS>
static void integer_columns(const Coding& form, const char* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                            int64_t count, const char* next, float* c, int64_t ldc) {
  const int64_t panel = form.panel_bytes(k), block = block_of(form);
  int64_t n = 0;
  if (m == 1 && (block == 32 || block == 64 || block == 128)) {
    const auto run = block == 32 ? integer_panel<BITS, 32> : block == 64 ? integer_panel<BITS, 64> : integer_panel<BITS, 128>;
    // Of 8 bits the memory's rate is the limit either way.
    const int64_t far = BITS == 8 || next == panels + count * panel ? AHEAD : FAR_AHEAD;
    for (; n < count; n++)
      run(form, x, k, panels + n * panel, (count - n) * panel, next, far, c + n * LANES);
    return;
  }
  auto run = [&](auto rows, auto width, int64_t i) {
    constexpr int NR = decltype(width)::value;
    integer_tile<BITS, decltype(rows)::value, NR>(form, x + i * ldx, ldx, k, panels + n * panel, panel,
                                                  n + NR < count ? panels + (n + NR) * panel : next,
                                                  c + i * ldc + n * LANES, ldc);
  };
  auto of_width = [&](auto width) {
    constexpr int NR = decltype(width)::value;
    for (; count - n >= NR; n += NR) {
      int64_t i = 0;
      if constexpr (NR <= 2)
        for (; m - i >= 4; i += 4) run(std::integral_constant<int, 4>(), width, i);
      for (; m - i >= 2; i += 2) run(std::integral_constant<int, 2>(), width, i);
      if (i < m) run(std::integral_constant<int, 1>(), width, i);
    }
  };
  if (m < 4) of_width(std::integral_constant<int, 4>());
  of_width(std::integral_constant<int, 2>());
  of_width(std::integral_constant<int, 1>());
}

}  // namespace moe
#endif
