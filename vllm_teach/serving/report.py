"""What a server says of itself while it runs."""

import sys
from contextlib import suppress


def report(text: str) -> None:
    """Print a sentence on standard error. Where nobody can read it any more, the server goes on."""
    with suppress(OSError):
        print(f"vllm-teach: {text}", file=sys.stderr, flush=True)
