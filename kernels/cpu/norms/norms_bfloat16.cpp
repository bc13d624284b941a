// Both norms for bfloat16 tensors. One file for each type, so that they compile side by side.
#include "layer_norm.h"
#include "rms_norm.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void layer_norm_bfloat16(const NormCall* call) { layer_norm<BFloat16>(*call); }
EXPORTED void rms_norm_bfloat16(const NormCall* call) { rms_norm<BFloat16>(*call); }
