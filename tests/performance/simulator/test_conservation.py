"""Whatever comes, and however little room there is: no request is lost, no token is lost, and time goes forward."""

from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from vllm_teach.engine.events import Admitted, Arrived, Finished, FirstToken, Scheduled
from vllm_teach.performance.simulator.step_series import StepSeries
from vllm_teach.performance.virtual_time import Arrival, StepCost, simulate

ARRIVALS = st.lists(
    st.builds(
        lambda prompt, output, time, priority, shared, group: Arrival(
            prompt, output, time, priority, min(shared, prompt - 1), group
        ),
        st.integers(1, 40),
        st.integers(1, 20),
        st.sampled_from((0.0, 0.25, 1.0, 3.0, 50.0)),
        st.integers(0, 2),
        st.integers(0, 20),
        st.integers(0, 1),
    ),
    min_size=1,
    max_size=14,
)
LIMITS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(15, 60),
        "max_num_seqs": st.integers(1, 8),
        "max_num_batched_tokens": st.integers(8, 64),
        "prefix_cache": st.sampled_from((None, "hash", "radix")),
        "policy": st.sampled_from(("fcfs", "priority")),
        "batching": st.sampled_from(("continuous", "static", "prefill_first")),
        "enable_chunked_prefill": st.booleans(),
        "watermark": st.sampled_from((0.0, 0.1)),
        "preemption": st.sampled_from(("recompute", "swap", "auto")),
        "num_host_blocks": st.integers(1, 30),
    }
)


@settings(max_examples=150, deadline=None)
@given(arrivals=ARRIVALS, limits=LIMITS)
def test_nothing_is_lost_and_time_goes_forward(arrivals, limits) -> None:
    series = StepSeries()
    run = simulate(arrivals, StepCost(step=1.0, token=0.1), block_size=4, watch=series, **limits)
    # No request is lost, and each has as many tokens as it asked for, one after the other.
    assert [len(times.tokens) for times in run.times] == [each.output_len for each in arrivals]
    for times, arrival in zip(run.times, arrivals, strict=True):
        assert times.arrival == arrival.time < times.tokens[0]
        assert all(before < after for before, after in pairwise(times.tokens))
    for kind in (Arrived, Finished, FirstToken):
        assert sorted(each.seq_id for each in run.events.of(kind)) == list(range(len(arrivals)))
    assert {each.seq_id for each in run.events.of(Admitted)} == set(range(len(arrivals)))
    # Time goes forward, and no two steps overlap.
    log = [entry.time for entry in run.events]
    assert log == sorted(log)
    ends = [start + seconds for start, seconds in zip(series.start, series.seconds, strict=True)]
    assert all(end <= start + 1e-9 for end, start in zip(ends, series.start[1:], strict=False))
    assert run.seconds == max(times.tokens[-1] for times in run.times)
    # No token is lost: what is computed is what is planned, and all but the last of each request's.
    planned = sum(each.num_tokens for each in run.events.of(Scheduled))
    assert run.num_computed == planned == sum(series.prefill_tokens) + sum(series.decode_tokens)
    needed = sum(each.prompt_len + each.output_len - 1 for each in arrivals)
    cached = sum(each.num_cached_tokens for each in run.events.of(Admitted))
    assert run.num_computed + cached >= needed
    if not run.num_preemptions:
        assert run.num_computed + cached == needed
    assert run.num_output_tokens == sum(each.output_len for each in arrivals)
    # Nothing stays behind.
    usage = run.kv.usage()
    assert (usage.held_blocks, usage.host_blocks_used) == (0, 0)
    assert len(series) == run.num_steps
    assert max(series.held_blocks) <= limits["num_blocks"]
