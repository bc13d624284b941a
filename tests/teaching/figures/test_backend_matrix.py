from matplotlib import pyplot as plt

from vllm_teach import backends
from vllm_teach.teaching.figures.backend_matrix import FEATURES, HOME, draw_support_matrix, support_matrix


def test_every_backend_is_asked_about_every_feature_where_it_is_at_home() -> None:
    data = support_matrix()
    assert list(data.refusals) == backends.names()
    assert set(HOME) <= set(data.refusals)
    for name, reasons in data.refusals.items():
        assert tuple(reasons) == data.features == tuple(FEATURES)
        assert reasons["float16"] is None, f"{name} refuses the plain call"
        assert not any(reason and "not on cuda" in reason for reason in reasons.values())


def test_known_answers() -> None:
    data = support_matrix()
    assert data.universal == ["naive", "tiled", "memory_efficient"]
    assert data.title.startswith("3 of ")
    refused = {name: {feature for feature, reason in row.items() if reason} for name, row in data.refusals.items()}
    assert refused["sdpa"] == {"softcap", "dropout with a seed"}
    assert {"float32", "block-sparse pattern", "paged, blocks of 16"} <= refused["flash_attn"]
    assert "paged, blocks of 256" not in refused["flash_attn"]
    assert {"softcap", "ALiBi", "paged, blocks of 256"} <= refused["xformers"]
    assert "gradients" in refused["cpu"]


def test_a_cross_for_each_refusal() -> None:
    data = support_matrix(["naive", "flash_attn"])
    figure = draw_support_matrix(data)
    (ax,) = figure.axes
    assert len(ax.patches) == 2 * len(FEATURES)
    assert sum(text.get_text() == "×" for text in ax.texts) == len(FEATURES) - data.taken("flash_attn")
    assert [tick.get_text() for tick in ax.get_yticklabels()] == ["naive (CPU)", "flash_attn (GPU)"]
    plt.close(figure)
