"""The budget follows what steps cost: here `overhead` + tokens · `per_token` seconds, with decodes in each."""

import random

import pytest

from vllm_teach.engine.token_budget import TokenBudget


def run(budget, steps, overhead=0.01, per_token=0.001, decodes=4, noise=0.0):
    """Let each step use its whole budget; return the seconds of the steps."""
    chance, seconds = random.Random(0), []
    for _ in range(steps):
        tokens = max(decodes, budget.limit(decodes))
        seconds.append((overhead + tokens * per_token) * (1 + noise * chance.uniform(-1, 1)))
        budget.observe(tokens, decodes, seconds[-1])
    return seconds


@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_it_settles_at_what_the_target_allows(noise) -> None:
    budget = TokenBudget(most=640, target=0.11)  # 100 tokens
    seconds = run(budget, 300, noise=noise)
    late = sorted(seconds[50:])
    assert 75 <= budget.tokens <= 115
    assert 0.08 < late[len(late) // 2] < 0.115
    assert late[-1] < 0.11 * 1.3


def test_it_grows_again_when_steps_become_faster() -> None:
    budget = TokenBudget(most=640, target=0.11)
    run(budget, 100)
    run(budget, 300, per_token=0.0002)
    assert 400 <= budget.tokens <= 560  # 500 tokens


def test_it_stays_within_one_and_most() -> None:
    budget = TokenBudget(most=100, target=0.01)
    run(budget, 50, overhead=1.0, decodes=1)
    assert budget.tokens == 1
    run(budget, 500, overhead=0.0, per_token=1e-9)
    assert budget.limit(3) == 100


def test_a_target_out_of_reach_leaves_prompts_a_64th() -> None:
    budget = TokenBudget(most=640, target=0.01)
    run(budget, 50, overhead=1.0, decodes=8)
    assert budget.limit(8) == 8 + 10
    assert budget.limit(639) == 640


def test_a_target_out_of_reach_does_not_keep_new_requests_out(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(target_inter_token_latency=0.01, blocks=60)
    first, second = make_sequence(max_tokens=60), make_sequence(prompt=range(10), max_tokens=1)
    scheduler.add(first)
    for _ in range(20):
        run_step(scheduler)
        scheduler.observe(1.0)
    scheduler.add(second)
    for _ in range(10):
        run_step(scheduler)
        scheduler.observe(1.0)
    assert second.finished
    assert not first.finished


def test_a_step_that_decodes_nothing_delays_nobody() -> None:
    budget = TokenBudget(most=100, target=0.01)
    budget.observe(100, 0, seconds=5.0)
    assert budget.tokens == 100
    budget.observe(100, 1, seconds=5.0)
    assert budget.tokens == 50
    assert budget.limit(0) == 100


def test_a_step_that_left_tokens_unused_says_nothing_about_more() -> None:
    budget = TokenBudget(most=100, target=0.01)
    budget.observe(100, 1, seconds=1.0)
    budget.observe(20, 1, seconds=0.001)
    assert budget.tokens == 50


def test_the_scheduler_shrinks_prefill_beside_decodes_and_not_alone(make_scheduler, make_sequence, run_step) -> None:
    scheduler = make_scheduler(target_inter_token_latency=0.01, blocks=60)
    first, second, third = (make_sequence(prompt=range(n), max_tokens=30) for n in (4, 60, 60))
    scheduler.add(first)
    run_step(scheduler)
    scheduler.observe(1.0)  # nobody decoded
    scheduler.add(second)
    assert run_step(scheduler) == [(first, 4, 1), (second, 0, 19)]
    scheduler.observe(1.0)
    assert run_step(scheduler) == [(first, 5, 1), (second, 19, 9)]
    scheduler.observe(1.0)
    for _ in range(4):
        run_step(scheduler)
        scheduler.observe(1.0)
    # A running sequence is owed a token, however slow the steps are; nobody else is admitted.
    scheduler.add(third)
    computed = second.num_computed
    assert run_step(scheduler)[1] == (second, computed, 1)
    assert third.num_computed == 0
    scheduler.finish(first, "abort")
    assert run_step(scheduler)[0] == (second, computed + 1, 20)
