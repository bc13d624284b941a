"""The work of a step against what PyTorch's own counter, the package's counters and its ranks see when it is done."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.shard import Shard
from vllm_teach.models.sharded_decoder import ShardedDecoder
from vllm_teach.parallel.group import Group
from vllm_teach.performance.cost_model.operators import OPERATORS, Operators
from vllm_teach.performance.cost_model.step_shape import Item, StepShape
from vllm_teach.performance.cost_model.weight_format import WeightFormat
from vllm_teach.performance.model_shapes import get_model_shape
from vllm_teach.performance.norm_traffic import fused_traffic, traced_traffic

CONFIG = ModelConfig("LlamaForCausalLM", 300, 64, 160, 3, 4, 2, 16, 512)
PROMPT = StepShape.of([Item(0, 29)])


def flops(operators: Operators, shape: StepShape) -> float:
    return sum(work.flops for work in operators.work(shape).values())


def test_flops_are_those_that_pytorch_counts_in_the_packages_decoder() -> None:
    model = Decoder(CONFIG).init_random()
    ids = torch.arange(29)
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        hidden = model(ids, ids, full_causal("naive"))
        model.logits(hidden[-1:])
    assert flops(Operators(CONFIG, "float32", attention="naive"), PROMPT) == counter.get_total_flops()


def test_flops_are_those_that_pytorch_counts_in_transformers_llama_2_7b() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    shape = get_model_shape("llama-2-7b")
    config = LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_q_heads,
        num_key_value_heads=shape.num_kv_heads,
        attn_implementation="eager",
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
        ids, mask = torch.zeros(1, 100, dtype=torch.long), torch.zeros(1, 1, 100, 100)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids, attention_mask=mask, use_cache=False, logits_to_keep=1)
    assert flops(Operators(shape, attention="naive"), StepShape.of([Item(0, 100)])) == counter.get_total_flops()


def test_paged_attention_does_the_pairs_that_are_seen_and_the_rest_of_its_tiles() -> None:
    """One query sees its keys and no more; a prompt computes whole tiles on the diagonal."""
    operators = Operators(CONFIG, "float32")
    one = operators.work(StepShape.of([Item(99, 1)]))["decode attention"]
    assert one.flops == CONFIG.num_layers * 4 * CONFIG.num_q_heads * CONFIG.head_dim * 100
    assert one.num_bytes >= CONFIG.num_layers * 2 * CONFIG.num_kv_heads * CONFIG.head_dim * 100 * 4
    prompt = operators.work(PROMPT)["prefill attention"]
    assert prompt.flops == CONFIG.num_layers * 4 * CONFIG.num_q_heads * CONFIG.head_dim * 29 * 29


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_norms_move_what_a_fused_kernel_moves(dtype: str, size: int) -> None:
    def norm(**changes: object) -> int:
        sizes = {"kind": "rms_norm", "rows": 29, "size": 64, "input_bytes": size}
        return fused_traffic(**(sizes | changes)).bytes_moved  # type: ignore[arg-type]

    work = Operators(CONFIG, dtype).work(PROMPT)["norms"]
    assert work.num_bytes == norm() + 2 * CONFIG.num_layers * norm(residual=True)
    with_qk = Operators(replace(CONFIG, qk_norm=True), dtype).work(PROMPT)["norms"]
    q, k = norm(rows=29 * 4, size=16), norm(rows=29 * 2, size=16)
    # Their weights, 16 numbers each, are left out.
    assert with_qk.num_bytes - work.num_bytes == CONFIG.num_layers * (q + k - 2 * 16 * size)
    assert with_qk.calls - work.calls == 2 * CONFIG.num_layers


def test_activations_and_the_products_around_them_move_what_pytorch_moves() -> None:
    model = Decoder(CONFIG).init_random()
    mlp, x = model.model.layers[0].mlp, torch.rand(29, 64)
    with torch.inference_mode():
        gate, up = mlp.gate_proj(x), mlp.up_proj(x)
        activations = traced_traffic(lambda: F.silu(gate) * up)
        whole = traced_traffic(lambda: mlp(x))
    operators = Operators(CONFIG, "float32")
    work = operators.work(PROMPT)
    assert work["activations"].num_bytes == CONFIG.num_layers * activations.bytes_moved
    # Without its attention a layer's products are those of the MLP: x twice, three matrices, three results.
    q, kv = 4 * 16, 2 * 16
    of_attention = 4 * (64 * (q + 2 * kv) + 64 * q + 29 * (64 + q + 2 * kv + q + 64))
    products = whole.bytes_moved - activations.bytes_moved
    assert work["linear layers"].num_bytes == CONFIG.num_layers * (products + of_attention)


def test_logits_move_what_pytorch_moves() -> None:
    model, hidden = Decoder(CONFIG).init_random(), torch.rand(3, 64)
    with torch.inference_mode():
        traced = traced_traffic(lambda: F.linear(hidden, model.lm_head.weight))
    work = Operators(CONFIG, "float32").work(StepShape.of([Item(9, 1)] * 3))["logits"]
    assert work.num_bytes == traced.bytes_moved


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2)])
def test_what_copies_and_turns_reads_each_number_once_and_writes_it_once(dtype: str, size: int) -> None:
    """By hand: 29 tokens, 64 numbers of the hidden size, 4 query and 2 KV heads of 16 numbers, 3 layers."""
    work = Operators(CONFIG, dtype).work(PROMPT)
    assert work["embedding"].num_bytes == 2 * 29 * 64 * size
    assert work["rotary"].num_bytes == 3 * 2 * 29 * (4 + 2) * 16 * size
    assert work["cache writes"].num_bytes == 3 * 2 * 29 * (2 + 2) * 16 * size


def test_sampling_converts_looks_for_nan_and_finds_the_largest_of_the_whole_vocabulary() -> None:
    """The first rank has everybody's logits: its converted copy is written once and read twice."""
    for size in (1, 2):
        work = Operators(CONFIG, "bfloat16", tensor_parallel_size=size).work(PROMPT)["sampling"]
        assert work.num_bytes == 300 * (2 + 4 + 4 + 4)
    assert Operators(CONFIG, "float32").work(PROMPT)["sampling"].num_bytes == 300 * (4 + 4)


