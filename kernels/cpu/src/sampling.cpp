// Sampling: logits to tokens. The candidates of a row are filtered, then its uniform number picks one of them.
//
// The candidates are given by a limit (select.h) on the logits; of tokens equal to the limit, the lowest ids are
// included. top_k and top_p set the limit, min_p raises it. The weights within the limit are summed by block, and the
// uniform number is located in the blocks, then in one block's tokens, in vocabulary order.
//
// The row is read from memory once, by `survey`; later passes read it from the core's cache.
//
// Legend: V vocabulary; weight e^((x - best) / temperature).
#include "select.h"

namespace moe {
namespace {

constexpr int64_t INVALID = -1;
constexpr float NOTHING = 88.f;  // e^-88 rounds to weight 0

// ---- first pass ----

// The largest of x [n], or NaN if any is NaN. peaks[16 b + l] becomes the largest of lane l in block b.
float survey(const float* x, int64_t n, float* peaks) {
  vu bits[PARTS] = {};  // sign cleared: NaN compares above infinity
  F16 best = set1(-INFINITY);
  for (int64_t begin = 0; begin < n; begin += BLOCK, peaks += LANES) {
    F16 top[2] = {set1(-INFINITY), set1(-INFINITY)};
    auto look = [&](const F16& v, int chain) __attribute__((always_inline)) {
      top[chain] = max(v, top[chain]);
      PARTS_LOOP {
        const vu magnitude = (vu)v.v[i] << 1;
        bits[i] = magnitude > bits[i] ? magnitude : bits[i];
      }
    };
    if (begin + BLOCK <= n) {
#pragma GCC unroll 8
      for (int64_t i = 0; i < BLOCK; i += 2 * LANES) {
        look(load(x + begin + i), 0);
        look(load(x + begin + i + LANES), 1);
      }
    } else {
      for (int64_t i = begin; i < n; i += LANES) look(logits_at(x, i, n), 0);
    }
    top[0] = max(top[0], top[1]);
    store(peaks, top[0]);
    best = max(best, top[0]);
  }
  uint32_t magnitudes[LANES];
  float lanes[LANES];
  std::memcpy(magnitudes, bits, sizeof bits);
  store(lanes, best);
  if (*std::max_element(magnitudes, magnitudes + LANES) > 0xff000000u) return NAN;
  return *std::max_element(lanes, lanes + LANES);
}

// The lowest id of `best`, the maximum of x.
int64_t first_of(const float* x, const float* peaks, float best) {
  int64_t block = 0;
  while (!reached(load(peaks + block * LANES), set1(best))) block++;
  int64_t i = block * BLOCK;
  while (x[i] != best) i++;
  return i;
}

// ---- a row ----

struct Parameters {
  float temperature, top_p, min_p;  // temperature 0: greedy
  int64_t top_k;
};

// Sampling state of one row. Only constructed for rows whose best logit is finite.
class Choice {
 public:
  Choice(const float* x, int64_t n, const float* peaks, float best, const Parameters& p)
      : x_(x), n_(n), peaks_(peaks), best_(best), cooling_(float(1.4426950408889634 / p.temperature)) {
    const Limit limit = limit_of(p);
    value_ = limit.value, next_ = next_above(limit.value), end_ = end_of_ties(limit);
    blocks_ = ceil_div(n, BLOCK);
    sums_ = scratch<float>(OUTPUT, blocks_);
    for (int64_t b = 0; b < blocks_; b++) {
      sums_[b] = holds_any(b, value_) ? block_sum(b) : 0.f;
      total_ += sums_[b];
    }
  }

  int64_t draw(float uniform) const {
    const double target = uniform * total_;  // below the total: uniform has 24 bits
    double passed = 0;
    int64_t b = 0;
    for (; b + 1 < blocks_ && passed + sums_[b] <= target; b++) passed += sums_[b];
    int64_t token = INVALID;
    for (int64_t i = b * BLOCK; i < std::min((b + 1) * BLOCK, n_); i += LANES) {
      float lane[LANES];
      store(lane, kept(i));
      for (int l = 0; l < LANES; l++) {
        if (lane[l] == 0) continue;
        token = i + l;
        if ((passed += lane[l]) > target) return token;
      }
    }
    return token;
  }

  float probability(int64_t token) const {
    if (token < 0 || token >= n_) return 0;
    float lane[LANES];
    store(lane, kept(token / LANES * LANES));
    return float(lane[token % LANES] / total_);
  }

 private:
  F16 computed(const F16& logits) const { return exp2((logits - set1(best_)) * set1(cooling_)); }

  F16 weight(int64_t i) const {
    return weights_ ? load_some(weights_ + i, n_ - i) : computed(logits_at(x_, i, n_));
  }

  bool holds_any(int64_t block, float value) const { return reached(load(peaks_ + block * LANES), set1(value)); }

  // The weights of sixteen tokens, 0 outside the limit.
  INLINE F16 kept(int64_t i) const {
    F16 bar = set1(i < end_ ? value_ : next_);
    if (i < end_ && end_ < i + LANES) {
      float lane[LANES];
      for (int l = 0; l < LANES; l++) lane[l] = i + l < end_ ? value_ : next_;
      bar = load(lane);
    }
    return where_reached(logits_at(x_, i, n_), bar, weight(i));
  }

  float block_sum(int64_t block) const {
    F16 total = zero();
    const int64_t begin = block * BLOCK, end = std::min(begin + BLOCK, n_);
    for (int64_t i = begin; i < end; i += LANES) total = total + kept(i);
    return sum(total);
  }

