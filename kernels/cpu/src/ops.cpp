// Elementwise and routing operations of a layer: norms, activation, rotary embedding, cache writes, routing.
//
// Legend: T tokens, D hidden, H heads, C latent width, R rotary width, E experts, K experts per token.
// All arithmetic in float; every reduction runs in an order that depends only on the row's length.
#include <type_traits>

#include "amx.h"
#include "api.h"
#include "fp8.h"
#include "gemm.h"
#include "rows.h"

namespace moe {

// ---- norms ----

// The normed value is rounded to T before the weight, as in the reference.
template <class T, class W>
static INLINE void norm_row(const T* x, const W* weight, float eps, T* out, int64_t n) {
  const F16 scale = set1(root_mean_square(x, n, eps));
  for (int64_t i = 0; i < n; i += LANES) {
    F16 v = round_to(load_some(x + i, n - i) * scale, T{});
    store_some(out + i, v * load_some(weight + i, n - i), n - i);
  }
}

template <class T, class W>
static void norm(const T* x, int64_t ldx, const W* weight, float eps, T* out, int64_t rows, int64_t n) {
  parallel_ranges(rows, double(n) * 0.15, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++) norm_row(x + t * ldx, weight, eps, out + t * n, n);
  });
}

template <class T, class W>
static void add_norm(const T* x, int64_t ldx, T* residual, const W* weight, float eps, T* out, int64_t rows,
                     int64_t n) {
  parallel_ranges(rows, double(n) * 0.25, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++) {
      T* r = residual + t * n;
      for (int64_t i = 0; i < n; i += LANES)
        store_some(r + i, load_some(r + i, n - i) + load_some(x + t * ldx + i, n - i), n - i);
      norm_row(r, weight, eps, out + t * n, n);
    }
  });
}

// residual += x (null: nothing), then its LayerNorm, rounded once. bias: null without one.
template <class T>
static void layer_norm(const T* x, int64_t ldx, T* residual, const float* weight, const float* bias, float eps, T* out,
                       int64_t rows, int64_t n) {
  parallel_ranges(rows, double(n) * 0.35, [&](int64_t from, int64_t to) {
    float* row = scratch<float>(ROWS, n);
    for (int64_t t = from; t < to; t++) {
      T* r = residual + t * n;
      F16 total = zero(), squares = zero();
      for (int64_t i = 0; i < n; i += LANES) {
        F16 v = load_some(r + i, n - i);
        if (x) {
          v = round_to(v + load_some(x + t * ldx + i, n - i), T{});
          store_some(r + i, v, n - i);
        }
        store_some(row + i, v, n - i);
        total = total + v;
      }
      const F16 mean = set1(sum(total) / float(n));
      for (int64_t i = 0; i < n; i += LANES) {
        store_some(row + i, load_some(row + i, n - i) - mean, n - i);
        const F16 v = load_some(row + i, n - i);  // 0 after the row
        squares = fma(v, v, squares);
      }
      const F16 scale = set1(1.f / std::sqrt(sum(squares) / float(n) + eps));
      for (int64_t i = 0; i < n; i += LANES) {
        const F16 v = load_some(row + i, n - i) * scale;
        store_some(out + t * n + i, fma(v, load_some(weight + i, n - i), bias ? load_some(bias + i, n - i) : zero()), n - i);
      }
    }
  });
}

// ---- activation ----

// relu(x)^2 of n columns, without a gate.
template <class T>
static void squared(const T* x, int64_t ld, T* out, int64_t rows, int64_t n) {
  parallel_ranges(rows, double(n) * 0.25, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++)
      for (int64_t i = 0; i < n; i += LANES)
        store_some(out + t * n + i, squared_relu(load_some(x + t * ld + i, n - i)), n - i);
  });
}

