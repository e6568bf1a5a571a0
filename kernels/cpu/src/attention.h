// Attention over a context, blockwise with a running softmax: MLA absorbed and expanded, and GQA.
//
// Legend: T query tokens, R requests, H query heads, G key heads, C latent, P rotary, N/V expanded key/value width.
// A *column* is one (token, head) of a request that shares its keys with other columns: columns are the SIMD lanes. For
// a block of keys, scores [keys, columns] = keys x queries and out [columns, channels] += weights x values. So keys are
// read in their storage order, the softmax has no horizontal step, and 16 heads fill a panel.
//
// A column's arithmetic depends on its own position only (batch-invariant): blocks start at multiples of `block`, a
// fresh running softmax at multiples of SPLIT, and splits are merged in order. Splits may run on different threads.
//
// A unit of few columns (a GQA decode step) would leave most lanes empty: there the operands are swapped; keys become
// panels and the softmax lanes. Every chain of additions stays the same, and so do the bits.
#pragma once

#include "attention_keys.h"
#include "vec.h"

namespace moe {

constexpr int64_t PACKED_TOGETHER = 128 << 10;  // bytes
constexpr int64_t RESULTS_AHEAD = 8;  // columns whose memory is prefetched before they are stored

struct Queries {
  int64_t requests;
  const int32_t *rows, *starts, *contexts;  // starts [R + 1] count query tokens
  const int32_t* slots;                     // slots[row * slots_row + position]
  int64_t slots_row;
  const uint64_t* visible;  // per query token: mask of visible query tokens of its request; null: causal
  int64_t window;           // positions that a query token sees, its own included; 0: all; < 0: those of its chunk
  const int32_t* first;     // per request: the first position to attend to, a multiple of the block's; null: 0
  int64_t outside;          // 1: query tokens are not in the context and see all of it

  int64_t tokens(int64_t r) const { return starts[r + 1] - starts[r]; }

  // The first position that a query token at `position` sees, with a window.
  int64_t first_seen(int64_t position) const {
    return window < 0 ? position - position % -window : std::max<int64_t>(position - window + 1, 0);
  }
};

// Some columns of one request and one head group; `splits` of context, with partial results from `partial` on. Its
// columns see no position before `from`.
struct Unit {
  int64_t request, group, first, columns, splits, partial, from;
};

// The slots of `count` positions from `first` on. Positions before `u.from` repeat that position's slot: memory outside
// a sliding window is not read.
static INLINE const int32_t* unit_slots(const Queries& q, const Unit& u, int64_t first, int64_t count, int32_t* kept) {
  const int32_t* slots = q.slots + q.rows[u.request] * q.slots_row;
  if (first >= u.from) return slots + first;
  for (int64_t i = 0; i < count; i++) kept[i] = slots[std::max(first + i, u.from)];
  return kept;
}

// Query rows and results, by token and head.
template <class T>
struct Heads {
  const T* q;
  int64_t q_token, q_head;
  T* out;
  int64_t out_token, out_head;
  int64_t groups, group_heads;  // heads g * group_heads + [0, group_heads) share keys
  int64_t key_width, value_width;
  float scale;
  const float* sinks = nullptr;  // [H]: a logit of each head that takes part in the softmax, without a value
  float* sums = nullptr;         // [T, H], if not null: output of the log2-sum-exp of the scores
  float cap = 0;                 // scores are cap * tanh(score / cap); 0: as they are
};

// The running softmax of a unit's columns: highest score, sum of weights, weighted values (not yet divided).
struct Running {
  float *high, *total, *out;
};

static INLINE Running running_at(float* base, int64_t padded) {
  return {base, base + padded, base + 2 * padded};
}

// Sums over the first positions of a unit's context: of its whole splits, and of the split that these end in, if any.
struct Begun {
  Running whole, open;

