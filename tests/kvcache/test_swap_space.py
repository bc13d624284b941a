import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.swap_space import SwapSpace


def test_blocks_go_out_and_come_back() -> None:
    space = SwapSpace(4)
    first, second = space.take(1), space.take(2)
    assert sorted(first + second) == [0, 1, 2]
    assert (space.num_used, space.num_free) == (3, 1)
    space.give(second)
    assert (space.num_used, space.num_free) == (1, 3)
    assert sorted(first + space.take(3)) == [0, 1, 2, 3]
    assert space.take(0) == []


def test_misuse_is_named() -> None:
    with pytest.raises(InvalidArgumentError, match="num_host_blocks=-1"):
        SwapSpace(-1)
    space = SwapSpace(2)
    with pytest.raises(InvalidArgumentError, match="count=3 is more than the 2 free host blocks"):
        space.take(3)
    assert space.num_free == 2
