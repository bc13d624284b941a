import pytest
from matplotlib import pyplot as plt

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.teaching.figures.busy_workers import CHOSEN, FIXED, ONE, busy_workers, draw_busy_workers

BATCHES = (1, 2, 4, 8, 16, 32, 64)


def test_the_lessons_numbers() -> None:
    data = busy_workers(BATCHES, kv_len=8192, kv_heads=8, workers=216, part=512)
    assert data.splits[CHOSEN] == (22, 13, 6, 3, 3, 1, 1)  # FlashAttention 2's rule
    assert set(data.splits[FIXED]) == {16}
    assert set(data.splits[ONE]) == {1}
    assert data.at(ONE, 1) == pytest.approx(8 / 216)
    assert data.at(FIXED, 1) == pytest.approx(8 * 16 / 216)
    assert data.at(CHOSEN, 1) == pytest.approx(8 * 22 / 216)
    assert data.at(ONE, 32) == pytest.approx(256 / 432)  # the second wave has 40 pieces
    assert [data.keeps_its_order(rule) for rule in (CHOSEN, FIXED, ONE)] == [False, True, True]


def test_shares_are_shares() -> None:
    data = busy_workers(BATCHES, kv_len=1000, kv_heads=2, workers=7, part=128)
    assert all(0 < share <= 1 for shares in data.share.values() for share in shares)


def test_a_line_per_rule() -> None:
    data = busy_workers(BATCHES, kv_len=8192, kv_heads=8, workers=216, part=512)
    figure, ax = plt.subplots()
    draw_busy_workers(ax, data)
    drawn = {line.get_label(): tuple(line.get_ydata()) for line in ax.lines}
    assert drawn == data.share
    plt.close(figure)


@pytest.mark.parametrize("name", ["kv_len", "kv_heads", "workers", "part"])
def test_sizes_below_one(name: str) -> None:
    sizes = {"kv_len": 8, "kv_heads": 1, "workers": 2, "part": 4, name: 0}
    with pytest.raises(InvalidArgumentError, match=f"{name}=0"):
        busy_workers((1,), **sizes)