template <class T>
static void silu_mul(const T* gate_up, int64_t ld, T* out, int64_t rows, int64_t n, float limit, float alpha,
                     float beta) {
  parallel_ranges(rows, double(n) * 0.5, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++)
      for (int64_t i = 0; i < n; i += LANES) {
        F16 gate = load_some(gate_up + t * ld + i, n - i), up = load_some(gate_up + t * ld + n + i, n - i);
        if (alpha > 0 && limit > 0) clamp(gate, up, limit);
        const F16 mixed = beta > 0    ? situ(gate, up, beta, limit)
                          : alpha > 0 ? gate * sigmoid(set1(alpha) * gate) * (up + set1(1.f))
                                      : clamped_silu(gate, limit, up);
        store_some(out + t * n + i, mixed, n - i);
      }
  });
}

// ---- rotary embedding ----

template <bool INVERSE, class T>
static void rotate(T* x, int64_t x_token, int64_t x_head, const int64_t* positions, const float* table, int64_t width,
                   bool interleaved, int64_t tokens, int64_t heads) {
  parallel_ranges(tokens, double(heads * width) * 0.3, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++)
      for (int64_t h = 0; h < heads; h++) {
        T* row = x + t * x_token + h * x_head;
        rotate_row<INVERSE>(row, row, table + positions[t] * width, width, interleaved);
      }
  });
}

// ---- cache writes ----

static INLINE int64_t slot_of(const void* slots, bool wide, int64_t t) {
  return wide ? static_cast<const int64_t*>(slots)[t] : static_cast<const int32_t*>(slots)[t];
}

template <class T, class W>
static void write_latent(const T* kv_a, int64_t ld, const W* weight, float eps, const int64_t* positions,
                         const float* table, int64_t rotary, bool interleaved, const void* slots, bool wide, int form,
                         void* cache, int64_t cache_row, int64_t tokens, int64_t latent, float scale) {
  parallel_ranges(tokens, double(latent) * 0.2, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++) {
      const int64_t place = slot_of(slots, wide, t) * cache_row;
      T* row = form == PLAIN ? static_cast<T*>(cache) + place : scratch<T>(KEYS, latent + rotary);
      norm_row(kv_a + t * ld, weight, eps, row, latent);
      rotate_row(kv_a + t * ld + latent, row + latent, table + positions[t] * rotary, rotary, interleaved);
      if (form != PLAIN) write_latent_row(form, row, latent, rotary, static_cast<uint8_t*>(cache) + place, scale);
    }
  });
}

static void write_rows(const char* x, int64_t x_token, int64_t x_head, const void* slots, bool wide, char* cache,
                       int64_t cache_row, int64_t tokens, int64_t heads, int64_t bytes) {
  parallel_ranges(tokens, double(heads * bytes) * 0.1, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++)
      for (int64_t h = 0; h < heads; h++)
        std::memcpy(cache + slot_of(slots, wide, t) * cache_row + h * bytes, x + t * x_token + h * x_head,
                    size_t(bytes));
  });
}

// ---- router ----

struct Router {
  int32_t experts, top_k, score;  // score: 0 softmax, 1 sigmoid, 2 square root of softplus, 3 SparseMixer
  int32_t groups, topk_groups, group_score;  // group_score: 0 none, 1 max, 2 top2
  float renormalize;       // added to the sum that divides the weights; 0: they are not divided
  float scale;
  int32_t bias_on_logits;  // the bias is added to the logits, not to the choice alone
  int32_t held;            // ids from here on become -1
  float jitter;            // of SparseMixer
};

// What rows of x are multiplied as: pairs of bf16 if both sides are bf16 and the machine multiplies pairs, else floats.
#if defined(MOE_AVX512_BF16)
template <class T, class G>
using Multiplied = std::conditional_t<PER_UNIT<T> == 2 && PER_UNIT<G> == 2, bf16, float>;
INLINE F16 add_products(const F16& a, const F16& b, const F16& sum, bf16) {
  return {(vf)_mm512_dpbf16_ps((__m512)sum.v[0], (__m512bh)a.v[0], (__m512bh)b.v[0])};
}
#else
template <class T, class G>
using Multiplied = float;
#endif
INLINE F16 add_products(const F16& a, const F16& b, const F16& sum, float) { return fma(a, b, sum); }

