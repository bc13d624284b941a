import pytest

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.performance.shared_device import SharedDeviceCost
from vllm_teach.performance.virtual_time import Arrival, simulate


def seconds(**fields: float) -> float:
    """One request of a token: one step of one token."""
    return simulate([Arrival(1, 1)], SharedDeviceCost(step=1.0, token=0.5, **fields)).seconds


def test_by_hand() -> None:
    assert seconds() == 1.5
    assert seconds(host=1.0) == 2.5
    assert seconds(workers=2) == 3.0  # its turn comes when the other has had its
    assert seconds(workers=2, host=1.0) == 3.0  # the host part lies in the other's turn
    assert seconds(workers=2, host=4.0) == 5.5  # the device waits


@pytest.mark.parametrize("fields", [{"workers": 0}, {"host": -1.0}, {"host": float("nan")}, {"step": -1.0}])
def test_what_is_no_cost_is_refused(fields: dict[str, float]) -> None:
    with pytest.raises(InvalidArgumentError):
        SharedDeviceCost(**fields)
