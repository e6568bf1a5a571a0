// Attention over a context, blockwise with a running softmax: MLA absorbed and expanded, and GQA.
//
// Legend: T query tokens, R requests, H query heads, G key heads, C latent, P rotary, N/V expanded key/value width.
// A *column* is one (token, head) of a request that shares its keys with the others: columns are the lanes. For a block
// of keys, scores [keys, columns] = keys x queries and out [columns, channels] += weights x values. So keys are read as
// they lie, the softmax runs down the lanes without a horizontal step, and 16 heads fill a panel.
//
// What a column computes depends on its own position only: blocks start at multiples of BLOCK, a fresh running softmax
// at multiples of SPLIT, and splits are merged in order. Splits may run on different threads; the bits stay the same.
#include "gemm.h"
#include "vec.h"

namespace moe {

constexpr int64_t BLOCK = 64, SPLIT = 512;

struct Queries {
  int64_t requests;
  const int32_t *rows, *starts, *contexts;  // starts [R + 1] count query tokens
  const int32_t* slots;                     // slots[row * slots_row + position]
  int64_t slots_row;

  int64_t tokens(int64_t r) const { return starts[r + 1] - starts[r]; }
};

// Some columns of one request and one group of heads; `splits` of context, whose partial results start at `partial`.
struct Unit {
  int64_t request, group, first, columns, splits, partial;
};

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
};

// Keys of a block by rows, in one part or two (the second continues the channels of the first). Every piece of
// row_multiple() rows has an address of its own, so that whole pages are read where they lie.
struct Keys {
  const char* data[2][BLOCK / LANES];
  int64_t stride[2][BLOCK / LANES], steps[2];
  int parts;
};

// Memory that the next block will read, fetched a few lines at a time between this block's products: the context lies
// scattered in pages, where the hardware's own prefetching does not help.
struct Ahead {
  const char* rows[2 * BLOCK];
  int64_t count = 0, lines = 0, row = 0, line = 0;

  int64_t total() const { return count * lines; }
  void fetch(int64_t n) {
    for (; n > 0 && row < count; row++) {
      const int64_t stop = std::min(lines, line + n);
      n -= stop - line;
      for (; line < stop; line++) __builtin_prefetch(rows[row] + line * 64, 0, 2);
      if (line < lines) return;
      line = 0;
    }
  }
};

// The running softmax of a unit's columns: highest score, sum of weights, weighted values (not yet divided).
struct Running {
  float *high, *total, *out;
};

static INLINE Running running_at(float* base, int64_t padded) {
  return {base, base + padded, base + 2 * padded};
}

template <class T, class Source>
struct Attention {
  const Queries& queries;
  const Heads<T>& heads;
  const Source& source;
  int64_t key_steps, value;  // value: width padded to panels

  Attention(const Queries& q, const Heads<T>& h, const Source& s)
      : queries(q), heads(h), source(s), key_steps(steps_of<T>(h.key_width)), value(panels_of(h.value_width) * LANES) {}

  int64_t running_floats(int64_t columns) const { return panels_of(columns) * LANES * (value + 2); }

  // Columns count tokens first: column c is token c / group_heads, head c % group_heads.
  int64_t last_position(const Unit& u, int64_t column) const {
    return queries.contexts[u.request] - queries.tokens(u.request) + (u.first + column) / heads.group_heads;
  }

  // Query panels and each column's last visible position. Lanes that fill up a panel see what the last column sees.
  void begin(const Unit& u, uint32_t* panels, int32_t* last) const {
    const int64_t padded = panels_of(u.columns) * LANES;
    for (int64_t p = 0; p < padded; p += LANES) {
      const T* rows[LANES];
      const int64_t count = std::min<int64_t>(LANES, u.columns - p);
      for (int64_t i = 0; i < count; i++) {
        const int64_t c = u.first + p + i, token = queries.starts[u.request] + c / heads.group_heads;
        const int64_t head = u.group * heads.group_heads + c % heads.group_heads;
        rows[i] = heads.q + token * heads.q_token + head * heads.q_head;
      }
      pack_rows(rows, count, heads.key_width, key_steps, panels + p * key_steps);
      for (int64_t i = 0; i < LANES; i++) last[p + i] = int32_t(last_position(u, p + std::min(i, count - 1)));
    }
  }

