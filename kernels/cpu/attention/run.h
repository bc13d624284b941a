// One attention call from the plan to the last row, for elements of type T.
//
// Where to read on: call.h says what is asked for, plan.h cuts it into work items, attend.h does one of them, with the
// two matrix products of multiply.h (few_rows.h, when one token is decoded) and the softmax of softmax.h between them.
// packed_rows.h reads an INT8 cache.
// All of it is written in the vectors of ../vec.h and compiled anew for each instruction set.
#pragma once

#include <cstdlib>
#include <new>

#include "attend.h"

#ifdef _OPENMP
#include <omp.h>
#else  // one thread
inline int omp_get_thread_num() { return 0; }
#endif

constexpr int64_t LEAST_COST = 512;  // of a thread's work; less is done before another thread has woken up
constexpr int64_t MANY_PART_ROWS = 1024;

// Memory whose start is a multiple of 64 bytes, as whole vectors like it.
struct Memory {
    explicit Memory(int64_t bytes) : start(static_cast<char*>(std::aligned_alloc(64, round_up(bytes + 64, 64)))) {
        if (!start) throw std::bad_alloc();
    }
    ~Memory() { std::free(start); }
    Memory(const Memory&) = delete;
    char* const start;
};

template <class T>
void run(const Call& call) {
    const Plan plan = make_plan(call);
    const Attention<T> attention(call);
    const int64_t items = plan.items.size(), merges = plan.merges.size();
    const int64_t threads = std::clamp<int64_t>(std::min(items, plan.cost / LEAST_COST), 1, call.threads);

    const int64_t bytes = round_up(attention.workspace_bytes(plan.most_rows), 4096);
    const int64_t part_size = round_up(attention.part_size(plan.most_rows), 16);
    const Memory workspaces(threads * bytes), parts(plan.parts * part_size * int64_t(sizeof(float)));
    float* const first_part = reinterpret_cast<float*>(parts.start);
    auto workspace = [&] { return workspaces.start + omp_get_thread_num() * bytes; };

#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < items; ++i) attention.attend(plan.items[i], workspace(), first_part, part_size);

    // To merge the parts of a few decoded tokens is less work than to wake the threads once more.
    const bool many = plan.parts * plan.most_rows > MANY_PART_ROWS;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (many)
    for (int64_t i = 0; i < merges; ++i)
        attention.merge(plan.merges[i], first_part, part_size, reinterpret_cast<float*>(workspace()));
}

// Returns 0, or 1 when there is not enough memory.
template <class T>
int run_or_fail(const Call& call) {
    try {
        run<T>(call);
        return 0;
    } catch (const std::bad_alloc&) {
        return 1;
    }
}