// Operands of a step: 16 floats, or 16 pairs of bf16.
template <class G>
INLINE F16 operands(const G* p, float) { return load(p); }
INLINE F16 operands(const bf16* p, bf16) { return load(reinterpret_cast<const float*>(p)); }

// logits[t][e] = x[t] . gate[e] for a block of tokens and of experts. Each is 16 chains over D, then summed. Rows of x
// are padded to whole vectors, the gate's rows are not. Multiplied as floats, a bf16 gate has the bits of its values in
// float.
template <int TOKENS, int EXPERTS, class X, class G>
static void logits_block(const X* x, int64_t ldx, const G* gate, int64_t dim, float* out, int64_t ldo) {
  constexpr int64_t STEP = LANES * PER_UNIT<X>;
  F16 sums[TOKENS][EXPERTS];
#pragma GCC unroll 6
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
    for (int e = 0; e < EXPERTS; e++) sums[t][e] = zero();
  auto step = [&](const X* row, const G* column, int64_t apart) __attribute__((always_inline)) {
    F16 a[TOKENS];
#pragma GCC unroll 6
    for (int t = 0; t < TOKENS; t++) a[t] = operands(row + t * ldx, X{});
#pragma GCC unroll 4
    for (int e = 0; e < EXPERTS; e++) {
      F16 b = operands(column + e * apart, X{});
      if (TOKENS == 1) __builtin_prefetch(column + (EXPERTS + e) * apart, 0, 2);  // the next block: rows are short
#if defined(MOE_AVX512)
      asm("" : "+v"(b.v[0]));  // one load, not one per multiply-add: this loop is load-bound
#endif
#pragma GCC unroll 6
      for (int t = 0; t < TOKENS; t++) sums[t][e] = add_products(a[t], b, sums[t][e], X{});
    }
  };
  int64_t d = 0;
  for (; d + STEP <= dim; d += STEP) step(x + d, gate + d, dim);
  if (d < dim) {
    G edge[EXPERTS * STEP] = {};
    for (int e = 0; e < EXPERTS; e++) std::memcpy(edge + e * STEP, gate + e * dim + d, size_t(dim - d) * sizeof(G));
    step(x + d, edge, STEP);
  }
#pragma GCC unroll 6
  for (int t = 0; t < TOKENS; t++)
#pragma GCC unroll 4
    for (int e = 0; e < EXPERTS; e++) out[t * ldo + e] = sum(sums[t][e]);
}

// The `count` largest values, descending; ties by lower index.
static INLINE void best_of(const float* values, int32_t n, int32_t count, int32_t* index) {
  int32_t held = 0;
  for (int32_t from = 0; from < n; from += LANES) {
    const int32_t to = std::min(from + LANES, n);
    if (held == count) {  // most blocks have none of the largest
      const float least = values[index[count - 1]];
      int above = 0;
      for (int32_t i = from; i < to; i++) above |= values[i] > least;
      if (above == 0) continue;
    }
    for (int32_t i = from; i < to; i++) {
      if (held == count && !(values[i] > values[index[count - 1]])) continue;
      int32_t at = held < count ? held++ : count - 1;
      for (; at > 0 && values[i] > values[index[at - 1]]; at--) index[at] = index[at - 1];
      index[at] = i;
    }
  }
}

// index: the K best experts by score and bias, of the best groups.
static void best_experts(const float* scores, const float* bias, const Router& r, float* room, int32_t* index) {
  const int32_t n = r.experts;
  const float* choice = scores;
  if (bias || r.group_score) {
    for (int32_t i = 0; i < n; i++) room[i] = bias ? scores[i] + bias[i] : scores[i];
    choice = room;
  }
  if (r.group_score) {
    const int32_t size = n / r.groups;
    float* group = room + n;
    for (int32_t g = 0; g < r.groups; g++) {
      float first = -INFINITY, second = -INFINITY;
      for (int32_t i = g * size; i < (g + 1) * size; i++) {
        const float value = choice[i], lower = value > first ? first : value;
        first = value > first ? value : first;
        second = lower > second ? lower : second;
      }
      group[g] = r.group_score == 2 && size > 1 ? first + second : first;
    }
    best_of(group, r.groups, r.topk_groups, index);
    for (int32_t g = 0; g < r.groups; g++) group[g] = 0;
    for (int32_t i = 0; i < r.topk_groups; i++) group[index[i]] = 1;
    for (int32_t g = 0; g < r.groups; g++)
      if (group[g] == 0) std::fill(room + g * size, room + (g + 1) * size, -INFINITY);
  }
  best_of(choice, n, r.top_k, index);
}