  // Weights of one block in units [step][padded], and the rescaling that older sums need. Returns whether any does.
  // Columns before `seeing` see nothing of the block.
  bool weigh(const float* scores, float* masked, int64_t first, int64_t count, int64_t seeing, int64_t padded,
             int64_t steps, const int32_t* last, const Running& run, float* rescale, uint32_t* weights) const {
    const F16 scale = set1(heads.scale * 1.44269504f), floor = set1(-1e30f);  // powers of two instead of e
    bool any = false;
    for (int64_t p = seeing; p < padded; p += LANES) {
      const float* s = scores + p;
      int64_t stride = padded;
      F16 top = load(run.high + p);
      const F16 before = top;
      if (first + count - 1 > last[p]) {  // positions grow with the columns: the first lane sees least
        const I16 limit = load(last + p);
        for (int64_t k = 0; k < count; k++) {
          F16 score = load(s + k * stride);
          const int32_t position = int32_t(first + k);
          PARTS_LOOP score.v[i] = limit.v[i] >= position ? score.v[i] : -INFINITY - vf{};
          store(masked + k * LANES, score);
        }
        s = masked;
        stride = LANES;
      }
      for (int64_t k = 0; k < count; k++) top = max(top, load(s + k * stride));
      store(run.high + p, top);
      top = max(top, floor);  // a column that has seen nothing yet keeps -inf, and must not make NaN of it
      const F16 factor = exp2((before - top) * scale), shift = zero() - top * scale;
      store(rescale + p, factor);
      for (int i = 0; i < LANES; i++) any |= rescale[p + i] != 1.f;
      F16 total = load(run.total + p) * factor;
      for (int64_t step = 0; step < steps; step++) {
        const int64_t k = step * PER_UNIT<T>;
        F16 even = zero(), odd = zero();
        if (k < count) {
          even = exp2(fma(load(s + k * stride), scale, shift));
          total = total + even;
        }
        if (PER_UNIT<T> == 2 && k + 1 < count) {
          odd = exp2(fma(load(s + (k + 1) * stride), scale, shift));
          total = total + odd;
        }
        store_units(weights + step * padded + p, even, odd, T{});
      }
      store(run.total + p, total);
    }
    return any;
  }

  // One split of a unit.
  void split(const Unit& u, int64_t index, const uint32_t* panels, const int32_t* last, const Running& run) const {
    const int64_t padded = panels_of(u.columns) * LANES, used = ceil_div(u.columns, 4) * 4;
    const int64_t whole = last_position(u, u.columns - 1) + 1, end = std::min<int64_t>((index + 1) * SPLIT, whole);
    float* scores = scratch<float>(SCORES, BLOCK * padded + padded + BLOCK * LANES);
    float *rescale = scores + BLOCK * padded, *masked = rescale + padded;
    uint32_t* weights = scratch<uint32_t>(WEIGHTS, BLOCK * padded);
    uint32_t* values = scratch<uint32_t>(VALUES, (BLOCK + LANES) * value);
    std::fill(run.high, run.high + padded, -INFINITY);
    std::fill(run.total, run.total + padded, 0.f);
    const int64_t key_piece = row_multiple(T{}), value_panels = value / LANES, value_piece = 4;
    int64_t seeing = 0;
    for (int64_t first = index * SPLIT; first < end; first += BLOCK) {
      const int64_t count = std::min(BLOCK, end - first), steps = steps_of<T>(count);
      const bool fresh = first == index * SPLIT;
      while (last[seeing + LANES - 1] < first) seeing += LANES;  // whole panels that have passed their last position
      const Keys keys = source.block(u, first, count, steps, values);
      Ahead ahead;
      if (first + BLOCK < whole) source.ahead(u, first + BLOCK, std::min(BLOCK, whole - first - BLOCK), &ahead);
      const int64_t share = ceil_div(ahead.total(), ceil_div(count, key_piece) + ceil_div(value_panels, value_piece));
      for (int64_t k = 0, piece = 0; k < count; k += key_piece, piece++) {
        ahead.fetch(share);
        for (int part = 0, done = 0; part < keys.parts; done += int(keys.steps[part++]))
          gemm<T>(keys.data[part][piece], keys.stride[part][piece], std::min(key_piece, count - k),
                  panels + seeing * key_steps + done * LANES, key_steps * LANES, (padded - seeing) / LANES,
                  keys.steps[part], scores + k * padded + seeing, padded, part > 0);
      }
      if (weigh(scores, masked, first, count, seeing, padded, steps, last, run, rescale, weights) && !fresh)
        for (int64_t c = seeing; c < u.columns; c++) {
          if (rescale[c] == 1.f) continue;
          const F16 factor = set1(rescale[c]);
          for (int64_t v = 0; v < value; v += LANES)
            store(run.out + c * value + v, load(run.out + c * value + v) * factor);
        }
      for (int64_t v = 0; v < value_panels; v += value_piece) {
        ahead.fetch(share);
        gemm_by_steps<T>(weights + seeing, padded, used - seeing, values + v * steps * LANES, steps * LANES,
                         std::min(value_piece, value_panels - v), steps, run.out + seeing * value + v * LANES, value,
                         !fresh);
      }
    }
  }

