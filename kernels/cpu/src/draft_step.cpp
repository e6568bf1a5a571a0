// A whole step of draft chains in one call: draft, verify, accept, draft cache update. Bit-identical to the separate
// calls; only integers move between the phases. Separate Python calls cost more than the integer work, and each waits
// for the GIL.
//
// Legend: R requests, S drafts per request, N = S + 1 verified tokens per request, T = R * N, D hidden, V vocabulary.
#include <chrono>
#include <vector>

#include "drafts.h"
#include "step.h"

namespace moe {

struct DraftStep {
  const DraftLevel* level;
  const Decoder* decoder;
  const Weight* head;
  const int32_t* slots;  // [rows, width]
  int32_t* history;      // [rows, width]: the tokens of each row, the last of them at position lengths[row]
  int64_t width;
  int64_t *lengths, *last_tokens;  // [rows]
  void* states;                    // [rows, D]: target hidden state that the last token was sampled from
};

// Results for R requests: start positions of their new tokens, the tokens [R, N] (the last one repeated), their counts;
// and the seconds of drafting, of the model, and of the draft cache update.
struct Judged {
  int64_t *starts, *tokens, *counts;
  double* seconds;
};

template <class T>
class DraftStepRun {
 public:
  DraftStepRun(int kind, const DraftStep& step, const int64_t* rows, int64_t requests, int64_t depth)
      : kind_(kind), s_(step), rows_(rows), requests_(requests), depth_(depth), each_(depth + 1),
        tokens_(requests * each_), hidden_(step.decoder->hidden), vocab_(step.head->out),
        arrays_(bytes(), STEP), chain_(arrays_, requests, std::max<int64_t>(requests * depth, 1)),
        verified_(arrays_, requests, tokens_), model_(arrays_, tokens_, hidden_, vocab_) {
    roots_ = ints(requests), drafts_ = ints(tokens_), drawn_ = ints(tokens_), next_ = ints(tokens_);
    uniform_ = static_cast<float*>(arrays_.take(tokens_ * 4));
  }

  // `uniform` [N, R]: the random numbers of sampling, if not greedy; a draft and its verification use the same number.
  void run(const Draws& draft_draws, const Draws& draws, const float* uniform, const Judged& judged) {
    const double began = now();
    draft(draft_draws, uniform);
    const double drafted = now();
    verify(draws, uniform);
    const double verified = now();
    accept(judged);
    const double accepted = now();
    remember(judged);
    judged.seconds[0] = drafted - began, judged.seconds[1] = verified - drafted, judged.seconds[2] = now() - accepted;
  }

 private:
  int64_t bytes() const {
    return Runs::bytes(requests_, requests_ * depth_ + 1) + Runs::bytes(requests_, tokens_) + 8 * requests_ +
           Forward<T>::bytes(tokens_, hidden_, vocab_) + tokens_ * (3 * 8 + 4) + 5 * 64;
  }
  int64_t* ints(int64_t count) { return static_cast<int64_t*>(arrays_.take(count * 8)); }
  static double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
  }

  void draft(const Draws& draws, const float* uniform) {
    chain_.starts[0] = 0;
    for (int64_t r = 0; r < requests_; r++) {
      const int64_t row = rows_[r];
      roots_[r] = s_.last_tokens[row];
      chain_.rows[r] = int32_t(row), chain_.starts[r + 1] = int32_t(r + 1);
      for (int64_t i = 0; i < depth_; i++) {  // the first step continues from the state before the root
        chain_.place(s_.slots, s_.width, i * requests_ + r, row, s_.lengths[row] - 1 + i);
        chain_.contexts[i * requests_ + r] = int32_t(s_.lengths[row] + i);
      }
    }
    Draws numbered = draws;
    numbered.uniform = uniform;
    const Queries queries = chain_.queries(s_.slots, s_.width, requests_);
    const std::vector<const DraftLevel*> levels(size_t(depth_), s_.level);
    moe_draft_chain(kind_, levels.data(), depth_, requests_, hidden_, s_.decoder->embedding, s_.head, chain_.positions,
                    chain_.slots, &queries, chain_.contexts, s_.states, rows_, roots_, &numbered, drafts_);
  }

