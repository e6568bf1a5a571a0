// Gated delta net without its projections: convolution, gated delta rule or an additive state, gated norm
// (kernels/delta/protocol.py).
//
// Legend: R runs, Hk key heads, r value heads of a key head, Dk, Dv head widths, W decays of a value head (1 or Dk),
// C = 2 Dk + r Dv, K taps.
// A task is a key head of a run; its tokens follow each other, one step each, also in prompts: a result does not depend
// on other runs, nor on how a prompt is cut. A token's state is written to its storage, and read from there.
#include "api.h"
#include "vec.h"

namespace moe {

struct Delta {
  int64_t runs, key_heads, shared, key, value, taps, decays;  // taps 0: neither convolution nor norm (additive states)
  const int32_t* starts;   // [R + 1]
  const int64_t* reads;    // [R]
  const int64_t* stores;   // [T], -1: the state after the token is not stored
  const float* conv;       // [Hk, K, C]
  const float* a_log;      // [Hk r]
  const float* dt_bias;    // [Hk r, W]
  const float* norm;       // [Dv], of an additive state [Hk r, Dv]
  float* memory;           // [rows, Hk r, Dk, Dv]
  float eps;
  float bound;             // of the log decay; 0: softplus
  int32_t sigmoid;         // the output gate
  int64_t strides[8];      // of tokens and key heads, of each input
  int32_t additive;        // no delta rule; b is not read
  float shortest, longest; // bounds of an additive state's step widths
  const float* conv_bias;  // [Hk, C] or null
  const float* skip;       // [Hk r] or null
};

template <class T>
struct DeltaInputs {
  const T *mixed, *z, *b, *a;  // [T, Hk, C], [T, Hk, r Dv], [T, Hk, r], [T, Hk, r W]
};

namespace {

constexpr int64_t BLOCK = 4;  // vectors of a value head's columns that are updated together
constexpr float LENGTH_EPS = 1e-6f;

// keep[i] = exp(log decay) of n decays of a head whose exp(a_log) is `rate`.
template <class T>
INLINE void decays_of(const T* a, const float* bias, float rate, float bound, int64_t n, float* keep) {
  for (int64_t i = 0; i < n; i += LANES) {
    const F16 x = load_some(a + i, n - i) + load_some(bias + i, n - i);
    const F16 decay = bound ? set1(bound) * sigmoid(set1(rate) * x) : set1(-rate) * softplus(x);
    store_some(keep + i, exp(decay), n - i);
  }
}

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
// vector has `last` columns. keep: a number, or with BY_CHANNEL one for each row. ADDITIVE: without the delta rule.
template <int N, bool BY_CHANNEL, bool ADDITIVE>
INLINE void update(const float* from, float* to, int64_t key, int64_t row, int64_t last, const float* q,
                   const float* k, const float* v, const float* keep, float beta, float* out) {
  const auto at = [&](const float* p, int i) { return i + 1 == N ? load_some(p + i * LANES, last) : load(p + i * LANES); };
  const auto put = [&](float* p, int i, const F16& x) {
    if (i + 1 == N) store_some(p + i * LANES, x, last);
    else store(p + i * LANES, x);
  };
  F16 known[N], change[N], sums[N];
  for (int i = 0; i < N; i++) known[i] = sums[i] = zero();
  for (int64_t d = 0; !ADDITIVE && d < key; d++) {
    const F16 kd = set1(BY_CHANNEL ? k[d] * keep[d] : k[d]);
    for (int i = 0; i < N; i++) known[i] = fma(kd, at(from + d * row, i), known[i]);
  }
  const F16 common = set1(BY_CHANNEL ? 1.f : keep[0]), rate = set1(beta);
  for (int i = 0; i < N; i++) change[i] = (at(v, i) - common * known[i]) * rate;
  for (int64_t d = 0; d < key; d++) {
    const F16 kd = set1(k[d]), qd = set1(q[d]), kept = BY_CHANNEL ? set1(keep[d]) : common;
    for (int i = 0; i < N; i++) {
      const F16 s = fma(kd, change[i], kept * at(from + d * row, i));
      put(to + d * row, i, s);
      sums[i] = fma(qd, s, sums[i]);
    }
  }
  for (int i = 0; i < N; i++) put(out, i, sums[i]);
}

template <bool BY_CHANNEL, bool ADDITIVE>
INLINE void update_head(const float* from, float* to, int64_t key, int64_t value, const float* q, const float* k,
                        const float* v, const float* keep, float beta, float* out) {
  int64_t c = 0;
  for (; c + BLOCK * LANES <= value; c += BLOCK * LANES)
    update<BLOCK, BY_CHANNEL, ADDITIVE>(from + c, to + c, key, value, LANES, q, k, v + c, keep, beta, out + c);
  for (; c < value; c += LANES)
    update<1, BY_CHANNEL, ADDITIVE>(from + c, to + c, key, value, std::min<int64_t>(LANES, value - c), q, k, v + c,
                                    keep, beta, out + c);
}

// out = norm * (x / rms(x), rounded to T) * silu(z), or without that rounding and with a sigmoid
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
    const F16 v = round_to(load_some(x + i, n - i), T{}) * scale, gate = load_some(z + i, n - i);
    const F16 gated = d.sigmoid ? v * sigmoid(gate) : round_to(v, T{}) * silu(gate);
    store_some(out + i, load_some(d.norm + i, n - i) * gated, n - i);
  }
}

