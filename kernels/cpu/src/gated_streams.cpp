// Residual streams with gates of low rank (kernels/ops/gated_streams.py).
//
// Legend: T tokens, D hidden, n streams. A row of the residual has n D values, then n weights of the next result.
#include "api.h"
#include "vec.h"

namespace moe {

struct GatedStreams {
  int64_t tokens, width, count;  // width: D
  float eps;
};

namespace {

constexpr int64_t CHANNELS = 1024;  // of a task that reads

template <class T>
void norm_gated(const GatedStreams& s, const T* x, int64_t ldx, T* residual, int64_t ldr, const float* weight, T* out) {
  parallel(s.tokens * s.count, [&](int64_t task) {
    const int64_t t = task / s.count, j = task % s.count, width = s.width;
    T *row = residual + t * ldr, *stream = row + j * width, *to = out + task * width;
    const F16 gate = set1(x ? to_float(row[s.count * width + j]) : 0.f);
    F16 square = zero();
    for (int64_t d = 0; d < width; d += LANES) {
      F16 v = load_some(stream + d, width - d);
      if (x) {
        v = round_to(v + round_to(gate * load_some(x + t * ldx + d, width - d), T{}), T{});
        store_some(stream + d, v, width - d);
      }
      square = fma(v, v, square);
    }
    const F16 factor = set1(1.f / std::sqrt(sum(square) / float(width) + s.eps));
    for (int64_t d = 0; d < width; d += LANES)
      store_some(to + d, load_some(stream + d, width - d) * factor * load_some(weight + j * width + d, width - d),
                 width - d);
  });
}

// `weights`: of the next result in the first row, or null.
template <class T>
void rank_gates(const GatedStreams& s, const T* projected, int64_t ldp, int64_t rank, T* weights, int64_t ldr, T* out) {
  const F16 part = set1(1.f / float(s.count));
  parallel(s.tokens, [&](int64_t t) {
    const T* row = projected + t * ldp;
    for (int64_t d = 0; d < rank; d += LANES)
      store_some(out + t * rank + d, silu(load_some(row + d, rank - d) * part), rank - d);
    if (!weights) return;
    for (int64_t d = 0; d < s.count; d += LANES)
      store_some(weights + t * ldr + d, set1(2.f) * sigmoid(load_some(row + rank + d, s.count - d) * part),
                 s.count - d);
  });
}

template <class T>
void read_gated(const GatedStreams& s, const T* gates, const T* normed, T* out) {
  const int64_t chunks = ceil_div(s.width, CHANNELS);
  const F16 part = set1(1.f / float(s.count));
  parallel(s.tokens * chunks, [&](int64_t task) {
    const int64_t t = task / chunks, first = task % chunks * CHANNELS, end = std::min(s.width, first + CHANNELS);
    for (int64_t d = first; d < end; d += LANES) {
      F16 total = zero();
      for (int64_t j = 0; j < s.count; j++) {
        const int64_t at = (t * s.count + j) * s.width + d;
        total = fma(sigmoid(load_some(gates + at, end - d)), load_some(normed + at, end - d), total);
      }
      store_some(out + t * s.width + d, total * part, end - d);
    }
  });
}

}  // namespace
}  // namespace moe

API void moe_norm_gated(int is_bf16, const moe::GatedStreams* s, const void* x, int64_t ldx, void* residual,
                        int64_t ldr, const float* weight, void* out) {
  using namespace moe;
  if (is_bf16)
    norm_gated(*s, static_cast<const bf16*>(x), ldx, static_cast<bf16*>(residual), ldr, weight,
               static_cast<bf16*>(out));
  else
    norm_gated(*s, static_cast<const float*>(x), ldx, static_cast<float*>(residual), ldr, weight,
               static_cast<float*>(out));
}

API void moe_rank_gates(int is_bf16, const moe::GatedStreams* s, const void* projected, int64_t ldp, int64_t rank,
                        void* weights, int64_t ldr, void* out) {
  using namespace moe;
  if (is_bf16)
    rank_gates(*s, static_cast<const bf16*>(projected), ldp, rank, static_cast<bf16*>(weights), ldr,
               static_cast<bf16*>(out));
  else
    rank_gates(*s, static_cast<const float*>(projected), ldp, rank, static_cast<float*>(weights), ldr,
               static_cast<float*>(out));
}

API void moe_read_gated(int is_bf16, const moe::GatedStreams* s, const void* gates, const void* normed, void* out) {
  using namespace moe;
  if (is_bf16)
    read_gated(*s, static_cast<const bf16*>(gates), static_cast<const bf16*>(normed), static_cast<bf16*>(out));
  else
    read_gated(*s, static_cast<const float*>(gates), static_cast<const float*>(normed), static_cast<float*>(out));
}
