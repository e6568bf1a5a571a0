// Weighted selection without sorting: the largest of many weighted values that together reach a weight.
//
// The answer is a *limit*: all values above it are selected, and a count of the values equal to it.
// Sums: 16 lanes of at most 16 floats, then double.
#pragma once

#include <limits>

#include "vec.h"

namespace moe {

constexpr int64_t BLOCK = 16 * LANES;
constexpr int64_t EVERY = std::numeric_limits<int64_t>::max();

struct Limit {
  float value;
  int64_t ties;
};
constexpr Limit NONE = {-INFINITY, EVERY};

inline Limit tighter(const Limit& a, const Limit& b) {
  if (a.value == b.value) return {a.value, std::min(a.ties, b.ties)};
  return a.value > b.value ? a : b;
}

// Values and their weights; null weights mean 1 each.
struct Values {
  const float *x, *weights;
  int64_t n;
};

namespace {

constexpr int64_t SAMPLE = 64;  // vectors
constexpr int64_t FEW = 48;     // up to this many values are sorted
constexpr int BUCKETS = 256;

// ---- vectors ----

// Bit i is set if a >= b in lane i.
INLINE uint32_t reached(const F16& a, const F16& b) {
#if defined(MOE_AVX512)
  return _mm512_cmp_ps_mask((__m512)a.v[0], (__m512)b.v[0], _CMP_GE_OQ);
#else
  uint32_t bits = 0;
  PARTS_LOOP {
    const vi mask = (vi)(a.v[i] >= b.v[i]);
#if defined(__AVX2__) && defined(__FMA__)
    bits |= uint32_t(_mm256_movemask_ps((__m256)mask)) << (i * WIDTH);
#else
    for (int j = 0; j < WIDTH; j++) bits |= uint32_t(mask[j] & 1) << (i * WIDTH + j);
#endif
  }
  return bits;
#endif
}

// w where x >= bar, else 0.
INLINE F16 where_reached(const F16& x, const F16& bar, const F16& w) {
  F16 r;
  PARTS_LOOP r.v[i] = (vf)((vi)w.v[i] & (vi)(x.v[i] >= bar.v[i]));
  return r;
}

// Sixteen of n values from i on; lanes past the end hold `missing`.
INLINE F16 padded(const float* x, int64_t i, int64_t n, float missing) {
  if (i + LANES <= n) return load(x + i);
  float lane[LANES];
  for (int l = 0; l < LANES; l++) lane[l] = i + l < n ? x[i + l] : missing;
  return load(lane);
}
INLINE F16 logits_at(const float* x, int64_t i, int64_t n) { return padded(x, i, n, -INFINITY); }
INLINE F16 weights_at(const float* weights, int64_t i, int64_t n) {
  constexpr float ones[LANES] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};
  return weights ? load_some(weights + i, n - i) : i + LANES <= n ? set1(1.f) : load_some(ones, n - i);
}

// Stores the lanes selected by `bits` contiguously, followed by unspecified values, sixteen in all.
INLINE void compress(const F16& x, uint32_t bits, float* out) {
#if defined(MOE_AVX512)
  _mm512_storeu_ps(out, _mm512_maskz_compress_ps(__mmask16(bits), (__m512)x.v[0]));
#else
  float lane[LANES];
  store(lane, x);
  for (; bits; bits &= bits - 1) *out++ = lane[__builtin_ctz(bits)];
#endif
}

INLINE float next_above(float x) { return std::nextafter(x, INFINITY); }

double sum_of(const float* x, int64_t n) {
  double total = 0;
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    F16 part = zero();
    for (int64_t i = begin; i < std::min(begin + BLOCK, n); i += LANES) part = part + load_some(x + i, n - i);
    total += sum(part);
  }
  return total;
}

// ---- selection ----

// Compacts the values in [from, to] and their weights to the front of out (which has room for one vector more), and
// sums the weights of the values above. Returns their number.
int64_t gather(const Values& values, float from, float to, float* out, float* out_weights, double* above) {
  const F16 low = set1(from), high = set1(to), beyond = set1(next_above(to));
  const int64_t n = values.n;
  int64_t held = 0;
  *above = 0;
  for (int64_t begin = 0; begin < n; begin += BLOCK) {
    F16 heavier = zero();
    for (int64_t i = begin; i < std::min(begin + BLOCK, n); i += LANES) {
      const F16 v = logits_at(values.x, i, n), w = weights_at(values.weights, i, n);
      heavier = heavier + where_reached(v, beyond, w);
      uint32_t bits = reached(v, low) & reached(high, v);
      if (i + LANES > n) bits &= (1u << (n - i)) - 1;
      compress(v, bits, out + held);
      compress(w, bits, out_weights + held);
      held += __builtin_popcount(bits);
    }
    *above += sum(heavier);
  }
  return held;
}

