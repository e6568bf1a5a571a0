// Plain weights to panels of codes in one pass, and the values of FP8 weights; kernels/quantization has both in torch.
//
// Sixteen rows are quantized at a time, a lane each: a group's largest magnitude, scale and errors are vectors, and its
// codes are in the order of a panel.
//
// Legend: N out-features, K in-features.
#include "coded_parts.h"
#include "fp8.h"

namespace moe {

constexpr int64_t MOST = 256;  // elements of a row at a time
constexpr int RANGES = 4;
constexpr double RANGE[RANGES] = {1., 0.93, 0.86, 0.8};  // as in quantize.py
constexpr int SCALE_BITS = 5;                            // the same
constexpr float LEAST = 1e-12f;

static INLINE F16 rounded(const F16& x) {
  F16 r;
  PARTS_LOOP r.v[i] = rounded(x.v[i]);
  return r;
}
// x where a < b, else y.
static INLINE F16 where_less(const F16& a, const F16& b, const F16& x, const F16& y) {
  F16 r;
  PARTS_LOOP r.v[i] = a.v[i] < b.v[i] ? x.v[i] : y.v[i];
  return r;
}

// `count` elements of up to 16 rows: line i of `to` has element i of each row, 0 for missing rows. Writes whole blocks.
template <class T>
static void turn(const T* rows, int64_t ld, int64_t num_rows, int64_t count, float* to) {
  constexpr int BLOCK = LANES * PER_UNIT<T>;
  alignas(64) static const uint32_t none[LANES] = {};
  alignas(64) uint32_t tail[LANES][LANES], units[LANES][LANES];
  for (int64_t first = 0; first < count; first += BLOCK) {
    const int64_t here = std::min<int64_t>(BLOCK, count - first);
    const uint32_t* from[LANES];
    for (int i = 0; i < LANES; i++) {
      from[i] = i < num_rows ? reinterpret_cast<const uint32_t*>(rows + i * ld + first) : none;
      if (i >= num_rows || here == BLOCK) continue;
      std::memset(tail[i], 0, sizeof tail[i]);
      std::memcpy(tail[i], from[i], size_t(here) * sizeof(T));
      from[i] = tail[i];
    }
    transpose(units[0], LANES, from);
    for (int i = 0; i < LANES; i++) {
      float* line = to + (first + i * PER_UNIT<T>) * LANES;
      if (PER_UNIT<T> == 2) {
        store(line, load_even(units[i]));
        store(line + LANES, load_odd(units[i]));
      } else {
        std::memcpy(line, units[i], sizeof units[i]);
      }
    }
  }
}

// The inverse, rounded to T.
template <class T>
static void turn_back(const float* lines, int64_t count, int64_t num_rows, T* rows, int64_t ld) {
  constexpr int BLOCK = LANES * PER_UNIT<T>;
  alignas(64) uint32_t units[LANES][LANES], back[LANES][LANES];
  for (int64_t first = 0; first < count; first += BLOCK) {
    const uint32_t* from[LANES];
    for (int i = 0; i < LANES; i++) {
      const float* line = lines + (first + i * PER_UNIT<T>) * LANES;
      store_units(units[i], load(line), load(line + (PER_UNIT<T> - 1) * LANES), T{});
      from[i] = units[i];
    }
    transpose(back[0], LANES, from);
    const size_t bytes = size_t(std::min<int64_t>(BLOCK, count - first)) * sizeof(T);
    for (int64_t i = 0; i < num_rows; i++) std::memcpy(rows + i * ld + first, back[i], bytes);
  }
}

// Positive numbers rounded to `SCALE_BITS` significant bits, ties to even.
static INLINE F16 short_scale(const F16& x) {
  constexpr uint32_t REST = 24 - SCALE_BITS, HALF = (1u << (REST - 1)) - 1;
  F16 r;
  PARTS_LOOP {
    const vu bits = (vu)x.v[i];
    r.v[i] = (vf)((bits + HALF + (bits >> REST & 1u)) >> REST << REST);
  }
  return r;
}

struct Scale {
  F16 scale, inverse;

