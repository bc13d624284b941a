// The kernel for float32 tensors. One file for each type, so that they compile side by side.
#include "run.h"

extern "C" __attribute__((visibility("default"))) int attention_float32(const Call* call) {
    return run_or_fail<float>(*call);
}
