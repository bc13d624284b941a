import pytest
from matplotlib import pyplot as plt
from matplotlib.colors import to_hex

from vllm_teach.backends import select_backend
from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching import style
from vllm_teach.teaching.figures.choice_plane import MACHINES, choice_plane, draw_choice_plane

BATCHES, LENGTHS = (1, 4, 16), (128, 512, 2048)


def test_each_point_is_the_rules_choice() -> None:
    data = choice_plane(batches=BATCHES, lengths=LENGTHS)
    assert len(data.selections) == len(MACHINES) * 9
    for machine in MACHINES:
        spec = machine.spec(4, 512)
        expected = select_backend(spec, hardware=machine.hardware)
        assert data.at(machine.name, 4, 512).choice == expected.choice
        assert (spec.batch, spec.q_len, spec.kv_len) == (4, 512, 512)


def test_the_stair_of_the_lesson() -> None:
    data = choice_plane(batches=(8, 16), lengths=(256,))
    t4, a100, cpu = (machine.name for machine in MACHINES)
    assert [data.at(a100, batch, 256).choice for batch in (8, 16)] == ["sdpa", "flash_attn"]
    assert [data.at(cpu, batch, 256).choice for batch in (8, 16)] == ["sdpa", "cpu"]
    assert {data.at(t4, batch, 256).choice for batch in (8, 16)} == {"sdpa"}
    assert data.describe(16, 256).startswith("batch 16, 256 tokens, 1,048,576 scores a head: T4, float16: sdpa; A100")


def test_the_colour_of_a_cell_is_the_choice_and_the_frame_is_the_call() -> None:
    data = choice_plane(MACHINES[1:2], BATCHES, LENGTHS)
    figure = draw_choice_plane(data, 16, 512)
    (ax,) = figure.axes
    cells, frames = ax.patches[:9], ax.patches[9:]
    for cell in cells:
        column, row = (round(value) for value in cell.get_xy())
        choice = data.at(MACHINES[1].name, BATCHES[column], LENGTHS[row]).choice
        assert to_hex(cell.get_facecolor()).upper() == style.colour(choice)
    assert {frame.get_xy() for frame in frames} == {(2, 1)}
    assert (ax.get_title(loc="left") or ax.get_title()).endswith("flash_attn")
    plt.close(figure)


def test_a_point_off_the_plane_is_an_error() -> None:
    with pytest.raises(InvalidArgumentError, match="batch=3"):
        choice_plane(batches=BATCHES, lengths=LENGTHS).at(MACHINES[0].name, 3, 512)