def test_what_a_step_without_samples_or_tokens_does() -> None:
    operators = Operators(CONFIG)
    assert set(operators.work(StepShape.of([Item(0, 9, samples=False)]))) == set(OPERATORS) - {
        "decode attention", "logits", "sampling",
    }  # fmt: skip
    assert operators.work(StepShape.of([])) == {}
    mixed = operators.work(StepShape.of([Item(0, 9), Item(5, 1)]))
    assert set(mixed) == set(OPERATORS)
    assert mixed["decode attention"].calls == 0  # one call a layer serves both
    assert mixed["prefill attention"].calls == CONFIG.num_layers


def test_a_window_costs_no_more_than_itself() -> None:
    sliding = replace(CONFIG, sliding_window=8, sliding_layers=(True, False, True))
    step = StepShape.of([Item(99, 1), Item(3, 1)], window=8)
    whole, cut = (Operators(config).work(step)["decode attention"] for config in (CONFIG, sliding))
    assert whole.flops == 3 * 4 * 64 * (100 + 4)
    assert cut.flops == 4 * 64 * (2 * (8 + 4) + (100 + 4))


def test_quantised_layers_read_fewer_bytes_and_compute_as_much() -> None:
    plain = Operators(CONFIG).work(PROMPT)["linear layers"]
    small = Operators(CONFIG, weights=WeightFormat("rtn", 4, 32)).work(PROMPT)["linear layers"]
    assert small.flops == plain.flops
    assert small.num_bytes < plain.num_bytes
    assert small.calls == 4 * CONFIG.num_layers  # a quantised gate and up are one product


class _Silent:
    """A backend whose messages go nowhere."""

    def send(self, tensors: list[torch.Tensor], rank: int, tag: int) -> "_Silent":
        return self

    recv = send

    def wait(self, *timeout: object) -> None:
        return None


def test_sums_and_gathers_are_those_that_the_ranks_count() -> None:
    tokens, samples = 7, 3
    group = Group(0, 2, timeout=1.0)
    group._backend = _Silent()
    model = ShardedDecoder(Shard.of(CONFIG, 0, 2), group).init_random()
    ids = torch.arange(tokens)
    with torch.inference_mode():
        hidden = model(ids, ids, full_causal("naive"))
        model.logits(hidden[:samples])
    operators = Operators(CONFIG, "float32", tensor_parallel_size=2)
    step = StepShape.of([Item(0, 1), Item(0, 1), Item(0, 5)])
    sums, gathers = group.traffic["all_reduce"], group.traffic["gather"]
    assert operators.all_reduced(step) == (sums.calls, sums.num_bytes)
    assert operators.gathered_bytes(step) == gathers.num_bytes
    alone = Operators(CONFIG, "float32")
    assert (alone.all_reduced(step), alone.gathered_bytes(step)) == ((0, 0), 0)


def test_two_ranks_share_the_work_evenly_where_heads_allow() -> None:
    whole, half = (Operators(CONFIG, tensor_parallel_size=size).work(PROMPT) for size in (1, 2))
    for kind in ("linear layers", "prefill attention", "logits"):
        assert half[kind].flops == whole[kind].flops / 2
    assert half["norms"] == whole["norms"]  # done by all


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"dtype": "float64"}, "dtype='float64'"),
        ({"attention": "fast"}, "attention='fast'"),
        ({"tensor_parallel_size": 3}, "tensor_parallel_size=3"),
    ],
)
def test_what_cannot_be_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Operators(CONFIG, **wrong)  # type: ignore[arg-type]
