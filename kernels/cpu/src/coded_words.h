// Products of coded weights with integers by AVX2: vpmaddwd, 16 products an instruction. Included by coded.cpp.
//
// Legend: M rows, K in-features, G groups, B blocks of K, MR rows of a tile.
// A row is K integers of 16 bits, and its blocks. Of eight elements the order is 0 2 1 3 4 6 5 7: the even and the odd
// bytes of four codes are the low bytes of pairs of 16 bits.
#pragma once

#include "coded_blocks.h"

#if defined(MOE_AVX2)
#define MOE_INTEGERS 1

namespace moe {

static void integer_row(const bf16* x, int64_t k, int64_t block, int64_t in_group, int32_t offset, char* out) {
  RowBlock* blocks = reinterpret_cast<RowBlock*>(out + 2 * k);
  float total = 0;
  for (int64_t b = 0; b < k / block; b++) {
    F16 most = zero();
    for (int64_t j = 0; j < block; j += LANES) {
      const F16 value = load_some(x + b * block + j, block - j);
      most = max(most, max(value, zero() - value));
    }
    const float largest = highest(most), scale = largest / LARGEST;
    const F16 inverse = set1(largest > 0 ? LARGEST / largest : 0.f);
    __m256i sum = _mm256_setzero_si256();
    for (int64_t j = 0; j < block; j += LANES) {
      const F16 value = load_some(x + b * block + j, block - j) * inverse;
      for (int64_t i = 0; i < PARTS && j + i * OCTET < block; i++) {
        const __m256i q = _mm256_cvtps_epi32((__m256)value.v[i]);
        sum = _mm256_add_epi32(sum, q);
        const __m256i turned = _mm256_shuffle_epi32(q, _MM_SHUFFLE(3, 1, 2, 0));
        const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(turned), _mm256_extracti128_si256(turned, 1));
        std::memcpy(out + 2 * (b * block + j + i * OCTET), &words, sizeof words);
      }
    }
    int32_t lane[WIDTH], whole = 0;
    std::memcpy(lane, &sum, sizeof sum);
    for (int i = 0; i < WIDTH; i++) whole += lane[i];
    total = (b % in_group == 0 ? 0.f : total) + scale * float(whole);
    blocks[b] = {scale, total, -offset * whole};
  }
}

static const char* integer_rows(const Coding& form, const void* x, int64_t* ldx, int64_t m, int64_t k,
                                Purpose purpose) {
  const int64_t block = block_of(form), bytes = 2 * k + int64_t(sizeof(RowBlock)) * (k / block);
  const int32_t offset = IntegerTable(form).offset;
  const int64_t stride = ceil_div(bytes, 64) * 64 + 64;  // rows share no cache set
  return converted_rows(x, ldx, m, k, stride, purpose, [&](const bf16* row, char* out) {
    integer_row(row, k, block, form.group / block, offset, out);
  });
}

// Elements 0 and 2, 1 and 3, 4 and 6, 5 and 7 of eight columns.
struct Pairs {
  __m256i pair[4];

  // `part`: the first or last eight columns of a panel.
  template <int BITS>
  INLINE void take(const char* p, int part, bool looked_up, const __m256i& table) {
    const __m256i first = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + part * 32));
    __m256i low, high;
    if constexpr (BITS == 8) {
      low = first, high = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 64 + part * 32));
    } else {
      const __m256i mask = _mm256_set1_epi8(15);
      low = _mm256_and_si256(first, mask), high = _mm256_and_si256(_mm256_srli_epi16(first, 4), mask);
      if (looked_up) low = _mm256_shuffle_epi8(table, low), high = _mm256_shuffle_epi8(table, high);
    }
    const __m256i even = _mm256_set1_epi16(255);
    pair[0] = _mm256_and_si256(low, even), pair[1] = _mm256_srli_epi16(low, 8);
    pair[2] = _mm256_and_si256(high, even), pair[3] = _mm256_srli_epi16(high, 8);
  }
  INLINE __m256i times(const char* row) const {
    __m256i product[4];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
      int words;
      std::memcpy(&words, row + 4 * i, 4);
      product[i] = _mm256_madd_epi16(pair[i], _mm256_set1_epi32(words));
    }
    return _mm256_add_epi32(_mm256_add_epi32(product[0], product[1]), _mm256_add_epi32(product[2], product[3]));
  }
};

