// Draft chains: structs filled in kernels/cpu/drafts.py, and the calls of a whole step.
//
// Legend: R rows, D hidden.
#pragma once

#include "attention.h"
#include "layers.h"

namespace moe {

// z = project([embedding_norm(embedding) | hidden_norm(hidden)]), then a decoder layer on z.
struct DraftLevel {
  const float *embedding_norm, *hidden_norm, *input_norm, *post_norm, *final_norm;
  Weight project;
  const MLALayer* attention;
  const MoELayer* experts;
  void* cache;
  int64_t cache_row, form;
  float eps;
};

// Sampling parameters of the R rows; temperature null: all greedy. `uniform` is [steps, R].
struct Draws {
  const float *temperature, *top_p, *min_p, *uniform;
  const int64_t* top_k;
};

}  // namespace moe

API void moe_draft_chain(int is_bf16, const moe::DraftLevel* const* levels, int64_t steps, int64_t rows, int64_t hidden,
                         const void* embedding, const moe::Weight* head, const int64_t* positions, const int64_t* slots,
                         const moe::Queries* queries, const int32_t* contexts, const void* states,
                         const int64_t* state_rows, const int64_t* roots, const moe::Draws* draws, int64_t* tokens);
API void moe_draft_remember(int is_bf16, const moe::DraftLevel* level, int64_t tokens, int64_t hidden,
                            const void* embedding, const int64_t* ids, const void* states, const int64_t* positions,
                            const int64_t* slots, int form, void* cache, int64_t cache_row);