  Scale(const F16& largest, float part, const Coding& form) {
    scale = max(largest * set1(part), set1(LEAST));
    if (form.bits == 4)
      scale = short_scale(scale);
    else if (form.scale_type == SCALE_BF16)
      scale = round_to(scale, bf16{});
    inverse = set1(1.f) / scale;
  }
};

template <int BITS>
static INLINE F16 code_of(const F16& x, const F16& inverse) {
  constexpr float MIDDLE = float(1 << (BITS - 1));
  return min(max(rounded(x * inverse), set1(-MIDDLE)), set1(MIDDLE - 1.f));
}

// Codes of eight lines, in the layout of coded.h.
template <int BITS>
static INLINE void put_octet(const float* lines, const F16& inverse, char* out) {
  constexpr int MIDDLE = 1 << (BITS - 1);
  vu words[PARTS * BITS / 4] = {};
  for (int n = 0; n < OCTET; n++) {
    const F16 code = code_of<BITS>(load(lines + n * LANES), inverse);
    const int shift = BITS == 4 ? 8 * (n % 4) + 4 * (n / 4) : 8 * (n % 4);
    PARTS_LOOP {
      const vu unit = (vu)(__builtin_convertvector(code.v[i], vi) + MIDDLE) << shift;
      words[(BITS == 8 ? n / 4 * PARTS : 0) + i] |= unit;
    }
  }
  std::memcpy(out, words, OCTET * LANES * BITS / 8);
}

// One group of up to 16 rows; `values`: also the values of the codes.
template <class T, int BITS>
static void quantize_group(const Coding& form, const T* rows, int64_t ld, int64_t num_rows, char* out, T* values,
                           int64_t ldv) {
  alignas(64) float lines[(MOST + 2 * LANES) * LANES];
  const int64_t group = form.group;
  auto each_part = [&](bool turned, const auto& body) {
    for (int64_t first = 0; first < group; first += MOST) {
      const int64_t here = std::min(MOST, group - first);
      if (!turned || group > MOST) turn(rows + first, ld, num_rows, here, lines);
      body(first, here);
    }
  };
  F16 largest = zero();
  each_part(false, [&](int64_t, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
      const F16 x = load(lines + i * LANES);
      largest = max(largest, max(x, zero() - x));
    }
  });
  constexpr double TOP = (1 << (BITS - 1)) - 1;
  Scale best(largest, float(RANGE[0] / TOP), form);
  if (BITS == 4) {
    const Scale part[RANGES] = {best, Scale(largest, float(RANGE[1] / TOP), form),
                                Scale(largest, float(RANGE[2] / TOP), form), Scale(largest, float(RANGE[3] / TOP), form)};
    F16 error[RANGES] = {zero(), zero(), zero(), zero()};
    each_part(true, [&](int64_t, int64_t count) {
      for (int64_t i = 0; i < count; i++) {
        const F16 x = load(lines + i * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < RANGES; r++) {
          const F16 off = code_of<BITS>(x, part[r].inverse) * part[r].scale - x;
          error[r] = fma(off, off, error[r]);
        }
      }
    });
    F16 least = error[0];
    for (int r = 1; r < RANGES; r++) {
      best.scale = where_less(error[r], least, part[r].scale, best.scale);
      best.inverse = where_less(error[r], least, part[r].inverse, best.inverse);
      least = min(error[r], least);
    }
  }
  each_part(true, [&](int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; i += OCTET)
      put_octet<BITS>(lines + i * LANES, best.inverse, out + (first + i) * LANES * BITS / 8);
    if (!values) return;
    for (int64_t i = 0; i < count; i++)
      store(lines + i * LANES, code_of<BITS>(load(lines + i * LANES), best.inverse) * best.scale);
    turn_back(lines, count, num_rows, values + first, ldv);
  });
  float lane[LANES];
  store(lane, best.scale);
  for (int64_t i = num_rows; i < LANES; i++) lane[i] = 0.f;
  char* scales = out + form.code_bytes();
  if (form.scale_type == SCALE_BF16)
    store(reinterpret_cast<bf16*>(scales), load(lane));
  else
    std::memcpy(scales, lane, sizeof lane);
}

