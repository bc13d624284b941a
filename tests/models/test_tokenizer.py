import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tokenizers
import tokenizers.processors
from transformers import AutoTokenizer, tokenization_utils_base

from vllm_teach.errors import InvalidArgumentError, ModelLoadError, ModelNotFoundError
from vllm_teach.models.convert import convert_gguf
from vllm_teach.models.tokenizer import load_tokenizer


@pytest.fixture
def folder(tmp_path: Path, tiny_gguf: Path) -> Path:
    convert_gguf(tiny_gguf, tmp_path, progress=False)
    return tmp_path


def test_ids_and_text_there_and_back(folder):
    tokenizer = load_tokenizer(folder)
    text = "hello w123 , naïve <|im_end|>"
    ids = tokenizer.encode(text)
    assert ids == AutoTokenizer.from_pretrained(folder).encode(text)
    assert ids[-1] == 2  # the special token's text is the special token
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "hello w123 , naïve "
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.vocab_size) == (1, 2, 320)


def test_half_a_character_is_a_replacement_character(folder):
    tokenizer = load_tokenizer(folder)
    ids = tokenizer.encode("é")
    assert len(ids) == 2
    assert tokenizer.decode(ids[:1]) == "\ufffd"


def test_the_chat_template_is_applied(folder):
    tokenizer = load_tokenizer(folder)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.chat_text(messages) == "<|im_start|>user\nhello<|im_end|>"
    ids = tokenizer.apply_chat_template(messages)
    assert ids == tokenizer.encode("<|im_start|>user\nhello<|im_end|>")
    assert (ids[0], ids[-1]) == (1, 2)


@pytest.mark.parametrize("messages", [[{"role": "user"}], [{"content": "x"}]])
def test_incomplete_messages_are_refused(messages, folder):
    with pytest.raises(InvalidArgumentError, match="lacks 'role' or 'content'"):
        load_tokenizer(folder).apply_chat_template(messages)


def edit(file: Path, **changes: object) -> None:
    content = json.loads(file.read_text())
    file.write_text(json.dumps({key: value for key, value in {**content, **changes}.items() if value is not None}))


def test_a_template_that_refuses_gives_its_reason(folder):
    template = "{{ raise_exception('roles must alternate') }}"
    edit(folder / "tokenizer_config.json", chat_template=template)
    with pytest.raises(InvalidArgumentError, match="roles must alternate"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}])


def test_a_model_without_a_template_is_not_for_chat(folder):
    edit(folder / "tokenizer_config.json", chat_template=None)
    with pytest.raises(InvalidArgumentError, match="without a chat template"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}])


def test_stop_ids_come_from_the_generation_config_then_the_config_then_the_tokenizer(folder):
    edit(folder / "generation_config.json", eos_token_id=[2, 0])
    assert load_tokenizer(folder).stop_token_ids == (2, 0)
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / "config.json", eos_token_id=0)
    assert load_tokenizer(folder).stop_token_ids == (0,)
    edit(folder / "config.json", eos_token_id=None)
    assert load_tokenizer(folder).stop_token_ids == (2,)


@pytest.mark.parametrize("value", ["2", {"a": 1}, [2, "x"], True, -1, 1.5])
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_stop_ids_that_are_none_are_named_with_their_file(name, value, folder):
    edit(folder / "generation_config.json", eos_token_id=None)
    edit(folder / name, eos_token_id=value)
    with pytest.raises(ModelLoadError, match=rf"{name} has eos_token_id = "):
        load_tokenizer(folder)


