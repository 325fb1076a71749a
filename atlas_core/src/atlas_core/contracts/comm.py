"""CommBackend: how ranks talk. Sums are in the buffers' own dtype; every call is capturable on its stream."""

from typing import Any, Protocol

from atlas_core.vocab.dtype import DType


class CommBackend(Protocol):
    """Collectives among ``world_size`` ranks. Counts are elements of ``dtype``; addresses are device addresses."""

    rank: int
    world_size: int

    def all_reduce(self, address: int, count: int, dtype: DType, stream: Any) -> None:
        """Sum over ranks, in place."""
        ...

    def all_gather(self, send: int, receive: int, count: int, dtype: DType, stream: Any) -> None:
        """``receive`` gets ``world_size * count`` elements, ordered by rank."""
        ...

    def reduce_scatter(self, send: int, receive: int, count: int, dtype: DType, stream: Any) -> None:
        """``receive`` gets this rank's ``count`` elements of the sum of ``send``."""
        ...

    def broadcast(self, address: int, count: int, dtype: DType, root: int, stream: Any) -> None:
        """Everybody gets what ``root`` has."""
        ...

    def send(self, address: int, count: int, dtype: DType, peer: int, stream: Any) -> None:
        """To ``peer``, which must receive. Raises DeviceError for a rank that does not exist."""
        ...

    def recv(self, address: int, count: int, dtype: DType, peer: int, stream: Any) -> None:
        """From ``peer``, which must send. Raises DeviceError for a rank that does not exist."""
        ...

    def barrier(self, stream: Any) -> None:
        """No rank's later work starts before every rank's earlier work is done."""
        ...

    def group_start(self) -> None:
        """Calls until ``group_end`` are issued as one."""
        ...

    def group_end(self) -> None:
        """Issue the group."""
        ...

    def healthy(self) -> bool:
        """False once a peer is lost; nothing but closing helps then."""
        ...
