"""Server-sent events as they come: lines in, the data of each event out. Pure."""

from collections.abc import Iterable, Iterator


def event_data(lines: Iterable[bytes]) -> Iterator[str]:
    """The data of every event of a stream of ``lines``, which may end in LF or CRLF.

    Comments and fields other than ``data`` are passed over, as the format demands; several data lines of one event are joined
    by a newline. An event that the stream breaks off in is not given. Bytes that are no UTF-8 become U+FFFD.
    """
    data: list[str] = []
    for raw in lines:
        if not raw.endswith(b"\n"):
            return  # cut inside a line
        line = raw.rstrip(b"\r\n").decode("utf-8", errors="replace")
        if not line:
            if data:
                yield "\n".join(data)
                data = []
            continue
        name, _, value = line.partition(":")
        if name == "data":
            data.append(value.removeprefix(" "))
