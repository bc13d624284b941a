"""Turns what the user calls a model into a Hugging Face directory on this machine."""

import hashlib
import re
from collections.abc import Callable
from pathlib import Path

from vllm_teach import data
from vllm_teach.errors import CacheError, MissingDependencyError, ModelNotFoundError
from vllm_teach.models.cache import build_once, cache_home, is_complete
from vllm_teach.models.fetch import SMOLLM2, model_folder
from vllm_teach.models.weight_files import weight_files

_HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
# What a model needs from the hub; leaves out the same weights in other formats.
_HUB_FILES = ["*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt", "model*.safetensors"]


def resolve_model(name_or_path: str | Path) -> Path:
    """Return the Hugging Face directory of a model, with config.json and safetensors weights in it.

    `name_or_path` is an alias (a key of `ALIASES`), a directory, a `.gguf` file (converted into the cache on first use)
    or a hub id `owner/name` (downloaded by huggingface_hub on first use). Raises ModelNotFoundError when there is no
    such model, ModelLoadError when a GGUF file cannot be read or a weight file is missing, CacheError when the cache
    folder cannot be written.
    """
    name = str(name_or_path)
    if name in ALIASES:
        return ALIASES[name]()
    try:
        path = Path(name).expanduser()
        is_folder, is_file = path.is_dir(), path.is_file()
    except (OSError, RuntimeError) as error:  # too long, not ours to read, "~name" of no user
        raise ModelNotFoundError(f"model {name[:80]!r} cannot be looked at ({error}): check the name.") from error
    if is_folder and name:  # an empty name would be the current folder
        return _checked(path)
    if is_file:
        return _converted(path)
    if _HUB_ID.fullmatch(name) and not name.lower().endswith(".gguf"):
        return _from_hub(name)
    raise ModelNotFoundError(
        f"model {name!r} is no alias ({', '.join(ALIASES)}), directory, .gguf file or hub id: check the name."
    )


def _smollm2() -> Path:
    folder = model_folder(SMOLLM2)
    if not is_complete(folder):
        raise ModelNotFoundError(f"model 'smollm2' is not in {folder}: run `vllm-teach fetch` once.")
    return folder


def _tiny() -> Path:
    return data.path("tiny-llama")


ALIASES: dict[str, Callable[[], Path]] = {"smollm2": _smollm2, "tiny": _tiny}


def describe_models() -> dict[str, str]:
    """Return for each alias the directory it stands for, or the sentence that says how to get it."""
    return {name: _describe(find) for name, find in ALIASES.items()}


def _describe(find: Callable[[], Path]) -> str:
    try:
        return str(find())
    except (ModelNotFoundError, CacheError) as error:
        return str(error)


def _checked(folder: Path) -> Path:
    if not (folder / "config.json").is_file():
        raise ModelNotFoundError(f"{folder} is no model directory, it has no config.json: check the path.")
    weight_files(folder)
    return folder


def _converted(file: Path) -> Path:
    if file.suffix.lower() != ".gguf":
        raise ModelNotFoundError(f"{file} is a file but no .gguf file: give a model directory or a .gguf file.")
    # A changed file has another size or time, and so another folder; hashing gigabytes on each start would be slow.
    stat = file.stat()
    identity = f"{file.resolve()}|{stat.st_size}|{stat.st_mtime_ns}"
    key = hashlib.sha256(identity.encode()).hexdigest()[:12]

    def convert(folder: Path) -> None:
        from vllm_teach.models.convert import convert_gguf

        convert_gguf(file, folder)

    return build_once(cache_home() / "gguf" / f"{file.stem}-{key}", convert)


def _from_hub(model_id: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
    except ImportError as error:
        raise MissingDependencyError(
            f"model {model_id!r} comes from the hub: pip install huggingface_hub, or give a local directory."
        ) from error
    try:
        folder = Path(snapshot_download(model_id, allow_patterns=_HUB_FILES))
    except LocalEntryNotFoundError as error:
        raise ModelNotFoundError(
            f"model {model_id!r} is no local directory and the hub cannot be reached from here: check the path, or "
            "connect once to download it."
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelNotFoundError(f"model {model_id!r} cannot be had from the hub ({reason}): check the id.") from error
    except OSError as error:
        raise CacheError(
            f"model {model_id!r} cannot be stored ({error}): make room, or set HF_HOME to a folder that you may write."
        ) from error
    return _checked(folder)
