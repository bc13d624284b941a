"""The choice of a tile by the clock, with a clock and a GPU that are made up."""

import importlib.util

import pytest
import torch

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="triton is not installed (Linux only)"
)

FAST, SLOW, TOO_LARGE = 1.0, 2.0, "out of resource: shared memory"


@pytest.fixture
def tuning(monkeypatch):
    from vllm_teach.kernels.triton_kernels import tuning

    monkeypatch.setattr(tuning, "INTERPRETED", False)
    monkeypatch.setattr(tuning, "_choices", {})
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A GPU")
    monkeypatch.delenv(tuning.SWITCH, raising=False)
    return tuning


@pytest.fixture
def measured(tuning, monkeypatch):
    """What each tile "takes", by its place among the candidates; and the workloads that were prepared."""
    figures, workloads = {}, []

    def milliseconds(run, tile):
        run(tile)
        tiles = tuning.candidates("forward", 64, torch.float16)
        return figures[tiles.index(tile)]

    monkeypatch.setattr(tuning, "milliseconds", milliseconds)

    def prepare(workload):
        workloads.append(workload)
        return lambda tile: None

    return figures, workloads, prepare


def problem(tokens=40, head_dim=64, **options):
    from vllm_teach.kernels.triton_kernels.problem import Options, Problem

    x = torch.zeros(tokens, 2, head_dim, dtype=torch.float16)
    return Problem(x, x, x, 1, tokens, tokens, Options(**options))


def test_the_fastest_that_fits_is_chosen_and_remembered(tuning, measured):
    figures, workloads, prepare = measured
    figures |= {0: SLOW, 1: FAST, 2: TOO_LARGE, 3: SLOW}
    tiles = tuning.candidates("forward", 64, torch.float16)
    for tokens in (40, 7):  # the length of a call decides nothing
        assert tuning.choose("forward", problem(tokens, right=0), prepare) == tiles[1]
    assert len(workloads) == 1
    assert workloads[0].q.shape == (8192, 16, 64)
    assert (workloads[0].options.left, workloads[0].options.right) == (-1, 0)
    (choice,) = tuning.choices()
    assert (choice.kernel, choice.gpu, choice.dtype, choice.causal) == ("forward", "A GPU", "torch.float16", True)
    assert list(choice.tried.values()) == [SLOW, FAST, TOO_LARGE, SLOW]
    assert choice.tile == tiles[1]


def test_each_case_is_chosen_for_itself(tuning, measured):
    figures, workloads, prepare = measured
    figures |= {0: FAST, 1: SLOW, 2: SLOW, 3: SLOW}
    tuning.choose("forward", problem(right=0), prepare)
    tuning.choose("forward", problem(left=100, right=0), prepare)  # a band, too
    assert len(workloads) == 1
    tuning.choose("forward", problem(), prepare)
    assert len(workloads) == 2
    assert workloads[1].options.right == -1


def test_the_default_stands_when_nothing_fits_or_tuning_is_off(tuning, measured, monkeypatch):
    figures, workloads, prepare = measured
    figures |= dict.fromkeys(range(4), TOO_LARGE)
    default = tuning.candidates("forward", 64, torch.float16)[0]
    assert tuning.choose("forward", problem(), prepare) == default
    monkeypatch.setenv(tuning.SWITCH, "0")
    figures |= dict.fromkeys(range(4), FAST)
    assert tuning.choose("forward", problem(right=0), prepare) == default
    assert len(workloads) == 1


def test_a_tile_that_does_not_fit_is_named_in_one_line(tuning, monkeypatch):
    import triton
    from triton.runtime.errors import OutOfResources, PTXASError

    def fail_with(error):
        def do_bench(*_, **__):
            raise error

        monkeypatch.setattr(triton.testing, "do_bench", do_bench)
        return tuning.milliseconds(lambda tile: None, tuning.Tile(256, 256))

    assert fail_with(OutOfResources(300_000, 232_448, "shared memory")).startswith("out of resource: shared memory")
    found = fail_with(PTXASError("Internal error\nptxas fatal : Insufficient registers\n.version 8.8\n..."))
    assert found == "ptxas fatal : Insufficient registers"
    with pytest.raises(ZeroDivisionError):
        fail_with(ZeroDivisionError())


def test_in_the_interpreter_there_is_one_tile_and_no_clock(tuning, measured, monkeypatch):
    monkeypatch.setattr(tuning, "INTERPRETED", True)
    _, workloads, prepare = measured
    assert tuning.candidates("forward", 64, torch.float16) == tuning.candidates("paged", 256, torch.float32)
    tile = tuning.choose("forward", problem(), prepare)
    assert tile.q != tile.k  # so that a mix-up of the two shows
    assert workloads == []
