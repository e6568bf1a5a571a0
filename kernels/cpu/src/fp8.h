// 8-bit float formats, and KV cache rows that hold them; kernels/kv_format/formats.py describes the layouts.
// Readers convert a row to T first: one rounding, and then the kernels of an unquantized cache.
//
// Legend: C latent, P rotary.
#pragma once

#include "vec.h"

namespace moe {

enum Form { PLAIN, FP8_TOKEN, FP8_GROUPS, FP8_RANGE, FP8_TENSOR };  // a head's e4m3 record is also FP8_TOKEN

constexpr int64_t GROUP = 128;

struct E4M3 {
  static constexpr int FRACTION = 3, BIAS = 7;
  static constexpr uint32_t NOT_A_NUMBER = 0x80;  // none: a row with NaN has a NaN scale
  static constexpr float LARGEST = 448.f;
};
struct E5M2 {
  static constexpr int FRACTION = 2, BIAS = 15;
  static constexpr uint32_t NOT_A_NUMBER = 0x7d;  // 0x7c is infinity, which is never written
  static constexpr float LARGEST = 57344.f;
};

typedef uint8_t vb __attribute__((vector_size(WIDTH)));

// ---- 16 values ----

#if defined(MOE_AVX512) || (defined(__AVX2__) && defined(__F16C__) && defined(__FMA__))
#define MOE_HALVES 1
#endif

// The values times 2^(BIAS - 15). With that factor the bits are those of a shifted float16, subnormals included.
// Without float16 instructions: above 2^(1 - BIAS) they are those of a shifted float, below it values are multiples of
// 2^(1 - BIAS - FRACTION).
template <class N>
INLINE F16 decode(const uint8_t* p) {
#if defined(MOE_HALVES)
  constexpr int SHIFT = 10 - N::FRACTION;
  const int16_t own = int16_t(0x8000 | (0x7f << SHIFT));  // without the sign copy of the widening
  F16 r;
#if defined(MOE_AVX512)
  const __m256i words = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)), SHIFT);
  r.v[0] = (vf)_mm512_cvtph_ps(_mm256_and_si256(words, _mm256_set1_epi16(own)));
#else
  PARTS_LOOP {
    const __m128i words = _mm_slli_epi16(_mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)(p + i * 8))), SHIFT);
    r.v[i] = (vf)_mm256_cvtph_ps(_mm_and_si128(words, _mm_set1_epi16(own)));
  }
#endif
  return r;
#else
  constexpr int MOVE = 23 - N::FRACTION;
  F16 r;
  PARTS_LOOP {
    vb bytes;
    std::memcpy(&bytes, p + i * WIDTH, sizeof bytes);
    const vu all = __builtin_convertvector(bytes, vu), size = all & 0x7fu;
    const vf normal = (vf)((size << MOVE) + (uint32_t(127 - N::BIAS) << 23));
    const vf small = __builtin_convertvector((vi)size, vf) * (1.f / float(1 << (N::BIAS + N::FRACTION - 1)));
    vu bits = size < (1u << N::FRACTION) ? (vu)small : (vu)normal;
    bits |= (vu)(size >= N::NOT_A_NUMBER) & 0x7fc00000u;
    r.v[i] = (vf)(bits | (all & 0x80u) << 24) * (1.f / float(1 << (15 - N::BIAS)));
  }
  return r;
#endif
}

// Rounds to nearest even; saturates at the largest finite value.
template <class N>
INLINE void encode(uint8_t* p, const F16& x) {
  constexpr int MOVE = 23 - N::FRACTION;
  PARTS_LOOP {
    const vu sign = (vu)x.v[i] & 0x80000000u;
    vf size = (vf)((vu)x.v[i] & 0x7fffffffu);
    size = size > N::LARGEST ? N::LARGEST - vf{} : size;
    const vu bits = (vu)size;
    const vu normal = ((bits + ((1u << (MOVE - 1)) - 1u) + ((bits >> MOVE) & 1u)) >> MOVE) -
                      (uint32_t(127 - N::BIAS) << N::FRACTION);
    const vf shift = float(1 << (24 - N::BIAS - N::FRACTION)) - vf{};  // its last bit is the smallest value
    const vu small = (vu)(size + shift) - (vu)shift;
    vu result = (vu)(size < 2.f / float(1 << N::BIAS)) ? small : normal;
    result = (vu)(size != size) ? 0x7fu - vu{} : result;
    const vb bytes = __builtin_convertvector(result | sign >> 24, vb);
    std::memcpy(p + i * WIDTH, &bytes, sizeof bytes);
  }
}

// ---- n values with one scale ----

template <class N, class T>
INLINE void read_numbers(const uint8_t* from, float scale, T* to, int64_t n) {
  const F16 factor = set1(scale * float(1 << (15 - N::BIAS)));
  int64_t i = 0;
  for (; i + LANES <= n; i += LANES) store(to + i, decode<N>(from + i) * factor);
  if (i == n) return;
  uint8_t rest[LANES] = {};
  std::memcpy(rest, from + i, size_t(n - i));
  store_some(to + i, decode<N>(rest) * factor, n - i);
}

