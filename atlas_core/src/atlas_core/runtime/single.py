"""A CommBackend of one rank: every collective is already done."""

from typing import Any

from atlas_core.contracts.backend import GpuBackend
from atlas_core.vocab.dtype import DType
from atlas_core.vocab.errors import DeviceError


class SingleComm:
    """One rank alone. What would move between buffers is copied on the stream; there is nobody to send to."""

    rank = 0
    world_size = 1

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._groups = 0

    def all_reduce(self, address: int, count: int, dtype: DType, stream: Any) -> None:
        """The sum over one rank is what is there."""

    def all_gather(self, send: int, receive: int, count: int, dtype: DType, stream: Any) -> None:
        """Copies ``send`` unless it is ``receive``."""
        self._copy(send, receive, count, dtype, stream)

    def reduce_scatter(self, send: int, receive: int, count: int, dtype: DType, stream: Any) -> None:
        """Copies ``send`` unless it is ``receive``."""
        self._copy(send, receive, count, dtype, stream)

    def broadcast(self, address: int, count: int, dtype: DType, root: int, stream: Any) -> None:
        """Raises DeviceError unless ``root`` is 0."""
        if root != 0:
            raise _no_peer("broadcasts", root)

    def send(self, address: int, count: int, dtype: DType, peer: int, stream: Any) -> None:
        """Raises DeviceError: there is no other rank."""
        raise _no_peer("is sent to", peer)

    def recv(self, address: int, count: int, dtype: DType, peer: int, stream: Any) -> None:
        """Raises DeviceError: there is no other rank."""
        raise _no_peer("is received from", peer)

    def barrier(self, stream: Any) -> None:
        """Nobody to wait for."""

    def group_start(self) -> None:
        """Groups may nest."""
        self._groups += 1

    def group_end(self) -> None:
        """Raises DeviceError without a ``group_start``."""
        if not self._groups:
            raise DeviceError("a group of collectives is ended", "none was started")
        self._groups -= 1

    def healthy(self) -> bool:
        """There is no peer to lose."""
        return True

    def _copy(self, send: int, receive: int, count: int, dtype: DType, stream: Any) -> None:
        if send != receive and count:
            self._backend.copy_d2d_async(send, receive, count * dtype.itemsize, stream)


def _no_peer(verb: str, peer: int) -> DeviceError:
    return DeviceError(
        f"rank {peer} {verb}", "this process is rank 0 of 1", "run with as many ranks as the model was split for"
    )
