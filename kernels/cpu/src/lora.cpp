// LoRA products of a step with several adapters: y[t] += x[t] A[s].T B[s], s the adapter slot of token t.
// Each sum over K, and over the ranks, has one order for every batch: results do not depend on the other tokens.
#include "vec.h"

namespace moe {

struct LoraStrides {
  int64_t x_token, x_head, y_token, y_head, a_slot, a_head, b_slot, b_head;
};

constexpr int64_t LORA_ROWS = 4;        // tokens and ranks of a register tile
constexpr int64_t LORA_TOKENS = 32;     // tokens of a task
constexpr int64_t LORA_COLUMNS = 512;   // out-features of a task

// inner[i * ld + j] = x[rows[i]] . a[j] for i < m <= 4, j < n <= 4.
template <class T, int M, int N>
INLINE void dots(const T* const rows[LORA_ROWS], const T* a, int64_t k, float* inner, int64_t ld) {
  F16 total[M][N];
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) total[i][j] = zero();
  int64_t at = 0;
  for (; at + LANES <= k; at += LANES) {
    F16 w[N];
    for (int j = 0; j < N; j++) w[j] = load(a + j * k + at);
    for (int i = 0; i < M; i++) {
      const F16 x = load(rows[i] + at);
      for (int j = 0; j < N; j++) total[i][j] = fma(x, w[j], total[i][j]);
    }
  }
  if (at < k) {
    F16 w[N];
    for (int j = 0; j < N; j++) w[j] = load_some(a + j * k + at, k - at);
    for (int i = 0; i < M; i++) {
      const F16 x = load_some(rows[i] + at, k - at);
      for (int j = 0; j < N; j++) total[i][j] = fma(x, w[j], total[i][j]);
    }
  }
  for (int i = 0; i < M; i++)
    for (int j = 0; j < N; j++) inner[i * ld + j] = sum(total[i][j]);
}

template <class T, int M>
INLINE void dots_of(const T* const rows[LORA_ROWS], const T* a, int64_t k, int64_t ranks, float* inner) {
  int64_t j = 0;
  for (; j + LORA_ROWS <= ranks; j += LORA_ROWS) dots<T, M, 4>(rows, a + j * k, k, inner + j, ranks);
  for (; j < ranks; j++) dots<T, M, 1>(rows, a + j * k, k, inner + j, ranks);
}

template <class T>
static void shrink(const T* x, int64_t ldx, const int64_t* order, int64_t count, const T* a, int64_t k, int64_t ranks,
                   float* inner) {
  for (int64_t i = 0; i < count; i += LORA_ROWS) {
    const int64_t here = std::min(LORA_ROWS, count - i);
    const T* rows[LORA_ROWS];
    for (int64_t r = 0; r < here; r++) rows[r] = x + order[i + r] * ldx;
    float* out = inner + i * ranks;
    if (here == 4) dots_of<T, 4>(rows, a, k, ranks, out);
    else if (here == 3) dots_of<T, 3>(rows, a, k, ranks, out);
    else if (here == 2) dots_of<T, 2>(rows, a, k, ranks, out);
    else dots_of<T, 1>(rows, a, k, ranks, out);
  }
}

// y[order[i]][first..last) += inner[i] @ b[rank][n], rank by rank.
template <class T>
static void expand(T* y, int64_t ldy, const int64_t* order, int64_t count, const T* b, int64_t n, int64_t rank,
                   const float* inner, int64_t ld, int64_t first, int64_t last) {
  for (int64_t i = 0; i < count; i++) {
    T* row = y + order[i] * ldy;
    const float* u = inner + i * ld;
    int64_t j = first;
    for (; j + 4 * LANES <= last; j += 4 * LANES) {
      F16 total[4];
      for (int c = 0; c < 4; c++) total[c] = zero();
      for (int64_t r = 0; r < rank; r++) {
        const F16 factor = set1(u[r]);
        for (int c = 0; c < 4; c++) total[c] = fma(factor, load(b + r * n + j + c * LANES), total[c]);
      }
      for (int c = 0; c < 4; c++) store(row + j + c * LANES, load(row + j + c * LANES) + total[c]);
    }
    for (; j < last; j += LANES) {
      const int64_t here = last - j;
      F16 total = zero();
      for (int64_t r = 0; r < rank; r++) total = fma(set1(u[r]), load_some(b + r * n + j, here), total);
      store_some(row + j, load_some(row + j, here) + total, here);
    }
  }
}

