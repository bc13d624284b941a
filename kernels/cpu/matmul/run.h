// One product from the plan to the last rounding.
//
// Where to read on: call.h says what is asked for and how the weight lies in memory. tokens.h lays out the input,
// multiply.h is the inner loop, unpack.h what it does with each word of codes, finish.h what comes after the sums.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "finish.h"
#include "multiply.h"

#if defined(__AVX512F__)
constexpr int MOST_SUMS = 24;  // of 32 registers
#else
constexpr int MOST_SUMS = 8;   // of 16
#endif
constexpr int MOST_TOKENS = MOST_SUMS, MOST_VECTORS = 4;
constexpr int64_t CHUNK_BYTES = 256 << 10;  // of codes, which stay in a core's cache while the tokens pass by
constexpr int64_t ITEMS_PER_THREAD = 3;     // so that a thread which is held up leaves some of its share to others
constexpr int64_t LEAST_WORK = 60'000;      // multiplications of a thread; less is done before another has woken up
constexpr int64_t MANY_INPUTS = 1 << 15;    // numbers of x from which on several threads lay them out

// How many vectors of rows go with that many tokens.
constexpr int vectors_for(int tokens) {
    int vectors = MOST_VECTORS;
    while (vectors > 1 && vectors * tokens > MOST_SUMS) vectors /= 2;
    return vectors;
}

// The smallest size of a block that holds `tokens`, as a constant: `use` is called with it.
template <int SIZE, int... LARGER, class Use>
inline void with_block_size(int64_t tokens, Use use) {
    if constexpr (sizeof...(LARGER) > 0)
        if (tokens > SIZE) return with_block_size<LARGER...>(tokens, use);
    use(std::integral_constant<int, SIZE>{});
}
template <class Use>
inline void with_block_size(int64_t tokens, Use use) {
    if constexpr (MOST_TOKENS == 24)
        with_block_size<1, 2, 3, 4, 6, 8, 12, 16, 24>(tokens, use);
    else
        with_block_size<1, 2, 4, 6, 8>(tokens, use);
}

// Memory whose start is a multiple of 64 bytes.
template <class Element>
inline auto allocate(int64_t count) {
    void* memory = std::aligned_alloc(64, (count * sizeof(Element) + 127) / 64 * 64);
    if (!memory) throw std::bad_alloc();
    return std::unique_ptr<Element, decltype(&std::free)>(static_cast<Element*>(memory), std::free);
}

// Calls `work` with the numbers below `count`, in several threads; in one, OpenMP is left alone, which takes its time.
template <class Work>
inline void share_out(int64_t count, int64_t threads, Work work) {
    if (threads <= 1) {
        for (int64_t i = 0; i < count; ++i) work(i);
        return;
    }
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < count; ++i) work(i);
}

template <class Operand, int BITS>
class Product {
    static constexpr int PER_PANEL = Panels<BITS>::PER_PANEL;

   public:
    Product(const Weight& weight, const Call& call)
        : weight_(weight),
          call_(call),
          panels_(weight),
          count_((weight.out + PANEL_ROWS - 1) / PANEL_ROWS),
          blocks_((call.tokens + MOST_TOKENS - 1) / MOST_TOKENS),
          inner_(weight.in / Operand::VALUES) {
        with_block_size(call.tokens - (blocks_ - 1) * MOST_TOKENS, [this](auto size) { last_size_ = size; });
    }

    void run() const {
        const int64_t tokens = (blocks_ - 1) * MOST_TOKENS + last_size_;
        const auto memory = allocate<uint32_t>(tokens * (inner_ + panels_.groups));
        uint32_t* const elements = memory.get();
        float* const sums = reinterpret_cast<float*>(elements + tokens * inner_);
        if (call_.x_type == BFLOAT16)
            pack<BFloat16>(elements, sums);
        else if constexpr (Operand::VALUES == 1) {  // pairs are bfloat16
            if (call_.x_type == FLOAT32)
                pack<float>(elements, sums);
            else
                pack<Float16>(elements, sums);
        }
        multiply_all(elements, sums);
    }

   private:
    int64_t block_size(int64_t block) const { return block + 1 < blocks_ ? MOST_TOKENS : last_size_; }
    int64_t threads(int64_t work) const { return std::clamp<int64_t>(work, 1, call_.threads); }

    template <class T>
    void pack(uint32_t* elements, float* sums) const {
        const auto rows = allocate<T>(weight_.columns ? blocks_ * weight_.in : 0);
        share_out(blocks_, threads(call_.tokens * weight_.in / MANY_INPUTS), [&](int64_t b) {
            const int64_t first = b * MOST_TOKENS, here = std::min<int64_t>(MOST_TOKENS, call_.tokens - first);
            pack_tokens<Operand>(weight_, static_cast<const T*>(call_.x) + first * call_.x_stride, call_.x_stride, here,
                                 block_size(b), elements + first * inner_, sums + first * panels_.groups,
                                 rows.get() + (weight_.columns ? b * weight_.in : 0));
        });
    }

