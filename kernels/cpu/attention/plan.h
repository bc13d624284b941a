// How one attention call is cut into work items, which threads take one after another.
//
// An item is a tile of queries of one sequence with all query heads that share one key head, so that a packed tile of
// keys serves the whole group. Where that gives too few items for the threads (one long sequence being decoded), the
// keys are split as well, and a second round merges the parts: FlashDecoding (https://crfm.stanford.edu/2023/10/12/).
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "call.h"

struct Item {
    int32_t sequence, kv_head;
    int64_t first_query, queries;
    int64_t first_tile, end_tile;  // of the keys; with tile lists: entries of the list
    int64_t part;                  // where its unfinished result is kept; -1: it sees all its keys, and finishes
};

// The parts of one tile of queries: `count` from `first_part` on, laid out one after another.
struct Merge {
    Item item;
    int64_t first_part, count;
};

struct Plan {
    std::vector<Item> items;  // the most expensive first, so that no thread is left alone with one at the end
    std::vector<Merge> merges;
    int64_t parts = 0;
    int64_t most_rows = 0;  // rows of queries of the largest item
    int64_t cost = 0;       // of all items
};

constexpr int64_t MOST_ROWS = 384;       // of an item: its queries and sums stay in the second-level cache
constexpr int64_t LEAST_ROWS = 48;       // fewer make packing a tile of keys the larger part of the work
constexpr int64_t LEAST_PART = 8;        // tiles; shorter parts are not worth their merge
constexpr int64_t ITEMS_PER_THREAD = 4;  // so that threads that are done early find something to do
constexpr int64_t TILE_COST = 16;        // of reading and packing a tile of keys, in rows of queries that use it

inline int64_t cost(const Item& item, int64_t group) {
    return (item.end_tile - item.first_tile) * (item.queries * group + TILE_COST);
}

// The tiles of keys, or entries of the tile list, that queries from `first` on visit.
inline std::pair<int64_t, int64_t> tiles_of(const Call& call, const Sequence& s, int64_t first, int64_t queries) {
    if (call.tile_lists) {
        const int32_t* row_ptr = call.tile_lists[s.tile_list].row_ptr + first / call.tile_q;
        return {row_ptr[0], row_ptr[1]};
    }
    const int64_t position = first + s.kv_len - s.q_len;
    const int64_t first_key = std::max<int64_t>(0, position - call.left);
    const int64_t last_key = std::min(s.kv_len - 1, position + queries - 1 + call.right);
    if (last_key < first_key) return {0, 0};
    return {first_key / TILE_KEYS, last_key / TILE_KEYS + 1};
}

inline int64_t count_items(const Call& call, int64_t queries) {
    int64_t count = 0;
    for (int64_t i = 0; i < call.num_sequences; ++i)
        count += (call.sequences[i].q_len + queries - 1) / queries * call.kv_heads;
    return count;
}

// Queries per item: tile lists fix them; else as many as MOST_ROWS allows, fewer where threads would lack work.
inline int64_t choose_queries(const Call& call, int64_t group) {
    if (call.tile_lists) return call.tile_q;
    int64_t rows = MOST_ROWS;
    while (rows > LEAST_ROWS && count_items(call, std::max<int64_t>(1, rows / group)) < ITEMS_PER_THREAD * call.threads)
        rows /= 2;
    return std::max<int64_t>(1, rows / group);
}

// The tiles of queries of all sequences, each for the first key head, with all tiles of keys that it visits.
inline std::vector<Item> query_tiles(const Call& call, int64_t queries) {
    std::vector<Item> found;
    for (int64_t i = 0; i < call.num_sequences; ++i) {
        const Sequence& s = call.sequences[i];
        for (int64_t first = 0; first < s.q_len; first += queries) {
            const int64_t here = std::min(queries, s.q_len - first);
            const auto [first_tile, end_tile] = tiles_of(call, s, first, here);
            found.push_back({int32_t(i), 0, first, here, first_tile, end_tile, -1});
        }
    }
    return found;
}

// Add an item, or `count` parts of it that share its tiles of keys out among them.
inline void add(Plan& plan, const Item& item, int64_t count) {
    if (count <= 1) return plan.items.push_back(item);
    const int64_t tiles = item.end_tile - item.first_tile;
    plan.merges.push_back({item, plan.parts, count});
    for (int64_t i = 0; i < count; ++i) {
        Item part = item;
        part.first_tile = item.first_tile + tiles * i / count;
        part.end_tile = item.first_tile + tiles * (i + 1) / count;
        part.part = plan.parts++;
        plan.items.push_back(part);
    }
}

inline Plan make_plan(const Call& call) {
    Plan plan;
    const int64_t group = call.q_heads / call.kv_heads;
    const std::vector<Item> tiles = query_tiles(call, choose_queries(call, group));
    for (const Item& tile : tiles) {
        plan.cost += cost(tile, group) * call.kv_heads;
        plan.most_rows = std::max(plan.most_rows, tile.queries * group);
    }
    // An item that costs more than its share is split.
    const int64_t share = std::max<int64_t>(1, plan.cost / (ITEMS_PER_THREAD * call.threads));
    for (Item item : tiles) {
        const int64_t wanted = call.threads == 1 ? 1 : (cost(item, group) + share - 1) / share;
        const int64_t parts = std::min(wanted, (item.end_tile - item.first_tile) / LEAST_PART);
        for (item.kv_head = 0; item.kv_head < call.kv_heads; ++item.kv_head) add(plan, item, parts);
    }
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [group](const Item& a, const Item& b) { return cost(a, group) > cost(b, group); });
    return plan;
}
