"""PyTorch's threads in this process, while ranks beside it compute on the same cores."""

from __future__ import annotations

import threading

import torch


class ThreadShares:
    """Who takes a share has PyTorch compute in fewer threads; the last to give back brings the usual number again."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_takers = 0
        self._usual = 0

    def take(self, parts: int) -> int:
        """Compute in one of `parts` parts of the usual threads, in one at least, and return how many these are."""
        with self._lock:
            if not self._num_takers:
                self._usual = torch.get_num_threads()
            self._num_takers += 1
            share = max(1, self._usual // parts)
            torch.set_num_threads(share)
            return share

    def give_back(self) -> None:
        """Take back one `take`; they may end in any order."""
        with self._lock:
            self._num_takers -= 1
            if not self._num_takers:
                torch.set_num_threads(self._usual)


SHARES = ThreadShares()  # PyTorch's number of threads is the process's, too
