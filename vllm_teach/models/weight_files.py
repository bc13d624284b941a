"""Which files of a Hugging Face directory hold the model's weights: one, or several that an index lists."""

from pathlib import Path

from vllm_teach.errors import ModelLoadError, ModelNotFoundError
from vllm_teach.models.fields import read_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the model in `folder` (as `transformers` finds them).

    Raises ModelNotFoundError when there are none, ModelLoadError when the index is damaged or a file it lists is
    missing.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    index = folder / INDEX
    if not index.is_file():
        raise ModelNotFoundError(
            f"{folder} holds neither {SINGLE} nor {INDEX}: give a model directory with safetensors weights."
        )
    weight_map = read_json(index).section("weight_map")
    files = [folder / name for name in sorted({weight_map.text(tensor) for tensor in weight_map.values})]
    if not files:
        raise ModelLoadError(f"{index} lists no weights under weight_map: download it again.")
    for file in files:
        if not file.is_file():
            raise ModelLoadError(f"{file} is missing although {INDEX} names it: download or make it again.")
    return files