template <int BITS, int MR>
__attribute__((noinline)) static void word_tile(const Coding& form, const char* x, int64_t ldx, int64_t k,
                                                const char* panel, const char* next, float* c, int64_t ldc) {
  const IntegerTable table(form);
  const __m256i bytes =
      _mm256_broadcastsi128_si256(_mm_load_si128(reinterpret_cast<const __m128i*>(table.bytes)));
  const PanelAhead lines(form.panel_bytes(k), panel, next);
  const int64_t block = block_of(form), in_group = form.group / block;
  const int64_t step = OCTET * LANES * BITS / 8, codes = form.code_bytes(), group_bytes = form.group_bytes();
  F16 total[MR];
  for (int i = 0; i < MR; i++) total[i] = zero();
  for (int64_t g = 0; g < k / form.group; g++) {
    const char* p = panel + g * group_bytes;
    F16 sums[MR];
    for (int i = 0; i < MR; i++) sums[i] = zero();
    for (int64_t b = g * in_group; b < (g + 1) * in_group; b++) {
      __m256i sum[MR][PARTS];
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++)
        for (int n = 0; n < PARTS; n++) sum[i][n] = _mm256_set1_epi32(blocks_of(x + i * ldx, k)[b].start);
      const char* row = x + 2 * b * block;
      for (int64_t j = 0; j < block; j += OCTET, p += step, row += 2 * OCTET) {
        const char* ahead = p + lines.from(p - panel);
        __builtin_prefetch(ahead, 0, 2);
        if (BITS == 8) __builtin_prefetch(ahead + 64, 0, 2);
#pragma GCC unroll 2
        for (int n = 0; n < PARTS; n++) {
          Pairs pairs;
          pairs.take<BITS>(p, n, table.looked_up, bytes);
#pragma GCC unroll 4
          for (int i = 0; i < MR; i++) sum[i][n] = _mm256_add_epi32(sum[i][n], pairs.times(row + i * ldx));
        }
      }
#pragma GCC unroll 4
      for (int i = 0; i < MR; i++) {
        F16 value;
        for (int n = 0; n < PARTS; n++) value.v[n] = (vf)_mm256_cvtepi32_ps(sum[i][n]);
        sums[i] = fma(set1(blocks_of(x + i * ldx, k)[b].scale), value, sums[i]);
      }
    }
    const GroupScale group(form, table.unit, panel + g * group_bytes + codes, panel, k, g);
    for (int i = 0; i < MR; i++)
      total[i] = group.add(sums[i], &blocks_of(x + i * ldx, k)[(g + 1) * in_group - 1].total, total[i]);
  }
  for (int i = 0; i < MR; i++) store(c + i * ldc, total[i]);
}

template <int BITS>
static void integer_columns(const Coding& form, const char* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                            int64_t count, const char* next, float* c, int64_t ldc) {
  const int64_t panel = form.panel_bytes(k);
  for (int64_t n = 0; n < count; n++) {
    const char *own = panels + n * panel, *then = n + 1 < count ? own + panel : next;
    int64_t done = 0;
    auto run = [&](auto rows) {
      constexpr int MR = decltype(rows)::value;
      word_tile<BITS, MR>(form, x + done * ldx, ldx, k, own, then, c + done * ldc + n * LANES, ldc);
      done += MR;
    };
    while (m - done >= 4) run(std::integral_constant<int, 4>());
    if (m - done >= 2) run(std::integral_constant<int, 2>());
    if (done < m) run(std::integral_constant<int, 1>());
  }
}

}  // namespace moe
#endif
