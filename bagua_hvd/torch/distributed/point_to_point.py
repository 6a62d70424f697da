"""Messages between two ranks of a group: alltoalls of a two-rank process set, requested with their first message.

A message's name contains the sender, the receiver, the tag, and the number of earlier messages with these. So messages
with one tag arrive in order, and those with different tags match in any posting order. Messages of SMALL bytes at most
carry their size. Larger ones are received directly into the caller's tensor, so both sides must give the same size.

A receive from any rank posts a receive for the next message of every rank. Those not taken stay posted for later calls,
with the size of the first. So a tag that is received from any rank must have small messages only, or one size.
"""
import functools
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from bagua_hvd.collectives import rules
from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.core.operations import Posted
from bagua_hvd.job import process_sets
from bagua_hvd.torch.distributed.works import Awaited, ended_within
from bagua_hvd.torch.frontend import frontend

SMALL = 1 << 16


class Transfer:
    """One message. The future `pair` gives the id of the two-rank process set; `post` is called with it and returns the
    Operation. mismatch: what wait() says if the ranks gave different sizes."""

    def __init__(self, pair: Future, post: Any, mismatch: str) -> None:
        self._post = post
        self._mismatch = mismatch
        self._posted: Future[Posted] = Future()
        pair.add_done_callback(self._begin)

    def _begin(self, pair):
        try:
            self._posted.set_result(self._post(pair.result()))
        except Exception as error:
            self._posted.set_exception(error)

    def when_ended(self, callback: Callable[..., Any]) -> None:
        self._posted.add_done_callback(
            lambda posted: callback() if posted.exception() else posted.result().when_ended(callback))

    def ended_within(self, seconds: float) -> Any:
        # The time before posting counts, too.
        return ended_within(self._posted, seconds) and (
            self._posted.exception() is not None or self._posted.result().ended_within(seconds))

    def done(self) -> Any:
        return self._posted.done() and (self._posted.exception() is not None or self._posted.result().done())

    def wait(self) -> None:
        try:
            self._posted.result().wait()
        except HorovodInternalError as error:
            if error.status != native.ERR_MISMATCH:
                raise
            raise ValueError(f"{self._mismatch} (beyond {SMALL} bytes, both must give the same)") from None


class _Message(Transfer):
    """A message that is received into a flat tensor. `source`: rank in the group."""

    def __init__(self, pair, post, source, tensor, small):
        self.source = source
        self.tensor = tensor
        self._small = small         # (view, tensor) if the core allocates the result; None: `tensor` has it
        super().__init__(pair, post, f"recv of {tensor.nbytes} bytes, but rank {source} sent another size")

    def take(self, into=None):
        """Copies the message, which has arrived, to its destination. ValueError: it has another size."""
        into = self.tensor if into is None else into
        if self._small is None:
            if into is not self.tensor:
                _check_size(self.source, self.tensor, into)
                into.copy_(self.tensor)
            return
        view, like = self._small
        [message] = rules.results(frontend, self._posted.result(), [view], [like])
        _check_size(self.source, message, into)
        into.view(torch.uint8).copy_(message)


def _check_size(source, message, into):
    if message.nbytes != into.nbytes:
        raise ValueError(f"recv of {into.nbytes} bytes, but rank {source} sent {message.nbytes}")


class _QueuedReceive(Awaited):
    """A receive that takes a message posted for any call: from `source`, or with -1 from the rank that sends first."""

    def __init__(self, tensor, source, tag):
        self.source, self.tag = source, tag
        self.tensor = tensor
        self._given: Future[_Message] = Future()
        super().__init__(self._given)

    def give(self, message):
        self.source = message.source
        self._given.set_result(message)

    def wait(self):
        super().wait().wait()

    def take(self):
        self._given.result().take(self.tensor)


