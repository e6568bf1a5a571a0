// Products with coded weights: codes become bf16 (or float) in registers, a group's sum is multiplied by its scale.
//
// Legend: M rows, K in-features, N out-features, G groups, MR x NR rows x panels of a tile.
#include "coded.h"

#include "vec.h"

namespace moe {

constexpr int OCTET = 8;          // elements of K decoded at once
constexpr int64_t FAR = 1024;     // prefetch distance of codes in bytes

static INLINE float from_half(uint16_t h) {
  const uint32_t sign = uint32_t(h & 0x8000) << 16, exponent = h >> 10 & 31, fraction = h & 1023;
  uint32_t bits;
  if (exponent == 0) {
    const float value = float(fraction) * 5.9604644775390625e-8f;  // 2^-24
    std::memcpy(&bits, &value, 4);
  } else {
    bits = (exponent == 31 ? 255u << 23 : (exponent + 112) << 23) | fraction << 13;
  }
  bits |= sign;
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}

static INLINE F16 load_scales(const char* p, int64_t type) {
  if (type == SCALE_BF16) return load(reinterpret_cast<const bf16*>(p));
  F16 r;
  if (type == SCALE_F32) {
    std::memcpy(&r, p, sizeof r);
    return r;
  }
#if defined(MOE_AVX512)
  r.v[0] = (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
#else
  float lane[LANES];
  for (int i = 0; i < LANES; i++) {
    uint16_t half;
    std::memcpy(&half, p + 2 * i, 2);
    lane[i] = from_half(half);
  }
  r = load(lane);
#endif
  return r;
}

static INLINE F16 load_bytes(const char* p, bool is_signed) {
#if defined(MOE_AVX512)
  const __m128i raw = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  F16 r;
  r.v[0] = (vf)_mm512_cvtepi32_ps(is_signed ? _mm512_cvtepi8_epi32(raw) : _mm512_cvtepu8_epi32(raw));
  return r;
#else
  float lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = is_signed ? float(int8_t(p[i])) : float(uint8_t(p[i]));
  return load(lane);
#endif
}

// The table as a kernel reads it.
struct Values {
#if defined(MOE_AVX512)
  __m512 floats;
  __m512i halves;  // bf16, twice
#elif defined(__AVX2__) && defined(__FMA__)
  __m256 low, high;
#else
  const float* table;
#endif

  explicit Values(const Coding& form) {
#if defined(MOE_AVX512)
    floats = _mm512_loadu_ps(form.table);
    const __m512i bits = _mm512_srli_epi32(_mm512_castps_si512(floats), 16);
    const __m256i half = _mm512_cvtepi32_epi16(bits);
    halves = _mm512_inserti64x4(_mm512_castsi256_si512(half), half, 1);
#elif defined(__AVX2__) && defined(__FMA__)
    low = _mm256_loadu_ps(form.table), high = _mm256_loadu_ps(form.table + 8);
#else
    table = form.table;
#endif
  }

  // Values of the low nibbles.
  INLINE vf of(vu codes) const {
#if defined(MOE_AVX512)
    return (vf)_mm512_permutexvar_ps((__m512i)codes, floats);
#elif defined(__AVX2__) && defined(__FMA__)
    const __m256i index = (__m256i)codes;
    const __m256 upper = _mm256_castsi256_ps(_mm256_slli_epi32(index, 28));  // bit 3 becomes the sign
    return (vf)_mm256_blendv_ps(_mm256_permutevar8x32_ps(low, index), _mm256_permutevar8x32_ps(high, index), upper);
#else
    vf r;
    for (int i = 0; i < WIDTH; i++) r[i] = table[codes[i] & 15];
    return r;
#endif
  }
};

// Eight elements of K of 16 columns, and their products with eight elements of a row.
template <class T, int BITS>
struct Octet {
  F16 value[OCTET];

  INLINE void take(const char* p, const Values& values) {
    if constexpr (BITS == 8) {
#pragma GCC unroll 8
      for (int k = 0; k < OCTET; k++) value[k] = load_bytes(p + k * LANES, true);
    } else {
      PARTS_LOOP {
        vu codes;
        std::memcpy(&codes, p + i * sizeof(vu), sizeof(vu));
#pragma GCC unroll 8
        for (int n = 0; n < OCTET; n++) value[2 * (n % 4) + n / 4].v[i] = values.of(codes >> (4 * n));
      }
    }
  }
  INLINE void add(F16& sum, const T* a) const {
#pragma GCC unroll 8
    for (int k = 0; k < OCTET; k++) {
      const vf x = to_float(a[k]) - vf{};
      PARTS_LOOP sum.v[i] = fma(x, value[k].v[i], sum.v[i]);
    }
  }
};

#if defined(MOE_AVX512_BF16)
template <int BITS>
struct Octet<bf16, BITS> {
  __m512i unit[OCTET / 2];  // two elements of 16 columns each

  INLINE void take(const char* p, const Values& values) {
    if constexpr (BITS == 8) {
#pragma GCC unroll 4
      for (int u = 0; u < OCTET / 2; u++) {  // integers below 256 are exact in the upper halves of floats
        const __m512i even = (__m512i)load_bytes(p + 2 * u * LANES, true).v[0];
        const __m512i odd = (__m512i)load_bytes(p + (2 * u + 1) * LANES, true).v[0];
        unit[u] = _mm512_mask_blend_epi16(0xaaaaaaaau, _mm512_srli_epi32(even, 16), odd);
      }
    } else {
      const __m512i codes = _mm512_loadu_si512(p);  // an index is 5 bits: the table is there twice
      unit[0] = _mm512_permutexvar_epi16(codes, values.halves);
      unit[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 4), values.halves);
      unit[2] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 8), values.halves);
      unit[3] = _mm512_permutexvar_epi16(_mm512_srli_epi16(codes, 12), values.halves);
    }
  }
  INLINE void add(F16& sum, const bf16* a) const {
#pragma GCC unroll 4
    for (int u = 0; u < OCTET / 2; u++) {
      int pair;
      std::memcpy(&pair, a + 2 * u, 4);
      sum.v[0] = (vf)_mm512_dpbf16_ps((__m512)sum.v[0], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)unit[u]);
    }
  }
};
#endif

