import pytest

from vllm_teach.attention.traffic import naive_traffic
from vllm_teach.counters import Work
from vllm_teach.models.decoder import Decoder
from vllm_teach.performance.model_shapes import get_model_shape
from vllm_teach.validation.audit import a100


def test_the_parameters_of_llama_2_70b_are_those_of_its_decoder() -> None:
    counted = sum(weight.numel() for weight in Decoder(get_model_shape("llama-2-70b")).parameters())
    assert counted == a100.PARAMETERS_70B


def test_a_kernel_takes_the_longer_of_arithmetic_and_memory() -> None:
    card = a100.card()
    assert a100.seconds(Work(flops=312_000_000_000_000, bytes_read=1), card) == pytest.approx(1.0)
    assert a100.seconds(Work(flops=1, bytes_read=1_555_000_000_000), card) == pytest.approx(1.0)
    assert a100.seconds(Work(flops=0, bytes_written=1_555_000_000_000), card) == pytest.approx(1.0)


def test_plain_attention_of_the_articles_layer_takes_three_kernels() -> None:
    n, heads, d = 2048, 16, 128
    scores, vectors = heads * n * n * 2, heads * n * d * 2
    by_hand = [2 * vectors + scores, 2 * scores, scores + 2 * vectors]  # bytes; memory is the limit of all three
    work = naive_traffic(**a100.layer_sizes(batch=1)).by_name
    assert a100.seconds_by_step(work, a100.card()) == pytest.approx(sum(by_hand) / 1555e9)
