"""One end of the two pipes between two processes, which can always be written to."""

from __future__ import annotations

import pickle
from queue import SimpleQueue
from threading import Thread
from typing import IO, Any


class MessagePipe:
    """Receives objects from `reader` and sends others to `writer`; both are its own from then on.

    Writing to a pipe that is full waits for whoever reads it: so a thread writes, and `send` never waits. What waits to
    be written is bounded by what the other side asked for.
    """

    def __init__(self, reader: IO[bytes], writer: IO[bytes]) -> None:
        self._reader, self._writer = reader, writer
        self._outbox: SimpleQueue[bytes | None] = SimpleQueue()
        self._broken = False
        self._thread = Thread(target=self._write, name="vllm-teach pipe", daemon=True)
        self._thread.start()

    def send(self, message: object) -> None:
        """Send `message`; what `pickle` raises comes out. Once the other side is gone nothing is sent."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        if not self._broken:
            self._outbox.put(data)

    def receive(self) -> Any:
        """Wait for a message and return it. Raises EOFError when the other side is gone. For one thread."""
        try:
            return pickle.load(self._reader)
        except (OSError, pickle.UnpicklingError) as error:  # as when it was killed in the midst of writing
            raise EOFError(str(error)) from error

    def flush(self) -> None:
        """Write what waits to be written; nothing can be sent afterwards."""
        self._outbox.put(None)
        self._thread.join()

    def close(self) -> None:
        """Flush, and close both pipes. Not while another thread is in `receive`."""
        self.flush()
        self._reader.close()

    def _write(self) -> None:
        try:
            with self._writer:
                while (data := self._outbox.get()) is not None:
                    self._writer.write(data)
                    self._writer.flush()
        except OSError:  # the other side is gone, which whoever receives here is told
            pass
        finally:
            self._broken = True
