// What Python hands to the kernel: one attention call as plain numbers and pointers, without any header of PyTorch.
//
// Three layouts become one here. Row r of a sequence's queries lies at q + first_q + r * q_stride.row. Row j of its
// keys lies at k + first_k + j * k_stride.row or, in a paged cache, in row j % block_size of the block that the table
// names for j / block_size. Strides and offsets count elements; the numbers of one head always follow one another.
#pragma once

#include <cstdint>

struct Stride {
    int64_t row;    // from one token to the next
    int64_t head;   // from one head to the next
    int64_t block;  // from one block of a paged cache to the next
};

struct Sequence {
    int64_t q_len;
    int64_t kv_len;
    int64_t first_q, first_k, first_v, first_out, first_lse;  // where its first row lies
    int64_t first_slope;                                      // where its ALiBi slopes start, one for each query head
    int64_t first_block;                                      // where its row of the block table starts
    int64_t tile_list;                                        // which entry of Call::tile_lists is its own
};

// The tiles that a pattern leaves (vllm_teach.attention.patterns.tile_csr): query tile i visits the tiles of keys
// k_tile[row_ptr[i]] ... k_tile[row_ptr[i + 1] - 1]. mask_index says which of `masks`, each [tile_q, TILE_KEYS] bytes,
// cuts the tile; -1: none does.
struct TileList {
    const int32_t* row_ptr;
    const int32_t* k_tile;
    const int32_t* mask_index;
    const uint8_t* masks;
};

struct Call {
    const void* q;
    const void* k;
    const void* v;
    void* out;
    float* lse;  // row r of query head h lies at first_lse + h * lse_head_stride + r

    Stride q_stride, k_stride, v_stride, out_stride;
    int64_t lse_head_stride;

    const Sequence* sequences;
    int64_t num_sequences;
    int64_t q_heads, kv_heads, head_dim;

    const int32_t* block_table;  // null: the keys of a sequence lie behind one another
    int64_t block_size;

    double scale;
    double softcap;       // 0: none
    const float* slopes;  // null: no ALiBi

    // Query i sees the keys from i + kv_len - q_len - left to i + kv_len - q_len + right, both inclusive.
    int64_t left, right;
    const TileList* tile_lists;  // null: the band above alone decides; else the band shows everything
    int64_t tile_q;              // queries of one tile in tile_lists

    int64_t threads;

    // 0: rows of k and v are numbers. Else they are packed (packed_rows.h), and this element of each is its scale.
    int64_t scale_place;
};

// How many keys one tile holds.
constexpr int TILE_KEYS = 64;
