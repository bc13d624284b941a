"""The host's blocks: where whole sequences wait while others use the cache (Kwon et al. 2023, section 4.5)."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from vllm_teach.errors import InvalidArgumentError


class SwapSpace:
    """Counts the `num_blocks` equal blocks of the host's memory, 0 of them or more. Holds no tensors.

    Each used one belongs to one sequence alone: what was shared in the cache lies here once for each that went out.
    """

    def __init__(self, num_blocks: int) -> None:
        if num_blocks < 0:
            raise InvalidArgumentError(f"num_host_blocks={num_blocks} is not valid: give 0 (no swapping) or more.")
        self.num_blocks = num_blocks
        self._free = deque(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that no sequence uses."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that hold what was swapped out."""
        return self.num_blocks - len(self._free)

    def take(self, count: int) -> list[int]:
        """Take `count` host blocks. Raises InvalidArgumentError when fewer are free."""
        if count > self.num_free:
            raise InvalidArgumentError(
                f"count={count} is more than the {self.num_free} free host blocks: swap in first."
            )
        return [self._free.popleft() for _ in range(count)]

    def give(self, host_blocks: Iterable[int]) -> None:
        """Take back what `take` returned."""
        self._free.extend(host_blocks)