  // Those of the columns from `column` on.
  Begun from(int64_t column, int64_t value) const {
    auto shifted = [&](const Running& r) -> Running {
      return {r.high + column, r.total + column, r.out + column * value};
    };
    return {shifted(whole), shifted(open)};
  }
};

template <class T, class Source>
struct Attention;
template <class T, class Source>
bool run_together(const Attention<T, Source>& whole, const Unit* units, int64_t count, int64_t threads);
template <class T, class Source>
bool run_shared(const Attention<T, Source>& whole, const Unit* units, int64_t count, int64_t threads);
template <class T, class Source>
bool run_behind_prefix(const Attention<T, Source>& whole, Unit* units, int64_t count, int64_t threads);

template <class T, class Source>
struct Attention {
  const Queries& queries;
  const Heads<T>& heads;
  const Source& source;
  int64_t key_steps, value;  // value: width padded to panels
  int64_t chunk;             // columns of a block computed together, a multiple of LANES
  const int64_t block = Source::block();  // keys

  Attention(const Queries& q, const Heads<T>& h, const Source& s)
      : queries(q), heads(h), source(s), key_steps(steps_of<T>(h.key_width)), value(panels_of(h.value_width) * LANES),
        chunk(value <= 256 ? column_block(T{}) : column_block(float())) {}

  int64_t running_floats(int64_t columns) const { return panels_of(columns) * LANES * (value + 2); }

  // The position of a request's first query token.
  int64_t first_query(const Unit& u) const {
    return queries.contexts[u.request] - (queries.outside ? 0 : queries.tokens(u.request));
  }

  // Columns count tokens first: column c is token c / group_heads, head c % group_heads.
  int64_t last_position(const Unit& u, int64_t column) const {
    if (queries.visible || queries.outside) return queries.contexts[u.request] - 1;
    return first_query(u) + (u.first + column) / heads.group_heads;
  }

  // The first visible position of a column.
  int64_t first_position(const Unit& u, int64_t column) const {
    if (queries.first) return queries.first[u.request];
    return queries.window ? queries.first_seen(last_position(u, column)) : 0;
  }

  const T* query(const Unit& u, int64_t column) const {
    const int64_t c = u.first + column, head = u.group * heads.group_heads + c % heads.group_heads;
    return heads.q + (queries.starts[u.request] + c / heads.group_heads) * heads.q_token + head * heads.q_head;
  }

  // Query panels; of few columns: rows.
  void pack_queries(const Unit& u, uint32_t* panels) const {
    if (u.columns <= FEW) {
      std::memset(panels, 0, size_t(few_rows<T>(u.columns) * key_steps * 4));
      for (int64_t c = 0; c < u.columns; c++)
        std::memcpy(panels + c * key_steps, query(u, c), size_t(heads.key_width) * sizeof(T));
      return;
    }
    for (int64_t p = 0; p < u.columns; p += LANES) {
      const T* rows[LANES];
      const int64_t count = std::min<int64_t>(LANES, u.columns - p);
      for (int64_t i = 0; i < count; i++) rows[i] = query(u, p + i);
      for (int64_t next = p + LANES; next < std::min(p + 2 * LANES, u.columns); next++)
        touch<false>(query(u, next), heads.key_width);
      pack_rows(rows, count, heads.key_width, key_steps, panels + p * key_steps);
    }
  }

  // Each column's last visible position; padding lanes of a panel repeat the last column's. In a tree, where that
  // position is the end of the context, they are followed by the lower halves of each column's mask bits, then the
  // upper halves.
  void find_last(const Unit& u, int32_t* last) const {
    const int64_t padded = panels_of(u.columns) * LANES;
    for (int64_t i = 0; i < padded; i++) {
      const int64_t column = std::min(i, u.columns - 1);
      last[i] = int32_t(last_position(u, column));
      if (!queries.visible) continue;
      const uint64_t bits = queries.visible[queries.starts[u.request] + (u.first + column) / heads.group_heads];
      last[padded + i] = int32_t(bits);
      last[2 * padded + i] = int32_t(bits >> 32);
    }
  }

