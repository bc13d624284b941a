"""Errors cross from one process, task or thread into another: message and kind arrive, nothing else has to."""

import pickle
import threading

import pytest

from vllm_teach import errors
from vllm_teach.errors import EngineDeadError, EngineError, PromptTooLongError
from vllm_teach.serving.async_engine.messages import EngineFailed, EngineUpdate, RequestDelta
from vllm_teach.serving.async_engine.portable_errors import death, make_portable, portable, renewed


class _ErrorOfAModel(EngineError):
    """Neither pickled (it holds a lock) nor copied (its arguments are not its message) as it is."""

    def __init__(self, layer: int, lock: object) -> None:
        super().__init__(f"layer {layer} is broken: load the model again.")
        self.lock = lock


KINDS = [each for each in vars(errors).values() if isinstance(each, type) and issubclass(each, errors.VllmTeachError)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_typed_error_arrives_as_it_left(kind):
    error = kind("model='x' is not valid: use another one.")
    error.add_note("where it was")
    found = pickle.loads(pickle.dumps(portable(error)))
    assert type(found) is kind
    assert (str(found), found.__notes__) == (str(error), ["where it was"])


def test_an_error_that_cannot_be_pickled_arrives_as_its_nearest_kind():
    error = _ErrorOfAModel(3, threading.Lock())
    with pytest.raises(TypeError):
        pickle.dumps(error)
    found = pickle.loads(pickle.dumps(portable(error)))
    assert (type(found), str(found)) == (EngineError, str(error))


def test_messages_become_portable_and_keep_the_rest():
    error = _ErrorOfAModel(3, threading.Lock())
    good, bad = RequestDelta("a"), RequestDelta("b", finished=True, error=error, num_prompt_tokens=7)
    update = pickle.loads(pickle.dumps(make_portable(EngineUpdate((good, bad)))))
    assert update.deltas[0] == good
    assert (update.deltas[1].num_prompt_tokens, str(update.deltas[1].error)) == (7, str(error))
    assert type(pickle.loads(pickle.dumps(make_portable(EngineFailed(error)))).error) is EngineError
    untouched = EngineUpdate((good,))
    assert make_portable(untouched) is untouched


def test_a_renewed_error_has_no_traceback_and_leaves_the_first_one_its_own():
    try:
        raise PromptTooLongError("too long") from KeyError("why")
    except PromptTooLongError as error:
        first = error
    found = renewed(first)
    assert found is not first
    assert (type(found), str(found), found.__traceback__) == (PromptTooLongError, "too long", None)
    assert found.__cause__ is first.__cause__
    assert first.__traceback__ is not None


def test_an_error_that_cannot_be_copied_is_renewed_as_its_nearest_kind():
    found = renewed(_ErrorOfAModel(3, threading.Lock()))
    assert (type(found), str(found)) == (EngineError, "layer 3 is broken: load the model again.")


@pytest.mark.parametrize("cause", [RuntimeError("x"), SystemExit(3), EngineError("y: z."), MemoryError()])
def test_a_death_names_its_cause_and_keeps_no_frames(cause):
    try:
        raise cause
    except BaseException as error:  # noqa: BLE001 - the test's own
        found = death("the engine's loop failed", error)
    assert type(found) is EngineDeadError
    assert str(cause) in str(found) or type(cause).__name__ in str(found)
    assert found.__traceback__ is None


def test_a_death_is_not_wrapped_again():
    error = EngineDeadError("rank 1 died: restart.")
    assert death("the engine's loop failed", error) is error
