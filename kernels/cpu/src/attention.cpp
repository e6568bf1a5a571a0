// Key layouts of attention: MLA's paged latent, paged keys and values, or per-head keys and values expanded from the
// latent.
#include "api.h"
#include "attention_prefix.h"
#include "attention_shared.h"
#include "attention_together.h"
#include "fp8.h"
#include "prefix.h"

namespace moe {

template <class T>
static INLINE void add_rows(Ahead* ahead, const T* first, int64_t row, int64_t width, const int32_t* slots,
                            int64_t count) {
  ahead->lines = std::max(ahead->lines, ceil_div(width * int64_t(sizeof(T)), 64));
  for (int64_t i = 0; i < count; i++)
    ahead->rows[ahead->count++] = reinterpret_cast<const char*>(first + (slots ? slots[i] : i) * row);
}

// Points a part's row groups at rows `stride` bytes apart.
template <class T>
static INLINE void place(Keys* keys, int part, const void* data, int64_t stride, int64_t steps, int64_t rows) {
  keys->steps[part] = steps;
  keys->piece = rows;
  for (int64_t piece = 0; piece * rows < MOST_KEYS; piece++) {
    keys->data[part][piece] = static_cast<const char*>(data) + piece * rows * stride;
    keys->stride[part][piece] = stride;
  }
}

// Bytes between the rows of a copied block: an odd number of cache lines, so that rows spread over cache sets.
template <class T>
static INLINE int64_t copy_stride(int64_t width) {
  return ceil_div(padded_k<T>(width) * int64_t(sizeof(T)), 64) * 64 + 64;
}

// This thread's memory for copied keys of block `index` of those that are packed together.
static INLINE char* copied_keys(int64_t index, int64_t stride) {
  return scratch<char>(KEYS, MOST_BLOCKS * MOST_KEYS * stride) + index * MOST_KEYS * stride;
}

// A block's rows in `copy`, converted by `read(i, row)` from another storage format; `rows` become their addresses.
template <class T, class Read>
static INLINE Keys read_keys(const Unit& u, int64_t width, int64_t count, char* copy, const T** rows,
                             const Read& read) {
  const int64_t stride = copy_stride<T>(width);
  Keys keys;
  keys.parts = 1;
  place<T>(&keys, 0, copy, stride, steps_of<T>(width), piece_rows<T>(u.columns));
  for (int64_t i = 0; i < count; i++) {
    T* row = reinterpret_cast<T*>(copy + i * stride);
    read(i, row);
    std::memset(row + width, 0, size_t(padded_k<T>(width) - width) * sizeof(T));
    rows[i] = row;
  }
  return keys;
}

// The rows of a paged block: row groups in place where slots are equally far apart (neighbors, or one head's rows in a
// list of selected blocks) and the kernel can read them, else copied. `rows` become the addresses of all rows.
template <class T>
static Keys paged_keys(const Unit& u, const T* cache, int64_t row, int64_t width, const int32_t* slots, int64_t count,
                       int64_t index, const T** rows) {
  const int64_t padded = padded_k<T>(width), size = sizeof(T), piece_size = piece_rows<T>(u.columns);
  const int64_t stride = copy_stride<T>(width);
  char* copy = copied_keys(index, stride);
  Keys keys;
  keys.parts = 1;
  place<T>(&keys, 0, copy, stride, steps_of<T>(width), piece_size);
  for (int64_t first = 0, piece = 0; first < count; first += piece_size, piece++) {
    const int64_t last = std::min(first + piece_size, count);
    const int64_t apart = last - first > 1 ? slots[first + 1] - slots[first] : 1;
    bool together = padded == width && slots[last - 1] - slots[first] == (last - 1 - first) * apart;
    for (int64_t i = first; i < last; i++) rows[i] = cache + slots[i] * row;
    for (int64_t i = first + 1; together && i < last; i++) together = slots[i] - slots[i - 1] == apart;
    if (together) {
      keys.data[0][piece] = reinterpret_cast<const char*>(rows[first]);
      keys.stride[0][piece] = apart * row * size;
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

// `row` and similar strides count stored elements: T, or bytes of FP8 rows.
template <class T>
struct LatentSource {
  static constexpr bool TOGETHER = true, PAGED = true;
  static int64_t block() { return key_block(T{}); }
  const Queries& queries;
  int form;
  const void* cache;
  int64_t row, width, latent;
  int64_t channel = 0;  // the first one of the values

  // Keys and values of a block can be read apart, and some channels of the values.
  bool splits_values() const { return form == PLAIN; }
  LatentSource with(const Queries& others) const { return {others, form, cache, row, width, latent, channel}; }
  LatentSource part(int64_t first, int64_t channels) const {
    return {queries, form, cache, row, width, channels, first};
  }
  Keys keys(const Unit& u, int64_t first, int64_t count) const {
    const T* rows[MOST_KEYS];
    const int32_t* slots = queries.slots + queries.rows[u.request] * queries.slots_row + first;
    return paged_keys(u, static_cast<const T*>(cache), row, width, slots, count, 0, rows);
  }
  void values(const Unit& u, int64_t first, int64_t count, int64_t steps, uint32_t* values) const {
    const T* rows[MOST_KEYS];
    const int32_t* slots = queries.slots + queries.rows[u.request] * queries.slots_row + first;
    for (int64_t i = 0; i < count; i++) rows[i] = static_cast<const T*>(cache) + slots[i] * row + channel;
    pack_values(rows, count, latent, steps, values);
  }

  Keys block(const Unit& u, int64_t first, int64_t count, int64_t steps, uint32_t* values, int64_t index = 0) const {
    const T* rows[MOST_KEYS];
    const int32_t* slots = queries.slots + queries.rows[u.request] * queries.slots_row + first;
    const uint8_t* bytes = static_cast<const uint8_t*>(cache);
    Keys keys = form == PLAIN ? paged_keys(u, static_cast<const T*>(cache), row, width, slots, count, index, rows)
                              : read_keys(u, width, count, copied_keys(index, copy_stride<T>(width)), rows, [&](int64_t i, T* to) {
                                  read_latent(form, bytes + slots[i] * row, latent, width - latent, to);
                                });
    pack_values(rows, count, latent, steps, values);
    return keys;
  }
  void ahead(const Unit& u, int64_t first, int64_t count, Ahead* lines) const {
    const int32_t* slots = queries.slots + queries.rows[u.request] * queries.slots_row + first;
    if (form == PLAIN) add_rows(lines, static_cast<const T*>(cache), row, width, slots, count);
    else add_rows(lines, static_cast<const uint8_t*>(cache), row, row, slots, count);
  }
};

template <class T>
struct PagedSource {
  static constexpr bool TOGETHER = false, PAGED = true;
  // A step of few queries of narrow heads packs the keys and values of a block in the L1 cache.
  static int64_t block() { return 64; }
  const Queries& queries;
  int form;
  const void *k, *v;
  int64_t k_row, k_head, v_row, v_head, width, value;  // channels of a key, of a value

  PagedSource with(const Queries& others) const {
    return {others, form, k, v, k_row, k_head, v_row, v_head, width, value};
  }

  Keys block(const Unit& u, int64_t first, int64_t count, int64_t steps, uint32_t* values, int64_t index = 0) const {
    const T* rows[MOST_KEYS];
    int32_t kept[MOST_KEYS];
    const int32_t* slots = unit_slots(queries, u, first, count, kept);
    if (form == PLAIN) {
      for (int64_t i = 0; i < count; i++) rows[i] = at<T>(v, slots[i] * v_row + u.group * v_head);
      pack_values(rows, count, value, steps, values);
      return paged_keys(u, at<T>(k, u.group * k_head), k_row, width, slots, count, index, rows);
    }
    char* copy = copied_keys(index, copy_stride<T>(std::max(width, value)));
    auto read = [&](const uint8_t* from, int64_t row, int64_t channels) {
      return read_keys(u, channels, count, copy, rows,
                       [&](int64_t i, T* to) { read_head(form, from + slots[i] * row, channels, to); });
    };
    read(at<uint8_t>(v, u.group * v_head), v_row, value);  // once the values are packed, keys reuse their buffer
    pack_values(rows, count, value, steps, values);
    return read(at<uint8_t>(k, u.group * k_head), k_row, width);
  }
  void ahead(const Unit& u, int64_t first, int64_t count, Ahead* lines) const {
    int32_t kept[MOST_KEYS];
    const int32_t* slots = unit_slots(queries, u, first, count, kept);
    if (form == PLAIN) {
      add_rows(lines, at<T>(k, u.group * k_head), k_row, width, slots, count);
      add_rows(lines, at<T>(v, u.group * v_head), v_row, value, slots, count);
      return;
    }
    add_rows(lines, at<uint8_t>(k, u.group * k_head), k_row, head_bytes(form, width), slots, count);
    add_rows(lines, at<uint8_t>(v, u.group * v_head), v_row, head_bytes(form, value), slots, count);
  }

  template <class X>
  static const X* at(const void* base, int64_t offset) {
    return static_cast<const X*>(base) + offset;
  }
};

// Keys of head h at context token s: kv[s][h][0:N], then k_rope[s]; values kv[s][h][N:N+V]. Contexts are concatenated,
// or, with `table`, at the queries' slots: requests may share rows.
template <class T>
struct ExpandedSource {
  static constexpr bool TOGETHER = false, PAGED = false;
  static int64_t block() { return key_block(T{}); }
  const Queries* table;
  const int64_t* starts;  // start of each request's context, if there is no table
  const T *kv, *rope;
  int64_t kv_row, kv_head, rope_row, nope, rotary, value;

  const int32_t* slots(const Unit& u, int64_t first) const {
    return table ? table->slots + table->rows[u.request] * table->slots_row + first : nullptr;
  }

  Keys block(const Unit& u, int64_t first, int64_t count, int64_t steps, uint32_t* values, int64_t index = 0) const {
    const T* rows[MOST_KEYS];
    int64_t places[MOST_KEYS];
    const int32_t* slot = slots(u, first);
    const T* keys = kv + u.group * kv_head;
    for (int64_t i = 0; i < count; i++) {
      places[i] = slot ? slot[i] : starts[u.request] + first + i;
      rows[i] = keys + places[i] * kv_row + nope;
    }
    pack_values(rows, count, value, steps, values);
    Keys view;
    if (kv_row * int64_t(sizeof(T)) % 4096 != 0 && padded_k<T>(nope) == nope && padded_k<T>(rotary) == rotary) {
      view.parts = rotary > 0 ? 2 : 1;
      const int64_t before = copy_stride<T>(nope), behind = copy_stride<T>(rotary);
      char* copy = copied_keys(index, before + behind);
      put(u, &view, 0, keys, kv_row, nope, places, count, copy, before);
      put(u, &view, 1, rope, rope_row, rotary, places, count, copy + MOST_KEYS * before, behind);
      return view;
    }
    const int64_t size = sizeof(T), width = nope + rotary, padded = padded_k<T>(width), stride = padded + 64 / size;
    T* copy = reinterpret_cast<T*>(copied_keys(index, stride * size));
    for (int64_t i = 0; i < count; i++) {
      std::memcpy(copy + i * stride, keys + places[i] * kv_row, size_t(nope * size));
      std::memcpy(copy + i * stride + nope, rope + places[i] * rope_row, size_t(rotary * size));
      std::memset(copy + i * stride + width, 0, size_t((padded - width) * size));
    }
    view.parts = 1;
    place<T>(&view, 0, copy, stride * size, steps_of<T>(width), piece_rows<T>(u.columns));
    return view;
  }

  // A part of the keys: row groups in place where rows are contiguous and do not share cache sets, else copied.
  static INLINE void put(const Unit& u, Keys* keys, int part, const T* base, int64_t row, int64_t width,
                         const int64_t* places, int64_t count, char* copy, int64_t stride) {
    const int64_t size = sizeof(T), piece_size = piece_rows<T>(u.columns);
    place<T>(keys, part, copy, stride, steps_of<T>(width), piece_size);
    for (int64_t first = 0, piece = 0; first < count; first += piece_size, piece++) {
      const int64_t last = std::min(first + piece_size, count);
      if (row * size % 4096 != 0 && places[last - 1] - places[first] == last - 1 - first &&
          in_order(places + first, last - first)) {
        keys->data[part][piece] = reinterpret_cast<const char*>(base + places[first] * row);
        keys->stride[part][piece] = row * size;
        continue;
      }
      for (int64_t i = first; i < last; i++) std::memcpy(copy + i * stride, base + places[i] * row, size_t(width * size));
    }
  }
  static bool in_order(const int64_t* places, int64_t count) {
    for (int64_t i = 1; i < count; i++)
      if (places[i] != places[0] + i) return false;
    return true;
  }

  void ahead(const Unit& u, int64_t first, int64_t count, Ahead* lines) const {
    const T* keys = kv + u.group * kv_head;
    const int32_t* slot = slots(u, first);
    if (slot) add_rows(lines, keys, kv_row, nope + value, slot, count);
    else add_rows(lines, keys + (starts[u.request] + first) * kv_row, kv_row, nope + value, nullptr, count);
  }
};

template <class T>
static void absorbed(int form, const T* q, int64_t q_token, int64_t q_head, const void* cache, int64_t row,
                     const Queries& queries, int64_t heads, int64_t latent, int64_t rotary, float scale,
                     const float* sinks, T* out, float* sums = nullptr) {
  const Heads<T> h{q, q_token, q_head, out, heads * latent, latent, 1, heads, latent + rotary, latent, scale,
                   sinks, sums};
  const LatentSource<T> source{queries, form, cache, row, latent + rotary, latent};
  Attention<T, LatentSource<T>>(queries, h, source).run(64);
}

template <class T>
static void paged(int form, const T* q, int64_t q_token, int64_t q_head, const void* k, int64_t k_row, int64_t k_head,
                  const void* v, int64_t v_row, int64_t v_head, const Queries& queries, int64_t heads,
                  int64_t key_heads, int64_t width, int64_t value, float scale, float cap, const float* sinks, T* out) {
  const Heads<T> h{q, q_token, q_head, out, heads * value, value, key_heads, heads / key_heads, width, value, scale,
                   sinks, nullptr, cap};
  const PagedSource<T> source{queries, form, k, v, k_row, k_head, v_row, v_head, width, value};
  Attention<T, PagedSource<T>>(queries, h, source).run(256);
}

template <class T>
static void expanded(const T* q, int64_t q_token, int64_t q_head, const T* kv, int64_t kv_row, int64_t kv_head,
                     const T* rope, int64_t rope_row, const Queries& queries, bool by_slots, int64_t heads,
                     int64_t nope, int64_t rotary, int64_t value, float scale, T* out, float* sums = nullptr) {
  const Heads<T> h{q, q_token, q_head, out, heads * value, value, heads, 1, nope + rotary, value, scale, nullptr,
                   sums};
  int64_t* starts = scratch<int64_t>(SHARED_STATS, queries.requests + 1);
  starts[0] = 0;
  for (int64_t r = 0; r < queries.requests; r++) starts[r + 1] = starts[r] + queries.contexts[r];
  const ExpandedSource<T> source{by_slots ? &queries : nullptr, starts, kv, rope, kv_row, kv_head, rope_row, nope, rotary, value};
  // Units of many columns share the packed keys and values of a block, but a short prompt needs units for all threads.
  const bool many = queries.starts[queries.requests] * heads >= 4 * 512 * omp_get_max_threads();
  Attention<T, ExpandedSource<T>>(queries, h, source).run(many ? 1024 : 256);
}

template <class T>
static void add_prefix(const SharedPrefix& p, int64_t layer, const T* q, int64_t heads, int64_t nope, int64_t rotary,
                       int64_t value, float scale, const float* sums, T* values) {
  const int64_t head = nope + rotary, size = sizeof(T), q_bytes = ceil_div(p.members * heads * head * size, 64) * 64;
  const int64_t out_bytes = ceil_div(p.members * heads * value * size, 64) * 64;
  char* memory = scratch<char>(PREFIX, q_bytes + out_bytes + p.members * heads * 4);
  T *rows = reinterpret_cast<T*>(memory), *out = reinterpret_cast<T*>(memory + q_bytes);
  float* own = reinterpret_cast<float*>(memory + q_bytes + out_bytes);
  for (int64_t m = 0; m < p.members; m++)
    std::memcpy(rows + m * heads * head, q + p.requests[m] * heads * head, size_t(heads * head * size));
  const int32_t row = 0, starts[2] = {0, int32_t(p.members)}, context = int32_t(p.length);
  const Queries all{1, &row, starts, &context, nullptr, 0, nullptr, 0, nullptr, 1};
  expanded(rows, heads * head, head, static_cast<const T*>(p.kv[layer]), heads * (nope + value), nope + value,
           static_cast<const T*>(p.rope[layer]), rotary, all, false, heads, nope, rotary, value, scale, out, own);
  parallel_ranges(p.members * heads, 20, [&](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; i++) {
      const int64_t at = p.requests[i / heads] * heads + i % heads;
      const float weight = 1.f / (1.f + std::exp2(sums[at] - own[i]));  // of the prefix
      const F16 more = set1(weight), less = set1(1.f - weight);
      for (int64_t v = 0; v < value; v += LANES) {
        T* to_value = values + at * value + v;
        const F16 sum = load_some(out + i * value + v, value - v) * more;
        store_some(to_value, fma(load_some(to_value, value - v), less, sum), value - v);
      }
    }
  });
}

// Calls copy(slot, index) for every row of every request's context, in order.
template <class Copy>
static void gather(const Queries& q, const Copy& copy) {
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
    for (int64_t i = first; i < last; i++) copy(slots[i], task_of[3 * r + 1] + i);
  });
}

#define IN(type, p) static_cast<const type*>(p)
#define OUT(type, p) static_cast<type*>(p)

void absorbed_behind(const SharedPrefix& prefix, int is_bf16, int form, const void* q, int64_t q_token, int64_t q_head,
                     const void* cache, int64_t row, const Queries& queries, int64_t heads, int64_t latent,
                     int64_t rotary, float scale, void* out, float* sums) {
  int32_t* first = scratch<int32_t>(SHARED_STATS, queries.requests);
  std::fill(first, first + queries.requests, 0);
  for (int64_t m = 0; m < prefix.members; m++) first[prefix.requests[m]] = int32_t(prefix.length);
  Queries behind = queries;
  behind.first = first;
  if (is_bf16)
    absorbed(form, IN(bf16, q), q_token, q_head, cache, row, behind, heads, latent, rotary, scale, nullptr,
             OUT(bf16, out), sums);
  else
    absorbed(form, IN(float, q), q_token, q_head, cache, row, behind, heads, latent, rotary, scale, nullptr,
             OUT(float, out), sums);
}

void add_prefix(const SharedPrefix& prefix, int64_t layer, int is_bf16, const void* q, int64_t heads, int64_t nope,
                int64_t rotary, int64_t value, float scale, const float* sums, void* values) {
  if (is_bf16)
    add_prefix(prefix, layer, IN(bf16, q), heads, nope, rotary, value, scale, sums, OUT(bf16, values));
  else
    add_prefix(prefix, layer, IN(float, q), heads, nope, rotary, value, scale, sums, OUT(float, values));
}

}  // namespace moe

