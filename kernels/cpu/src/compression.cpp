// Compressed entries of a KV cache (kernels/compression/protocol.py): a task is a window that a token completes.
//
// Legend: W channels of an entry, S series. A row of projections has S W values, then S W gates.
#include "api.h"
#include "rows.h"

namespace moe {

struct Compression {
  int64_t tokens, rate, series, width, rotary, table_row, interleaved;
  int64_t each, block;       // of the kept rows: protocol.py
  const int64_t* positions;  // [T]
  const int64_t* starts;     // [T]
  const int32_t* rows;       // [T]
  const int32_t* table;      // table[rows[t] * table_row + position]: slot
  const int64_t* slots;      // [T]
  const float* bias;         // [rate, S W]
  const float* norm;         // [W]
  const float* angles;       // [positions, R]
  float eps;
};

namespace {

// N vectors of channels of an entry: the softmax over the gates of `count` tokens weighs their values. The last vector
// has `last` channels.
template <int N, class T>
INLINE void sum_tokens(const T* const* values, const T* const* gates, const float* const* biases, int64_t count,
                       int64_t last, float* out) {
  const auto at = [&](const auto* p, int i) { return i + 1 == N ? load_some(p + i * LANES, last) : load(p + i * LANES); };
  F16 top[N], total[N], mixed[N];
  for (int i = 0; i < N; i++) top[i] = set1(-INFINITY), total[i] = mixed[i] = zero();
  for (int64_t k = 0; k < count; k++)
    for (int i = 0; i < N; i++) top[i] = max(top[i], at(gates[k], i) + at(biases[k], i));
  for (int64_t k = 0; k < count; k++)
    for (int i = 0; i < N; i++) {
      const F16 weight = exp(at(gates[k], i) + at(biases[k], i) - top[i]);
      total[i] = total[i] + weight;
      mixed[i] = fma(weight, at(values[k], i), mixed[i]);
    }
  for (int i = 0; i < N; i++) store_some(out + i * LANES, mixed[i] / total[i], i + 1 == N ? last : LANES);
}

// Rows of projections, `row` numbers apart: of the step's tokens, and those that are kept.
template <class T>
struct Projections {
  const T* rows;
  int64_t row;
};

// The kept row of a request's token at position p.
int64_t kept_row(const Compression& c, int64_t request, int64_t p) {
  if (!c.block) return (request + 1) * c.each + p % c.each;
  const int64_t slot = c.table[request * c.table_row + p];
  return slot / c.block * c.each + slot % c.block % c.each;
}

template <class T>
void entry_of(const Compression& c, int64_t token, Projections<T> own, Projections<T> kept, T* out) {
  const int64_t end = c.positions[token] + 1, most = c.series * c.rate, channels = c.series * c.width;
  const int64_t begin = std::max<int64_t>(end - most, 0);  // window 0 has none before
  const T** values = scratch<const T*>(ROWS, 2 * most);
  const T** gates = values + most;
  const float** biases = scratch<const float*>(KEYS, most);
  for (int64_t p = begin; p < end; p++) {
    const int64_t series = c.series - 1 - (end - 1 - p) / c.rate, first = series * c.width;
    values[p - begin] = first + (p < c.starts[token] ? kept.rows + kept_row(c, c.rows[token], p) * kept.row
                                                     : own.rows + (token - (end - 1 - p)) * own.row);
    gates[p - begin] = values[p - begin] + channels;
    biases[p - begin] = c.bias + p % c.rate * channels + first;
  }
  float* entry = scratch<float>(VALUES, c.width);
  const int64_t count = end - begin;
  constexpr int N = 4;
  for (int64_t w = 0; w < c.width;) {
    const int64_t left = c.width - w;
    if (left >= N * LANES) {
      sum_tokens<N>(values, gates, biases, count, LANES, entry + w);
    } else {
      sum_tokens<1>(values, gates, biases, count, std::min<int64_t>(left, LANES), entry + w);
    }
    const int64_t step = left >= N * LANES ? N * LANES : LANES;
    for (int64_t k = 0; k < count; k++) values[k] += step, gates[k] += step, biases[k] += step;
    w += step;
  }
  const F16 scale = set1(root_mean_square(entry, c.width, c.eps));
  for (int64_t w = 0; w < c.width; w += LANES)
    store_some(entry + w, load_some(entry + w, c.width - w) * scale * load_some(c.norm + w, c.width - w), c.width - w);
  float* turned = entry + c.width - c.rotary;
  rotate_row(turned, turned, c.angles + (end - c.rate) * c.rotary, c.rotary, c.interleaved != 0);
  for (int64_t w = 0; w < c.width; w += LANES) store_some(out + w, load_some(entry + w, c.width - w), c.width - w);
}

}  // namespace
}  // namespace moe

API void moe_compress(int is_bf16, const moe::Compression* compression, const void* projected, int64_t row,
                      const void* kept, int64_t kept_row, void* out, int64_t out_row) {
  using namespace moe;
  const Compression& c = *compression;
  int64_t* last = scratch<int64_t>(SHARED_INDEX, c.tokens + 1);
  int64_t count = 0;
  for (int64_t t = 0; t < c.tokens; t++) {
    last[count] = t;
    count += (c.positions[t] + 1) % c.rate == 0;
  }
  parallel(count, [&](int64_t task) {
    const int64_t token = last[task], to = c.slots[token] / c.rate * out_row;
    const auto run = [&](auto* target) {
      using T = std::remove_pointer_t<decltype(target)>;
      const Projections<T> own{static_cast<const T*>(projected), row}, before{static_cast<const T*>(kept), kept_row};
      entry_of(c, token, own, before, target + to);
    };
    is_bf16 ? run(static_cast<bf16*>(out)) : run(static_cast<float*>(out));
  });
}