// x *= silu(z), both of a key head's values, n channels; out = norm * x / rms(x)
template <class T>
INLINE void group_norm(float* x, const T* z, const float* norm, float eps, int64_t n, T* out) {
  F16 squares = zero();
  for (int64_t i = 0; i < n; i += LANES) {
    const F16 v = round_to(load_some(x + i, n - i), T{}) * silu(load_some(z + i, n - i));
    store_some(x + i, v, n - i);
    squares = fma(v, v, squares);
  }
  const F16 scale = set1(1.f / std::sqrt(sum(squares) / float(n) + eps));
  for (int64_t i = 0; i < n; i += LANES)
    store_some(out + i, load_some(x + i, n - i) * scale * load_some(norm + i, n - i), n - i);
}

// One token of the value heads of a key head with an additive state: [r, Dk, Dv] `from` -> `to`; taken is q, k, v.
INLINE void add_token(const Delta& d, int64_t head, const float* steps, const float* from, float* to, const float* taken,
                      float* out) {
  const int64_t size = d.key * d.value;
  for (int64_t i = 0; i < d.shared; i++) {
    const int64_t h = head * d.shared + i;
    const float* v = taken + 2 * d.key + i * d.value;
    const float keep = std::exp(-std::exp(d.a_log[h]) * steps[i]);
    update_head<false, true>(from + i * size, to + i * size, d.key, d.value, taken, taken + d.key, v, &keep, steps[i],
                             out + i * d.value);
    if (d.skip)
      for (int64_t c = 0; c < d.value; c += LANES) {
        float* at = out + i * d.value + c;
        store_some(at, fma(set1(d.skip[h]), load_some(v + c, d.value - c), load_some(at, d.value - c)), d.value - c);
      }
  }
}