  // to += from, for one column; both have seen something, or `from` nothing at all.
  void merge(const Running& to, const Running& from, int64_t c) const {
    if (from.high[c] == -INFINITY) return;
    const float top = std::max(to.high[c], from.high[c]);
    float factors[LANES] = {to.high[c] - top, from.high[c] - top};
    store(factors, exp2(load(factors) * set1(heads.scale * 1.44269504f)));
    const F16 old = set1(factors[0]), add = set1(factors[1]);
    to.high[c] = top;
    to.total[c] = std::fma(to.total[c], factors[0], from.total[c] * factors[1]);
    for (int64_t v = 0; v < value; v += LANES)
      store(to.out + c * value + v, fma(load(to.out + c * value + v), old, load(from.out + c * value + v) * add));
  }

  void finish(const Unit& u, const Running& run, int64_t c) const {
    const int64_t column = u.first + c, token = queries.starts[u.request] + column / heads.group_heads;
    T* out = heads.out + token * heads.out_token +
             (u.group * heads.group_heads + column % heads.group_heads) * heads.out_head;
    const F16 factor = set1(1.f / run.total[c]);
    for (int64_t v = 0; v < heads.value_width; v += LANES)
      store_some(out + v, load(run.out + c * value + v) * factor, heads.value_width - v);
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
      for (int64_t part = parts - 1; part >= 0; part--)  // those with the most context first
        for (int64_t g = 0; g < heads.groups; g++) {
          Unit u{r, g, part * most_columns, std::min(most_columns, columns - part * most_columns), 0, partial};
          u.splits = last_position(u, u.columns - 1) / SPLIT + 1;
          partial += u.splits;
          most_splits = std::max(most_splits, u.splits);
          units[count++] = u;
        }
    }
    auto prepare = [&](const Unit& u, uint32_t** panels, int32_t** last) {
      const int64_t padded = panels_of(u.columns) * LANES;
      *panels = scratch<uint32_t>(QUERIES, padded * key_steps);
      *last = scratch<int32_t>(STATS, padded);
      begin(u, *panels, *last);
    };
    if (count >= 2 * threads || most_splits == 1 || threads == 1) {
      parallel(count, [&](int64_t task) {
        const Unit& u = units[task];
        const int64_t padded = panels_of(u.columns) * LANES;
        uint32_t* panels;
        int32_t* last;
        prepare(u, &panels, &last);
        Running total = running_at(scratch<float>(TOTAL, running_floats(u.columns)), padded);
        Running here = running_at(scratch<float>(OUTPUT, running_floats(u.columns)), padded);
        split(u, 0, panels, last, total);
        for (int64_t s = 1; s < u.splits; s++) {
          split(u, s, panels, last, here);
          for (int64_t c = 0; c < u.columns; c++) merge(total, here, c);
        }
        for (int64_t c = 0; c < u.columns; c++) finish(u, total, c);
      });
      return;
    }
    const int64_t floats = running_floats(most_columns);
    float* partials = scratch<float>(SHARED_OUT, partial * floats);
    int64_t* unit_of = scratch<int64_t>(SHARED_INDEX, partial);
    for (int64_t i = 0; i < count; i++)
      std::fill(unit_of + units[i].partial, unit_of + units[i].partial + units[i].splits, i);
    parallel(partial, [&](int64_t task) {
      const Unit& u = units[unit_of[task]];
      uint32_t* panels;
      int32_t* last;
      prepare(u, &panels, &last);
      split(u, task - u.partial, panels, last, running_at(partials + task * floats, panels_of(u.columns) * LANES));
    });
    parallel(count, [&](int64_t task) {
      const Unit& u = units[task];
      const int64_t padded = panels_of(u.columns) * LANES;
      Running total = running_at(partials + u.partial * floats, padded);
      for (int64_t c = 0; c < u.columns; c++) {
        for (int64_t s = 1; s < u.splits; s++)
          merge(total, running_at(partials + (u.partial + s) * floats, padded), c);
        finish(u, total, c);
      }
    });
  }
};

