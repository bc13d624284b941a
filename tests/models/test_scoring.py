import torch

from vllm_teach.models import Decoder, full_causal
from vllm_teach.models.config import ModelConfig
from vllm_teach.models.scoring import decoder_parts

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
