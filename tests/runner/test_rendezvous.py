import socket

import pytest

from bagua_hvd.job.rendezvous import Rendezvous


def test_listens_until_closed():
    with Rendezvous(b"secret") as rendezvous:
        assert rendezvous.host == "127.0.0.1" and rendezvous.port > 0
        socket.create_connection((rendezvous.host, rendezvous.port), timeout=5).close()
    rendezvous.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((rendezvous.host, rendezvous.port), timeout=5)


def test_port_in_use():
    with Rendezvous(b"secret") as first, pytest.raises(RuntimeError, match=str(first.port)):
        Rendezvous(b"secret", port=first.port)