  // Computes the weights of values and returns their sum.
  double weigh(const Values& values, float* out) const {
    const int64_t n = values.n;
    double total = 0;
    for (int64_t begin = 0; begin < n; begin += BLOCK) {
      F16 part = zero();
      for (int64_t i = begin; i < std::min(begin + BLOCK, n); i += LANES) {
        const F16 w = computed(logits_at(values.x, i, n));
        store_some(out + i, w, n - i);
        part = part + w;
      }
      total += sum(part);
    }
    return total;
  }

  Limit limit_of(const Parameters& p) {
    const float floor = best_ - NOTHING * p.temperature;
    Limit limit = NONE;
    Values values = {x_, nullptr, n_};
    if (p.top_k < n_) {
      limit = select(values, double(p.top_k), double(n_), floor);
      if (p.top_p < 1) values = within(limit, floor);
    }
    if (p.top_p < 1) {
      float* weights = scratch<float>(SCORES, values.n);
      const double total = weigh(values, weights);
      values.weights = weights;
      if (values.x == x_) weights_ = weights;
      limit = tighter(limit, select(values, double(p.top_p) * total, total, floor));
    }
    if (p.min_p > 0) {
      const double exact = double(best_) + double(p.temperature) * std::log(double(p.min_p));
      const float lowest = float(exact) < exact ? next_above(float(exact)) : float(exact);
      limit = tighter(limit, {lowest, EVERY});
    }
    return limit;
  }

  // The logits within a limit and of non-zero weight, unordered.
  Values within(const Limit& limit, float floor) const {
    float *held = scratch<float>(PRODUCT, 2 * (n_ + LANES)), *ones = held + n_ + LANES;
    const float from = std::max(limit.ties == EVERY ? limit.value : next_above(limit.value), floor);
    double above;
    int64_t n = gather({x_, nullptr, n_}, from, INFINITY, held, ones, &above);
    for (int64_t i = 0; limit.ties != EVERY && i < limit.ties; i++) held[n++] = limit.value;
    return {held, nullptr, n};
  }

  // End of the token ids that are within the limit among those equal to it.
  int64_t end_of_ties(Limit limit) const {
    if (limit.ties == EVERY) return n_;
    for (int64_t begin = 0, b = 0; begin < n_; begin += BLOCK, b++) {
      if (!holds_any(b, limit.value)) continue;
      for (int64_t i = begin; i < std::min(begin + BLOCK, n_); i += LANES) {
        const F16 v = logits_at(x_, i, n_), value = set1(limit.value);
        for (uint32_t bits = reached(v, value) & reached(value, v); bits; bits &= bits - 1)
          if (--limit.ties == 0) return i + __builtin_ctz(bits) + 1;
      }
    }
    return n_;
  }

  const float* x_;
  int64_t n_;
  const float* peaks_;
  float best_, cooling_;
  const float* weights_ = nullptr;  // of the whole row, if already computed
  float value_, next_;
  int64_t end_, blocks_;
  float* sums_;
  double total_ = 0;
};

// Calls body(row, x, peaks, best) for every row of logits [rows, V].
template <class Body>
void each_row(const float* logits, int64_t ld, int64_t rows, int64_t vocab, double cost, const Body& body) {
  parallel_ranges(rows, double(vocab) * cost, [&](int64_t from, int64_t to) {
    float* peaks = scratch<float>(STATS, ceil_div(vocab, BLOCK) * LANES);
    for (int64_t r = from; r < to; r++) {
      const float* x = logits + r * ld;
      body(r, x, peaks, survey(x, vocab, peaks));
    }
  });
}

}  // namespace
}  // namespace moe

using namespace moe;

API void moe_greedy(const float* logits, int64_t ld, int64_t rows, int64_t vocab, int64_t* tokens) {
  each_row(logits, ld, rows, vocab, 0.1, [&](int64_t r, const float* x, const float* peaks, float best) {
    tokens[r] = std::isfinite(best) ? first_of(x, peaks, best) : INVALID;
  });
}

API void moe_sample(const float* logits, int64_t ld, int64_t rows, int64_t vocab, const float* temperature,
                    const int64_t* top_k, const float* top_p, const float* min_p, const float* uniform,
                    int64_t* tokens) {
  each_row(logits, ld, rows, vocab, 0.5, [&](int64_t r, const float* x, const float* peaks, float best) {
    const Parameters p = {temperature[r], top_p[r], min_p[r], top_k[r]};
    if (!std::isfinite(best))
      tokens[r] = INVALID;
    else if (p.temperature == 0)
      tokens[r] = first_of(x, peaks, best);
    else
      tokens[r] = Choice(x, vocab, peaks, best, p).draw(uniform[r]);
  });
}

// out[r][j]: the probability that moe_sample draws tokens[r][j] in row r.
API void moe_probabilities(const float* logits, int64_t ld, int64_t rows, int64_t vocab, const float* temperature,
                           const int64_t* top_k, const float* top_p, const float* min_p, const int64_t* tokens,
                           int64_t per_row, float* out) {
  each_row(logits, ld, rows, vocab, 0.5, [&](int64_t r, const float* x, const float* peaks, float best) {
    const Parameters p = {temperature[r], top_p[r], min_p[r], top_k[r]};
    const int64_t* wanted = tokens + r * per_row;
    float* found = out + r * per_row;
    if (!std::isfinite(best)) {
      std::fill(found, found + per_row, 0.f);
    } else if (p.temperature == 0) {
      const int64_t token = first_of(x, peaks, best);
      for (int64_t j = 0; j < per_row; j++) found[j] = wanted[j] == token;
    } else {
      const Choice choice(x, vocab, peaks, best, p);
      for (int64_t j = 0; j < per_row; j++) found[j] = choice.probability(wanted[j]);
    }
  });
}
