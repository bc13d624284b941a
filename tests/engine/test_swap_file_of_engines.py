"""Two engines never share a swap file, and an engine that is no more, or never was, holds none."""

import pytest

from vllm_teach import SamplingParams
from vllm_teach.errors import InvalidArgumentError

PROMPTS = [[1] * 12, [2] * 12]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=28, ignore_eos=True)
# Ten blocks are what one of the two needs, so they swap in turn.
SMALL = {"blocks": 10, "host_blocks": 20, "max_model_len": 40, "watermark": 0, "preemption_mode": "swap"}


def test_the_second_engine_is_refused_and_the_first_goes_on(make_llm, tmp_path):
    expected = [output.outputs for output in make_llm().generate(PROMPTS, PARAMS, use_tqdm=False)]
    llm = make_llm(**SMALL, swap_file=tmp_path / "swap")
    names = [llm.engine.add_request(prompt, PARAMS) for prompt in PROMPTS]
    while not llm.engine.scheduler.swapped:
        llm.engine.step()
    with pytest.raises(InvalidArgumentError, match=r"^swap_file='.*' is in use by another engine"):
        make_llm(**SMALL, swap_file=str(tmp_path / "swap"))
    found = {}
    while llm.engine.has_unfinished_requests():
        found |= {output.request_id: output.outputs for output in llm.engine.step()}
    assert [found[name] for name in names] == expected
    assert llm.engine.kv.usage().swapped_in > 0
    del llm
    again = make_llm(**SMALL, swap_file=tmp_path / "swap").generate(PROMPTS, PARAMS, use_tqdm=False)
    assert [output.outputs for output in again] == expected


def test_a_refused_engine_holds_no_swap_file_though_its_error_is_kept(make_llm, tmp_path):
    """A notebook keeps the last error and with it all that the failed call had made."""
    with pytest.raises(InvalidArgumentError, match="max_model_len=60 does not fit") as caught:
        make_llm(**SMALL | {"max_model_len": 60}, swap_file=tmp_path / "swap")
    assert not list(tmp_path.iterdir())
    make_llm(**SMALL, swap_file=tmp_path / "swap")
    assert caught.value.__traceback__ is not None
