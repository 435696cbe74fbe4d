"""What a gateway process inherits from the supervisor of several."""

import socket

import msgspec


class OneOfMany(msgspec.Struct, frozen=True, kw_only=True):
    """One of several gateway processes that share their listening sockets."""

    number: int
    """From 1; a process that replaces another one has the same number."""
    customers: list[int]
    """File descriptors of the customers' sockets."""
    operators: list[int]
    """File descriptors of the operators' sockets."""
    metrics: str
    """Path of the supervisor's Unix socket for metrics."""


def inherited(descriptors: list[int]) -> list[socket.socket]:
    """Return the sockets of inherited descriptors, which no child of this process inherits."""
    sockets = [socket.socket(fileno=descriptor) for descriptor in descriptors]
    for each in sockets:
        each.set_inheritable(False)
    return sockets
