// Weights of 4 or 8 bits with a scale per group of K: multiplied as stored.
//
// Layout of a panel (16 columns): its groups in order; each has its codes, then 16 scales, then 16 zero points if the
// form has them. Codes of 8 elements of K, 16 columns of 4 bytes: 4 bits: byte j has elements j (low bits) and 4 + j;
// 8 bits: the bytes of elements 0 to 3 of all columns, then those of 4 to 7. With factors a group has 16 bytes with the
// scales' factors and 16 with the offsets' instead, and after all groups come 16 scales and 16 offsets (float16) for
// each `factors` groups.
//
// With AVX512-VNNI and AVX2 bf16 rows are multiplied as integers of 16 bits with a scale for each block of at most 128 elements,
// which is more exact than bf16 itself for elements near the largest of a block. Else codes become floats.
// With AMX many rows are multiplied by tiles, from the same panels: codes become bytes in a thread's scratch memory.
#pragma once

#include "common.h"

namespace moe {

constexpr int64_t PAIR_BYTES = 2 * 2 * LANES;

enum ScaleType { SCALE_F32, SCALE_BF16, SCALE_F16 };

// Made in kernels/cpu/coded.py. value = (table[code] - zero) * scale; 8 bits: (code - 128 - zero) * scale.
// With factors: table[code] * scale * factor - offset * factor'.
struct Coding {
  int64_t bits, group;  // group: elements of K; a multiple of 8
  int64_t scale_type, has_zeros;
  int64_t factors;  // groups with a common scale and offset; 0: a scale for each group
  int64_t parts;  // products of many rows may decode panels, to this number of bf16 that sum to a value; 0: they may not
  float table[16];  // 4 bits: the value of each code; exact in bf16

  int64_t scale_bytes() const { return scale_type == SCALE_F32 ? 4 : 2; }
  int64_t code_bytes() const { return group * LANES * bits / 8; }
  int64_t group_bytes() const { return code_bytes() + LANES * (factors ? 2 : scale_bytes() + (has_zeros ? 1 : 0)); }
  bool codes_only() const { return bits == 8 && parts == 1; }  // decoded panels have no scales
  int64_t pairs_at(int64_t k) const { return k / group * group_bytes(); }  // scales and offsets in a panel
  int64_t panel_bytes(int64_t k) const { return pairs_at(k) + (factors ? k / group / factors * PAIR_BYTES : 0); }
};

// Rows as coded_product reads them: x itself, or integers in this thread's memory of that purpose. `ldx` in bytes.
template <class T>
const char* coded_rows(const Coding& form, const void* x, int64_t* ldx, int64_t m, int64_t k, Purpose purpose);

// c[m][16 * count] = rows of x times `count` panels, over all of K (a multiple of the group). x: of coded_rows.
// A row's result does not depend on m and count. `next`: the panels of the next call, prefetched.
template <class T>
void coded_product(const Coding& form, const void* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                   int64_t count, const char* next, float* c, int64_t ldc);

// True if m rows of T are multiplied, as they are, by panels that are decoded to bf16, a few at a time.
template <class T>
bool decodes(const Coding* form, int64_t m);

// Steps [first, first + steps) of panels in the layout of plain ones: [parts][count][steps][16]. `next`: the panels
// decoded next, prefetched.
void decode_panels(const Coding& form, int64_t k, int64_t first, int64_t steps, const char* panels, int64_t count,
                   const char* next, uint32_t* out);

// The sums of products with codes alone times their scales.
void scale_columns(const Coding& form, int64_t k, const char* panels, int64_t count, float* c, int64_t ldc, int64_t m);

}  // namespace moe
