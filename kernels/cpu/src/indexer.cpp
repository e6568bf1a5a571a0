// The indexer of sparse attention: scores of a request's context for its query tokens, and the best of each token.
//
// Legend: T query tokens, H index heads, K selected. score = scale[key] * sum_h weight[h] * relu(q[h] . key).
// Keys are the panels (SIMD lanes), heads of tokens the rows of one product, so the sum over heads has no horizontal
// step. A score depends on its token and key only, and ties go to the lower position: the selection is batch-invariant.
#include "attention.h"
#include "fp8.h"
#include "gemm.h"

namespace moe {
namespace {

constexpr int64_t AT_ONCE = 64, SPAN = 2048, PRODUCT_ROWS = 256;

struct Job {
  int64_t request, first, count;  // query tokens [first, first + count) of the request
  int64_t context, logits;        // scored positions, place of the first token's scores
};

template <class T>
struct Index {
  int form;
  const T* q;
  int64_t q_token, q_head;
  const float* weights;  // [T, H]
  const void* cache;
  int64_t row;  // elements, or bytes of records
  const Queries& queries;
  int64_t heads, width, top_k;
  int32_t* out;
  int64_t out_row;

  int64_t before(int64_t r) const { return queries.contexts[r] - queries.tokens(r); }
  const int32_t* slots(int64_t r) const { return queries.slots + queries.rows[r] * queries.slots_row; }
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

  // Scores of one job's tokens for positions [first, last), at most SPAN.
  void score(const Job& job, int64_t first, int64_t last, float* logits) const {
    const int64_t steps = steps_of<T>(width), rows = job.count * heads, padded = steps * PER_UNIT<T>;
    T* a = scratch<T>(ROWS, rows * padded);
    for (int64_t i = 0; i < rows; i++) {
      const int64_t token = queries.starts[job.request] + job.first + i / heads;
      std::memcpy(a + i * padded, q + token * q_token + i % heads * q_head, size_t(width) * sizeof(T));
      std::memset(a + i * padded + width, 0, size_t(padded - width) * sizeof(T));
    }
    uint32_t* panels = scratch<uint32_t>(TURNED, AT_ONCE * steps);
    float* product = scratch<float>(PRODUCT, rows * AT_ONCE);
    T* copies = scratch<T>(KEYS, LANES * padded);
    alignas(64) float scales[AT_ONCE];
    const int32_t* slot = slots(job.request);
    for (int64_t at = first; at < last; at += AT_ONCE) {
      const int64_t here = std::min(AT_ONCE, last - at);
      for (int64_t k = 0; k < here; k += LANES) {
        const T* lines[LANES];
        const int64_t some = std::min<int64_t>(LANES, here - k);
        for (int64_t i = 0; i < some; i++) {
          const int64_t place = slot[at + k + i] * row;
          if (form == PLAIN) {
            lines[i] = static_cast<const T*>(cache) + place;
            continue;
          }
          const uint8_t* record = static_cast<const uint8_t*>(cache) + place;
          read_numbers<E4M3>(record, 1.f, copies + i * padded, width);
          scales[k + i] = float_at(record + head_bytes(form, width) - 4);
          lines[i] = copies + i * padded;
        }
        pack_rows(lines, some, width, steps, panels + k * steps);
      }
      gemm<T>(a, steps * 4, rows, panels, steps * LANES, panels_of(here), steps, product, AT_ONCE, false);
      for (int64_t t = 0; t < job.count; t++) {
        const float* w = weights + (queries.starts[job.request] + job.first + t) * heads;
        for (int64_t k = 0; k < here; k += LANES) {
          F16 sum = zero();
          for (int64_t h = 0; h < heads; h++)
            sum = fma(max(load(product + (t * heads + h) * AT_ONCE + k), zero()), set1(w[h]), sum);
          if (form != PLAIN) sum = sum * load(scales + k);
          float lanes[LANES];
          store(lanes, sum);
          std::memcpy(logits + job.logits + t * job.context + at + k, lanes,
                      size_t(std::min<int64_t>(LANES, here - k)) * sizeof(float));
        }
      }
    }
  }

  // Unsigned numbers in the order of floats; both zeros are equal.
  static uint32_t ordered(float x) {
    x += 0.f;
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits >> 31 ? ~bits : bits | 0x80000000u;
  }

