// Units of single tokens whose contexts have blocks in common, as selections of neighboring query tokens have: a block
// is read and packed once for all units of a tile that have it. Each unit sees its blocks in its own order, by
// the operations of Attention::whole, and so has the same bits.
//
// Legend: a *block* is `size` entries of a context from a multiple of `size` on; equal blocks have equal slots.
#pragma once

#include <vector>

#include "attention.h"

namespace moe {

constexpr int64_t TILE_UNITS = 64, TILE_BYTES = 1 << 20;  // units of a tile; their queries and sums stay in the L2 cache

// The distinct blocks of a tile's units, and an order of them that is every unit's own, where one exists.
struct SharedBlocks {
  struct Block {
    const int32_t* slots;
    int64_t count, left, waiting;  // `left`: units that have it yet to come; `waiting`: those that need it next
  };
  std::vector<Block> blocks;
  std::vector<int32_t> ids;  // of each unit's blocks
  std::vector<int64_t> starts, done;
  std::vector<int32_t> ready;

  SharedBlocks(const Queries& q, const Unit* units, int64_t count, int64_t size)
      : starts(1, 0), done(size_t(count), 0) {
    for (int64_t i = 0; i < count; i++) starts.push_back(starts.back() + ceil_div(q.contexts[units[i].request], size));
    ids.resize(size_t(starts.back()));
    size_t places = 64;
    while (places < 2 * ids.size()) places *= 2;
    std::vector<int32_t> table(places, -1);
    for (int64_t i = 0; i < count; i++) {
      const int32_t* slots = q.slots + q.rows[units[i].request] * q.slots_row;
      const int64_t context = q.contexts[units[i].request];
      for (int64_t b = 0; b * size < context; b++)
        ids[size_t(starts[size_t(i)] + b)] = find(slots + b * size, std::min(size, context - b * size), &table);
    }
    for (int64_t i = 0; i < count; i++) await(i);
  }

  // Whether reading each block once saves at least a third of the reads.
  bool worthwhile() const { return 3 * blocks.size() <= 2 * ids.size(); }
  bool finished(int64_t i) const { return starts[size_t(i)] + done[size_t(i)] == starts[size_t(i) + 1]; }
  int32_t wanted(int64_t i) const { return finished(i) ? -1 : ids[size_t(starts[size_t(i)] + done[size_t(i)])]; }

  // The next block; -1: all are done. One that no unit will need later, if there is one: the newest, whose units'
  // sums are in the cache.
  int32_t next() {
    while (!ready.empty()) {
      const int32_t id = ready.back();
      ready.pop_back();
      if (blocks[size_t(id)].left > 0) return id;
    }
    for (size_t i = 0; i < done.size(); i++)
      if (!finished(int64_t(i))) return wanted(int64_t(i));
    return -1;
  }
  // The block that unit i wanted is done.
  void advance(int64_t i) {
    Block& own = blocks[size_t(wanted(i))];
    own.left--, own.waiting--;
    done[size_t(i)]++;
    await(i);
  }

 private:
  int32_t find(const int32_t* slots, int64_t count, std::vector<int32_t>* table) {
    const size_t mask = table->size() - 1;
    for (size_t at = (size_t(uint32_t(slots[0])) * 2654435761u >> 8) & mask;; at = (at + 1) & mask) {
      int32_t& id = (*table)[at];
      if (id < 0) {
        id = int32_t(blocks.size());
        blocks.push_back({slots, count, 1, 0});
        return id;
      }
      Block& own = blocks[size_t(id)];
      if (own.count != count || std::memcmp(own.slots, slots, size_t(count) * 4) != 0) continue;
      own.left++;
      return id;
    }
  }
  void await(int64_t i) {
    const int32_t id = wanted(i);
    if (id < 0) return;
    Block& own = blocks[size_t(id)];
    if (++own.waiting == own.left) ready.push_back(id);
  }
};

// The units of a tile, all of `columns` columns.
template <class T, class Source>
struct SharedTile {
  const Attention<T, Source>& whole;
  const Unit* units;
  int64_t count, padded, floats;
  SharedBlocks blocks;
  uint32_t* panels;
  int32_t* last;
  float* sums;  // of each unit: all splits so far, and the split at work

