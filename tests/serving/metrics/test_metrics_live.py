"""The metrics of a served engine, thread and messages between: what clients got is what they say."""

import asyncio

import pytest
from prometheus_client.parser import text_string_to_metric_families

from vllm_teach.engine.sampling_params import SamplingParams
from vllm_teach.errors import EngineDeadError
from vllm_teach.serving.async_engine.async_engine import AsyncLLMEngine
from vllm_teach.serving.metrics.server_metrics import ServerMetrics


def read(metrics: ServerMetrics) -> dict[tuple[str, ...], float]:
    body, _ = metrics.render()
    return {
        (
            sample.name,
            *(value for label, value in sorted(sample.labels.items()) if label not in ("engine", "model_name")),
        ): (sample.value)
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def test_what_clients_got_is_what_the_metrics_say(tiny_llm) -> None:
    metrics = ServerMetrics("tiny")

    async def serve() -> tuple[list, int]:
        engine = AsyncLLMEngine.of(tiny_llm, on_report=metrics.on_report, on_finished=metrics.on_finished)
        metrics.on_ready(await engine.start())
        try:
            params = SamplingParams(n=2, max_tokens=5, seed=1, ignore_eos=True)
            prompts = [[10, 11, 12, 13, 14, 15, 16, 17, number] for number in range(20, 32)]
            left = engine.submit([7, 8, 9], SamplingParams(max_tokens=150, ignore_eos=True))
            seen = 0
            async for delta in left:
                seen += sum(len(each.token_ids) for each in delta.completions)
                if seen:
                    break
            outputs = []
            for wave in (prompts[:4], prompts[4:]):  # the second finds what the first has computed
                asked = (engine.generate({"prompt_token_ids": ids}, params) for ids in wave)
                outputs += await asyncio.gather(*asked)
            await left.aclose()
            await engine.drain(60)
            return outputs, seen
        finally:
            await engine.stop()

    outputs, seen = asyncio.run(serve())
    found = read(metrics)
    assert found["vllm:request_success_total", "length"] == len(outputs) == 12
    assert found["vllm:request_success_total", "abort"] == 1
    assert found["vllm:request_success_total", "error"] == 0
    assert found["vllm:request_generation_tokens_sum",] == 12 * 10
    assert found["vllm:request_prompt_tokens_sum",] == 12 * 9
    assert found["vllm:prompt_tokens_total",] == 12 * 9 + 3
    assert found["vllm:generation_tokens_total",] >= 12 * 10 + seen
    assert found["vllm:prefix_cache_hits_total",] == sum(output.num_cached_tokens for output in outputs) > 0
    assert found["vllm:time_to_first_token_seconds_count",] == 13
    assert found["vllm:e2e_request_latency_seconds_count",] == 12
    for gauge in ("running", "waiting", "swapped"):
        assert found[f"vllm:num_requests_{gauge}",] == 0
    assert found["vllm:kv_cache_usage_perc",] == 0
    assert 0 < found["vllm_teach:attention_time_share",] < 1
    assert found["vllm_teach:engine_starts_total",] == 1


def test_a_request_that_runs_shows_in_the_latencies_and_what_was_before_it_was_served_does_not(tiny_llm) -> None:
    params = SamplingParams(max_tokens=150, ignore_eos=True)
    tiny_llm.generate([7, 8, 9], params, use_tqdm=False)
    metrics, seen = ServerMetrics("tiny"), []

    async def serve() -> None:
        engine = AsyncLLMEngine.of(tiny_llm, on_report=metrics.on_report, on_finished=metrics.on_finished)
        metrics.on_ready(await engine.start())
        try:
            async with engine.submit([7, 8, 9], params, whole=True) as stream:
                while not seen:
                    found = read(metrics)
                    if found["vllm:time_to_first_token_seconds_count",]:
                        seen.append((engine.num_running, found))
                    await asyncio.sleep(0)
                await stream.aclose()
            await engine.drain(60)
        finally:
            await engine.stop()

    asyncio.run(serve())
    ((running, found),) = seen
    assert running == 1
    assert found["vllm:time_to_first_token_seconds_count",] == 1
    assert found["vllm:request_queue_time_seconds_count",] == 0
    assert found["vllm:generation_tokens_total",] < 150
    assert found["vllm:generation_tokens_total",] == found["vllm:inter_token_latency_seconds_count",] + 1


def test_an_engine_that_dies_leaves_errors_of_that_kind(tiny_llm, monkeypatch) -> None:
    metrics = ServerMetrics("tiny")

    def fail() -> None:
        raise RuntimeError("broken loop")

    monkeypatch.setattr(tiny_llm.engine, "step", fail)

    async def serve() -> None:
        engine = AsyncLLMEngine.of(tiny_llm, on_report=metrics.on_report, on_finished=metrics.on_finished)
        await engine.start()
        try:
            with pytest.raises(EngineDeadError):
                await engine.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=5))
        finally:
            await engine.stop()

    asyncio.run(serve())
    assert read(metrics)["vllm_teach:request_errors_total", "engine_dead"] == 1
    assert read(metrics)["vllm:request_success_total", "error"] == 1
