"""Which addresses of a host others can reach, found by connecting. Needs nothing but Python's own modules.

Several hosts may have one address (a bridge for containers, loopback), so who answers must prove to be the host that is
meant: it returns HMAC(key, its name, the caller's nonce). The key is of one job and goes through ssh.
"""
import fcntl
import hmac
import os
import socket
import struct
import threading
from concurrent.futures import ThreadPoolExecutor

_NONCE_NBYTES = 32
_SIOCGIFADDR = 0x8915
_TIMEOUT_SECONDS = 3
_PARALLEL = 32


def addresses(nics=None):
    """[[interface, IPv4 address], ...] of this host, loopback last; with `nics`, a list of names, of these only."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            if nics and name not in nics:
                continue
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:
                continue    # none of IPv4
            found.append([name, socket.inet_ntoa(answer[20:24])])
    return sorted(found, key=lambda pair: pair[1].startswith("127."))


def _proof(key, name, nonce):
    return hmac.digest(key, name.encode() + b"\0" + nonce, "sha256")


class Target:
    """Answers those who try to reach this host, from construction to close().

    Attributes:
        port.
    """

    def __init__(self, name, key):
        self._name, self._key = name, key
        self._socket = socket.create_server(("0.0.0.0", 0), backlog=256)
        self.port = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._serve, name="probe", daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                connection, _ = self._socket.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(_TIMEOUT_SECONDS)
                try:
                    nonce = connection.recv(_NONCE_NBYTES, socket.MSG_WAITALL)
                    connection.sendall(_proof(self._key, self._name, nonce))
                except OSError:
                    pass    # a stranger, or one who went

    def close(self):
        """Frees the port. Idempotent."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)     # wakes accept(), which close() alone does not
        except OSError:
            pass
        self._socket.close()
        self._thread.join()


def _reaches(name, address, port, key):
    nonce = os.urandom(_NONCE_NBYTES)
    proof = _proof(key, name, nonce)
    try:
        with socket.create_connection((address, port), _TIMEOUT_SECONDS) as connection:
            connection.sendall(nonce)
            return hmac.compare_digest(connection.recv(len(proof), socket.MSG_WAITALL), proof)
    except OSError:
        return False


def reachable(targets, key):
    """Those of targets, [[name, address, port], ...], that this host reaches, in their order."""
    with ThreadPoolExecutor(_PARALLEL) as pool:
        reached = pool.map(lambda target: _reaches(*target, key), targets)
        return [target for target, success in zip(targets, reached, strict=True) if success]
