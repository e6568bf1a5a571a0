// Products of coded weights in groups of 32 with many rows by bf16 tiles. Included by coded.cpp.
//
// An INT8 tile would be half empty, and `high` and `low` would each need a sum, stored after every group. With values
// of at most 16 a group's sum is below 2^24: one bf16 tile holds it for 256 high and low together, exactly. The float
// operations after it are those of coded_integers.h, so that a row has the same bits.
//
// Legend: as in coded_integers.h. A *chunk* is some groups whose codes, decoded, stay in the L1 cache.
#pragma once

#include "amx.h"
#include "coded_integers.h"

#if defined(MOE_VNNI)
namespace moe {

#if defined(MOE_AMX)
constexpr int64_t FLOAT_GROUP = 32;   // elements of K of a tile
constexpr int64_t FLOAT_PANELS = 4;
constexpr int64_t FLOAT_ROWS = 32;
constexpr int64_t FLOAT_LEAST = 8;    // rows
constexpr int64_t TOGETHER = 2;       // groups of a chunk
constexpr int64_t TILE_SUMS = 16 * LANES, GROUP_SUMS = 4 * TILE_SUMS;
constexpr int64_t GROUP_FLOATS = FLOAT_GROUP * LANES * 2;  // bytes of a decoded group of a panel

static bool exact_in_float(const Coding& form) {
  return form.bits == 4 && form.group == FLOAT_GROUP && IntegerTable(form).most <= 16;  // 32 * 16 * 32639 < 2^24
}

static bool by_floats(const Coding& form, int64_t m) {
  return tiles_allowed() && m >= FLOAT_LEAST && exact_in_float(form);
}

// Sixteen integers as floats; bf16 of those of 8 bits is exact.
static INLINE __m256i as_bf16(__m512i integers) {
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)_mm512_cvtepi32_ps(integers), 16));
}

// Elements of each eight change places: 0 2 4 6 1 3 5 7, as `expand_floats` has them.
static void float_row(const char* row, int64_t k, char* out) {
  alignas(64) uint16_t places[2 * LANES];
  for (int i = 0; i < 2 * LANES; i++) places[i] = uint16_t(i / OCTET * OCTET + i % 4 * 2 + i % OCTET / 4);
  const __m512i order = _mm512_load_si512(places);
  for (int64_t j = 0; j < 2 * k; j += 2 * LANES) {
    __m256i half[2];
    for (int i = 0; i < 2; i++) {
      const __m512i integers = _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(row + j) + i));
      half[i] = as_bf16(j < k ? _mm512_slli_epi32(integers, 8) : integers);
    }
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512(half[0]), half[1], 1);
    _mm512_storeu_si512(out + 2 * j, _mm512_permutexvar_epi16(order, both));
  }
}

// Codes of 4 bits of a group -> integers in bf16. `floats` has them twice: an index is five bits, and the fifth is
// of the next code.
static INLINE void expand_floats(__m512i floats, const char* p, int64_t ahead, char* out) {
#pragma GCC unroll 4
  for (int64_t j = 0; j < FLOAT_GROUP; j += OCTET, p += 64) {
    __m512i codes = _mm512_loadu_si512(p);
    __builtin_prefetch(p + ahead, 0, 2);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++, out += 64) {
      _mm512_store_si512(out, _mm512_permutexvar_epi16(codes, floats));
      codes = _mm512_srli_epi16(codes, 4);
    }
  }
}

static __m512i float_table(const Coding& form, float unit) {
  alignas(64) uint16_t words[2 * LANES];
  for (int i = 0; i < 2 * LANES; i++) {
    const float value = form.table[i % LANES] / unit;
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    words[i] = uint16_t(bits >> 16);
  }
  return _mm512_load_si512(words);
}

// Rows of a group as tiles read them: `low` of a row is `low_at` bytes behind `high`.
struct TileRows {
  const char* high;
  int64_t low_at, ldx, rows;
};

// Sums of a group, in all four tiles: more in flight hide their latency. 17 to 32 rows: of 2 panels ([panel][32][16]),
// fewer: of 4 ([panel][16][16]). `codes`: of panels `panel` apart.
static INLINE void float_products(const TileRows& a, const char* codes, int64_t panel, int64_t width, float* sums) {
  const char* low = a.high + a.low_at;
  amx_zero<0>(), amx_zero<1>(), amx_zero<2>(), amx_zero<3>();
  amx_load<4>(a.high, a.ldx);
  amx_load<6>(codes, 64);
  if (a.rows > 16) {
    amx_load<5>(a.high + 16 * a.ldx, a.ldx);
    amx_dot<0, 4, 6>(), amx_dot<2, 5, 6>();
    if (width > 1) amx_load<7>(codes + panel, 64), amx_dot<1, 4, 7>(), amx_dot<3, 5, 7>();
    amx_load<4>(low, a.ldx), amx_load<5>(low + 16 * a.ldx, a.ldx);
    amx_dot<0, 4, 6>(), amx_dot<2, 5, 6>();
    if (width > 1) amx_dot<1, 4, 7>(), amx_dot<3, 5, 7>();
  } else {
    amx_load<5>(low, a.ldx);
    amx_dot<0, 4, 6>(), amx_dot<0, 5, 6>();
    if (width > 1) amx_load<7>(codes + panel, 64), amx_dot<1, 4, 7>(), amx_dot<1, 5, 7>();
    if (width > 2) amx_load<6>(codes + 2 * panel, 64), amx_dot<2, 4, 6>(), amx_dot<2, 5, 6>();
    if (width > 3) amx_load<7>(codes + 3 * panel, 64), amx_dot<3, 4, 7>(), amx_dot<3, 5, 7>();
  }
  const int64_t second = a.rows > 16 ? 2 : 1;
  amx_store<0>(sums, 64), amx_store<1>(sums + second * TILE_SUMS, 64);
  amx_store<2>(sums + (3 - second) * TILE_SUMS, 64), amx_store<3>(sums + 3 * TILE_SUMS, 64);
}

