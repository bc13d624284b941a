"""Rebuilds a byte-level BPE tokenizer from the `tokenizer.ggml.*` metadata of a GGUF file.

A GGUF file names its pre-tokeniser (the rule that cuts text into words before merging) but does not spell it out: each
reader keeps its own table. Ours is `_PRE_TOKENIZERS`; a name that is not in it is an error, because a wrong rule gives
ids that look right on most texts and are wrong on the rest.
"""

from collections.abc import Callable, Mapping
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from vllm_teach.errors import ModelLoadError

# The kinds of token that GGUF's `token_type` array tells apart (llama.cpp's enum llama_token_type).
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

# OpenAI's cl100k rule; Llama 3 takes digits in groups of up to three, Qwen one by one.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


def _cl100k(digits: str) -> pre_tokenizers.PreTokenizer:
    split = pre_tokenizers.Split(Regex(_CL100K.format(digits=digits)), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


_PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "llama-bpe": lambda: _cl100k(r"\p{N}{1,3}"),
    "qwen2": lambda: _cl100k(r"\p{N}"),
}


def build_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """Return the tokenizer that `metadata` (a GGUF file's key-value pairs) describes.

    Control tokens such as `<|im_start|>` are registered as special, so their text in a prompt becomes their one id.
    Raises ModelLoadError for another tokenizer model than byte-level BPE ("gpt2") and for an unknown pre-tokeniser.
    """
    model = metadata.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise ModelLoadError(
            f"the GGUF file's tokenizer.ggml.model is {model!r} and only 'gpt2' (byte-level BPE) can be rebuilt: "
            "use the model's Hugging Face directory instead."
        )
    pre = metadata.get("tokenizer.ggml.pre")
    if pre not in _PRE_TOKENIZERS:
        raise ModelLoadError(
            f"the GGUF file's tokenizer.ggml.pre is {pre!r} and the known pre-tokenisers are "
            f"{', '.join(sorted(_PRE_TOKENIZERS))}: use the model's Hugging Face directory instead."
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in metadata["tokenizer.ggml.merges"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    # Llama 3 keeps whole words that are in the vocabulary although no merge leads to them.
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(metadata, tokens)
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    marked = list(zip(tokens, kinds, strict=False))
    special = (_UNKNOWN, _CONTROL)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in marked if k in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in marked if k == _USER_DEFINED])
    return tokenizer


def special_tokens(metadata: Mapping[str, Any]) -> dict[str, str]:
    """Return the text of the named special tokens that the file sets, as in {"eos_token": "<|im_end|>"}."""
    tokens = metadata["tokenizer.ggml.tokens"]
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _post_processor(metadata: Mapping[str, Any], tokens: list[str]) -> processors.PostProcessor:
    byte_level = processors.ByteLevel(trim_offsets=False)
    # llama.cpp's default where the file does not say: Llama 3 starts with BOS, the other three do not.
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", metadata["tokenizer.ggml.pre"] == "llama-bpe")
    if not add_bos:
        return byte_level
    bos_id = metadata["tokenizer.ggml.bos_token_id"]
    bos = tokens[bos_id]
    template = processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )
    return processors.Sequence([byte_level, template])
