"""What a gateway process inherits from the parent of several."""

import os
import socket

import msgspec


class OneOfMany(msgspec.Struct, frozen=True, kw_only=True):
    """One of several gateway processes that share their listening sockets."""

    number: int
    """From 1; a process that replaces another one has the same number."""
    customers: list[int]
    """File descriptors of the customers' sockets."""
    serving: int
    """File descriptor of a pipe to the parent."""

    def sockets(self) -> list[socket.socket]:
        """Return the customers' sockets, which no child of this process inherits."""
        sockets = [socket.socket(fileno=descriptor) for descriptor in self.customers]
        for each in sockets:
            each.set_inheritable(False)
        return sockets

    def report(self) -> None:
        """Report to the parent that this process serves."""
        os.write(self.serving, b".")
        os.close(self.serving)
