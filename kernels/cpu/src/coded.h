// Weights of 4 or 8 bits with a scale per group of K: multiplied as stored.
//
// Layout of a panel (16 columns): its groups in order; of a group the codes, then 16 scales, then 16 zero points if the
// form has them. Codes of 8 elements of K: 4 bits: 16 words of 32 bits, one a column; its nibble i is element
// 2 (i mod 4) + i div 4, so that a word of 16 bits has one element of four bf16 units. 8 bits: 16 signed bytes for each
// element.
#pragma once

#include "common.h"

namespace moe {

enum ScaleType { SCALE_F32, SCALE_BF16, SCALE_F16 };

// Made in kernels/cpu/coded.py. value = (table[code] - zero) * scale; 8 bits: (code - 128 - zero) * scale.
struct Coding {
  int64_t bits, group;  // group: elements of K; a multiple of 8
  int64_t scale_type, has_zeros;
  float table[16];  // 4 bits: the value of each code; exact in bf16

  int64_t scale_bytes() const { return scale_type == SCALE_F32 ? 4 : 2; }
  int64_t code_bytes() const { return group * LANES * bits / 8; }
  int64_t group_bytes() const { return code_bytes() + LANES * (scale_bytes() + (has_zeros ? 1 : 0)); }
  int64_t panel_bytes(int64_t k) const { return k / group * group_bytes(); }
};

// c[m][16 * count] = rows of x times `count` panels, over all of K (a multiple of the group). x: rows `ldx` bytes apart.
// A row's result does not depend on m and count.
template <class T>
void coded_product(const Coding& form, const void* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                   int64_t count, float* c, int64_t ldc);

}  // namespace moe
