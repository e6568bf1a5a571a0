// Norm and rotation of one row.
#pragma once

#include "vec.h"

namespace moe {

// 1 / sqrt(mean of squares + eps)
template <class T>
INLINE float root_mean_square(const T* x, int64_t n, float eps) {
  F16 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int j = 0; j < 4; j++) {
      F16 v = load(x + i + j * LANES);
      sums[j] = fma(v, v, sums[j]);
    }
  for (; i < n; i += LANES) {
    F16 v = load_some(x + i, n - i);
    sums[0] = fma(v, v, sums[0]);
  }
  float mean = sum((sums[0] + sums[1]) + (sums[2] + sums[3])) / float(n);
  return 1.f / std::sqrt(mean + eps);
}

// angles: R/2 cosines, then R/2 sines; INVERSE: by the negative angles. `from` and `to` may be the same row.
template <bool INVERSE = false, class T>
INLINE void rotate_row(const T* from, T* to, const float* angles, int64_t width, bool interleaved) {
  const int64_t half = width / 2;
  const float *cosines = angles, *sines = angles + half;
  constexpr float sign = INVERSE ? -1.f : 1.f;
  if (!interleaved) {
    for (int64_t j = 0; j < half; j += LANES) {
      const int64_t here = half - j;
      F16 a = load_some(from + j, here), b = load_some(from + half + j, here);
      F16 c = load_some(cosines + j, here), s = set1(sign) * load_some(sines + j, here);
      store_some(to + j, a * c - b * s, here);
      store_some(to + half + j, b * c + a * s, here);
    }
    return;
  }
  int64_t j = 0;
  if constexpr (sizeof(T) == 2) {  // a pair is a unit
    for (; j + LANES <= half; j += LANES) {
      alignas(64) uint32_t units[LANES];
      std::memcpy(units, from + 2 * j, sizeof units);
      F16 a = load_even(units), b = load_odd(units), c = load(cosines + j), s = set1(sign) * load(sines + j);
      store_units(units, a * c - b * s, b * c + a * s, T{});
      std::memcpy(to + 2 * j, units, sizeof units);
    }
  }
  for (; j < half; j++) {
    float a = to_float(from[2 * j]), b = to_float(from[2 * j + 1]);
    float c = cosines[j], s = sign * sines[j];
    assign(to[2 * j], a * c - b * s);
    assign(to[2 * j + 1], b * c + a * s);
  }
}

}  // namespace moe
