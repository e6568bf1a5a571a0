// Panels of coded weights to plain panels of bf16, for products with many rows. Included by coded.cpp.
//
// A value of 4 bits is a code of 3 bits and a sign times its scale: exact in bf16 if the scale has at most 5 significant
// bits. A code of 8 bits is exact itself, and a scale for the whole of K is applied to the sums.
#pragma once

#include "coded_integers.h"
#include "gemm.h"

#if defined(MOE_VNNI) && defined(MOE_AMX)
#define MOE_DECODED 1

namespace moe {

// Fewer rows are multiplied sooner as integers, by measurement.
inline int64_t least_decoded(const Coding& form) { return form.bits == 4 ? 14 : 32; }

// Two adjacent elements of 16 columns as units of bf16, which have them exactly.
static INLINE __m512i unit_of(__m512 even, __m512 odd) {
  return _mm512_or_si512(_mm512_srli_epi32(_mm512_castps_si512(even), 16), _mm512_castps_si512(odd));
}

// Eight elements of 16 columns: four units of each column.
static INLINE void decode_octet(const char* p, __m512 table, __m512 scale, uint32_t* out) {
  const __m512i codes = _mm512_loadu_si512(p);
  auto value = [&](__m512i index) { return _mm512_mul_ps(_mm512_permutexvar_ps(index, table), scale); };
  auto pair = [&](auto even, auto odd, int64_t step) {
    _mm512_store_si512(out + step * LANES, unit_of(value(_mm512_srli_epi32(codes, decltype(even)::value)),
                                                   value(_mm512_srli_epi32(codes, decltype(odd)::value))));
  };
  pair(std::integral_constant<int, 0>(), std::integral_constant<int, 8>(), 0);
  pair(std::integral_constant<int, 16>(), std::integral_constant<int, 24>(), 1);
  pair(std::integral_constant<int, 4>(), std::integral_constant<int, 12>(), 2);
  pair(std::integral_constant<int, 20>(), std::integral_constant<int, 28>(), 3);
}

// The same of codes of 8 bits, without a scale: a byte in the fraction of 2^23, minus that and 128.
static INLINE void decode_octet(const char* p, uint32_t* out) {
  const __m512i byte = _mm512_set1_epi32(255), base = _mm512_set1_epi32(0x4b000000);
  const __m512 middle = _mm512_set1_ps(8388608.f + 128.f);
  for (int half = 0; half < 2; half++) {
    const __m512i codes = _mm512_loadu_si512(p + half * 64);
    auto value = [&](auto shift) {
      const __m512i low = _mm512_and_si512(_mm512_srli_epi32(codes, decltype(shift)::value), byte);
      return _mm512_sub_ps(_mm512_castsi512_ps(_mm512_or_si512(low, base)), middle);
    };
    uint32_t* to = out + half * 2 * LANES;
    _mm512_store_si512(to, unit_of(value(std::integral_constant<int, 0>()), value(std::integral_constant<int, 8>())));
    _mm512_store_si512(to + LANES,
                       unit_of(value(std::integral_constant<int, 16>()), value(std::integral_constant<int, 24>())));
  }
}

// Elements [first, last) of a panel to units, those beyond K zero. `ahead`: distance to prefetch.
static void decode_panel(const Coding& form, const char* panel, int64_t k, int64_t first, int64_t last, int64_t ahead,
                         uint32_t* out) {
  const __m512 table = _mm512_loadu_ps(form.table);
  const int64_t step = OCTET * LANES * form.bits / 8, filled = std::min(last, k);
  for (int64_t i = first; i < filled;) {
    const int64_t g = i / form.group, end = std::min(filled, (g + 1) * form.group);
    const char* own = panel + g * form.group_bytes();
    const char* p = own + (i - g * form.group) / OCTET * step;
    const __m512 scale = (__m512)load_scales(own + form.code_bytes(), form.scale_type).v[0];
    for (; i < end; i += OCTET, p += step, out += OCTET / 2 * LANES) {
      __builtin_prefetch(p + ahead, 0, 2);
      if (form.bits == 4) {
        decode_octet(p, table, scale, out);
      } else {
        __builtin_prefetch(p + ahead + 64, 0, 2);
        decode_octet(p, out);
      }
    }
  }
  std::memset(out, 0, size_t(last - filled) / 2 * LANES * 4);
}

}  // namespace moe
#endif