// The largest logits one after the other, each with its softmax over the near ones of those not chosen before.
static void sparse_mixer(float* logits, const Router& r, float* weights, int32_t* ids) {
  for (int32_t k = 0; k < r.top_k; k++) {
    const int32_t at = int32_t(std::max_element(logits, logits + r.experts) - logits);
    const float best = logits[at];
    float total = 0;
    for (int32_t i = 0; i < r.experts; i++)
      if (best - logits[i] <= 2 * r.jitter * std::max(std::fabs(logits[i]), best)) total += std::exp(logits[i] - best);
    ids[k] = at;
    weights[k] = r.scale / total;
    logits[at] = -INFINITY;
  }
}

// given: the experts of the token, if they are not to be chosen.
static void choose(float* logits, const float* bias, const Router& r, float* room, int32_t* index, float* weights,
                   int32_t* ids, const int32_t* given) {
  if (r.score == 3) return sparse_mixer(logits, r, weights, ids);
  const int32_t n = r.experts;
  float* scores = logits;
  if (bias && r.bias_on_logits) {
    for (int32_t i = 0; i < n; i++) logits[i] += bias[i];
    bias = nullptr;
  }
  if (r.score == 1) {
    for (int32_t i = 0; i < n; i += LANES) store_some(scores + i, sigmoid(load_some(logits + i, n - i)), n - i);
  } else if (r.score == 2) {
    for (int32_t i = 0; i < n; i += LANES) store_some(scores + i, softplus(load_some(logits + i, n - i)), n - i);
    for (int32_t i = 0; i < n; i++) scores[i] = std::sqrt(scores[i]);
  } else {
    float top = logits[0], total = 0;
    for (int32_t i = 1; i < n; i++) top = std::max(top, logits[i]);
    for (int32_t i = 0; i < n; i += LANES)
      store_some(scores + i, exp(load_some(logits + i, n - i) - set1(top)), n - i);
    for (int32_t i = 0; i < n; i++) total += scores[i];
    for (int32_t i = 0; i < n; i++) scores[i] /= total;
  }
  if (!given) best_experts(scores, bias, r, room, index);
  const int32_t* chosen = given ? given : index;
  float total = 0;
  for (int32_t k = 0; k < r.top_k; k++) {
    ids[k] = chosen[k];
    weights[k] = scores[chosen[k]];
    total += weights[k];
  }
  for (int32_t k = 0; k < r.top_k; k++) {
    if (r.renormalize > 0) weights[k] /= total + r.renormalize;
    weights[k] *= r.scale;
  }
}