  // The scores of one panel's columns, -inf where the key is hidden from the column; row 0 is position `first`.
  void mask(const Unit& u, const float* scores, int64_t stride, int64_t first, int64_t count, int64_t padded,
            const int32_t* last, float* masked) const {
    const I16 limit = load(last);
    int32_t firsts[LANES] = {};
    if (queries.window)
      for (int64_t i = 0; i < LANES; i++) firsts[i] = int32_t(queries.first_seen(last[i]));
    const I16 lowest = load(firsts);
    for (int64_t k = 0; k < count; k++) {
      F16 score = load(scores + k * stride);
      const int32_t position = int32_t(first + k);
      const int64_t token = position - first_query(u);
      if (!queries.visible) {
        PARTS_LOOP score.v[i] = limit.v[i] >= position ? score.v[i] : -INFINITY - vf{};
        if (queries.window) {
          PARTS_LOOP score.v[i] = lowest.v[i] <= position ? score.v[i] : -INFINITY - vf{};
        }
      } else if (token >= 0) {
        const I16 bits = load(last + (1 + token / 32) * padded);
        PARTS_LOOP score.v[i] = (bits.v[i] >> (token % 32) & 1) != 0 ? score.v[i] : -INFINITY - vf{};
      }
      store(masked + k * LANES, score);
    }
  }

  // How far a score may exceed the highest one of older sums before these are rescaled: weights of bf16, which are rounded
  // relative to their size, may be up to 2^8.
  float slack() const { return PER_UNIT<T> == 2 ? 8.f / (heads.scale * 1.44269504f) : 0.f; }

  // Weights of one block in units [step][to - from] for columns [from, to), and the rescaling factors of older sums.
  // Returns whether any differs from 1. `scores` are those of the columns.
  bool weigh(const Unit& u, const float* scores, int64_t ldc, float* masked, int64_t first, int64_t count,
             int64_t from, int64_t to, int64_t padded, int64_t steps, const int32_t* last, const Running& run,
             float* rescale, uint32_t* weights) const {
    const F16 scale = set1(heads.scale * 1.44269504f), floor = set1(-1e30f);  // base 2 instead of e
    int moved = 0;
    for (int64_t p = from; p < to; p += LANES) {
      const float* s = scores + p - from;
      int64_t stride = ldc;
      F16 top = load(run.high + p);
      const F16 before = top;
      // Without a tree, positions grow with the columns: the first lane sees the fewest keys.
      const bool hides = queries.window && first < queries.first_seen(last[p + LANES - 1]);
      if (hides || first + count > (queries.visible ? first_query(u) : last[p] + 1)) {
        mask(u, s, stride, first, count, padded, last + p, masked);
        s = masked;
        stride = LANES;
      }
      F16 tops[4] = {top, top, top, top};  // independent: one chain would wait for each maximum
      int64_t row = 0;
      for (; row + 4 <= count; row += 4)
        for (int i = 0; i < 4; i++) tops[i] = max(tops[i], load(s + (row + i) * stride));
      for (; row < count; row++) tops[0] = max(tops[0], load(s + row * stride));
      top = max(max(tops[0], tops[1]), max(tops[2], tops[3]));
      PARTS_LOOP top.v[i] = top.v[i] > before.v[i] + slack() ? top.v[i] : before.v[i];
      store(run.high + p, top);
      top = max(top, floor);  // a column without visible keys keeps -inf without producing NaN
      const F16 factor = exp2((before - top) * scale), shift = zero() - top * scale;
      store(rescale + p, factor);
      for (int i = 0; i < LANES; i++) moved |= rescale[p + i] != 1.f;
      F16 total = zero();
      for (int64_t step = 0; step < steps; step++) {
        const int64_t k = step * PER_UNIT<T>;
        F16 even = zero(), odd = zero();
        if (k < count) {
          even = exp2_for(fma(load(s + k * stride), scale, shift), T{});
          total = total + even;
        }
        if (PER_UNIT<T> == 2 && k + 1 < count) {
          odd = exp2_for(fma(load(s + (k + 1) * stride), scale, shift), T{});
          total = total + odd;
        }
        store_units(weights + step * (to - from) + p - from, even, odd, T{});
      }
      store(run.total + p, fma(load(run.total + p), factor, total));
    }
    return moved != 0;
  }

