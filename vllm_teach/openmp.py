"""How long a thread of OpenMP waits for the others before it gives its core away. For processes to be started.

A step of a small model is a thousand short operations, between which Python works for microseconds. Threads that sleep
in between wake up late each time: SmolLM2 then decodes 1.4 times as slowly. Threads that wait by spinning as long as
OpenMP likes take a core from a server's event loop, or from whoever else is there. Some microseconds of it are enough.
"""

from collections.abc import Mapping

WAIT_SHORTLY = {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "5000"}
"""Of GNU's OpenMP, which PyTorch has on Linux, the second counts; others know the first alone, and sleep at once."""


def wait_shortly(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables to add to `environment` before PyTorch is imported; none, if it has a say in this."""
    return {} if WAIT_SHORTLY.keys() & environment.keys() else dict(WAIT_SHORTLY)