// logits [T, E] = x gate^T.
template <class T, class G>
static void router_logits(const T* x, int64_t ldx, int64_t tokens, int64_t dim, const G* gate, int64_t experts,
                          float* logits) {
  using X = Multiplied<T, G>;
  constexpr int64_t STEP = LANES * PER_UNIT<X>;
  const int64_t padded = ceil_div(dim, STEP) * STEP + STEP;
  // Tasks of a few tokens each; for few tokens, tasks of some experts each, so that all threads read the gate.
  const int64_t token_block = std::min<int64_t>(tokens, 24), token_tasks = ceil_div(tokens, token_block);
  const int64_t wanted = ceil_div(4 * omp_get_max_threads(), token_tasks);
  const int64_t expert_block = std::max<int64_t>(ceil_div(ceil_div(experts, wanted), 4) * 4, 8);
  const int64_t expert_tasks = ceil_div(experts, expert_block);
  parallel(token_tasks * expert_tasks, [&](int64_t task) {
    const int64_t first = task / expert_tasks * token_block, count = std::min(token_block, tokens - first);
    const int64_t e0 = task % expert_tasks * expert_block, e1 = std::min(e0 + expert_block, experts);
    X* rows = scratch<X>(ROWS, count * padded);
    for (int64_t t = 0; t < count; t++)
      for (int64_t d = 0; d < padded - STEP; d += LANES)
        store(rows + t * padded + d, d < dim ? load_some(x + (first + t) * ldx + d, dim - d) : zero());
    int64_t e = e0;
    auto sweep = [&](auto width) {
      constexpr int EXPERTS = decltype(width)::value;
      for (; e1 - e >= EXPERTS; e += EXPERTS) {
        const G* g = gate + e * dim;
        float* out = logits + first * experts + e;
        int64_t t = 0;
        for (; count - t >= 6; t += 6)
          logits_block<6, EXPERTS>(rows + t * padded, padded, g, dim, out + t * experts, experts);
        for (; count - t >= 4; t += 4)
          logits_block<4, EXPERTS>(rows + t * padded, padded, g, dim, out + t * experts, experts);
        for (; t < count; t++)
          logits_block<1, EXPERTS>(rows + t * padded, padded, g, dim, out + t * experts, experts);
      }
    };
    sweep(std::integral_constant<int, 4>());
    sweep(std::integral_constant<int, 1>());
  });
}

#if defined(MOE_AMX)
// The same by matrix tiles. Tokens are the columns, so that the gate is read as stored. D is a multiple of 32.
static void tile_logits(const bf16* x, int64_t ldx, int64_t tokens, int64_t dim, const bf16* gate, int64_t experts,
                        float* logits) {
  const int64_t token_block = std::min<int64_t>(tokens, 4 * LANES), token_tasks = ceil_div(tokens, token_block);
  const int64_t wanted = ceil_div(4 * omp_get_max_threads(), token_tasks), steps = dim / 2;
  const int64_t expert_block = ceil_div(ceil_div(experts, wanted), LANES) * LANES;
  const int64_t expert_tasks = ceil_div(experts, expert_block);
  parallel_products(token_tasks * expert_tasks, [&](int64_t task) {
    const int64_t first = task / expert_tasks * token_block, count = std::min(token_block, tokens - first);
    const int64_t e0 = task % expert_tasks * expert_block, here = std::min(expert_block, experts - e0);
    const int64_t panels = panels_of(count), ldc = panels * LANES;
    uint32_t* columns = scratch<uint32_t>(ROWS, panels * steps * LANES);
    float* c = scratch<float>(PRODUCT, ceil_div(here, LANES) * LANES * ldc);
    for (int64_t p = 0; p < count; p += LANES) {
      const bf16* rows[LANES];
      const int64_t valid = std::min<int64_t>(LANES, count - p);
      for (int64_t i = 0; i < valid; i++) rows[i] = x + (first + p + i) * ldx;
      pack_rows(rows, valid, dim, steps, columns + p * steps);
    }
    gemm<bf16>(gate + e0 * dim, dim * 2, here, columns, steps * LANES, panels, steps, c, ldc, false);
    alignas(64) float block[LANES][LANES];
    for (int64_t p = 0; p < count; p += LANES)
      for (int64_t e = 0; e < here; e += LANES) {
        const uint32_t* from[LANES];
        for (int64_t i = 0; i < LANES; i++) from[i] = reinterpret_cast<const uint32_t*>(c + (e + i) * ldc + p);
        transpose(reinterpret_cast<uint32_t*>(block[0]), LANES, from);
        const size_t bytes = size_t(std::min<int64_t>(LANES, here - e)) * 4;
        for (int64_t t = p; t < std::min(p + LANES, count); t++)
          std::memcpy(logits + (first + t) * experts + e0 + e, block[t - p], bytes);
      }
  });
}
#endif

