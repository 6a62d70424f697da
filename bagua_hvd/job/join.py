"""Joins a job that another engine started: finds out the rendezvous and the secret.

Rank 0 makes the secret and hosts the rendezvous as long as it lives, since init() may be called again. The others learn
both from its message, and try its addresses.
"""
import atexit
import base64
import json
import os
import sys
import time
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from bagua_hvd.core import variables
from bagua_hvd.job import engines, probe
from bagua_hvd.job.channel import HOROVOD_SECRET_KEY, fill, make_secret_key
from bagua_hvd.job.environment import addresses_of, host_hash
from bagua_hvd.job.rendezvous import Rendezvous
from bagua_hvd.job.server import EVERY_INTERFACE

_AGAIN_SECONDS = 0.1
_CONNECT_SECONDS = 3


@dataclass(frozen=True)
class RendezvousInfo:
    """Rank 0's message to the others. secret: base64 text; "": every rank has it already. job: as in Placement."""

    port: int
    secret: str
    addresses: list[str]
    job: str | None


class _Stale(engines.ExchangeUnavailable):
    """Rank 0's message may be an earlier rank 0's."""


class Membership:
    """This process's membership in the job.

    Attributes:
        variables: the environment variables that baguarun would have set for init().
        scope: name of the rendezvous; None: derived from the number of init() calls, equal on all ranks of a job.
        spent: it was for one init() only, which is done: the next one may be in another group.

    Args:
        exchange: sends rank 0's message to the others; None: the first one available.
    """

    def __init__(self, placement: Any, timeout: float, exchange: Any = None) -> None:
        self.scope = "torch.distributed" if exchange else None
        self.spent = False
        self.variables = {"HOROVOD_RANK": str(placement.rank), "HOROVOD_SIZE": str(placement.size)}
        self._rendezvous: Any = None
        self._exchange: Any = None
        if placement.size == 1:
            return
        one_host = placement.local_size == placement.size
        exchange = exchange or _exchange(placement, one_host, timeout)
        # On every rank: a rank that skipped this error would wait for rank 0, which has failed with it.
        addresses = ["127.0.0.1"] if one_host else [*addresses_of(variables.read("HOROVOD_GLOO_IFACE")).values()]
        atexit.register(self.connected)
        if placement.rank == 0:
            self._exchange = exchange
            message = self._host("127.0.0.1" if one_host else EVERY_INTERFACE, addresses, placement.job)
            exchange.send(json.dumps(vars(message)).encode())
            address = addresses[0]
        else:
            message, address = _find_rank_0(exchange, placement.job, timeout)
        # A secret that the user gave to all ranks is better than one sent through the engine.
        self.variables.update({
            HOROVOD_SECRET_KEY: _given_secret() or message.secret,
            "HOROVOD_GLOO_RENDEZVOUS_ADDR": address, "HOROVOD_GLOO_RENDEZVOUS_PORT": str(message.port)})

    def _host(self, listen, addresses, job):
        given = _given_secret()
        secret = given or make_secret_key().decode()
        self._rendezvous = Rendezvous(base64.b64decode(secret), listen)
        # Before anything that waits for the other ranks, such as MPI_Finalize: they may wait for the rendezvous.
        atexit.register(self._rendezvous.close)
        return RendezvousInfo(self._rendezvous.port, "" if given else secret, addresses, job)

    def connected(self) -> None:
        """Call this when all ranks are connected: the message is no longer needed."""
        atexit.unregister(self.connected)
        self.spent = self.scope is not None
        if self.spent and self._rendezvous is not None:
            atexit.unregister(self._rendezvous.close)
            self._rendezvous.close()
        if self._exchange is not None:
            self._exchange.close()
        self._exchange = None


