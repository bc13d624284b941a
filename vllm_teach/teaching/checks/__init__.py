"""The checks of all lessons, one file per lesson; `check.<name>(your_function)` in a notebook."""

from vllm_teach.teaching.checks import (
    attention_patterns,
    choosing_a_backend,
    custom_kernels,
    naive_attention,
    online_softmax_and_tiling,
    paged_kv_cache,
    quantization,
    recomputation_and_training,
    reference_tables_audited,
    roofline_and_simulation,
    scheduling,
    serving_and_monitoring,
    sharing_copy_on_write_prefix,
    start_here,
)
from vllm_teach.teaching.exercises import Check, CheckBook

check = CheckBook(
    [
        *start_here.CHECKS,
        *naive_attention.CHECKS,
        *online_softmax_and_tiling.CHECKS,
        *recomputation_and_training.CHECKS,
        *attention_patterns.CHECKS,
        *choosing_a_backend.CHECKS,
        *paged_kv_cache.CHECKS,
        *sharing_copy_on_write_prefix.CHECKS,
        *scheduling.CHECKS,
        *quantization.CHECKS,
        *custom_kernels.CHECKS,
        *serving_and_monitoring.CHECKS,
        *roofline_and_simulation.CHECKS,
        *reference_tables_audited.CHECKS,
    ]
)


def list_checks() -> list[Check]:
    """Every check in reading order; each has `name`, `lesson` (the notebook's stem), `task` and `hints`."""
    return list(check)
