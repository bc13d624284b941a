import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.length_mix import SHAREGPT
from vllm_teach.kvcache.memory_split import split_memory
from vllm_teach.kvcache.occupancy import Memory, PagedMemory, ReservedMemory, simulate_occupancy


def test_a_reservation_by_hand() -> None:
    # 25 slots hold two reservations of 10, and 5 that nobody can have. In the only step in which the third request
    # waits, the first two have 4 and 3 tokens; the first will store one more, the second none.
    _, split = split_memory([(4, 2), (3, 1), (2, 3)], ReservedMemory(25, "max", 10))
    assert split.stored == 7 / 25
    assert split.to_come == 1 / 25
    assert split.never == pytest.approx(12 / 25)
    assert split.free == pytest.approx(5 / 25)


def test_paging_by_hand() -> None:
    # Three blocks of 4. Step 1: 4 and 3 tokens in two blocks, the third prompt needs two. Step 2: 5 tokens in two
    # blocks, of which one more slot is used later. Step 3: 6 tokens, the last of this request that are stored.
    _, split = split_memory([(4, 3), (3, 1), (5, 1)], PagedMemory(12, 4, watermark=0))
    assert split.stored == pytest.approx((7 + 5 + 6) / 36)
    assert split.to_come == pytest.approx((0 + 1 + 0) / 36)
    assert split.never == pytest.approx((1 + 2 + 2) / 36)
    assert split.free == pytest.approx((4 + 4 + 4) / 36)


@pytest.mark.parametrize("make", [lambda: ReservedMemory(4096, "oracle", 512), lambda: PagedMemory(4096, 16)])
def test_the_parts_are_all_and_agree_with_the_occupancy(make) -> None:
    lengths = [(prompt % 90 + 1, output % 120 + 1) for prompt, output in SHAREGPT.draw(120, seed=2)]
    memory: Memory = make()
    occupancy, split = split_memory(lengths, memory)
    assert occupancy == simulate_occupancy(lengths, make())
    parts = (split.stored, split.to_come, split.never, split.free)
    assert sum(parts) == pytest.approx(1)
    assert min(parts) >= 0
    assert split.stored <= occupancy.mean_utilization


def test_an_oracle_holds_next_to_nothing_in_vain() -> None:
    lengths = [(20, 30)] * 50
    _, split = split_memory(lengths, ReservedMemory(500, "oracle", 50))
    assert split.never == pytest.approx(1 / 50)  # the slot of the last token, which is never stored
    assert split.free == 0


def test_memory_for_all_at_once_is_refused() -> None:
    with pytest.raises(InvalidArgumentError, match="none waited"):
        split_memory([(4, 2)], ReservedMemory(100, "max", 10))
