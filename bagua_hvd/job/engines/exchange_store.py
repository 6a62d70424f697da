"""Rank 0's message for the others in torch's store at MASTER_ADDR:MASTER_PORT. The one module here that needs torch.

torchrun's agent keeps that store; where ranks were started with torch's variables and no agent, rank 0 does, until all
have met. The store does not authenticate those who connect: whoever reaches MASTER_PORT can read the message, as
whatever torch.distributed keeps there.
"""
import os
from datetime import timedelta

from bagua_hvd.job.engines.exchange_file import NoExchange


class StoreMessage:
    """A message in a store of torch's, under a key of its own."""

    def __init__(self, store, key):
        self._store = store
        self._key = key

    def send(self, message):
        """Rank 0: bytes for all others."""
        self._store.set(self._key, message)

    def receive(self, timeout):
        """The others: the bytes. NoExchange: there are none after the timeout."""
        try:
            return bytes(self._store.get(self._key))
        except RuntimeError as error:
            raise NoExchange(f"rank 0 left no message in torch's store within {timeout:g} s: did it call init()? "
                             f"({str(error).splitlines()[0]})") from None

    def close(self):
        """Rank 0, when all have received."""
        try:
            self._store.delete_key(self._key)
        except RuntimeError:    # a store that keeps what it has, or whose host is gone
            pass
        self._store = None


class StoreExchange(StoreMessage):
    """The store of the job.

    Args:
        placement: of this process, by torchrun or env. timeout: seconds.
    """

    def __init__(self, placement, timeout):
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
        if placement.engine == "torchrun" and not agent:
            raise NoExchange("torchrun keeps no store (TORCHELASTIC_USE_AGENT_STORE is not True)")
        try:
            from torch.distributed import TCPStore
        except ImportError:
            raise NoExchange("the store at MASTER_ADDR:MASTER_PORT needs torch") from None

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            # Several tenants: the script's own torch.distributed may use the same port.
            store = TCPStore(address, port, is_master=not agent and placement.rank == 0, wait_for_workers=False,
                             timeout=timedelta(seconds=timeout), multi_tenant=True)
        except RuntimeError as error:
            in_use = "EADDRINUSE" in str(error)
            why = "MASTER_PORT is in use on this host; set another one" if in_use else str(error).splitlines()[0]
            raise NoExchange(f"torch's store at {address}:{port}: {why}") from None
        # The agent's store outlives a restart of the ranks.
        super().__init__(store, f"bagua_hvd/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}")
