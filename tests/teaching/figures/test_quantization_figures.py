"""The data behind lesson 09's figures, and that they can be drawn."""

import math

import matplotlib.pyplot as plt
import pytest
import torch

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.models.load import load_config, load_model
from vllm_teach.models.resolve import resolve_model
from vllm_teach.teaching import style
from vllm_teach.teaching.figures import (
    bits_and_error,
    error_map,
    quality_and_size,
    rounding_line,
    rounding_plane,
    weight_bytes,
)


@pytest.fixture(autouse=True)
def _close():
    yield
    plt.close("all")


def test_rounding_line_of_four_weights():
    data = rounding_line.rounding_line(torch.tensor([-0.9, -0.2, 0.1, 0.6]), 2)
    assert (data.scale, data.zero, data.points_used) == (0.5, 2, 3)
    assert data.grid.tolist() == [-1.0, -0.5, 0.0, 0.5]
    assert data.rounded.tolist() == [-1.0, 0.0, 0.0, 0.5]
    assert data.error == pytest.approx(math.sqrt((0.01 + 0.04 + 0.01 + 0.01) / (0.81 + 0.04 + 0.01 + 0.36)))
    assert "4 points, 3 of them used" in rounding_line.describe_rounding(data)
    figure = rounding_line.draw_rounding_line(data)
    assert any("2 bits" in figure.axes[0].get_title(loc=side) for side in ("left", "center"))


def test_more_bits_err_less():
    weights = torch.randn(64, generator=torch.Generator().manual_seed(0))
    errors = [rounding_line.rounding_line(weights, bits).error for bits in (2, 3, 4, 8)]
    assert errors == sorted(errors, reverse=True)


def test_rounding_plane_mends():
    hessian = torch.tensor([[2.0, 1.8], [1.8, 2.0]], dtype=torch.float64)
    data = rounding_plane.rounding_plane((0.45, 0.40), hessian)
    assert data.chosen == {"rtn": (0, 0), "gptq": (0, 1), "best": (1, 0)}
    assert data.mended == pytest.approx(0.805)
    d = torch.tensor([-0.45, 0.6], dtype=torch.float64)
    assert data.errors["gptq"] == pytest.approx(float(d @ hessian @ d) / 2)
    assert data.errors["best"] <= data.errors["gptq"] < data.errors["rtn"]
    assert rounding_plane.draw_rounding_plane(data).axes


def test_without_correlation_nothing_is_mended():
    data = rounding_plane.rounding_plane((0.45, 0.40), torch.eye(2, dtype=torch.float64))
    assert data.mended == 0.40
    assert data.chosen["gptq"] == data.chosen["rtn"] == data.chosen["best"]


def test_a_plane_needs_a_positive_definite_hessian():
    with pytest.raises(InvalidArgumentError, match="positive definite"):
        rounding_plane.rounding_plane((0.1, 0.2), torch.ones(2, 2, dtype=torch.float64))


def test_error_map_counts_each_input_for_itself():
    weight, inputs = torch.zeros(4, 100), torch.ones(10, 100)
    inputs[:, 7] = 30.0
    rounded = weight + 0.5
    better = rounded.clone()
    better[:, 7] = 0.0
    data = error_map.error_map(weight, {"rtn": rounded, "awq": better}, inputs)
    assert data.sizes[7] == 30
    assert data.share_of_largest("rtn") == pytest.approx(900 / 999)
    assert data.share_of_largest("awq") == 0
    assert data.column("rtn").tolist() == [0.5] * 100
    figure = error_map.draw_error_map(data, columns=20, rows=4)
    assert len(figure.axes) == 4


def test_error_map_refuses_what_does_not_fit():
    weight = torch.zeros(4, 8)
    with pytest.raises(InvalidArgumentError, match="use the names"):
        error_map.error_map(weight, {"other": weight}, torch.ones(2, 8))
    with pytest.raises(InvalidArgumentError, match="last size must be 8"):
        error_map.error_map(weight, {"rtn": weight}, torch.ones(2, 9))


def test_bits_a_weight_counts_scale_and_zero():
    assert bits_and_error.bits_a_weight(4, 64) == 4 + 20 / 64
    assert bits_and_error.bits_a_weight(3, 16) == 3 + 19 / 16


def test_bits_and_error_lines():
    data = bits_and_error.bits_and_error({"gptq": [(4, 0.1), (2, 0.9)], "groups of 64": [(4.3, 0.2)]})
    assert data.lines["gptq"] == ((2, 0.9), (4, 0.1))
    assert data.error("gptq", 4) == 0.1
    _, ax = plt.subplots()
    bits_and_error.draw_bits_and_error(ax, data, "bits")
    assert ax.lines[0].get_color() == style.colour("gptq")
    assert list(ax.lines[0].get_ydata()) == [90.0, 10.0]
    assert ax.get_yscale() == "log"
    with pytest.raises(InvalidArgumentError, match="above 0"):
        bits_and_error.bits_and_error({"rtn": [(4, 0.0)]})


def test_step_bytes_agree_with_the_model():
    model = load_model(resolve_model("tiny"), torch.bfloat16)
    data = weight_bytes.step_bytes(model.config, context=100)
    norms = sum(each.nbytes for name, each in model.named_parameters() if "norm" in name)
    bf16 = data.reads["bfloat16"]
    assert bf16["linear layers"] + bf16["embedding, read as head"] + norms == model.num_bytes()
    assert bf16["keys and values"] == 100 * 2 * 4 * 2 * 64 * 2
    assert data.total("float32") == 2 * data.total("bfloat16")
    assert data.reads["int4"]["linear layers"] == bf16["linear layers"] * (4 + 20 / 64) / 16
    assert len(weight_bytes.draw_step_bytes(data).axes[0].patches) == 3 * len(data.reads)
    with pytest.raises(InvalidArgumentError, match="context=-1"):
        weight_bytes.step_bytes(load_config(resolve_model("tiny")), -1)


def test_quality_and_size_names_do_not_cover_each_other():
    points = {"bf16": (200, 10.0), "rtn4": (80, 10.05), "gptq4": (80, 10.04), "awq4": (80, 10.03), "rtn3": (80, 20.0)}
    data = quality_and_size.QualityAndSize({name: (2**20 * size, p) for name, (size, p) in points.items()}, "bf16")
    assert data.share("awq4") == 0.4
    figure, ax = plt.subplots()
    quality_and_size.draw_quality_and_size(ax, data)
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in ax.texts]
    assert not any(a.overlaps(b) for i, a in enumerate(boxes) for b in boxes[:i])


def test_loss_by_measure():
    losses = {"rtn, one": {"perplexity": 4.0, "nats": 1.0}, "rtn, two": {"perplexity": 2.0, "nats": -0.5}}
    data = quality_and_size.loss_by_measure(losses)
    assert data.spread("rtn, one") == 4
    assert data.spread("rtn, two") == 1
    _, ax = plt.subplots()
    quality_and_size.draw_loss_by_measure(ax, data, (2, 3))
    widths = [patch.get_width() for patch in ax.patches]
    assert all(any(width == each for width in widths) for row in losses.values() for each in row.values())
    with pytest.raises(InvalidArgumentError, match="same"):
        quality_and_size.loss_by_measure({"a": {"x": 1.0}, "b": {"y": 1.0}})
