// Attention over blocks of the residual (kernels/ops/residual_blocks.py), a token at a time.
//
// Legend: T tokens, D hidden, N rows of a token.
#include "api.h"
#include "vec.h"

namespace moe {

struct ResidualBlocks {
  int64_t tokens, width, written, starts;  // width: D
  const float *norm, *proj, *out_norm;     // [D]; out_norm null: the sum without a norm
  float eps;
};

namespace {

constexpr int64_t MOST = 64;  // rows of a token

template <class T>
void add(const T* x, T* row, int64_t width, bool starts) {
  for (int64_t d = 0; d < width; d += LANES) {
    const F16 value = load_some(x + d, width - d);
    store_some(row + d, starts ? value : value + load_some(row + d, width - d), width - d);
  }
}

// The weights of the rows: a softmax of their scores.
template <class T>
void weigh(const ResidualBlocks& b, const T* rows, float* weights) {
  const int64_t count = b.written + 1, width = b.width;
  float top = -INFINITY, total = 0;
  for (int64_t n = 0; n < count; n++) {
    F16 square = zero(), product = zero();
    for (int64_t d = 0; d < width; d += LANES) {
      const F16 v = load_some(rows + n * width + d, width - d);
      square = fma(v, v, square);
      product = fma(v, load_some(b.norm + d, width - d) * load_some(b.proj + d, width - d), product);
    }
    weights[n] = sum(product) / std::sqrt(sum(square) / float(width) + b.eps);
    top = std::max(top, weights[n]);
  }
  for (int64_t n = 0; n < count; n++) total += weights[n] = std::exp(weights[n] - top);
  for (int64_t n = 0; n < count; n++) weights[n] /= total;
}

template <class T>
void mix(const ResidualBlocks& b, const T* x, int64_t ldx, T* residual, int64_t ldr, T* out) {
  parallel(b.tokens, [&](int64_t t) {
    const int64_t width = b.width;
    T *rows = residual + t * ldr, *to = out + t * width;
    if (x) add(x + t * ldx, rows + b.written * width, width, b.starts != 0);
    float weights[MOST];
    weigh(b, rows, weights);
    F16 square = zero();
    for (int64_t d = 0; d < width; d += LANES) {
      F16 total = zero();
      for (int64_t n = 0; n <= b.written; n++)
        total = fma(set1(weights[n]), load_some(rows + n * width + d, width - d), total);
      store_some(to + d, total, width - d);
      const F16 rounded = load_some(to + d, width - d);
      square = fma(rounded, rounded, square);
    }
    if (!b.out_norm) return;
    const F16 factor = set1(1.f / std::sqrt(sum(square) / float(width) + b.eps));
    for (int64_t d = 0; d < width; d += LANES) {
      store_some(to + d, load_some(to + d, width - d) * factor, width - d);  // rounded before the norm's weight
      store_some(to + d, load_some(to + d, width - d) * load_some(b.out_norm + d, width - d), width - d);
    }
  });
}

}  // namespace
}  // namespace moe

API void moe_mix_blocks(int is_bf16, const moe::ResidualBlocks* blocks, const void* x, int64_t ldx, void* residual,
                        int64_t ldr, void* out) {
  using namespace moe;
  if (is_bf16)
    mix(*blocks, static_cast<const bf16*>(x), ldx, static_cast<bf16*>(residual), ldr, static_cast<bf16*>(out));
  else
    mix(*blocks, static_cast<const float*>(x), ldx, static_cast<float*>(residual), ldr, static_cast<float*>(out));
}
