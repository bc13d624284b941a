"""Text to token ids and back, by the tokenizer files of a Hugging Face directory."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from vllm_teach.errors import InvalidArgumentError, ModelLoadError, ModelNotFoundError
from vllm_teach.models.fields import is_whole, read_json
from vllm_teach.models.panics import misfit, rust_errors

# The sets of files that transformers makes a tokenizer of with what is installed here.
_FORMS = (("tokenizer.json",), ("vocab.json", "merges.txt"))


class Tokenizer:
    """A model's tokenizer, a thin cover over `transformers`' (its `hf` attribute), so that ids are the same.

    Attributes: `eos_token_id` and `bos_token_id` (None where the model has none); `stop_token_ids`, every id that ends
    a text by generation_config.json; `vocab_size`, added tokens included.
    """

    def __init__(self, hf: Any, stop_token_ids: tuple[int, ...]):
        self.hf = hf
        self.stop_token_ids = stop_token_ids
        self.eos_token_id: int | None = hf.eos_token_id
        self.bos_token_id: int | None = hf.bos_token_id
        self.vocab_size: int = len(hf)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; the text of a special token, as `<|im_start|>`, becomes its one id.

        `add_special_tokens` adds what the model wants around a text (Llama 3: BOS in front; SmolLM2: nothing).
        """
        # Not verbose: the engine itself refuses a text that is too long, transformers only warns.
        return list(self.hf.encode(text, add_special_tokens=add_special_tokens, verbose=False))

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`, spaces untouched; bytes that are no whole character become U+FFFD."""
        return self.hf.decode(list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False)

    def apply_chat_template(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> list[int]:
        """Return the ids of a conversation, each message a dict with `role` and `content`, in the model's own form.

        `add_generation_prompt` opens the assistant's turn. Raises InvalidArgumentError when the model has no chat
        template or its template refuses the messages.
        """
        return self.encode(self.chat_text(messages, add_generation_prompt), add_special_tokens=False)

    def chat_text(self, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Return the text that `apply_chat_template` encodes."""
        from jinja2 import TemplateError

        if not self.hf.chat_template:
            raise InvalidArgumentError("messages were given to a model without a chat template: give it a plain text.")
        for message in messages:
            if not {"role", "content"} <= message.keys():
                raise InvalidArgumentError(f"message {message!r} lacks 'role' or 'content': give both.")
        try:
            return self.hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=add_generation_prompt)
        except TemplateError as error:
            raise InvalidArgumentError(
                f"the model's chat template refuses the messages ({error}): change them."
            ) from error


def load_tokenizer(path: Path | str) -> Tokenizer:
    """Return the tokenizer in the model directory `path`, made from tokenizer.json or from vocab.json and merges.txt.

    Raises ModelNotFoundError when the directory has neither, ModelLoadError when they are damaged or want code of the
    model's own, which is not run.
    """
    from transformers import AutoTokenizer

    folder = Path(path)
    if not any(all((folder / name).is_file() for name in names) for names in _FORMS):
        also = " but tokenizer.model, which is not read here" if (folder / "tokenizer.model").is_file() else ""
        raise ModelNotFoundError(f"{folder} holds no tokenizer.json{also}: add the tokenizer.json of the same model.")
    # First, because transformers reads the same entries and says less clearly what is wrong with them.
    stop_token_ids = _stop_token_ids(folder)
    _check_merges(folder / "tokenizer.json")
    with rust_errors(lambda reason: _refusal(folder, reason)):
        # Where trust_remote_code is not said, transformers asks the person at the terminal.
        hf = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    if stop_token_ids is None:
        stop_token_ids = () if hf.eos_token_id is None else (hf.eos_token_id,)
    return Tokenizer(hf, stop_token_ids)


def _check_merges(file: Path) -> None:
    """Refuse a BPE whose merges make tokens that it lacks; what else is wrong, the library says itself."""
    model = read_json(file).section("model").values if file.is_file() else {}
    vocab, merges, prefix = model.get("vocab"), model.get("merges"), model.get("continuing_subword_prefix")
    if not isinstance(vocab, Mapping) or not isinstance(merges, list):
        return
    split = (merge.split(" ") if isinstance(merge, str) else merge for merge in merges)
    pairs = ((m[0], m[1]) for m in split if isinstance(m, list) and [type(part) for part in m] == [str, str])
    wrong = misfit(pairs, vocab, prefix if isinstance(prefix, str) else "")
    if wrong is not None:
        raise ModelLoadError(f"{file} has merges that do not fit its vocab ({wrong}): download it again.")


def _refusal(folder: Path, reason: str) -> ModelLoadError:
    """Return the error for a tokenizer that transformers did not make; raise it where config.json is to blame."""
    from transformers import AutoConfig

    if "trust_remote_code" in reason:
        return ModelLoadError(
            f"the model in {folder} wants its own code (auto_map) to be run, which this package does not do: use a "
            "model without it, or take auto_map out of its tokenizer_config.json and config.json."
        )
    if (folder / "config.json").is_file():
        config = folder / "config.json"
        with rust_errors(
            lambda why: ModelLoadError(f"{config} is refused by transformers ({why}): correct it or download it again.")
        ):
            AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    return ModelLoadError(f"the tokenizer in {folder} is damaged ({reason}): download it again.")


def _stop_token_ids(folder: Path) -> tuple[int, ...] | None:
    """Return the ids that end a text by generation_config.json, else by config.json; None where neither says."""
    for name in ("generation_config.json", "config.json"):
        file = folder / name
        if not file.is_file():
            continue
        fields = read_json(file)
        if "eos_token_id" in fields:
            value = fields.values["eos_token_id"]
            ids = value if isinstance(value, list) else [value]
            if not all(is_whole(token_id) and token_id >= 0 for token_id in ids):
                raise fields.refusal("eos_token_id", "a token id or a list of them")
            return tuple(ids)
    return None
