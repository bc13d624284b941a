"""What an attention refuses whose backward pass recomputes: every way to differentiate but one backward pass.

Its gradient is a formula of its own, which autograd cannot see into. PyTorch's own errors for that come late, name
neither argument nor way out, or do not come.
"""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

from vllm_teach.attention.variant import Variant
from vllm_teach.errors import InvalidArgumentError


def check_differentiable(variant: Variant, **inputs: torch.Tensor | None) -> None:
    """Raise InvalidArgumentError when a gradient is asked for that the backward pass does not give.

    `inputs` are the call's tensors by their names: those that autograd may follow.
    """
    if variant.alibi_slopes is not None and variant.alibi_slopes.requires_grad:
        raise InvalidArgumentError("alibi_slopes requires a gradient; detach it, or use naive_attention.")
    if torch._C._are_functorch_transforms_active():
        raise InvalidArgumentError(
            f"{next(iter(inputs))} is transformed by torch.func (grad, vmap, jvp, …); use naive_attention there."
        )
    given = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    followed = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given.values())
    for name, tensor in given.items():
        if forward_ad.unpack_dual(tensor).tangent is not None:
            raise InvalidArgumentError(f"{name} has a forward-mode tangent; use naive_attention for it.")
        if followed and tensor.is_inference():
            raise InvalidArgumentError(
                f"{name} was made under torch.inference_mode and cannot be kept for a backward pass; clone it first."
            )


def refuse_second_derivative(function: str) -> None:
    """Raise InvalidArgumentError in a backward pass that is itself to be differentiated, of the attention `function`.

    PyTorch's `once_differentiable` lets a constant gradient of the output through, in silence.
    """
    if torch.is_grad_enabled():
        raise InvalidArgumentError(
            f"create_graph is True; {function} can be differentiated once: for more, use naive_attention."
        )
