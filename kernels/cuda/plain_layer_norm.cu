// LayerNorm as one writes it first, half in and half out; layer_norm.cu is what it is compared with.
//
// It is right, and its statistics are float32's. But it reads each row from memory three times, two bytes at a time,
// and adds up in shared memory with a barrier for every halving; and the residual sum before it is another kernel.

#include <cuda_fp16.h>

constexpr int kThreads = 256;

__device__ float tree_sum(float value) {
    __shared__ float partial[kThreads];
    partial[threadIdx.x] = value;
    __syncthreads();
    for (int distance = kThreads / 2; distance > 0; distance /= 2) {
        if (threadIdx.x < distance) partial[threadIdx.x] += partial[threadIdx.x + distance];
        __syncthreads();
    }
    const float sum = partial[0];
    __syncthreads();  // the next call overwrites it
    return sum;
}

// x and out are [rows, size], weight and bias [size]; one block of kThreads threads for each row.
extern "C" __global__ void plain_layer_norm(const __half* x, const __half* weight, const __half* bias, __half* out,
                                            int size, float eps) {
    x += static_cast<long long>(blockIdx.x) * size;
    out += static_cast<long long>(blockIdx.x) * size;
    float total = 0.0f;
    for (int i = threadIdx.x; i < size; i += kThreads) total += __half2float(x[i]);
    const float mean = tree_sum(total) / size;
    float squares = 0.0f;
    for (int i = threadIdx.x; i < size; i += kThreads) {
        const float centred = __half2float(x[i]) - mean;
        squares += centred * centred;
    }
    const float inverse = rsqrtf(tree_sum(squares) / size + eps);
    for (int i = threadIdx.x; i < size; i += kThreads) {
        const float value = (__half2float(x[i]) - mean) * inverse;
        out[i] = __float2half_rn(value * __half2float(weight[i]) + __half2float(bias[i]));
    }
}

// out = x + residual for `count` elements: the kernel that has to run before it where there is a residual.
extern "C" __global__ void plain_add(const __half* x, const __half* residual, __half* out, long long count) {
    const long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (i < count) out[i] = __float2half_rn(__half2float(x[i]) + __half2float(residual[i]));
}