    // An item is a run of panels and a run of blocks. Few panels for many threads: the blocks are shared out, too.
    void multiply_all(const uint32_t* elements, const float* sums) const {
        const int64_t unit = call_.gated ? 2 : 1;
        const int64_t team = threads(count_ * PANEL_ROWS * weight_.in * call_.tokens / LEAST_WORK);
        const int64_t share = team == 1 ? count_ : (count_ + team * ITEMS_PER_THREAD - 1) / (team * ITEMS_PER_THREAD);
        const int64_t largest = std::max<int64_t>(1, CHUNK_BYTES / panels_.bytes);
        const int64_t chunk = (std::min(share, largest) + unit - 1) / unit * unit;
        const int64_t chunks = (count_ + chunk - 1) / chunk;
        const int64_t parts = std::min((team * ITEMS_PER_THREAD + chunks - 1) / chunks, blocks_);
        share_out(chunks * parts, std::min(team, chunks * parts), [&](int64_t item) {
            const int64_t first = item / parts * chunk, end = std::min(first + chunk, count_), part = item % parts;
            for (int64_t b = blocks_ * part / parts; b < blocks_ * (part + 1) / parts; ++b) {
                const TokenBlock tokens{elements + b * MOST_TOKENS * inner_, sums + b * MOST_TOKENS * panels_.groups};
                with_block_size(block_size(b), [&](auto size) {
                    visit<decltype(size)::value>(first, end, b * MOST_TOKENS, tokens);
                });
            }
        });
    }

    // A gate is computed next to what it opens.
    int64_t panel_at(int64_t place) const { return call_.gated ? place % 2 * (count_ / 2) + place / 2 : place; }

    // The panels at the places from `first` to `end`, as many vectors of rows at a time as fit into registers.
    template <int TOKENS>
    void visit(int64_t first, int64_t end, int64_t first_token, const TokenBlock& tokens) const {
        constexpr int VECTORS = vectors_for(TOKENS), BATCH = std::max(VECTORS, 2 * PER_PANEL);
        alignas(64) float totals[BATCH * TOKENS * LANES];
        for (int64_t at = first * PER_PANEL; at < end * PER_PANEL; at += BATCH) {
            const int64_t here = std::min<int64_t>(BATCH, end * PER_PANEL - at);
            add_up<VECTORS, TOKENS>(at, at + here, tokens, totals);
            for (int64_t v = 0; v < here; ++v) {
                if (!call_.gated)
                    finish<TOKENS>(at + v, first_token, totals + v * TOKENS * LANES, nullptr);
                else if ((at + v) / PER_PANEL % 2 == 0)
                    finish<TOKENS>(at + v, first_token, totals + v * TOKENS * LANES,
                                   totals + (v + PER_PANEL) * TOKENS * LANES);
            }
        }
    }

    template <int VECTORS, int TOKENS>
    void add_up(int64_t at, int64_t end, const TokenBlock& tokens, float* totals) const {
        const int64_t ahead = std::max(1, VECTORS / PER_PANEL / (call_.gated ? 2 : 1)) * panels_.bytes;
        for (; end - at >= VECTORS; at += VECTORS, totals += VECTORS * TOKENS * LANES) {
            const uint8_t* codes[VECTORS];
            int64_t numbers[VECTORS];
            for (int v = 0; v < VECTORS; ++v) {
                numbers[v] = (at + v) % PER_PANEL;
                codes[v] = panels_.codes(panel_at((at + v) / PER_PANEL), numbers[v]);
            }
            multiply<Operand, BITS, VECTORS, TOKENS>(panels_, weight_, codes, numbers, ahead, tokens, totals);
        }
        if constexpr (VECTORS > 1) add_up<VECTORS / 2, TOKENS>(at, end, tokens, totals);
    }

    // Write one vector of rows for the tokens of a block; `opened` is what the rows are the gates of, or null.
    template <int TOKENS>
    void finish(int64_t vector, int64_t first_token, const float* totals, const float* opened) const {
        const int64_t width = opened ? weight_.out / 2 : weight_.out;
        const int64_t row = vector / PER_PANEL / (opened ? 2 : 1) * PANEL_ROWS + vector % PER_PANEL * LANES;
        if (row >= width) return;  // of a panel that is not full
        const int64_t tokens = std::min<int64_t>(TOKENS, call_.tokens - first_token);
        const Floats bias = bias_of(row), other_bias = opened ? bias_of(width + row) : Floats{};
        for (int64_t t = 0; t < tokens; ++t) {
            Floats result = load<Floats>(totals + t * LANES) + bias;
            if (opened) result = silu(result) * (load<Floats>(opened + t * LANES) + other_bias);
            store_as(call_.out_type, call_.out, (first_token + t) * width + row, result, width - row);
        }
    }
    Floats bias_of(int64_t row) const {
        return call_.bias ? load_some(call_.bias + row, weight_.out - row) : Floats{};
    }

    const Weight& weight_;
    const Call& call_;
    const Panels<BITS> panels_;
    const int64_t count_;   // panels
    const int64_t blocks_;  // of tokens: all of MOST_TOKENS but for the last
    const int64_t inner_;   // elements of a token
    int64_t last_size_;
};

// Returns 0, or 1 when there is not enough memory.
template <int BITS>
int run_or_fail(const Weight& weight, const Call& call) {
    try {
#if defined(__AVX512BF16__)
        if (call.x_type == BFLOAT16) return Product<Pairs, BITS>(weight, call).run(), 0;
#endif
        Product<Singles, BITS>(weight, call).run();
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
