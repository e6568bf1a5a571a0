// Decodes whose contexts begin in the same slots: over that prefix attention runs per head, on keys and values expanded
// once for all steps; over the rest of each context on the latent. Both parts are merged by their log-sum-exp.
//
// Legend: T tokens, M members, H heads, C latent, R rotary, N/V expanded key/value width.
#pragma once

#include "api.h"

namespace moe {

struct SharedPrefix {
  int64_t length, members;              // length: a multiple of attention's BLOCK
  const int64_t* requests;              // [M]: the step's requests that begin with it, one query token each
  const void *const *kv, *const *rope;  // of each layer: [length, H, N + V] and [length, R]
};

// moe_absorbed for a step with members, which do not attend to the prefix; `sums` [T, H] are log2-sum-exps of scores.
void absorbed_behind(const SharedPrefix& prefix, int is_bf16, int form, const void* q, int64_t q_token, int64_t q_head,
                     const void* cache, int64_t row, const Queries& queries, int64_t heads, int64_t latent,
                     int64_t rotary, float scale, void* out, float* sums);

// Adds the members' attention to the prefix: q [T, H, N + R], values [T, H, V] with their `sums`.
void add_prefix(const SharedPrefix& prefix, int64_t layer, int is_bf16, const void* q, int64_t heads, int64_t nope,
                int64_t rotary, int64_t value, float scale, const float* sums, void* values);

}  // namespace moe
