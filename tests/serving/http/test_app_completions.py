"""`/v1/completions`: the form of answers and streams, by a scripted engine, and the texts, by the real one."""

import json

import httpx
import pytest

from vllm_teach import SamplingParams

URL = "/v1/completions"


def test_an_answer_has_openais_form(scripted, says):
    ask, engine = scripted([{}, says("ab"), {**says("c", finish="stop", stop_reason=7), "num_cached_tokens": 2}])
    answer = ask("POST", URL, {"model": "scripted", "prompt": "Once", "seed": 3}).json()
    assert answer.pop("id").startswith("cmpl-")
    assert answer.pop("created") > 1_700_000_000
    assert answer.pop("system_fingerprint").startswith("vllm_teach-")
    assert answer == {
        "object": "text_completion",
        "model": "scripted",
        "choices": [{"index": 0, "text": "abc", "logprobs": None, "finish_reason": "stop", "stop_reason": 7}],
        "usage": {
            "prompt_tokens": 4,
            "completion_tokens": 3,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }
    assert engine.streams[0].closed.is_set()


def test_fields_become_sampling_parameters(scripted, says, ranked):
    ask, engine = scripted([says("a", finish="stop", logprobs=(ranked(("a", -1.0, 1)),))])
    body = {
        "prompt": [5, 6], "max_tokens": 3, "temperature": 0.5, "top_p": 0.25, "top_k": 4, "min_p": 0.125, "seed": -7,
        "presence_penalty": 1, "frequency_penalty": -1.5, "repetition_penalty": 1.25,
        "logit_bias": {"65": 3, "7": -100},
        "stop": ["x", "yz"], "stop_token_ids": [9], "ignore_eos": True, "min_tokens": 2, "n": 1, "logprobs": 0,
        "include_stop_str_in_output": True, "skip_special_tokens": False, "priority": -3, "cache_salt": "salt",
    }  # fmt: skip
    assert ask("POST", URL, body).status == 200
    [(prompt, params, request_id, priority)] = engine.submitted
    assert prompt == {"prompt_token_ids": [5, 6], "prompt": None, "cache_salt": "salt"}
    assert params == SamplingParams(
        max_tokens=3, temperature=0.5, top_p=0.25, top_k=4, min_p=0.125, seed=-7, presence_penalty=1.0,
        frequency_penalty=-1.5, repetition_penalty=1.25, logit_bias={65: 3.0, 7: -100.0}, stop=["x", "yz"],
        stop_token_ids=[9], ignore_eos=True, min_tokens=2, logprobs=0, include_stop_str_in_output=True,
        skip_special_tokens=False,
    )  # fmt: skip
    assert (priority, request_id.startswith("cmpl-")) == (-3, True)


@pytest.mark.parametrize(("settings", "asked", "given"), [({}, None, 16), ({}, 5, 5), ({"max_output_tokens": 4}, 5, 4)])
def test_max_tokens_has_a_default_and_a_limit(scripted, says, settings, asked, given):
    ask, engine = scripted([says("a", finish="stop")], **settings)
    ask("POST", URL, {"prompt": "Once", "max_tokens": asked})
    assert engine.submitted[0][1].max_tokens == given


@pytest.mark.parametrize(
    ("prompt", "read"),
    [
        ("AB", [[65, 66]]),
        (["A", "B"], [[65], [66]]),
        ([65, 66], [[65, 66]]),
        ([[65], [66, 67]], [[65], [66, 67]]),
    ],
)
def test_each_form_of_a_prompt(scripted, says, prompt, read):
    scripts = [[says(f"{number}x", finish="stop")] for number in range(len(read))]
    ask, engine = scripted(*scripts)
    answer = ask("POST", URL, {"prompt": prompt}).json()
    assert [prompt["prompt_token_ids"] for prompt, *_ in engine.submitted] == read
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (number, f"{number}x") for number in range(len(read))
    ]
    assert answer["usage"]["prompt_tokens"] == sum(map(len, read))
    assert len({request_id for *_, request_id, _ in engine.submitted}) == len(read)


