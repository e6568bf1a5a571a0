// Residual streams between two parts of a layer (kernels/ops/streams.py).
//
// Legend: T tokens, D hidden, n streams, N numbers of a token. A row of the residual has n D values, then n weights of
// the next result, then the n x n matrix of the streams; with late sums n weights of the sum that is read next.
#include "api.h"
#include "vec.h"

namespace moe {

struct Streams {
  int64_t tokens, width, count, numbers, iterations, late;  // width: D
  const float *fn, *base, *scale;                     // [N, n D], [N], [N]
  float* parts;  // scratch [T, D / CHUNK, part()]: products, the sum of squares, weights of a late sum
  float eps, floor;

  int64_t part() const { return numbers + 1 + (late ? count : 0); }
};

namespace {

constexpr int64_t CHUNK = 1024;  // channels of a task; results depend on it, not on the number of threads
constexpr int MOST = 8, MOST_NUMBERS = MOST * (2 + MOST);

// Adds x [w] to the streams' channels from `first` on.
template <class T>
void write(const Streams& s, const T* x, T* row, int64_t first, int64_t w) {
  const int n = int(s.count);
  const T *written = row + n * s.width, *mixed = written + n;
  float to[MOST], among[MOST][MOST];
  for (int j = 0; j < n; j++) {
    to[j] = to_float(written[j]);
    for (int i = 0; i < n; i++) among[i][j] = to_float(mixed[i * n + j]);
  }
  for (int64_t d = 0; d < w; d += LANES) {
    const F16 result = load_some(x + first + d, w - d);
    F16 old[MOST];
    for (int i = 0; i < n; i++) old[i] = load_some(row + i * s.width + first + d, w - d);
    for (int j = 0; j < n; j++) {
      F16 sum = set1(to[j]) * result;
      for (int i = 0; i < n; i++) sum = fma(set1(among[i][j]), old[i], sum);
      store_some(row + j * s.width + first + d, sum, w - d);
    }
  }
}

// out[r] = streams . fn[r] over these channels for rows [r, r + ROWS).
template <int ROWS, class T>
void products(const Streams& s, const T* row, int64_t first, int64_t w, int64_t r, float* out) {
  F16 sums[ROWS];
  for (int k = 0; k < ROWS; k++) sums[k] = zero();
  for (int64_t i = 0; i < s.count; i++) {
    const int64_t at = i * s.width + first;
    const float* fn = s.fn + r * s.count * s.width + at;
    for (int64_t d = 0; d < w; d += LANES) {
      const F16 v = load_some(row + at + d, w - d);
      for (int k = 0; k < ROWS; k++)
        sums[k] = fma(v, load_some(fn + k * s.count * s.width + d, w - d), sums[k]);
    }
  }
  for (int k = 0; k < ROWS; k++) out[r + k] = sum(sums[k]);
}

template <class T>
float squares(const Streams& s, const T* row, int64_t first, int64_t w) {
  F16 total = zero();
  for (int64_t i = 0; i < s.count; i++)
    for (int64_t d = 0; d < w; d += LANES) {
      const F16 v = load_some(row + i * s.width + first + d, w - d);
      total = fma(v, v, total);
    }
  return sum(total);
}

float sigmoid(float x) { return 1.f / (1.f + std::exp(-x)); }

void doubly_stochastic(const Streams& s, float* matrix) {
  const int n = int(s.count);
  for (int i = 0; i < n; i++) {
    float *row = matrix + i * n, top = row[0], total = 0;
    for (int j = 1; j < n; j++) top = std::max(top, row[j]);
    for (int j = 0; j < n; j++) total += row[j] = std::exp(row[j] - top);
    for (int j = 0; j < n; j++) row[j] = row[j] / total + s.floor;
  }
  const auto divide = [&](int along, int across) {
    for (int i = 0; i < n; i++) {
      float total = s.floor;
      for (int j = 0; j < n; j++) total += matrix[i * across + j * along];
      for (int j = 0; j < n; j++) matrix[i * across + j * along] /= total;
    }
  };
  divide(n, 1);
  for (int64_t k = 1; k < s.iterations; k++) divide(1, n), divide(n, 1);
}

// The numbers of a token from its parts.
void numbers_of(const Streams& s, const float* parts, int64_t chunks, float* out) {
  const int64_t N = s.numbers;
  float total = 0;
  for (int64_t c = 0; c < chunks; c++) total += parts[c * s.part() + N];
  const float norm = 1.f / std::sqrt(total / float(s.count * s.width) + s.eps);
  for (int64_t r = 0; r < N; r++) {
    float product = 0;
    for (int64_t c = 0; c < chunks; c++) product += parts[c * s.part() + r];
    out[r] = product * norm * s.scale[r] + s.base[r];
  }
}

template <class T>
void mix(const Streams& s, const T* x, int64_t ldx, T* residual, int64_t ldr, T* out) {
  const int64_t chunks = ceil_div(s.width, CHUNK), N = s.numbers;
  const int n = int(s.count);
  parallel(s.tokens * chunks, [&](int64_t task) {
    const int64_t t = task / chunks, first = task % chunks * CHUNK, w = std::min(CHUNK, s.width - first);
    T* row = residual + t * ldr;
    float* parts = s.parts + task * s.part();
    if (x) write(s, x + t * ldx, row, first, w);
    int64_t r = 0;
    for (; r + 8 <= N; r += 8) products<8>(s, row, first, w, r, parts);
    for (; r < N; r++) products<1>(s, row, first, w, r, parts);
    parts[N] = N ? squares(s, row, first, w) : 0;
    if (s.late)
      for (int i = 0; i < n; i++) parts[N + 1 + i] = to_float(row[n * s.width + n + n * n + i]);
  });
  parallel(s.tokens * chunks, [&](int64_t task) {
    const int64_t t = task / chunks, first = task % chunks * CHUNK, w = std::min(CHUNK, s.width - first);
    T* row = residual + t * ldr;
    float numbers[MOST_NUMBERS];
    numbers_of(s, s.parts + t * chunks * s.part(), chunks, numbers);
    const float* before = s.parts + task * s.part() + N + 1;
    F16 read[MOST];
    for (int i = 0; i < n; i++)
      read[i] = set1(s.late ? before[i] : N ? sigmoid(numbers[i]) + s.floor : 1.f / float(n));
    for (int64_t d = 0; d < w; d += LANES) {
      F16 total = zero();
      for (int i = 0; i < n; i++) total = fma(read[i], load_some(row + i * s.width + first + d, w - d), total);
      store_some(out + t * s.width + first + d, total, w - d);
    }
    if (first || N <= n) return;
    T* weights = row + n * s.width;
    if (s.late)
      for (int i = 0; i < n; i++) assign(weights[n + n * n + i], sigmoid(numbers[i]) + s.floor);
    doubly_stochastic(s, numbers + 2 * n);
    for (int i = 0; i < n; i++) assign(weights[i], 2.f * sigmoid(numbers[n + i]));
    for (int i = 0; i < n * n; i++) assign(weights[n + i], numbers[2 * n + i]);
  });
}

}  // namespace
}  // namespace moe

API void moe_mix_streams(int is_bf16, const moe::Streams* streams, const void* x, int64_t ldx, void* residual,
                         int64_t ldr, void* out) {
  using namespace moe;
  if (is_bf16)
    mix(*streams, static_cast<const bf16*>(x), ldx, static_cast<bf16*>(residual), ldr, static_cast<bf16*>(out));
  else
    mix(*streams, static_cast<const float*>(x), ldx, static_cast<float*>(residual), ldr, static_cast<float*>(out));
}
