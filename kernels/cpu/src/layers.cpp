// Parts of a decoder layer in one call, for steps of few tokens, where Python call overhead costs as much as the work
// and leaves memory idle in between. Same functions in the same order as the separate calls, so bit-identical.
//
// Legend: T tokens, D hidden, H heads, N qk_nope, R rotary, V v_head, C latent, Q q rank, E experts, K experts a token.
#include "layers.h"

using namespace moe;

// hidden [T, D] -> out [T, D]; writes the tokens' latent rows to their slots first. `prefix`, if not null, is shared by
// some of the requests; this is layer `index` of its.
API void moe_mla_layer(int is_bf16, const MLALayer* layer, const void* hidden, int64_t ldx, int64_t tokens,
                       const int64_t* positions, const int64_t* slots, int form, void* cache,
                       int64_t cache_row, const Queries* queries, const SharedPrefix* prefix, int64_t index,
                       void* out) {
  const MLALayer& l = *layer;
  const int64_t size = is_bf16 ? 2 : 4, latent = l.keys.out, nope = l.keys.in, value = l.values.out;
  const int64_t row = latent + l.rotary, head = nope + l.rotary, rank = l.down.out - row;
  Arrays arrays(tokens * size * (l.down.out + rank + l.heads * (head + row + latent + value)) + tokens * l.heads * 4 + 7 * 64);
  auto take = [&](int64_t width) { return static_cast<char*>(arrays.take(tokens * width * size)); };
  char *down = take(l.down.out), *normed = take(rank), *q = take(l.heads * head), *absorbed = take(l.heads * row);
  char *mixed = take(l.heads * latent), *values = take(l.heads * value);

  multiply(is_bf16, l.down, hidden, ldx, tokens, down);
  if (rank > 0) moe_rms_norm(is_bf16, 0, down, l.down.out, l.q_norm, l.eps, normed, tokens, rank);
  multiply(is_bf16, l.q, rank > 0 ? normed : hidden, rank > 0 ? rank : ldx, tokens, q);
  moe_rotate(is_bf16, q + nope * size, l.heads * head, head, positions, l.table, l.rotary, l.interleaved, 0, tokens,
             l.heads);
  moe_write_latent(is_bf16, 0, down + rank * size, l.down.out, l.kv_norm, l.eps, positions, l.table, l.rotary,
                   l.interleaved, slots, 1, form, cache, cache_row, tokens, latent, l.latent_scale);
  moe_linear_heads(is_bf16, q, l.heads * head, head, tokens, l.heads, nope, l.keys.panels, latent, absorbed,
                   l.heads * row, row, l.keys.form);
  parallel_ranges(tokens * l.heads, 5, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++)
      std::memcpy(absorbed + (i * row + latent) * size, q + (i * head + nope) * size, size_t(l.rotary * size));
  });
  float* sums = static_cast<float*>(arrays.take(tokens * l.heads * 4));
  if (prefix != nullptr)
    absorbed_behind(*prefix, is_bf16, form, absorbed, l.heads * row, row, cache, cache_row, *queries, l.heads, latent,
                    l.rotary, l.scale, mixed, sums);
  else
    moe_absorbed(is_bf16, form, absorbed, l.heads * row, row, cache, cache_row, queries, l.heads, latent, l.rotary,
                 l.scale, nullptr, mixed);
  moe_linear_heads(is_bf16, mixed, l.heads * latent, latent, tokens, l.heads, latent, l.values.panels, value, values,
                   l.heads * value, value, l.values.form);
  if (prefix != nullptr)
    add_prefix(*prefix, index, is_bf16, q, l.heads, nope, l.rotary, value, l.scale, sums, values);
  multiply(is_bf16, l.o, values, l.heads * value, tokens, out);
}

// hidden [T, D] -> out [T, D]; writes the tokens' keys and values to their slots first.
API void moe_gqa_layer(int is_bf16, const GQALayer* layer, const void* hidden, int64_t ldx, int64_t tokens,
                       const int64_t* positions, const int64_t* slots, const HeadCaches* caches,
                       const Queries* queries, void* out) {
  const GQALayer& l = *layer;
  const HeadCaches& c = *caches;
  const int64_t size = is_bf16 ? 2 : 4, both = l.heads + l.key_heads, row = (both + l.key_heads) * l.width;
  Arrays arrays(tokens * size * (row + l.heads * l.width) + 2 * 64);
  char* qkv = static_cast<char*>(arrays.take(tokens * row * size));
  char* mixed = static_cast<char*>(arrays.take(tokens * l.heads * l.width * size));
  char *k = qkv + l.heads * l.width * size, *v = qkv + both * l.width * size;
  multiply(is_bf16, l.qkv, hidden, ldx, tokens, qkv);
  for (int64_t t = 0; t < tokens && l.q_norm != nullptr; t++) {
    char *q_row = qkv + t * row * size, *k_row = k + t * row * size;
    moe_rms_norm(is_bf16, 0, q_row, l.width, l.q_norm, l.eps, q_row, l.heads, l.width);
    moe_rms_norm(is_bf16, 0, k_row, l.width, l.k_norm, l.eps, k_row, l.key_heads, l.width);
  }
  moe_rotate(is_bf16, qkv, row, l.width, positions, l.table, l.rotary, l.interleaved, 0, tokens, both);
  if (c.form == 0) {
    const int64_t apart = row * size, head = l.width * size;
    moe_write_kv(k, apart, head, v, apart, head, slots, 1, c.k, c.k_row * size, c.v, c.v_row * size, tokens,
                 l.key_heads, head, head);
  } else {
    moe_write_kv_fp8(is_bf16, int(c.form), k, row, l.width, slots, 1, c.k, c.k_row, tokens, l.key_heads, l.width);
    moe_write_kv_fp8(is_bf16, int(c.form), v, row, l.width, slots, 1, c.v, c.v_row, tokens, l.key_heads, l.width);
  }
  moe_paged(is_bf16, int(c.form), qkv, row, l.width, c.k, c.k_row, c.k_head, c.v, c.v_row, c.v_head, queries, l.heads,
            l.key_heads, l.width, l.width, l.scale, 0.f, l.sinks, mixed);
  multiply(is_bf16, l.o, mixed, l.heads * l.width, tokens, out);
}

// x [T, D] -> out [T, D]: the routed experts, and the shared expert if any. `chosen` [T, K], if not null, receives the
// router's choices; they are counted in the layer's cell.
API void moe_moe_layer(int is_bf16, const MoELayer* layer, const void* x, int64_t ldx, int64_t tokens, int64_t hidden,
                       void* out, int32_t* chosen) {
  const MoELayer& l = *layer;
  Arrays arrays(tokens * l.top_k * 8 + 2 * 64);
  float* weights = static_cast<float*>(arrays.take(tokens * l.top_k * 4));
  int32_t* ids = chosen != nullptr ? chosen : static_cast<int32_t*>(arrays.take(tokens * l.top_k * 4));
  moe_route(is_bf16, int(l.gate_bf16), x, ldx, tokens, hidden, l.gate, l.bias, l.router, weights, ids, nullptr);
  if (l.cell != nullptr && l.cell->counts != nullptr) l.cell->count(l.first, ids, tokens * l.top_k);
  const SharedExpert shared{l.shared_up.panels, l.shared_down.panels, l.shared_up.form, l.shared_down.form,
                            l.shared_down.in};
  moe_mixture(is_bf16, x, ldx, tokens, l.top_k, weights, ids, l.num_experts, hidden, l.width, l.experts, l.experts_up,
              l.experts_down, shared.up != nullptr ? &shared : nullptr, l.limit, out);
}