  SharedTile(const Attention<T, Source>& attention, const Unit* of_tile, int64_t number)
      : whole(attention), units(of_tile), count(number), padded(panels_of(of_tile->columns) * LANES),
        floats(attention.running_floats(of_tile->columns)),
        blocks(attention.queries, of_tile, number, attention.block) {}

  void run() {
    panels = scratch<uint32_t>(QUERIES, count * padded * whole.key_steps);
    last = scratch<int32_t>(STATS, count * 3 * padded);
    sums = scratch<float>(OUTPUT, count * 2 * floats);
    for (int64_t i = 0; i < count; i++) {
      whole.pack_queries(units[i], panels + i * padded * whole.key_steps);
      whole.find_last(units[i], last + i * 3 * padded);
    }
    const auto memory = whole.buffers(units->columns, false);
    for (int32_t id; (id = blocks.next()) >= 0;) add(id, memory);
  }

 private:
  Running running(int64_t i, bool first) const { return running_at(sums + (2 * i + (first ? 0 : 1)) * floats, padded); }

  void add(int32_t id, const typename Attention<T, Source>::Buffers& memory) {
    const int64_t here = blocks.blocks[size_t(id)].count;
    int64_t users[TILE_UNITS], number = 0;
    for (int64_t i = 0; i < count; i++)
      if (blocks.wanted(i) == id) users[number++] = i;
    const Unit& reader = units[users[0]];
    const int64_t place = blocks.done[size_t(users[0])] * whole.block, context = whole.queries.contexts[reader.request];
    const Keys keys = whole.source.block(reader, place, here, steps_of<T>(here), memory.values);
    Ahead ahead;
    const int64_t after = place + whole.block;
    if (after < context) whole.source.ahead(reader, after, std::min(whole.block, context - after), &ahead);
    const int64_t share = ceil_div(ahead.total(), number * whole.pieces(reader.columns, here));
    for (int64_t n = 0; n < number; n++) {
      const int64_t i = users[n], first = blocks.done[size_t(i)] * whole.block;
      const bool fresh = first % SPLIT == 0;
      const Running run = running(i, first < SPLIT);
      if (fresh) whole.begin(run, padded);
      whole.add_block(units[i], first, here, fresh, panels + i * padded * whole.key_steps, last + i * 3 * padded, run,
                      memory, keys, &ahead, share);
      blocks.advance(i);
      const bool finished = blocks.finished(i);
      if (first >= SPLIT && (finished || (first + whole.block) % SPLIT == 0))
        whole.merge(running(i, true), run, units[i].columns);
      if (finished)
        for (int64_t c = 0; c < units[i].columns; c++) whole.finish(units[i], running(i, true), c);
    }
  }
};

// False: the units are not of single tokens of one head group with a plain context each, or too few for all threads.
template <class T, class Source>
bool run_shared(const Attention<T, Source>& whole, const Unit* units, int64_t count, int64_t threads) {
  const Queries& q = whole.queries;
  if (q.visible || q.window || q.first || q.outside || whole.heads.groups != 1) return false;
  const int64_t bytes = 4 * (2 * whole.running_floats(units->columns) + units->columns * whole.key_steps);
  const int64_t tile = std::min({TILE_UNITS, ceil_div(count, 4 * threads), TILE_BYTES / bytes});
  if (tile < 4) return false;
  for (int64_t i = 0; i < count; i++)
    if (q.tokens(units[i].request) != 1 || units[i].columns != units->columns || q.contexts[units[i].request] < 1)
      return false;
  parallel_products(ceil_div(count, tile), [&](int64_t task) {
    const int64_t from = task * tile, here = std::min(tile, count - from);
    SharedTile<T, Source> shared(whole, units + from, here);
    if (shared.blocks.worthwhile()) return shared.run();
    for (int64_t i = from; i < from + here; i++) whole.whole(units[i], i + 1 < from + here ? &units[i + 1] : nullptr);
  });
  return true;
}

}  // namespace moe
