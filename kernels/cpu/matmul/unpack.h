// From packed codes to operands of multiply-adds, in registers.
#pragma once

#include "../elements.h"
#include "call.h"

// How many inputs have their codes in one 32-bit word.
template <int BITS>
constexpr int WORD_INPUTS = 32 / BITS;

// The first bit of input i's code. Even inputs lie in the lower half of the word, odd ones in the upper: one shift to
// the right, and the codes of two neighbours stand lowest in both halves.
template <int BITS>
constexpr int first_bit(int i) {
    return i % 2 * 16 + i / 2 * BITS;
}

// The codes of input i, less 2^(BITS - 1), as numbers. The shift to the left puts the code's sign where the word's is.
template <int BITS>
inline Floats code_numbers(Words word, int i) {
    return __builtin_convertvector((Ints)(word << (32 - BITS - first_bit<BITS>(i))) >> (32 - BITS), Floats);
}

// An operand is how numbers are held while they are multiplied: an element is 32 bits of VALUES neighbouring inputs.
//
// Singles: one float32.
struct Singles {
    static constexpr int VALUES = 1;

    static Floats multiply_add(Floats sum, Words a, Words b) { return sum + (Floats)a * (Floats)b; }

    template <int BITS>
    static Words unpack(Words word, int i) {
#if defined(__AVX512F__)
        // A table instead of shifts and a conversion: the instruction looks at the lowest 4 bits of each lane.
        const Floats table = {0, 1, 2, 3, 4, 5, 6, 7, -8, -7, -6, -5, -4, -3, -2, -1};
        if (BITS == 4)
            return (Words)_mm512_permutexvar_ps((__m512i)(word >> first_bit<BITS>(i)), (__m512)table);
#endif
        return (Words)code_numbers<BITS>(word, i);
    }
};

// Pairs: two bfloat16, in which every code is exact, the first one in the lower half. One instruction multiplies two
// pairs and adds both products to a float32 sum.
#if defined(__AVX512BF16__)
struct Pairs {
    static constexpr int VALUES = 2;

    static Floats multiply_add(Floats sum, Words a, Words b) {
        return (Floats)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
    }

    template <int BITS>
    static Words unpack(Words word, int i) {
        if (BITS == 4) {
            // The instruction looks at the lowest 5 bits of each half, the last of which is a neighbour's: the table of
            // -8 ... 7 is there twice.
            const Words table = {0x3f800000, 0x40404000, 0x40a04080, 0x40e040c0, 0xc0e0c100, 0xc0a0c0c0,
                                 0xc040c080, 0xbf80c000, 0x3f800000, 0x40404000, 0x40a04080, 0x40e040c0,
                                 0xc0e0c100, 0xc0a0c0c0, 0xc040c080, 0xbf80c000};
            return (Words)_mm512_permutexvar_epi16((__m512i)(word >> first_bit<BITS>(2 * i)), (__m512i)table);
        }
        // A float32 with at most 8 significant bits is a bfloat16 in its upper half.
        return (Words)code_numbers<BITS>(word, 2 * i) >> 16 | (Words)code_numbers<BITS>(word, 2 * i + 1);
    }
};
#endif

// Where things lie in the panels of a weight.
template <int BITS>
struct Panels {
    static constexpr int PER_PANEL = PANEL_ROWS / LANES;  // vectors of rows
    static constexpr int64_t WORD_STEP = PANEL_ROWS * 4;  // bytes from one input's word to the next

    explicit Panels(const Weight& weight)
        : first_(weight.panels),
          groups(weight.in / weight.group),
          codes_(weight.in / WORD_INPUTS<BITS> * WORD_STEP),
          zeros_(codes_ + groups * PANEL_ROWS * 2),
          bytes((zeros_ + groups * PANEL_ROWS + 63) / 64 * 64) {}

    // The codes of LANES rows: the vector of that number within its panel.
    const uint8_t* codes(int64_t panel, int64_t vector) const {
        return first_ + panel * bytes + vector * VECTOR_BYTES;
    }

    // Their scales and zeros, the zeros less 2^(BITS - 1), as what codes() gave is.
    Floats scales(const uint8_t* codes, int64_t vector, int64_t group) const {
        const uint8_t* panel = codes - vector * VECTOR_BYTES;
        return load_floats(reinterpret_cast<const Float16*>(panel + codes_) + group * PANEL_ROWS + vector * LANES);
    }
    Floats zeros(const uint8_t* codes, int64_t vector, int64_t group) const {
        const uint8_t* panel = codes - vector * VECTOR_BYTES;
        const Bytes zeros = load<Bytes>(panel + zeros_ + group * PANEL_ROWS + vector * LANES);
        return __builtin_convertvector(__builtin_convertvector(zeros, Ints), Floats) - float(1 << (BITS - 1));
    }

   private:
    const uint8_t* const first_;

   public:
    const int64_t groups;

   private:
    const int64_t codes_, zeros_;

   public:
    const int64_t bytes;  // of one panel
};
