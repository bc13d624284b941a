// As much of CUDA as kernels/cuda/layer_norm.cu uses, on the CPU: a thread for each CUDA thread, one block at a time.
//
// Barriers and the exchange within a warp are real, so that a missing one, or one that not all threads reach, shows.
// Arithmetic is the CPU's: rsqrtf is exact here, and within two units in the last place on a GPU.
#pragma once

#include <algorithm>
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <limits>
#include <thread>
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
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
inline const char* cudaGetErrorString(cudaError_t) { return "invalid argument"; }

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
};

struct Warp {
    std::barrier<> together{32};
    float values[32];
};
struct Block {
    explicit Block(unsigned threads) : together(threads), warps(threads / 32) {}
    std::barrier<> together;
    std::deque<Warp> warps;
};

float shared_memory[48 * 1024 / sizeof(float)] __attribute__((aligned(16)));  // of the one block that runs
thread_local dim3 threadIdx, blockIdx, blockDim;
thread_local Block* this_block;

inline void __syncthreads() { this_block->together.arrive_and_wait(); }

inline float __shfl_xor_sync(unsigned, float value, int distance) {
    Warp& warp = this_block->warps[threadIdx.x / 32];
    warp.values[threadIdx.x % 32] = value;
    warp.together.arrive_and_wait();
    const float other = warp.values[threadIdx.x % 32 ^ distance];
    warp.together.arrive_and_wait();
    return other;
}

inline float rsqrtf(float x) { return 1 / std::sqrt(x); }

template <typename... Expected, typename... Given>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Expected...), Given... given) {
    if (config->dynamicSmemBytes > sizeof shared_memory || config->blockDim.x % 32 != 0) return cudaErrorInvalidValue;
    for (unsigned block = 0; block < config->gridDim.x; ++block) {
        std::fill(std::begin(shared_memory), std::end(shared_memory), std::numeric_limits<float>::quiet_NaN());
        Block here(config->blockDim.x);
        std::vector<std::jthread> threads;  // joins them all
        for (unsigned thread = 0; thread < config->blockDim.x; ++thread)
            threads.emplace_back([&, block, thread] {
                threadIdx = dim3(thread), blockIdx = dim3(block), blockDim = config->blockDim, this_block = &here;
                kernel(given...);
            });
    }
    return cudaSuccess;
}
