// Parts of whole steps: the tokens of some rows as kernel inputs, and the model's pass over them.
//
// Legend: T tokens, D hidden, V vocabulary.
#pragma once

#include "decoder.h"
#include "drafts.h"
#include "vec.h"

namespace moe {

// Some tokens of each of some rows, concatenated by row: kernel inputs.
struct Runs {
  int64_t *positions, *slots;
  int32_t *rows, *starts, *contexts;

  Runs(Arrays& arrays, int64_t requests, int64_t tokens) {
    positions = static_cast<int64_t*>(arrays.take(tokens * 8));
    slots = static_cast<int64_t*>(arrays.take(tokens * 8));
    rows = static_cast<int32_t*>(arrays.take(requests * 4));
    starts = static_cast<int32_t*>(arrays.take((requests + 1) * 4));
    contexts = static_cast<int32_t*>(arrays.take(tokens * 4));
  }
  static int64_t bytes(int64_t requests, int64_t tokens) { return 20 * tokens + 8 * requests + 4 + 5 * 64; }

  // `table` [rows, width]: the slot of each position.
  void place(const int32_t* table, int64_t width, int64_t at, int64_t row, int64_t position) {
    positions[at] = position;
    slots[at] = table[row * width + position];
  }
  Queries queries(const int32_t* table, int64_t width, int64_t requests, int64_t window = 0) const {
    return {requests, rows, starts, contexts, table, width, nullptr, window, nullptr, 0};
  }
};

// Memory of a pass: decoder, head and sampling.
template <class T>
struct Forward {
  int64_t tokens, hidden, vocab;
  T *states, *out;  // [T, D] after the final norm, [T, V]
  float* logits;

  Forward(Arrays& arrays, int64_t count, int64_t width, int64_t entries)
      : tokens(count), hidden(width), vocab(entries) {
    states = static_cast<T*>(arrays.take(count * width * int64_t(sizeof(T))));
    out = static_cast<T*>(arrays.take(count * entries * int64_t(sizeof(T))));
    logits = static_cast<float*>(arrays.take(count * entries * 4));
  }
  static int64_t bytes(int64_t tokens, int64_t hidden, int64_t vocab) {
    return tokens * (int64_t(sizeof(T)) * (hidden + vocab) + 4 * vocab) + 3 * 64;
  }

  // ids [T] -> drawn [T], negative for invalid logits.
  void run(int kind, const Decoder& decoder, const Weight& head, const int64_t* ids, const Runs& runs,
           const Queries& queries, const SharedPrefix* prefix, const Draws& draws, int64_t* drawn) {
    moe_decoder(kind, &decoder, ids, tokens, runs.positions, runs.slots, &queries, prefix, nullptr, states);
    multiply(kind, head, states, hidden, tokens, out);
    to_floats(out, tokens * vocab, logits);
    if (draws.temperature == nullptr) return moe_greedy(logits, vocab, tokens, vocab, drawn);
    moe_sample(logits, vocab, tokens, vocab, draws.temperature, draws.top_k, draws.top_p, draws.min_p, draws.uniform,
               drawn);
  }
};

}  // namespace moe
