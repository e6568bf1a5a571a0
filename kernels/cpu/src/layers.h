// Whole layers as structs of weights, made in kernels/cpu/layers.py.
#pragma once

#include "api.h"
#include "prefix.h"

namespace moe {

struct Weight {
  const void* panels;
  const float* bias;
  const Coding* form;  // null: plain panels
  int64_t in, out;
};

// MLA with absorbed products; `down` outputs [q latent (Q, may be 0) | kv latent (C) | rotary (R)].
struct MLALayer {
  Weight down, q, keys, values, o;  // keys [H, C, N] and values [H, V, C] by head
  const float *q_norm, *kv_norm, *table;
  int64_t heads, rotary;
  int32_t interleaved;
  float eps, scale, latent_scale;  // of scores; of cache rows in FP8_TENSOR
};

// Grouped-query attention; `qkv` outputs [H heads | G key heads | G value heads] of `width`.
struct GQALayer {
  Weight qkv, o;
  const float *q_norm, *k_norm, *table, *sinks;  // norms of each head, or null; sinks [H] or null
  int64_t heads, key_heads, width, rotary;
  int32_t interleaved;
  float eps, scale;
};

// Keys and values [slots, G, width], strides in stored elements; `form` as in fp8.h.
struct HeadCaches {
  void *k, *v;
  int64_t k_row, k_head, v_row, v_head;
  int64_t form;
};

// Where all layers count expert choices; null: no counting. The first layer zeroes `unclear` bytes.
struct CountCell {
  int32_t* counts;
  int64_t unclear;

  void count(int64_t first, const int32_t* ids, int64_t number) {
    if (unclear != 0) std::memset(counts, 0, size_t(unclear));
    unclear = 0;
    for (int64_t i = 0; i < number; i++) counts[first + ids[i]]++;
  }
};

struct MoELayer {
  const void* gate;
  const float* bias;
  const Router* router;
  const void* experts;
  const Coding *experts_up, *experts_down;  // null: plain panels
  int64_t num_experts, top_k, width;
  Weight shared_up, shared_down;  // shared expert; panels null: none
  CountCell* cell;                // null: no counting
  int64_t first;                  // index of expert 0 in the counts
  int64_t gate_bf16;              // the gate is bf16, not float
  float limit;                    // of the activation of all experts; 0: none
};

// x [T, in] -> [T, out].
inline void multiply(int is_bf16, const Weight& w, const void* x, int64_t ldx, int64_t tokens, void* out) {
  moe_linear(is_bf16, x, ldx, tokens, w.in, w.panels, w.out, w.bias, out, w.out, w.form);
}

// One block of scratch memory, divided into arrays.
class Arrays {
 public:
  explicit Arrays(int64_t bytes, Purpose which = LAYER) : at_(scratch<char>(which, bytes)) {}
  void* take(int64_t bytes) {
    void* here = at_;
    at_ += ceil_div(bytes, 64) * 64;
    return here;
  }

 private:
  char* at_;
};

}  // namespace moe

API void moe_mla_layer(int is_bf16, const moe::MLALayer* layer, const void* hidden, int64_t ldx, int64_t tokens,
                       const int64_t* positions, const int64_t* slots, int form, void* cache,
                       int64_t cache_row, const moe::Queries* queries, const moe::SharedPrefix* prefix, int64_t index,
                       void* out);
API void moe_gqa_layer(int is_bf16, const moe::GQALayer* layer, const void* hidden, int64_t ldx, int64_t tokens,
                       const int64_t* positions, const int64_t* slots, const moe::HeadCaches* caches,
                       const moe::Queries* queries, void* out);
API void moe_moe_layer(int is_bf16, const moe::MoELayer* layer, const void* x, int64_t ldx, int64_t tokens,
                       int64_t hidden, void* out, int32_t* chosen);