template <class T>
static INLINE void add_rows(Ahead* ahead, const T* first, int64_t row, int64_t width, const int32_t* slots,
                            int64_t count) {
  ahead->lines = ceil_div(width * int64_t(sizeof(T)), 64);
  for (int64_t i = 0; i < count; i++)
    ahead->rows[ahead->count++] = reinterpret_cast<const char*>(first + (slots ? slots[i] : i) * row);
}

// Points a part's pieces at rows `stride` bytes apart.
template <class T>
static INLINE void place(Keys* keys, int part, const void* data, int64_t stride, int64_t steps) {
  const int64_t rows = row_multiple(T{});
  keys->steps[part] = steps;
  for (int64_t piece = 0; piece * rows < BLOCK; piece++) {
    keys->data[part][piece] = static_cast<const char*>(data) + piece * rows * stride;
    keys->stride[part][piece] = stride;
  }
}

// The rows of a paged block; pieces in place where their slots follow each other and the kernel can read them so, else
// copied. `rows` become the addresses of all rows.
template <class T>
static Keys paged_keys(const T* cache, int64_t row, int64_t width, const int32_t* slots, int64_t count,
                       const T** rows) {
  const int64_t padded = padded_k<T>(width), size = sizeof(T), piece_rows = row_multiple(T{});
  const int64_t stride = ceil_div(padded * size, 64) * 64 + 64;  // odd lines: rows spread over cache sets
  char* copy = scratch<char>(KEYS, BLOCK * stride);
  Keys keys;
  keys.parts = 1;
  place<T>(&keys, 0, copy, stride, steps_of<T>(width));
  for (int64_t first = 0, piece = 0; first < count; first += piece_rows, piece++) {
    const int64_t last = std::min(first + piece_rows, count);
    bool together = padded == width;
    for (int64_t i = first; i < last; i++) {
      rows[i] = cache + slots[i] * row;
      together &= slots[i] == slots[first] + i - first;
    }
    if (together) {
      keys.data[0][piece] = reinterpret_cast<const char*>(rows[first]);
      keys.stride[0][piece] = row * size;
      continue;
    }
    for (int64_t i = first; i < last; i++) {
      std::memcpy(copy + i * stride, rows[i], size_t(width * size));
      std::memset(copy + i * stride + width * size, 0, size_t((padded - width) * size));
      rows[i] = reinterpret_cast<const T*>(copy + i * stride);
    }
  }
  return keys;
}

template <class T>
struct LatentSource {
  const Queries& queries;
  const T* cache;
  int64_t row, width, latent;

  Keys block(const Unit& u, int64_t first, int64_t count, int64_t steps, uint32_t* values) const {
    const T* rows[BLOCK];
    const int32_t* slots = queries.slots + queries.rows[u.request] * queries.slots_row + first;
    Keys keys = paged_keys(cache, row, width, slots, count, rows);
    pack_values(rows, count, latent, steps, values);
    return keys;
  }
  void ahead(const Unit& u, int64_t first, int64_t count, Ahead* lines) const {
    add_rows(lines, cache, row, width, queries.slots + queries.rows[u.request] * queries.slots_row + first, count);
  }
};

template <class T>
struct PagedSource {
  const Queries& queries;
  const T *k, *v;
  int64_t k_row, k_head, v_row, v_head, width;