template <class N, class T>
INLINE void write_numbers(const T* from, float scale, uint8_t* to, int64_t n) {
  const F16 divisor = set1(scale);
  for (int64_t i = 0; i < n; i += LANES) {
    uint8_t bytes[LANES];
    encode<N>(bytes, load_some(from + i, n - i) / divisor);
    std::memcpy(to + i, bytes, size_t(std::min<int64_t>(LANES, n - i)));
  }
}

// The divisor that brings the largest of n values into e4m3's range; NaN if one of them is NaN.
template <class T>
INLINE float scale_of(const T* from, int64_t n) {
  F16 largest = zero(), nothing = zero();
  for (int64_t i = 0; i < n; i += LANES) {
    const F16 x = load_some(from + i, n - i);
    largest = max(largest, max(x, zero() - x));
    nothing = nothing + (x - x);
  }
  float lane[LANES], top = 1e-12f;
  store(lane, largest);
  for (float x : lane) top = std::max(top, x);
  return top / E4M3::LARGEST + sum(nothing);
}

// The smallest power of two >= x.
INLINE float power_above(float x) {
  if (x != x) return x;
  int exponent;
  const float fraction = std::frexp(x, &exponent);
  return std::ldexp(1.f, fraction == 0.5f ? exponent - 1 : exponent);
}

INLINE float float_at(const uint8_t* p) {
  float x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
INLINE void float_to(uint8_t* p, float x) { std::memcpy(p, &x, sizeof x); }

// e4m3 values of a scale that is not made from them: NaN has bits of its own.
template <class T>
INLINE void read_e4m3(const uint8_t* from, float scale, T* to, int64_t n) {
  read_numbers<E4M3>(from, scale, to, n);
  int found = 0;
  for (int64_t i = 0; i < n; i++) found |= (from[i] & 0x7f) == 0x7f;
  if (!found) return;
  for (int64_t i = 0; i < n; i++)
    if ((from[i] & 0x7f) == 0x7f) assign(to[i], std::nanf(""));
}

// ---- rows ----

// An MLA row of C + P values.
template <class T>
static void read_latent(int form, const uint8_t* row, int64_t latent, int64_t rotary, T* to) {
  if (form == FP8_RANGE) return read_numbers<E5M2>(row, 1.f, to, latent + rotary);
  if (form == FP8_TENSOR) return read_e4m3(row, 1.f, to, latent + rotary);
  if (form == FP8_TOKEN) {
    const uint8_t* scales = row + ceil_div(latent + rotary, 16) * 16;
    read_numbers<E4M3>(row, float_at(scales), to, latent);
    return read_numbers<E4M3>(row + latent, float_at(scales + 4), to + latent, rotary);
  }
  const uint8_t *scales = row + latent, *tail = scales + latent / GROUP * 4;
  for (int64_t g = 0; g < latent / GROUP; g++)
    read_numbers<E4M3>(row + g * GROUP, float_at(scales + 4 * g), to + g * GROUP, GROUP);
  const bf16* turned = reinterpret_cast<const bf16*>(tail);
  for (int64_t i = 0; i < rotary; i += LANES) store_some(to + latent + i, load_some(turned + i, rotary - i), rotary - i);
}

template <class T>
static void write_latent_row(int form, const T* from, int64_t latent, int64_t rotary, uint8_t* row, float divisor) {
  if (form == FP8_RANGE) return write_numbers<E5M2>(from, 1.f, row, latent + rotary);
  if (form == FP8_TENSOR) return write_numbers<E4M3>(from, divisor, row, latent + rotary);
  if (form == FP8_TOKEN) {
    uint8_t* scales = row + ceil_div(latent + rotary, 16) * 16;
    const float whole = scale_of(from, latent), turned = scale_of(from + latent, rotary);
    write_numbers<E4M3>(from, whole, row, latent);
    write_numbers<E4M3>(from + latent, turned, row + latent, rotary);
    float_to(scales, whole);
    return float_to(scales + 4, turned);
  }
  uint8_t *scales = row + latent, *tail = scales + latent / GROUP * 4;
  for (int64_t g = 0; g < latent / GROUP; g++) {
    const float scale = power_above(scale_of(from + g * GROUP, GROUP));
    write_numbers<E4M3>(from + g * GROUP, scale, row + g * GROUP, GROUP);
    float_to(scales + 4 * g, scale);
  }
  bf16* turned = reinterpret_cast<bf16*>(tail);
  for (int64_t i = 0; i < rotary; i += LANES)
    store_some(turned + i, load_some(from + latent + i, rotary - i), rotary - i);
}

// A head's key or value.
INLINE int64_t head_bytes(int form, int64_t width) { return form == FP8_RANGE ? width : ceil_div(width, 4) * 4 + 4; }

template <class T>
static void read_head(int form, const uint8_t* row, int64_t width, T* to) {
  if (form == FP8_RANGE) return read_numbers<E5M2>(row, 1.f, to, width);
  read_numbers<E4M3>(row, float_at(row + head_bytes(form, width) - 4), to, width);
}

template <class T>
static void write_head(int form, const T* from, int64_t width, uint8_t* row) {
  if (form == FP8_RANGE) return write_numbers<E5M2>(from, 1.f, row, width);
  const float scale = scale_of(from, width);
  write_numbers<E4M3>(from, scale, row, width);
  float_to(row + head_bytes(form, width) - 4, scale);
}

}  // namespace moe
