import torch

from vllm_teach.parallel.thread_share import ThreadShares


def test_the_last_brings_back_the_usual_threads_in_whichever_order_they_end() -> None:
    """As when a notebook's cell is run again: the new one begins before the old one ends."""
    torch.set_num_threads(4)
    shares = ThreadShares()
    assert (shares.take(2), torch.get_num_threads()) == (2, 2)
    assert (shares.take(3), torch.get_num_threads()) == (1, 1)
    shares.give_back()
    assert torch.get_num_threads() == 1
    shares.give_back()
    assert torch.get_num_threads() == 4
    assert (shares.take(8), torch.get_num_threads()) == (1, 1), "one at least"
    shares.give_back()