  // The slots that a token selects. `logits`: its scores, not read if it selects all that it sees.
  void pick(int64_t r, int64_t token, const float* logits) const {
    int32_t* to = out + (queries.starts[r] + token) * out_row;
    const int32_t* slot = slots(r);
    const int64_t n = end(r, token);
    int64_t made = 0;
    if (count(r, token) <= top_k) {
      for (int64_t p = 0; p < n; p++)
        if (sees(r, token, p)) to[made++] = slot[p];
    } else {
      uint32_t* keys = scratch<uint32_t>(ROWS, 2 * n);
      for (int64_t p = 0; p < n; p++) keys[p] = sees(r, token, p) ? ordered(logits[p]) : 0;
      uint32_t* part = keys + n;
      std::memcpy(part, keys, size_t(n) * sizeof(uint32_t));
      std::nth_element(part, part + top_k - 1, part + n, [](uint32_t a, uint32_t b) { return a > b; });
      const uint32_t bar = part[top_k - 1];
      int64_t ties = top_k;
      for (int64_t p = 0; p < n; p++) ties -= keys[p] > bar;
      for (int64_t p = 0; p < n && made < top_k; p++) {
        if (keys[p] < bar || (keys[p] == bar && ties == 0) || !sees(r, token, p)) continue;
        ties -= keys[p] == bar;
        to[made++] = slot[p];
      }
    }
    for (; made < out_row; made++) to[made] = -1;
  }

  // Jobs of a round: their scores fit into `budget` floats (one token's always do).
  void run(int64_t budget) const {
    const int64_t per_job = std::max<int64_t>(1, PRODUCT_ROWS / heads);
    int64_t r = 0, token = 0;
    while (r < queries.requests) {
      int64_t jobs = 0, used = 0, tasks = 0;
      const int64_t most = queries.starts[queries.requests] - queries.starts[r] - token;
      Job* job = scratch<Job>(SHARED_UNITS, most + 1);
      int64_t* first_task = scratch<int64_t>(SHARED_INDEX, most + 2);
      while (r < queries.requests) {
        if (token == queries.tokens(r)) {
          r++, token = 0;
          continue;
        }
        Job next{r, token, 0, 0, used};
        int64_t scored = 0;
        while (token < queries.tokens(r) && next.count < per_job) {
          const int64_t longest = std::max(next.context, end(r, token));
          const bool scores = count(r, token) > top_k;
          if (scores && used > 0 && used + (next.count + 1) * longest > budget) break;
          next.context = longest, next.count++, token++;
          scored += scores;
        }
        if (!next.count) break;
        if (!scored) next.context = 0;
        used += next.count * next.context;
        first_task[jobs] = tasks;
        tasks += ceil_div(next.context, SPAN);
        job[jobs++] = next;
      }
      first_task[jobs] = tasks;
      float* logits = scratch<float>(SHARED_ROWS, used + 1);
      parallel(tasks, [&](int64_t task) {
        const int64_t j = std::upper_bound(first_task, first_task + jobs + 1, task) - first_task - 1;
        const int64_t from = (task - first_task[j]) * SPAN;
        score(job[j], from, std::min(from + SPAN, job[j].context), logits);
      });
      parallel(jobs, [&](int64_t j) {
        for (int64_t t = 0; t < job[j].count; t++)
          pick(job[j].request, job[j].first + t, logits + job[j].logits + t * job[j].context);
      });
    }
  }
};

template <class T>
void select_slots(int form, const void* q, int64_t q_token, int64_t q_head, const float* weights, const void* cache,
                  int64_t row, const Queries& queries, int64_t heads, int64_t width, int64_t top_k, int64_t budget,
                  int32_t* out, int64_t out_row) {
  Index<T>{form, static_cast<const T*>(q), q_token, q_head, weights, cache, row, queries, heads, width, top_k, out,
           out_row}
      .run(budget);
}

}  // namespace
}  // namespace moe

// q [T, H, width], weights [T, H] -> out [T, out_row]: slots by ascending position, then -1. `budget`: floats of scores.
API void moe_index_select(int is_bf16, int form, const void* q, int64_t q_token, int64_t q_head, const float* weights,
                          const void* cache, int64_t row, const moe::Queries* queries, int64_t heads, int64_t width,
                          int64_t top_k, int64_t budget, int32_t* out, int64_t out_row) {
  const auto run = is_bf16 ? moe::select_slots<moe::bf16> : moe::select_slots<float>;
  run(form, q, q_token, q_head, weights, cache, row, *queries, heads, width, top_k, budget, out, out_row);
}
