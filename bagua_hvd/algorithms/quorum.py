"""Outer steps with a quorum: a round of DiLoCo ends with the ranks that have arrived, and never waits long for others.

A server holds the outer parameters of each fragment: theta, m, and the round number r. All ranks connect to it.

    a rank that has made H steps    sends Delta_i, with r and w_i, its number of steps
    the first Delta_i of a round    makes the server ask the others, which send after their current step
    the round ends                  when all have sent, or grace_s after the quorum was reached
    all ranks that have sent        receive Delta = sum_i w_i Delta_i / sum_i w_i, make the same outer step as the
                                    server, and continue from theta' + their progress since they sent
    a rank that sends r too late    receives theta' and m', and continues from theta' + (x_i - theta) / 2: half of its
                                    progress is part of its next Delta_i

Rounds do not wait for a late or dead rank until it sends again. A new process makes one step, and restarts from theta
with the others' m, so processes may come and go without notice.

The server runs in rank 0, or in a process of its own, which outlives every rank and so the training: another training
of the same model would continue from the old theta, like a rank that returns. Start a new server for it. The server
refuses fragments of another size or dtype, and other settings. With a separate server, each rank may be its own job:

    export _HOROVOD_SECRET_KEY=$(openssl rand -base64 32)
    BAGUA_HVD_PORTS=29400 python -m bagua_hvd.runner.quorum_server      on node1
    export BAGUA_HVD_QUORUM_SERVER=node1:29400                      for each job

Wire: for a rank and round N up and N down, of codes if there is a codec; for the server n times as much. 2 N down for a
rank that is late or new.
Memory: N elements for a rank while they are in flight, 3 N for the server.
"""
import asyncio
import secrets
import threading
import time
import weakref
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np

from bagua_hvd.algorithms.fragments import Fragment, outer_step
from bagua_hvd.codecs import Codec
from bagua_hvd.collectives.objects import allgather_object
from bagua_hvd.core import variables
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.log import logger
from bagua_hvd.job import channel
from bagua_hvd.job.process_sets import ProcessSet
from bagua_hvd.job.runtime import runtime
from bagua_hvd.job.server import Server, join_address, split_address
from bagua_hvd.training.model import Model

_CONNECT_SECONDS = 30
_WARN_SECONDS = 60
# Share of a late rank's progress that is kept. With eight ranks, half of them late in each round, keeping all ended
# with 9 % more loss than none or half (tabular data, Adam); half still uses the data of a rank that is always late.
_LATE = 0.5


@dataclass(frozen=True)
class Enter:
    """A rank joins. theta and m follow; the server keeps the first ones. Later ranks must send equal fields.

    codec: the fields of a Codec; [] if there is none.
    """

    name: str
    nbytes: int
    dtype: str
    outer_lr: float
    outer_momentum: float
    codec: list[Any]


@dataclass(frozen=True)
class Contribution:
    """Delta_i follows. number: of the round. quorum: a number of ranks, or a share if below 1."""

    name: str
    nbytes: int
    number: int
    weight: float
    quorum: float
    grace_s: float


@dataclass(frozen=True)
class Response:
    """kind: "begun": a round has; "mean": its Delta follows; "state": theta and m of this round follow; "refused": the
    reason follows.
    """

    name: str
    kind: str
    number: int
    nbytes: int


def encoded(codec: Codec | None, values: np.ndarray) -> bytes:
    """The bytes to send for an array."""
    return (values if codec is None else codec.encode(values, secrets.randbits(63))).tobytes()


def decoded(codec: Codec | None, content: bytes, like: np.ndarray) -> np.ndarray:
    """The received bytes as an array of the dtype and size of `like`. ValueError: they do not fit."""
    values: np.ndarray = np.frombuffer(content, like.dtype, like.size) if codec is None else codec.decode(
        np.frombuffer(content, np.uint8), like.dtype, like.size)
    return values


