"""What an attention implementation must get right: one table of calls, which all of them are tested with.

`check_forward` and `check_gradients` apply FlashAttention's rule: the truth is the formula in float64, and an
implementation may be off by twice as much as the plain formula in the same dtype (gradients: three times). Needs only
torch, so that a script on a bare GPU machine can use it.
"""

from vllm_teach.backends.conformance.check import check_forward, check_gradients
from vllm_teach.backends.conformance.row import Inputs, Row
from vllm_teach.backends.conformance.table import ROWS

__all__ = ["ROWS", "Inputs", "Row", "check_forward", "check_gradients"]
