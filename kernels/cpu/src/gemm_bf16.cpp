// gemm.h for bf16: matrix tiles (AMX) if available, else the register-blocked kernel.
//
// The path is fixed when the library loads, not by the shape, so that results are batch-invariant.
#include "amx.h"
#include "gemm_kernel.h"

namespace moe {

#if defined(MOE_AMX)

static bool use_amx = false;
constexpr int TILE = 16;          // rows of a tile, and steps of one tile product
constexpr int TILE_BYTES = 64;    // one row of a tile: 16 units

static thread_local int keepers = 0;
static thread_local int64_t configured = 0;  // rows and depth of the tiles of A; 0: none

static void release() {
  if (configured != 0) amx_release();
  configured = 0;
}

bool tiles_allowed() { return use_amx; }

// Of one row of tiles all of C has its rows.
void configure_tiles(int64_t upper, int64_t lower, int64_t depth) {
  const int64_t wanted = (depth * (TILE + 1) + upper) * (TILE + 1) + lower;
  if (configured == wanted) return;
  configured = wanted;
  TileConfig config;
  for (int t = 0; t < 8; t++) {
    config.column_bytes[t] = TILE_BYTES;
    config.rows[t] = TILE;
  }
  config.rows[0] = config.rows[1] = config.rows[4] = uint8_t(upper);
  config.rows[2] = config.rows[3] = uint8_t(lower > 0 ? lower : upper);
  if (lower > 0) config.rows[5] = uint8_t(lower);
  config.column_bytes[4] = config.column_bytes[5] = uint16_t(depth);
  config.rows[6] = config.rows[7] = uint8_t(depth / 4);
  amx_configure(config);
}

void end_tiles() {
  if (keepers == 0) release();
}

template <int C>
static void begin(const float* c, int64_t ldc, bool accumulate) {
  if (accumulate)
    amx_load<C>(c, ldc * 4);
  else
    amx_zero<C>();
}

// 17 to 32 rows, two panels (or one): each tile of A and of B serves two products. `ahead`, if given, is prefetched.
static void tall(const char* a, int64_t lda, const uint32_t* b, int64_t panel, int64_t width, int64_t steps, float* c,
                 int64_t ldc, bool accumulate, const uint32_t* ahead) {
  float* lower = c + TILE * ldc;
  begin<0>(c, ldc, accumulate);
  begin<2>(lower, ldc, accumulate);
  if (width > 1) {
    begin<1>(c + LANES, ldc, accumulate);
    begin<3>(lower + LANES, ldc, accumulate);
  }
  for (int64_t k = 0; k < steps; k += TILE) {
    if (ahead)
      for (int64_t n = 0; n < width; n++)
        for (int line = 0; line < TILE; line++) __builtin_prefetch(ahead + n * panel + (k + line) * LANES);
    amx_load<4>(a + 4 * k, lda);
    amx_load<6>(b + k * LANES, TILE_BYTES);
    amx_load<5>(a + TILE * lda + 4 * k, lda);
    if (width > 1) amx_load<7>(b + panel + k * LANES, TILE_BYTES);
    amx_dot<0, 4, 6>();
    if (width > 1) amx_dot<1, 4, 7>();
    amx_dot<2, 5, 6>();
    if (width > 1) amx_dot<3, 5, 7>();
  }
  amx_store<0>(c, ldc * 4);
  amx_store<2>(lower, ldc * 4);
  if (width > 1) {
    amx_store<1>(c + LANES, ldc * 4);
    amx_store<3>(lower + LANES, ldc * 4);
  }
}

// Up to 16 rows, up to four panels.
static void flat(const char* a, int64_t lda, const uint32_t* b, int64_t panel, int64_t width, int64_t steps, float* c,
                 int64_t ldc, bool accumulate, const uint32_t* ahead) {
  begin<0>(c, ldc, accumulate);
  if (width > 1) begin<1>(c + LANES, ldc, accumulate);
  if (width > 2) begin<2>(c + 2 * LANES, ldc, accumulate);
  if (width > 3) begin<3>(c + 3 * LANES, ldc, accumulate);
  for (int64_t k = 0; k < steps; k += TILE) {
    const uint32_t* tile = b + k * LANES;
    if (ahead)
      for (int64_t n = 0; n < width; n++)
        for (int line = 0; line < TILE; line++) __builtin_prefetch(ahead + n * panel + (k + line) * LANES);
    amx_load<4>(a + 4 * k, lda);
    amx_load<6>(tile, TILE_BYTES);
    amx_dot<0, 4, 6>();
    if (width > 1) {
      amx_load<7>(tile + panel, TILE_BYTES);
      amx_dot<1, 4, 7>();
    }
    if (width > 2) {
      amx_load<6>(tile + 2 * panel, TILE_BYTES);
      amx_dot<2, 4, 6>();
    }
    if (width > 3) {
      amx_load<7>(tile + 3 * panel, TILE_BYTES);
      amx_dot<3, 4, 7>();
    }
  }
  amx_store<0>(c, ldc * 4);
  if (width > 1) amx_store<1>(c + LANES, ldc * 4);
  if (width > 2) amx_store<2>(c + 2 * LANES, ldc * 4);
  if (width > 3) amx_store<3>(c + 3 * LANES, ldc * 4);
}

static void gemm_tiles(const char* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t np,
                       int64_t steps, float* c, int64_t ldc, bool accumulate, const uint32_t* ahead = nullptr) {
  // One pass over B prefetches itself: the lines of a step occupy all fill buffers, a longer distance only delays them.
  if (ahead && m <= 2 * TILE) ahead = b + TILE * LANES;
  const int64_t full = m / (2 * TILE) * (2 * TILE), rest = m - full;
  auto rows = [&](int64_t row, int64_t upper, int64_t lower) {
    const int64_t wide = lower > 0 ? 2 : 4;
    for (int64_t n = 0; n < np; n += wide) {
      auto run = lower > 0 ? tall : flat;
      run(a + row * lda, lda, b + n * panel, panel, std::min(wide, np - n), steps, c + row * ldc + n * LANES, ldc,
          accumulate, ahead && row == 0 ? ahead + n * panel : nullptr);
    }
  };
  if (full > 0) configure_tiles(TILE, TILE, TILE_BYTES);
  for (int64_t row = 0; row < full; row += 2 * TILE) rows(row, TILE, TILE);
  if (rest > 0) {
    const int64_t upper = std::min<int64_t>(TILE, rest);
    configure_tiles(upper, rest - upper, TILE_BYTES);
    rows(full, upper, rest - upper);
  }
  end_tiles();
}

KeepTiles::KeepTiles() { keepers++; }
KeepTiles::~KeepTiles() {
  keepers--;
  end_tiles();
}
#else
KeepTiles::KeepTiles() {}
KeepTiles::~KeepTiles() {}
#endif

template <>
void gemm<bf16>(const void* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t np, int64_t steps,
                float* c, int64_t ldc, bool accumulate, const uint32_t* ahead) {
#if defined(MOE_AMX)
  if (use_amx) return gemm_tiles(static_cast<const char*>(a), lda, m, b, panel, np, steps, c, ldc, accumulate, ahead);
#endif
  tiles<bf16, false>(static_cast<const char*>(a), lda, m, b, panel, np, steps, c, ldc, accumulate, ahead);
}

template <>
int64_t gemm_rounded<bf16>(const void* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t steps,
                           bf16* c, int64_t ldc, const uint32_t* ahead) {
#if defined(MOE_AMX)
  if (use_amx) return 0;
#endif
  return rounded_tiles<bf16>(static_cast<const char*>(a), lda, m, b, panel, steps, c, ldc, ahead);
}

template <>
void gemm_by_steps<bf16>(const uint32_t* a, int64_t lda, int64_t m, const uint32_t* b, int64_t panel, int64_t np,
                         int64_t steps, float* c, int64_t ldc, bool accumulate) {
#if defined(MOE_AMX)
  if (use_amx) {  // tiles need rows: transpose A in blocks of 16 x 16 units
    int64_t rows = ceil_div(m, LANES) * LANES;
    uint32_t* turned = scratch<uint32_t>(TILES, rows * steps);
    alignas(64) uint32_t block[LANES][LANES];
    for (int64_t row = 0; row < m; row += LANES)
      for (int64_t k = 0; k < steps; k += LANES) {
        const uint32_t* from[LANES];
        int64_t valid = std::min<int64_t>(LANES, m - row);
        for (int64_t i = 0; i < LANES; i++) {
          from[i] = a + (k + i) * lda + row;
          if (valid < LANES) {
            std::memcpy(block[i], from[i], size_t(valid) * 4);
            from[i] = block[i];
          }
        }
        transpose(turned + row * steps + k, steps, from);
      }
    return gemm_tiles(reinterpret_cast<const char*>(turned), steps * 4, m, b, panel, np, steps, c, ldc, accumulate);
  }
#endif
  tiles<bf16, true>(reinterpret_cast<const char*>(a), 4 * lda, m, b, panel, np, steps, c, ldc, accumulate);
}

int64_t k_multiple(bf16) {
#if defined(MOE_AMX)
  if (use_amx) return 32;
#endif
  return 2;
}

int64_t panels_by_steps(bf16) {
#if defined(MOE_AMX)
  if (use_amx) return INT64_MAX;
#endif
  return 4;
}

int64_t row_multiple(bf16) {
#if defined(MOE_AMX)
  if (use_amx) return 2 * TILE;
#endif
  return 16;
}

int64_t stripe_rows(bf16) {
#if defined(MOE_AMX)
  if (use_amx) return 2 * TILE;
#endif
  return INT64_MAX;
}

int64_t key_block(bf16) {
#if defined(MOE_AMX)
  if (use_amx) return 128;
#endif
  return 64;
}

int64_t column_block(bf16) {
#if defined(MOE_AMX)
  if (use_amx) return 2 * LANES;
#endif
  return column_block(float());
}

int64_t row_unit(bf16) {
#if defined(MOE_AMX)
  if (use_amx) return 4;
#endif
  return 1;
}

template void pack_rows<bf16>(const bf16* const*, int64_t, int64_t, int64_t, uint32_t*);
template void pack_values<bf16>(const bf16* const*, int64_t, int64_t, int64_t, uint32_t*);

}  // namespace moe

using namespace moe;

// Selects how bf16 products run in this process. Returns 3 for AMX tiles, 2 for AVX512-BF16, 1 for AVX-512, 0 else.
API int moe_start(int allow_amx) {
#if defined(MOE_AMX)
  use_amx = allow_amx && amx_permission();
  if (use_amx) return 3;
#endif
  (void)allow_amx;
#if defined(MOE_AVX512_BF16)
  return 2;
#elif defined(MOE_AVX512)
  return 1;
#else
  return 0;
#endif
}
