import matplotlib.pyplot as plt

from vllm_teach.teaching.figures.resident_threads import draw_resident_threads, residency_stairs


def test_stairs_go_down_in_steps_of_eight_registers() -> None:
    data = residency_stairs({"plain": (36, 1024)})
    stairs = dict(data.stairs)
    assert stairs[16] == stairs[32] == 2048
    assert stairs[33] == stairs[40] == 1536
    assert stairs[41] == stairs[48] == 1280
    counts = [threads for _, threads in data.stairs]
    assert counts == sorted(counts, reverse=True)
    assert data.kernels["plain"][1].threads == 1536


def test_what_is_drawn() -> None:
    _, ax = plt.subplots()
    data = residency_stairs({"plain": (36, 1024), "fused": (32, 4160)})
    draw_resident_threads(ax, data, {"plain": "naive", "fused": "tiled"})
    points = {
        line.get_label(): (line.get_xdata()[0], line.get_ydata()[0]) for line in ax.lines if len(line.get_xdata()) == 1
    }
    assert points == {"plain: 36": (36, 1536), "fused: 32": (32, 2048)}