class PointToPoint:
    """The messages of one group.

    Args:
        key: of the group, equal on its ranks. rank, ranks: as in Group. id: of its process set.
    """

    def __init__(self, context: Any, key: Any, rank: int, ranks: Any, id: int) -> None:
        self._context, self._key, self._rank, self._ranks = context, key, rank, ranks
        self._numbers: dict[tuple[int, int, int], int] = {}  # number of the next message by (sender, receiver, tag)
        self._open: dict[tuple[int, int], _Message] = {}    # posted for any call and not taken, by (sender, tag)
        self._queue: list[_QueuedReceive] = []      # those without a message, in the order of calls
        self._lock = threading.RLock()
        self._itself: Future[int] | None = None
        if len(ranks) == 2:
            self._itself = Future()
            self._itself.set_result(id)

    def _pair(self, rank, speculative=False):
        if self._itself is not None:
            return self._itself
        return process_sets.ask_among_members(self._context, sorted((self._ranks[self._rank], self._ranks[rank])),
                                              speculative)

    def _check(self, rank, verb):
        if not 0 <= rank < len(self._ranks) or rank == self._rank:
            raise ValueError(f"rank {self._rank} of {len(self._ranks)} cannot {verb} rank {rank}")

    def _name(self, sender, receiver, tag):
        """Name of the next message. One number per (sender, receiver, tag) stays for ever, and nothing else."""
        with self._lock:
            number = self._numbers.get((sender, receiver, tag), 0)
            self._numbers[sender, receiver, tag] = number + 1
        return f"c10d.{self._key}.{sender}-{receiver}.{tag}.{number}"

    def send(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Starts to send a flat tensor. Returns a Transfer."""
        self._check(rank, "send to")
        small = tensor.nbytes <= SMALL
        rows = tensor.view(torch.uint8) if small else tensor.view(torch.uint8).unsqueeze(0)
        splits = [rows.shape[0], 0] if self._ranks[rank] < self._ranks[self._rank] else [0, rows.shape[0]]
        view = frontend.view(rows)
        name = self._name(self._rank, rank, tag)        # last: a message that fails has no number
        return Transfer(self._pair(rank), self._post(name, view, splits),
                        f"send of {tensor.nbytes} bytes, but rank {rank} receives another size")

    def _post(self, name, view, splits, speculative=False):
        """Makes a function that posts a message in this thread's stream order, given the id of the two-rank set."""
        stream = None if view.placement is None else view.placement.stream()

        def post(id):
            return self._context.post(native.ALLTOALL, name, [view], process_set=id, splits=splits, stream=stream,
                                      root_rank=2 * speculative)

        return post

    def _begin(self, rank, tag, tensor, speculative=False):
        """Starts to receive the next message from `rank`; a large one must be as large as the flat tensor."""
        small = None
        if tensor.nbytes > SMALL:
            view = frontend.view(tensor.view(torch.uint8).unsqueeze(0)[:0], tensor)
        else:
            like = tensor.new_empty(0, dtype=torch.uint8)
            view = frontend.view(like)
            small = view, like
        name = self._name(rank, self._rank, tag)
        return _Message(self._pair(rank, speculative), self._post(name, view, [0, 0], speculative), rank, tensor, small)

    def receive(self, tensor: torch.Tensor, rank: int, tag: int) -> Any:
        """Starts to receive into a flat tensor. Returns a message; call its take() at the end to store the data."""
        self._check(rank, "receive from")
        with self._lock:
            if (rank, tag) in self._open:
                return self._enqueue(tensor, rank, tag)
        return self._begin(rank, tag, tensor)

    def receive_any(self, tensor: torch.Tensor, tag: int) -> Any:
        """Starts to receive into a flat tensor from the rank that sends first. Returns a message with its `source`."""
        return self._enqueue(tensor, -1, tag)

    def _enqueue(self, tensor, source, tag):
        wanted = _QueuedReceive(tensor, source, tag)
        with self._lock:
            self._queue.append(wanted)
            self._post_queued(tag)
        return wanted

    def _first(self, rank, tag):
        """The queued receive that takes the next message from `rank`, or None."""
        return next((wanted for wanted in self._queue if wanted.tag == tag and wanted.source in (-1, rank)), None)

    def _post_queued(self, tag):
        """Keeps a message posted for every rank from which a queued receive takes one, and assigns arrived messages."""
        others = [rank for rank in range(len(self._ranks)) if rank != self._rank]
        for rank in others:
            wanted = self._first(rank, tag)
            if wanted is not None and (rank, tag) not in self._open:
                # In its own memory: the call that takes it may need the data elsewhere.
                message = self._open[rank, tag] = self._begin(rank, tag, torch.empty_like(wanted.tensor), True)
                message.when_ended(functools.partial(self._match, message, tag))
        for message in [self._open[rank, tag] for rank in others if (rank, tag) in self._open]:
            if message.done():
                self._match(message, tag)

    def _match(self, message: _Message, tag: int) -> None:
        """Gives a message that has arrived to a receive that waits for it."""
        with self._lock:
            wanted = self._first(message.source, tag)
            if wanted is None or self._open.get((message.source, tag)) is not message:
                return
            del self._open[message.source, tag]
            self._queue.remove(wanted)
            wanted.give(message)
            self._post_queued(tag)
