import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from vllm_teach.models.config import ModelConfig
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.context_cost import context_cost, draw_context_cost

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 4096,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "hidden_act": "silu",
}


@pytest.fixture(scope="module")
def config() -> ModelConfig:
    return ModelConfig.from_hf(LLAMA)


def test_flops_counted_by_hand(config) -> None:
    data = context_cost(config, [8, 64], window=4)
    # a layer: q and o 16 x 16, k and v 16 x 8, three matrices 16 x 24; three layers, and the output matrix
    weights = 3 * (2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24) + 100 * 16
    assert data.rest == 2 * weights
    per_pair = 3 * 4 * 4 * 4  # layers, heads, head_dim, two multiply-adds
    assert data.attention["causal"] == pytest.approx([per_pair * (8 + 1) / 2, per_pair * (64 + 1) / 2])
    # the first queries see 1, 2 and 3 keys, all others 4
    assert data.attention["local_window"] == pytest.approx([per_pair * (6 + 4 * 5) / 8, per_pair * (6 + 4 * 61) / 64])


def test_share_and_crossing(config) -> None:
    data = context_cost(config, [64, 4096], window=4)
    cost = data.attention["causal"][0]
    assert data.share("causal", 64) == pytest.approx(cost / (cost + data.rest))
    at_crossing = context_cost(config, [64, round(data.crossing)], window=4)
    assert at_crossing.share("causal", round(data.crossing)) == pytest.approx(0.5, abs=0.01)


def test_the_lines_are_the_data(config) -> None:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        data = context_cost(config, [64, 128, 256], window=16)
        _, axes = plt.subplots()
        draw_context_cost(axes, data, window=16)
        lines = {line.get_label(): line for line in axes.lines}
        assert tuple(lines["attention, full causal"].get_ydata()) == data.attention["causal"]
        assert tuple(lines["attention, a window of 16"].get_ydata()) == data.attention["local_window"]
        assert set(lines["linear layers and logits"].get_ydata()) == {data.rest}
        plt.close("all")
