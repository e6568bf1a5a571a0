// All decoder layers of a model in one call, for steps of few tokens: the Python call overhead is paid once, not four
// times per layer. Same functions in the same order as the separate calls, so bit-identical.
//
// Legend: T tokens, D hidden, L layers, K experts per token.
#include "decoder.h"

using namespace moe;

// ids [T] -> out [T, D], after the final norm. `prefix`, if not null, is shared by some of the requests. `chosen`, if not null, has L pointers, each null or to [T, K] for the
// router's choices.
API void moe_decoder(int is_bf16, const Decoder* decoder, const int64_t* ids, int64_t tokens, const int64_t* positions,
                     const int64_t* slots, const Queries* queries, const SharedPrefix* prefix, int32_t* const* chosen,
                     void* out) {
  const Decoder& d = *decoder;
  const int64_t hidden = d.hidden, row = hidden * (is_bf16 ? 2 : 4);
  Arrays arrays(2 * tokens * row + 2 * 64, CHAIN);
  char *residual = static_cast<char*>(arrays.take(tokens * row)), *part = static_cast<char*>(arrays.take(tokens * row));
  for (int64_t t = 0; t < tokens; t++)
    std::memcpy(residual + t * row, static_cast<const char*>(d.embedding) + ids[t] * row, size_t(row));
  moe_rms_norm(is_bf16, 0, residual, hidden, d.first_norm, d.eps, out, tokens, hidden);
  for (int64_t i = 0; i < d.num_layers; i++) {
    const DecoderLayer& l = d.layers[i];
    if (l.grouped != nullptr)
      moe_gqa_layer(is_bf16, l.grouped, out, hidden, tokens, positions, slots, &l.heads, queries, part);
    else
      moe_mla_layer(is_bf16, l.attention, out, hidden, tokens, positions, slots, l.form, l.cache, l.cache_row, queries,
                    prefix, i, part);
    moe_add_rms_norm(is_bf16, 0, part, hidden, residual, l.post_norm, l.eps, out, tokens, hidden);
    if (l.experts != nullptr)
      moe_moe_layer(is_bf16, l.experts, out, hidden, tokens, hidden, part, chosen != nullptr ? chosen[i] : nullptr);
    else
      moe_mlp(is_bf16, out, hidden, tokens, hidden, l.down.in, l.up.panels, l.down.panels, hidden, part, hidden,
              l.up.form, l.down.form, 0);
    moe_add_rms_norm(is_bf16, 0, part, hidden, residual, l.next_norm, l.eps, out, tokens, hidden);
  }
}
