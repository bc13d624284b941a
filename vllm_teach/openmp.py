"""How long a thread of OpenMP waits for the others before it gives its core away. For processes to be started.

A step of a small model is a thousand short operations, between which Python works for microseconds. Threads that sleep
in between wake up late each time: on two cores of an AMD EPYC SmolLM2 then takes 27 ms a token instead of 19. Threads
that wait by spinning as long as OpenMP likes take a core from a server's event loop, or from whoever else is there.
Some microseconds of it are enough.
"""

from collections.abc import Mapping

WAIT_SHORTLY = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}
"""Of GNU's OpenMP, which PyTorch has on Linux, the second counts; others know the first alone, and sleep at once."""


def wait_shortly(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to `environment` before PyTorch is imported; none, if it has a say in this."""
    return {} if WAIT_SHORTLY.keys() & environment.keys() else dict(WAIT_SHORTLY)


def without_wait_shortly(environment: Mapping[str, str]) -> dict[str, str]:
    """Return `environment` without what `wait_shortly` adds, for a program of others; a user's own variables stay."""
    added = WAIT_SHORTLY.items() <= environment.items()
    return {name: value for name, value in environment.items() if not (added and name in WAIT_SHORTLY)}
