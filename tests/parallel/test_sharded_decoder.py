"""A decoder in parts computes what the whole one computes."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.load import load_model, load_shard
from vllm_teach.models.quantize import quantize_model
from vllm_teach.parallel.group import Group
from vllm_teach.quantization.part import part_of
from vllm_teach.quantization.quantization_config import QuantizationConfig
from vllm_teach.quantization.quantized_weight import QuantizedWeight

IDS = torch.tensor([5, 17, 2047, 0, 1024, 900, 5])
POSITIONS = torch.arange(len(IDS))


def forward(folder, dtype=torch.float32):
    """Return what a rank does: its hidden states, logits, and the group."""

    @torch.inference_mode()
    def rank(group: Group):
        model = load_shard(folder, group, dtype).join_weights()
        with model.in_step(len(IDS)):
            hidden = model(IDS, POSITIONS, full_causal())
        return hidden, model.logits(hidden), group.traffic, model

    return rank


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True},
        {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    ],
    ids=["llama", "biases", "qwen2", "qwen3"],
)
def test_logits_equal_transformers(run_ranks, model_folder, size: int, changes: dict) -> None:
    folder = model_folder(**{k: tuple(v) if isinstance(v, list) else v for k, v in changes.items()})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager")
    with torch.inference_mode():
        expected = reference(IDS[None]).logits[0]
    found = run_ranks(size, forward(folder))
    torch.testing.assert_close(found[0][1].double(), expected, atol=2e-4, rtol=1e-4)
    for hidden, logits, _, model in found:
        assert torch.equal(hidden, found[0][0]), "all ranks have the same hidden states, to the last bit"
        ids = model.shard.vocabulary
        assert torch.equal(
            logits if model.shard.rank else logits[:, ids.start : ids.stop], found[0][1][:, ids.start : ids.stop]
        )


def test_all_reduces_are_two_a_layer_and_one_for_the_embedding(run_ranks, model_folder) -> None:
    for _, _, traffic, model in run_ranks(2, forward(model_folder())):
        assert traffic["all_reduce"].calls == model.num_all_reduces == 5
        assert traffic["all_reduce"].num_bytes == 5 * len(IDS) * 72 * 4


@pytest.mark.parametrize("where", ["before", "within"])
def test_a_rank_that_fails_makes_the_others_nan_and_nobody_waits(run_ranks, model_folder, where: str) -> None:
    """Also where it fails in what comes before the model: the others are in their pass by then."""
    folder = model_folder()

    @torch.inference_mode()
    def rank(group: Group):
        model = load_shard(folder, group)
        attend = full_causal()

        def fails(layer, q, k, v):
            if layer == 1 and group.rank == 1:
                raise MemoryError("no room here")
            return attend(layer, q, k, v)

        try:
            with model.in_step(len(IDS)):
                if where == "before" and group.rank == 1:
                    raise MemoryError("no room here")
                hidden = model(IDS, POSITIONS, fails)
        except MemoryError:
            hidden = None
        return hidden, model.logits(model(IDS, POSITIONS, attend))

    (first, logits), (second, _) = run_ranks(2, rank)
    assert first.isnan().all()
    assert second is None
    assert logits.isfinite().all(), "the next pass is as if nothing had happened"


@pytest.mark.parametrize("head_bits", [8, 16])
@pytest.mark.parametrize(("method", "group_size"), [("rtn", 8), ("int8", None)])
def test_a_quantised_model_in_parts(run_ranks, model_folder, tmp_path, method: str, group_size, head_bits: int) -> None:
    folder = model_folder(intermediate_size=96, tie_word_embeddings=False)
    config = QuantizationConfig.choose(method, group_size=group_size, head_bits=head_bits)
    quantize_model(folder, tmp_path / "q", config, progress=False)
    whole = load_model(tmp_path / "q")
    with torch.inference_mode():
        expected = whole.logits(whole(IDS, POSITIONS, full_causal()))
    for size in (2, 3):
        (_, logits, _, _), *others = run_ranks(size, forward(tmp_path / "q"))
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-4)
        assert all(model.num_bytes() < 0.75 * whole.num_bytes() for _, _, _, model in others)


def test_groups_that_a_cut_would_split_are_refused(model_folder, tmp_path) -> None:
    """o_proj's columns are cut at 96: two KV heads with three query heads of 16 numbers each."""
    folder = model_folder(intermediate_size=288, head_dim=16)
    quantize_model(folder, tmp_path / "q", QuantizationConfig.choose("rtn", group_size=72), progress=False)
    with pytest.raises(
        InvalidArgumentError,
        match=r"^tensor_parallel_size cuts model\.layers\.0\.self_attn\.o_proj at inputs 0 and 96, .* 72",
    ):
        load_shard(tmp_path / "q", Group(0, 2, 1.0))


def test_act_order_is_refused() -> None:
    scales = torch.ones(2, 2, dtype=torch.float16)
    codes = torch.arange(16, dtype=torch.uint8).reshape(2, 8)
    weight = QuantizedWeight(codes, scales, scales.to(torch.uint8), 4, torch.tensor([0, 1] * 4, dtype=torch.int32))
    rows = part_of("q_proj", weight, slice(1, 2), slice(None))
    assert torch.equal(rows.dequantize(), weight.dequantize()[1:])
    with pytest.raises(InvalidArgumentError, match=r"cuts o_proj, whose groups of inputs lie apart: use 1"):
        part_of("o_proj", weight, slice(None), slice(0, 4))
