"""The rendezvous of a job's ranks: a thread of the native core inside the launcher."""
from typing import Any

from bagua_hvd.core import variables


class Rendezvous:
    """Listens from construction to close(); a context manager.

    Attributes:
        host, port: the address for HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT.

    Args:
        secret: bytes that every rank must know.
        host: numeric address to bind, or ports.EVERY_INTERFACE.
        port: None: the first free port of BAGUA_HVD_PORTS.
    Raises:
        RuntimeError: the native extension is not built, or the address is in use; the message says which.
    """

    def __init__(self, secret, host="127.0.0.1", port=None):
        # Imported late, so that baguarun answers --help, --version and --check-build without it.
        try:
            from bagua_hvd.core import native
        except ImportError as missing:
            raise RuntimeError(str(missing)) from None
        out = native.ffi.new("bhvd_rendezvous **")
        ports = variables.read("BAGUA_HVD_PORTS") if port is None else [port]
        native.call(native.lib.bhvd_rendezvous_create, host.encode(), ports[0], ports[-1], secret, len(secret), out)
        self._release, self._lib = native.ffi.release, native.lib
        self._native: Any = native.ffi.gc(out[0], native.lib.bhvd_rendezvous_destroy)
        self.host = host
        self.port = native.lib.bhvd_rendezvous_port(self._native)

    def rank_ended(self, rank, exit_code, scope=""):
        """Tells ranks that wait for this one in init(), now or later, that its process has ended. Until close().

        Args:
            scope: name of the rendezvous in which the process had this rank; "": any.
        """
        self._lib.bhvd_rendezvous_rank_ended(self._native, scope.encode(), rank, exit_code)

    def close(self):
        """Ends the thread and frees the port. Idempotent; dropping the last reference does the same."""
        native, self._native = self._native, None
        if native is not None:
            self._release(native)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
