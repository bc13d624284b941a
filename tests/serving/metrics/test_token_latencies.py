"""Waits for tokens, counted step by step, are those of the whole list of times."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from vllm_teach.engine.outputs import RequestMetrics
from vllm_teach.serving.metrics.token_latencies import TokenLatencies

# Powers of two, so that sums are exact in any order.
WAITS = st.sampled_from([1 / 16, 1 / 4, 2.0, 64.0])


@given(WAITS, st.lists(st.tuples(WAITS, st.booleans()), max_size=20))
def test_a_step_counts_the_token_that_it_brought_and_no_other(first_wait, steps) -> None:
    latencies, now = TokenLatencies(), 100.0 + first_wait
    times = RequestMetrics(100.0)
    for seconds, brings_token in steps:
        began = now
        now += seconds
        if brings_token:
            times.token_times.append(now)
        latencies.add(times, began)
        now += 1 / 32  # until the next step
    firsts = [moment - 100.0 for moment in times.token_times[:1]]
    gaps = [after - before for before, after in pairwise(times.token_times)]
    for counts, wanted in ((latencies.first, firsts), (latencies.between, gaps)):
        found = counts.read()
        assert (sum(found.counts), found.total) == (len(wanted), sum(wanted))
        for bound, count in zip(counts.bounds, found.counts, strict=False):
            lower = max((each for each in counts.bounds if each < bound), default=0.0)
            assert count == sum(lower < wait <= bound for wait in wanted)