Limit select_by_sorting(const Values& given, double need) {
  struct Value {
    float x, weight;
  };
  const int64_t n = given.n;
  Value* values = scratch<Value>(KEYS, n);
  for (int64_t i = 0; i < n; i++) values[i] = {given.x[i], given.weights ? given.weights[i] : 1.f};
  std::sort(values, values + n, [](const Value& a, const Value& b) { return a.x > b.x; });
  int64_t last = 0;
  for (double have = values[0].weight; have < need && last + 1 < n; have += values[last].weight) last++;
  const float value = values[last].x;
  if (last + 1 == n || values[last + 1].x < value) return {value, EVERY};
  int64_t ties = 0;
  for (; last >= 0 && values[last].x == value; last--) ties++;
  return {value, ties};
}

struct Span {
  float from, to;
};

// Probable location of the limit, from a sample of the values: its bucket, widened by the sampling error.
// `left_out` is the weight of all values minus the weight to reach.
Span guess(const Values& values, double left_out, float floor) {
  const float* x = values.x;
  const int64_t vectors = values.n / LANES, stride = std::max<int64_t>(vectors / SAMPLE, 1);
  F16 highest = set1(-INFINITY), negated = set1(-INFINITY);
  for (int64_t i = 0; i < vectors; i += stride) {
    const F16 v = load(x + i * LANES);
    highest = max(highest, v);
    negated = max(negated, zero() - v);
  }
  float highs[LANES], lows[LANES];
  store(highs, highest), store(lows, negated);
  const float high = *std::max_element(highs, highs + LANES);
  const float low = std::max(-*std::max_element(lows, lows + LANES), floor);
  if (!(low < high)) return {std::max(low, high), std::max(low, high)};

  float bucket_weights[BUCKETS] = {};
  int32_t counts[BUCKETS] = {}, seen = 0;
  const float width = (high - low) / BUCKETS, scale = 1.f / width;
  for (int64_t i = 0; i < vectors; i += stride, seen += LANES) {
    const F16 place = (set1(high) - load(x + i * LANES)) * set1(scale);
    uint32_t buckets[LANES];
    float lane[LANES];
    PARTS_LOOP {
      const vi whole = __builtin_convertvector(place.v[i], vi);
      std::memcpy(buckets + i * WIDTH, &whole, sizeof whole);
    }
    store(lane, weights_at(values.weights, i * LANES, values.n));
    for (int l = 0; l < LANES; l++) {
      const uint32_t bucket = std::min<uint32_t>(buckets[l], BUCKETS - 1);
      bucket_weights[bucket] += lane[l];
      counts[bucket]++;
    }
  }
  // From below: there are many light values, so the sample represents them; it may miss all of the few heavy ones.
  const double wanted = left_out * double(seen) / double(values.n);
  int32_t below = 0;
  int first = BUCKETS - 1;
  for (double have = 0; first > 0 && (have += bucket_weights[first]) < wanted; first--) below += counts[first];
  int last = first;
  if (stride > 1) {
    const int32_t above = seen - below - counts[first];
    const float apart = 4 + 2 * std::sqrt(float(std::max(std::min(above, below), 0)));
    for (int32_t passed = 0; first > 0 && passed < apart; passed += counts[first]) first--;
    for (int32_t passed = 0; last < BUCKETS - 1 && passed < apart; passed += counts[last]) last++;
  }
  const float from = high - float(last + 1) * width, to = high - float(first) * width;
  return {last == BUCKETS - 1 ? -INFINITY : from, first == 0 ? INFINITY : to};
}

// The limit of the smallest set of largest values whose weight reaches `need`; all values together weigh `total`.
// Values below `floor` weigh nothing.
//
// Floyd and Rivest's selection (1975), by weight: a sample proposes a span, exact sums decide whether the limit lies
// above, in or below it, and the search continues among those values alone.
Limit select(Values values, double need, double total, float floor) {
  const int64_t room = values.n + LANES;
  float *kept = scratch<float>(VALUES, 2 * room), *next_kept = kept + room;
  float *weights = scratch<float>(WEIGHTS, 2 * room), *next_weights = weights + room;
  for (int64_t before = 0; values.n > FEW && values.n != before;) {
    const Span span = guess(values, total - need, floor);
    double heavier, ignored;
    int64_t held = gather(values, span.from, span.to, kept, weights, &heavier);
    const double within = sum_of(weights, held);
    if (need <= heavier) {
      held = gather(values, next_above(span.to), INFINITY, kept, weights, &ignored);
      total = heavier;
    } else if (need <= heavier + within) {
      need -= heavier, total = within;
      if (span.from == span.to) {
        const int64_t ties = std::max<int64_t>(int64_t(std::ceil(need / weights[0])), 1);
        return {span.to, ties < held ? ties : EVERY};
      }
    } else {
      if (span.from <= floor) return NONE;
      held = gather(values, -INFINITY, std::nextafter(span.from, -INFINITY), kept, weights, &ignored);
      need -= heavier + within, total -= heavier + within;
    }
    before = values.n;
    values = {kept, weights, held};
    std::swap(kept, next_kept), std::swap(weights, next_weights);
  }
  return values.n ? select_by_sorting(values, need) : NONE;
}

}  // namespace
}  // namespace moe