  // The same for few columns: scores and weights are [columns][block]; `turned`, the weights transposed for their sums,
  // is [block][LANES].
  bool weigh_few(const Unit& u, float* scores, float* turned, int64_t first, int64_t count, int64_t steps,
                 const Running& run, float* rescale, T* weights) const {
    const F16 scale = set1(heads.scale * 1.44269504f);
    const int64_t padded = ceil_div(count, LANES) * LANES;
    bool any = false;
    store(rescale, set1(1.f));
    for (int64_t c = 0; c < u.columns; c++) {
      float* s = scores + c * block;
      std::fill(s + count, s + padded, -INFINITY);
      for (int64_t k = std::max<int64_t>(first_query(u) - first, 0); k < count; k++)
        if (!sees(u, c, first + k)) s[k] = -INFINITY;
      const int64_t hidden = std::min(first_position(u, c) - first, count);
      if (hidden > 0) std::fill(s, s + hidden, -INFINITY);
      float lanes[LANES], top = run.high[c];
      F16 tops = load(s);
      for (int64_t k = LANES; k < padded; k += LANES) tops = max(tops, load(s + k));
      store(lanes, tops);
      for (float lane : lanes) top = std::max(top, lane);
      if (!(top > run.high[c] + slack())) top = run.high[c];
      const F16 before = set1(run.high[c]);
      run.high[c] = top;
      const F16 at = set1(std::max(top, -1e30f)), shift = zero() - at * scale;
      store(lanes, exp2((before - at) * scale));
      rescale[c] = lanes[0];
      any |= rescale[c] != 1.f;
      for (int64_t k = 0; k < padded; k += LANES) {
        const F16 weight = exp2_for(fma(load(s + k), scale, shift), T{});
        store(s + k, weight);
        store(weights + c * block + k, weight);
      }
      for (int64_t k = padded; k < steps * PER_UNIT<T>; k += LANES) store(weights + c * block + k, zero());
    }
    alignas(64) static const uint32_t none[LANES] = {};
    for (int64_t k = 0; k < padded; k += LANES) {
      const uint32_t* from[LANES];
      for (int64_t c = 0; c < LANES; c++)
        from[c] = c < u.columns ? reinterpret_cast<const uint32_t*>(scores + c * block + k) : none;
      transpose(reinterpret_cast<uint32_t*>(turned + k * LANES), LANES, from);
    }
    F16 total = zero();
    for (int64_t k = 0; k < padded; k++) total = total + load(turned + k * LANES);
    store(run.total, fma(load(run.total), load(rescale), total));
    return any;
  }

  bool sees(const Unit& u, int64_t column, int64_t position) const {
    const int64_t token = position - first_query(u), own = (u.first + column) / heads.group_heads;
    if (!queries.visible || token < 0) return token <= own;
    return queries.visible[queries.starts[u.request] + own] >> token & 1;
  }

  // Scores [count][to - from] of a block's columns [from, to), rows `ldc` apart.
  void score(const Keys& keys, int64_t count, const uint32_t* panels, int64_t from, int64_t to, float* scores,
             int64_t ldc, Ahead* ahead, int64_t share) const {
    const int64_t key_piece = row_multiple(T{});
    for (int64_t k = 0, piece = 0; k < count; k += key_piece, piece++) {
      ahead->fetch(share);
      for (int part = 0, done = 0; part < keys.parts; done += int(keys.steps[part++]))
        gemm<T>(keys.data[part][piece], keys.stride[part][piece], std::min(key_piece, count - k),
                panels + from * key_steps + done * LANES, key_steps * LANES, (to - from) / LANES, keys.steps[part],
                scores + k * ldc, ldc, part > 0);
    }
  }

  // Scores [rows][width], rows `apart`, before their factor: bounded, if the heads have a cap.
  void bound(float* scores, int64_t rows, int64_t width, int64_t apart) const {
    if (heads.cap == 0) return;
    const F16 in = set1(heads.scale / heads.cap), out = set1(heads.cap / heads.scale);
    for (int64_t r = 0; r < rows; r++)
      for (int64_t c = 0; c < width; c += LANES)
        store(scores + r * apart + c, moe::tanh(load(scores + r * apart + c) * in) * out);
  }