template <class T>
static void quantize(const Coding& form, const T* weight, int64_t ldw, int64_t n, int64_t k, char* out, T* values,
                     int64_t ldv) {
  const int64_t groups = k / form.group;
  const auto run = form.bits == 4 ? quantize_group<T, 4> : quantize_group<T, 8>;
  parallel_ranges(panels_of(n), double(k) * 8, [&](int64_t from, int64_t to) {
    for (int64_t p = from; p < to; p++)
      for (int64_t g = 0; g < groups; g++) {
        const int64_t row = p * LANES, column = g * form.group;
        run(form, weight + row * ldw + column, ldw, std::min<int64_t>(LANES, n - row),
            out + p * form.panel_bytes(k) + g * form.group_bytes(), values ? values + row * ldv + column : nullptr,
            ldv);
      }
  });
}

// ---- FP8 ----

template <class T>
static void fp8_row(bool wide_range, const uint8_t* from, float scale, T* to, int64_t n) {
  if (wide_range) return read_numbers<E5M2>(from, scale, to, n);
  read_e4m3(from, scale, to, n);
}

template <class T>
static void fp8_values(bool wide_range, const uint8_t* weight, int64_t ldw, int64_t n, int64_t k, const float* scales,
                       int64_t lds, int64_t block_rows, int64_t block_columns, int64_t row, int64_t column, T* out,
                       int64_t ldo) {
  parallel_ranges(n, double(k) * 0.3, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const float* own = scales + (row + i) / block_rows * lds;
      for (int64_t j = 0; j < k;) {
        const int64_t block = (column + j) / block_columns, end = std::min(k, (block + 1) * block_columns - column);
        fp8_row(wide_range, weight + i * ldw + j, own[block], out + i * ldo + j, end - j);
        j = end;
      }
    }
  });
}

// Each block of 128 x 128 elements to e4m3 and back.
template <class T>
static void fp8_round(T* weight, int64_t ldw, int64_t n, int64_t k) {
  const int64_t columns = ceil_div(k, GROUP);
  parallel_ranges(ceil_div(n, GROUP) * columns, double(GROUP * GROUP), [&](int64_t from, int64_t to) {
    for (int64_t b = from; b < to; b++) {
      const int64_t first = b / columns * GROUP, column = b % columns * GROUP;
      const int64_t rows = std::min(GROUP, n - first), width = std::min(GROUP, k - column);
      T* block = weight + first * ldw + column;
      float scale = 0.f;
      for (int64_t i = 0; i < rows; i++) scale = std::max(scale, scale_of(block + i * ldw, width));
      for (int64_t i = 0; i < rows; i++) {
        uint8_t bytes[GROUP];
        write_numbers<E4M3>(block + i * ldw, scale, bytes, width);
        read_numbers<E4M3>(bytes, scale, block + i * ldw, width);
      }
    }
  });
}

}  // namespace moe

using namespace moe;

// weight [N, K], rows `ldw` apart -> panels of a form with integers, without zeros or factors, and scales in float32 or
// bfloat16. `keep`: the weight becomes the values of its codes.
API void moe_coded_quantize(const Coding* form, int is_bf16, void* weight, int64_t ldw, int64_t n, int64_t k, char* out,
                            int keep) {
  if (is_bf16) {
    auto w = static_cast<bf16*>(weight);
    quantize<bf16>(*form, w, ldw, n, k, out, keep ? w : nullptr, ldw);
  } else {
    auto w = static_cast<float*>(weight);
    quantize<float>(*form, w, ldw, n, k, out, keep ? w : nullptr, ldw);
  }
}

// out[i][j] = weight[i][j] * scales[(row + i) div block_rows][(column + j) div block_columns]; e4m3, or e5m2 with
// `wide_range`.
API void moe_fp8_values(int is_bf16, int wide_range, const uint8_t* weight, int64_t ldw, int64_t n, int64_t k,
                        const float* scales, int64_t lds, int64_t block_rows, int64_t block_columns, int64_t row,
                        int64_t column, void* out, int64_t ldo) {
  if (is_bf16)
    fp8_values(wide_range, weight, ldw, n, k, scales, lds, block_rows, block_columns, row, column,
               static_cast<bf16*>(out), ldo);
  else
    fp8_values(wide_range, weight, ldw, n, k, scales, lds, block_rows, block_columns, row, column,
               static_cast<float*>(out), ldo);
}

API void moe_fp8_round(int is_bf16, void* weight, int64_t ldw, int64_t n, int64_t k) {
  if (is_bf16)
    fp8_round(static_cast<bf16*>(weight), ldw, n, k);
  else
    fp8_round(static_cast<float*>(weight), ldw, n, k);
}
