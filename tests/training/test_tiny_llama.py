"""The committed offline model: its files agree with each other, with this package, transformers and training.json."""

import json
import math

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_teach import LLM, SamplingParams
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models import full_causal, load_model, load_tokenizer
from vllm_teach.models.load import load_config
from vllm_teach.training import (
    KneserNey,
    TrainingOptions,
    corpus_hash,
    document_nlls,
    encode_parts,
    tiny_llama,
    train_tokenizer,
)
from vllm_teach.training.model import llama_config

TEXTS = [
    "Return the number of ",
    "The following example shows how to",
    "If the optional argument is given, é – 漢\n\n  x",
]


@pytest.fixture(scope="module")
def record(tiny_path):
    return json.loads((tiny_path / "training.json").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def model(tiny_path):
    return load_model(tiny_path)


@pytest.fixture(scope="module")
def tokenizer(tiny_path):
    return load_tokenizer(tiny_path)


@pytest.fixture(scope="module")
def parts(documents, tokenizer):
    return encode_parts(lambda text: tokenizer.encode(text), documents)


def test_the_folder_is_whole_and_small(tiny_path):
    names = {file.name for file in tiny_path.iterdir()}
    assert names == {
        "config.json", "generation_config.json", "model.safetensors",
        "tokenizer.json", "tokenizer_config.json", "training.json",
    }  # fmt: skip
    assert sum(file.stat().st_size for file in tiny_path.iterdir()) <= 8_000_000


def test_config_record_and_weights_agree(tiny_path, record, model, tokenizer):
    config = load_config(tiny_path)
    assert config == llama_config(
        tiny_llama.VOCAB_SIZE,
        hidden_size=tiny_llama.HIDDEN_SIZE,
        num_layers=tiny_llama.NUM_LAYERS,
        kv_heads=tiny_llama.KV_HEADS,
        context=tiny_llama.CONTEXT,
    )
    assert model.num_parameters() == record["parameters"]
    assert 2_000_000 <= record["parameters"] <= 4_000_000
    widths = (config.vocab_size, config.hidden_size, config.intermediate_size, config.head_dim)
    assert [width % 64 for width in widths] == [0, 0, 0, 0]
    assert config.num_kv_heads < config.num_q_heads
    assert tokenizer.vocab_size == config.vocab_size
    assert tokenizer.hf.model_max_length == config.max_position
    assert (tokenizer.eos_token_id, tokenizer.stop_token_ids) == (0, (0,))
    assert tokenizer.decode(tokenizer.encode(TEXTS[2])) == TEXTS[2]


def test_the_record_says_how_it_was_made(record):
    assert record["command"].startswith("python -m vllm_teach.training.tiny_llama --out data/tiny-llama")
    options = dict(record["options"], betas=tuple(record["options"]["betas"]))
    assert TrainingOptions(**options) == tiny_llama.OPTIONS
    assert (options["dtype"], options["attention"], options["attention_dropout"]) == ("bf16", "memory_efficient", 0.1)
    assert record["cpu_seconds"] <= 2 * 30 * 60  # 30 minutes of two cores
    curve = record["curve"]
    assert len(curve["train"]) == math.ceil(options["steps"] / curve["steps_per_entry"])
    assert curve["train"][0] == pytest.approx(math.log(tiny_llama.VOCAB_SIZE), abs=0.4)
    assert min(curve["dev"], key=lambda entry: entry[1])[0] == record["kept_step"]


def test_it_beats_the_trigram_models(record):
    for part in ("dev", "validation"):
        losses = record["losses_in_nats_per_token"][part]
        assert losses["model"] < losses["modified_kneser_ney"] - 0.2
        assert losses["modified_kneser_ney"] < losses["kneser_ney"]


def test_it_beats_them_on_this_pythons_text_too(model, parts):
    """Measured now, whatever the Python version: trigrams of this training part against the model, on ten documents."""
    some = sorted(parts["validation"], key=len)[-12:-2]
    ours = document_nlls(model, some, window=model.config.max_position)
    trigram = KneserNey(parts["train"], model.config.vocab_size)
    theirs = np.concatenate([trigram.nlls(ids) for ids in some])
    assert len(ours) == len(theirs) > 5_000
    assert ours.mean() < theirs.mean() - 0.15


def test_the_recorded_losses_are_measured_again(record, model, documents, parts):
    if corpus_hash(documents) != record["corpus"]["sha256"]:
        pytest.skip(f"the recorded losses are of Python {record['python']}'s text, which differs from this one's")
    for part in ("train", "dev", "validation"):
        counts = record["corpus"][part]
        assert counts["documents"] == len(parts[part])
        assert counts["tokens"] == sum(len(ids) + 1 for ids in parts[part])
    trigram = KneserNey(parts["train"], model.config.vocab_size)
    losses = record["losses_in_nats_per_token"]["dev"]
    measured = document_nlls(model, parts["dev"], window=model.config.max_position).mean()
    assert measured == pytest.approx(losses["model"], abs=1e-4)
    measured = np.concatenate([trigram.nlls(ids) for ids in parts["dev"]]).mean()
    assert measured == pytest.approx(losses["modified_kneser_ney"], abs=1e-9)


def test_the_tokenizer_is_the_one_its_text_gives(record, documents, tiny_path):
    if corpus_hash(documents) != record["corpus"]["sha256"]:
        pytest.skip(f"the tokenizer is of Python {record['python']}'s text, which differs from this one's")
    again = train_tokenizer([d.text for d in documents if d.part == "train"], tiny_llama.VOCAB_SIZE)
    assert json.loads(again.to_str()) == json.loads((tiny_path / "tokenizer.json").read_text(encoding="utf-8"))


def test_transformers_computes_the_same_logits(tiny_path, model, tokenizer):
    reference = AutoModelForCausalLM.from_pretrained(tiny_path, dtype=torch.float32, local_files_only=True).eval()
    theirs = AutoTokenizer.from_pretrained(tiny_path)
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert theirs.encode(text) == ids
        with torch.no_grad():
            expected = reference(torch.tensor([ids])).logits[0]
        actual = model.logits(model(torch.tensor(ids), torch.arange(len(ids)), full_causal("sdpa")))
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_it_generates_by_its_alias():
    llm = LLM("tiny", dtype="float32", device="cpu", kv_cache_memory_bytes=2**22)
    params = SamplingParams(temperature=0, max_tokens=24)
    first, second = llm.generate([TEXTS[0], TEXTS[1]], params, use_tqdm=False)
    assert len(first.outputs[0].token_ids) == 24 or first.outputs[0].finish_reason == "stop"
    words = (first.outputs[0].text + second.outputs[0].text).split()
    assert {"the", "of", "a", "to", "is", "in"} & set(words)
    assert llm.generate([TEXTS[0]], params, use_tqdm=False)[0].outputs[0].text == first.outputs[0].text


def test_the_command_builds_a_folder(documents, tmp_path, monkeypatch, capsys):
    """All of it on a small part of the corpus: three steps, then the files, the trigram models and the record."""
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path / "home"))
    some = [document for document in documents if len(document.text) < 2000]
    monkeypatch.setattr(tiny_llama, "collect_documents", lambda progress: some)
    small = TrainingOptions(steps=3, batch_size=2, window=32, long_steps=1, long_window=64, evaluate_every=2)
    monkeypatch.setattr(tiny_llama, "OPTIONS", small)
    for name, value in {"VOCAB_SIZE": 320, "HIDDEN_SIZE": 64, "NUM_LAYERS": 1, "KV_HEADS": 1, "CONTEXT": 64}.items():
        monkeypatch.setattr(tiny_llama, name, value)
    assert tiny_llama.main(["--out", str(tmp_path / "out"), "--steps", "3", "--quiet"]) == 0
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["corpus"]["sha256"] == corpus_hash(some)
    assert len(record["curve"]["dev"]) == 2
    assert f"model {record['losses_in_nats_per_token']['validation']['model']:.4f}" in capsys.readouterr().out
    assert load_model(tmp_path / "out").config.vocab_size == 320
    assert list((tmp_path / "home").iterdir()) == []  # the checkpoint has served
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home", "out"]


