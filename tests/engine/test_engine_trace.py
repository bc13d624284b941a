"""Random lives of an engine: requests come, go and fail, and interrupts fall anywhere. At the end nothing is left."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from vllm_teach import SamplingParams
from vllm_teach.engine.request import SequenceStatus
from vllm_teach.errors import VllmTeachError


class Trap:
    """Stands before the runner and the tokenizer: counts their calls and raises at the one that was chosen."""

    def __init__(self, engine):
        self.engine, self.execute, self.tokenizer = engine, engine.runner.execute, engine.tokenizer
        self.stop_token_ids = engine.tokenizer.stop_token_ids
        self.countdown, self.error = 0, None

    def spring(self):
        self.countdown -= 1
        if self.countdown == 0:
            raise self.error

    def run(self, plan):
        self.spring()
        result = self.execute(plan)
        self.spring()  # sampled, but not recorded yet
        return result

    def encode(self, text):
        self.spring()
        return self.tokenizer.encode(text)

    def decode(self, ids, skip_special_tokens=True):
        self.spring()
        return self.tokenizer.decode(ids, skip_special_tokens)


@pytest.fixture(params=["recompute", "swap"])
def trace(request, make_llm, assert_empty):
    # 10 blocks are the longest sequence: with three of them, and forks, sequences are preempted all the time.
    small = {"blocks": 10, "preemption_mode": request.param, "host_blocks": 12 if request.param == "swap" else 0}

    class Trace(RuleBasedStateMachine):
        def __init__(self):
            super().__init__()
            self.engine = make_llm(**small, max_num_seqs=3, max_num_batched_tokens=32, max_model_len=40).engine
            self.trap = Trap(self.engine)
            self.engine.tokenizer = self.engine.writer.tokenizer = self.trap
            self.engine.runner.execute = self.trap.run
            self.requests = []

        def survive(self, action):
            try:
                return action()
            except (KeyboardInterrupt, VllmTeachError):
                return None

        @rule(countdown=st.integers(1, 12), interrupt=st.booleans())
        def arm(self, countdown, interrupt):
            self.trap.countdown = countdown
            self.trap.error = KeyboardInterrupt() if interrupt else KeyError("broken")

        @rule(
            prompt=st.text(alphabet="aé🐈", min_size=1, max_size=6),
            new=st.integers(1, 12),
            n=st.integers(1, 3),
            seed=st.integers(0, 9),
            stop=st.sampled_from([None, ["e"], ["a", "\x00", "q"]]),
            name=st.sampled_from([None, "request-0", "request-1", "mine"]),
            logprobs=st.sampled_from([None, 1]),
        )
        def add(self, prompt, new, n, seed, stop, name, logprobs):
            params = SamplingParams(
                temperature=2.0, max_tokens=new, n=n, seed=seed, stop=stop, logprobs=logprobs, min_tokens=seed % 2
            )
            request_id = self.survive(lambda: self.engine.add_request(prompt, params, name))
            if request_id is not None:
                self.requests.append(self.engine.get_request(request_id))

        @rule(times=st.integers(1, 4))
        def step(self, times):
            for _ in range(times):
                self.survive(self.engine.step)

        @precondition(lambda self: self.requests)
        @rule(data=st.data(), by_name=st.booleans())
        def abort(self, data, by_name):
            request = data.draw(st.sampled_from(self.requests))
            others = [each for each in self.requests if each is not request and not each.finished]
            self.survive(lambda: self.engine.abort(request.request_id if by_name else request))
            if not by_name:
                assert request.finished
                assert not any(each.finished for each in others)

        @invariant()
        def books_agree(self):
            engine = self.engine
            unfinished = [each for request in self.requests for each in request.sequences if not each.finished]
            scheduler = engine.scheduler
            queued = [*scheduler.waiting, *scheduler.running, *scheduler.swapped]
            not_yet_forked = [fork for each in queued for fork in each.forks]
            assert len({*queued, *not_yet_forked}) == len(queued) + len(not_yet_forked) == len(unfinished)
            tables = [engine.kv.table(each.seq_id).blocks for each in queued if each.status is SequenceStatus.RUNNING]
            assert engine.kv.pool.num_held == len({block for table in tables for block in table})
            assert all(engine._requests[each.request_id] is each for each in self.requests if not each.finished)

        def teardown(self):
            self.trap.countdown = 0
            steps = 0
            while self.engine.has_unfinished_requests():
                self.engine.step()
                steps += 1
                assert steps < 1000
            assert_empty(self.engine)
            for request in self.requests:
                for sequence in request.sequences:
                    self.judge(sequence)

        def judge(self, sequence):
            assert sequence.finish_reason in ("stop", "length", "abort", "error")
            assert sequence.new_token is None
            if sequence.error is not None or sequence.finish_reason == "abort":
                return  # an interrupted abort frees, but may not come to write the last text
            if sequence.params.logprobs is not None:
                assert len(sequence.logprobs) == len(sequence.output_token_ids)
            text = self.trap.tokenizer.decode(sequence.output_token_ids)
            if isinstance(sequence.stop_reason, str):
                assert text.startswith(sequence.text)
                assert sequence.stop_reason in text
            else:
                assert sequence.text == text
            assert sequence.output_text is None

    return Trace


def test_nothing_is_left_whatever_happens(trace):
    machine = trace.TestCase()
    machine.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
    machine.runTest()