@pytest.mark.parametrize("content", ["[]", "3", "null", "{", "[" * 100_000])
def test_a_damaged_generation_config_is_named(content, folder):
    (folder / "generation_config.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"generation_config\.json"):
        load_tokenizer(folder)


def test_a_conversation_starts_with_bos_once(folder):
    """Llama 3's tokenizer puts BOS in front of a text, and its chat template writes BOS too."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = "<|endoftext|>"
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=[bos, "$A"], pair=[bos, "$A", "$B:1"], special_tokens=[(bos, 0)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    edit(folder / "tokenizer_config.json", chat_template="{{ '<|endoftext|>' }}{{ messages[0]['content'] }}")
    ours = load_tokenizer(folder)
    assert ours.encode("hello") == [0, *ours.encode("hello", add_special_tokens=False)]
    messages = [{"role": "user", "content": "hello"}]
    assert ours.apply_chat_template(messages) == ours.encode("hello")
    assert ours.apply_chat_template(messages) == ours.hf.apply_chat_template(messages, return_dict=False)


def test_a_folder_without_tokenizer(tmp_path):
    with pytest.raises(ModelNotFoundError, match=r"holds no tokenizer\.json: add the tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "vocab.json").write_text("{}")  # without merges.txt, transformers makes a tokenizer of three tokens
    with pytest.raises(ModelNotFoundError, match=r"holds no tokenizer\.json: add the tokenizer\.json"):
        load_tokenizer(tmp_path)


def test_a_folder_with_sentencepiece_alone_is_told_what_is_needed(tmp_path):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json but tokenizer\.model.*add the tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{", "{}", "[]"])
def test_a_damaged_tokenizer_says_so(content, folder):
    (folder / "tokenizer.json").write_text(content)
    with pytest.raises(ModelLoadError, match=r"tokenizer in .* is damaged|tokenizer\.json (cannot be read|is of type)"):
        load_tokenizer(folder)


@pytest.mark.parametrize("form", [list, " ".join])
def test_merges_that_make_no_token_are_named_before_the_library_panics(form, folder, capfd):
    def change(model: dict) -> None:
        longest = max(model["vocab"], key=len)
        model["merges"] = [form([longest, longest])]

    edit_model(folder, change)
    with pytest.raises(ModelLoadError, match=r"tokenizer\.json has merges that do not fit its vocab .* is no token"):
        load_tokenizer(folder)
    assert "panicked" not in capfd.readouterr().err


def edit_model(folder: Path, change: Callable[[dict], None]) -> None:
    content = json.loads((folder / "tokenizer.json").read_text())
    change(content["model"])
    (folder / "tokenizer.json").write_text(json.dumps(content))


class Panic(BaseException):
    """Derives as the Rust library's PanicException does."""


def raise_from_transformers(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(AutoTokenizer, "from_pretrained", fail)


def test_a_panic_of_the_library_is_a_load_error(folder, monkeypatch):
    raise_from_transformers(monkeypatch, Panic("range end\nindex"))
    with pytest.raises(ModelLoadError, match=r"is damaged \(range end index\)"):
        load_tokenizer(folder)


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_asks_the_program_to_stop_is_no_load_error(kind, folder, monkeypatch):
    raise_from_transformers(monkeypatch, kind())
    with pytest.raises(kind):
        load_tokenizer(folder)


def test_a_model_that_wants_its_own_code_is_refused_without_a_question(folder, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked at the terminal"))
    (folder / "own.py").write_text("raise SystemExit('ran')")
    auto_map = {"AutoTokenizer": ["own.Own", None]}
    edit(folder / "tokenizer_config.json", auto_map=auto_map, tokenizer_class="Own")
    with pytest.raises(ModelLoadError, match=r"wants its own code \(auto_map\) to be run, which this package does not"):
        load_tokenizer(folder)


@pytest.mark.parametrize("damage", [{"hidden_act": "null"}, {"bos_token_id": "[1, 2]"}])
def test_a_config_that_transformers_refuses_is_not_called_a_damaged_tokenizer(damage, folder):
    content = json.loads((folder / "config.json").read_text())
    content.update({key: json.loads(value) for key, value in damage.items()})
    (folder / "config.json").write_text(json.dumps(content))
    edit(folder / "tokenizer_config.json", tokenizer_class=None)
    with pytest.raises(ModelLoadError, match=rf"config\.json is refused by transformers \(.*{next(iter(damage))}"):
        load_tokenizer(folder)


def test_a_long_text_is_encoded_without_a_warning(folder, monkeypatch):
    tokenizer = load_tokenizer(folder)
    warned: list[str] = []
    monkeypatch.setattr(tokenization_utils_base.logger, "warning", lambda text, *_: warned.append(text))
    assert len(tokenizer.encode("x" * 1000)) > tokenizer.hf.model_max_length
    assert warned == []
