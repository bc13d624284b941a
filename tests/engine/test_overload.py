"""Far more requests at once than the cache holds: all are served, in turn, in the memory there is."""

from collections.abc import Callable

import psutil

from vllm_teach.engine.events import Admitted
from vllm_teach.engine.llm import LLM
from vllm_teach.engine.llm_engine import LLMEngine
from vllm_teach.engine.sampling_params import SamplingParams

REQUESTS, IN_THE_POOL = 200, 8
PROMPT, OUTPUT, BLOCK = 24, 16, 4
BLOCKS = IN_THE_POOL * (PROMPT + OUTPUT) // BLOCK


def test_200_requests_share_a_pool_for_8(
    make_llm: Callable[..., LLM], assert_empty: Callable[[LLMEngine], None]
) -> None:
    engine = make_llm(blocks=BLOCKS, block_size=BLOCK, max_num_seqs=64, watermark=0.0, max_events=None).engine
    params = SamplingParams(temperature=0, max_tokens=OUTPUT, ignore_eos=True)
    prompts = [[(7 * number + place * place) % 256 for place in range(PROMPT)] for number in range(REQUESTS)]
    names = [engine.add_request({"prompt_token_ids": prompt}, params) for prompt in prompts]
    requests = [engine.get_request(name) for name in names]
    process, resident, held, running = psutil.Process(), [], [], []
    while engine.has_unfinished_requests():
        engine.step()
        held.append(engine.kv.pool.num_held)
        running.append(len(engine.scheduler.running))
        resident.append(process.memory_info().rss)

    assert [request.error for request in requests] == [None] * REQUESTS
    assert all(len(request.sequences[0].output_token_ids) == OUTPUT for request in requests)
    assert {request.sequences[0].finish_reason for request in requests} == {"length"}
    # Full, but never above what there is; from prompts alone a few more than 8 run until they have to give way.
    assert BLOCKS - 2 <= max(held) <= BLOCKS
    assert IN_THE_POOL <= max(running) <= BLOCKS * BLOCK // PROMPT
    # The first tenth of the steps has touched all that is needed: 180 requests later it is hardly more.
    growth = resident[-1] - resident[len(resident) // 10]
    assert growth < 16 * 2**20, f"{growth / 2**20:.1f} MiB"
    # Whoever came first was admitted first, and had its first token first.
    first_time = [event.seq_id for event in engine.events.of(Admitted) if not event.resumed]
    assert first_time == [request.sequences[0].seq_id for request in requests]
    finished = [request.metrics.finished_time for request in requests]
    assert finished == sorted(finished)
    assert_empty(engine)
