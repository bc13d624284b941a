"""A server in a thread: it serves, it ends, and what goes wrong at its start comes out."""

import asyncio
import json
import threading
import time
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from vllm_teach.engine.llm import LLM
from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import InvalidArgumentError, RequestTimeoutError
from vllm_teach.serving.http.background import BackgroundServer
from vllm_teach.serving.http.settings import AppSettings
from vllm_teach.serving.metrics.scrape import scrape, scrape_until, scraping


@pytest.fixture
def llm() -> LLM:
    return LLM("tiny", dtype="float32", num_kv_blocks=64)


def complete(url: str, **fields: object) -> dict:
    body = json.dumps({"prompt": "The sea", "max_tokens": 6, "temperature": 0, **fields}).encode()
    with urlopen(Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"}), timeout=60) as answer:
        return json.load(answer)


def test_it_serves_and_ends_and_the_engine_is_free_again(llm: LLM) -> None:
    with BackgroundServer(llm, app_settings=AppSettings(served_model_names=("mine",))) as server:
        assert server.url.startswith("http://127.0.0.1:")
        answer = complete(server.url, model="mine")
        page = scrape_until(server.url, lambda page: page.value("vllm:generation_tokens_total") == 6)
        assert page.value("vllm:request_success_total", model_name="mine") == 1
    with pytest.raises(URLError):
        scrape(server.url)
    server.close()
    params = SamplingParams(temperature=0, max_tokens=6)
    assert answer["choices"][0]["text"] == llm.generate("The sea", params, use_tqdm=False)[0].outputs[0].text
    assert not [thread for thread in threading.enumerate() if thread.name == "vllm-teach server"]


def test_a_model_without_another_name_is_called_as_it_was_asked_for(llm: LLM) -> None:
    with BackgroundServer(llm) as server:
        assert complete(server.url)["model"] == "tiny"
        assert scrape(server.url).value("vllm_teach:engine_up", model_name="tiny") == 1


def test_a_port_that_is_taken(llm: LLM) -> None:
    with BackgroundServer(llm) as server, pytest.raises(InvalidArgumentError, match="port="):
        BackgroundServer(llm, port=int(server.url.rpartition(":")[2]))


def test_those_that_wait_for_a_long_step_are_counted(llm: LLM) -> None:
    with BackgroundServer(llm) as server:
        with llm.engine.exclusive.one_thread(wait=True):
            asking = [threading.Thread(target=complete, args=(server.url,)) for _ in range(3)]
            for thread in asking:
                thread.start()
            end = time.monotonic() + 60
            while server.num_waiting < 3 and time.monotonic() < end:
                time.sleep(0.01)
            assert server.num_waiting == 3
        for thread in asking:
            thread.join()
        assert server.num_waiting == 0
        # All three came while the step lasted, so they share every step from then on.
        assert scrape(server.url).value("vllm:iteration_tokens_total_count") == 6


def test_scrapes_over_time_and_one_that_never_comes(llm: LLM) -> None:
    async def watch(url: str) -> list[float]:
        async with scraping(url, interval=0.01) as scrapes:
            await asyncio.to_thread(complete, url)
        return [page.value("vllm:generation_tokens_total") for page in scrapes]

    with BackgroundServer(llm) as server:
        seen = asyncio.run(watch(server.url))
        assert seen[-1] == 6
        assert seen == sorted(seen)
        with pytest.raises(RequestTimeoutError, match="timeout="):
            scrape_until(server.url, lambda page: False, timeout=0.05)
