"""Models of transformers, random and tiny, through our `attend`, against their own `generate` and their own logits."""

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from vllm_teach.engine.events import Preempted
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import ModelLoadError, ModelNotFoundError
from vllm_teach.models.attend import full_causal
from vllm_teach.models.hugging_face import HuggingFaceModel, load_hugging_face
from vllm_teach.models.hugging_face_probe import window_of

_SIZES = {
    "vocab_size": 200,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
_WORKING: dict[str, dict[str, object]] = {
    "gpt_neox": {},
    "gemma": {**_GROUPED, "num_key_value_heads": 1},
    # Alternating layers, a scale of its own, capped logits; its capped scores are left out, which we refuse.
    "gemma2": {**_GROUPED, "sliding_window": 8, "query_pre_attn_scalar": 50, "attn_logit_softcapping": None},
    "mistral": {**_GROUPED, "sliding_window": 8},
    "phi": {"num_key_value_heads": 2},
    "gpt2": {},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    # Scaled logits.
    "cohere": {"num_key_value_heads": 2},
    "granite": {"num_key_value_heads": 2, "logits_scaling": 3.0, "attention_multiplier": 0.5},
    # A part of the experts for each token.
    "mixtral": {"num_key_value_heads": 2, "num_local_experts": 4},
}
PROMPT = torch.tensor([5, 17, 101, 9, 9, 42, 180, 3, 77, 60, 8, 150, 33])


def make(family: str, **overrides: object) -> PreTrainedModel:
    torch.manual_seed(3)
    config = AutoConfig.for_model(family)
    names = type(config).attribute_map
    config = type(config)(**{names.get(name, name): value for name, value in {**_SIZES, **overrides}.items()})
    return AutoModelForCausalLM.from_config(config).float().eval()


def their_tokens(model: PreTrainedModel, prompt: Tensor, count: int) -> list[int]:
    ids = prompt[None]
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, **settings)[0].tolist()


class PlainCache:
    """Keeps k and v of sequences whose tokens lie behind one another in each step; attention written out in full."""

    def __init__(self, num_sequences: int = 1) -> None:
        self.lengths = [1] * num_sequences  # of this step
        self.kept: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor, *, window: int | None = None) -> Tensor:
        parts = zip(*(x.split(self.lengths) for x in (q, k, v)), strict=True)
        return torch.cat([self.attend((layer, number), *part, window) for number, part in enumerate(parts)])

    def attend(self, key: tuple[int, int], q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
        if key in self.kept:
            k, v = torch.cat([self.kept[key][0], k]), torch.cat([self.kept[key][1], v])
        self.kept[key] = k, v
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], dim=1) for x in (k, v))
        ahead = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        hidden = (ahead < 0) if window is None else (ahead < 0) | (ahead >= window)
        scores = torch.einsum("qhd,khd->hqk", q, k) / math.sqrt(q.shape[-1])
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


@torch.inference_mode()
def our_tokens(model: HuggingFaceModel, prompts: list[Tensor], count: int) -> list[list[int]]:
    """Greedy tokens of all prompts at once: one flat batch a step."""
    cache = PlainCache(len(prompts))
    texts = [prompt.tolist() for prompt in prompts]
    new = [list(text) for text in texts]
    for _ in range(count):
        cache.lengths = [len(each) for each in new]
        positions = [range(len(text) - len(each), len(text)) for text, each in zip(texts, new, strict=True)]
        ids = torch.tensor([token for each in new for token in each])
        places = torch.tensor([place for each in positions for place in each])
        last = torch.tensor(cache.lengths).cumsum(0) - 1
        chosen = model.logits(model(ids, places, cache)[last]).argmax(-1).tolist()
        new = [[token] for token in chosen]
        for text, each in zip(texts, new, strict=True):
            text += each
    return texts


@pytest.mark.parametrize("family", _WORKING)
def test_tokens_equal_its_own_generate(family: str) -> None:
    """Three texts of different lengths in one flat batch, longer than the windows, token for token."""
    reference = make(family, **_WORKING[family])
    prompts = [PROMPT, PROMPT[:1], PROMPT.flip(0)[:7]]
    expected = [their_tokens(reference, prompt, 24) for prompt in prompts]
    assert len({tuple(each[-8:]) for each in expected}) == 3  # so that a mixed-up text would show
    assert our_tokens(HuggingFaceModel(reference), prompts, 24) == expected


class NumberTokenizer:
    stop_token_ids = (2,)

    def encode(self, text: str) -> list[int]:
        return [int(word) for word in text.split()]

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        return " ".join(map(str, ids))

    def apply_chat_template(self, messages) -> list[int]:
        raise NotImplementedError


@pytest.mark.parametrize("family", _WORKING)
def test_the_engine_runs_it_on_the_paged_cache(family: str) -> None:
    """In chunks, with blocks of 4, preempted in a pool that is too small for all, and from the prefix cache."""
    reference = make(family, **_WORKING[family])
    prompts = [PROMPT, PROMPT[:1], PROMPT.flip(0)[:7], PROMPT.repeat(3)]
    expected = [their_tokens(reference, prompt, 20)[len(prompt) :] for prompt in prompts]
    limits = {"block_size": 4, "num_kv_blocks": 15, "max_num_seqs": 8, "max_num_batched_tokens": 8}
    llm = LLM.from_loaded(HuggingFaceModel(reference), NumberTokenizer(), **limits)
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    for _ in range(2):
        outputs = llm.generate([prompt.tolist() for prompt in prompts], params, use_tqdm=False)
        assert [output.outputs[0].token_ids for output in outputs] == expected
    # Every layer of this Mistral has a window of 8, so that two or three blocks a sequence are enough.
    assert bool(llm.engine.events.of(Preempted)) == (family != "mistral")
    assert llm.engine.kv.usage().held_blocks == 0