// Sums of each group of a row, for zero points: [M, G].
template <class T>
static const float* group_sums(const void* x, int64_t ldx, int64_t m, int64_t k, int64_t group) {
  const int64_t groups = k / group;
  float* sums = scratch<float>(STATS, m * groups);
  for (int64_t i = 0; i < m; i++) {
    const T* row = reinterpret_cast<const T*>(static_cast<const char*>(x) + i * ldx);
    for (int64_t g = 0; g < groups; g++) {
      float eight[OCTET] = {};
      for (int64_t j = 0; j < group; j += OCTET)
        for (int n = 0; n < OCTET; n++) eight[n] += to_float(row[g * group + j + n]);
      float sum = 0;
      for (float part : eight) sum += part;
      sums[i * groups + g] = sum;
    }
  }
  return sums;
}

template <class T, int BITS, int MR, int NR>
__attribute__((noinline)) static void coded_tile(const Coding& form, const char* x, int64_t ldx, int64_t k,
                                                 const char* panels, int64_t panel, const float* sums, float* c,
                                                 int64_t ldc) {
  const Values values(form);
  const int64_t groups = k / form.group, step = OCTET * LANES * BITS / 8, codes = form.code_bytes();
  const int64_t scale_bytes = form.scale_bytes(), group_bytes = form.group_bytes();
  F16 total[MR][NR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) total[i][n] = zero();
  const T* row[MR];
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++) row[i] = reinterpret_cast<const T*>(x + i * ldx);
  for (int64_t g = 0; g < groups; g++) {
    const char* p = panels + g * group_bytes;
    F16 part[MR][NR];
#pragma GCC unroll 8
    for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
      for (int n = 0; n < NR; n++) part[i][n] = zero();
    for (int64_t j = 0; j < form.group; j += OCTET, p += step) {
#pragma GCC unroll 4
      for (int n = 0; n < NR; n++) {
        Octet<T, BITS> octet;
        octet.take(p + n * panel, values);
        __builtin_prefetch(p + n * panel + FAR, 0, 2);
        if (BITS == 8) __builtin_prefetch(p + n * panel + FAR + 64, 0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) octet.add(part[i][n], row[i]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) row[i] += OCTET;
    }
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) {
      const char* end = panels + g * group_bytes + codes + n * panel;
      const F16 scale = load_scales(end, form.scale_type);
      if (form.has_zeros) {
        F16 zeros = load_bytes(end + LANES * scale_bytes, false);
        if (BITS == 8) zeros = zeros - set1(128.f);
        for (int i = 0; i < MR; i++) part[i][n] = part[i][n] - zeros * set1(sums[i * groups + g]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) total[i][n] = fma(scale, part[i][n], total[i][n]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < MR; i++)
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) store(c + i * ldc + n * LANES, total[i][n]);
}

#if defined(MOE_AVX512)
constexpr int MANY_ROWS = 4;  // of two panels: 16 sums, 8 registers of codes
#else
constexpr int MANY_ROWS = 1;
#endif

template <class T, int BITS, int NR>
static void coded_columns(const Coding& form, const char* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                          int64_t panel, const float* sums, float* c, int64_t ldc) {
  const int64_t groups = k / form.group;
  int64_t i = 0;
  auto run = [&](auto rows) {
    constexpr int MR = decltype(rows)::value;
    coded_tile<T, BITS, MR, NR>(form, x + i * ldx, ldx, k, panels, panel, sums ? sums + i * groups : nullptr,
                                c + i * ldc, ldc);
    i += MR;
  };
  if constexpr (NR <= 2 && MANY_ROWS > 1) {
    constexpr int MR = NR == 1 ? 2 * MANY_ROWS : MANY_ROWS;
    while (m - i >= MR) run(std::integral_constant<int, MR>());
    if (m - i >= 4) run(std::integral_constant<int, 4>());
    if (m - i >= 2) run(std::integral_constant<int, 2>());
  }
  while (i < m) run(std::integral_constant<int, 1>());
}

template <class T, int BITS>
static void coded(const Coding& form, const char* x, int64_t ldx, int64_t m, int64_t k, const char* panels, int64_t count,
                  float* c, int64_t ldc) {
  const int64_t panel = form.panel_bytes(k);
  const float* sums = form.has_zeros ? group_sums<T>(x, ldx, m, k, form.group) : nullptr;
  int64_t n = 0;
  auto run = [&](auto width) {
    constexpr int NR = decltype(width)::value;
    for (; count - n >= NR; n += NR)
      coded_columns<T, BITS, NR>(form, x, ldx, m, k, panels + n * panel, panel, sums, c + n * LANES, ldc);
  };
#if defined(MOE_AVX512)
  if (m == 1) run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 2>());
#endif
  run(std::integral_constant<int, 1>());
}

