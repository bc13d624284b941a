import matplotlib.pyplot as plt
import pytest

from vllm_teach.teaching.figures.fork_steps import STORY, draw_fork_step, fork_steps


@pytest.fixture(scope="module")
def steps():
    return fork_steps()


def test_a_step_for_each_event_and_one_copy_in_all(steps) -> None:
    assert len(steps) == len(STORY)
    assert [step.copied for step in steps] == [0, 0, 1, 0, 0, 0, 0, 0, 0, 0]
    assert steps[2].view.copies == ((1, 2),)


def test_references_are_counted_from_the_tables(steps) -> None:
    for step in steps:
        listed = [each.physical for each in step.view.logical]
        assert list(step.view.references) == [listed.count(block) for block in range(len(step.view.references))]


def test_captions_say_what_happened(steps) -> None:
    for step, (verb, name, *other) in zip(steps, STORY, strict=True):
        assert step.caption.startswith(other[0] if verb == "fork" else name)
        assert ("copied first" in step.caption) == bool(step.copied)
        assert len(step.caption) <= 46, "a longer one does not fit the figure"
    assert "a new block" in steps[7].caption
    assert "its own block" in steps[3].caption


def test_a_step_keeps_its_picture_when_the_cache_goes_on(steps) -> None:
    assert [each.physical for each in steps[1].view.logical] == [0, 1, 0, 1]
    assert {each.sequence for each in steps[-1].view.logical} == {"B", "C"}


def test_the_title_has_the_number(steps) -> None:
    figure = draw_fork_step(steps, 2)
    assert figure.axes[0].texts[0].get_text() == "2. A writes token 6: shared, so copied first"
    plt.close(figure)