template <class T>
void run_head(const Delta& d, int64_t run, int64_t head, const DeltaInputs<T>& in, T* tails, T* out) {
  const int64_t width = 2 * d.key + d.shared * d.value, heads = d.key_heads * d.shared, taps = d.taps;
  const int64_t tail_size = std::max<int64_t>(taps - 1, 0) * width, memory_size = d.key * d.value;
  const int64_t begin = d.starts[run], end = d.starts[run + 1];
  T* lines = scratch<T>(ROWS, taps * width);            // the last K inputs, a ring
  float* taken = scratch<float>(VALUES, width + d.shared * d.value + std::max(d.decays, d.shared));
  float* mixed = taken + width;
  float* keep = mixed + d.shared * d.value;
  float* work = scratch<float>(TOTAL, d.shared * memory_size);  // the state of tokens that do not store it
  const auto tail_at = [&](int64_t row) { return tails + (row * d.key_heads + head) * tail_size; };
  const auto memory_at = [&](int64_t row) { return d.memory + (row * heads + head * d.shared) * memory_size; };
  const float* weights = d.conv + head * taps * width;
  std::memcpy(lines, tail_at(d.reads[run]), size_t(tail_size) * sizeof(T));
  const float* from = memory_at(d.reads[run]);
  for (int64_t t = begin; t < end; t++) {
    const int64_t newest = taps ? (t - begin + taps - 1) % taps : 0, oldest = taps ? (newest + 1) % taps : 0;
    const T* input = in.mixed + t * d.strides[0] + head * d.strides[1];
    const T* z = in.z + t * d.strides[2] + head * d.strides[3];
    const T* b = in.b + t * d.strides[4] + head * d.strides[5];
    const T* a = in.a + t * d.strides[6] + head * d.strides[7];
    if (taps) std::memcpy(lines + newest * width, input, size_t(width) * sizeof(T));
    for (int64_t c = 0; !taps && c < width; c += LANES) store_some(taken + c, load_some(input + c, width - c), width - c);
    for (int64_t c = 0; taps && c < width; c += LANES) {
      const int64_t some = width - c;
      F16 total = d.conv_bias ? load_some(d.conv_bias + head * width + c, some) : zero();
      for (int64_t j = 0; j < taps; j++)
        total = fma(load_some(lines + (oldest + j) % taps * width + c, some), load_some(weights + j * width + c, some), total);
      store_some(taken + c, round_to(silu(total), T{}), some);
    }
    const int64_t store_row = d.stores[t];
    float* to = store_row < 0 ? work : memory_at(store_row);
    if (d.additive) {
      const float* bias = d.dt_bias + head * d.shared;
      for (int64_t i = 0; i < d.shared; i += LANES) {
        const int64_t some = d.shared - i;
        const F16 step = softplus(load_some(a + i, some) + load_some(bias + i, some));
        store_some(keep + i, max(set1(d.shortest), min(set1(d.longest), step)), some);
      }
      add_token(d, head, keep, from, to, taken, mixed);
      const int64_t first = head * d.shared * d.value;
      const int64_t n = d.shared * d.value;
      T* result = out + t * heads * d.value + first;
      if (taps) group_norm(mixed, z, d.norm + first, d.eps, n, result);
      for (int64_t c = 0; !taps && c < n; c += LANES) store_some(result + c, load_some(mixed + c, n - c), n - c);
    } else {
      to_length(taken, d.key, 1.f / std::sqrt(float(d.key)));
      to_length(taken + d.key, d.key, 1.f);
    }
    for (int64_t i = 0; !d.additive && i < d.shared; i++) {
      const int64_t h = head * d.shared + i;
      decays_of(a + i * d.decays, d.dt_bias + h * d.decays, std::exp(d.a_log[h]), d.bound, d.decays, keep);
      T beta;
      assign(beta, 1.f / (1.f + std::exp(-to_float(b[i]))));
      const auto step = [&](auto by_channel) {
        update_head<decltype(by_channel)::value, false>(from + i * memory_size, to + i * memory_size, d.key, d.value,
                                                        taken, taken + d.key, taken + 2 * d.key + i * d.value, keep,
                                                        to_float(beta), mixed);
      };
      d.decays > 1 ? step(std::true_type{}) : step(std::false_type{});
      gated_norm(mixed, z + i * d.value, d, out + (t * heads + h) * d.value);
    }
    from = to;
    if (store_row >= 0)
      for (int64_t j = 1; j < taps; j++)
        std::memcpy(tail_at(store_row) + (j - 1) * width, lines + (oldest + j) % taps * width, size_t(width) * sizeof(T));
  }
}

}  // namespace
}  // namespace moe

API void moe_gated_delta(int is_bf16, const moe::Delta* delta, const void* mixed, const void* z, const void* b,
                         const void* a, void* tails, void* out) {
  using namespace moe;
  const Delta& d = *delta;
  const auto run = [&](auto kind) {
    using T = decltype(kind);
    const auto of = [](const void* p) { return static_cast<const T*>(p); };
    const DeltaInputs<T> inputs{of(mixed), of(z), of(b), of(a)};
    parallel(d.runs * d.key_heads, [&](int64_t task) {
      run_head(d, task / d.key_heads, task % d.key_heads, inputs, static_cast<T*>(tails), static_cast<T*>(out));
    });
  };
  if (is_bf16)
    run(bf16{});
  else
    run(float{});
}