template <class T>
void coded_product(const Coding& form, const void* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                   int64_t count, float* c, int64_t ldc) {
  const char* rows = static_cast<const char*>(x);
  if (form.bits == 4)
    coded<T, 4>(form, rows, ldx, m, k, panels, count, c, ldc);
  else
    coded<T, 8>(form, rows, ldx, m, k, panels, count, c, ldc);
}

template void coded_product<float>(const Coding&, const void*, int64_t, int64_t, int64_t, const char*, int64_t, float*,
                                   int64_t);
template void coded_product<bf16>(const Coding&, const void*, int64_t, int64_t, int64_t, const char*, int64_t, float*,
                                  int64_t);

// Codes [N, K], a byte each, of one group of one panel.
static void pack_codes(const Coding& form, const uint8_t* const* rows, int64_t first, uint8_t* out) {
  for (int64_t j = 0; j < form.group; j += OCTET)
    for (int column = 0; column < LANES; column++) {
      const uint8_t* from = rows[column] ? rows[column] + first + j : nullptr;
      if (form.bits == 8) {
        for (int n = 0; n < OCTET; n++) out[(j + n) * LANES + column] = from ? uint8_t(from[n] ^ 128) : 0;
        continue;
      }
      uint32_t word = 0;
      for (int n = 0; n < OCTET && from; n++) word |= uint32_t(from[2 * (n % 4) + n / 4] & 15) << (4 * n);
      std::memcpy(out + j / OCTET * LANES * 4 + column * 4, &word, 4);
    }
}

}  // namespace moe

using namespace moe;

API int64_t moe_coded_bytes(const Coding* form, int64_t n, int64_t k) { return panels_of(n) * form->panel_bytes(k); }

// codes uint8 [N, K] in rows `ldc` apart, scales [N, G] of the form's type, zeros uint8 [N, G] or null -> panels.
API void moe_coded_pack(const Coding* form, const uint8_t* codes, int64_t ldc, const char* scales, const uint8_t* zeros,
                        int64_t n, int64_t k, char* out) {
  const int64_t groups = k / form->group, size = form->scale_bytes();
  parallel_ranges(panels_of(n), double(k) * 20, [&](int64_t from, int64_t to) {
    for (int64_t p = from; p < to; p++)
      for (int64_t g = 0; g < groups; g++) {
        const uint8_t* rows[LANES];
        char* at = out + p * form->panel_bytes(k) + g * form->group_bytes();
        char* of_scales = at + form->code_bytes();
        for (int64_t i = 0; i < LANES; i++) {
          const int64_t row = p * LANES + i;
          rows[i] = row < n ? codes + row * ldc : nullptr;
          if (row < n)
            std::memcpy(of_scales + i * size, scales + (row * groups + g) * size, size_t(size));
          else
            std::memset(of_scales + i * size, 0, size_t(size));
          if (form->has_zeros)
            of_scales[LANES * size + i] = row < n ? char(zeros[row * groups + g]) : 0;
        }
        pack_codes(*form, rows, g * form->group, reinterpret_cast<uint8_t*>(at));
      }
  });
}
