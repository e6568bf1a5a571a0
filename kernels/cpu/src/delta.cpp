// Gated delta net without its projections: convolution, gated delta rule, gated norm (kernels/delta/protocol.py).
//
// Legend: R runs, Hk key heads, r value heads of a key head, Dk, Dv head widths, C = 2 Dk + r Dv, K taps.
// A task is a key head of a run; its tokens follow each other, one step each, also in prompts: a result does not depend
// on other runs, nor on how a prompt is cut. A token's state is written to its storage, and read from there.
#include "api.h"
#include "vec.h"

namespace moe {

struct Delta {
  int64_t runs, key_heads, shared, key, value, taps;
  const int32_t* starts;   // [R + 1]
  const int64_t* reads;    // [R]
  const int64_t* stores;   // [T], -1: the state after the token is not stored
  const float* conv;       // [Hk, K, C]
  const float* a_log;      // [Hk r]
  const float* dt_bias;    // [Hk r]
  const float* norm;       // [Dv]
  float* memory;           // [rows, Hk r, Dk, Dv]
  float eps;
};

namespace {

constexpr int64_t BLOCK = 4;  // vectors of a value head's columns that are updated together
constexpr float LENGTH_EPS = 1e-6f;

INLINE float softplus(float x) { return x > 20.f ? x : std::log1p(std::exp(x)); }

// x /= its length, times scale.
INLINE void to_length(float* x, int64_t n, float scale) {
  F16 squares = zero();
  for (int64_t i = 0; i < n; i += LANES) {
    const F16 v = load_some(x + i, n - i);
    squares = fma(v, v, squares);
  }
  const F16 factor = set1(scale / std::sqrt(sum(squares) + LENGTH_EPS));
  for (int64_t i = 0; i < n; i += LANES) store_some(x + i, load_some(x + i, n - i) * factor, n - i);
}

// One token of N vectors of columns of a value head: `from` and `to` [Dk, Dv] at these columns may be the same. The last
// vector has `last` columns.
template <int N>
INLINE void update(const float* from, float* to, int64_t key, int64_t row, int64_t last, const float* q,
                   const float* k, const float* v, float keep, float beta, float* out) {
  const auto at = [&](const float* p, int i) { return i + 1 == N ? load_some(p + i * LANES, last) : load(p + i * LANES); };
  const auto put = [&](float* p, int i, const F16& x) {
    if (i + 1 == N) store_some(p + i * LANES, x, last);
    else store(p + i * LANES, x);
  };
  F16 known[N], change[N], sums[N];
  for (int i = 0; i < N; i++) known[i] = sums[i] = zero();
  for (int64_t d = 0; d < key; d++) {
    const F16 kd = set1(k[d]);
    for (int i = 0; i < N; i++) known[i] = fma(kd, at(from + d * row, i), known[i]);
  }
  const F16 kept = set1(keep), rate = set1(beta);
  for (int i = 0; i < N; i++) change[i] = (at(v, i) - kept * known[i]) * rate;
  for (int64_t d = 0; d < key; d++) {
    const F16 kd = set1(k[d]), qd = set1(q[d]);
    for (int i = 0; i < N; i++) {
      const F16 s = fma(kd, change[i], kept * at(from + d * row, i));
      put(to + d * row, i, s);
      sums[i] = fma(qd, s, sums[i]);
    }
  }
  for (int i = 0; i < N; i++) put(out, i, sums[i]);
}

INLINE void update_head(const float* from, float* to, int64_t key, int64_t value, const float* q, const float* k,
                        const float* v, float keep, float beta, float* out) {
  int64_t c = 0;
  for (; c + BLOCK * LANES <= value; c += BLOCK * LANES)
    update<BLOCK>(from + c, to + c, key, value, LANES, q, k, v + c, keep, beta, out + c);
  for (; c < value; c += LANES)
    update<1>(from + c, to + c, key, value, std::min<int64_t>(LANES, value - c), q, k, v + c, keep, beta, out + c);
}

// out = norm * (x / rms(x), rounded to T) * silu(z)
template <class T>
INLINE void gated_norm(const float* x, const T* z, const Delta& d, T* out) {
  F16 squares = zero();
  const int64_t n = d.value;
  for (int64_t i = 0; i < n; i += LANES) {
    const F16 v = round_to(load_some(x + i, n - i), T{});
    squares = fma(v, v, squares);
  }
  const F16 scale = set1(1.f / std::sqrt(sum(squares) / float(n) + d.eps));
  for (int64_t i = 0; i < n; i += LANES) {
    const F16 v = round_to(round_to(load_some(x + i, n - i), T{}) * scale, T{});
    store_some(out + i, load_some(d.norm + i, n - i) * v * silu(load_some(z + i, n - i)), n - i);
  }
}

template <class T>
void run_head(const Delta& d, int64_t run, int64_t head, const T* qkvz, int64_t ld, const T* ba, int64_t ld_ba,
              T* tails, T* out) {
  const int64_t width = 2 * d.key + d.shared * d.value, heads = d.key_heads * d.shared, taps = d.taps;
  const int64_t tail_size = (taps - 1) * width, memory_size = d.key * d.value;
  const int64_t begin = d.starts[run], end = d.starts[run + 1];
  T* lines = scratch<T>(ROWS, taps * width);            // the last K inputs, a ring
  float* taken = scratch<float>(VALUES, width + d.value);
  float* mixed = taken + width;
  float* work = scratch<float>(TOTAL, d.shared * memory_size);  // the state of tokens that do not store it
  const auto tail_at = [&](int64_t row) { return tails + (row * d.key_heads + head) * tail_size; };
  const auto memory_at = [&](int64_t row) { return d.memory + (row * heads + head * d.shared) * memory_size; };
  const float* weights = d.conv + head * taps * width;
  std::memcpy(lines, tail_at(d.reads[run]), size_t(tail_size) * sizeof(T));
  const float* from = memory_at(d.reads[run]);
  for (int64_t t = begin; t < end; t++) {
    const int64_t newest = (t - begin + taps - 1) % taps, oldest = (newest + 1) % taps;
    const T* input = qkvz + t * ld + head * (width + d.shared * d.value);
    std::memcpy(lines + newest * width, input, size_t(width) * sizeof(T));
    for (int64_t c = 0; c < width; c += LANES) {
      const int64_t some = width - c;
      F16 total = zero();
      for (int64_t j = 0; j < taps; j++)
        total = fma(load_some(lines + (oldest + j) % taps * width + c, some), load_some(weights + j * width + c, some), total);
      store_some(taken + c, round_to(silu(total), T{}), some);
    }
    to_length(taken, d.key, 1.f / std::sqrt(float(d.key)));
    to_length(taken + d.key, d.key, 1.f);
    const int64_t store_row = d.stores[t];
    float* to = store_row < 0 ? work : memory_at(store_row);
    for (int64_t i = 0; i < d.shared; i++) {
      const int64_t h = head * d.shared + i;
      const T* gates = ba + t * ld_ba + 2 * head * d.shared;
      const float b = to_float(gates[i]), a = to_float(gates[d.shared + i]);
      const float keep = std::exp(-std::exp(d.a_log[h]) * softplus(a + d.dt_bias[h]));
      T beta;
      assign(beta, 1.f / (1.f + std::exp(-b)));
      update_head(from + i * memory_size, to + i * memory_size, d.key, d.value, taken, taken + d.key,
                  taken + 2 * d.key + i * d.value, keep, to_float(beta), mixed);
      gated_norm(mixed, input + width + i * d.value, d, out + (t * heads + h) * d.value);
    }
    from = to;
    if (store_row >= 0)
      for (int64_t j = 1; j < taps; j++)
        std::memcpy(tail_at(store_row) + (j - 1) * width, lines + (oldest + j) % taps * width, size_t(width) * sizeof(T));
  }
}

}  // namespace
}  // namespace moe

API void moe_gated_delta(int is_bf16, const moe::Delta* delta, const void* qkvz, int64_t ld, const void* ba,
                         int64_t ld_ba, void* tails, void* out) {
  using namespace moe;
  const Delta& d = *delta;
  parallel(d.runs * d.key_heads, [&](int64_t task) {
    const int64_t run = task / d.key_heads, head = task % d.key_heads;
    if (is_bf16)
      run_head(d, run, head, static_cast<const bf16*>(qkvz), ld, static_cast<const bf16*>(ba), ld_ba,
               static_cast<bf16*>(tails), static_cast<bf16*>(out));
    else
      run_head(d, run, head, static_cast<const float*>(qkvz), ld, static_cast<const float*>(ba), ld_ba,
               static_cast<float*>(tails), static_cast<float*>(out));
  });
}
