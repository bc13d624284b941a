"""Rebuilds a byte-level BPE tokenizer from the `tokenizer.ggml.*` metadata of a GGUF file.

A GGUF file names its pre-tokeniser (the rule that cuts text into words before merging) but does not spell it out: each
reader keeps its own table. Ours is `_PRE_TOKENIZERS`; a name that is not in it is an error, because a wrong rule gives
ids that look right on most texts and are wrong on the rest.
"""

from collections.abc import Callable, Iterable

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from vllm_teach.errors import ModelLoadError
from vllm_teach.models.fields import Fields
from vllm_teach.models.panics import misfit, rust_errors

_TOKENS, _MERGES = "tokenizer.ggml.tokens", "tokenizer.ggml.merges"

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


def build_tokenizer(fields: Fields) -> Tokenizer:
    """Return the tokenizer that `fields`, a GGUF file's key-value pairs, describe.

    Control tokens such as `<|im_start|>` are registered as special, so their text in a prompt becomes their one id.
    Raises ModelLoadError for another tokenizer model than byte-level BPE ("gpt2"), for an unknown pre-tokeniser, and
    for lists of tokens and merges that are missing or do not go together.
    """
    _known(fields, "tokenizer.ggml.model", ["gpt2"])
    pre = _known(fields, "tokenizer.ggml.pre", _PRE_TOKENIZERS)
    tokens = _tokens(fields)
    merges = [(left, right) for left, _, right in (m.partition(" ") for m in fields.items(_MERGES, str))]
    kinds = fields.items("tokenizer.ggml.token_type", int, [])
    bos = _bos(fields, pre)
    vocab = {token: index for index, token in enumerate(tokens)}

    def refusal(reason: str) -> ModelLoadError:
        return ModelLoadError(
            f"{fields.source} has {_MERGES} that do not fit its tokens ({reason}): download it again."
        )

    wrong = misfit(merges, vocab)
    if wrong is not None:
        raise refusal(wrong)
    with rust_errors(refusal):
        # Llama 3 keeps whole words that are in the vocabulary although no merge leads to them.
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _post_processor(bos)
    marked = list(zip(tokens, kinds, strict=False))
    special = (_UNKNOWN, _CONTROL)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t, k in marked if k in special])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t, k in marked if k == _USER_DEFINED])
    return tokenizer


def special_token_id(fields: Fields, key: str) -> int | None:
    """Return the id that the file gives the "bos", "eos", "unknown" or "padding" token, None where it gives none."""
    full = f"tokenizer.ggml.{key}_token_id"
    last = len(_tokens(fields)) - 1
    return fields.integer(full, minimum=0, maximum=last) if full in fields else None


def special_tokens(fields: Fields) -> dict[str, str]:
    """Return the text of the named special tokens that the file sets, as in {"eos_token": "<|im_end|>"}."""
    tokens = _tokens(fields)
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: special_token_id(fields, key) for name, key in keys.items()}
    return {name: tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _tokens(fields: Fields) -> list[str]:
    tokens = fields.items(_TOKENS, str)
    if not tokens:
        raise fields.refusal(_TOKENS, "at least one token")
    return tokens


def _known(fields: Fields, key: str, known: Iterable[str]) -> str:
    value = fields.text(key)
    if value not in known:
        raise ModelLoadError(
            f"{fields.source} has {key} = {value!r} and what can be rebuilt is {', '.join(sorted(known))}: use the "
            "model's Hugging Face directory instead."
        )
    return value


def _bos(fields: Fields, pre: str) -> tuple[str, int] | None:
    """Return text and id of the token that starts every text, None for a model that wants none."""
    # llama.cpp's default where the file does not say: Llama 3 starts with BOS, the other three do not.
    if not fields.flag("tokenizer.ggml.add_bos_token", pre == "llama-bpe"):
        return None
    bos_id = special_token_id(fields, "bos")
    if bos_id is None:
        raise fields.refusal("tokenizer.ggml.bos_token_id", "the token that add_bos_token puts in front of a text")
    return _tokens(fields)[bos_id], bos_id


def _post_processor(bos: tuple[str, int] | None) -> processors.PostProcessor:
    byte_level = processors.ByteLevel(trim_offsets=False)
    if bos is None:
        return byte_level
    template = processors.TemplateProcessing(
        single=[bos[0], "$A"], pair=[bos[0], "$A", f"{bos[0]}:1", "$B:1"], special_tokens=[bos]
    )
    return processors.Sequence([byte_level, template])