  void verify(const Draws& draws, const float* uniform) {
    verified_.starts[0] = 0;
    for (int64_t r = 0; r < requests_; r++) {
      const int64_t row = rows_[r];
      verified_.rows[r] = int32_t(row), verified_.starts[r + 1] = int32_t((r + 1) * each_);
      verified_.contexts[r] = int32_t(s_.lengths[row] + each_);
      for (int64_t i = 0; i < each_; i++)
        verified_.place(s_.slots, s_.width, r * each_ + i, row, s_.lengths[row] + i);
    }
    Draws numbered = draws;
    if (uniform != nullptr) {
      for (int64_t t = 0; t < tokens_; t++) uniform_[t] = uniform[t % each_ * requests_ + t / each_];
      numbered.uniform = uniform_;
    }
    const Queries queries = verified_.queries(s_.slots, s_.width, requests_);
    model_.run(kind_, *s_.decoder, *s_.head, drafts_, verified_, queries, nullptr, numbered, drawn_);
  }

  // From the root on, a draft is accepted while it equals the token sampled at its parent.
  void accept(const Judged& judged) {
    for (int64_t r = 0; r < requests_; r++) {
      const int64_t row = rows_[r], start = s_.lengths[row];
      const int64_t *drafts = drafts_ + r * each_, *drawn = drawn_ + r * each_;
      int64_t* tokens = judged.tokens + r * each_;
      int64_t good = 0;
      while (good < depth_ && drawn[good] >= 0 && drafts[good + 1] == drawn[good]) good++;
      for (int64_t i = 0; i < each_; i++) {
        tokens[i] = drawn[std::min(i, good)];
        next_[r * each_ + i] = std::max<int64_t>(tokens[i], 0);  // 0 for invalid logits
        s_.history[row * s_.width + start + 1 + i] = int32_t(next_[r * each_ + i]);
      }
      judged.starts[r] = start, judged.counts[r] = good + 1;
      s_.lengths[row] = start + good + 1;
      s_.last_tokens[row] = next_[r * each_ + depth_];
    }
  }

  void remember(const Judged& judged) {
    const size_t size = size_t(hidden_) * sizeof(T);
    for (int64_t r = 0; r < requests_; r++)
      std::memcpy(static_cast<T*>(s_.states) + rows_[r] * hidden_,
                  model_.states + (r * each_ + judged.counts[r] - 1) * hidden_, size);
    const DraftLevel& l = *s_.level;
    moe_draft_remember(kind_, &l, tokens_, hidden_, s_.decoder->embedding, next_, model_.states, verified_.positions,
                       verified_.slots, int(l.form), l.cache, l.cache_row);
  }

  const int kind_;
  const DraftStep& s_;
  const int64_t* const rows_;
  const int64_t requests_, depth_, each_, tokens_, hidden_, vocab_;
  Arrays arrays_;
  Runs chain_, verified_;
  Forward<T> model_;
  int64_t *roots_, *drafts_, *drawn_, *next_;
  float* uniform_;
};

}  // namespace moe

using namespace moe;

// Drafts `depth` tokens for each of rows [R] and verifies them. Returns -1, or, with nothing done, the first row whose
// table is too short. All arrays of `step` advance by the accepted tokens.
API int64_t moe_draft_step(int is_bf16, const DraftStep* step, const int64_t* rows, int64_t requests, int64_t depth,
                           const Draws* draft_draws, const Draws* draws, const float* uniform, const Judged* judged) {
  for (int64_t r = 0; r < requests; r++)
    if (step->lengths[rows[r]] + depth + 1 >= step->width) return rows[r];
  if (is_bf16)
    DraftStepRun<bf16>(is_bf16, *step, rows, requests, depth).run(*draft_draws, *draws, uniform, *judged);
  else
    DraftStepRun<float>(is_bf16, *step, rows, requests, depth).run(*draft_draws, *draws, uniform, *judged);
  return -1;
}
