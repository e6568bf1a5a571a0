// A whole decode step in one call: slots, decoder, head, sampling. Bit-identical to the separate calls.
//
// Legend: R requests, D hidden, V vocabulary.
#include "step.h"

namespace moe {

struct DecodeStep {
  const Decoder* decoder;
  const Weight* head;
  int32_t* slots;  // [rows, width]
  int64_t width;
  int64_t* last_tokens;  // [rows]
  int64_t window;        // sliding window of all layers; 0: none
};

template <class T>
static void decode_step(int kind, const DecodeStep& s, const int64_t* rows, const int64_t* positions,
                        const int64_t* slots, int64_t requests, const SharedPrefix* prefix, const Draws& draws,
                        int64_t* tokens) {
  const int64_t hidden = s.decoder->hidden, vocab = s.head->out;
  Arrays arrays(Runs::bytes(requests, requests) + Forward<T>::bytes(requests, hidden, vocab) + 8 * requests + 64, STEP);
  Runs runs(arrays, requests, requests);
  Forward<T> model(arrays, requests, hidden, vocab);
  int64_t* ids = static_cast<int64_t*>(arrays.take(requests * 8));
  runs.starts[0] = 0;
  for (int64_t r = 0; r < requests; r++) {
    const int64_t row = rows[r];
    ids[r] = s.last_tokens[row];
    s.slots[row * s.width + positions[r]] = int32_t(slots[r]);
    runs.rows[r] = int32_t(row), runs.starts[r + 1] = int32_t(r + 1), runs.contexts[r] = int32_t(positions[r] + 1);
    runs.place(s.slots, s.width, r, row, positions[r]);
  }
  const Queries queries = runs.queries(s.slots, s.width, requests, s.window);
  model.run(kind, *s.decoder, *s.head, ids, runs, queries, prefix, draws, tokens);
  for (int64_t r = 0; r < requests; r++) s.last_tokens[rows[r]] = std::max<int64_t>(tokens[r], 0);
}

}  // namespace moe

using namespace moe;

// The last token of each of rows [R], at `positions`, is stored in `slots`; the next ones are sampled: tokens [R],
// negative for invalid logits. `prefix`, if not null, is shared by some of the requests. Returns -1, or, with nothing done, the first row whose table is too short.
API int64_t moe_decode_step(int is_bf16, const DecodeStep* step, const int64_t* rows, const int64_t* positions,
                            const int64_t* slots, int64_t requests, const SharedPrefix* prefix, const Draws* draws,
                            int64_t* tokens) {
  for (int64_t r = 0; r < requests; r++)
    if (positions[r] >= step->width) return rows[r];
  auto run = [&](auto a) {
    decode_step<decltype(a)>(is_bf16, *step, rows, positions, slots, requests, prefix, *draws, tokens);
  };
  is_bf16 ? run(bf16()) : run(float());
  return -1;
}
