import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import Decoder, full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.scoring import decoder_parts
from vllm_teach.quantization import perplexity

CONFIG = ModelConfig("LlamaForCausalLM", 40, 32, 48, 2, 4, 2, 8, 64)


def test_the_two_parts_make_the_decoders_logits():
    model = Decoder(CONFIG).init_random(seed=3)
    ids = torch.arange(9, dtype=torch.int64)
    hidden, head = decoder_parts(model)
    expected = model.logits(model(ids, torch.arange(9), full_causal()))
    assert torch.equal(head(hidden(ids)), expected)
    torch.testing.assert_close(head(hidden(ids)[2:4]), expected[2:4])


def test_another_attention_may_mix_the_tokens():
    model = Decoder(CONFIG).init_random(seed=3)
    hidden, _ = decoder_parts(model, lambda layer, q, k, v, window=None: torch.zeros_like(q))
    ids = torch.tensor([5, 7, 5])
    # Without attention, equal tokens have equal states, whatever stands before them.
    states, mixed = hidden(ids), decoder_parts(model)[0](ids)
    torch.testing.assert_close(states[0], states[2])
    assert (mixed[0] - mixed[2]).abs().max() > 1e-3


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        (torch.tensor([1, 40]), "token_ids holds 1 to 40; this model's ids are 0 to 39"),
        (torch.tensor([-1, 3]), "token_ids holds -1 to 3"),
        (torch.tensor([1.0]), "token_ids has dtype torch.float32"),
        (torch.tensor([[1]]), r"shape \[1, 1\]; give int64 \[len\]"),
    ],
)
def test_ids_that_the_model_lacks_are_named(ids, words):
    hidden, head = decoder_parts(Decoder(CONFIG).init_random(seed=3))
    with pytest.raises(InvalidArgumentError, match=words):
        hidden(ids)
    assert head(hidden(torch.tensor([], dtype=torch.int64))).shape == (0, 40)


def test_a_text_with_an_unknown_token_has_no_perplexity():
    hidden, head = decoder_parts(Decoder(CONFIG).init_random(seed=3))
    with pytest.raises(InvalidArgumentError, match="this model's ids are 0 to 39"):
        perplexity(hidden, [1, 2, 99], head=head, window=8)
