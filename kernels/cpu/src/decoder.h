// A whole decoder as structs of weights, made in kernels/cpu/decoder.py.
#pragma once

#include "layers.h"

namespace moe {

// hidden -> attention -> + residual, post_norm -> experts or a dense MLP -> + residual, next_norm.
struct DecoderLayer {
  const MLALayer* attention;  // or
  const GQALayer* grouped;
  const float *post_norm, *next_norm;
  const MoELayer* experts;  // null: dense
  Weight up, down;
  void* cache;
  int64_t cache_row;
  HeadCaches heads;  // of `grouped`
  int32_t form;
  float eps;
};

struct Decoder {
  const void* embedding;  // [V, D]
  const float* first_norm;
  float eps;
  int64_t hidden, num_layers;
  const DecoderLayer* layers;
};

}  // namespace moe

API void moe_decoder(int is_bf16, const moe::Decoder* decoder, const int64_t* ids, int64_t tokens,
                     const int64_t* positions, const int64_t* slots, const moe::Queries* queries,
                     const moe::SharedPrefix* prefix, int32_t* const* chosen, void* out);
