// LayerNorm and RMSNorm, each with or without the residual sum before it: one thread block computes one row.
//
// A row comes from memory once. Its threads keep it in shared memory, where they pass over it for the mean, for the
// squares of what the mean leaves, and to write; only a row that does not fit is read again. Statistics are float32 in
// two passes: sums of x and x*x in one pass would cancel for a row far from 0.
//
// There is no PyTorch in here: nvcc alone compiles the file, and vllm_teach/kernels/cuda_norms.py calls norm_launch
// with pointers. cudaLaunchKernelEx instead of <<<...>>> leaves it a file that a C++ compiler can read, which is how
// tests/kernels/test_cuda_emulated.py runs it without a GPU.

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <type_traits>

// One norm over the rows of a matrix; sizes and strides count elements. out and sum overlap with nothing else.
struct NormCall {
    const void* x;         // [rows, size]; row r lies at x + r * x_stride
    const void* residual;  // the same with its own stride; null: none is added
    const void* weight;    // [size]; null: 1
    const void* bias;      // [size]; null: 0. RMSNorm has none
    void* out;             // [rows, size]
    void* sum;             // [rows, size]: gets x + residual, which is what is normalised then

    int64_t x_stride, residual_stride;
    int64_t rows, size;
    float eps;
};

struct LayerNorm {};
struct RmsNorm {};

// The first floats hold one partial sum for each warp, the rest a row.
extern __shared__ __align__(16) float shared_memory[];

namespace {

constexpr int kWarp = 32;
constexpr int kMostThreads = 512;
constexpr int kPartials = kMostThreads / kWarp;
// The 48 KiB that every GPU grants without being asked, less the partial sums.
constexpr int64_t kMostHeldBytes = 48 * 1024 - kPartials * sizeof(float);

// What one thread loads at once: 16 bytes, the widest load there is, or one element where rows are not aligned to that.
template <typename T, int kLanes>
struct alignas(sizeof(T) * kLanes) Vector {
    static constexpr int kWidth = kLanes;
    T lane[kLanes];
};

__device__ float widen(float value) { return value; }
__device__ float widen(__half value) { return __half2float(value); }
__device__ float widen(__nv_bfloat16 value) { return __bfloat162float(value); }

__device__ void narrow(float value, float& to) { to = value; }
__device__ void narrow(float value, __half& to) { to = __float2half_rn(value); }
__device__ void narrow(float value, __nv_bfloat16& to) { to = __float2bfloat16_rn(value); }

// The sum over the warp's threads, in each of them: five exchanges between registers, no memory and no barrier.
__device__ float warp_sum(float value) {
    for (int distance = kWarp / 2; distance > 0; distance /= 2) value += __shfl_xor_sync(0xffffffffu, value, distance);
    return value;
}

// The sum over the block's threads, in each of them, always added in the same order.
__device__ float block_sum(float value) {
    value = warp_sum(value);
    __syncthreads();  // the partial sums of the call before may still be read
    if (threadIdx.x % kWarp == 0) shared_memory[threadIdx.x / kWarp] = value;
    __syncthreads();
    const unsigned lane = threadIdx.x % kWarp;
    return warp_sum(lane < blockDim.x / kWarp ? shared_memory[lane] : 0.0f);
}

// Call f(i) for each of this thread's vectors of a row; neighbouring threads have neighbouring vectors. Unrolled, the
// loop would take more than the 32 registers with which 2,048 threads fill a multiprocessor.
template <typename F>
__device__ void each_vector(int vectors, F f) {
#pragma unroll 1
    for (int i = threadIdx.x; i < vectors; i += blockDim.x) f(i);
}

// The row that begins `elements` of T behind `tensor`.
template <typename Row, typename T, typename Pointer>
__device__ Row* row_at(Pointer tensor, int64_t elements) {
    return reinterpret_cast<Row*>(static_cast<T*>(tensor) + elements);
}

// Write x + residual, rounded, to `sum`, and keep in `copy` what is normalised.
template <typename Row, bool kAdd>
__device__ void read_row(const Row* x, const Row* residual, Row* sum, Row* copy, bool held, int vectors) {
    each_vector(vectors, [&](int i) {
        Row value = x[i];
        if constexpr (kAdd) {
            const Row other = residual[i];
            for (int j = 0; j < Row::kWidth; ++j) narrow(widen(value.lane[j]) + widen(other.lane[j]), value.lane[j]);
            sum[i] = value;
        }
        if (held) copy[i] = value;
    });
}

// A row becomes (x * scale - pivot - mean) * inverse. Less the pivot, its first element, a constant row is 0 to the
// last bit, and one far from 0 loses no digits. RMSNorm has neither pivot nor mean.
struct Moments {
    float scale = 1.0f, pivot = 0.0f, mean = 0.0f, inverse;

