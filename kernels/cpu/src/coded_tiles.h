// Products of coded weights with many rows by matrix tiles. Included by coded.cpp.
//
// The sums of a block are exact integers, and the float operations after them are those of coded_integers.h: a row has
// the same bits by either file, so a product may choose by its number of rows.
//
// Legend: as in coded_integers.h. A *chunk* is some blocks whose codes, as bytes, stay in the L1 cache.
#pragma once

#include "amx.h"
#include "coded_floats.h"

#if defined(MOE_VNNI) && defined(MOE_AMX)
#define MOE_INTEGER_TILES 1

namespace moe {

constexpr int64_t CHUNK = 512;  // elements of K
constexpr int64_t CHUNK_PANELS = 4;
constexpr int64_t TILE_ROWS = 16;
constexpr int64_t TILE_DEPTH = 64;  // elements of K of a tile product

// Blocks of K, and their place in a panel.
struct Blocks {
  int64_t size, in_group, codes, group_bytes;

  explicit Blocks(const Coding& form)
      : size(block_of(form)), in_group(form.group / size), codes(size * LANES * form.bits / 8),
        group_bytes(form.group_bytes()) {}
  int64_t at(int64_t block) const { return block / in_group * group_bytes + block % in_group * codes; }
  int64_t per_chunk() const { return std::max<int64_t>(CHUNK / size, 1); }
};

// Codes of blocks [first, last) of a panel -> signed bytes, lines of 4 elements of 16 columns, as tiles of B. `ahead`:
// distance to prefetch.
template <int BITS>
static void expand(const Blocks& blocks, const IntegerTable& table, const char* panel, int64_t first, int64_t last,
                   int64_t ahead, char* out) {
  constexpr int64_t STEP = OCTET * LANES * BITS / 8;
  const __m512i offset = _mm512_set1_epi8(char(table.offset)), bytes = lookup(table);
  for (int64_t b = first; b < last; b++) {
    const char* p = panel + blocks.at(b);
    for (int64_t j = 0; j < blocks.size; j += OCTET, p += STEP, out += 128) {
      __m512i low, high;
      take<BITS>(p, table.looked_up, bytes, &low, &high);
      __builtin_prefetch(p + ahead, 0, 2);
      if (BITS == 8) __builtin_prefetch(p + ahead + 64, 0, 2);
      _mm512_store_si512(out, _mm512_sub_epi8(low, offset));
      _mm512_store_si512(out + 64, _mm512_sub_epi8(high, offset));
    }
  }
}

// Up to 16 rows as tiles read them. `blocks` of row i: `apart` bytes behind those of row i - 1, of MR rows.
struct TileOfRows {
  const char* x;
  int64_t ldx, k, rows;
  const char* blocks;
  int64_t apart;

  const RowBlock& block(int64_t i, int64_t b) const { return reinterpret_cast<const RowBlock*>(blocks + i * apart)[b]; }
};

struct alignas(64) BlockSums {
  int32_t high[TILE_ROWS][LANES], low[TILE_ROWS][LANES];

  INLINE F16 of(int64_t i) const {
    const __m512i most = _mm512_slli_epi32(_mm512_load_si512(high[i]), 8);
    F16 r;
    r.v[0] = (vf)_mm512_cvtepi32_ps(_mm512_add_epi32(most, _mm512_load_si512(low[i])));
    return r;
  }
};

static INLINE void block_products(const TileOfRows& a, int64_t block, int64_t size, const char* codes) {
  amx_zero<0>();
  amx_zero<1>();
  const char* row = a.x + block * size;
  for (int64_t j = 0; j < size; j += TILE_DEPTH) {
    amx_load<6>(codes + j * LANES, 64);
    amx_load<4>(row + j, a.ldx);
    amx_load<5>(row + a.k + j, a.ldx);
    amx_dot_bytes<0, 4, 6>();
    amx_dot_bytes<1, 5, 6>();
  }
}

static INLINE void store_sums(BlockSums* sums) {
  amx_store<0>(sums->high, 64);
  amx_store<1>(sums->low, 64);
}

// c (+)= rows times blocks [first, last) of a panel, whose bytes are `codes`. WHOLE: a block is a group. Else `part`
// [MR][16] has the sums of a group that the last chunk has begun.
template <int MR, bool WHOLE>
__attribute__((noinline)) static void tile_blocks(const Coding& form, const Blocks& blocks, const IntegerTable& table,
                                                  const TileOfRows& a, const char* codes, const char* panel,
                                                  int64_t first, int64_t last, float* c, int64_t ldc, float* part) {
  BlockSums sums[2];
  F16 sum[MR];
  auto total = [&](int64_t i, bool begins) { return begins || i >= a.rows ? zero() : load(c + i * ldc); };
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++) sum[i] = WHOLE ? total(i, first == 0) : load(part + i * LANES);
  auto products = [&](int64_t b) {
    if (b < last) block_products(a, b, blocks.size, codes + (b - first) * blocks.size * LANES);
  };
  products(first);
  store_sums(&sums[0]);
  products(first + 1);
  for (int64_t b = first; b < last; b++) {
    const BlockSums& own = sums[(b - first) % 2];
    // While the tiles compute the block after the next one, the vectors below read this one's sums.
    if (b + 1 < last) store_sums(&sums[(b + 1 - first) % 2]);
    products(b + 2);
    const int64_t g = b / blocks.in_group;
    const char* end = panel + g * blocks.group_bytes + form.code_bytes();
    if constexpr (WHOLE) {
      const GroupScale group(form, table.unit, end, panel, a.k, g);
#pragma GCC unroll 16
      for (int i = 0; i < MR; i++) {
        const RowBlock& of_row = a.block(i, b - first);
        sum[i] = group.add(set1(of_row.scale) * own.of(i), &of_row.total, sum[i]);
      }
      continue;
    }
    const bool begins = b % blocks.in_group == 0;
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++) sum[i] = fma(set1(a.block(i, b - first).scale), own.of(i), begins ? zero() : sum[i]);
    if ((b + 1) % blocks.in_group != 0) continue;
    const GroupScale group(form, table.unit, end, panel, a.k, g);
#pragma GCC unroll 16
    for (int i = 0; i < MR; i++)
      if (i < a.rows)
        store(c + i * ldc, group.add(sum[i], &a.block(i, b - first).total, total(i, g == 0)));
  }
