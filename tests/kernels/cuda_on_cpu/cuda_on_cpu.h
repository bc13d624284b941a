// As much of CUDA as kernels/cuda/layer_norm.cu uses, on the CPU, in one thread: one block at a time, and each of its
// threads as a context of its own, which runs until it waits for others.
//
// Of those that can go on, the first one does: a warp runs ahead of the next as far as barriers let it, so that a
// missing one shows, the same way each time; one that not all threads reach ends the launch with an error. Shared
// memory starts as NaN. Arithmetic is the CPU's: rsqrtf is exact here, and within two units in the last place on a GPU.
#pragma once

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#define __device__
#define __global__
#define __shared__
#define __launch_bounds__(threads)
#define __align__(bytes) __attribute__((aligned(bytes)))

struct dim3 {
    unsigned x;
    explicit dim3(unsigned x = 1) : x(x) {}
};
using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorLaunchTimeout };
inline const char* cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInvalidValue ? "invalid argument" : "threads wait for ever at a barrier";
}

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};

struct Barrier {
    unsigned threads, arrived = 0, opened = 0;  // how many it waits for, how many wait, how often it has opened
};
struct Warp {
    Barrier barrier{32};
    float values[32];
};
struct Thread {
    ucontext_t context;
    std::vector<char> stack = std::vector<char>(32 * 1024);
    bool done = false;
    const Barrier* waits_at = nullptr;
    unsigned until_opened = 0;

    bool can_go_on() const { return !done && (waits_at == nullptr || waits_at->opened == until_opened); }
};

float shared_memory[48 * 1024 / sizeof(float)] __attribute__((aligned(16)));  // of the one block that runs
dim3 threadIdx, blockIdx, blockDim;
Barrier block_barrier;
std::vector<Warp> warps;
std::vector<Thread> threads;
ucontext_t scheduler;
std::function<void()> run_kernel;

inline void wait_at(Barrier& barrier) {
    if (++barrier.arrived == barrier.threads) {
        barrier.arrived = 0, ++barrier.opened;
        return;
    }
    Thread& self = threads[threadIdx.x];
    self.waits_at = &barrier, self.until_opened = barrier.opened + 1;
    swapcontext(&self.context, &scheduler);
    self.waits_at = nullptr;
}

inline void __syncthreads() { wait_at(block_barrier); }

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    Warp& warp = warps[threadIdx.x / 32];
    warp.values[threadIdx.x % 32] = value;
    wait_at(warp.barrier);
    const float other = warp.values[threadIdx.x % 32 ^ distance];
    wait_at(warp.barrier);
    return other;
}

inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

inline void run_thread() {
    run_kernel();
    threads[threadIdx.x].done = true;
}

inline cudaError_t run_block(unsigned count) {
    std::fill(std::begin(shared_memory), std::end(shared_memory), std::numeric_limits<float>::quiet_NaN());
    block_barrier = Barrier{count};
    warps.assign(count / 32, Warp{});
    threads = std::vector<Thread>(count);
    for (Thread& thread : threads) {
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = thread.stack.data();
        thread.context.uc_stack.ss_size = thread.stack.size();
        thread.context.uc_link = &scheduler;
        makecontext(&thread.context, run_thread, 0);
    }
    while (true) {
        const auto next = std::find_if(threads.begin(), threads.end(), [](const Thread& t) { return t.can_go_on(); });
        if (next == threads.end()) break;
        threadIdx = dim3(static_cast<unsigned>(next - threads.begin()));
        swapcontext(&scheduler, &next->context);
    }
    const bool all = std::all_of(threads.begin(), threads.end(), [](const Thread& t) { return t.done; });
    return all ? cudaSuccess : cudaErrorLaunchTimeout;
}

template <typename... Expected, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...), Given... given) {
    if (config->dynamicSmemBytes > sizeof shared_memory || config->blockDim.x % 32 != 0) return cudaErrorInvalidValue;
    run_kernel = [&] { kernel(given...); };
    blockDim = config->blockDim;
    for (unsigned block = 0; block < config->gridDim.x; ++block) {
        blockIdx = dim3(block);
        if (cudaError_t error = run_block(config->blockDim.x); error != cudaSuccess) return error;
    }
    return cudaSuccess;
}
