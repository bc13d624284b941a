"""The engine's attention: selected for each call with "auto", and counted by backend."""

from vllm_teach import LLM, SamplingParams, backends
from vllm_teach.models.attend import full_causal

GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


def test_every_call_of_every_layer_is_counted(tiny_model, byte_tokenizer) -> None:
    llm = LLM.from_loaded(tiny_model, byte_tokenizer, attention_backend="naive", kv_cache_memory_bytes=2**20)
    backends.reset_calls()
    llm.generate([[1, 2, 3], [4, 5]], GREEDY, use_tqdm=False)
    counted = backends.calls()
    assert list(counted) == ["naive"]
    # A prefill and three decoding steps, in each layer one call for all sequences.
    assert counted["naive"].calls == 4 * tiny_model.config.num_layers
    assert counted["naive"].seconds > 0


def test_auto_selects_for_each_call(tiny_model, byte_tokenizer) -> None:
    outputs = {}
    for name in ("sdpa", "auto"):
        llm = LLM.from_loaded(tiny_model, byte_tokenizer, attention_backend=name, kv_cache_memory_bytes=2**20)
        backends.reset_calls()
        outputs[name] = llm.generate([[1, 2, 3]], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
    assert outputs["auto"] == outputs["sdpa"]
    # What the threshold rule takes for short calls: our own kernel where it could be built, else PyTorch's.
    assert list(backends.calls()) in (["cpu"], ["sdpa"])


def test_auto_serves_a_sequence_without_a_cache(tiny_model) -> None:
    import torch

    q, k, v = (torch.randn(6, heads, 16) for heads in (4, 2, 2))
    outs = [full_causal(name)(0, q, k, v, window=3) for name in ("auto", "naive")]
    torch.testing.assert_close(*outs)