template <class T, class G>
static void route(const T* x, int64_t ldx, int64_t tokens, int64_t dim, const G* gate, const float* bias,
                  const Router& r, float* weights, int32_t* ids, const int32_t* given) {
  if (tokens == 0) return;
  const int64_t experts = r.experts;
  float* logits = scratch<float>(SHARED_OUT, tokens * experts);
  bool tiles = false;
#if defined(MOE_AMX)
  if constexpr (PER_UNIT<T> == 2 && PER_UNIT<G> == 2) {
    tiles = tiles_allowed() && dim % 32 == 0;
    if (tiles) tile_logits(x, ldx, tokens, dim, gate, experts, logits);
  }
#endif
  if (!tiles) router_logits(x, ldx, tokens, dim, gate, experts, logits);
  parallel_ranges(tokens, double(experts) * 6, [&](int64_t from, int64_t to) {
    float* room = scratch<float>(SCORES, 2 * experts);
    int32_t* index = scratch<int32_t>(STATS, experts);
    for (int64_t t = from; t < to; t++) {
      int32_t* chosen = ids + t * r.top_k;
      choose(logits + t * experts, bias, r, room, index, weights + t * r.top_k, chosen,
             given ? given + t * r.top_k : nullptr);
      if (r.held < r.experts) std::replace_if(chosen, chosen + r.top_k, [&](int32_t e) { return e >= r.held; }, -1);
    }
  });
}

// out[t] = add[t] + x[t] * w, w the sum of t's weights whose id is -1.
template <class T>
static void add_input(const T* x, int64_t ldx, const float* weights, const int32_t* ids, int64_t top_k, const T* add,
                      int64_t ldadd, T* out, int64_t tokens, int64_t width) {
  parallel_ranges(tokens, double(width) * 0.3, [&](int64_t from, int64_t to) {
    for (int64_t t = from; t < to; t++) {
      float total = 0;
      for (int64_t k = t * top_k; k < (t + 1) * top_k; k++) total += ids[k] < 0 ? weights[k] : 0.f;
      const F16 w = set1(total);
      for (int64_t d = 0; d < width; d += LANES) {
        F16 value = load_some(x + t * ldx + d, width - d) * w;
        if (add) value = value + load_some(add + t * ldadd + d, width - d);
        store_some(out + t * width + d, value, width - d);
      }
    }
  });
}

// Calls f with x (and weight) as typed pointers.
template <class F>
static void typed(int is_bf16, const F& f) {
  if (is_bf16)
    f(bf16{});
  else
    f(0.f);
}
template <class F>
static void typed(int is_bf16, int weight_bf16, const F& f) {
  typed(is_bf16, [&](auto x) { typed(weight_bf16, [&](auto w) { f(x, w); }); });
}

}  // namespace moe

using namespace moe;

#define IN(type, p) static_cast<const type*>(p)
#define OUT(type, p) static_cast<type*>(p)

API void moe_rms_norm(int is_bf16, int weight_bf16, const void* x, int64_t ldx, const void* weight, float eps,
                      void* out, int64_t rows, int64_t n) {
  typed(is_bf16, weight_bf16, [&](auto a, auto b) {
    using T = decltype(a);
    norm(IN(T, x), ldx, IN(decltype(b), weight), eps, OUT(T, out), rows, n);
  });
}

API void moe_add_rms_norm(int is_bf16, int weight_bf16, const void* x, int64_t ldx, void* residual, const void* weight,
                          float eps, void* out, int64_t rows, int64_t n) {
  typed(is_bf16, weight_bf16, [&](auto a, auto b) {
    using T = decltype(a);
    add_norm(IN(T, x), ldx, OUT(T, residual), IN(decltype(b), weight), eps, OUT(T, out), rows, n);
  });
}

API void moe_layer_norm(int is_bf16, const void* x, int64_t ldx, void* residual, const float* weight, const float* bias,
                        float eps, void* out, int64_t rows, int64_t n) {
  typed(is_bf16, [&](auto a) {
    using T = decltype(a);
    layer_norm(IN(T, x), ldx, OUT(T, residual), weight, bias, eps, OUT(T, out), rows, n);
  });
}

