"""What goes through a connection: frames of kind, number, length and payload.

The first bytes from the host are MAGIC; what a login shell prints before them is skipped. JSON payloads may hold text
with undecodable bytes (surrogates), as environments do.
"""
import enum
import json
import struct
from dataclasses import dataclass, is_dataclass

MAGIC = b"\0bagua_hvd agent 1\n"
_HEAD = struct.Struct("!BII")
_PAYLOAD_MAX_NBYTES = 1 << 30
PIECE_NBYTES = 1 << 24      # of a file


class Kind(enum.IntEnum):
    """Who sends it, what the number is, and the payload."""

    BEGIN = 1           # launcher; Begin
    START = 2           # launcher, process; Start
    SIGNAL = 3          # launcher, process; signal number
    SIGNAL_ALL = 4      # launcher; signal number
    FINISH = 5          # launcher: end when no process runs any more
    PING = 6            # launcher: is alive
    REQUEST = 7         # launcher, request; [function's name, arguments]
    PUT = 8             # launcher; bytes: name, zero byte, the next piece of a file
    GET = 9             # launcher, request; name of a file
    READY = 32          # agent, answers BEGIN; Ready
    STDOUT = 33         # agent, process; bytes, none: closed
    STDERR = 34         # agent, process; as STDOUT
    EXIT = 35           # agent, process; exit code
    SAY = 36            # agent; bytes for the launcher's stderr
    ANSWER = 37         # agent, request; what the function returned
    CONTENT = 38        # agent, request; bytes: the next piece of the file; none: it has ended
    REFUSAL = 39        # agent, request; why there is no answer


@dataclass(frozen=True)
class Begin:
    """The payload of BEGIN: the launcher's version, working directory and environment.

    silence_seconds: a launcher of which nothing came for so long is given up.
    """

    version: str
    folder: str
    environment: dict[str, str]
    silence_seconds: float


@dataclass(frozen=True)
class Start:
    """That of START. environment: what differs from BEGIN's; None: is not set."""

    name: str
    command: list[str]
    environment: dict[str, str | None]


@dataclass(frozen=True)
class Ready:
    """That of READY. problem: why this host cannot start processes; None: it can. host_hash: tells machines apart."""

    problem: str | None
    host_hash: str


def pack(kind, number=0, payload=None):
    """The bytes of a frame. payload: bytes, one of the dataclasses above, or what JSON can hold."""
    if not isinstance(payload, bytes):
        payload = json.dumps(vars(payload) if is_dataclass(payload) else payload).encode()
    return _HEAD.pack(kind, number, len(payload)) + payload


class Reader:
    """Cuts what arrives into frames.

    Args:
        after_magic: frames come after MAGIC only.
    """

    def __init__(self, after_magic=False):
        self._buffer = bytearray()
        self._skipping = after_magic

    def feed(self, data):
        """The frames that are complete now: (kind, number, payload as bytes). ValueError: these are no frames."""
        self._buffer += data
        if self._skipping:
            at = self._buffer.find(MAGIC)
            if at < 0:
                del self._buffer[:-len(MAGIC)]
                return []
            del self._buffer[:at + len(MAGIC)]
            self._skipping = False
        frames, start = [], 0
        while len(self._buffer) - start >= _HEAD.size:
            kind, number, nbytes = _HEAD.unpack_from(self._buffer, start)
            if nbytes > _PAYLOAD_MAX_NBYTES:
                raise ValueError(f"a frame of {nbytes} bytes")
            end = start + _HEAD.size + nbytes
            if len(self._buffer) < end:
                break
            frames.append((Kind(kind), number, bytes(self._buffer[start + _HEAD.size:end])))
            start = end
        del self._buffer[:start]
        return frames
