import pytest

from vllm_teach.errors import InvalidArgumentError, ModelNotFoundError
from vllm_teach.validation.audit.lab import Lab


def test_what_was_measured_is_not_measured_again() -> None:
    lab, calls = Lab(), []

    def measure(lab: Lab) -> int:
        calls.append(lab)
        return len(calls)

    assert (lab.once(measure), lab.once(measure)) == (1, 1)
    assert Lab().once(measure) == 2


def test_what_failed_fails_again_without_another_try() -> None:
    lab, calls = Lab(), []

    def measure(lab: Lab) -> int:
        calls.append(lab)
        raise ModelNotFoundError("model 'x' is not here.")

    for _ in range(2):
        with pytest.raises(ModelNotFoundError):
            lab.once(measure)
    assert len(calls) == 1


def test_what_is_no_typed_error_is_a_bug_and_comes_out() -> None:
    def measure(lab: Lab) -> int:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        Lab().once(measure)


def test_no_experiment_times_page_faults_because_no_engine_ran_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr("vllm_teach.validation.audit.lab.keep_large_blocks", lambda: told.append(True))
    Lab()
    assert told == [True]


def test_quick_picks_the_second() -> None:
    assert (Lab().pick(10, 1), Lab(quick=True).pick(10, 1)) == (10, 1)


def test_an_unknown_device_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="device='tpu'"):
        Lab("tpu")


def test_a_processor_is_no_a100() -> None:
    assert not Lab().is_a100
    assert not Lab().on_gpu


def test_one_thread_lasts_as_long_as_the_block_also_when_it_fails() -> None:
    import torch

    def failing() -> None:
        with Lab().one_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError):
            failing()
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
