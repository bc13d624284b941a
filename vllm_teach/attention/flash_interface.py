"""FlashAttention's functions: the names, argument order, defaults and semantics of FlashAttention 2.8, on any device.

What holds for all of them:

- Masks are aligned bottom-right: with `causal`, the last query sees the last key. `window_size` = (left, right) shows
  query i the keys from i + kv_len - q_len - left to i + kv_len - q_len + right, both inclusive; -1 is no limit.
- `softmax_scale` is 1/sqrt(head_dim) by default. `softcap` and `alibi_slopes`: see `Variant`.
- The results are differentiable with respect to q, k and v; the backward recomputes the scores tile by tile.
- `dropout_p` drops probabilities, with a mask that a seed from PyTorch's default generator determines.
- `deterministic` is accepted and changes nothing: this backward always adds in the same order.

Differences from FlashAttention 2, all of them extensions but the first:

- The log-sum-exp of a row that sees no key is -inf here and +inf there. Its output is 0 in both.
- Every floating-point dtype and head size works, there float16 and bfloat16 up to 256; softcap goes with dropout.
- Blocks of a paged cache may hold any number of keys, there multiples of 256, and the gradient flows through them.
- S_dmask has the size of the scores; there each side is rounded up to a multiple of 128.

Source: `flash_attn/flash_attn_interface.py` of github.com/Dao-AILab/flash-attention.
"""
