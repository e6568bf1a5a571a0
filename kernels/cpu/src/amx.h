// Tile instructions: native, or with MOE_AMX_EMULATE the same functions in plain C++, so that the tiling and packing
// logic of gemm_bf16.cpp and coded_tiles.h can be tested on machines without AMX.
#pragma once

#include "common.h"

#if defined(MOE_AMX_EMULATE) || \
    (defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AMX_TILE__) && defined(__linux__))
#define MOE_AMX 1

namespace moe {

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t column_bytes[16] = {};
  uint8_t rows[16] = {};
};

// This thread's tiles, owned by gemm_bf16.cpp.
bool tiles_allowed();
// Tiles 0-3 are C, 4-5 A, 6-7 B. `upper`: rows of 4; `lower`: of 5, or 0 if only 4 is used. `depth`: bytes of A's rows.
void configure_tiles(int64_t upper, int64_t lower, int64_t depth);
void end_tiles();  // unless kept, see KeepTiles

}  // namespace moe

#if defined(MOE_AMX_EMULATE)
namespace moe {

inline thread_local TileConfig tile_shape;
inline thread_local uint32_t tile_data[8][16][16];

inline bool amx_permission() { return true; }
inline void amx_configure(const TileConfig& config) { tile_shape = config; }
inline void amx_release() { tile_shape.palette = 0; }
template <int T>
void amx_zero() {
  std::memset(tile_data[T], 0, sizeof tile_data[T]);
}
template <int T>
void amx_load(const void* from, int64_t stride) {
  amx_zero<T>();
  for (int r = 0; r < tile_shape.rows[T]; r++)
    std::memcpy(tile_data[T][r], static_cast<const char*>(from) + r * stride, tile_shape.column_bytes[T]);
}
template <int T>
void amx_store(void* to, int64_t stride) {
  for (int r = 0; r < tile_shape.rows[T]; r++)
    std::memcpy(static_cast<char*>(to) + r * stride, tile_data[T][r], tile_shape.column_bytes[T]);
}
template <int C, int A, int B>
void amx_dot() {
  auto value = [](uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
  };
  for (int m = 0; m < tile_shape.rows[C]; m++)
    for (int n = 0; n < tile_shape.column_bytes[C] / 4; n++) {
      float even = 0, odd = 0;
      for (int k = 0; k < tile_shape.column_bytes[A] / 4; k++) {
        uint32_t a = tile_data[A][m][k], b = tile_data[B][k][n];
        even += value(a << 16) * value(b << 16);
        odd += value(a & 0xffff0000u) * value(b & 0xffff0000u);
      }
      float sum = value(tile_data[C][m][n]) + (even + odd);
      std::memcpy(&tile_data[C][m][n], &sum, 4);
    }
}
template <int C, int A, int B>
void amx_dot_bytes() {
  for (int m = 0; m < tile_shape.rows[C]; m++)
    for (int n = 0; n < tile_shape.column_bytes[C] / 4; n++)
      for (int k = 0; k < tile_shape.column_bytes[A] / 4; k++)
        for (int byte = 0; byte < 32; byte += 8) {
          const int8_t a = int8_t(tile_data[A][m][k] >> byte);
          const int8_t b = int8_t(tile_data[B][k][n] >> byte);
          tile_data[C][m][n] += uint32_t(int32_t(a) * int32_t(b));
        }
}

}  // namespace moe
#else
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
namespace moe {

// Linux enables tiles per process on request: ARCH_REQ_XCOMP_PERM (0x1023) for XTILEDATA (18).
inline bool amx_permission() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }
// GCC's intrinsic declares only eight bytes as read.
inline void amx_configure(const TileConfig& config) { asm volatile("ldtilecfg %0" ::"m"(config)); }
inline void amx_release() { _tile_release(); }
// The compiler's intrinsics take only literal tile numbers, not template arguments.
template <int T>
inline void amx_zero() {
  asm volatile("tilezero %%tmm%c0" ::"i"(T));
}
template <int T>
inline void amx_load(const void* from, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(T) : "memory");
}
template <int T>
inline void amx_store(void* to, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(T) : "memory");
}
template <int C, int A, int B>
inline void amx_dot() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}
// Signed bytes.
template <int C, int A, int B>
inline void amx_dot_bytes() {
  asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
}

}  // namespace moe
#endif
#endif