  // Scores [columns][block] of few columns.
  void score_few(const Keys& keys, int64_t count, const uint32_t* rows, int64_t columns, float* scores, Ahead* ahead,
                 int64_t share) const {
    uint32_t* panels = scratch<uint32_t>(TURNED, block * key_steps);
    for (int64_t k = 0; k < count; k += LANES) {
      ahead->fetch(share);
      const int64_t here = std::min<int64_t>(LANES, count - k);
      for (int part = 0, done = 0; part < keys.parts; done += int(keys.steps[part++])) {
        const T* lines[LANES];
        for (int64_t i = 0; i < here; i++) lines[i] = reinterpret_cast<const T*>(keys.row(part, k + i));
        pack_rows(lines, here, keys.steps[part] * PER_UNIT<T>, keys.steps[part], panels + k * key_steps + done * LANES);
      }
    }
    gemm<T>(rows, key_steps * 4, few_rows<T>(columns), panels, key_steps * LANES, panels_of(count), key_steps, scores,
            block, false);
  }

  // Memory of a thread for the products of a block.
  struct Buffers {
    int64_t padded, ldc;
    float *scores, *rescale, *masked;
    uint32_t *weights, *values;
  };
  Buffers buffers(int64_t columns, bool ready) const {
    const int64_t padded = panels_of(columns) * LANES;
    const int64_t ldc = ready ? padded : padded + LANES;  // not a power of two: rows share no cache set
    float* scores = scratch<float>(SCORES, block * ldc + padded + block * LANES);
    return {padded, ldc, scores, scores + block * ldc, scores + block * ldc + padded,
            scratch<uint32_t>(WEIGHTS, block * padded),
            scratch<uint32_t>(VALUES, blocks_together(columns, ready) * block_values())};
  }
  int64_t block_values() const { return (block + LANES) * value; }

  // Blocks of a split whose keys and values are packed before the first product: of narrow heads several, so that the
  // sums of a chunk of columns stay in the L1 cache. Those of wide heads would leave the L2 cache.
  int64_t blocks_together(int64_t columns, bool ready) const {
    if (columns <= chunk || ready) return 1;
    const int64_t bytes = block * (key_steps * 4 + value * int64_t(sizeof(T)));
    return std::clamp<int64_t>(PACKED_TOGETHER / bytes, 1, SPLIT / block);
  }

  void begin(const Running& run, int64_t padded) const {
    std::fill(run.high, run.high + padded, -INFINITY);
    std::fill(run.total, run.total + padded, 0.f);
  }

  int64_t value_piece(bool few) const {
    return std::min(few ? 4 : panels_by_steps(T{}), value / LANES);
  }

  // Calls of `ahead` within a block.
  int64_t pieces(int64_t columns, int64_t count) const {
    return ceil_div(columns, chunk) *
           (ceil_div(count, piece_rows<T>(columns)) + ceil_div(value / LANES, value_piece(columns <= FEW)));
  }

  // Adds one block to a unit's running softmax. Values are packed in `at`.
  void add_block(const Unit& u, int64_t first, int64_t count, bool fresh, const uint32_t* panels, const int32_t* last,
                 const Running& run, const Buffers& at, const Keys& keys, Ahead* ahead, int64_t share) const {
    for (int64_t from = 0; from < at.padded; from += chunk)
      add_columns(u, first, count, fresh, from, std::min(from + chunk, at.padded), panels, last, run, at, at.values,
                  &keys, nullptr, ahead, share);
  }