  Keys block(const Unit& u, int64_t first, int64_t count, int64_t steps, uint32_t* values) const {
    const T* rows[BLOCK];
    const int32_t* slots = queries.slots + queries.rows[u.request] * queries.slots_row + first;
    for (int64_t i = 0; i < count; i++) rows[i] = v + slots[i] * v_row + u.group * v_head;
    pack_values(rows, count, width, steps, values);
    return paged_keys(k + u.group * k_head, k_row, width, slots, count, rows);
  }
  void ahead(const Unit& u, int64_t first, int64_t count, Ahead* lines) const {
    const int32_t* slots = queries.slots + queries.rows[u.request] * queries.slots_row + first;
    add_rows(lines, k + u.group * k_head, k_row, width, slots, count);
    add_rows(lines, v + u.group * v_head, v_row, width, slots, count);
  }
};

// Keys of head h at context token s: kv[s][h][0:N], then k_rope[s]; values kv[s][h][N:N+V].
template <class T>
struct ExpandedSource {
  const int64_t* starts;  // of each request's context
  const T *kv, *rope;
  int64_t kv_row, kv_head, rope_row, nope, rotary, value;

  Keys block(const Unit& u, int64_t first, int64_t count, int64_t steps, uint32_t* values) const {
    const T* rows[BLOCK];
    const int64_t size = sizeof(T), at = starts[u.request] + first;
    const T *keys = kv + at * kv_row + u.group * kv_head, *tails = rope + at * rope_row;
    for (int64_t i = 0; i < count; i++) rows[i] = keys + i * kv_row + nope;
    pack_values(rows, count, value, steps, values);
    Keys view;
    if (padded_k<T>(nope) == nope && padded_k<T>(rotary) == rotary) {
      view.parts = rotary > 0 ? 2 : 1;
      place<T>(&view, 0, keys, kv_row * size, steps_of<T>(nope));
      place<T>(&view, 1, tails, rope_row * size, steps_of<T>(rotary));
      return view;
    }
    const int64_t width = nope + rotary, padded = padded_k<T>(width), stride = padded + 64 / size;
    T* copy = scratch<T>(KEYS, BLOCK * stride);
    for (int64_t i = 0; i < count; i++) {
      std::memcpy(copy + i * stride, keys + i * kv_row, size_t(nope * size));
      std::memcpy(copy + i * stride + nope, tails + i * rope_row, size_t(rotary * size));
      std::memset(copy + i * stride + width, 0, size_t((padded - width) * size));
    }
    view.parts = 1;
    place<T>(&view, 0, copy, stride * size, steps_of<T>(width));
    return view;
  }
  void ahead(const Unit& u, int64_t first, int64_t count, Ahead* lines) const {
    const T* at = kv + (starts[u.request] + first) * kv_row + u.group * kv_head;
    add_rows(lines, at, kv_row, nope + value, nullptr, count);
  }
};

template <class T>
static void absorbed(const T* q, int64_t q_token, int64_t q_head, const T* cache, int64_t row, const Queries& queries,
                     int64_t heads, int64_t latent, int64_t rotary, float scale, T* out) {
  const Heads<T> h{q, q_token, q_head, out, heads * latent, latent, 1, heads, latent + rotary, latent, scale};
  const LatentSource<T> source{queries, cache, row, latent + rotary, latent};
  Attention<T, LatentSource<T>>(queries, h, source).run(64);
}

template <class T>
static void paged(const T* q, int64_t q_token, int64_t q_head, const T* k, int64_t k_row, int64_t k_head, const T* v,
                  int64_t v_row, int64_t v_head, const Queries& queries, int64_t heads, int64_t key_heads,
                  int64_t width, float scale, T* out) {
  const Heads<T> h{q, q_token, q_head, out, heads * width, width, key_heads, heads / key_heads, width, width, scale};
  const PagedSource<T> source{queries, k, v, k_row, k_head, v_row, v_head, width};
  Attention<T, PagedSource<T>>(queries, h, source).run(128);
}

