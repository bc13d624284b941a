"""What holds for every check: stubs are unsolved, hints do not give nothing, and the text is plain."""

import pytest

from vllm_teach.teaching import check, list_checks

LESSONS = (
    "00_start_here",
    "01_naive_attention",
    "02_online_softmax_and_tiling",
    "03_recomputation_and_training",
    "04_attention_patterns",
    "05_choosing_a_backend",
    "06_paged_kv_cache",
    "07_sharing_copy_on_write_prefix",
    "08_scheduling",
    "09_quantization",
    "10_custom_kernels",
    "11_serving_and_monitoring",
    "12_roofline_and_simulation",
    "13_reference_tables_audited",
)


def stub(*_):
    raise NotImplementedError


def test_every_lesson_has_at_least_two():
    by_lesson = [one.lesson for one in list_checks()]
    assert set(by_lesson) == set(LESSONS)
    assert min(by_lesson.count(lesson) for lesson in LESSONS) >= 2


@pytest.mark.parametrize("one", list_checks(), ids=lambda one: one.name)
def test_stub_and_texts(one, capsys):
    assert getattr(check, one.name) is one
    assert one(stub).status == "unsolved"
    assert one(lambda *_: None).status == "unsolved"
    assert capsys.readouterr().out.startswith(f"Not solved yet: {one.task}")
    assert len(one.cases()) >= 4
    assert len({case.label for case in one.cases()}) == len(one.cases()), "two cases with one label"
    assert len(one.hints) >= 2
    for text in (one.task, one.lesson_learnt, *one.hints, *(case.rule for case in one.cases())):
        assert text.endswith((".", "?")), text


@pytest.mark.parametrize("one", list_checks(), ids=lambda one: one.name)
@pytest.mark.parametrize("value", [0, 1.0, "text", [], (), object()], ids=repr)
def test_a_constant_never_passes(one, value):
    assert not one(lambda *_: value).solved