    template <typename T>
    __device__ float centred(T x) const {
        return widen(x) * scale - pivot - mean;
    }
};

// The sum of term(x) over the elements of a row, in each thread of the block.
template <typename Row, typename Term>
__device__ float row_sum(const Row* row, int vectors, Term term) {
    float total = 0.0f;
    each_vector(vectors, [&](int i) {
        const Row value = row[i];
        for (int j = 0; j < Row::kWidth; ++j) total += term(value.lane[j]);
    });
    return block_sum(total);
}

template <typename Row, bool kCentred>
__device__ Moments moments_of(const Row* row, int vectors, float origin, float size, float eps) {
    Moments m;
    float squares;
    while (true) {
        if constexpr (kCentred) {
            m.pivot = origin * m.scale;
            m.mean = 0.0f;
            m.mean = row_sum(row, vectors, [&](auto x) { return m.centred(x); }) / size;
        }
        squares = row_sum(row, vectors, [&](auto x) { return m.centred(x) * m.centred(x); });
        // The same in every thread. Squares beyond float32 come of a row of huge values: once more, and smaller.
        if (squares <= FLT_MAX || m.scale < 1.0f) break;
        m.scale = 0x1p-80f;
    }
    m.inverse = rsqrtf(squares / size + fmaxf(eps * m.scale * m.scale, FLT_MIN));
    return m;
}

template <typename Row, bool kCentred>
__device__ void write_row(const Row* row, const Row* weight, const Row* bias, Row* out, int vectors, Moments m) {
    each_vector(vectors, [&](int i) {
        Row value = row[i];
        float wide[Row::kWidth];
        for (int j = 0; j < Row::kWidth; ++j) wide[j] = m.centred(value.lane[j]) * m.inverse;
        if (weight != nullptr) {
            const Row factor = weight[i];
            for (int j = 0; j < Row::kWidth; ++j) {
                if constexpr (!kCentred) {  // transformers' rule for RMSNorm: rounded before the weight, too
                    narrow(wide[j], value.lane[j]);
                    wide[j] = widen(value.lane[j]);
                }
                wide[j] *= widen(factor.lane[j]);
            }
        }
        if (kCentred && bias != nullptr) {
            const Row shift = bias[i];
            for (int j = 0; j < Row::kWidth; ++j) wide[j] += widen(shift.lane[j]);
        }
        for (int j = 0; j < Row::kWidth; ++j) narrow(wide[j], value.lane[j]);
        out[i] = value;
    });
}

template <typename T, typename Norm, bool kAdd, int kLanes>
__global__ void __launch_bounds__(kMostThreads) norm_kernel(const NormCall call, const bool held) {
    using Row = Vector<T, kLanes>;
    constexpr bool kCentred = std::is_same_v<Norm, LayerNorm>;
    const int64_t row = blockIdx.x;
    const int vectors = static_cast<int>(call.size / kLanes);
    const Row* x = row_at<const Row, const T>(call.x, row * call.x_stride);
    const Row* residual = row_at<const Row, const T>(call.residual, row * call.residual_stride);
    Row* sum = row_at<Row, T>(call.sum, row * call.size);
    Row* out = row_at<Row, T>(call.out, row * call.size);
    Row* copy = reinterpret_cast<Row*>(shared_memory + kPartials);

    // From here on a thread reads only what it wrote itself, so that no barrier is needed.
    if (kAdd || held) read_row<Row, kAdd>(x, residual, sum, copy, held, vectors);
    const Row* again = held ? copy : kAdd ? sum : x;
    T origin = x[0].lane[0];
    if constexpr (kAdd) narrow(widen(origin) + widen(residual[0].lane[0]), origin);
    const Moments m = moments_of<Row, kCentred>(again, vectors, widen(origin), call.size, call.eps);
    write_row<Row, kCentred>(again, static_cast<const Row*>(call.weight), static_cast<const Row*>(call.bias), out,
                             vectors, m);
}

template <typename T, typename Norm, bool kAdd, int kLanes>
cudaError_t launch_kernel(const NormCall& call, cudaStream_t stream) {
    const int64_t warps = (call.size / kLanes + kWarp - 1) / kWarp;
    const int64_t row_bytes = call.size * static_cast<int64_t>(sizeof(T));
    const bool held = row_bytes <= kMostHeldBytes;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(static_cast<unsigned>(call.rows));
    config.blockDim = dim3(static_cast<unsigned>(std::min<int64_t>(warps, kPartials)) * kWarp);
    config.dynamicSmemBytes = kPartials * sizeof(float) + (held ? row_bytes : 0);
    config.stream = stream;
    return cudaLaunchKernelEx(&config, norm_kernel<T, Norm, kAdd, kLanes>, call, held);
}

bool starts_whole(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer) % 16 == 0; }

