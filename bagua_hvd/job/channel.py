"""Messages between a launcher, or a compute service's registry, and the processes that it serves: authentication,
framing, and the dataclasses that they are.

    both ways     hello, 40 bytes: magic, version, nonce
    both ways     proof: HMAC-SHA256(secret, role || magic, version || port || own nonce || peer's nonce)
    accepting     admission, one byte: the server may have dropped this connection in a flood of strangers until then
    then          messages: JSON objects, one in a line of at most MESSAGE_MAX bytes: the dataclass's name in snake case
                  as `type`, and its fields. Received content is used only after it has been converted to its dataclass

The port (u32) is the accepting side's. As in native/transport/auth.h, roles tell the sides apart, so a reflected
message proves nothing; fresh nonces make a replayed one worthless; magic and port are in the proof, so it cannot be
forwarded to another port. Nothing else from a stranger is parsed. Later messages are not encrypted, and hold no secret.
"""
import base64
import hashlib
import hmac
import json
import re
import secrets
import socket
import types
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any, TypeVar, Union, get_args, get_origin, get_type_hints

from bagua_hvd.core import variables

HOROVOD_SECRET_KEY = "_HOROVOD_SECRET_KEY"      # environment variable of the secret by which processes authenticate
_SECRET_NBYTES = 32
Message = TypeVar("Message")


def make_secret_key() -> bytes:
    """A new secret: 32 random bytes, as base64 bytes that an environment variable can hold."""
    return base64.b64encode(secrets.token_bytes(_SECRET_NBYTES))


@dataclass(frozen=True)
class Hello:
    """First message of a process. worker: its number, or its rank. again: the connection replaces a broken one."""

    worker: int
    again: bool = False


def name_of(kind: type) -> str:
    """The `type` of a dataclass's messages."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])", "_", kind.__name__).lower()


def encode(message: Any) -> bytes:
    """Encodes a message, a dataclass, as a line."""
    return json.dumps({"type": name_of(type(message)), **vars(message)}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes, *kinds: type) -> Any:
    """Decodes a line as one of these dataclasses. ValueError: it is none of them; the message says why."""
    try:
        content = json.loads(line)
    except RecursionError:
        raise ValueError("not a message: nested too deeply") from None
    if not line.endswith(b"\n"):
        raise ValueError("not a message: incomplete line")
    by_name = {name_of(kind): kind for kind in kinds}
    name = content.pop("type", None) if isinstance(content, dict) else None
    if not isinstance(name, str) or name not in by_name:
        raise ValueError(f"a message of type {name!r}: expected {' or '.join(by_name)}")
    return fill(by_name[name], content)


def fill(kind: type[Message], content: Any) -> Message:
    """Makes a dataclass from a mapping with exactly its fields, of their types. ValueError: the mapping differs."""
    known = get_type_hints(kind)
    hints = {field.name: known[field.name] for field in fields(kind)}       # type: ignore[arg-type]
    if not isinstance(content, Mapping) or content.keys() != hints.keys():
        shown = sorted(map(str, content)) if isinstance(content, Mapping) else type(content).__name__
        raise ValueError(f"{name_of(kind)} with {shown}: expected {sorted(hints)}")
    for name, hint in hints.items():
        if not _fits(content[name], hint):
            raise ValueError(f"{name_of(kind)}: {name} is {content[name]!r:.100}: expected {hint}")
    return kind(**content)


def _fits(value, hint):
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in inner)
    if origin is dict:
        return type(value) is dict and all(_fits(k, inner[0]) and _fits(v, inner[1]) for k, v in value.items())
    if origin is list:
        return type(value) is list and all(_fits(one, inner[0]) for one in value)
    return hint is Any or type(value) is hint           # True is not an int


_MAGIC = b"BVHe\x04\0\0\0"
_NONCE_SIZE = 32
HELLO_SIZE = len(_MAGIC) + _NONCE_SIZE
PROOF_SIZE = hashlib.sha256().digest_size
ADMISSION = b"+"
MESSAGE_MAX = 1 << 16

CONNECTED, ACCEPTED = b"c", b"a"

_PROBE_SECONDS = 5
_NEVER_SECONDS = 1_000_000.0
_INT_MAX = 2**31 - 1


def silence_seconds(environ: Mapping[str, str] | None = None) -> float:
    """Seconds of silence after which launcher and hosts give each other up: later than the ranks' own limits.

    Twice those limits, because after a network cut TCP may wait as long again before it retransmits.
    """
    heartbeat = variables.read("BAGUA_HVD_HEARTBEAT_TIMEOUT_SECONDS", environ) or _NEVER_SECONDS
    return 2 * max(heartbeat, variables.read("HOROVOD_GLOO_TIMEOUT_SECONDS", environ)) + 10


def enable_keepalive(connection: socket.socket) -> None:
    """Makes the kernel end a TCP connection whose other host has not answered for longer than silence_seconds().

    A process that is merely stopped does not count as lost: its kernel answers.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", _PROBE_SECONDS), ("TCP_KEEPINTVL", _PROBE_SECONDS),
                        ("TCP_USER_TIMEOUT", min(int(1000 * silence_seconds()), _INT_MAX))):
        if hasattr(socket, name):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


