// Scales and zero points of coded weights.
#pragma once

#include "coded.h"
#include "vec.h"

namespace moe {

constexpr int OCTET = 8;          // elements of K decoded at once
constexpr int64_t FAR = 1024;     // prefetch distance of codes in bytes

// What a tile prefetches in each of its panels: `distance` ahead, and near the end of its panels the same place in the
// panels of the next tile, else each tile would begin with lines that are not in the cache. Short panels: two tiles
// ahead, for one lasts no longer than a read from memory.
struct PanelAhead {
  static constexpr int64_t SHORT = 1536;
  int64_t panel, distance, beyond;

  // `tile` and `next`: the first panels of both.
  INLINE PanelAhead(int64_t panel_bytes, const char* tile, const char* next)
      : panel(panel_bytes), distance(FAR), beyond(next - tile + FAR - panel_bytes) {
    if (panel <= SHORT) distance = panel, beyond = 2 * (next - tile);
  }
  // Distance to prefetch at from a place `done` bytes into a panel.
  INLINE int64_t from(int64_t done) const { return done + distance < panel ? distance : beyond; }
};

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
#elif defined(MOE_AVX2) && defined(__F16C__)
  PARTS_LOOP r.v[i] = (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p) + i));
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

static INLINE F16 load_bytes(const char* p) {
#if defined(MOE_AVX512)
  F16 r;
  r.v[0] = (vf)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
  return r;
#elif defined(MOE_AVX2)
  F16 r;
  PARTS_LOOP {
    const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + i * WIDTH));
    r.v[i] = (vf)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight));
  }
  return r;
#else
  float lane[LANES];
  for (int i = 0; i < LANES; i++) lane[i] = float(uint8_t(p[i]));
  return load(lane);
#endif
}

// Scale and offset of a group with factors. `pairs`: of its groups.
static INLINE void load_factors(const char* factors, const char* pairs, F16* scale, F16* offset) {
  *scale = load_bytes(factors) * load_scales(pairs, SCALE_F16);
  *offset = load_bytes(factors + LANES) * load_scales(pairs + PAIR_BYTES / 2, SCALE_F16);
}

}  // namespace moe
