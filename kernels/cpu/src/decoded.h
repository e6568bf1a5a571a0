// Panels of coded weights to plain panels of bf16, for products with many rows. Included by coded.cpp.
//
// One part has a value of 4 bits exactly if its code has 3 bits and a sign and its scale 5 significant bits, and a code of
// 8 bits without its scale, which is applied to the sums if it is one for the whole of K. Else a second part has what the
// first one cuts off: together at least 16 bits.
#pragma once

#include "coded_integers.h"
#include "gemm.h"

#if defined(MOE_VNNI) && defined(MOE_AMX)
#define MOE_DECODED 1

namespace moe {

// Fewer rows are multiplied sooner as integers, by measurement.
inline int64_t least_decoded(const Coding& form) {
  if (form.parts == 1) return form.bits == 4 ? 14 : 32;
  return form.group <= 16 ? 16 : form.group <= 32 ? 40 : 128;
}

// Two adjacent elements of 16 columns as units: the upper halves of their floats.
static INLINE __m512i unit_of(__m512i even, __m512i odd) {
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000));
  return _mm512_or_si512(_mm512_srli_epi32(even, 16), _mm512_and_si512(odd, upper));
}

// value = code * scale - shift.
struct GroupValues {
  __m512 table, scale, shift;

  INLINE GroupValues(const Coding& form, const char* end, const char* panel, int64_t k, int64_t g)
      : table(_mm512_loadu_ps(form.table)) {
    F16 factor, offset = zero();
    if (form.factors) {
      load_factors(end, panel + form.pairs_at(k) + g / form.factors * PAIR_BYTES, &factor, &offset);
    } else {
      factor = load_scales(end, form.scale_type);
      if (form.has_zeros)
        offset = (load_bytes(end + LANES * form.scale_bytes()) - set1(form.bits == 8 ? 128.f : 0.f)) * factor;
    }
    scale = (__m512)factor.v[0], shift = (__m512)offset.v[0];
  }

  // Of codes in the low bits of `codes`. 8 bits: a byte in the fraction of 2^23, minus that and 128.
  template <int BITS, int PARTS>
  INLINE __m512 of(__m512i codes) const {
    __m512 value;
    if constexpr (BITS == 4) {
      value = _mm512_permutexvar_ps(codes, table);
    } else {
      const __m512i byte = _mm512_and_si512(codes, _mm512_set1_epi32(255));
      value = _mm512_castsi512_ps(_mm512_or_si512(byte, _mm512_set1_epi32(0x4b000000)));
      value = _mm512_sub_ps(value, _mm512_set1_ps(8388608.f + 128.f));
    }
    if (PARTS == 2) return _mm512_fmsub_ps(value, scale, shift);
    return BITS == 4 ? _mm512_mul_ps(value, scale) : value;
  }
};

template <int PARTS>
static INLINE void store_unit(__m512 even, __m512 odd, uint32_t* out, int64_t apart) {
  const __m512i first = _mm512_castps_si512(even), second = _mm512_castps_si512(odd);
  _mm512_store_si512(out, unit_of(first, second));
  if (PARTS == 1) return;
  const __m512i upper = _mm512_set1_epi32(int(0xffff0000)), half = _mm512_set1_epi32(0x8000);
  auto rest = [&](__m512 value, __m512i bits) {
    const __m512 lower = _mm512_sub_ps(value, _mm512_castsi512_ps(_mm512_and_si512(bits, upper)));
    return _mm512_add_epi32(_mm512_castps_si512(lower), half);  // rounded where it is cut off
  };
  _mm512_store_si512(out + apart, unit_of(rest(even, first), rest(odd, second)));
}

// Elements [first, last) of a panel to units, those beyond K zero. `ahead`: distance to prefetch; `apart`: units from a
// part to the next.
template <int BITS, int PARTS>
static void decode_panel(const Coding& form, const char* panel, int64_t k, int64_t first, int64_t last, int64_t ahead,
                         uint32_t* out, int64_t apart) {
  constexpr int64_t STEP = OCTET * LANES * BITS / 8;
  const int64_t filled = std::min(last, k);
  for (int64_t i = first; i < filled;) {
    const int64_t g = i / form.group, end = std::min(filled, (g + 1) * form.group);
    const char* own = panel + g * form.group_bytes();
    const char* p = own + (i - g * form.group) / OCTET * STEP;
    const GroupValues group(form, own + form.code_bytes(), panel, k, g);
    for (; i < end; i += OCTET, p += STEP)
#pragma GCC unroll 4
      for (int pair = 0; pair < OCTET / 2; pair++, out += LANES) {  // the shifts: see coded.h
        const int even = BITS == 8 ? pair % 2 * 16 : pair % 2 * 16 + pair / 2 * 4;
        const __m512i codes = _mm512_loadu_si512(p + (BITS == 8 ? pair / 2 * 64 : 0));
        if (pair % (BITS == 8 ? 2 : 4) == 0) __builtin_prefetch(p + ahead + pair / 2 * 64, 0, 2);
        store_unit<PARTS>(group.of<BITS, PARTS>(_mm512_srli_epi32(codes, unsigned(even))),
                          group.of<BITS, PARTS>(_mm512_srli_epi32(codes, unsigned(even + 8))), out, apart);
      }
  }
  for (int part = 0; part < PARTS; part++)
    std::memset(out + part * apart, 0, size_t(last - filled) / 2 * LANES * 4);
}

}  // namespace moe
#endif
