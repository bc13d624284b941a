import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.config import ModelConfig
from vllm_teach.teaching.figures.kv_size import KVShape, draw_kv_size

SMOL = KVShape(30, 3, 64, 4)
LLAMA_2_7B = KVShape(32, 32, 128, 2)


def test_known_sizes() -> None:
    assert LLAMA_2_7B.bytes_per_token == 512 * 1024
    assert SMOL.bytes_per_token == 46_080
    assert KVShape(80, 8, 128, 2).bytes_per_token == 320 * 1024


def test_the_size_is_the_models_own() -> None:
    config = ModelConfig("LlamaForCausalLM", 100, 576, 1536, 30, 9, 3, 64, 8192)
    assert SMOL.bytes_per_token == config.kv_bytes_per_token(4)


def test_bars_and_labels_show_the_sizes() -> None:
    figure, sizes = draw_kv_size({"small, float32": SMOL, "large, fp16": LLAMA_2_7B}, context=4096)
    ax = figure.axes[0]
    assert [bar.get_width() for bar in ax.patches] == [46_080, 524_288] == list(sizes.values())
    assert [text.get_text() for text in ax.texts] == [
        "45 KiB  (180 MiB for 4,096 tokens)",
        "512 KiB  (2 GiB for 4,096 tokens)",
    ]
    assert ax.get_title() + ax.get_title(loc="left") == "large keeps 512 KiB for every token"
    plt.close(figure)


def test_nothing_to_draw_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="shapes is empty"):
        draw_kv_size({})
