// A chain of drafts in one call: each step runs an MTP layer over one token of every row and draws the next token.
// The same functions in the same order as the separate calls, so the same drafts.
//
// Legend: R rows, D hidden, V vocabulary.
#include "attention.h"
#include "layers.h"
#include "vec.h"

namespace moe {

// z = project([embedding_norm(embedding) | hidden_norm(hidden)]), then a decoder layer on z.
struct DraftLevel {
  const float *embedding_norm, *hidden_norm, *input_norm, *post_norm, *final_norm;
  Weight project;
  const MLALayer* attention;
  const MoELayer* experts;
  void* cache;
  int64_t cache_row;
  float eps;
};

// What is drawn for the R rows; temperature null: all greedy. `uniform` is [steps, R].
struct Draws {
  const float *temperature, *top_p, *min_p, *uniform;
  const int64_t* top_k;
};

template <class T>
void run_chain(int kind, const DraftLevel* const* levels, int64_t steps, int64_t rows, int64_t hidden,
               const T* embedding, const Weight& head, const int64_t* positions, const int64_t* slots,
               const Queries& queries, const int32_t* contexts, const T* state, const int64_t* roots,
               const Draws& draws, int64_t* tokens) {
  const int64_t vocab = head.out, size = sizeof(T);
  Arrays arrays(rows * (size * (7 * hidden + vocab) + 4 * vocab) + 8 * 64, CHAIN);
  auto take = [&](int64_t width) { return static_cast<T*>(arrays.take(rows * width * size)); };
  T *both = take(2 * hidden), *residual = take(hidden), *normed = take(hidden), *part = take(hidden);
  T *embedded = take(hidden), *v = take(hidden), *out = take(vocab);
  float* logits = static_cast<float*>(arrays.take(rows * vocab * 4));
  Queries now = queries;
  for (int64_t step = 0; step < steps; step++) {
    const DraftLevel& l = *levels[step];
    const int64_t* before = step ? tokens + (step - 1) * rows : roots;
    for (int64_t r = 0; r < rows; r++)
      std::memcpy(embedded + r * hidden, embedding + before[r] * hidden, size_t(hidden * size));
    moe_rms_norm(kind, 0, embedded, hidden, l.embedding_norm, l.eps, part, rows, hidden);
    moe_rms_norm(kind, 0, step ? v : state, hidden, l.hidden_norm, l.eps, normed, rows, hidden);
    for (int64_t r = 0; r < rows; r++) {
      std::memcpy(both + 2 * r * hidden, part + r * hidden, size_t(hidden * size));
      std::memcpy(both + (2 * r + 1) * hidden, normed + r * hidden, size_t(hidden * size));
    }
    moe_linear(kind, both, 2 * hidden, rows, 2 * hidden, l.project.panels, hidden, l.project.bias, nullptr, 0, residual,
               hidden);
    moe_rms_norm(kind, 0, residual, hidden, l.input_norm, l.eps, normed, rows, hidden);
    now.contexts = contexts + step * rows;
    moe_mla_layer(kind, l.attention, normed, hidden, rows, positions + step * rows, slots + step * rows, l.cache,
                  l.cache_row, &now, part);
    moe_add_rms_norm(kind, 0, part, hidden, residual, l.post_norm, l.eps, normed, rows, hidden);
    moe_moe_layer(kind, l.experts, normed, hidden, rows, hidden, part);
    moe_add_rms_norm(kind, 0, part, hidden, residual, l.final_norm, l.eps, v, rows, hidden);
    moe_linear(kind, v, hidden, rows, hidden, head.panels, vocab, head.bias, nullptr, 0, out, vocab);
    for (int64_t i = 0; i < rows * vocab; i++) logits[i] = to_float(out[i]);
    int64_t* drawn = tokens + step * rows;
    if (draws.temperature == nullptr)
      moe_greedy(logits, vocab, rows, vocab, drawn);
    else
      moe_sample(logits, vocab, rows, vocab, draws.temperature, draws.top_k, draws.top_p, draws.min_p,
                 draws.uniform + step * rows, drawn);
    for (int64_t r = 0; r < rows; r++) drawn[r] = std::max<int64_t>(drawn[r], 0);
  }
}

}  // namespace moe

using namespace moe;

// state [R, D], roots [R] -> tokens [steps, R]; positions, slots and contexts are [steps, R].
API void moe_draft_chain(int is_bf16, const DraftLevel* const* levels, int64_t steps, int64_t rows, int64_t hidden,
                         const void* embedding, const Weight* head, const int64_t* positions, const int64_t* slots,
                         const Queries* queries, const int32_t* contexts, const void* state, const int64_t* roots,
                         const Draws* draws, int64_t* tokens) {
  auto run = [&](auto a) {
    using T = decltype(a);
    run_chain<T>(is_bf16, levels, steps, rows, hidden, static_cast<const T*>(embedding), *head, positions, slots,
                 *queries, contexts, static_cast<const T*>(state), roots, *draws, tokens);
  };
  is_bf16 ? run(bf16()) : run(float());
}
