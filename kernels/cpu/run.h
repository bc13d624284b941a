// One attention call from the plan to the last row, for elements of type T.
#pragma once

#include <cstdlib>

#include "attend.h"

#ifdef _OPENMP
#include <omp.h>
#else  // one thread
inline int omp_get_thread_num() { return 0; }
#endif

constexpr int64_t LEAST_WORK = 1 << 10;  // rows times tiles; below it, waking a second thread costs more than it brings

struct Memory {
    explicit Memory(int64_t bytes) : start(static_cast<char*>(std::aligned_alloc(64, round_up(bytes + 64, 64)))) {}
    ~Memory() { std::free(start); }
    Memory(const Memory&) = delete;
    char* const start;
};

// Returns 0, or 1 when there is not enough memory.
template <class T>
int run(const Call& call) {
    const Plan plan = make_plan(call);
    const Attention<T> attention(call);
    const int64_t items = plan.items.size(), merges = plan.merges.size();
    const int64_t threads =
        std::clamp<int64_t>(std::min(items, plan.work / LEAST_WORK), 1, std::max<int64_t>(1, call.threads));

    const int64_t bytes = round_up(attention.workspace_bytes(plan.most_rows), 4096);
    const int64_t part_size = round_up(attention.part_size(plan.most_rows), 16);
    const Memory workspaces(threads * bytes), parts(plan.parts * part_size * int64_t(sizeof(float)));
    if (!workspaces.start || !parts.start) return 1;
    float* const part_start = reinterpret_cast<float*>(parts.start);

#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < items; ++i)
        attention.attend(plan.items[i], workspaces.start + omp_get_thread_num() * bytes, part_start, part_size);

#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < merges; ++i)
        attention.merge(plan.merges[i], part_start, part_size,
                        reinterpret_cast<float*>(workspaces.start + omp_get_thread_num() * bytes));
    return 0;
}
