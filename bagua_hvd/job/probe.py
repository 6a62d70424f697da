"""Which addresses of a host others can reach, found by connecting. Needs nothing but Python's own modules.

Several hosts may have one address (a bridge for containers, loopback), so who answers must prove to be the host that is
meant: it returns HMAC(key, its name, the caller's nonce). The key is of one job and goes through ssh.
"""
import base64
import fcntl
import hmac
import math
import os
import selectors
import socket
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from bagua_hvd.job.ports import listen

_NONCE_NBYTES = 32
_SIOCGIFADDR = 0x8915
_TIMEOUT_SECONDS = 3
_PARALLEL = 64
_CALLERS_MAX = 256
_PAUSE_SECONDS = 0.01


def addresses(nics=None):
    """[[interface, its first IPv4 address], ...] of this host, loopback last; with `nics`, names, of these only."""
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

    Strangers who say nothing delay nobody: they are dropped after _TIMEOUT_SECONDS, or for a newer one.

    Args:
        host: the address to listen at; default all.
        ports: as for listen().
    Attributes:
        port.
    """

    def __init__(self, name, key, host="0.0.0.0", ports=None):
        self._name, self._key = name, key
        self._socket = listen(host, ports)
        self._socket.setblocking(False)
        self.port = self._socket.getsockname()[1]
        self._callers = {}          # connection -> (until when it may speak, its nonce so far), in the order they came
        self._closed = False
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ)     # not by the thread: close() may come first
        self._thread = threading.Thread(target=self._serve, name="probe", daemon=True)
        self._thread.start()

    def _serve(self):
        with self._selector as selector:
            while not self._closed:
                for key, _ in selector.select(_TIMEOUT_SECONDS):
                    if key.fileobj is self._socket:
                        self._accept(selector)
                    elif key.fileobj in self._callers and not self._listen_to(key.fileobj):
                        self._drop(selector, key.fileobj)
                now = time.monotonic()
                for connection in [each for each, (until, _) in self._callers.items() if until <= now]:
                    self._drop(selector, connection)
            for connection in list(self._callers):
                self._drop(selector, connection)

    def _accept(self, selector):
        try:
            connection, _ = self._socket.accept()
        except OSError:
            connection = None       # closed, or gone already, or out of descriptors: then one is given back
        if self._callers and (connection is None or len(self._callers) >= _CALLERS_MAX):
            self._drop(selector, next(iter(self._callers)))
        if connection is None:
            time.sleep(_PAUSE_SECONDS)
            return
        connection.setblocking(False)
        selector.register(connection, selectors.EVENT_READ)
        self._callers[connection] = (time.monotonic() + _TIMEOUT_SECONDS, b"")

    def _listen_to(self, connection):
        """Whether it may go on speaking."""
        until, nonce = self._callers[connection]
        try:
            data = connection.recv(_NONCE_NBYTES - len(nonce))
            self._callers[connection] = (until, nonce + data)
            if len(nonce + data) == _NONCE_NBYTES:
                connection.sendall(_proof(self._key, self._name, nonce + data))
                return False
        except OSError:
            return False            # a stranger, or one who went
        return bool(data)

    def _drop(self, selector, connection):
        selector.unregister(connection)
        del self._callers[connection]
        connection.close()

    def close(self):
        """Frees the port. Idempotent."""
        self._closed = True
        try:
            self._socket.shutdown(socket.SHUT_RDWR)     # wakes accept(), which close() alone does not
        except OSError:
            pass
        self._socket.close()
        self._thread.join()


class Requests:
    """What the launcher asks of each host, its own too, whose arguments and answers JSON can hold. Any thread."""

    def __init__(self):
        self._targets = {}          # key -> Target

    def listen(self, name, key, nics, ports):
        """Opens a Target; its port, and this host's addresses(nics). key: base64. ports: see bagua_hvd.job.ports."""
        target = self._targets[key] = Target(name, base64.b64decode(key), ports=ports)
        return {"port": target.port, "addresses": addresses(nics)}

    def reachable(self, targets, key, timeout):
        """See reachable()."""
        return reachable(targets, base64.b64decode(key), timeout)

    def stop_listening(self, key):
        """Closes the Target of that key, if there is one."""
        target = self._targets.pop(key, None)
        if target is not None:
            target.close()

    def close(self):
        """Closes all Targets."""
        for key in list(self._targets):
            self.stop_listening(key)


def _reaches(target, key, deadline):
    name, address, port = target
    nonce = os.urandom(_NONCE_NBYTES)
    proof = _proof(key, name, nonce)
    try:
        seconds = min(_TIMEOUT_SECONDS, max(0.001, deadline - time.monotonic()))
        with socket.create_connection((address, port), seconds) as connection:
            connection.sendall(nonce)
            return hmac.compare_digest(connection.recv(len(proof), socket.MSG_WAITALL), proof)
    except OSError:
        return False


def reachable(targets, key, timeout=math.inf):
    """Those of targets, [[name, address, port], ...], that this host reaches within a time, in their order."""
    deadline = time.monotonic() + timeout
    with ThreadPoolExecutor(_PARALLEL) as pool:
        reached = pool.map(lambda target: _reaches(target, key, deadline), targets)
        return [target for target, success in zip(targets, reached, strict=True) if success]