def test_a_prompt_that_is_refused_among_several_leaves_none_queued(scripted, says, hold):
    from vllm_teach.errors import QueueFullError

    ask, engine = scripted([hold], QueueFullError("256 wait already: come later."))
    assert ask("POST", URL, {"prompt": ["A", "B"]}).status == 429
    assert [stream.closed.is_set() for stream in engine.streams] == [True]


def test_one_failing_prompt_ends_its_siblings(scripted, says, hold):
    from vllm_teach.errors import EngineError

    ask, engine = scripted([says("a"), hold], [says("b"), EngineError("it failed: again.")], [hold])
    assert ask("POST", URL, {"prompt": ["A", "B", "C"]}).status == 500
    assert all(stream.closed.is_set() for stream in engine.streams)


def test_a_stream_has_an_event_for_each_piece_and_ends_in_done(scripted, says):
    ask, _ = scripted([{}, says("a"), says("bc"), says("", finish="length")])
    answer = ask("POST", URL, {"prompt": "Once", "stream": True})
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-cache"
    assert answer.headers["x-accel-buffering"] == "no"
    assert "content-length" not in answer.headers
    *events, done = answer.events()
    assert done == "[DONE]"
    assert len({event["id"] for event in events}) == 1
    assert [event["choices"] for event in events] == [
        [{"index": 0, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": None}]
        for text, reason in (("a", None), ("bc", None), ("", "length"))
    ]
    assert all("usage" not in event for event in events)


def test_a_step_without_text_is_no_event(scripted, says):
    held = {"completions": (says("a")["completions"][0].__class__(0, "", (240,)),)}
    ask, _ = scripted([held, held, says("x"), says("", finish="stop")])
    assert len(ask("POST", URL, {"prompt": "Once", "stream": True}).events()) == 3


def test_usage_in_a_stream_is_null_until_its_own_event(scripted, says):
    ask, _ = scripted([says("a"), says("b", finish="stop")])
    body = {"prompt": "Once", "stream": True, "stream_options": {"include_usage": True}}
    first, second, usage, done = ask("POST", URL, body).events()
    assert first["usage"] is None
    assert second["usage"] is None
    assert usage["choices"] == []
    assert (usage["usage"]["prompt_tokens"], usage["usage"]["completion_tokens"]) == (4, 2)
    assert done == "[DONE]"


def test_several_completions_of_several_prompts_interleave_under_their_indexes(scripted, says):
    first = [says("a", 1), says("b", 0), says("c", 1, "stop"), says("d", 0, "stop")]
    second = [says("e", 0), says("f", 0, "stop"), says("g", 1, "stop")]
    ask, engine = scripted(first, second)
    *events, done = ask("POST", URL, {"prompt": ["A", "B"], "n": 2, "stream": True, "seed": 1}).events()
    texts = dict.fromkeys(range(4), "")
    ended = set()
    for event in events:
        [choice] = event["choices"]
        assert choice["index"] not in ended
        texts[choice["index"]] += choice["text"]
        if choice["finish_reason"]:
            ended.add(choice["index"])
    assert texts == {0: "bd", 1: "ac", 2: "ef", 3: "g"}
    assert ended == {0, 1, 2, 3}
    assert done == "[DONE]"
    assert [params.n for _, params, *_ in engine.submitted] == [2, 2]


def test_logprobs_stand_in_four_lists(scripted, says, ranked):
    probabilities = (ranked(("b", -0.5, 1), ("a", -2.0, 2)), ranked(("c", float("-inf"), 9), ("b", -0.1, 1)))
    ask, engine = scripted(
        [says("b", logprobs=probabilities[:1]), says("c", finish="stop", logprobs=probabilities[1:])]
    )
    [choice] = ask("POST", URL, {"prompt": "Once", "logprobs": 2}).json()["choices"]
    assert choice["logprobs"] == {
        "text_offset": [0, 1],
        "token_logprobs": [-0.5, -9999.0],
        "tokens": ["b", "c"],
        "top_logprobs": [{"a": -2.0, "b": -0.5}, {"c": -9999.0, "b": -0.1}],
    }
    assert engine.submitted[0][1].logprobs == 2


def test_logprobs_in_a_stream_go_on_where_they_were(scripted, says, ranked):
    steps = [says(text, logprobs=(ranked((text, -1.0, 1)),)) for text in "ab"] + [says("", finish="length")]
    ask, _ = scripted(steps)
    *events, _ = ask("POST", URL, {"prompt": "Once", "logprobs": 1, "stream": True}).events()
    written = [event["choices"][0]["logprobs"] for event in events]
    assert [entry["tokens"] for entry in written] == [["a"], ["b"], []]
    assert [entry["text_offset"] for entry in written] == [[0], [1], []]


def test_of_two_tokens_with_one_text_the_likelier_is_shown(scripted, says):
    from vllm_teach.engine.outputs import Logprob

    alike = {97: Logprob(-3.0, 3, "a"), 5: Logprob(-0.5, 1, "\ufffd"), 6: Logprob(-0.9, 2, "\ufffd")}
    ask, _ = scripted([says("a", finish="stop", logprobs=(alike,))])
    [choice] = ask("POST", URL, {"prompt": "Once", "logprobs": 2}).json()["choices"]
    assert choice["logprobs"]["top_logprobs"] == [{"a": -3.0, "\ufffd": -0.5}]


@pytest.mark.parametrize("prompt", ["Ab", [65, 98]])
@pytest.mark.parametrize("stream", [False, True])
def test_echo_puts_the_prompt_first(scripted, says, prompt, stream):
    ask, _ = scripted([says("c"), says("d", finish="stop")])
    answer = ask("POST", URL, {"prompt": prompt, "echo": True, "stream": stream})
    if stream:
        assert [event["choices"][0]["text"] for event in answer.events()[:-1]] == ["Abc", "d"]
    else:
        assert answer.json()["choices"][0]["text"] == "Abcd"


@pytest.mark.parametrize("stream", [False, True])
def test_echo_with_logprobs_rates_the_prompt_too(scripted, says, ranked, stream):
    about_prompt = (None, ranked(("b", -0.25, 1)))
    step = says("c", finish="stop", logprobs=(ranked(("c", -0.5, 1)),))
    ask, engine = scripted([{**step, "prompt_logprobs": about_prompt}])
    answer = ask("POST", URL, {"prompt": "Ab", "echo": True, "logprobs": 1, "stream": stream})
    whole = answer.events()[0] if stream else answer.json()
    assert whole["choices"][0]["logprobs"] == {
        "text_offset": [0, 1, 2],
        "token_logprobs": [None, -0.25, -0.5],
        "tokens": ["A", "b", "c"],
        "top_logprobs": [None, {"b": -0.25}, {"c": -0.5}],
    }
    assert engine.submitted[0][1].prompt_logprobs == 1


@pytest.mark.parametrize("stream", [False, True])
def test_echo_of_no_new_token_rates_the_prompt_alone(scripted, says, ranked, stream):
    step = says("c", finish="length", logprobs=(ranked(("c", -0.5, 1)),))
    ask, engine = scripted([{**step, "prompt_logprobs": (None, ranked(("b", -0.25, 1)))}])
    body = {"prompt": "Ab", "echo": True, "logprobs": 0, "max_tokens": 0, "stream": stream}
    answer = ask("POST", URL, {**body, **({"stream_options": {"include_usage": True}} if stream else {})})
    whole = answer.events()[0] if stream else answer.json()
    [choice] = whole["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("Ab", "length")
    assert choice["logprobs"]["tokens"] == ["A", "b"]
    usage = (answer.events()[1] if stream else whole)["usage"]
    assert usage["completion_tokens"] == 0
    assert engine.submitted[0][1].max_tokens == 1


def test_token_ids_come_when_asked_for(scripted, says):
    ask, _ = scripted([says("a"), says("b", finish="stop")])
    *events, _ = ask("POST", URL, {"prompt": "AB", "stream": True, "return_token_ids": True}).events()
    assert [event["choices"][0]["token_ids"] for event in events] == [[97], [98]]
    assert [event["choices"][0].get("prompt_token_ids") for event in events] == [[65, 66], None]


# The real engine.


def streamed(url: str, body: dict) -> list[dict]:
    with httpx.stream("POST", url + URL, json={**body, "stream": True}, timeout=60) as response:
        lines = [line[6:] for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


BODIES = [
    {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 20},
    {"prompt": "The sea", "temperature": 1.5, "seed": 11, "n": 3, "max_tokens": 12, "top_k": 50},
    {"prompt": ["The sea", "A ship came"], "temperature": 0.8, "seed": 5, "max_tokens": 9, "stop": ["e", "zz"]},
    {"prompt": [[5, 6, 7], [8, 9]], "temperature": 0, "max_tokens": 6, "logit_bias": {"11": 100}},
    {"prompt": "The wind", "temperature": 0, "max_tokens": 8, "logprobs": 3},
    {"prompt": "The wind", "temperature": 0, "max_tokens": 30, "repetition_penalty": 1.3, "presence_penalty": 1},
]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_the_server_and_each_of_its_streams_say_what_the_offline_engine_says(tiny_server, offline, body):
    params = {name: value for name, value in body.items() if name != "prompt"}
    if "logit_bias" in params:
        params["logit_bias"] = {int(key): value for key, value in params["logit_bias"].items()}
    expected = [
        output
        for request in offline.generate(body["prompt"], SamplingParams(**params), use_tqdm=False)
        for output in request.outputs
    ]
    whole = httpx.post(tiny_server.url + URL, json={**body, "return_token_ids": True}, timeout=60).json()
    for choice, output in zip(whole["choices"], expected, strict=True):
        assert choice["token_ids"] == output.token_ids
        assert choice["text"] == output.text
        assert (choice["finish_reason"], choice["stop_reason"]) == (output.finish_reason, output.stop_reason)
        if "logprobs" in body:
            own = [top[token].logprob for top, token in zip(output.logprobs, output.token_ids, strict=True)]
            assert choice["logprobs"]["token_logprobs"] == pytest.approx(own, abs=1e-5)
    texts = ["" for _ in expected]
    for event in streamed(tiny_server.url, body):
        texts[event["choices"][0]["index"]] += event["choices"][0]["text"]
    assert texts == [output.text for output in expected]


def test_echoed_logprobs_are_the_offline_engines(tiny_server, offline):
    prompt = "The wind came over the sea"
    body = {"prompt": prompt, "echo": True, "logprobs": 2, "max_tokens": 0}
    [choice] = httpx.post(tiny_server.url + URL, json=body, timeout=60).json()["choices"]
    params = SamplingParams(max_tokens=1, prompt_logprobs=2)
    [request] = offline.generate(prompt, params, use_tqdm=False)
    own = [
        top[token].logprob for top, token in zip(request.prompt_logprobs[1:], request.prompt_token_ids[1:], strict=True)
    ]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(own, abs=1e-5)
    assert "".join(choice["logprobs"]["tokens"]) == prompt == choice["text"]


def test_what_does_not_fit_the_context_is_refused(tiny_server):
    answer = httpx.post(tiny_server.url + URL, json={"prompt": "sea " * 200, "max_tokens": 500}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")
    answer = httpx.post(tiny_server.url + URL, json={"prompt": "sea " * 4000}, timeout=60)
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "context_length_exceeded")


@pytest.mark.parametrize("prompt", ["ab " * 100_000, [65] * 100_000, ["a", "ab " * 100_000]])
def test_what_is_far_too_long_is_refused_without_being_tokenised_as_a_whole(scripted, prompt):
    ask, engine = scripted()
    encode, longest = engine.tokenizer.encode, []
    engine.tokenizer.encode = lambda text: longest.append(len(text)) or encode(text)
    answer = ask("POST", URL, {"prompt": prompt})
    assert (answer.status, answer.error["code"]) == (400, "context_length_exceeded")
    assert max(longest, default=0) <= 32 * 64


def test_a_long_text_of_few_tokens_is_tokenised_as_a_whole(scripted, says):
    ask, engine = scripted([says("x", finish="stop")])
    engine.tokenizer.encode = lambda text: [len(text) // 1000]
    assert ask("POST", URL, {"prompt": "a" * 100_000}).status == 200
    assert engine.submitted[0][0]["prompt_token_ids"] == [100]