using namespace moe;

API void moe_absorbed(int is_bf16, int form, const void* q, int64_t q_token, int64_t q_head, const void* cache,
                      int64_t row, const Queries* queries, int64_t heads, int64_t latent, int64_t rotary, float scale,
                      const float* sinks, void* out) {
  if (is_bf16)
    absorbed(form, IN(bf16, q), q_token, q_head, cache, row, *queries, heads, latent, rotary, scale, sinks,
             OUT(bf16, out));
  else
    absorbed(form, IN(float, q), q_token, q_head, cache, row, *queries, heads, latent, rotary, scale, sinks,
             OUT(float, out));
}

API void moe_paged(int is_bf16, int form, const void* q, int64_t q_token, int64_t q_head, const void* k, int64_t k_row,
                   int64_t k_head, const void* v, int64_t v_row, int64_t v_head, const Queries* queries, int64_t heads,
                   int64_t key_heads, int64_t width, int64_t value, float scale, float cap, const float* sinks,
                   void* out) {
  if (is_bf16)
    paged(form, IN(bf16, q), q_token, q_head, k, k_row, k_head, v, v_row, v_head, *queries, heads, key_heads, width,
          value, scale, cap, sinks, OUT(bf16, out));
  else
    paged(form, IN(float, q), q_token, q_head, k, k_row, k_head, v, v_row, v_head, *queries, heads, key_heads, width,
          value, scale, cap, sinks, OUT(float, out));
}