template <class T>
static void expanded(const T* q, int64_t q_token, int64_t q_head, const T* kv, int64_t kv_row, int64_t kv_head,
                     const T* rope, int64_t rope_row, const Queries& queries, int64_t heads, int64_t nope,
                     int64_t rotary, int64_t value, float scale, T* out) {
  const Heads<T> h{q, q_token, q_head, out, heads * value, value, heads, 1, nope + rotary, value, scale};
  int64_t* starts = scratch<int64_t>(SHARED_STATS, queries.requests + 1);
  starts[0] = 0;
  for (int64_t r = 0; r < queries.requests; r++) starts[r + 1] = starts[r] + queries.contexts[r];
  const ExpandedSource<T> source{starts, kv, rope, kv_row, kv_head, rope_row, nope, rotary, value};
  Attention<T, ExpandedSource<T>>(queries, h, source).run(128);
}

}  // namespace moe

using namespace moe;

#define IN(type, p) static_cast<const type*>(p)
#define OUT(type, p) static_cast<type*>(p)

API void moe_absorbed(int is_bf16, const void* q, int64_t q_token, int64_t q_head, const void* cache, int64_t row,
                      const Queries* queries, int64_t heads, int64_t latent, int64_t rotary, float scale, void* out) {
  if (is_bf16)
    absorbed(IN(bf16, q), q_token, q_head, IN(bf16, cache), row, *queries, heads, latent, rotary, scale,
             OUT(bf16, out));
  else
    absorbed(IN(float, q), q_token, q_head, IN(float, cache), row, *queries, heads, latent, rotary, scale,
             OUT(float, out));
}

API void moe_paged(int is_bf16, const void* q, int64_t q_token, int64_t q_head, const void* k, int64_t k_row,
                   int64_t k_head, const void* v, int64_t v_row, int64_t v_head, const Queries* queries, int64_t heads,
                   int64_t key_heads, int64_t width, float scale, void* out) {
  if (is_bf16)
    paged(IN(bf16, q), q_token, q_head, IN(bf16, k), k_row, k_head, IN(bf16, v), v_row, v_head, *queries, heads,
          key_heads, width, scale, OUT(bf16, out));
  else
    paged(IN(float, q), q_token, q_head, IN(float, k), k_row, k_head, IN(float, v), v_row, v_head, *queries, heads,
          key_heads, width, scale, OUT(float, out));
}

API void moe_expanded(int is_bf16, const void* q, int64_t q_token, int64_t q_head, const void* kv, int64_t kv_row,
                      int64_t kv_head, const void* rope, int64_t rope_row, const Queries* queries, int64_t heads,
                      int64_t nope, int64_t rotary, int64_t value, float scale, void* out) {
  if (is_bf16)
    expanded(IN(bf16, q), q_token, q_head, IN(bf16, kv), kv_row, kv_head, IN(bf16, rope), rope_row, *queries, heads,
             nope, rotary, value, scale, OUT(bf16, out));
  else
    expanded(IN(float, q), q_token, q_head, IN(float, kv), kv_row, kv_head, IN(float, rope), rope_row, *queries, heads,
             nope, rotary, value, scale, OUT(float, out));
}

// Rows of every request's context, one behind the other. Strides and width in bytes.
API void moe_gather(const void* cache, int64_t row_bytes, int64_t width_bytes, const Queries* queries, void* out) {
  const Queries& q = *queries;
  constexpr int64_t ROWS_A_TASK = 256;
  int64_t tasks = 0, from = 0;
  int64_t* task_of = scratch<int64_t>(SHARED_INDEX, 3 * q.requests);
  for (int64_t r = 0; r < q.requests; r++) {
    task_of[3 * r] = tasks;
    task_of[3 * r + 1] = from;
    tasks += ceil_div(q.contexts[r], ROWS_A_TASK);
    from += q.contexts[r];
  }
  parallel(tasks, [&](int64_t task) {
    int64_t r = 0;
    while (r + 1 < q.requests && task_of[3 * (r + 1)] <= task) r++;
    const int64_t first = (task - task_of[3 * r]) * ROWS_A_TASK;
    const int64_t last = std::min<int64_t>(first + ROWS_A_TASK, q.contexts[r]);
    const int32_t* slots = q.slots + q.rows[r] * q.slots_row;
    for (int64_t i = first; i < last; i++)
      std::memcpy(OUT(char, out) + (task_of[3 * r + 1] + i) * width_bytes, IN(char, cache) + slots[i] * row_bytes,
                  size_t(width_bytes));
  });
}