def _exchange(placement, one_host, timeout):
    """The first available exchange. ExchangeUnavailable: none is; BAGUA_HVD_EXCHANGE names the only one to try."""
    exchanges = {
        "store": lambda: engines.store_exchange(placement, timeout),
        "file": lambda: engines.FileExchange(placement.job, one_host),
        "mpi": lambda: engines.MpiExchange(placement),
    }
    wanted = variables.read("BAGUA_HVD_EXCHANGE")
    if wanted:
        order = [wanted]
    elif placement.engine in ("torchrun", "env"):
        order = ["store"]
    elif placement.engine == "slurm" and not any(
            name.startswith(("PMI_", "PMIX_", "PALS_", "I_MPI_PMI")) for name in os.environ):
        order = ["file"]        # srun --mpi=none: MPI_Init may abort the process
    else:
        # On one host the file needs no MPI and has no side effects.
        order = ["file", "mpi"] if one_host else ["mpi", "file"]
    reasons = []
    for kind in order:
        try:
            return exchanges[kind]()
        except engines.ExchangeUnavailable as error:
            reasons.append(f"{kind}: {error}")
    raise engines.ExchangeUnavailable(
        f"{placement.engine} started this process as rank {placement.rank} of {placement.size}, but rank 0 cannot send "
        f"the rendezvous address to the other ranks ({'; '.join(reasons)}): start the job by baguarun")


def _parse_rendezvous_info(content):
    """Decodes rank 0's message. ExchangeUnavailable: it is something else."""
    try:
        return fill(RendezvousInfo, json.loads(content))
    except ValueError as error:
        raise engines.ExchangeUnavailable(f"rank 0's message is not understood: {error}") from None


def _given_secret():
    """The secret in the environment, as base64 text; "" if there is none."""
    return base64.b64encode(variables.read(HOROVOD_SECRET_KEY)).decode()


def _find_rank_0(exchange, job, timeout):
    """(RendezvousInfo, rank 0's address as this host reaches it). Reads a message again that may be left over."""
    end = time.monotonic() + timeout
    while True:
        message = _parse_rendezvous_info(exchange.receive(max(0, end - time.monotonic())))
        try:
            if message.job != job:
                raise _Stale(f"rank 0's message is for the job {message.job}, and this is {job}")
            return message, _reached_address(message)
        except _Stale:
            if not getattr(exchange, "may_change", False) or time.monotonic() > end:
                raise
        time.sleep(_AGAIN_SECONDS)


def _reached_address(message):
    """The first address at which rank 0's rendezvous proves that it knows the secret: it still runs."""
    secret = base64.b64decode(_given_secret() or message.secret)
    try:
        with closing(probe.connect([[address, message.port] for address in message.addresses], secret,
                                   _CONNECT_SECONDS)) as connection:
            return connection.socket.getpeername()[0]
    except OSError as error:
        raise _Stale(f"this host reaches rank 0 at none of {', '.join(message.addresses)} ({error}): open the ports "
                     "between the hosts, or name the interface they share in HOROVOD_GLOO_IFACE") from None


def default_group() -> Any:
    """(store, rank, size) of torch.distributed's default group; None if this process has none. Imports nothing."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return None
    return distributed.distributed_c10d._get_default_store(), distributed.get_rank(), distributed.get_world_size()


def join(timeout: float) -> Any:
    """The Membership of this process in its torch.distributed group, or else in the job of the engine that started it.

    None: there is no such group, and no engine.

    Args:
        timeout: seconds to wait for rank 0.
    Raises:
        ValueError: malformed variables. ExchangeUnavailable, RuntimeError: the ranks cannot be connected.
    """
    group = default_group()
    if group is not None:       # before the environment: file://, Ray or a notebook may have made it
        store, rank, size = group
        return join_group(store, rank, size, timeout)
    placement = engines.detect()
    return None if placement is None else Membership(placement, timeout)


def join_group(store: Any, rank: int, size: int, timeout: float) -> Any:
    """The Membership of this process among the ranks that share a torch store; collective. As join()."""
    store = engines.attempt(store, rank, size, timeout)
    mine = host_hash()
    store.set(f"host/{rank}", mine)
    hosts = [store.get(f"host/{other}").decode() for other in range(size)]
    placement = engines.Placement("torch.distributed", rank, size, hosts.count(mine), None)
    return Membership(placement, timeout, engines.StoreMessage(store))
