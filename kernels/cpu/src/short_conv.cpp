// Convolutions over the last tokens between two gates (kernels/ops/short_conv.py).
//
// Legend: R runs, T tokens, W channels, K taps.
// A task is a block of channels of a run, whose tokens follow each other: a result does not depend on other runs, nor on
// how a prompt is cut.
#include "api.h"
#include "vec.h"

namespace moe {

struct ShortConv {
  int64_t runs, width, taps, stride;  // stride: between tokens of the projection
  const int32_t* starts;              // [R + 1]
  const int64_t* reads;               // [R]
  const int64_t* stores;              // [T], -1: the state after the token is not stored
  const float* weights;               // [K, W]
};

namespace {

constexpr int64_t BLOCK = 256;  // channels of a task

// `count` channels from `first` on of a run; kept [rows, K - 1, W], out [T, W].
template <class T>
void convolve(const ShortConv& s, int64_t run, int64_t first, int64_t count, const T* projected, T* kept, T* out) {
  const int64_t taps = s.taps, begin = s.starts[run], end = s.starts[run + 1];
  T* lines = scratch<T>(ROWS, taps * count);  // the last K products, a ring
  const auto kept_at = [&](int64_t row, int64_t line) { return kept + (row * (taps - 1) + line) * s.width + first; };
  for (int64_t j = 0; j + 1 < taps; j++)
    std::memcpy(lines + j * count, kept_at(s.reads[run], j), size_t(count) * sizeof(T));
  for (int64_t t = begin; t < end; t++) {
    const int64_t newest = (t - begin + taps - 1) % taps, oldest = (newest + 1) % taps;
    const T *gate = projected + t * s.stride + first, *second = gate + s.width, *value = second + s.width;
    for (int64_t c = 0; c < count; c += LANES) {
      const int64_t some = count - c;
      store_some(lines + newest * count + c, load_some(gate + c, some) * load_some(value + c, some), some);
      F16 total = zero();
      for (int64_t j = 0; j < taps; j++)
        total = fma(load_some(lines + (oldest + j) % taps * count + c, some),
                    load_some(s.weights + j * s.width + first + c, some), total);
      store_some(out + t * s.width + first + c, load_some(second + c, some) * round_to(total, T{}), some);
    }
    if (s.stores[t] >= 0)
      for (int64_t j = 1; j < taps; j++)
        std::memcpy(kept_at(s.stores[t], j - 1), lines + (oldest + j) % taps * count, size_t(count) * sizeof(T));
  }
}

}  // namespace
}  // namespace moe

API void moe_short_conv(int is_bf16, const moe::ShortConv* conv, const void* projected, void* kept, void* out) {
  using namespace moe;
  const ShortConv& s = *conv;
  const int64_t blocks = (s.width + BLOCK - 1) / BLOCK;
  const auto run = [&](auto kind) {
    using T = decltype(kind);
    parallel(s.runs * blocks, [&](int64_t task) {
      const int64_t first = task % blocks * BLOCK;
      convolve(s, task / blocks, first, std::min(BLOCK, s.width - first), static_cast<const T*>(projected),
               static_cast<T*>(kept), static_cast<T*>(out));
    });
  };
  if (is_bf16)
    run(bf16{});
  else
    run(float{});
}
