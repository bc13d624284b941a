import os
import shutil
import sys

import huggingface_hub
import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from vllm_teach.errors import CacheError, MissingDependencyError, ModelLoadError, ModelNotFoundError
from vllm_teach.models import resolve_model
from vllm_teach.models.load import load_model
from vllm_teach.models.resolve import describe_models


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_TEACH_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def test_an_alias_that_is_not_fetched_names_the_command(home):
    with pytest.raises(ModelNotFoundError, match="run `vllm-teach fetch` once"):
        resolve_model("smollm2")
    # Half a model counts as none.
    (home / "smollm2-135m-instruct").mkdir(parents=True)
    with pytest.raises(ModelNotFoundError, match="run `vllm-teach fetch` once"):
        resolve_model("smollm2")


@pytest.mark.real_model
def test_the_alias_is_the_fetched_directory(smollm2_path, monkeypatch):
    monkeypatch.setenv("VLLM_TEACH_HOME", str(smollm2_path.parent))
    assert resolve_model("smollm2") == smollm2_path


def test_the_offline_model_travels_with_the_package(home):
    folder = resolve_model("tiny")
    assert (folder / "model.safetensors").is_file()
    assert describe_models()["tiny"] == str(folder)
    assert not home.exists()


def test_a_directory_is_itself(tmp_path, tiny_hf):
    folder = tmp_path / "model"
    tiny_hf("llama").save_pretrained(folder)
    assert resolve_model(folder) == resolve_model(str(folder)) == folder


def test_directories_that_are_no_models(tmp_path, tiny_hf):
    folder = tmp_path / "model"
    folder.mkdir()
    with pytest.raises(ModelNotFoundError, match=r"no config\.json"):
        resolve_model(folder)
    (folder / "config.json").write_text("{}")
    with pytest.raises(ModelNotFoundError, match=r"holds neither model\.safetensors nor"):
        resolve_model(folder)


def test_a_gguf_file_is_converted_once_and_again_when_it_changed(home, tmp_path, tiny_gguf):
    file = shutil.copy(tiny_gguf, tmp_path / "tiny.gguf")
    folder = resolve_model(file)
    assert folder.parent == home / "gguf"
    load_model(folder)
    written = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == written
    os.utime(file, ns=(1, 1))
    assert resolve_model(file) != folder


def test_a_damaged_gguf_file_leaves_nothing(home, tmp_path, tiny_gguf):
    file = tmp_path / "cut.gguf"
    file.write_bytes(tiny_gguf.read_bytes()[:9000])
    with pytest.raises(ModelLoadError, match=r"cut\.gguf"):
        resolve_model(file)
    assert [path.suffix for path in (home / "gguf").iterdir()] == [".lock"]


def test_a_gguf_suffix_in_capitals_is_one_too(tmp_path, tiny_gguf):
    loaded = load_model(resolve_model(shutil.copy(tiny_gguf, tmp_path / "TINY.GGUF")))
    assert loaded.num_parameters() == load_model(resolve_model(tiny_gguf)).num_parameters()


def test_an_empty_name_is_not_the_current_folder(tmp_path, tiny_hf, monkeypatch):
    tiny_hf("llama").save_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError, match="model '' is no alias"):
        resolve_model("")


def test_listing_the_models_survives_a_cache_folder_that_cannot_be(monkeypatch):
    monkeypatch.setenv("VLLM_TEACH_HOME", "~no-such-user")
    assert "VLLM_TEACH_HOME is '~no-such-user'" in describe_models()["smollm2"]


def test_another_file_is_no_model(tmp_path):
    file = tmp_path / "weights.bin"
    file.write_text("x")
    with pytest.raises(ModelNotFoundError, match=r"no \.gguf file"):
        resolve_model(file)


@pytest.mark.parametrize(
    "name", ["no-such-alias", "", "./missing/folder", "a/b/c", "models/missing.gguf", "models/MISSING.GGUF", "/nowhere"]
)
def test_names_that_are_nothing(name, monkeypatch):
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(
        ModelNotFoundError, match=r"no alias \(smollm2, tiny\), directory, \.gguf file or hub id|no config"
    ):
        resolve_model(name)


def test_a_hub_id_is_downloaded_without_other_formats(tmp_path, tiny_hf, monkeypatch):
    tiny_hf("llama").save_pretrained(tmp_path / "snapshot")
    asked = {}

    def download(model_id: str, **options: object) -> str:
        asked.update(options, id=model_id)
        return str(tmp_path / "snapshot")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_model("owner/name-1.5B") == tmp_path / "snapshot"
    assert asked["id"] == "owner/name-1.5B"
    # Newer checkpoints keep their chat template in a file of its own.
    assert {"model*.safetensors", "*.json", "*.jinja"} <= set(asked["allow_patterns"])
    assert not [pattern for pattern in asked["allow_patterns"] if pattern.endswith((".bin", ".gguf", "*"))]


@pytest.mark.parametrize("name", ["a" * 5000, "~no-such-user/model"])
def test_names_that_cannot_even_be_looked_up(name):
    with pytest.raises(ModelNotFoundError, match="check the name") as raised:
        resolve_model(name)
    assert len(str(raised.value)) < 6000


def test_a_hub_cache_that_cannot_be_written_is_named(monkeypatch):
    def download(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", "/cache")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(CacheError, match=r"'owner/name' cannot be stored .*Permission denied.*set HF_HOME"):
        resolve_model("owner/name")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (LocalEntryNotFoundError("no network\nand more"), "no local directory and the hub cannot be reached"),
        (HFValidationError("bad id\nand more"), r"cannot be had from the hub \(bad id\): check the id"),
    ],
)
def test_the_hubs_errors_become_one_sentence(error, message, monkeypatch):
    def download(*_: object, **__: object) -> str:
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    with pytest.raises(ModelNotFoundError, match=message) as raised:
        resolve_model("owner/name")
    assert "\n" not in str(raised.value)


def test_offline_the_real_hub_client_gives_the_same_sentence(monkeypatch, tmp_path):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="'owner/name' is no local directory and the hub cannot be reached"):
        resolve_model("owner/name")


def test_without_the_hub_library_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingDependencyError, match="pip install huggingface_hub"):
        resolve_model("owner/name")