API void moe_silu_and_mul(int is_bf16, const void* gate_up, int64_t ld, void* out, int64_t rows, int64_t n,
                          float limit, float alpha, float beta, int is_squared) {
  typed(is_bf16, [&](auto a) {
    using T = decltype(a);
    if (is_squared) return squared(IN(T, gate_up), ld, OUT(T, out), rows, n);
    silu_mul(IN(T, gate_up), ld, OUT(T, out), rows, n, limit, alpha, beta);
  });
}

API void moe_rotate(int is_bf16, void* x, int64_t x_token, int64_t x_head, const int64_t* positions, const float* table,
                    int64_t width, int interleaved, int inverse, int64_t tokens, int64_t heads) {
  typed(is_bf16, [&](auto a) {
    auto* rows = OUT(decltype(a), x);
    if (inverse)
      rotate<true>(rows, x_token, x_head, positions, table, width, interleaved, tokens, heads);
    else
      rotate<false>(rows, x_token, x_head, positions, table, width, interleaved, tokens, heads);
  });
}

API void moe_write_latent(int is_bf16, int weight_bf16, const void* kv_a, int64_t ld, const void* weight, float eps,
                          const int64_t* positions, const float* table, int64_t rotary, int interleaved,
                          const void* slots, int wide, int form, void* cache, int64_t cache_row, int64_t tokens,
                          int64_t latent, float scale) {
  typed(is_bf16, weight_bf16, [&](auto a, auto b) {
    using T = decltype(a);
    write_latent(IN(T, kv_a), ld, IN(decltype(b), weight), eps, positions, table, rotary, interleaved, slots, wide,
                 form, cache, cache_row, tokens, latent, scale);
  });
}

// All strides in bytes.
API void moe_write_kv(const void* k, int64_t k_token, int64_t k_head, const void* v, int64_t v_token, int64_t v_head,
                      const void* slots, int wide, void* k_cache, int64_t k_row, void* v_cache, int64_t v_row,
                      int64_t tokens, int64_t heads, int64_t k_bytes, int64_t v_bytes) {
  write_rows(IN(char, k), k_token, k_head, slots, wide, OUT(char, k_cache), k_row, tokens, heads, k_bytes);
  write_rows(IN(char, v), v_token, v_head, slots, wide, OUT(char, v_cache), v_row, tokens, heads, v_bytes);
}

// The same into FP8 rows: x [T, H, W] in elements, the cache's stride in bytes.
API void moe_write_kv_fp8(int is_bf16, int form, const void* x, int64_t x_token, int64_t x_head, const void* slots,
                          int wide, void* cache, int64_t cache_row, int64_t tokens, int64_t heads, int64_t width) {
  typed(is_bf16, [&](auto a) {
    const auto* rows = IN(decltype(a), x);
    parallel_ranges(tokens, double(heads * width) * 0.3, [&](int64_t from, int64_t to) {
      for (int64_t t = from; t < to; t++)
        for (int64_t h = 0; h < heads; h++)
          write_head(form, rows + t * x_token + h * x_head, width,
                     OUT(uint8_t, cache) + slot_of(slots, wide, t) * cache_row + h * head_bytes(form, width));
    });
  });
}

API void moe_add_input(int is_bf16, const void* x, int64_t ldx, const float* weights, const int32_t* ids, int64_t top_k,
                       const void* add, int64_t ldadd, void* out, int64_t tokens, int64_t width) {
  typed(is_bf16, [&](auto a) {
    using T = decltype(a);
    add_input(IN(T, x), ldx, weights, ids, top_k, IN(T, add), ldadd, OUT(T, out), tokens, width);
  });
}

API void moe_route(int is_bf16, int gate_bf16, const void* x, int64_t ldx, int64_t tokens, int64_t dim,
                   const void* gate, const float* bias, const Router* router, float* weights, int32_t* ids,
                   const int32_t* given) {
  typed(is_bf16, gate_bf16, [&](auto a, auto b) {
    using T = decltype(a);
    route(IN(T, x), ldx, tokens, dim, IN(decltype(b), gate), bias, *router, weights, ids, given);
  });
}
