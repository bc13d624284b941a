"""Every combination of any three settings, on the small offline model: the same tokens as transformers, or a near tie.

The full-sized check on the real model is a command: `python -m vllm_teach.validation.equivalence`.
"""

from collections.abc import Callable

import pytest
import torch

from vllm_teach import data
from vllm_teach.models import load_model, load_tokenizer, resolve_model
from vllm_teach.validation.equivalence.check import Checker
from vllm_teach.validation.equivalence.configurations import list_configurations
from vllm_teach.validation.equivalence.reference import Reference
from vllm_teach.validation.equivalence.workload import draw_greedy, draw_sampled

PATH = resolve_model("tiny")


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> None:
    """The reference's answers are computed here, not found."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_TEACH_HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.fixture(scope="module")
def text_ids() -> list[int]:
    return load_tokenizer(PATH).encode(data.path("texts/corran_sound.txt").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def make_checker(text_ids: list[int]) -> Callable[..., Checker]:
    def make(count: int = 16, inputs: int = 70, outputs: int = 20, sampled: int = 2, **options) -> Checker:
        dtype = torch.bfloat16 if "rival" in options else torch.float32
        return Checker(
            load_model(PATH, dtype),
            load_tokenizer(PATH),
            Reference(PATH),
            draw_greedy(text_ids, count, inputs, outputs),
            draw_sampled(text_ids, sampled, 66, outputs),
            **{"least_preemptions": 1, **options},
        )

    return make


@pytest.fixture(scope="module")
def checker(make_checker: Callable[..., Checker]) -> Checker:
    checker = make_checker()
    assert checker.prepare() == []  # sampled tokens are what transformers' logits give with the same random numbers
    return checker


@pytest.mark.parametrize("part", range(4))
def test_tokens_do_not_depend_on_the_settings(checker: Checker, part: int) -> None:
    configurations = list_configurations(strength=3)
    for configuration in configurations[part::4]:
        outcome = checker.check(configuration)
        print(*outcome.differences, sep="\n")
        assert all(each.excused for each in outcome.differences), configuration
        assert outcome.faults == [], configuration