  // The same for columns [from, to), at most a chunk. `keys`: null if `found` has the scores.
  void add_columns(const Unit& u, int64_t first, int64_t count, bool fresh, int64_t from, int64_t to,
                   const uint32_t* panels, const int32_t* last, const Running& run, const Buffers& at,
                   const uint32_t* values, const Keys* keys, const float* found, Ahead* ahead, int64_t share) const {
    const int64_t padded = at.padded, apart = steps_of<T>(count) * LANES;
    const bool few = u.columns <= FEW;
    const int64_t ldc = found ? padded : std::min(at.ldc, chunk);
    // Positions grow with the columns, but for a tree: what the last one does not see has no weight.
    const int64_t here = few || queries.visible ? count : std::min<int64_t>(count, last[to - 1] + 1 - first);
    const int64_t steps = steps_of<T>(here);
    if (!keys) {
      if (few) std::memcpy(at.scores, found, size_t(u.columns * block) * sizeof(float));
    } else if (few) {
      score_few(*keys, count, panels, u.columns, at.scores, ahead, share);
      bound(at.scores, u.columns, panels_of(count) * LANES, block);
    } else {
      score(*keys, here, panels, from, to, at.scores, ldc, ahead, share);
      bound(at.scores, here, to - from, ldc);
    }
    const bool moved = few ? weigh_few(u, at.scores, at.masked, first, count, steps, run, at.rescale,
                                       reinterpret_cast<T*>(at.weights))
                           : weigh(u, keys ? at.scores : found + from, ldc, at.masked, first, here, from, to, padded,
                                   steps, last, run, at.rescale, at.weights);
    if (moved && !fresh)
      for (int64_t c = from; c < std::min(u.columns, to); c++) {
        if (at.rescale[c] == 1.f) continue;
        const F16 factor = set1(at.rescale[c]);
        for (int64_t v = 0; v < value; v += LANES)
          store(run.out + c * value + v, load(run.out + c * value + v) * factor);
      }
    const int64_t rows = std::min(ceil_div(u.columns, 4) * 4, to) - from;
    const int64_t value_panels = value / LANES, piece = value_piece(few);
    for (int64_t v = 0; v < value_panels; v += piece) {
      ahead->fetch(share);
      const int64_t panels_here = std::min(piece, value_panels - v);
      const uint32_t* channels = values + v * apart;
      float* sums = run.out + from * value + v * LANES;
      if (few)
        gemm<T>(at.weights, block * int64_t(sizeof(T)), few_rows<T>(u.columns), channels, apart, panels_here, steps,
                sums, value, !fresh);
      else
        gemm_by_steps<T>(at.weights, to - from, rows, channels, apart, panels_here, steps, sums, value, !fresh);
    }
  }

  // One split of a unit. `next`, if given, is the unit that this thread will probably run next. `ready`: the scores of
  // the unit's blocks, block * padded each; null: computed here. `open`: the split is begun, with sums in `run`.
  void split(const Unit& u, int64_t index, const uint32_t* panels, const int32_t* last, const Running& run,
             const Unit* next = nullptr, const float* ready = nullptr, bool open = false) const {
    const int64_t whole = last_position(u, u.columns - 1) + 1, at = (u.from / SPLIT + index) * SPLIT;
    const int64_t from = std::max(at, u.from / block * block), end = std::min<int64_t>(at + SPLIT, whole);
    const Buffers memory = buffers(u.columns, ready != nullptr);
    if (!open) begin(run, memory.padded);
    const int64_t together = blocks_together(u.columns, ready != nullptr) * block;
    for (int64_t group = from; group < end; group += together) {
      const int64_t stop = std::min(group + together, end), blocks = ceil_div(stop - group, block);
      Keys keys[MOST_BLOCKS];
      int64_t seeing[MOST_BLOCKS];  // behind whole panels past their last position
      for (int64_t b = 0; b < blocks; b++) {
        const int64_t first = group + b * block, count = std::min(block, stop - first), steps = steps_of<T>(count);
        uint32_t* values = memory.values + b * block_values();
        if (!ready) keys[b] = source.block(u, first, count, steps, values, b);
        else if constexpr (Source::TOGETHER) source.values(u, first, count, steps, values);
        seeing[b] = b > 0 ? seeing[b - 1] : 0;
        while (last[seeing[b] + LANES - 1] < first) seeing[b] += LANES;
      }
      Ahead ahead;
      auto prefetch = [&](const Unit& unit, int64_t first, int64_t limit) {
        for (const int64_t behind = std::min(first + together, limit); first < behind; first += block)
          source.ahead(unit, first, std::min(block, behind - first), &ahead);
      };
      if (group + together < whole) prefetch(u, group + together, whole);
      else if (next) prefetch(*next, next->from / block * block, queries.contexts[next->request]);
      const int64_t share = ceil_div(ahead.total(), blocks * pieces(u.columns, std::min(block, stop - group)));
      for (int64_t to, from_column = seeing[0]; from_column < memory.padded; from_column = to) {
        to = std::min(from_column + chunk, memory.padded);
        for (int64_t b = 0; b < blocks; b++) {
          const int64_t first = group + b * block, begin_at = std::max(from_column, seeing[b]);
          if (begin_at >= to) break;
          add_columns(u, first, std::min(block, stop - first), first == from && !open, begin_at, to, panels, last, run,
                      memory, memory.values + b * block_values(), ready ? nullptr : &keys[b],
                      ready ? ready + first * memory.padded : nullptr, &ahead, share);
        }
      }
    }
  }

