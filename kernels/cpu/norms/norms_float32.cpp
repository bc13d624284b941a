// Both norms for float32 tensors. One file for each type, so that they compile side by side.
#include "layer_norm.h"
#include "rms_norm.h"

#define EXPORTED extern "C" __attribute__((visibility("default")))

EXPORTED void layer_norm_float32(const NormCall* call) { layer_norm<float>(*call); }
EXPORTED void rms_norm_float32(const NormCall* call) { rms_norm<float>(*call); }
