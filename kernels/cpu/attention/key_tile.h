// Where one tile of keys and values lies: behind one another, or in the blocks of a cache.
#pragma once

#include <algorithm>
#include <cstring>

#include "plan.h"

template <class T>
struct KeyTile {
    int64_t first_key, n;     // it holds the n keys from first_key on, n <= TILE_KEYS
    const uint8_t* masks;     // [tile_q, TILE_KEYS]; null: none
    const T* keys[TILE_KEYS];  // where the n rows start; the last one is repeated, so that all can be fetched ahead
    const T* values[TILE_KEYS];
};

// Have a row brought to the cache while something else is computed.
template <class T>
inline void prefetch_row(const T* row, int64_t head_dim) {
    for (int64_t c = 0; c < head_dim; c += 64 / sizeof(T)) __builtin_prefetch(row + c);
}

// The tile that `entry` names: a number of a tile or, with tile lists, an entry of the sequence's list.
template <class T>
inline KeyTile<T> find_tile(const Call& call, const Item& item, const Sequence& s, int64_t entry) {
    KeyTile<T> tile;
    tile.masks = nullptr;
    int64_t number = entry;
    if (call.tile_lists) {
        const TileList& list = call.tile_lists[s.tile_list];
        number = list.k_tile[entry];
        const int64_t mask = list.mask_index[entry];
        if (mask >= 0) tile.masks = list.masks + mask * call.tile_q * TILE_KEYS;
    }
    tile.first_key = number * TILE_KEYS;
    tile.n = std::min<int64_t>(TILE_KEYS, s.kv_len - tile.first_key);

    const T* k = static_cast<const T*>(call.k) + s.first_k + item.kv_head * call.k_stride.head;
    const T* v = static_cast<const T*>(call.v) + s.first_v + item.kv_head * call.v_stride.head;
    const int32_t* blocks = call.block_table ? call.block_table + s.first_block : nullptr;
    int64_t block = blocks ? tile.first_key / call.block_size : 0;
    int64_t row = blocks ? tile.first_key % call.block_size : tile.first_key;
    for (int64_t j = 0; j < tile.n; ++j, ++row) {
        if (blocks && row == call.block_size) ++block, row = 0;
        const int64_t physical = blocks ? blocks[block] : 0;
        tile.keys[j] = k + physical * call.k_stride.block + row * call.k_stride.row;
        tile.values[j] = v + physical * call.v_stride.block + row * call.v_stride.row;
    }
    std::fill(tile.keys + tile.n, tile.keys + TILE_KEYS, tile.keys[tile.n - 1]);
    std::fill(tile.values + tile.n, tile.values + TILE_KEYS, tile.values[tile.n - 1]);
    return tile;
}

// What `count` rows of a mask, [count, TILE_KEYS] bytes of 0 or 1, let through.
enum class Shown { NOTHING, SOME, ALL };

inline Shown shown(const uint8_t* mask, int64_t count) {
    uint64_t any = 0, all = ~uint64_t(0);
    for (int64_t i = 0; i < count * TILE_KEYS; i += 8) {
        uint64_t eight;
        std::memcpy(&eight, mask + i, 8);
        any |= eight;
        all &= eight;
    }
    if (any == 0) return Shown::NOTHING;
    return all == 0x0101010101010101 ? Shown::ALL : Shown::SOME;
}
