"""The port of a server, taken before anything else is imported or read."""

import errno
import socket
from ipaddress import ip_address

from atlas_core.vocab.errors import UsageError

_BACKLOG = 2048


def bind_socket(host: str, port: int) -> socket.socket:
    """A listening TCP socket; port 0 takes a free one. To be called before anything is read, so that a busy port fails at once.

    Raises UsageError when the address cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise UsageError(f"{host} is no address to listen on", str(error), "choose another with --bind") from error
    try:
        # Connections of the last run that linger must not keep the port; a server that listens on it still does.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        # Listening now makes the port ours: two sockets could both be bound, and the clash would show after loading.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} on {host} is in use",
                "another program listens on it",
                "stop it, or choose another with --port",
            ) from error
        raise UsageError(
            f"cannot listen on {host} port {port}", error.strerror or str(error), "choose others with --bind and --port"
        ) from error
    return listener


def url_of(listener: socket.socket, scheme: str = "http") -> str:
    """The URL to reach ``listener`` at from this machine."""
    host, port = listener.getsockname()[:2]
    if ip_address(host.partition("%")[0]).is_unspecified:
        host = "localhost"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def is_loopback(listener: socket.socket) -> bool:
    """Whether only this machine can reach ``listener``."""
    return ip_address(listener.getsockname()[0].partition("%")[0]).is_loopback
