"""Bookkeeping of the simplest KV cache: each sequence reserves one contiguous run of slots for its whole life.

A slot holds the K and V of one token over all layers. A sequence that may grow to `prompt + max_tokens` tokens reserves
that many slots when it is admitted, as the systems before PagedAttention did (Kwon et al. 2023, section 3): slots
reserved and not yet written, or never written, serve no one. The utilisation figures show that waste.
"""

from __future__ import annotations

from dataclasses import dataclass

from vllm_teach.errors import InvalidArgumentError
from vllm_teach.kvcache.buddy import next_power_of_two

RESERVATIONS = ("max", "power_of_two", "oracle")


def reserved_slots(reservation: str, prompt_len: int, output_len: int, max_len: int) -> int:
    """Return how many slots a system without paging reserves for a request, by the rules the paper compares with.

    "max" reserves the `max_len` of the model, which every request may reach; "power_of_two" knows the next power of
    two of the output's true length, "oracle" that length itself, before it has been generated: Orca (Max), (Pow2) and
    (Oracle) of Kwon et al. 2023, section 6.1. No real system is better than the first without guessing.
    """
    if prompt_len < 1 or output_len < 1 or prompt_len + output_len > max_len:
        raise InvalidArgumentError(
            f"prompt_len={prompt_len}, output_len={output_len}: give at least 1 each, and at most max_len={max_len} "
            "together."
        )
    if reservation == "max":
        return max_len
    if reservation == "power_of_two":
        return min(prompt_len + next_power_of_two(output_len), max_len)
    if reservation == "oracle":
        return prompt_len + output_len
    raise InvalidArgumentError(f"reservation={reservation!r} is not known: give one of {', '.join(RESERVATIONS)}.")


@dataclass
class Reservation:
    """A run of `num_slots` slots from `first_slot` on, of which the first `num_stored` hold a token."""

    first_slot: int
    num_slots: int
    num_stored: int = 0


class ContiguousKVCacheManager:
    """Hands out contiguous runs of the slots `0 .. num_slots - 1`, first fit. Holds no tensors.

    `capacity_bytes` is the budget and `bytes_per_token` what one slot costs; `num_slots` is how many whole slots fit.
    """

    def __init__(self, capacity_bytes: int, bytes_per_token: int) -> None:
        if bytes_per_token < 1 or capacity_bytes < bytes_per_token:
            raise InvalidArgumentError(
                f"capacity_bytes={capacity_bytes} holds no token of {bytes_per_token} bytes: give the KV cache more."
            )
        self.bytes_per_token = bytes_per_token
        self.num_slots = capacity_bytes // bytes_per_token
        self._held: dict[int, Reservation] = {}

    def can_allocate(self, num_slots: int) -> bool:
        """Say whether a run of `num_slots` is free now. Changes nothing."""
        return any(length >= num_slots for _, length in self._free_runs())

    def allocate(self, seq_id: int, num_slots: int) -> Reservation:
        """Reserve a run of `num_slots` for `seq_id`, empty so far, from the first gap it fits in.

        Raises InvalidArgumentError if the sequence holds a run already or no gap is long enough: ask `can_allocate`.
        """
        if num_slots < 1 or seq_id in self._held:
            raise InvalidArgumentError(
                f"seq_id={seq_id} cannot reserve num_slots={num_slots}: a sequence reserves at least one slot, once."
            )
        for first, length in self._free_runs():
            if length >= num_slots:
                self._held[seq_id] = Reservation(first, num_slots)
                return self._held[seq_id]
        raise InvalidArgumentError(
            f"num_slots={num_slots} is longer than any free run (the longest is {self.longest_free_run}): "
            "wait until a sequence ends."
        )

    def store(self, seq_id: int, num_tokens: int) -> None:
        """Record that `num_tokens` more slots of `seq_id`'s run now hold a token.

        Raises InvalidArgumentError when the run is shorter than that.
        """
        held = self._held[seq_id]
        if held.num_stored + num_tokens > held.num_slots:
            raise InvalidArgumentError(
                f"num_tokens={num_tokens} does not fit behind {held.num_stored} of {held.num_slots} reserved slots: "
                "reserve more."
            )
        held.num_stored += num_tokens

    def free(self, seq_id: int) -> None:
        """Give back `seq_id`'s run, which joins the gaps beside it; a sequence that holds none is left alone."""
        self._held.pop(seq_id, None)

    def reservation(self, seq_id: int) -> Reservation:
        """Return what `seq_id` holds. Raises KeyError if it holds nothing."""
        return self._held[seq_id]

    @property
    def slots_held(self) -> int:
        """Slots reserved, written or not."""
        return sum(held.num_slots for held in self._held.values())

    @property
    def tokens_stored(self) -> int:
        """Slots that hold a token."""
        return sum(held.num_stored for held in self._held.values())

    @property
    def bytes_held(self) -> int:
        """Bytes reserved."""
        return self.slots_held * self.bytes_per_token

    @property
    def longest_free_run(self) -> int:
        """The longest reservation that could be made now, in slots."""
        return max((length for _, length in self._free_runs()), default=0)

    @property
    def usage(self) -> float:
        """The share of all slots that is reserved, 0 to 1."""
        return self.slots_held / self.num_slots

    @property
    def utilization(self) -> float:
        """Tokens stored / slots held: the share of the reserved memory that serves someone (1.0 if none is held)."""
        return self.tokens_stored / self.slots_held if self._held else 1.0

    def _free_runs(self) -> list[tuple[int, int]]:
        """Return the gaps (first slot, length) between the runs held, in order; none touches another.

        Computed from `_held` each time, so that the two can never disagree.
        """
        gaps, end = [], 0
        for held in sorted(self._held.values(), key=lambda held: held.first_slot):
            gaps.append((end, held.first_slot - end))
            end = held.first_slot + held.num_slots
        gaps.append((end, self.num_slots - end))
        return [(first, length) for first, length in gaps if length]