class NotAuthenticated(ConnectionError):
    """The other side does not know the job's secret, or does not speak this protocol."""


class HungUp(NotAuthenticated):
    """The other side closed the connection during the handshake: it has another secret, or a flood of strangers."""


class Handshake:
    """One side of the handshake, without I/O: send `hello`; receive the peer's, send proof(); receive it, check() it.

    Args:
        role: CONNECTED or ACCEPTED. port: the accepting side's.
    """

    def __init__(self, secret: bytes, role: bytes, port: int) -> None:
        self._secret = secret
        self._role = role
        self._bound = _MAGIC + port.to_bytes(4, "little")
        self.hello = _MAGIC + secrets.token_bytes(_NONCE_SIZE)
        self._expected: Any = None

    def _proof_of(self, role, own, other):
        return hmac.digest(self._secret, role + self._bound + own[len(_MAGIC):] + other[len(_MAGIC):], "sha256")

    def proof(self, peer_hello: bytes) -> bytes:
        """The proof to send. NotAuthenticated: the peer speaks another protocol."""
        if not peer_hello.startswith(_MAGIC):
            raise NotAuthenticated("the other side does not speak this version of bagua_hvd's protocol: install the "
                                   "same version on every host")
        peer_role = ACCEPTED if self._role == CONNECTED else CONNECTED
        self._expected = self._proof_of(peer_role, peer_hello, self.hello)
        return self._proof_of(self._role, self.hello, peer_hello)

    def check(self, peer_proof: bytes) -> None:
        """NotAuthenticated: the peer has another secret, or connected to another port."""
        if not hmac.compare_digest(peer_proof, self._expected):
            raise NotAuthenticated(
                "the job's secret differs between the two sides, or a proxy forwards the port: check that "
                "_HOROVOD_SECRET_KEY is the same for every rank and the launcher, and not from an older job")


class Connection:
    """A process's connection to the launcher. One thread may call send() while another calls receive().

    Args:
        host, port: the launcher's. timeout: seconds for connecting and handshake.
    Attributes:
        socket: afterwards without a timeout; if one is set and expires, the connection cannot be used any more.
    Raises:
        OSError: nothing listens there. NotAuthenticated.
    """

    def __init__(self, host: str, port: int, secret: bytes, timeout: float) -> None:
        self.socket = socket.create_connection((host, port), timeout)
        try:
            self._file = self.socket.makefile("rb")
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            handshake = Handshake(secret, CONNECTED, port)
            self.socket.sendall(handshake.hello)
            self.socket.sendall(handshake.proof(self._exactly(HELLO_SIZE)))
            handshake.check(self._exactly(PROOF_SIZE))
            self._exactly(len(ADMISSION))
            self.socket.settimeout(None)
            enable_keepalive(self.socket)
        except BaseException:
            self.close()
            raise

    def _exactly(self, size):
        data = self._file.read(size)
        if len(data) < size:
            raise HungUp("the other side closed the connection during the handshake: does it have another "
                         "secret (_HOROVOD_SECRET_KEY)?")
        return data

    def send(self, message: Any, content: bytes = b"") -> None:
        """Sends a message and the bytes that follow it. OSError: the launcher has ended."""
        if content and hasattr(socket, "TCP_USER_TIMEOUT"):
            # Large content may wait as long as the launcher is suspended, which does not mean that it is lost.
            self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 0)
        self.socket.sendall(encode(message))
        self.socket.sendall(content)

    def receive(self, *kinds: type) -> Any:
        """The next message, one of these dataclasses; None if the launcher has ended or sent something else."""
        try:
            line = self._file.readline(MESSAGE_MAX)
            return decode(line, *kinds) if line else None
        except (OSError, ValueError):
            return None

    def receive_content(self, nbytes: int) -> bytes:
        """The bytes that follow a message. EOFError: the launcher has ended."""
        content = self._file.read(nbytes)
        if len(content) < nbytes:
            raise EOFError("the launcher of the job closed the connection")
        return content

    def close(self) -> None:
        """Closes the connection, even while another thread receives."""
        with suppress(OSError):         # not connected
            self.socket.shutdown(socket.SHUT_RDWR)
        self.socket.close()
