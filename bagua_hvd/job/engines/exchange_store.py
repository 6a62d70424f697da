"""Rank 0's message for the others, in a torch store. The only module here that needs torch.

torchrun's agent keeps such a store. If the ranks have torch's variables but no agent, rank 0 keeps the store until all
ranks are connected. The store does not authenticate clients: any process that reaches MASTER_PORT can read the message,
like all data of torch.distributed there.
"""
import os
import time
import uuid
from contextlib import suppress
from datetime import timedelta
from typing import Any

from bagua_hvd.job.engines.detect import number, wrong
from bagua_hvd.job.engines.exchange_file import ExchangeUnavailable

_POLL_SECONDS = 0.005, 0.1          # first, last


def attempt(store: Any, rank: int, size: int, seconds: float) -> Any:
    """A part of the store, empty at first, for this attempt of the ranks to connect; all of them call this.

    A store keeps data of earlier attempts: torchrun's agent has one store for all restarts, and a destroyed group may
    be made again. So rank 0 chooses a new name for each attempt. A rank asks for it under a key that is new, too; rank
    0 responds to every request, also from dead ranks of earlier attempts, until all ranks confirm the name.

    Raises:
        RuntimeError: a rank did not call within `seconds`.
    """
    from torch.distributed import PrefixStore

    if size == 1:
        return store
    if rank == 0:
        name = f"bagua_hvd/{uuid.uuid4().hex}"
        _respond(store, name, set(range(1, size)), seconds)
        return PrefixStore(name, store)
    asked = uuid.uuid4().hex
    store.set(f"bagua_hvd/ask/{rank}", asked)
    try:
        store.wait([f"bagua_hvd/answer/{asked}"], timedelta(seconds=seconds))
    except RuntimeError as error:
        raise RuntimeError(f"rank 0 left no message in torch's store within {seconds:g} s: did it call init()? "
                           f"({str(error).splitlines()[0]})") from None
    name = store.get(f"bagua_hvd/answer/{asked}").decode()
    store.set(f"{name}/has/{rank}", "")
    return PrefixStore(name, store)


def _respond(store, name, missing, seconds):
    deadline, pause = time.monotonic() + seconds, _POLL_SECONDS[0]
    responded: dict[int, str] = {}
    while True:
        for rank in sorted(missing):
            if store.check([f"bagua_hvd/ask/{rank}"]):
                asked = store.get(f"bagua_hvd/ask/{rank}").decode()
                if responded.get(rank) != asked:
                    store.set(f"bagua_hvd/answer/{asked}", name)
                    responded[rank] = asked
                elif store.check([f"{name}/has/{rank}"]):
                    missing.discard(rank)
        if not missing:
            return
        if time.monotonic() > deadline:
            named = f"rank{'s' * (len(missing) > 1)} {', '.join(map(str, sorted(missing)))}"
            raise RuntimeError(f"{named} left no message in torch's store within {seconds:g} s: did every rank call "
                               "init()?")
        time.sleep(pause)
        pause = min(2 * pause, _POLL_SECONDS[1])


class StoreMessage:
    """A message in a torch store, in a part made by attempt()."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def send(self, message: Any) -> None:
        """On rank 0: stores bytes for all others."""
        self._store.set("message", message)

    def receive(self, timeout: float) -> Any:
        """On other ranks: returns the bytes. ExchangeUnavailable: there are none after `timeout` seconds."""
        try:
            self._store.wait(["message"], timedelta(seconds=timeout))
        except RuntimeError as error:
            raise ExchangeUnavailable(f"rank 0 left no message in torch's store within {timeout:g} s: did it call "
                                      f"init()? ({str(error).splitlines()[0]})") from None
        return bytes(self._store.get("message"))

    def close(self) -> None:
        """On rank 0, once all ranks have received."""
        with suppress(RuntimeError):    # the store cannot delete, or its host is gone
            self._store.delete_key("message")
        self._store = None


def store_exchange(placement: Any, timeout: float) -> StoreMessage:
    """The message in the store of the job.

    Args:
        placement: of this process, by torchrun or env. timeout: seconds.
    Raises:
        ExchangeUnavailable, RuntimeError: there is no such store, or a rank did not connect.
        ValueError: MASTER_ADDR or MASTER_PORT is not set, or malformed.
    """
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    if placement.engine == "torchrun" and not agent:
        raise ExchangeUnavailable("torchrun keeps no store (TORCHELASTIC_USE_AGENT_STORE is not True)")
    try:
        from torch.distributed import TCPStore
    except ImportError:
        raise ExchangeUnavailable("the store at MASTER_ADDR:MASTER_PORT needs torch") from None

    address, port = os.environ.get("MASTER_ADDR"), number(os.environ, "MASTER_PORT", placement.engine)
    if not address:
        raise wrong(os.environ, "MASTER_ADDR", placement.engine)
    if not 0 < port < 1 << 16:
        raise wrong(os.environ, "MASTER_PORT", placement.engine)
    try:
        # multi_tenant: the script's own torch.distributed may use the same port.
        store = TCPStore(address, port, is_master=not agent and placement.rank == 0, wait_for_workers=False,
                         timeout=timedelta(seconds=timeout), multi_tenant=True)
    except RuntimeError as error:
        in_use = "EADDRINUSE" in str(error)
        why = "MASTER_PORT is in use on this host; set another one" if in_use else str(error).splitlines()[0]
        raise ExchangeUnavailable(f"torch's store at {address}:{port}: {why}") from None
    return StoreMessage(attempt(store, placement.rank, placement.size, timeout))
