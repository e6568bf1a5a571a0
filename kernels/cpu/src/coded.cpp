// Products with coded weights: a group's sum is multiplied by its scale. Codes become floats in registers; of bf16 rows
// with VNNI see coded_integers.h, with AVX2 coded_words.h, of many rows with AMX coded_tiles.h and coded_floats.h.
//
// Legend: M rows, K in-features, N out-features, G groups, MR x NR rows x panels of a tile.
#include "coded.h"

#include "coded_tiles.h"
#include "coded_words.h"
#include "decoded.h"

namespace moe {

// The table as a kernel reads it.
struct Values {
#if defined(MOE_AVX512)
  __m512 floats;
#elif defined(__AVX2__) && defined(__FMA__)
  __m256 low, high;
#else
  const float* table;
#endif

  explicit Values(const Coding& form) {
#if defined(MOE_AVX512)
    floats = _mm512_loadu_ps(form.table);
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
    PARTS_LOOP {
      vu codes;
      std::memcpy(&codes, p + i * sizeof(vu), sizeof(vu));
      if constexpr (BITS == 8) {
        vu more;
        std::memcpy(&more, p + LANES * 4 + i * sizeof(vu), sizeof(vu));
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
          value[n].v[i] = __builtin_convertvector((vi)(codes >> (8 * n) & 255u), vf) - 128.f;
          value[4 + n].v[i] = __builtin_convertvector((vi)(more >> (8 * n) & 255u), vf) - 128.f;
        }
      } else {
#pragma GCC unroll 8
        for (int n = 0; n < OCTET; n++) value[n / 2 + n % 2 * 4].v[i] = values.of(codes >> (4 * n));
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
                                                 const char* panels, int64_t panel, const char* next,
                                                 const float* sums, float* c, int64_t ldc) {
  const Values values(form);
  const PanelAhead lines(panel, panels, next);
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
      const char* ahead = p + lines.from(p - panels);
#pragma GCC unroll 4
      for (int n = 0; n < NR; n++) {
        Octet<T, BITS> octet;
        octet.take(p + n * panel, values);
        __builtin_prefetch(ahead + n * panel, 0, 2);
        if (BITS == 8) __builtin_prefetch(ahead + n * panel + 64, 0, 2);
#pragma GCC unroll 8
        for (int i = 0; i < MR; i++) octet.add(part[i][n], row[i]);
      }
#pragma GCC unroll 8
      for (int i = 0; i < MR; i++) row[i] += OCTET;
    }
#pragma GCC unroll 4
    for (int n = 0; n < NR; n++) {
      const char* end = panels + g * group_bytes + codes + n * panel;
      if (form.factors) {
        F16 scale, offset;
        load_factors(end, panels + n * panel + form.pairs_at(k) + g / form.factors * PAIR_BYTES, &scale, &offset);
        for (int i = 0; i < MR; i++)
          total[i][n] = fma(scale, part[i][n], total[i][n]) - offset * set1(sums[i * groups + g]);
        continue;
      }
      const F16 scale = load_scales(end, form.scale_type);
      if (form.has_zeros) {
        F16 zeros = load_bytes(end + LANES * scale_bytes);
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
                          int64_t panel, const char* next, const float* sums, float* c, int64_t ldc) {
  const int64_t groups = k / form.group;
  int64_t i = 0;
  auto run = [&](auto rows) {
    constexpr int MR = decltype(rows)::value;
    coded_tile<T, BITS, MR, NR>(form, x + i * ldx, ldx, k, panels, panel, next, sums ? sums + i * groups : nullptr,
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
static void coded(const Coding& form, const char* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                  int64_t count, const char* next, float* c, int64_t ldc) {
  const int64_t panel = form.panel_bytes(k);
  const float* sums = form.has_zeros || form.factors ? group_sums<T>(x, ldx, m, k, form.group) : nullptr;
  int64_t n = 0;
  auto run = [&](auto width) {
    constexpr int NR = decltype(width)::value;
    for (; count - n >= NR; n += NR)
      coded_columns<T, BITS, NR>(form, x, ldx, m, k, panels + n * panel, panel,
                                 n + NR < count ? panels + (n + NR) * panel : next, sums, c + n * LANES, ldc);
  };
#if defined(MOE_AVX512)
  if (m == 1) run(std::integral_constant<int, 4>());
  run(std::integral_constant<int, 2>());
#endif
  run(std::integral_constant<int, 1>());
}

template <class T>
const char* coded_rows(const Coding& form, const void* x, int64_t* ldx, int64_t m, int64_t k, Purpose purpose) {
#if defined(MOE_INTEGERS)
  if constexpr (sizeof(T) == 2) return integer_rows(form, x, ldx, m, k, purpose);
#endif
  (void)form, (void)ldx, (void)m, (void)k, (void)purpose;
  return static_cast<const char*>(x);
}

template const char* coded_rows<float>(const Coding&, const void*, int64_t*, int64_t, int64_t, Purpose);
template const char* coded_rows<bf16>(const Coding&, const void*, int64_t*, int64_t, int64_t, Purpose);

#if defined(MOE_INTEGERS)
template <int BITS>
static void integer_product(const Coding& form, const char* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                            int64_t count, const char* next, float* c, int64_t ldc) {
  int64_t done = 0;
#if defined(MOE_INTEGER_TILES)
  done = rows_by_tiles(form, m);
  for (int64_t n = 0; n < count && done > 0; n += CHUNK_PANELS) {
    const char* from = panels + n * form.panel_bytes(k);
    const int64_t here = std::min(CHUNK_PANELS, count - n);
    const char* then = n + here < count ? from + here * form.panel_bytes(k) : next;
    const auto run = exact_in_float(form) ? float_tiles : integer_tiles<BITS>;
    run(form, x, ldx, done, k, from, here, then, c + n * LANES, ldc);
  }
#endif
  if (done < m) integer_columns<BITS>(form, x + done * ldx, ldx, m - done, k, panels, count, next, c + done * ldc, ldc);
}
#endif

template <class T>
void coded_product(const Coding& form, const void* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                   int64_t count, const char* next, float* c, int64_t ldc) {
  const char* rows = static_cast<const char*>(x);
#if defined(MOE_INTEGERS)
  if constexpr (sizeof(T) == 2) {
    const auto run = form.bits == 4 ? integer_product<4> : integer_product<8>;
    return run(form, rows, ldx, m, k, panels, count, next, c, ldc);
  }
#endif
  if (form.bits == 4)
    coded<T, 4>(form, rows, ldx, m, k, panels, count, next, c, ldc);
  else
    coded<T, 8>(form, rows, ldx, m, k, panels, count, next, c, ldc);
}

template void coded_product<float>(const Coding&, const void*, int64_t, int64_t, int64_t, const char*, int64_t,
                                   const char*, float*, int64_t);
template void coded_product<bf16>(const Coding&, const void*, int64_t, int64_t, int64_t, const char*, int64_t,
                                  const char*, float*, int64_t);

template <class T>
bool decodes(const Coding* form, int64_t m) {
#if defined(MOE_DECODED)
  if (sizeof(T) == 2) return form && form->parts > 0 && m >= least_decoded(*form) && tiles_allowed();
#endif
  (void)form, (void)m;
  return false;
}

template bool decodes<float>(const Coding*, int64_t);
template bool decodes<bf16>(const Coding*, int64_t);

void decode_panels(const Coding& form, int64_t k, int64_t first, int64_t steps, const char* panels, int64_t count,
                   const char* next, uint32_t* out) {
#if defined(MOE_DECODED)
  const auto run = form.codes_only()  ? decode_panel<8, 1>
                   : form.bits == 8   ? decode_panel<8, 2>
                   : form.parts == 1 ? decode_panel<4, 1>
                                      : decode_panel<4, 2>;
  for (int64_t n = 0; n < count; n++)
    run(form, panels + n * form.panel_bytes(k), k, 2 * first, 2 * (first + steps), next - panels,
        out + n * steps * LANES, count * steps * LANES);
#else
  (void)form, (void)k, (void)first, (void)steps, (void)panels, (void)count, (void)next, (void)out;
#endif
}

void scale_columns(const Coding& form, int64_t k, const char* panels, int64_t count, float* c, int64_t ldc, int64_t m) {
  if (!form.codes_only()) return;
  for (int64_t n = 0; n < count; n++) {
    const F16 scale = load_scales(panels + n * form.panel_bytes(k) + form.code_bytes(), form.scale_type);
    for (int64_t i = 0; i < m; i++) {
      float* at = c + i * ldc + n * LANES;
      store(at, load(at) * scale);
    }
  }
}

// Codes of 4 bits: 8 bytes of a row -> a word, `count` words.
static INLINE void join_nibbles(const uint8_t* codes, int64_t count, uint32_t* words) {
  for (int64_t i = 0; i < count; i++) {
    uint32_t low, high;
    std::memcpy(&low, codes + i * OCTET, 4);
    std::memcpy(&high, codes + i * OCTET + 4, 4);
    words[i] = (low & 0x0f0f0f0fu) | (high & 0x0f0f0f0fu) << 4;
  }
}

// Codes of up to 16 rows, a byte each, to their places in a panel: words of four bytes, turned.
static void pack_codes(const Coding& form, const uint8_t* const* rows, int64_t k, char* panel) {
  alignas(64) uint32_t lines[LANES][LANES], block[LANES][LANES];
  const uint32_t* from[LANES];
  const int64_t bytes = 32 / form.bits, words = k / bytes, in_group = form.group / bytes;
  for (int64_t done = 0; done < words; done += LANES) {
    const int64_t here = std::min<int64_t>(LANES, words - done);
    for (int i = 0; i < LANES; i++) {
      from[i] = lines[i];
      if (!rows[i])
        std::memset(lines[i], 0, sizeof lines[i]);
      else if (form.bits == 4)
        join_nibbles(rows[i] + done * bytes, here, lines[i]);
      else
        std::memcpy(lines[i], rows[i] + done * bytes, size_t(here) * 4);
    }
    transpose(block[0], LANES, from);
    for (int64_t i = 0; i < here; i++) {
      const int64_t word = done + i;
      std::memcpy(panel + word / in_group * form.group_bytes() + word % in_group * LANES * 4, block[i], LANES * 4);
    }
  }
}

}  // namespace moe

using namespace moe;

API int64_t moe_coded_bytes(const Coding* form, int64_t n, int64_t k) { return panels_of(n) * form->panel_bytes(k); }

// Stores the factors of one column of a group, and the scale and offset of its groups; null: zeros.
static void pack_factors(const uint8_t* factors, const char* pair, int64_t column, char* at, char* pairs) {
  for (int part = 0; part < 2; part++) {
    at[part * LANES + column] = factors ? char(factors[part]) : 0;
    char* to = pairs + part * (PAIR_BYTES / 2) + column * 2;
    if (factors)
      std::memcpy(to, pair + 2 * part, 2);
    else
      std::memset(to, 0, 2);
  }
}

// codes uint8 [N, K] in rows `ldc` apart, scales [N, G] of the form's type, zeros uint8 [N, G] or null -> panels. With
// factors: scales float16 [N, G / factors, 2] with the offsets, zeros: factors uint8 [N, G, 2].
API void moe_coded_pack(const Coding* form, const uint8_t* codes, int64_t ldc, const char* scales, const uint8_t* zeros,
                        int64_t n, int64_t k, char* out) {
  const int64_t groups = k / form->group, size = form->scale_bytes();
  parallel_ranges(panels_of(n), double(k) * 4, [&](int64_t from, int64_t to) {
    for (int64_t p = from; p < to; p++) {
      const uint8_t* rows[LANES];
      for (int64_t i = 0; i < LANES; i++) rows[i] = p * LANES + i < n ? codes + (p * LANES + i) * ldc : nullptr;
      pack_codes(*form, rows, k, out + p * form->panel_bytes(k));
      for (int64_t g = 0; g < groups; g++) {
        char* at = out + p * form->panel_bytes(k) + g * form->group_bytes();
        char* of_scales = at + form->code_bytes();
        for (int64_t i = 0; i < LANES; i++) {
          const int64_t row = p * LANES + i;
          if (form->factors) {
            const int64_t pair = g / form->factors;
            char* pairs = out + p * form->panel_bytes(k) + form->pairs_at(k) + pair * PAIR_BYTES;
            pack_factors(row < n ? zeros + 2 * (row * groups + g) : nullptr,
                         row < n ? scales + 4 * (row * (groups / form->factors) + pair) : nullptr, i, of_scales, pairs);
            continue;
          }
          if (row < n)
            std::memcpy(of_scales + i * size, scales + (row * groups + g) * size, size_t(size));
          else
            std::memset(of_scales + i * size, 0, size_t(size));
          if (form->has_zeros)
            of_scales[LANES * size + i] = row < n ? char(zeros[row * groups + g]) : 0;
        }
      }
    }
  });
}
