// F16: sixteen floats, in 1 machine vector with AVX-512, 2 with AVX2, 4 with SSE or NEON.
// Written with the compiler's vector types, so that one source serves every machine; intrinsics only for instructions
// that the compiler does not generate: fused multiply-add, bf16 rounding and the bf16 dot product.
#pragma once

#include "common.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#define MOE_AVX512 1
#endif
#if defined(MOE_AVX512) && defined(__AVX512BF16__)
#define MOE_AVX512_BF16 1
#endif
#if !defined(MOE_AVX512) && defined(__AVX2__) && defined(__FMA__)
#define MOE_AVX2 1
#endif

namespace moe {

#if defined(MOE_AVX512)
constexpr int WIDTH = 16;
#elif defined(MOE_AVX2)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
constexpr int PARTS = LANES / WIDTH;

typedef float vf __attribute__((vector_size(WIDTH * 4)));
typedef int32_t vi __attribute__((vector_size(WIDTH * 4)));
typedef uint32_t vu __attribute__((vector_size(WIDTH * 4)));
typedef uint16_t vh __attribute__((vector_size(WIDTH * 2)));

#define INLINE inline __attribute__((always_inline))
#define PARTS_LOOP _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++)

struct F16 {
  vf v[PARTS];
};
struct I16 {
  vi v[PARTS];
};

INLINE F16 set1(float x) {
  F16 r;
  PARTS_LOOP r.v[i] = x - vf{};
  return r;
}
INLINE F16 zero() { return set1(0.f); }

INLINE F16 load(const float* p) {
  F16 r;
  PARTS_LOOP std::memcpy(&r.v[i], p + i * WIDTH, sizeof(vf));
  return r;
}
INLINE void store(float* p, const F16& x) { PARTS_LOOP std::memcpy(p + i * WIDTH, &x.v[i], sizeof(vf)); }
INLINE I16 load(const int32_t* p) {
  I16 r;
  PARTS_LOOP std::memcpy(&r.v[i], p + i * WIDTH, sizeof(vi));
  return r;
}

INLINE F16 operator+(const F16& a, const F16& b) {
  F16 r;
  PARTS_LOOP r.v[i] = a.v[i] + b.v[i];
  return r;
}
INLINE F16 operator-(const F16& a, const F16& b) {
  F16 r;
  PARTS_LOOP r.v[i] = a.v[i] - b.v[i];
  return r;
}
INLINE F16 operator*(const F16& a, const F16& b) {
  F16 r;
  PARTS_LOOP r.v[i] = a.v[i] * b.v[i];
  return r;
}
INLINE F16 operator/(const F16& a, const F16& b) {
  F16 r;
  PARTS_LOOP r.v[i] = a.v[i] / b.v[i];
  return r;
}
INLINE F16 max(const F16& a, const F16& b) {
  F16 r;
  PARTS_LOOP r.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i];
  return r;
}
INLINE F16 min(const F16& a, const F16& b) {
  F16 r;
  PARTS_LOOP r.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i];
  return r;
}
INLINE vf fma(vf a, vf b, vf c) {
#if defined(MOE_AVX512)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(MOE_AVX2)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}
INLINE F16 fma(const F16& a, const F16& b, const F16& c) {
  F16 r;
  PARTS_LOOP r.v[i] = fma(a.v[i], b.v[i], c.v[i]);
  return r;
}

// Sum of the lanes: halves onto halves, always in this order.
INLINE float sum(const F16& x) {
#if defined(MOE_AVX512)
  const __m512 v = (__m512)x.v[0];
  const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1));
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#elif defined(MOE_AVX2)
  const __m256 eight = (__m256)(x.v[0] + x.v[1]);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
#else
  float lane[LANES];
  store(lane, x);
  for (int half = LANES / 2; half > 0; half /= 2)
    for (int i = 0; i < half; i++) lane[i] += lane[i + half];
  return lane[0];
#endif
}

// The greatest lane.
INLINE float highest(const F16& x) {
#if defined(MOE_AVX512)
  return _mm512_reduce_max_ps((__m512)x.v[0]);
#elif defined(MOE_AVX2)
  const __m256 eight = _mm256_max_ps((__m256)x.v[0], (__m256)x.v[1]);
  const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
#else
  float lane[LANES];
  store(lane, x);
  return *std::max_element(lane, lane + LANES);
#endif
}

// ---- bf16 ----

INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  uint32_t bits = uint32_t(x.bits) << 16;
  float r;
  std::memcpy(&r, &bits, 4);
  return r;
}

// Bits of the bf16 nearest to x (ties to even) in the upper half of each lane; the lower half is unspecified.
INLINE vu rounded_high(vf x) {
  vu bits = (vu)x;
  vu up = bits + 0x7fffu + ((bits >> 16) & 1u);
  vu nan = (vu)(x != x);
  return (nan & (bits | 0x00400000u)) | (~nan & up);
}

INLINE F16 load(const bf16* p) {
  F16 r;
  PARTS_LOOP {
    vh half;
    std::memcpy(&half, p + i * WIDTH, sizeof(vh));
    r.v[i] = (vf)(__builtin_convertvector(half, vu) << 16);
  }
  return r;
}
INLINE void store(bf16* p, const F16& x) {
#if defined(MOE_AVX512_BF16)
  __m256bh half = _mm512_cvtneps_pbh((__m512)x.v[0]);
  std::memcpy(p, &half, sizeof half);
#else
  PARTS_LOOP {
    vh half = __builtin_convertvector(rounded_high(x.v[i]) >> 16, vh);
    std::memcpy(p + i * WIDTH, &half, sizeof(vh));
  }
#endif
}
INLINE F16 round_to(const F16& x, float) { return x; }
INLINE F16 round_to(const F16& x, bf16) {
  F16 r;
  PARTS_LOOP r.v[i] = (vf)(rounded_high(x.v[i]) & 0xffff0000u);
  return r;
}
INLINE bf16 to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  if (x != x) return {uint16_t((bits >> 16) | 0x40)};
  return {uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}
INLINE void assign(float& to, float x) { to = x; }
INLINE void assign(bf16& to, float x) { to = to_bf16(x); }

// The first n of 16 values; missing lanes are zero.
template <class T>
INLINE F16 load_some(const T* p, int64_t n) {
  if (n >= LANES) return load(p);
  T lane[LANES] = {};
  std::memcpy(lane, p, size_t(n) * sizeof(T));
  return load(lane);
}
template <class T>
INLINE void store_some(T* p, const F16& x, int64_t n) {
  if (n >= LANES) return store(p, x);
  T lane[LANES];
  store(lane, x);
  std::memcpy(p, lane, size_t(n) * sizeof(T));
}

// Prefetches a row, to be written or read.
template <bool WRITE, class T>
INLINE void touch(const T* row, int64_t width) {
  for (int64_t i = 0; i < width; i += 64 / int64_t(sizeof(T))) __builtin_prefetch(row + i, WRITE, 2);
}

// Units of 16 columns: `even` and `odd` are the two elements of each unit (for fp32 a unit is `even` alone).
INLINE void store_units(uint32_t* p, const F16& even, const F16& odd, bf16) {
#if defined(MOE_AVX512_BF16)
  // Lane i of the result: word i of `even`, the lower half of the rounded pair, and word i of `odd`.
  const __m512i pairs = _mm512_add_epi32(_mm512_set1_epi32(0x00100000),
                                         _mm512_mullo_epi32(_mm512_set1_epi32(0x00010001),
                                                            _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12,
                                                                              13, 14, 15)));
  const __m512i both = (__m512i)_mm512_cvtne2ps_pbh((__m512)odd.v[0], (__m512)even.v[0]);
  _mm512_storeu_si512(p, _mm512_permutexvar_epi16(pairs, both));
#else
  PARTS_LOOP {
    vu unit = (rounded_high(even.v[i]) >> 16) | (rounded_high(odd.v[i]) & 0xffff0000u);
    std::memcpy(p + i * WIDTH, &unit, sizeof(vu));
  }
#endif
}
INLINE void store_units(uint32_t* p, const F16& even, const F16&, float) {
  PARTS_LOOP std::memcpy(p + i * WIDTH, &even.v[i], sizeof(vf));
}
INLINE F16 load_even(const uint32_t* p) {
  F16 r;
  PARTS_LOOP {
    vu unit;
    std::memcpy(&unit, p + i * WIDTH, sizeof(vu));
    r.v[i] = (vf)(unit << 16);
  }
  return r;
}
INLINE F16 load_odd(const uint32_t* p) {
  F16 r;
  PARTS_LOOP {
    vu unit;
    std::memcpy(&unit, p + i * WIDTH, sizeof(vu));
    r.v[i] = (vf)(unit & 0xffff0000u);
  }
  return r;
}

