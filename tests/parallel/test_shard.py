"""Which part each rank has: together the parts are the whole, and each rank's fit together."""

import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.decoder import Decoder
from vllm_teach.models.load import load_model, load_shard
from vllm_teach.models.shard import Shard
from vllm_teach.parallel.group import Group

SMOLLM2 = ModelConfig("LlamaForCausalLM", 49152, 576, 1536, 30, 9, 3, 64, 8192, tie_word_embeddings=True)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_parts_cover_every_matrix_once(size: int) -> None:
    for name, parameter in Decoder(SMOLLM2).named_parameters():
        if parameter.dim() < 2:
            continue
        times = torch.zeros(parameter.shape, dtype=torch.int8)
        for rank in range(size):
            times[Shard.of(SMOLLM2, rank, size).cut(name.removesuffix(".weight"))] += 1
        assert (times == 1).all(), name


def test_smollm2_over_two_ranks() -> None:
    first, second = (Shard.of(SMOLLM2, rank, 2).config for rank in (0, 1))
    assert (first.num_kv_heads, first.num_q_heads) == (2, 6)
    assert (second.num_kv_heads, second.num_q_heads) == (1, 3)
    assert first.intermediate_size == second.intermediate_size == 768
    assert first.vocab_size == second.vocab_size == 49152, "ids mean the same everywhere"
    assert first.kv_bytes_per_token(4) == 2 * second.kv_bytes_per_token(4)


def test_a_size_that_the_heads_do_not_allow_is_refused() -> None:
    with pytest.raises(
        InvalidArgumentError,
        match=r"^tensor_parallel_size=4 does not fit .* 3 KV heads .* at most 3 ranks, so use 1 to 3",
    ):
        Shard.of(SMOLLM2, 0, 4)


def test_units_too_few_are_refused() -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"multiples of 1024, can be split over at most 2 ranks, so use 1 to 2"
    ):
        Shard.of(SMOLLM2, 0, 3, unit=1024)


@pytest.mark.parametrize("size", [2, 3])
def test_each_rank_loads_its_part_and_sums_have_their_bias_once(model_folder, size: int) -> None:
    folder = model_folder(attention_bias=True, mlp_bias=True, tie_word_embeddings=False)
    whole = load_model(folder).state_dict()
    ranks = [load_shard(folder, Group(rank, size, 1.0)) for rank in range(size)]
    for name, weight in whole.items():
        module, _, kind = name.rpartition(".")
        parts = [rank.state_dict()[name] for rank in ranks]
        cuts = [rank.shard.cut(module)[: weight.dim()] for rank in ranks]
        if kind == "bias" and module.endswith(("o_proj", "down_proj")):
            assert torch.equal(parts[0], weight)
            assert not any(part.any() for part in parts[1:])
        else:
            assert all(torch.equal(part, weight[cut]) for part, cut in zip(parts, cuts, strict=True)), name


def test_only_the_part_is_read(model_folder, monkeypatch: pytest.MonkeyPatch) -> None:
    """safetensors counts nothing, so its slices are made to."""
    from safetensors import safe_open

    from vllm_teach.models import weights

    read = {}

    class Counting:
        def __init__(self, file, framework):
            self.file = safe_open(file, framework)

        def __enter__(self):
            self.opened = self.file.__enter__()
            return self

        def __exit__(self, *error):
            return self.file.__exit__(*error)

        def keys(self):
            return self.opened.keys()

        def get_tensor(self, name):
            raise AssertionError(f"{name} was read whole")

        def get_slice(self, name):
            outer, part = self, self.opened.get_slice(name)

            class Slice:
                def get_shape(self):
                    return part.get_shape()

                def __getitem__(self, index):
                    read[name] = part[index].numel()
                    return part[index]

            assert outer
            return Slice()

    folder = model_folder()
    monkeypatch.setattr(weights, "safe_open", Counting)
    model = load_shard(folder, Group(1, 3, 1.0))
    assert sum(read.values()) == sum(parameter.numel() for parameter in model.parameters())