def test_an_interrupted_command_says_how_to_go_on(monkeypatch, capsys):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tiny_llama, "build_tiny_llama", interrupt)
    assert tiny_llama.main(["--out", "x"]) == 130
    assert "the same command goes on" in capsys.readouterr().err


def test_the_commands_errors_are_one_line(capsys):
    assert tiny_llama.main(["--out", "x", "--steps", "0"]) == 1
    assert capsys.readouterr().err == "tiny_llama: steps=0 is not valid: give a whole number, 1 or more.\n"


@pytest.mark.parametrize("threads", ["0", "-1", "x", "1.5", "99999"])
def test_threads_that_are_none_are_refused(threads, capsys):
    with pytest.raises(SystemExit) as ended:
        tiny_llama.main(["--out", "x", "--threads", threads])
    assert ended.value.code == 2
    assert "is no number of threads: give a whole number from 1 to 1024" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_named_before_the_training(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(tiny_llama, "collect_documents", lambda progress: pytest.fail("began"))
    (tmp_path / "file").touch()
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        assert tiny_llama.main(["--out", str(out)]) == 1
        [line] = capsys.readouterr().err.splitlines()
        assert line.startswith(f"tiny_llama: out is {str(out)!r}, which cannot be written (")
    tiny_llama._check_out(tmp_path / "new")
    assert {path.name for path in tmp_path.rglob("*")} == {"file", "new"}  # nothing is left behind


def test_a_chat_without_a_template_is_refused_in_one_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    llm = LLM("tiny", device="cpu", kv_cache_memory_bytes=2**22)
    with pytest.raises(InvalidArgumentError, match=r"without a chat template: give it a plain text\.$"):
        llm.chat([{"role": "user", "content": "Hello"}], use_tqdm=False)
    assert list(tmp_path.iterdir()) == []