// ---- transposition ----

#if defined(MOE_AVX2)
// to[i] becomes unit `first` + i of eight lines.
INLINE void transpose_eight(uint32_t* to, int64_t to_stride, const uint32_t* const* from, int first) {
  __m256i r[8], t[8];
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) r[i] = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from[i] + first));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    r[4 * i] = _mm256_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm256_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm256_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm256_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x20);
    t[i + 4] = _mm256_permute2x128_si256(r[i], r[i + 4], 0x31);
  }
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) _mm256_storeu_si256(reinterpret_cast<__m256i*>(to + i * to_stride), t[i]);
}
#endif

// to[i] becomes unit i of the 16 lines `from`.
INLINE void transpose(uint32_t* to, int64_t to_stride, const uint32_t* const from[LANES]) {
#if defined(MOE_AVX512)
  __m512i r[16], t[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) r[i] = _mm512_loadu_si512(from[i]);
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++) {
    t[2 * i] = _mm512_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm512_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[4 * i] = _mm512_unpacklo_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 1] = _mm512_unpackhi_epi64(t[4 * i], t[4 * i + 2]);
    r[4 * i + 2] = _mm512_unpacklo_epi64(t[4 * i + 1], t[4 * i + 3]);
    r[4 * i + 3] = _mm512_unpackhi_epi64(t[4 * i + 1], t[4 * i + 3]);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    t[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    t[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    t[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    t[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
    r[i] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0x88);
    r[i + 8] = _mm512_shuffle_i32x4(t[i], t[i + 8], 0xdd);
    r[i + 4] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0x88);
    r[i + 12] = _mm512_shuffle_i32x4(t[i + 4], t[i + 12], 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + i * to_stride, r[i]);
#elif defined(MOE_AVX2)
  for (int lines = 0; lines < LANES; lines += 8)
    for (int units = 0; units < LANES; units += 8)
      transpose_eight(to + units * to_stride + lines, to_stride, from + lines, units);
#else
  for (int i = 0; i < LANES; i++)
    for (int j = 0; j < LANES; j++) to[j * to_stride + i] = from[i][j];
#endif
}

// ---- functions ----

// 2^n times p, with 0 where `tiny` (n is integral and within range elsewhere).
INLINE vf scaled(vf p, vf n, vi tiny) {
#if defined(MOE_AVX512)
  const __mmask16 keep = _mm512_cmpeq_epi32_mask((__m512i)tiny, _mm512_setzero_si512());
  return (vf)_mm512_maskz_scalef_ps(keep, (__m512)p, (__m512)n);
#else
  return (vf)(((vi)p + (__builtin_convertvector(n, vi) << 23)) & ~tiny);
#endif
}
INLINE vf rounded(vf x) {
#if defined(MOE_AVX512)
  return (vf)_mm512_roundscale_ps((__m512)x, 8);
#elif defined(MOE_AVX2)
  return (vf)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#else
  // Not with FMA: a product for x would join the sum without its own rounding, and round other ties.
  const vf shift = 12582912.f - vf{};  // adding 1.5 * 2^23 rounds the fraction away
  return x + shift - shift;
#endif
}
INLINE vf limited(vf x, float low, float high) {
#if defined(MOE_AVX512)
  (void)low, (void)high;  // scaled() saturates already
  return x;
#else
  x = x > high ? high - vf{} : x;
  return x < low ? low - vf{} : x;
#endif
}

// e^x to about 1 ulp; exactly 0 below -87.3 and exactly 1 at 0.
INLINE F16 exp(const F16& in) {
  F16 r;
  PARTS_LOOP {
    const vf x = limited(in.v[i], -87.3f, 88.f), n = rounded(x * 1.44269504f);
    vf f = fma(n, -0.693359375f - vf{}, x);
    f = fma(n, 2.12194440e-4f - vf{}, f);
    vf p = 1.9875691500e-4f - vf{};
    p = fma(p, f, 1.3981999507e-3f - vf{});
    p = fma(p, f, 8.3334519073e-3f - vf{});
    p = fma(p, f, 4.1665795894e-2f - vf{});
    p = fma(p, f, 1.6666665459e-1f - vf{});
    p = fma(p, f, 5.0000001201e-1f - vf{});
    p = fma(p, f * f, f) + 1.f;
    r.v[i] = scaled(p, n, (vi)(in.v[i] < -87.3f));
  }
  return r;
}
// 2^x for x <= 0 or not far above; exactly 0 below -126 and exactly 1 at 0 (the softmax relies on both).
INLINE F16 exp2(const F16& in) {
  F16 r;
  PARTS_LOOP {
    const vf x = limited(in.v[i], -126.f, 126.f), n = rounded(x), f = x - n;
    vf p = 1.5403530e-4f - vf{};
    p = fma(p, f, 1.3333558e-3f - vf{});
    p = fma(p, f, 9.6181291e-3f - vf{});
    p = fma(p, f, 5.5504109e-2f - vf{});
    p = fma(p, f, 2.4022651e-1f - vf{});
    p = fma(p, f, 6.9314718e-1f - vf{});
    p = fma(p, f, 1.f - vf{});
    r.v[i] = scaled(p, n, (vi)(in.v[i] < -126.f));
  }
  return r;
}
// 2^x for results that are rounded to T: bf16 takes fewer terms, to 3e-6.
INLINE F16 exp2_for(const F16& x, float) { return exp2(x); }
INLINE F16 exp2_for(const F16& in, bf16) {
  F16 r;
  PARTS_LOOP {
    const vf shift = 12582912.f - vf{}, x = limited(in.v[i], -126.f, 126.f), n = x + shift - shift, f = x - n;
    vf p = 9.58285e-3f - vf{};
    p = fma(p, f, 5.590643e-2f - vf{});
    p = fma(p, f, 2.4024099e-1f - vf{});
    p = fma(p, f, 6.9312419e-1f - vf{});
    p = fma(p, f, 1.f - vf{});
    r.v[i] = scaled(p, n, (vi)(in.v[i] < -126.f));
  }
  return r;
}
// log(1 + exp(x)) to float accuracy: with z = exp(-|x|), log(1 + z) is 2 artanh(z / (2 + z)), whose argument is at most
// 1/3.
INLINE F16 softplus(const F16& x) {
  const F16 z = exp(min(x, zero() - x)), s = z / (z + set1(2.f)), square = s * s;
  F16 series = set1(2.f / 15);
  for (int k = 13; k > 0; k -= 2) series = fma(series, square, set1(2.f / float(k)));
  return fma(series, s, max(zero(), x));
}
INLINE F16 sigmoid(const F16& x) { return set1(1.f) / (set1(1.f) + exp(zero() - x)); }
INLINE F16 silu(const F16& x) { return x * sigmoid(x); }
// relu(x)^2; NaN stays.
INLINE F16 squared_relu(const F16& x) {
  const F16 kept = max(zero(), x);
  return kept * kept;
}
INLINE F16 tanh(const F16& x) { return set1(2.f) * sigmoid(x + x) - set1(1.f); }

// gate at most `limit`, up within +-limit; NaN stays.
INLINE void clamp(F16& gate, F16& up, float limit) {
  gate = min(set1(limit), gate);
  up = max(set1(-limit), min(set1(limit), up));
}

// x * (1 + tanh(y)) / 2 = x * sigmoid(2 y), y = sqrt(2 / pi) * (x + 0.044715 x^3).
INLINE F16 gelu(const F16& x) {
  return x * sigmoid(set1(1.5957691216f) * x * fma(set1(0.044715f) * x, x, set1(1.f)));
}

// silu(gate) * up, clamped by a positive limit. By a negative one silu(gate) is at most -limit, not gate. 0: no clamp.
// -infinity: gelu(gate) * up.
INLINE F16 clamped_silu(F16 gate, float limit, F16 up) {
  if (limit == -INFINITY) return gelu(gate) * up;
  if (limit > 0) clamp(gate, up, limit);
  const F16 active = silu(gate);
  if (limit >= 0) return active * up;
  return min(set1(-limit), active) * max(set1(limit), min(set1(-limit), up));
}

// SiTU: beta * tanh(gate / beta) * sigmoid(gate) * up, with up = limit * tanh(up / limit) if there is a limit.
INLINE F16 situ(const F16& gate, const F16& up, float beta, float limit) {
  const F16 active = set1(beta) * tanh(gate * set1(1.f / beta)) * sigmoid(gate);
  return active * (limit > 0 ? set1(limit) * tanh(up * set1(1.f / limit)) : up);
}

template <class T>
void to_floats(const T* from, int64_t count, float* to) {
  parallel_ranges(count, 0.3, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) to[i] = to_float(from[i]);
  });
}

}  // namespace moe
