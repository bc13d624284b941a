// Products with weights of 8 bits. One file for each width, so that they compile side by side.
#include "run.h"

extern "C" __attribute__((visibility("default"))) int matmul_int8(const Weight* weight, const Call* call) {
    return run_or_fail<8>(*weight, *call);
}
