// Common to the indexers of sparse attention: products of index queries and index keys, rounds of jobs within a bound of
// memory, and the best of a token's scores.
//
// Keys are the panels (SIMD lanes), heads of tokens the rows of one product. A product depends on its token and key
// only.
#pragma once

#include "attention.h"
#include "fp8.h"
#include "gemm.h"

namespace moe {

constexpr int64_t AT_ONCE = 64, PRODUCT_ROWS = 512;

struct Job {
  int64_t request, first, count;  // query tokens [first, first + count) of the request
  int64_t scored, logits;         // most scores of a head, place of the first token's scores
};

// Index queries [T, H, width], and a cache of index keys.
template <class T>
struct IndexRows {
  int form;
  const T* q;
  int64_t q_token, q_head;
  const void* cache;
  int64_t row;  // elements, or bytes of records
  const Queries& queries;
  int64_t heads, width;

  int64_t before(int64_t r) const { return queries.contexts[r] - queries.tokens(r); }
  const int32_t* slots(int64_t r) const { return queries.slots + queries.rows[r] * queries.slots_row; }

  // Calls body(at, here, product, scales) for positions [at, at + here): products [tokens * heads][AT_ONCE], which are
  // to be multiplied by the keys' scales unless the form is PLAIN. No part crosses a multiple of `block`.
  template <class Body>
  void multiply(const Job& job, int64_t first, int64_t last, int64_t block, const Body& body) const {
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
    for (int64_t at = first, here = 0; at < last; at += here) {
      here = std::min({AT_ONCE, last - at, block - at % block});
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
      body(at, here, product, scales);
    }
  }
};

// Unsigned numbers in the order of floats; both zeros are equal. 0 is below all of them.
INLINE uint32_t ordered(float x) {
  x += 0.f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

// Calls take(i) for the `count` greatest of n keys, by ascending i; of equal keys the lower i. 0 < count <= n; `part` is
// memory for n.
template <class Take>
void take_best(const uint32_t* keys, uint32_t* part, int64_t n, int64_t count, const Take& take) {
  std::memcpy(part, keys, size_t(n) * sizeof(uint32_t));
  std::nth_element(part, part + count - 1, part + n, [](uint32_t a, uint32_t b) { return a > b; });
  const uint32_t bar = part[count - 1];
  int64_t ties = count;
  for (int64_t i = 0; i < n; i++) ties -= keys[i] > bar;
  for (int64_t i = 0; i < n; i++) {
    if (keys[i] < bar || (keys[i] == bar && ties == 0)) continue;
    ties -= keys[i] == bar;
    take(i);
  }
}

// All query tokens in rounds of jobs, whose scores fit into `budget` floats (one token's always do). `Index` has
// - scored(r, token): scores of the token that are needed, 0 if it selects without them; `lines`: rows of scores each
// - score(job, from, to, logits): sets scores [from, to) of the job's tokens; `span`: most of them
// - pick(r, token, logits): selects by the token's scores, `stride` apart for each of its lines.
template <class Index>
void run_jobs(const Index& index, const Queries& queries, int64_t per_job, int64_t budget) {
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
      while (token < queries.tokens(r) && next.count < per_job) {
        const int64_t own = index.scored(r, token), longest = std::max(next.scored, own);
        if (own > 0 && used > 0 && used + (next.count + 1) * index.lines * longest > budget) break;
        next.scored = longest, next.count++, token++;
      }
      if (!next.count) break;
      used += next.count * index.lines * next.scored;
      first_task[jobs] = tasks;
      tasks += ceil_div(next.scored, index.span);
      job[jobs++] = next;
    }
    first_task[jobs] = tasks;
    float* logits = scratch<float>(SHARED_ROWS, used + 1);
    parallel_products(tasks, [&](int64_t task) {
      const int64_t j = std::upper_bound(first_task, first_task + jobs + 1, task) - first_task - 1;
      const int64_t from = (task - first_task[j]) * index.span;
      index.score(job[j], from, std::min(from + index.span, job[j].scored), logits);
    });
    parallel(jobs, [&](int64_t j) {
      for (int64_t t = 0; t < job[j].count; t++)
        index.pick(job[j].request, job[j].first + t, logits + job[j].logits + t * index.lines * job[j].scored,
                   job[j].scored);
    });
  }
}

}  // namespace moe
