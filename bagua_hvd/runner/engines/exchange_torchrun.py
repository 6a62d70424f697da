"""Rank 0's message for the others in the store that torchrun's agent keeps: the one module of runner that needs torch.

torchrun does not authenticate those who connect to its store: whoever reaches MASTER_PORT can read the message, as
whatever torch.distributed keeps there.
"""
import os
from datetime import timedelta

from bagua_hvd.runner.engines.exchange_file import NoExchange


class TorchrunExchange:
    """The store of the job that torchrun started this process for."""

    def __init__(self, timeout):
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() != "true":
            raise NoExchange("torchrun keeps no store (TORCHELASTIC_USE_AGENT_STORE is not True)")
        from torch.distributed import TCPStore

        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        try:
            self._store = TCPStore(address, port, is_master=False, timeout=timedelta(seconds=timeout))
        except RuntimeError as error:
            raise NoExchange(f"torchrun's store at {address}:{port}: {str(error).splitlines()[0]}") from None
        # The store outlives a restart of the ranks.
        self._key = f"bagua_hvd/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"

    def send(self, message):
        """Rank 0: bytes for all others."""
        self._store.set(self._key, message)

    def receive(self, timeout):
        """The others: the bytes. NoExchange: there are none after the timeout."""
        try:
            return bytes(self._store.get(self._key))
        except RuntimeError as error:
            raise NoExchange(f"rank 0 left no message in torchrun's store within {timeout:g} s: did it call init()? "
                             f"({str(error).splitlines()[0]})") from None

    def close(self):
        """Rank 0, when all have received."""
        self._store.delete_key(self._key)
