"""The frames of a connection between the launcher and a host's agent: kind, number, length and payload.

The host's first bytes are MAGIC; output of a login shell before them is skipped. JSON payloads may hold text with
undecodable bytes (surrogates), as environments do.
"""
import enum
import json
import struct
from dataclasses import dataclass, is_dataclass
from typing import Any

MAGIC = b"\0bagua_hvd agent 1\n"
_HEAD = struct.Struct("!BII")
_PAYLOAD_MAX_NBYTES = 1 << 30


class Kind(enum.IntEnum):
    """Sender, meaning of the number, and payload of each kind."""

    BEGIN = 1           # launcher; Begin
    START = 2           # launcher, process; Start
    SIGNAL = 3          # launcher, process; signal number
    SIGNAL_ALL = 4      # launcher; signal number
    FINISH = 5          # launcher: end when no process runs any more; stop background processes
    PING = 6            # launcher: it lives
    REQUEST = 7         # launcher, request; [function's name, arguments]
    READY = 32          # agent, the response to BEGIN; Ready
    STDOUT = 33         # agent, process; bytes, none: closed
    STDERR = 34         # agent, process; as STDOUT
    EXIT = 35           # agent, process; exit code
    SAY = 36            # agent; bytes for the launcher's stderr
    RESPONSE = 37       # agent, request; result of the function
    REFUSAL = 38        # agent, request; why there is no result


@dataclass(frozen=True)
class Begin:
    """The payload of BEGIN. silence_seconds: after this time of silence the launcher is given up."""

    version: str
    folder: str
    silence_seconds: float


@dataclass(frozen=True)
class Start:
    """The payload of START. environment: in addition to the host's own."""

    command: list[str]
    environment: dict[str, str]


@dataclass(frozen=True)
class Ready:
    """The payload of READY. problem: why this host cannot start processes; None: it can. host_hash: of the machine."""

    problem: str | None
    host_hash: str


def pack(kind: Kind, number: int = 0, payload: Any = None) -> bytes:
    """The bytes of a frame. payload: bytes, one of the dataclasses above, or a JSON-serializable value."""
    if not isinstance(payload, bytes):
        payload = json.dumps(vars(payload) if is_dataclass(payload) else payload).encode()
    return _HEAD.pack(kind, number, len(payload)) + payload


class Reader:
    """Splits received bytes into frames. after_magic: whether to skip everything up to MAGIC."""

    def __init__(self, after_magic: bool = False) -> None:
        self._buffer = bytearray()
        self._skipping = after_magic

    def feed(self, data: bytes) -> list[tuple[Kind, int, bytes]]:
        """The frames that are now complete: (kind, number, payload as bytes). ValueError: not frames."""
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
