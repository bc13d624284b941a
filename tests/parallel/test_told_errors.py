from vllm_teach.errors import EngineDeadError, ModelLoadError
from vllm_teach.parallel.told_errors import tell_error, told_error


def test_one_of_ours_comes_back_as_itself_and_another_as_a_dead_engine() -> None:
    ours = told_error("rank 2", tell_error(ModelLoadError("two\nlines «é»")))
    assert (type(ours), str(ours)) == (ModelLoadError, "rank 2: two\nlines «é»")
    other = told_error("rank 2", tell_error(ZeroDivisionError("by nothing")))
    assert (type(other), str(other)) == (
        EngineDeadError,
        "rank 2: it could not start (ZeroDivisionError('by nothing')).",
    )
    assert "\n" not in tell_error(ModelLoadError("two\nlines"))
