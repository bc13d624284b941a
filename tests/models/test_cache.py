import errno
import json
import multiprocessing
import time
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from vllm_teach import cli
from vllm_teach.errors import CacheError, ModelLoadError, ModelNotFoundError
from vllm_teach.models.cache import build_once, cache_home, is_complete


def write_model(folder: Path, value: float = 1.0) -> None:
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / name).write_text("{}")
    save_file({"weight": torch.full((64,), value)}, folder / "model.safetensors")


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.suffix != ".lock")


def test_home_follows_the_environment_variable(monkeypatch, tmp_path):
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path))
    assert cache_home() == tmp_path
    monkeypatch.delenv("VLLM_TEACH_HOME")
    assert cache_home().name == "vllm_teach"


def test_builds_once_and_leaves_only_the_target(tmp_path):
    calls = []

    def build(folder: Path) -> None:
        calls.append(folder)
        write_model(folder)

    for _ in range(2):
        assert build_once(tmp_path / "deep" / "model", build) == tmp_path / "deep" / "model"
    assert len(calls) == 1
    assert names(tmp_path / "deep") == ["model"]


@pytest.mark.parametrize("failure", [ValueError, ModelNotFoundError, KeyboardInterrupt, SystemExit])
def test_a_failing_build_leaves_nothing(tmp_path, failure):
    def build(folder: Path) -> None:
        write_model(folder)
        raise failure

    with pytest.raises(failure):
        build_once(tmp_path / "model", build)
    assert names(tmp_path) == []


def test_a_build_without_all_files_is_refused(tmp_path):
    with pytest.raises(ModelLoadError, match="no complete model"):
        build_once(tmp_path / "model", lambda folder: (folder / "config.json").write_text("{}"))
    assert names(tmp_path) == []


def test_what_a_dead_build_left_is_removed_and_other_models_are_not(tmp_path):
    (tmp_path / "model.partial-dead").mkdir()
    (tmp_path / "model.partial-dead" / "half").write_text("x")
    (tmp_path / "model-2.partial-alive").mkdir()
    build_once(tmp_path / "model", write_model)
    assert names(tmp_path) == ["model", "model-2.partial-alive"]


def test_a_cut_weight_file_makes_the_model_incomplete_and_is_replaced(tmp_path):
    target = build_once(tmp_path / "model", write_model)
    weights = target / "model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-8])
    assert not is_complete(target)
    build_once(target, write_model)
    assert weights.read_bytes() == whole


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("content", ["", "{", "[]", None])
def test_a_json_file_that_is_damaged_or_gone_makes_the_model_incomplete(name, content, tmp_path):
    write_model(tmp_path)
    assert is_complete(tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    assert not is_complete(tmp_path)


def test_a_missing_or_cut_shard_makes_the_model_incomplete(tmp_path):
    write_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1.safetensors")
    assert not is_complete(tmp_path)  # no index says that this is a model's
    save_file({"other": torch.ones(64)}, tmp_path / "model-2.safetensors")
    index = {"weight_map": {"weight": "model-1.safetensors", "other": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert is_complete(tmp_path)
    second = tmp_path / "model-2.safetensors"
    second.write_bytes(second.read_bytes()[:-8])
    assert not is_complete(tmp_path)
    second.unlink()
    assert not is_complete(tmp_path)


def test_a_name_with_brackets_is_no_pattern(tmp_path):
    (tmp_path / "model[1].partial-dead").mkdir()
    (tmp_path / "model1.partial-alive").mkdir()
    build_once(tmp_path / "model[1]", write_model)
    assert names(tmp_path) == ["model1.partial-alive", "model[1]"]


def home_below_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file" / "home"


def home_that_is_a_file(tmp_path: Path) -> Path:
    (tmp_path / "file").write_text("")
    return tmp_path / "file"


def home_nobody_can_make(tmp_path: Path) -> Path:
    return Path("/proc/nowhere")


needs_proc = pytest.mark.skipif(not Path("/proc/self").exists(), reason="only Linux has /proc")


@pytest.mark.parametrize(
    "home", [home_below_a_file, home_that_is_a_file, pytest.param(home_nobody_can_make, marks=needs_proc)]
)
def test_a_home_that_cannot_be_used_is_one_line_of_the_command(home, tmp_path, monkeypatch, capsys):
    value = str(home(tmp_path))
    monkeypatch.setenv("VLLM_TEACH_HOME", value)
    with pytest.raises(CacheError, match=rf"set VLLM_TEACH_HOME, which is '{value}', to a folder"):
        build_once(cache_home() / "model", write_model)
    assert cli.main(["fetch", "--quiet"]) == 1
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("vllm-teach: ")
    assert f"VLLM_TEACH_HOME, which is '{value}'" in line


def test_a_home_of_no_user_is_named(monkeypatch):
    monkeypatch.setenv("VLLM_TEACH_HOME", "~no-such-user/models")
    with pytest.raises(CacheError, match="VLLM_TEACH_HOME is '~no-such-user/models'"):
        cache_home()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), SafetensorError("No space left")])
def test_a_full_disk_is_named_and_leaves_nothing(error, tmp_path, monkeypatch):
    monkeypatch.delenv("VLLM_TEACH_HOME", raising=False)

    def build(folder: Path) -> None:
        write_model(folder)
        raise error

    with pytest.raises(CacheError, match=r"No space left.*VLLM_TEACH_HOME, which is not set, to a folder"):
        build_once(tmp_path / "model", build)
    assert names(tmp_path) == []


def test_files_can_be_read_by_whoever_the_umask_lets(tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    target = build_once(tmp_path / "model", write_model)
    assert {file.stat().st_mode for file in target.iterdir()} == {plain.stat().st_mode}


def _count_and_build(target: Path, counts: Path, start: object) -> None:
    def build(folder: Path) -> None:
        with counts.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)  # so that the others come while this one builds
        write_model(folder)

    start.wait()  # type: ignore[attr-defined]
    build_once(target, build)


def test_concurrent_processes_build_one_model_once(tmp_path):
    context = multiprocessing.get_context("fork")
    start, counts = context.Barrier(4), tmp_path / "counts"
    workers = [
        context.Process(target=_count_and_build, args=(tmp_path / "cache" / "model", counts, start)) for _ in range(4)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=60)
    assert [worker.exitcode for worker in workers] == [0] * 4
    assert counts.read_text() == "built\n"
    assert names(tmp_path / "cache") == ["model"]