template <typename T, typename Norm, bool kAdd>
cudaError_t launch_lanes(const NormCall& call, cudaStream_t stream) {
    constexpr int kLanes = 16 / sizeof(T);
    const bool pointers = starts_whole(call.x) && starts_whole(call.residual) && starts_whole(call.weight) &&
                          starts_whole(call.bias) && starts_whole(call.out) && starts_whole(call.sum);
    const bool rows = call.size % kLanes == 0 && call.x_stride % kLanes == 0 && call.residual_stride % kLanes == 0;
    if (pointers && rows) return launch_kernel<T, Norm, kAdd, kLanes>(call, stream);
    return launch_kernel<T, Norm, kAdd, 1>(call, stream);
}

template <typename T>
cudaError_t launch_norm(const NormCall& call, bool centred, cudaStream_t stream) {
    const bool add = call.residual != nullptr;
    if (centred && add) return launch_lanes<T, LayerNorm, true>(call, stream);
    if (centred) return launch_lanes<T, LayerNorm, false>(call, stream);
    if (add) return launch_lanes<T, RmsNorm, true>(call, stream);
    return launch_lanes<T, RmsNorm, false>(call, stream);
}

}  // namespace

// Starts a norm on `stream` and returns null, or what CUDA says against it. dtype: 0 float16, 1 bfloat16, 2 float32;
// centred: LayerNorm, else RMSNorm. rows and size are from 1 to 2**30.
extern "C" __attribute__((visibility("default"))) const char* norm_launch(const NormCall* call, int dtype, int centred,
                                                                          void* stream) {
    const cudaStream_t queue = static_cast<cudaStream_t>(stream);
    cudaError_t error = cudaErrorInvalidValue;
    if (dtype == 0) error = launch_norm<__half>(*call, centred != 0, queue);
    if (dtype == 1) error = launch_norm<__nv_bfloat16>(*call, centred != 0, queue);
    if (dtype == 2) error = launch_norm<float>(*call, centred != 0, queue);
    return error == cudaSuccess ? nullptr : cudaGetErrorString(error);
}
