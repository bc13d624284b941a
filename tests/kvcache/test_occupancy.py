import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import SHAREGPT
from vllm_teach.kvcache.occupancy import Occupancy, PagedMemory, ReservedMemory, compare_occupancy, simulate_occupancy
from vllm_teach.kvcache.placement import PLACEMENTS
from vllm_teach.kvcache.waste import Lengths


def test_a_reservation_of_max_length_step_by_step() -> None:
    # 20 slots hold two reservations of 10. The last token of a request is sampled and never stored.
    result = simulate_occupancy([(4, 2), (3, 1), (2, 3)], ReservedMemory(20, "max", 10))
    assert result.in_flight == (2, 2, 1, 1)
    assert result.waiting == (1, 0, 0, 0)
    assert result.utilization == (7 / 20, 7 / 20, 3 / 10, 4 / 10)
    assert (result.mean_in_flight, result.mean_utilization) == (2, 7 / 20)


def test_paging_step_by_step() -> None:
    # Three blocks of 4: the first two prompts take one each, the third has to wait for a second block.
    result = simulate_occupancy([(4, 3), (3, 1), (5, 1)], PagedMemory(12, 4, watermark=0))
    assert result.in_flight == (2, 1, 1, 1)
    assert result.waiting == (1, 1, 1, 0)
    assert result.utilization == (7 / 8, 5 / 8, 6 / 8, 5 / 8)
    assert result.num_preemptions == 0


def test_who_came_last_is_preempted_and_comes_back() -> None:
    # Two blocks of 4 hold both prompts, but not the fifth token of both.
    result = simulate_occupancy([(4, 3), (4, 3)], PagedMemory(8, 4, watermark=0))
    assert result.in_flight == (2, 1, 1, 1, 1)
    assert result.waiting == (0, 1, 1, 0, 0)
    # The one that was preempted begins again with the token it had sampled.
    assert result.utilization == (1.0, 5 / 8, 6 / 8, 5 / 8, 6 / 8)
    assert result.num_preemptions == 1


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_every_request_ends_and_nothing_is_held_after(placement: str) -> None:
    memory = PagedMemory(1024, 16, placement)
    lengths = [(prompt % 90 + 1, output % 120 + 1) for prompt, output in SHAREGPT.draw(60, seed=2)]
    result = simulate_occupancy(lengths, memory)
    assert memory.slots_held == 0
    assert result.waiting[-1] == 0
    assert max(result.in_flight) > 1
    assert all(0 < value <= 1 for value in result.utilization)


@pytest.fixture(scope="module")
def lengths() -> Lengths:
    return SHAREGPT.draw(400)


@pytest.fixture(scope="module")
def compared(lengths: Lengths) -> dict[str, Occupancy]:
    return {result.name: result for result in compare_occupancy(lengths, 32_768)}


def test_paging_holds_at_least_twice_the_sequences_at_95_percent(
    compared: dict[str, Occupancy], lengths: Lengths
) -> None:
    longest = max(prompt + output for prompt, output in lengths)
    paged = compared["paged, scattered, block_size 16"]
    assert paged.mean_utilization >= 0.95
    for max_len in (8192, longest):
        assert paged.mean_in_flight >= 2 * compared[f"max ({max_len})"].mean_in_flight


def test_the_better_a_reservation_guesses_the_more_sequences_fit(compared: dict[str, Occupancy]) -> None:
    names = ["max (8192)", next(name for name in compared if name[:3] == "max" and "8192" not in name)]
    in_flight = [compared[name].mean_in_flight for name in (*names, "power_of_two", "oracle")]
    assert in_flight == sorted(in_flight)
    assert in_flight[0] == 4
    assert in_flight[-1] < compared["paged, scattered, block_size 16"].mean_in_flight


def test_questions_without_an_answer_are_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="num_slots=64"):
        simulate_occupancy([(60, 20)], PagedMemory(64))
    with pytest.raises(InvalidArgumentError, match="num_slots=64"):
        simulate_occupancy([(6, 2)], ReservedMemory(64, "max", 65))
    alone = simulate_occupancy([(6, 2)], PagedMemory(64))
    with pytest.raises(InvalidArgumentError, match="none waited"):
        _ = alone.mean_in_flight


def test_an_observer_sees_each_step_and_where_the_slots_are() -> None:
    memory = PagedMemory(12, 4, watermark=0)
    seen: list[list[tuple[int, int, list[tuple[int, int]]]]] = []
    result = simulate_occupancy(
        [(4, 3), (3, 1), (5, 1)],
        memory,
        lambda running, tokens: seen.append([(seq, tokens[seq], memory.runs_of(seq)) for seq in running]),
    )
    assert [len(step) for step in seen] == list(result.in_flight)
    assert seen[0] == [(0, 4, [(0, 4)]), (1, 3, [(4, 4)])]
    assert seen[1] == [(0, 5, [(0, 4), (8, 4)])]
    reserved = ReservedMemory(20, "max", 10)
    spans: list[list[list[tuple[int, int]]]] = []
    simulate_occupancy(
        [(4, 2), (3, 2)], reserved, lambda running, _: spans.append([reserved.runs_of(s) for s in running])
    )
    assert spans == [[[(0, 10)], [(10, 10)]]] * 2
