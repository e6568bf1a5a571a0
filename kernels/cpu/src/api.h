// Functions of other files that layers.cpp calls; those files include this header, so that signatures cannot diverge.
#pragma once

#include "common.h"

namespace moe {
struct Coding;  // of coded weights; null: plain panels
struct Queries;
struct Router;

// A gated MLP in addition to routed experts: up [2I, D] (gate first) and down [D, I], with I = width a multiple of 16.
struct SharedExpert {
  const void *up, *down;
  const Coding *up_form, *down_form;
  int64_t width;
};
}  // namespace moe

API void moe_linear(int is_bf16, const void* x, int64_t ldx, int64_t m, int64_t k, const void* weight, int64_t n,
                    const float* bias, void* out, int64_t ldo, const moe::Coding* form);
API void moe_linear_heads(int is_bf16, const void* x, int64_t x_token, int64_t x_head, int64_t tokens, int64_t heads,
                          int64_t k, const void* weight, int64_t n, void* out, int64_t out_token, int64_t out_head,
                          const moe::Coding* form);
API void moe_mlp(int is_bf16, const void* x, int64_t ldx, int64_t m, int64_t hidden, int64_t width, const void* gate_up,
                 const void* down, int64_t out_features, void* out, int64_t ldo, const moe::Coding* up_form,
                 const moe::Coding* down_form, float limit);
API void moe_mixture(int is_bf16, const void* x, int64_t ldx, int64_t tokens, int64_t top_k, const float* topk,
                     const int32_t* ids, int64_t experts, int64_t hidden, int64_t width, const void* weights,
                     const moe::Coding* up_form, const moe::Coding* down_form, const moe::SharedExpert* shared,
                     float limit, void* out);
API void moe_route(int is_bf16, int gate_bf16, const void* x, int64_t ldx, int64_t tokens, int64_t dim,
                   const void* gate, const float* bias, const moe::Router* router, float* weights, int32_t* ids,
                   const int32_t* given);
API void moe_rms_norm(int is_bf16, int weight_bf16, const void* x, int64_t ldx, const void* weight, float eps,
                      void* out, int64_t rows, int64_t n);
API void moe_add_rms_norm(int is_bf16, int weight_bf16, const void* x, int64_t ldx, void* residual, const void* weight,
                          float eps, void* out, int64_t rows, int64_t n);
API void moe_greedy(const float* logits, int64_t ld, int64_t rows, int64_t vocab, int64_t* tokens);
API void moe_sample(const float* logits, int64_t ld, int64_t rows, int64_t vocab, const float* temperature,
                    const int64_t* top_k, const float* top_p, const float* min_p, const float* uniform,
                    int64_t* tokens);
API void moe_rotate(int is_bf16, void* x, int64_t x_token, int64_t x_head, const int64_t* positions, const float* table,
                    int64_t width, int interleaved, int inverse, int64_t tokens, int64_t heads);
API void moe_write_latent(int is_bf16, int weight_bf16, const void* kv_a, int64_t ld, const void* weight, float eps,
                          const int64_t* positions, const float* table, int64_t rotary, int interleaved,
                          const void* slots, int wide, int form, void* cache, int64_t cache_row, int64_t tokens,
                          int64_t latent, float scale);
API void moe_write_kv(const void* k, int64_t k_token, int64_t k_head, const void* v, int64_t v_token, int64_t v_head,
                      const void* slots, int wide, void* k_cache, int64_t k_row, void* v_cache, int64_t v_row,
                      int64_t tokens, int64_t heads, int64_t k_bytes, int64_t v_bytes);
API void moe_write_kv_fp8(int is_bf16, int form, const void* x, int64_t x_token, int64_t x_head, const void* slots,
                          int wide, void* cache, int64_t cache_row, int64_t tokens, int64_t heads, int64_t width);
API void moe_paged(int is_bf16, int form, const void* q, int64_t q_token, int64_t q_head, const void* k, int64_t k_row,
                   int64_t k_head, const void* v, int64_t v_row, int64_t v_head, const moe::Queries* queries,
                   int64_t heads, int64_t key_heads, int64_t width, int64_t value, float scale, float cap,
                   const float* sinks, void* out);
API void moe_absorbed(int is_bf16, int form, const void* q, int64_t q_token, int64_t q_head, const void* cache,
                      int64_t row, const moe::Queries* queries, int64_t heads, int64_t latent, int64_t rotary,
                      float scale, const float* sinks, void* out);
