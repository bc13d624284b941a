import math

import numpy as np
import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import InvalidArgumentError


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.min_tokens, params.seed, params.logprobs) == (16, 0, None, None)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert params.skip_special_tokens
    assert not params.ignore_eos
    assert not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1, -1e-9, 1.1e38, math.nan, math.inf, "hot", None, True)),
        *(("top_p", value) for value in (0, 0.0, -0.1, 1.0001, math.nan, "0.5", False)),
        *(("top_k", value) for value in (-2, 1.5, True, "3", None)),
        *(("min_p", value) for value in (-0.1, 1.1, math.nan, None)),
        *(("n", value) for value in (0, -1, 1.0, True, 16_385, 10**9)),
        *(("max_tokens", value) for value in (0, -5, 2.5, "9", True)),
        *(("min_tokens", value) for value in (-1, 17, None, 1.0)),
        *(("seed", value) for value in (1.5, "x", True, 2**64, -(2**63) - 1)),
        *(("stop", value) for value in ("", ["a", ""], [1], 5)),
        *(("stop_token_ids", value) for value in ([-1], ["a"], [True], 7)),
        *((name, value) for name in ("logprobs", "prompt_logprobs") for value in (-2, 1.5, True)),
        *(("logit_bias", {5: value}) for value in (-101, 100.1, math.nan, math.inf, "much", None, True)),
        *(("logit_bias", value) for value in ([5], 5, {"5": 1}, {-1: 1}, {1.0: 1}, {True: 1})),
        *(("presence_penalty", value) for value in (-2.1, 2.1, math.nan)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1, "1")),
        *(("repetition_penalty", value) for value in (0, -1, 5e-324, 9e-11, 1.1e10, math.inf)),
        *((name, 1) for name in ("ignore_eos", "detokenize", "skip_special_tokens", "include_stop_str_in_output")),
    ],
)
def test_a_bad_value_is_named_in_one_sentence(name, value):
    with pytest.raises(InvalidArgumentError) as caught:
        SamplingParams(**{name: value})
    message = str(caught.value)
    assert message.startswith(f"{name}={value!r} is not valid: ")
    assert message.endswith(".")
    assert message.count(". ") == 0


@pytest.mark.parametrize("name", ["bad_words", "best_of", "allowed_token_ids"])
def test_what_is_not_implemented_is_not_accepted(name):
    with pytest.raises(TypeError, match=name):
        SamplingParams(**{name: 1})


def test_accepted_edges():
    SamplingParams(temperature=0, top_p=1e-9, top_k=-1, min_p=1, max_tokens=None, min_tokens=40, seed=-7, logprobs=-1)
    assert SamplingParams(temperature=np.float64(0.5), max_tokens=np.int64(3)).max_tokens == 3
    assert SamplingParams(seed=-1).seed is None
    assert SamplingParams(stop="x").stop == ["x"]
    assert SamplingParams(logit_bias={np.int64(3): -100, 4: 100}).logit_bias == {3: -100.0, 4: 100.0}
    assert SamplingParams(logit_bias={}).logit_bias is None


def test_below_1e_5_is_greedy():
    assert SamplingParams(temperature=9e-6).greedy
    assert not SamplingParams(temperature=1e-5).greedy
    with pytest.raises(InvalidArgumentError, match="n=2"):
        SamplingParams(temperature=0, n=2)


def test_stop_strings_need_text():
    with pytest.raises(InvalidArgumentError, match="detokenize"):
        SamplingParams(stop="a", detokenize=False)


def test_a_copy_is_apart_and_checked_again():
    params = SamplingParams(stop=["a"], logit_bias={1: 2})
    copy = params.copy()
    params.stop.append("b")
    params.logit_bias[1] = 3
    assert (copy.stop, copy.logit_bias) == (["a"], {1: 2})
    params.temperature = -1
    with pytest.raises(InvalidArgumentError, match="temperature"):
        params.copy()


@pytest.mark.parametrize(
    "name", ["temperature", "top_p", "min_p", "presence_penalty", "repetition_penalty", "n", "seed"]
)
@pytest.mark.parametrize("value", [10**400, 10**5000], ids=["10**400", "10**5000"])
def test_numbers_beyond_float64_and_beyond_printing(name, value):
    with pytest.raises(InvalidArgumentError, match=f"^{name}=.* is not valid: ") as caught:
        SamplingParams(**{name: value})
    assert len(str(caught.value)) < 250


def test_a_long_value_is_cut_in_the_message():
    with pytest.raises(InvalidArgumentError, match=r"^stop=\['xxx.*\.\.\..*\] is not valid") as caught:
        SamplingParams(stop=["x" * 10**6, ""])
    assert len(str(caught.value)) < 250
