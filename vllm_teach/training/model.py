"""The models that are trained here: small Llamas, and the random weights that training starts from."""

from __future__ import annotations

import math

from vllm_teach.attention.shapes import check_count
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder

HEAD_DIM = 64


def llama_config(
    vocab_size: int, *, hidden_size: int = 128, num_layers: int = 2, kv_heads: int = 1, context: int = 128
) -> ModelConfig:
    """Return the shape of a small Llama: heads of 64, an MLP of about 8/3 · `hidden_size`, the embedding tied.

    `hidden_size` gives the query heads, `kv_heads` how many key heads they share. All widths are multiples of 64, which
    kernels and packed weights ask for. Raises InvalidArgumentError when the sizes do not fit together.
    """
    sizes = {"vocab_size": vocab_size, "hidden_size": hidden_size, "kv_heads": kv_heads}
    for name, value in (sizes | {"num_layers": num_layers, "context": context}).items():
        check_count(name, value, 1)
    if hidden_size % HEAD_DIM:
        raise InvalidArgumentError(f"hidden_size={hidden_size} is not valid: give a multiple of {HEAD_DIM}.")
    q_heads = hidden_size // HEAD_DIM
    if q_heads % kv_heads:
        raise InvalidArgumentError(f"kv_heads={kv_heads} is not valid: give a divisor of the {q_heads} query heads.")
    return ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        # Three matrices of 8/3 hold as many weights as the two of 4 that SwiGLU replaced (Shazeer 2020).
        intermediate_size=round(hidden_size * 8 / 3 / 64) * 64,
        num_layers=num_layers,
        num_q_heads=q_heads,
        num_kv_heads=kv_heads,
        head_dim=HEAD_DIM,
        max_position=context,
        rms_norm_eps=1e-5,
        tie_word_embeddings=True,
        sliding_layers=(False,) * num_layers,
    )


def initial_model(config: ModelConfig, seed: int) -> Decoder:
    """Return a model to train, in float32: N(0, 0.02), and less for the matrices that write to the residual stream.

    These are divided by sqrt(2 · layers), the number of terms that the stream sums up (GPT-2, section 2.3).
    """
    model = Decoder(config).init_random(seed)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            weight.div_(math.sqrt(2 * config.num_layers))
    return model.requires_grad_(True)