// `by_slots`: a context token is row slots[...] of kv and rope, as in the paged form.
API void moe_expanded(int is_bf16, const void* q, int64_t q_token, int64_t q_head, const void* kv, int64_t kv_row,
                      int64_t kv_head, const void* rope, int64_t rope_row, const Queries* queries, int by_slots,
                      int64_t heads, int64_t nope, int64_t rotary, int64_t value, float scale, void* out) {
  if (is_bf16)
    expanded(IN(bf16, q), q_token, q_head, IN(bf16, kv), kv_row, kv_head, IN(bf16, rope), rope_row, *queries, by_slots,
             heads, nope, rotary, value, scale, OUT(bf16, out));
  else
    expanded(IN(float, q), q_token, q_head, IN(float, kv), kv_row, kv_head, IN(float, rope), rope_row, *queries, by_slots,
             heads, nope, rotary, value, scale, OUT(float, out));
}

// Gathers the rows of all contexts, concatenated. Strides and width in bytes.
API void moe_gather(const void* cache, int64_t row_bytes, int64_t width_bytes, const Queries* queries, void* out) {
  gather(*queries, [&](int64_t slot, int64_t place) {
    std::memcpy(OUT(char, out) + place * width_bytes, IN(char, cache) + slot * row_bytes, size_t(width_bytes));
  });
}

// Gathers and dequantizes FP8 rows.
API void moe_gather_fp8(int is_bf16, int form, const void* cache, int64_t row_bytes, int64_t latent, int64_t rotary,
                        const Queries* queries, void* out) {
  auto run = [&](auto* rows) {
    gather(*queries, [&](int64_t slot, int64_t place) {
      const uint8_t* row = IN(uint8_t, cache) + slot * row_bytes;
      read_latent(form, row, latent, rotary, rows + place * (latent + rotary));
    });
  };
  is_bf16 ? run(OUT(bf16, out)) : run(OUT(float, out));
}
