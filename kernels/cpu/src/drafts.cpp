// A draft chain in one call: each step runs an MTP layer over one token of every row and samples the next token.
// Same functions in the same order as the separate calls, so identical drafts.
//
// Legend: R rows, D hidden, V vocabulary.
#include "drafts.h"
#include "vec.h"

namespace moe {

// The layer's input for rows of (token, state): `residual` [R, D] and its norm.
template <class T>
struct Joined {
  T *embedded, *states, *both, *residual, *normed;

  Joined(Arrays& arrays, int64_t rows, int64_t hidden) {
    auto take = [&](int64_t width) { return static_cast<T*>(arrays.take(rows * width * int64_t(sizeof(T)))); };
    embedded = take(hidden), states = take(hidden), both = take(2 * hidden);
    residual = take(hidden), normed = take(hidden);
  }
  static int64_t bytes(int64_t rows, int64_t hidden) { return rows * int64_t(sizeof(T)) * 6 * hidden + 5 * 64; }

  void join(int kind, const DraftLevel& l, const T* embedding, const int64_t* tokens, const T* from, int64_t rows,
            int64_t hidden) {
    const size_t bytes = size_t(hidden) * sizeof(T);
    for (int64_t r = 0; r < rows; r++) std::memcpy(residual + r * hidden, embedding + tokens[r] * hidden, bytes);
    moe_rms_norm(kind, 0, residual, hidden, l.embedding_norm, l.eps, embedded, rows, hidden);
    moe_rms_norm(kind, 0, from, hidden, l.hidden_norm, l.eps, states, rows, hidden);
    for (int64_t r = 0; r < rows; r++) {
      std::memcpy(both + 2 * r * hidden, embedded + r * hidden, bytes);
      std::memcpy(both + (2 * r + 1) * hidden, states + r * hidden, bytes);
    }
    multiply(kind, l.project, both, 2 * hidden, rows, residual);
    moe_rms_norm(kind, 0, residual, hidden, l.input_norm, l.eps, normed, rows, hidden);
  }
};

template <class T>
void run_chain(int kind, const DraftLevel* const* levels, int64_t steps, int64_t rows, int64_t hidden,
               const T* embedding, const Weight& head, const int64_t* positions, const int64_t* slots,
               const Queries& queries, const int32_t* contexts, const T* states, const int64_t* state_rows,
               const int64_t* roots, const Draws& draws, int64_t* tokens) {
  const int64_t vocab = head.out, size = sizeof(T);
  Arrays arrays(Joined<T>::bytes(rows, hidden) + rows * (size * (2 * hidden + vocab) + 4 * vocab + 8) + 5 * 64, CHAIN);
  Joined<T> start(arrays, rows, hidden);
  auto take = [&](int64_t width) { return static_cast<T*>(arrays.take(rows * width * size)); };
  T *part = take(hidden), *v = take(hidden), *out = take(vocab);
  float* logits = static_cast<float*>(arrays.take(rows * vocab * 4));
  int64_t* drawn = static_cast<int64_t*>(arrays.take(rows * 8));
  for (int64_t r = 0; r < rows; r++) {
    std::memcpy(v + r * hidden, states + state_rows[r] * hidden, size_t(hidden * size));
    drawn[r] = tokens[r * (1 + steps)] = roots[r];
  }
  Queries now = queries;
  for (int64_t step = 0; step < steps; step++) {
    const DraftLevel& l = *levels[step];
    start.join(kind, l, embedding, drawn, v, rows, hidden);
    now.contexts = contexts + step * rows;
    moe_mla_layer(kind, l.attention, start.normed, hidden, rows, positions + step * rows, slots + step * rows,
                  int(l.form), l.cache, l.cache_row, &now, nullptr, 0, part);
    moe_add_rms_norm(kind, 0, part, hidden, start.residual, l.post_norm, l.eps, start.normed, rows, hidden);
    moe_moe_layer(kind, l.experts, start.normed, hidden, rows, hidden, part, nullptr);
    moe_add_rms_norm(kind, 0, part, hidden, start.residual, l.final_norm, l.eps, v, rows, hidden);
    multiply(kind, head, v, hidden, rows, out);
    to_floats(out, rows * vocab, logits);
    if (draws.temperature == nullptr)
      moe_greedy(logits, vocab, rows, vocab, drawn);
    else
      moe_sample(logits, vocab, rows, vocab, draws.temperature, draws.top_k, draws.top_p, draws.min_p,
                 draws.uniform + step * rows, drawn);
    for (int64_t r = 0; r < rows; r++) tokens[r * (1 + steps) + 1 + step] = drawn[r] = std::max<int64_t>(drawn[r], 0);
  }
}

template <class T>
void remember(int kind, const DraftLevel& l, int64_t tokens, int64_t hidden, const T* embedding, const int64_t* ids,
              const T* states, const int64_t* positions, const int64_t* slots, int form, void* cache,
              int64_t cache_row) {
  const MLALayer& a = *l.attention;
  const int64_t row = a.keys.out + a.rotary;
  Arrays arrays(Joined<T>::bytes(tokens, hidden) + tokens * int64_t(sizeof(T)) * a.down.out + 64, CHAIN);
  Joined<T> start(arrays, tokens, hidden);
  T* down = static_cast<T*>(arrays.take(tokens * int64_t(sizeof(T)) * a.down.out));
  start.join(kind, l, embedding, ids, states, tokens, hidden);
  multiply(kind, a.down, start.normed, hidden, tokens, down);
  moe_write_latent(kind, 0, down + a.down.out - row, a.down.out, a.kv_norm, a.eps, positions, a.table, a.rotary,
                   a.interleaved, slots, 1, form, cache, cache_row, tokens, a.keys.out, a.latent_scale);
}

}  // namespace moe

using namespace moe;

// roots [R] -> tokens [R, 1 + steps]; states[state_rows[r]] is [D], positions, slots and contexts are [steps, R].
API void moe_draft_chain(int is_bf16, const DraftLevel* const* levels, int64_t steps, int64_t rows, int64_t hidden,
                         const void* embedding, const Weight* head, const int64_t* positions, const int64_t* slots,
                         const Queries* queries, const int32_t* contexts, const void* states, const int64_t* state_rows,
                         const int64_t* roots, const Draws* draws, int64_t* tokens) {
  auto run = [&](auto a) {
    using T = decltype(a);
    run_chain<T>(is_bf16, levels, steps, rows, hidden, static_cast<const T*>(embedding), *head, positions, slots,
                 *queries, contexts, static_cast<const T*>(states), state_rows, roots, *draws, tokens);
  };
  is_bf16 ? run(bf16()) : run(float());
}

// Writes the layer's latent rows of (states [T, D], next ids [T]) to their slots.
API void moe_draft_remember(int is_bf16, const DraftLevel* level, int64_t tokens, int64_t hidden, const void* embedding,
                            const int64_t* ids, const void* states, const int64_t* positions, const int64_t* slots,
                            int form, void* cache, int64_t cache_row) {
  auto run = [&](auto a) {
    using T = decltype(a);
    remember<T>(is_bf16, *level, tokens, hidden, static_cast<const T*>(embedding), ids, static_cast<const T*>(states),
                positions, slots, form, cache, cache_row);
  };
  is_bf16 ? run(bf16()) : run(float());
}
