// The indexer of sparse attention: scores of a request's context for its query tokens, and the best of each token.
//
// Legend: T query tokens, H index heads, K selected. score = scale[key] * sum_h weight[h] * relu(q[h] . key).
// The sum over heads has no horizontal step. A score depends on its token and key only, and ties go to the lower
// position: the selection is batch-invariant.
#include "index_jobs.h"

namespace moe {
namespace {

template <class T>
struct Index : IndexRows<T> {
  const float* weights;  // [T, H]
  int64_t top_k;
  int32_t* out;
  int64_t out_row;
  int32_t* chosen;  // [T, blocks], or null
  int64_t blocks, size;
  int64_t lines = 1, span = 2048;

  Index(const IndexRows<T>& rows, const float* w, int64_t k, int32_t* to, int64_t to_row, int32_t* found, int64_t most,
        int64_t each)
      : IndexRows<T>(rows), weights(w), top_k(k), out(to), out_row(to_row), chosen(found), blocks(most), size(each) {}

  using IndexRows<T>::queries, IndexRows<T>::before, IndexRows<T>::heads, IndexRows<T>::form;

  bool sees(int64_t r, int64_t token, int64_t position) const {
    const int64_t own = position - before(r);
    if (!queries.visible || own < 0) return own <= token;
    return queries.visible[queries.starts[r] + token] >> own & 1;
  }
  // Positions [0, end) contain all that a token sees; `count` of them are visible.
  int64_t end(int64_t r, int64_t token) const {
    return queries.visible ? queries.contexts[r] : before(r) + token + 1;
  }
  int64_t count(int64_t r, int64_t token) const {
    if (!queries.visible) return before(r) + token + 1;
    return before(r) + __builtin_popcountll(queries.visible[queries.starts[r] + token]);
  }
  int64_t scored(int64_t r, int64_t token) const {
    const bool needed = count(r, token) > top_k || (chosen && count(r, token) > blocks * size);
    return needed ? end(r, token) : 0;
  }

  void score(const Job& job, int64_t first, int64_t last, float* logits) const {
    this->multiply(job, first, last, span, [&](int64_t at, int64_t here, const float* product, const float* scales) {
      for (int64_t t = 0; t < job.count; t++) {
        const float* w = weights + (queries.starts[job.request] + job.first + t) * heads;
        for (int64_t k = 0; k < here; k += LANES) {
          F16 sum = zero();
          for (int64_t h = 0; h < heads; h++)
            sum = fma(max(load(product + (t * heads + h) * AT_ONCE + k), zero()), set1(w[h]), sum);
          if (form != PLAIN) sum = sum * load(scales + k);
          store_some(logits + job.logits + t * job.scored + at + k, sum, here - k);
        }
      }
    });
  }

  // The slots that a token selects. `logits`: its scores, not read if it selects all that it sees.
  void pick(int64_t r, int64_t token, const float* logits, int64_t) const {
    int32_t* to = out + (queries.starts[r] + token) * out_row;
    const int32_t* slot = this->slots(r);
    const int64_t n = end(r, token);
    int64_t made = 0;
    if (count(r, token) <= top_k) {
      for (int64_t p = 0; p < n; p++)
        if (sees(r, token, p)) to[made++] = slot[p];
    } else {
      uint32_t* keys = scratch<uint32_t>(ROWS, 2 * n);
      for (int64_t p = 0; p < n; p++) keys[p] = sees(r, token, p) ? ordered(logits[p]) : 0;
      take_best(keys, keys + n, n, top_k, [&](int64_t p) { to[made++] = slot[p]; });
    }
    for (; made < out_row; made++) to[made] = -1;
    if (chosen) pick_blocks(chosen + (queries.starts[r] + token) * blocks, logits, n);
  }

  // The blocks of a token that sees n positions, the last one always.
  void pick_blocks(int32_t* to, const float* logits, int64_t n) const {
    const int64_t all = ceil_div(n, size);
    int64_t made = 0;
    if (all <= blocks) {
      for (; made < all; made++) to[made] = int32_t(made);
    } else {
      uint32_t* keys = scratch<uint32_t>(ROWS, 2 * all);
      for (int64_t b = 0; b < all - 1; b++) {
        float most = logits[b * size];
        for (int64_t i = 1; i < size; i++) most = std::max(most, logits[b * size + i]);
        keys[b] = ordered(most);
      }
      keys[all - 1] = 0xffffffffu;
      take_best(keys, keys + all, all, blocks, [&](int64_t b) { to[made++] = int32_t(b); });
    }
    for (; made < blocks; made++) to[made] = -1;
  }
};

template <class T>
void select_slots(int form, const void* q, int64_t q_token, int64_t q_head, const float* weights, const void* cache,
                  int64_t row, const Queries& queries, int64_t heads, int64_t width, int64_t top_k, int64_t budget,
                  int32_t* out, int64_t out_row, int32_t* chosen, int64_t blocks, int64_t size) {
  const IndexRows<T> rows{form, static_cast<const T*>(q), q_token, q_head, cache, row, queries, heads, width};
  run_jobs(Index<T>(rows, weights, top_k, out, out_row, chosen, blocks, size), queries,
           std::max<int64_t>(1, PRODUCT_ROWS / heads), budget);
}

}  // namespace
}  // namespace moe

// q [T, H, width], weights [T, H] -> out [T, out_row]: slots by ascending position, then -1. `budget`: floats of scores.
// `chosen` [T, blocks]: the best blocks of `size` positions, for causal queries; or null.
API void moe_index_select(int is_bf16, int form, const void* q, int64_t q_token, int64_t q_head, const float* weights,
                          const void* cache, int64_t row, const moe::Queries* queries, int64_t heads, int64_t width,
                          int64_t top_k, int64_t budget, int32_t* out, int64_t out_row, int32_t* chosen,
                          int64_t blocks, int64_t size) {
  const auto run = is_bf16 ? moe::select_slots<moe::bf16> : moe::select_slots<float>;
  run(form, q, q_token, q_head, weights, cache, row, *queries, heads, width, top_k, budget, out, out_row, chosen, blocks, size);
}
