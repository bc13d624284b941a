"""A port that is kept for a child process."""

from __future__ import annotations

import errno
import socket
import sys

from vllm_teach.errors import InvalidArgumentError


class ReservedPort:
    """A TCP port of `host` (`port`, or a free one for 0) that nobody else gets, however often its server starts anew.

    A free port that is only looked up can be someone else's a moment later. Here a socket is bound to it and never
    listens: as long as no child does either, connections are refused, and since both sockets set SO_REUSEADDR the child
    binds it, too. Only Linux allows that; on other systems the port is let go at once, and its number is a good guess.

    `addresses` are (address, port) pairs, several where `host` is a name with several addresses. Raises
    InvalidArgumentError when none of them can be bound.
    """

    def __init__(self, host: str, port: int = 0) -> None:
        self.addresses: list[tuple[str, int]] = []
        self._sockets: list[socket.socket] = []
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, address in dict.fromkeys((each[0], each[4][0]) for each in found):
                self._bind(family, str(address), self.port if self.addresses else port)
            if not self.addresses:
                raise OSError(errno.EADDRNOTAVAIL, "none of its addresses is this machine's")
        except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host looks like that
            self.close()
            reason = getattr(error, "strerror", None) or error
            raise InvalidArgumentError(
                f"port={port} of host={host!r} cannot be served on ({reason}): choose another."
            ) from error
        if sys.platform != "linux":
            self.close()

    @property
    def port(self) -> int:
        """The port's number."""
        return self.addresses[0][1]

    def close(self) -> None:
        """Let the port go; a child that listens on it goes on."""
        for each in self._sockets:
            each.close()

    def _bind(self, family: int, address: str, port: int) -> None:
        try:
            sock = socket.socket(family, socket.SOCK_STREAM)
        except OSError:  # the system has no IPv6
            return
        self._sockets.append(sock)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        try:
            sock.bind((address, port))
        except OSError as error:
            if error.errno != errno.EADDRNOTAVAIL:  # a name may have addresses that this machine lacks: ::1, say
                raise
            return
        self.addresses.append(sock.getsockname()[:2])