  // to += from, for some columns; both have visible keys, or `from` has none.
  void merge(const Running& to, const Running& from, int64_t columns) const {
    for (int64_t p = 0; p < columns; p += LANES) {
      float tops[LANES], keep[LANES], take[LANES];
      const F16 own = load(to.high + p), other = load(from.high + p), top = max(own, other);
      const F16 scale = set1(heads.scale * 1.44269504f);
      store(tops, top);
      store(keep, exp2((own - top) * scale));
      store(take, exp2((other - top) * scale));
      for (int64_t c = p; c < std::min(columns, p + LANES); c++) {
        if (from.high[c] == -INFINITY) continue;
        const F16 old = set1(keep[c - p]), add = set1(take[c - p]);
        to.high[c] = tops[c - p];
        to.total[c] = std::fma(to.total[c], keep[c - p], from.total[c] * take[c - p]);
        for (int64_t v = 0; v < value; v += LANES)
          store(to.out + c * value + v, fma(load(to.out + c * value + v), old, load(from.out + c * value + v) * add));
      }
    }
  }

  T* result(const Unit& u, int64_t column) const {
    const int64_t c = u.first + column, head = u.group * heads.group_heads + c % heads.group_heads;
    return heads.out + (queries.starts[u.request] + c / heads.group_heads) * heads.out_token + head * heads.out_head;
  }

  void finish(const Unit& u, const Running& run, int64_t c) const {
    const int64_t column = u.first + c, token = queries.starts[u.request] + column / heads.group_heads;
    T* out = result(u, c);
    if (c + RESULTS_AHEAD < u.columns) touch<true>(result(u, c + RESULTS_AHEAD), heads.value_width);
    float total = run.total[c];
    if (heads.sinks) {
      const float sink = heads.sinks[u.group * heads.group_heads + column % heads.group_heads];
      total += std::exp(sink - std::max(run.high[c], -1e30f) * heads.scale);
    }
    if (heads.sums)
      heads.sums[token * heads.groups * heads.group_heads + u.group * heads.group_heads + column % heads.group_heads] =
          run.high[c] * heads.scale * 1.44269504f + std::log2(total);
    const F16 factor = set1(1.f / total);
    for (int64_t v = 0; v < heads.value_width; v += LANES)
      store_some(out + v, load(run.out + c * value + v) * factor, heads.value_width - v);
  }

  // Query panels in this thread's memory.
  const uint32_t* packed_queries(const Unit& u) const {
    uint32_t* panels = scratch<uint32_t>(QUERIES, panels_of(u.columns) * LANES * key_steps);
    pack_queries(u, panels);
    return panels;
  }

  // The last positions in this thread's memory.
  const int32_t* last_positions(const Unit& u) const {
    int32_t* last = scratch<int32_t>(STATS, 3 * panels_of(u.columns) * LANES);
    find_last(u, last);
    return last;
  }

  void copy(const Running& to, const Running& from, int64_t columns) const {
    begin(to, panels_of(columns) * LANES);
    std::copy(from.high, from.high + columns, to.high);
    std::copy(from.total, from.total + columns, to.total);
    std::copy(from.out, from.out + columns * value, to.out);
  }

