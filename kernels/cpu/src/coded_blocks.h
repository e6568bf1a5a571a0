// Rows of integers for products with coded weights, and the float operations around their exact sums. Included by
// coded_integers.h (AVX512-VNNI) and coded_words.h (AVX2), which give the same bits.
//
// Legend: M rows, K in-features, G groups, B blocks of K.
#pragma once

#include "coded_parts.h"

namespace moe {

constexpr int64_t MOST_BLOCK = 128;
constexpr float LARGEST = 32639.f;  // 127 * 256 + 127


// Elements with a common scale: the largest power of two that divides the group, at most 128.
inline int64_t block_of(const Coding& form) { return std::min(form.group & -form.group, MOST_BLOCK); }

// Integer values of codes, times `unit` their values: a code's byte is `offset` more, and unsigned.
struct IntegerTable {
  alignas(16) uint8_t bytes[16] = {};
  float unit = 1.f;
  int32_t offset, most;  // most: the largest magnitude of a value
  bool looked_up = false;

  explicit IntegerTable(const Coding& form) {
    offset = form.bits == 8 ? 128 : int32_t(-form.table[0]), most = form.bits == 8 ? 128 : 15;
    if (form.bits == 8 || form.table[1] == form.table[0] + 1.f) return;
    // FP4: halves from -6 to 6; else integers from -127
    const bool halves = form.table[1] == 0.5f;
    looked_up = true, unit = halves ? 0.5f : 1.f, offset = most = halves ? 12 : 127;
    for (int i = 0; i < 16; i++) bytes[i] = uint8_t(int32_t(form.table[i] / unit) + offset);
  }
};

// A block of a row: its scale, the sum of its group's elements up to its end, and the block's integer sum for an
// element 0: codes are unsigned, and the sum is that of the signed values.
struct RowBlock {
  float scale, total;
  int32_t start;
};
inline const RowBlock* blocks_of(const char* row, int64_t k) { return reinterpret_cast<const RowBlock*>(row + 2 * k); }

// Rows of x, each converted to `stride` bytes of this thread's memory by `convert(row, out)`. `ldx` becomes the stride.
template <class Convert>
static const char* converted_rows(const void* x, int64_t* ldx, int64_t m, int64_t k, int64_t stride, Purpose purpose,
                                  const Convert& convert) {
  const int64_t from = *ldx;
  char* out = scratch<char>(purpose, m * stride);
  auto range = [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; i++)
      convert(reinterpret_cast<const bf16*>(static_cast<const char*>(x) + i * from), out + i * stride);
  };
  if (purpose == SHARED_ROWS)
    parallel_ranges(m, double(k) * 0.5, range);
  else  // in a task
    range(0, m);
  *ldx = stride;
  return out;
}

// a - b * c, rounded once.
static INLINE F16 minus(const F16& a, const F16& b, const F16& c) { return fma(zero() - b, c, a); }

// Adds the sum of a row's group, by the group's scale and zero point. No operation is left to the compiler's choice of
// instructions: all kernels give the same bits.
struct GroupScale {
  F16 scale, zeros;
  bool offsets, factors;

  // `end`: of the group's codes in a panel.
  INLINE GroupScale(const Coding& form, float unit, const char* end, const char* panel, int64_t k, int64_t g)
      : offsets(form.has_zeros || form.factors), factors(form.factors != 0) {
    if (factors) {
      load_factors(end, panel + form.pairs_at(k) + g / form.factors * PAIR_BYTES, &scale, &zeros);
    } else {
      scale = load_scales(end, form.scale_type) * set1(unit);
      if (offsets) zeros = load_bytes(end + LANES * form.scale_bytes()) - set1(form.bits == 8 ? 128.f : 0.f);
    }
  }
  INLINE F16 add(const F16& part, const float* sum, const F16& total) const {
    if (!offsets) return fma(scale, part, total);
    const F16 all = set1(*sum);
    return factors ? minus(fma(scale, part, total), zeros, all) : fma(scale, minus(part, zeros, all), total);
  }
};

}  // namespace moe
