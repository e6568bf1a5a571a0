// Few units on all threads, for a decode step of one request: first the scores, some keys a task, then the values, a
// range of channels a task. Each task of the second pass computes the softmax again. Every chain of additions is that
// of Attention::split, and so are the bits.
#pragma once

#include "attention.h"

namespace moe {

constexpr int64_t MOST_SCORES = 1 << 20;  // floats kept between the passes

// False: the scores would take too much memory, or a task would have too few channels.
template <class T, class Source>
bool run_together(const Attention<T, Source>& whole, const Unit* units, int64_t count, int64_t threads) {
  const Queries& q = whole.queries;
  const int64_t parts = std::min(threads, whole.value / (4 * LANES)), rows = ceil_div(LANES, row_multiple(T{})) * row_multiple(T{});
  int64_t floats = 0, tasks = 0, columns = 0;
  for (int64_t i = 0; i < count; i++) {
    const int64_t context = whole.last_position(units[i], units[i].columns - 1) + 1;
    const int64_t padded = panels_of(units[i].columns) * LANES;
    floats += ceil_div(context, whole.block) * whole.block * padded;
    tasks += ceil_div(context, rows);
    columns += padded;
  }
  if (parts < 2 || floats > MOST_SCORES) return false;
  float* scores = scratch<float>(SHARED_OUT, floats + columns * whole.key_steps);
  struct Place {
    float* scores;
    uint32_t* panels;
    int32_t* last;
    int64_t context, padded, task;
  };
  Place* places = scratch<Place>(SHARED_INDEX, count);
  int32_t* lasts = scratch<int32_t>(SHARED_STATS, 3 * columns);
  uint32_t* queries = reinterpret_cast<uint32_t*>(scores + floats);
  for (int64_t i = 0, task = 0; i < count; i++) {
    Place& at = places[i];
    at.context = whole.last_position(units[i], units[i].columns - 1) + 1;
    at.padded = panels_of(units[i].columns) * LANES;
    at.scores = scores, at.panels = queries, at.last = lasts, at.task = task;
    scores += ceil_div(at.context, whole.block) * whole.block * at.padded;
    queries += at.padded * whole.key_steps;
    lasts += 3 * at.padded;
    task += ceil_div(at.context, rows);
    whole.pack_queries(units[i], at.panels);
    whole.find_last(units[i], at.last);
  }
  parallel_products(tasks, [&](int64_t task) {
    int64_t i = count - 1;
    while (places[i].task > task) i--;
    const Place& at = places[i];
    const Unit& u = units[i];
    const int64_t first = (task - at.task) * rows, here = std::min(rows, at.context - first);
    const int64_t block = first / whole.block * whole.block, within = first - block;
    int64_t seeing = 0;
    while (at.last[seeing + LANES - 1] < block) seeing += LANES;
    const Keys keys = whole.source.keys(u, first, here);
    float* to = at.scores + block * at.padded;
    Ahead ahead;  // of the task that this thread will probably run next
    const int64_t later = first + threads * rows;
    if (later < at.context) whole.source.ahead(u, later, std::min(rows, at.context - later), &ahead);
    const int64_t share = ceil_div(ahead.total(), ceil_div(here, piece_rows<T>(u.columns)));
    if (u.columns <= FEW) {
      whole.score_few(keys, here, at.panels, u.columns, to + within, &ahead, share);
      whole.bound(to + within, u.columns, panels_of(here) * LANES, whole.block);
    } else {
      float* scores = to + within * at.padded + seeing;
      whole.score(keys, here, at.panels, seeing, at.padded, scores, at.padded, &ahead, share);
      whole.bound(scores, here, at.padded - seeing, at.padded);
    }
  });
  const int64_t wide = ceil_div(ceil_div(whole.value, parts), 4 * LANES) * 4 * LANES;
  parallel_products(count * ceil_div(whole.value, wide), [&](int64_t task) {
    const Unit& u = units[task % count];
    const int64_t channel = task / count * wide;
    Heads<T> heads = whole.heads;
    heads.out += channel;
    heads.value_width = std::min(wide, heads.value_width - channel);
    const Source source = whole.source.part(channel, heads.value_width);
    Attention<T, Source>(q, heads, source).whole(u, nullptr, places[task % count].scores);
  });
  return true;
}

}  // namespace moe
