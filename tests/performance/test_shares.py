import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.performance import shares
from vllm_teach.performance.shares import LLAMA2_7B, SMOLLM2_135M, LayerShape, flop_crossing, flop_share, measure_share

SMALL = LayerShape(hidden_size=64, intermediate_size=96, num_q_heads=4, num_kv_heads=2, head_dim=16)


def test_linear_parameters_of_a_known_model() -> None:
    # Llama-2-7B: four 4096 x 4096 and three 4096 x 11008 matrices a layer.
    assert LLAMA2_7B.linear_parameters == 4 * 4096**2 + 3 * 4096 * 11008


@pytest.mark.parametrize("shape", [SMALL, SMOLLM2_135M])
def test_flop_share_is_what_pytorch_counts(shape: LayerShape) -> None:
    n = 64
    layer = shares._one_layer(n, shape, torch.float32, "cpu")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        layer(torch.zeros(n, dtype=torch.long), torch.arange(n), full_causal("naive"))
    counted = counter.get_flop_counts()["Global"]
    products = counted[torch.ops.aten.bmm]  # S and P V; linear layers are aten.mm
    assert flop_share(n, shape) == pytest.approx(products / sum(counted.values()))


def test_skipping_the_masked_half_nearly_halves_the_arithmetic() -> None:
    def odds(share: float) -> float:
        return share / (1 - share)

    full, half = flop_share(1000, SMALL), flop_share(1000, SMALL, skip_masked=True)
    assert odds(half) / odds(full) == pytest.approx(1001 / 2000)


@pytest.mark.parametrize("share", [0.1, 0.68, 0.9])
def test_the_crossing_is_where_the_share_is_reached(share: float) -> None:
    assert flop_share(round(flop_crossing(share, LLAMA2_7B)), LLAMA2_7B) == pytest.approx(share, abs=1e-4)


def test_wider_models_cross_later() -> None:
    assert flop_crossing(0.68, LLAMA2_7B) > 5 * flop_crossing(0.68, SMOLLM2_135M)


def test_measured_shares_grow_with_the_length() -> None:
    short, long = (measure_share(n, SMALL, repeats=3) for n in (16, 1024))
    assert short.memory_share < long.memory_share < 1
    assert short.allocated_share < long.allocated_share < 1
    assert (short.n, long.n) == (16, 1024)


def test_the_time_share_is_attentions_part_of_the_pass(clock) -> None:
    # Three ticks inside attention, as a backend's own call is timed, too; one before and one after it.
    found = measure_share(8, SMALL, repeats=2)
    assert (found.attention_seconds, found.total_seconds, found.time_share) == (3.0, 5.0, 3 / 5)


def test_the_memory_of_attention_holds_its_two_matrices() -> None:
    n = 512
    found = measure_share(n, SMALL, repeats=1)
    scores = n * n * SMALL.num_q_heads * 4
    assert found.attention_peak_bytes >= 2 * scores
    assert found.peak_bytes < 5 * scores
    assert found.memory_share == found.attention_peak_bytes / found.peak_bytes


def test_tiled_attention_takes_a_smaller_share_of_memory() -> None:
    n = 1024
    assert (
        measure_share(n, SMALL, repeats=1, backend="tiled").peak_bytes
        < measure_share(n, SMALL, repeats=1).peak_bytes / 3
    )


def test_a_whole_model_is_measured_when_given_and_the_shape_ignored(clock) -> None:
    # Two layers, twice the heads of SMALL.
    config = ModelConfig(
        architecture="LlamaForCausalLM",
        vocab_size=8,
        hidden_size=128,
        intermediate_size=160,
        num_layers=2,
        num_q_heads=8,
        num_kv_heads=2,
        head_dim=16,
        max_position=64,
        tie_word_embeddings=True,
    )
    found = measure_share(64, SMALL, repeats=1, model=Decoder(config).init_random(dtype=torch.float32, device="cpu"))
    one = measure_share(64, LayerShape.of(config), repeats=1)
    assert (found.attention_seconds, found.total_seconds) == (6.0, 9.0)  # three ticks in each of the two layers
    assert found.attention_peak_bytes == one.attention_peak_bytes > measure_share(64, SMALL, repeats=1).peak_bytes


@pytest.mark.parametrize(
    ("call", "named"),
    [
        (lambda: measure_share(0, SMALL), "n=0"),
        (lambda: measure_share(8, SMALL, repeats=0), "repeats=0"),
        (lambda: flop_share(-1, SMALL), "n=-1"),
        (lambda: flop_crossing(1.0, SMALL), "share=1.0"),
        (lambda: flop_crossing(math.nan, SMALL), "share=nan"),
        (lambda: measure_share(8, SMALL, backend="magic"), "magic"),
    ],
)
def test_bad_arguments(call, named: str) -> None:
    with pytest.raises(InvalidArgumentError, match=named):
        call()
