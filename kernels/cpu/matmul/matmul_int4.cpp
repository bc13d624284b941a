// Products with weights of 4 bits, or fewer. One file for each width, so that they compile side by side.
#include "run.h"

extern "C" __attribute__((visibility("default"))) int matmul_int4(const Weight* weight, const Call* call) {
    return run_or_fail<4>(*weight, *call);
}