// c (+)= scales times the sums of COUNT groups from g on, GROUP_SUMS apart.
template <int COUNT>
static void add_groups(const Coding& form, float unit, const char* panel, int64_t k, int64_t g, const char* x,
                       int64_t ldx, int64_t rows, const float* sums, float* c, int64_t ldc) {
  const char* end = panel + g * form.group_bytes() + form.code_bytes();
  const GroupScale first(form, unit, end, panel, k, g);
  const GroupScale last(form, unit, end + (COUNT - 1) * form.group_bytes(), panel, k, g + COUNT - 1);
  auto add = [&](auto offsets) {
    for (int64_t i = 0; i < rows; i++) {
      const RowBlock* of_row = blocks_of(x + i * ldx, k) + g;
      F16 total = g == 0 ? zero() : load(c + i * ldc);
#pragma GCC unroll 2
      for (int q = 0; q < COUNT; q++) {
        const GroupScale& group = q == 0 ? first : last;
        const F16 part = set1(of_row[q].scale) * load(sums + q * GROUP_SUMS + i * LANES);
        total = decltype(offsets)::value ? group.add(part, &of_row[q].total, total) : fma(group.scale, part, total);
      }
      store(c + i * ldc, total);
    }
  };
  first.offsets ? add(std::true_type()) : add(std::false_type());
}

// Up to FLOAT_PANELS panels, chunk by chunk.
static void float_tiles(const Coding& form, const char* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                        int64_t count, const char* next, float* c, int64_t ldc) {
  const float unit = IntegerTable(form).unit;
  const __m512i table = float_table(form, unit);
  const int64_t groups = k / FLOAT_GROUP, panel = form.panel_bytes(k), group_bytes = form.group_bytes();
  constexpr int64_t SPAN = TOGETHER * GROUP_FLOATS;
  char* codes = scratch<char>(TILES, FLOAT_PANELS * SPAN + 4 * TOGETHER * GROUP_SUMS);
  float* sums = reinterpret_cast<float*>(codes + FLOAT_PANELS * SPAN);
  const char* high = x + floats_at(k, FLOAT_GROUP);
  for (int64_t g = 0; g < groups; g += TOGETHER) {
    const int64_t here = std::min(TOGETHER, groups - g);
    for (int64_t n = 0; n < count; n++) {
      const char* own = panels + n * panel;
      const PanelAhead lines(panel, own, next + n * panel);
      for (int64_t q = 0; q < here; q++)
        expand_floats(table, own + (g + q) * group_bytes, lines.from((g + q) * group_bytes) - (g + q) * group_bytes,
                      codes + n * SPAN + q * GROUP_FLOATS);
    }
    for (int64_t row = 0; row < m; row += FLOAT_ROWS) {
      const int64_t rows = std::min(FLOAT_ROWS, m - row), upper = std::min<int64_t>(rows, 16);
      const bool tall = rows > 16;
      configure_tiles(upper, tall ? rows - upper : upper, 64);
      const int64_t wide = tall ? 2 : 4, of_panel = GROUP_SUMS / wide;
      for (int64_t n = 0; n < count; n += wide) {
        const int64_t width = std::min(wide, count - n);
        for (int64_t q = 0; q < here; q++)
          float_products({high + row * ldx + (g + q) * 2 * FLOAT_GROUP, 2 * k, ldx, rows},
                         codes + n * SPAN + q * GROUP_FLOATS, SPAN, width, sums + q * GROUP_SUMS);
        const auto add = here == TOGETHER ? add_groups<TOGETHER> : add_groups<1>;
        for (int64_t p = 0; p < width; p++)
          add(form, unit, panels + (n + p) * panel, k, g, x + row * ldx, ldx, rows, sums + p * of_panel,
              c + row * ldc + (n + p) * LANES, ldc);
      }
    }
  }
  end_tiles();
}

#else
static bool by_floats(const Coding&, int64_t) { return false; }
static void float_row(const char*, int64_t, char*) {}
#endif

}  // namespace moe
#endif