  // All splits of a unit, in order; with `begun`, which has the positions before `u.from`, the others.
  void whole(const Unit& u, const Unit* next = nullptr, const float* ready = nullptr,
             const Begun* begun = nullptr) const {
    const int64_t padded = panels_of(u.columns) * LANES;
    const uint32_t* panels = ready ? nullptr : packed_queries(u);
    const int32_t* last = last_positions(u);
    Running total = running_at(scratch<float>(TOTAL, running_floats(u.columns)), padded);
    Running here = running_at(scratch<float>(OUTPUT, running_floats(u.columns)), padded);
    const bool more = begun && u.from >= SPLIT, open = begun && u.from % SPLIT != 0;
    if (more) copy(total, begun->whole, u.columns);
    if (open) copy(more ? here : total, begun->open, u.columns);
    split(u, 0, panels, last, more ? here : total, next, ready, open);
    if (more) merge(total, here, u.columns);
    for (int64_t s = 1; s < u.splits; s++) {
      split(u, s, panels, last, here, next, ready);
      merge(total, here, u.columns);
    }
    for (int64_t c = 0; c < u.columns; c++) finish(u, total, c);
  }

  void run(int64_t most_columns) const {
    int64_t count = 0, partial = 0, threads = omp_get_max_threads(), most_splits = 0;
    for (int64_t r = 0; r < queries.requests; r++)
      count += heads.groups * ceil_div(queries.tokens(r) * heads.group_heads, most_columns);
    if (count == 0) return;
    Unit* units = scratch<Unit>(SHARED_UNITS, count);
    count = 0;
    for (int64_t r = 0; r < queries.requests; r++) {
      const int64_t columns = queries.tokens(r) * heads.group_heads, parts = ceil_div(columns, most_columns);
      for (int64_t g = 0; g < heads.groups; g++)  // a group's keys and values stay in the L2 cache
        for (int64_t part = parts - 1; part >= 0; part--) {  // most context first
          Unit u{r, g, part * most_columns, std::min(most_columns, columns - part * most_columns), 0, partial, 0};
          u.from = first_position(u, 0);
          u.splits = last_position(u, u.columns - 1) / SPLIT + 1 - u.from / SPLIT;
          partial += u.splits;
          most_splits = std::max(most_splits, u.splits);
          units[count++] = u;
        }
    }
    if constexpr (Source::TOGETHER)
      if (count < 2 * threads && partial < 4 * threads && threads > 1 && source.splits_values() && !queries.window &&
          !queries.first)
        if (run_together(*this, units, count, threads)) return;
    if constexpr (Source::PAGED)
      if (run_shared(*this, units, count, threads) || run_behind_prefix(*this, units, count, threads)) return;
    if (count >= 2 * threads || most_splits == 1 || threads == 1) {
      parallel_products(count, [&](int64_t task) {
        whole(units[task], task + threads < count ? &units[task + threads] : nullptr);
      });
      return;
    }
    const int64_t floats = running_floats(most_columns);
    float* partials = scratch<float>(SHARED_OUT, partial * floats);
    int64_t* unit_of = scratch<int64_t>(SHARED_INDEX, partial);
    for (int64_t i = 0; i < count; i++)
      std::fill(unit_of + units[i].partial, unit_of + units[i].partial + units[i].splits, i);
    parallel_products(partial, [&](int64_t task) {
      const Unit& u = units[unit_of[task]];
      split(u, task - u.partial, packed_queries(u), last_positions(u),
            running_at(partials + task * floats, panels_of(u.columns) * LANES));
    });
    parallel(count, [&](int64_t task) {
      const Unit& u = units[task];
      const int64_t padded = panels_of(u.columns) * LANES;
      Running total = running_at(partials + u.partial * floats, padded);
      for (int64_t s = 1; s < u.splits; s++)
        merge(total, running_at(partials + (u.partial + s) * floats, padded), u.columns);
      for (int64_t c = 0; c < u.columns; c++) finish(u, total, c);
    });
  }
};


}  // namespace moe