class _Outer:
    """The outer parameters of one fragment, and its round. Only the server's thread uses it."""

    def __init__(self, message: Enter, content: bytes) -> None:
        self._first = message
        self._values: np.ndarray = np.frombuffer(content, message.dtype).reshape(2, -1).copy()
        self._codec = Codec(*message.codec) if message.codec else None
        self._number = 0
        self._quorum = self._grace_s = 0.0      # of the last contribution
        self._awaited: set[asyncio.StreamWriter] = set()
        self._begin()

    def _begin(self) -> None:
        self._arrived: dict[asyncio.StreamWriter, float] = {}       # with their weights
        self._sum = np.zeros_like(self._values[0])
        self._deadline: asyncio.TimerHandle | None = None

    def enter(self, writer: asyncio.StreamWriter, message: Enter) -> None:
        """Admits a rank, or refuses it."""
        here, there = vars(message), vars(self._first)
        differ = ", ".join(f"{name} is {there[name]!r} on the server and {here[name]!r} on this rank"
                           for name in here if here[name] != there[name])
        if differ:
            self._send([writer], "refused", differ.encode())
        else:
            self.welcome(writer)

    def welcome(self, writer: asyncio.StreamWriter) -> None:
        """Sends theta and m to a rank; rounds wait for it from now on."""
        self._awaited.add(writer)
        self._send([writer], "state", self._values.tobytes())
        if self._arrived:
            self._send([writer], "begun")

    def contribute(self, writer: asyncio.StreamWriter, message: Contribution, content: bytes) -> None:
        if message.number != self._number:
            self.welcome(writer)
            return
        self._awaited.add(writer)
        if not self._arrived:
            self._send(self._awaited - {writer}, "begun")
        self._sum += message.weight * decoded(self._codec, content, self._sum)
        self._arrived[writer] = message.weight
        self._quorum, self._grace_s = message.quorum, message.grace_s
        self._end_if_due()

    def leave(self, writer: asyncio.StreamWriter) -> None:
        self._awaited.discard(writer)
        self._end_if_due()

    def _end_if_due(self) -> None:
        """Ends the round once all have arrived, or, from the quorum on, after the grace period."""
        if not self._arrived:
            return
        if self._awaited <= self._arrived.keys():
            self._end()
            return
        quorum = self._quorum if self._quorum >= 1 else self._quorum * len(self._awaited)
        if len(self._arrived) >= quorum and self._deadline is None:
            self._deadline = asyncio.get_running_loop().call_later(self._grace_s, self._end)

    def _end(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        content = encoded(self._codec, self._sum / (sum(self._arrived.values()) or 1))
        theta, m = self._values
        outer_step(theta, m, decoded(self._codec, content, self._sum), self._first.outer_lr,
                   self._first.outer_momentum)
        self._send(self._arrived, "mean", content)
        self._awaited &= self._arrived.keys()
        self._number += 1
        self._begin()

    def _send(self, writers: Iterable[asyncio.StreamWriter], kind: str, content: bytes = b"") -> None:
        message = channel.encode(Response(self._first.name, kind, self._number, len(content))) + content
        for writer in writers:
            if not writer.is_closing():
                writer.write(message)


class QuorumServer(Server):
    """Serves the rounds of all fragments; see Server, and the module.

    Args:
        host: numeric address to bind.
    """

    def __init__(self, secret: bytes, host: str) -> None:
        self._outers: dict[str, _Outer] = {}
        super().__init__(secret, host, "quorum server")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handles the messages of one rank."""
        try:
            while line := await reader.readline():
                message = channel.decode(line, Enter, Contribution)
                content = await reader.readexactly(message.nbytes)
                if isinstance(message, Enter):
                    if message.name not in self._outers:
                        self._outers[message.name] = _Outer(message, content)
                    self._outers[message.name].enter(writer, message)
                elif message.name in self._outers:
                    self._outers[message.name].contribute(writer, message, content)
        finally:
            for outer in self._outers.values():
                outer.leave(writer)

    def close_anywhere(self) -> None:
        """Closes it from any thread: garbage collection may run in its own, which cannot wait for itself."""
        if threading.current_thread() is self._thread:
            self.loop.call_soon(self.loop.stop)
        else:
            self.close()


class _Link:
    """A rank's connection to the server; a thread receives.

    Attributes:
        begun: by fragment, the number of the last round that others have begun.
    """

    def __init__(self, address: str, secret: bytes) -> None:
        self._address = address
        try:
            self._connection = channel.Connection(*split_address(address), secret, _CONNECT_SECONDS)
        except (OSError, ValueError) as error:
            raise HorovodInternalError(f"the quorum server does not answer at {address}: {error}") from None
        self._news = threading.Event()
        self.begun: dict[str, int] = {}
        self._responses: dict[str, tuple[Response, bytes]] = {}
        self._ended = False
        threading.Thread(target=self._receive, name="quorum link", daemon=True).start()

    def _receive(self) -> None:
        with suppress(EOFError, OSError):
            while (message := self._connection.receive(Response)) is not None:
                content = self._connection.receive_content(message.nbytes)
                if message.kind == "begun":
                    self.begun[message.name] = message.number
                else:
                    self._responses[message.name] = message, content
                self._news.set()
        self._ended = True
        self._news.set()

    def send(self, message: Any, content: bytes) -> None:
        with suppress(OSError):         # response() reports the closed connection
            self._connection.send(message, content)

    def response(self, name: str) -> tuple[Response, bytes] | None:
        """Takes the server's response about a fragment; None: not yet, but perhaps one about another.

        Raises:
            HorovodInternalError: the server has ended. ValueError: it refuses this rank.
        """
        self._news.clear()      # before the check: what comes after it ends the wait
        if name not in self._responses and not self._ended:
            self._news.wait(1)
        if self._ended and name not in self._responses:     # in this order: no response follows the end
            raise HorovodInternalError(
                f"the quorum server at {self._address} has ended. If rank 0 hosted it, rank 0 must stay until "
                "the others finish: call hvd.consensus(model) on all ranks after training")
        response = self._responses.pop(name, None)
        if response is not None and response[0].kind == "refused":
            raise ValueError(
                f"the quorum server at {self._address} has other settings for {name}: {response[1].decode()}. All "
                "ranks need the same model and settings, and each training a quorum server of its own: start a new one")
        return response

    def close(self) -> None:
        self._connection.close()


class Part(Fragment):
    """A fragment, with this rank's state in its rounds.

    Attributes:
        number: of the round. age: steps since this rank last sent. steps: its steps that are in no round yet.
        sent: (number of steps, Delta_i) in flight; None if there is none.
    """

    number = age = steps = 0
    sent: tuple[int, np.ndarray] | None = None

    def receive(self, message: Response, content: bytes) -> None:
        """Takes the server's theta and m."""
        theta, m = self.outer()
        theta[:], m[:] = np.frombuffer(content, theta.dtype).reshape(2, -1)
        self.number = message.number


class QuorumRounds:
    """The rounds of one model, within one init(). Collective unless BAGUA_HVD_QUORUM_SERVER is set.

    Args:
        settings: a DiLoCo with a quorum.
    Raises:
        HorovodInternalError: the server cannot be reached. ValueError: it serves another training; if rank 0 hosts it,
            on all ranks.
    Attributes:
        stopped: this rank no longer takes part.
    """

    def __init__(self, settings: Any, model: Model) -> None:
        self._settings, fragments = settings, settings.fragments
        self._parts = [part for bucket in model.weights for p in range(fragments)
                       if (part := Part.of(bucket, p, fragments))]
        for part in self._parts:
            part.age = (fragments - part.p - 1) * settings.communication_interval // fragments
        self.stopped = False
        # A job with a single rank has no secret.
        secret = variables.read("_HOROVOD_SECRET_KEY") or runtime.options.secret or secrets.token_bytes()
        address = variables.read("BAGUA_HVD_QUORUM_SERVER")
        self._link = _Link(address or _hosted(self, secret, model.group), secret)
        weakref.finalize(self, self._link.close)
        refusal = ""
        try:
            self._is_new = self._enter()
        except ValueError as error:
            refusal = f"rank {model.group.rank()}: {error}"
        # No rank contributes before all have entered: it would be alone in the first round.
        refusals = [refusal] if address else allgather_object(refusal, "quorum entry", model.group)
        for refusal in filter(None, refusals):
            raise ValueError(refusal)

    def _enter(self) -> bool:
        """Takes theta and m from the server. Returns whether they differ from this rank's."""
        its, before = self._settings, [np.stack(part.outer()) for part in self._parts]
        for part, values in zip(self._parts, before, strict=True):
            self._link.send(Enter(part.x.name, values.nbytes, values.dtype.str, float(its.outer_lr),
                                  float(its.outer_momentum), list(its.codec or ())), values.tobytes())
        for part in self._parts:
            part.receive(*self._response(part))
        return not all(np.array_equal(values, part.outer()) for part, values in zip(self._parts, before, strict=True))

    def advance(self) -> None:
        """After a step.

        Raises:
            HorovodInternalError: the server has ended.
        """
        if self.stopped:
            return
        if self._is_new:        # its step did not start from theta
            self._is_new = False
            for part in self._parts:
                part.x.write(part.outer()[0])
            return
        for part in self._parts:
            part.age += 1
            part.steps += 1
        self._send_due()
        for part in self._parts:
            if part.sent is not None and part.age >= self._settings.overlap_steps:
                self._take(part, *part.sent)

    def leave(self) -> None:
        """Stops taking part."""
        self.stopped = True
        self._link.close()

    def _send_due(self) -> None:
        """Contributes to rounds that others have begun, or for which this rank has made H steps."""
        its = self._settings
        for part in self._parts:
            begun = part.age >= its.communication_interval or self._link.begun.get(part.x.name) == part.number
            if begun and part.sent is None:
                delta = part.outer()[0] - part.x.read()
                content, weight = encoded(its.codec, delta), float(part.steps)
                self._link.send(Contribution(part.x.name, len(content), part.number, weight, float(its.quorum or 0),
                                             float(its.grace_s)), content)
                part.sent, part.steps, part.age = (part.steps, delta), 0, 0

    def _response(self, part: Part) -> tuple[Response, bytes]:
        """Waits for the server's response about a fragment; meanwhile this rank contributes to the others."""
        warn_at = time.monotonic() + _WARN_SECONDS
        while (response := self._link.response(part.x.name)) is None:
            self._send_due()
            if time.monotonic() > warn_at:
                warn_at += _WARN_SECONDS
                logger.warning("an outer step of %s still waits for its quorum of %g. Ranks that have ended their "
                               "training must call optimizer.algorithm.abort()", part.x.name, self._settings.quorum)
        return response

    def _take(self, part: Part, steps: int, delta: np.ndarray) -> None:
        its, (message, content), (theta, m) = self._settings, self._response(part), part.outer()
        if message.kind == "state":
            found = part.x.read() - theta
            part.receive(message, content)
            part.x.write(theta + _LATE * found)
            part.steps = round(_LATE * (part.steps + steps))
        else:
            sent_at = theta - delta
            outer_step(theta, m, decoded(its.codec, content, theta), its.outer_lr, its.outer_momentum)
            part.number += 1
            if part.age == 0 and not its.mixing:
                part.x.write(theta)     # exactly
            else:
                part.x.add((1 - its.mixing) * (theta - sent_at))
        part.sent = None


def _hosted(owner: Any, secret: bytes, group: ProcessSet) -> str:
    """Starts a server on rank 0 of the group, while `owner` lives; returns its address on all ranks. Collective."""
    address = None
    if group.rank() == 0:
        server = QuorumServer(secret, runtime.options.listen_host)
        weakref.finalize(owner, server.close_anywhere)
        address = join_address(runtime.options.listen_host, server.port)
    return str(allgather_object(address, "quorum server", group)[0])
