// The indexer of block-sparse attention: the blocks of a request's context with the highest scores, for each query
// token and KV head. Block b has positions [b * size, (b + 1) * size); the last `local` blocks of a token are always
// selected.
//
// Legend: T query tokens, G KV heads. score = max over the block's keys of q[g] . key.
// Only whole blocks are scored: blocks that a token sees in part are its own, which is selected without a score. A score
// depends on its token and block only, and ties go to the lower block: the selection is batch-invariant.
#include "index_jobs.h"

namespace moe {
namespace {

template <class T>
struct BlockIndex : IndexRows<T> {
  int64_t size, top_k, local;
  int32_t* out;
  int64_t out_row;
  int64_t lines, span;  // scores of a KV head; blocks of about 2048 positions

  BlockIndex(const IndexRows<T>& rows, int64_t of_block, int64_t k, int64_t last, int32_t* to, int64_t to_row)
      : IndexRows<T>(rows), size(of_block), top_k(k), local(last), out(to), out_row(to_row), lines(rows.heads),
        span(std::max<int64_t>(1, 2048 / of_block)) {}

  using IndexRows<T>::queries, IndexRows<T>::before, IndexRows<T>::heads;

  int64_t own_block(int64_t r, int64_t token) const { return (before(r) + token) / size; }
  int64_t scored(int64_t r, int64_t token) const {
    const int64_t own = own_block(r, token);
    return own < top_k || local == top_k ? 0 : own - local + 1;
  }

  void score(const Job& job, int64_t first, int64_t last, float* logits) const {
    const int64_t rows = job.count * heads;
    float* to = logits + job.logits;
    this->multiply(job, first * size, last * size, size, [&](int64_t at, int64_t here, const float* product, const float*) {
      const int64_t panels = panels_of(here), tail = (panels - 1) * LANES, block = at / size;
      float beyond[LANES];  // -inf in lanes without a key
      for (int i = 0; i < LANES; i++) beyond[i] = tail + i < here ? 0.f : -INFINITY;
      const F16 hide = load(beyond);
      for (int64_t i = 0; i < rows; i++, product += AT_ONCE) {
        F16 best = load(product + tail) + hide;
        for (int64_t k = 0; k < tail; k += LANES) best = max(best, load(product + k));
        const float top = highest(best);
        float& score = to[i * job.scored + block];
        score = at % size ? std::max(score, top) : top;
      }
    });
  }

  // The rows that a token's heads select. `logits`: its scores [G, stride], not read if it selects all blocks.
  void pick(int64_t r, int64_t token, const float* logits, int64_t stride) const {
    const int64_t own = own_block(r, token), n = own < top_k ? 0 : own - local + 1, end = before(r) + token + 1;
    const int32_t* slot = this->slots(r);
    uint32_t* keys = scratch<uint32_t>(ROWS, 2 * n + 1);
    for (int64_t g = 0; g < heads; g++) {
      int32_t* to = out + ((queries.starts[r] + token) * heads + g) * out_row;
      int64_t made = 0;
      const auto take = [&](int64_t block) {
        for (int64_t p = block * size, stop = std::min(p + size, end); p < stop; p++)
          to[made++] = slot[p] * int32_t(heads) + int32_t(g);
      };
      if (n > 0 && top_k > local) {
        for (int64_t b = 0; b < n; b++) keys[b] = ordered(logits[g * stride + b]);
        take_best(keys, keys + n, n, top_k - local, take);
      }
      for (int64_t b = n; b <= own; b++) take(b);
      std::fill(to + made, to + out_row, -1);
    }
  }
};

template <class T>
void select_blocks(const void* q, int64_t q_token, int64_t q_head, const void* cache, int64_t row,
                   const Queries& queries, int64_t heads, int64_t width, int64_t size, int64_t top_k, int64_t local,
                   int64_t budget, int32_t* out, int64_t out_row) {
  const IndexRows<T> rows{PLAIN, static_cast<const T*>(q), q_token, q_head, cache, row, queries, heads, width};
  run_jobs(BlockIndex<T>(rows, size, top_k, local, out, out_row), queries,
           std::max<int64_t>(1, PRODUCT_ROWS / heads), budget);
}

}  // namespace
}  // namespace moe

// q [T, G, width] -> out [T * G, out_row]: slot * G + g of the selected tokens by ascending position, then -1. `budget`:
// floats of scores.
API void moe_block_select(int is_bf16, const void* q, int64_t q_token, int64_t q_head, const void* cache, int64_t row,
                          const moe::Queries* queries, int64_t heads, int64_t width, int64_t size, int64_t top_k,
                          int64_t local, int64_t budget, int32_t* out, int64_t out_row) {
  const auto run = is_bf16 ? moe::select_blocks<moe::bf16> : moe::select_blocks<float>;
  run(q, q_token, q_head, cache, row, *queries, heads, width, size, top_k, local, budget, out, out_row);
}