#pragma GCC unroll 16
  for (int i = 0; i < MR; i++) {
    if (!WHOLE) store(part + i * LANES, sum[i]);
    if (WHOLE && i < a.rows) store(c + i * ldc, sum[i]);
  }
}

// Rows of the blocks [first, last); of fewer than 16 rows the blocks in `padded`, as zeros for the rest.
static TileOfRows rows_of_tile(const char* x, int64_t ldx, int64_t k, int64_t rows, int64_t first, int64_t last,
                               RowBlock* padded) {
  const RowBlock* own = blocks_of(x, k) + first;
  if (rows == TILE_ROWS) return {x, ldx, k, rows, reinterpret_cast<const char*>(own), ldx};
  const int64_t count = last - first;
  for (int64_t i = 0; i < TILE_ROWS; i++)
    for (int64_t j = 0; j < count; j++)
      padded[i * count + j] = i < rows ? blocks_of(x + i * ldx, k)[first + j] : RowBlock{};
  return {x, ldx, k, rows, reinterpret_cast<const char*>(padded), count * int64_t(sizeof(RowBlock))};
}

// Up to CHUNK_PANELS panels, chunk by chunk.
template <int BITS>
static void integer_tiles(const Coding& form, const char* x, int64_t ldx, int64_t m, int64_t k, const char* panels,
                          int64_t count, const char* next, float* c, int64_t ldc) {
  const IntegerTable table(form);
  const Blocks blocks(form);
  const int64_t all = k / blocks.size, per_chunk = std::min(blocks.per_chunk(), all), panel = form.panel_bytes(k);
  const int64_t bytes = per_chunk * blocks.size * LANES, parts = ceil_div(m, TILE_ROWS) * TILE_ROWS * LANES;
  const int64_t of_rows = TILE_ROWS * per_chunk * int64_t(sizeof(RowBlock));
  char* codes = scratch<char>(TILES, CHUNK_PANELS * (bytes + 4 * parts) + of_rows);
  float* part = reinterpret_cast<float*>(codes + CHUNK_PANELS * bytes);
  RowBlock* padded = reinterpret_cast<RowBlock*>(part + CHUNK_PANELS * parts);
  const auto many = blocks.in_group == 1 ? tile_blocks<16, true> : tile_blocks<16, false>;
  const auto few = blocks.in_group == 1 ? tile_blocks<8, true> : tile_blocks<8, false>;
  for (int64_t first = 0; first < all; first += per_chunk) {
    const int64_t last = std::min(first + per_chunk, all);
    for (int64_t n = 0; n < count; n++) {
      const char* own = panels + n * panel;
      const int64_t ahead = last < all ? blocks.at(last) - blocks.at(first) : next + n * panel - own - blocks.at(first);
      expand<BITS>(blocks, table, own, first, last, ahead, codes + n * bytes);
    }
    for (int64_t row = 0; row < m; row += TILE_ROWS) {
      const int64_t rows = std::min(TILE_ROWS, m - row);
      const TileOfRows a = rows_of_tile(x + row * ldx, ldx, k, rows, first, last, padded);
      configure_tiles(rows, rows, std::min(blocks.size, TILE_DEPTH));
      const auto run = rows <= 8 ? few : many;
      for (int64_t n = 0; n < count; n++)
        run(form, blocks, table, a, codes + n * bytes, panels + n * panel, first, last, c + row * ldc + n * LANES, ldc,
            part + n * parts + row * LANES);
    }
  }
  end_tiles();
}

// Rows of a product that tiles multiply sooner than vectors, by measurement: the first ones, none, or all.
static int64_t rows_by_tiles(const Coding& form, int64_t m) {
  const bool floats = exact_in_float(form);
  const int64_t block = block_of(form), least = floats ? FLOAT_LEAST : block == 32 ? 13 : 9;
  if (!tiles_allowed() || block < 32 || m < least) return 0;
  const int64_t rest = m % TILE_ROWS;
  return rest < (block == 32 && !floats ? 8 : 5) ? m - rest : m;
}

}  // namespace moe
#endif
