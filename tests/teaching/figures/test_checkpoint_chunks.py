from collections.abc import Iterator

import matplotlib as mpl
import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.checkpoint_chunks import ChunkModel, draw_checkpoint_chunks, fit_chunk_model


@pytest.fixture(autouse=True)
def lessons_look() -> Iterator[None]:
    with mpl.rc_context({"backend": "agg"}):
        style.apply()
        yield
    plt.close("all")


def test_the_fit_finds_the_costs_again() -> None:
    truth = ChunkModel(layers=12, boundary=30.0, inside=400.0)
    fitted = fit_chunk_model(12, {chunk: truth.peak(chunk) for chunk in (1, 3, 12)})
    assert fitted.boundary == pytest.approx(30)
    assert fitted.inside == pytest.approx(400)


def test_equal_costs_give_chens_root_and_a_large_inside_gives_one() -> None:
    assert ChunkModel(64, 1.0, 1.0).best == pytest.approx(8)
    assert ChunkModel(64, 1.0, 100.0).best == 1
    model = ChunkModel(24, 7.0, 3.0)
    chunks = [1 + step / 100 for step in range(2300)]
    assert min(chunks, key=model.peak) == pytest.approx(model.best, abs=0.02)


@pytest.mark.parametrize(("layers", "peaks"), [(8, {1: 5.0}), (8, {2: 5.0, 8: 9.0}), (1, {1: 5.0})])
def test_a_fit_needs_both_ends(layers: int, peaks: dict[int, float]) -> None:
    with pytest.raises(InvalidArgumentError, match="the fit needs 1 and"):
        fit_chunk_model(layers, peaks)


def test_markers_are_measured_and_lines_are_modelled() -> None:
    _, axes = plt.subplots()
    peaks = {"naive": {1: 20.0, 2: 30.0, 4: 60.0}, "tiled": {1: 10.0, 2: 14.0, 4: 22.0}}
    models = draw_checkpoint_chunks(axes, 4, peaks, {"naive": 60.0, "tiled": 22.0})
    marked = {line.get_label(): list(line.get_ydata()) for line in axes.lines if line.get_marker() == "o"}
    assert marked == {f"{name} attention inside": list(values.values()) for name, values in peaks.items()}
    curve = next(line for line in axes.lines if len(line.get_xdata()) > 10)
    assert curve.get_ydata()[0] == pytest.approx(models["naive"].peak(1)) == pytest.approx(20)
    assert curve.get_ydata()[-1] == pytest.approx(60)