struct LoraTask {
  int64_t slot, begin, end, head;
};

// Both phases over (run, tokens, head); the second also over columns. `columns`: parts + 1 column numbers.
template <class T>
static void lora(const T* x, const int64_t* order, const int64_t* runs, int64_t num_runs, int64_t heads, int64_t k,
                 const T* a, const T* b, int64_t rank, const int64_t* columns, int64_t parts, T* y,
                 const LoraStrides& s) {
  const int64_t ranks = parts * rank, n = columns[parts];
  int64_t num_tasks = 0, tokens = num_runs ? runs[3 * num_runs - 1] : 0;
  for (int64_t r = 0; r < num_runs; r++) num_tasks += ceil_div(runs[3 * r + 2] - runs[3 * r + 1], LORA_TOKENS) * heads;
  if (!num_tasks || n <= 0) return;
  LoraTask* tasks = scratch<LoraTask>(SHARED_INDEX, num_tasks);
  float* inner = scratch<float>(SHARED_HIDDEN, tokens * heads * ranks);
  int64_t made = 0;
  for (int64_t r = 0; r < num_runs; r++)
    for (int64_t begin = runs[3 * r + 1]; begin < runs[3 * r + 2]; begin += LORA_TOKENS)
      for (int64_t head = 0; head < heads; head++)
        tasks[made++] = {runs[3 * r], begin, std::min(begin + LORA_TOKENS, runs[3 * r + 2]), head};
  parallel_ranges(num_tasks, double(k) * double(ranks) * double(tokens * heads) / double(num_tasks) * 0.02,
                  [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const LoraTask& t = tasks[i];
      shrink(x + t.head * s.x_head, s.x_token, order + t.begin, t.end - t.begin, a + t.slot * s.a_slot + t.head * s.a_head,
             k, ranks, inner + (t.head * tokens + t.begin) * ranks);
    }
  });
  const int64_t blocks = ceil_div(n, LORA_COLUMNS);
  parallel_ranges(num_tasks * blocks, double(std::min(n, LORA_COLUMNS)) * double(rank) * double(tokens * heads) /
                                          double(num_tasks) * 0.02,
                  [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const LoraTask& t = tasks[i / blocks];
      const int64_t start = i % blocks * LORA_COLUMNS, stop = std::min(start + LORA_COLUMNS, n);
      const float* u = inner + (t.head * tokens + t.begin) * ranks;
      for (int64_t p = 0; p < parts; p++) {
        const int64_t first = std::max(start, columns[p]), last = std::min(stop, columns[p + 1]);
        if (first < last)
          expand(y + t.head * s.y_head, s.y_token, order + t.begin, t.end - t.begin,
                 b + t.slot * s.b_slot + t.head * s.b_head, n, rank, u + p * rank, ranks, first, last);
      }
    }
  });
}

}  // namespace moe

using namespace moe;

// x by token and head strides, A [slot][head][parts * rank][k], B [slot][head][rank][n]; a head stride of 0: shared.
API void moe_lora(int is_bf16, const void* x, const int64_t* order, const int64_t* runs, int64_t num_runs,
                  int64_t heads, int64_t k, const void* a, const void* b, int64_t rank, const int64_t* columns,
                  int64_t parts, void* y, const int64_t* strides) {
  const LoraStrides s{strides[0], strides[1], strides[2], strides[3], strides[4], strides[5], strides[6], strides[7]};
  if (is_bf16)
    lora(static_cast<const bf16*>(x), order, runs, num_runs, heads, k, static_cast<const bf16*>(a),
         static_cast<const bf16*>(b), rank, columns, parts, static_cast<bf16*>(y), s);
  else
    lora(static_cast<const float*>(x), order, runs, num_runs, heads, k, static_cast<const float*>(a),
         static_cast<const float*>(b), rank, columns, parts, static_cast<float*>(y), s);
}