@pytest.mark.parametrize("family", ["gemma2", "cohere", "granite", "gpt2", "opt"])
def test_logits_equal_its_own(family: str) -> None:
    """Not only the largest: what a head does after its matrix is not lost."""
    reference = make(family, **_WORKING[family])
    with torch.inference_mode():
        expected = reference(PROMPT[None], use_cache=False).logits[0]
        model = HuggingFaceModel(reference)
        found = model.logits(model(PROMPT, torch.arange(len(PROMPT)), full_causal()))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_config_says_what_the_layers_do() -> None:
    config = HuggingFaceModel(make("gemma2", **_WORKING["gemma2"])).config
    assert (config.num_layers, config.num_q_heads, config.num_kv_heads, config.head_dim) == (3, 4, 2, 16)
    assert [config.window(layer) for layer in range(3)] == [8, None, 8]
    assert (config.vocab_size, config.max_position) == (200, 96)
    assert config.kv_bytes_per_token(4) == 2 * 3 * 2 * 16 * 4
    assert HuggingFaceModel(make("gpt2")).config.num_kv_heads == 4


def test_a_window_as_long_as_the_context_is_none() -> None:
    config = HuggingFaceModel(make("mistral", **_GROUPED, sliding_window=96)).config
    assert [config.window(layer) for layer in range(3)] == [None] * 3


def test_attributes() -> None:
    model = HuggingFaceModel(make("gpt_neox").to(torch.bfloat16))
    assert model.dtype is torch.bfloat16
    assert model.device == torch.device("cpu")
    assert model.num_parameters() == sum(parameter.numel() for parameter in model.hf.parameters())
    assert not any(parameter.requires_grad for parameter in model.hf.parameters())


@pytest.mark.parametrize(
    ("family", "overrides", "reason"),
    [
        ("gemma2", _GROUPED, "caps its attention scores"),
        ("gpt_oss", {**_GROUPED, "num_local_experts": 4}, "attention sinks"),
        ("bloom", {}, "code of its own"),
        ("phi", {"max_position_embeddings": 1}, "max_position_embeddings = 1,"),
        ("roberta", {"is_decoder": True}, "other logits"),
        ("bart", {"is_decoder": True, "decoder_layers": 3}, "other logits"),
        ("bert", {}, "neither causal nor a sliding window"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "'dynamic'"),
        ("llama4_text", {**_GROUPED, "attention_chunk_size": 16, "num_local_experts": 2}, "no part that"),
        ("deepseek_v3", {"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}, "unequal size"),
        ("jamba", {"num_key_value_heads": 2, "num_experts": 2, "attn_layer_offset": 1, "attn_layer_period": 2}, "some"),
    ],
)
def test_what_cannot_be_served_is_refused(family: str, overrides: dict[str, object], reason: str) -> None:
    with pytest.raises(ModelLoadError, match=reason):
        HuggingFaceModel(make(family, **overrides))


@pytest.mark.parametrize(
    ("sees", "window"),
    [
        (lambda b, h, q, k: k <= q, 0),
        (lambda b, h, q, k: (k <= q) & (k > q - 7), 7),
        (lambda b, h, q, k: (k <= q) & (k > q - 64), 0),  # the whole context
        (lambda b, h, q, k: k >= 0, -1),
        (lambda b, h, q, k: torch.tensor(True), -1),
        (lambda b, h, q, k: k < 0, -1),
        (lambda b, h, q, k: (k <= q) & (k // 16 == q // 16), -1),  # Llama 4's chunks
        (lambda b, h, q, k: (k <= q) & ((k > q - 7) | (k < 4)), -1),  # the first tokens, too
        (lambda b, h, q, k: (k <= q) & (k % 2 == q % 2), -1),
    ],
)
def test_window_of_a_mask(sees: Callable[..., Tensor], window: int) -> None:
    assert window_of(sees, 64) == window


def test_two_sizes_of_window_are_refused() -> None:
    model = make("mistral", **_GROUPED, sliding_window=8)
    for size, layer in enumerate(model.model.layers, start=4):
        layer.self_attn.forward = _with_window(layer.self_attn.forward, size)
    with pytest.raises(ModelLoadError, match="windows of 3 sizes"):
        HuggingFaceModel(model)


def _with_window(original: Callable[..., object], window: int) -> Callable[..., object]:
    def forward(*args: object, **kwargs: object) -> object:
        mask = kwargs["attention_mask"]
        if isinstance(mask, Tensor) and mask.ndim == 0:  # the probe's; the model's own attention gets its own
            kwargs["attention_mask"] = torch.tensor(window)
        return original(*args, **kwargs)

    return forward


def test_loaded_from_a_directory(tmp_path: Path) -> None:
    reference = make("gpt_neox")
    reference.save_pretrained(tmp_path)
    expected = their_tokens(reference, PROMPT, 8)
    model = load_hugging_face(tmp_path, torch.float32, "cpu")
    assert our_tokens(model, [PROMPT], 8) == [expected]
    assert load_hugging_face(tmp_path, torch.bfloat16).dtype is torch.bfloat16


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        load_hugging_face(tmp_path / "nowhere")
    make("gpt_neox").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-family"}')
    with pytest.raises(ModelLoadError, match="transformers cannot load"):
        load_hugging_face(tmp_path)


def test_its_own_generate_says_that_it_was_taken_over() -> None:
    reference = make("gpt_neox")
    HuggingFaceModel(reference)
    with pytest.raises(LookupError):
        their_tokens(reference, PROMPT, 2)
