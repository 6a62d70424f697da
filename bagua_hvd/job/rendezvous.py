"""The meeting point of a job's ranks: a thread of the native core inside the launcher."""


class Rendezvous:
    """Listens from construction to close(); a context manager.

    Attributes:
        host, port: the address for HOROVOD_GLOO_RENDEZVOUS_ADDR and _PORT.

    Args:
        secret: the bytes that every rank must prove to know.
        host: numeric IPv4 address to bind.
        port: 0: any free one.
    Raises:
        RuntimeError: the native extension is not built, or the address is in use; the sentence says which.
    """

    def __init__(self, secret, host="127.0.0.1", port=0):
        # Imported late, so that baguarun answers --help, --version and --check-build without it.
        try:
            from bagua_hvd._native import ffi, lib
        except ImportError as missing:
            raise RuntimeError(
                "the native extension of bagua_hvd is not built: run `pip install .` in the source folder of "
                f"bagua_hvd; a C compiler is needed (the import failed with: {missing})"
            ) from None
        out = ffi.new("bhvd_rendezvous **")
        error = ffi.new("struct bhvd_error *")
        if lib.bhvd_rendezvous_create(host.encode(), port, secret, len(secret), out, error) != lib.BHVD_OK:
            raise RuntimeError(ffi.string(error.message).decode("utf-8", "replace"))
        self._lib = lib
        self._native = out[0]
        self.host = host
        self.port = lib.bhvd_rendezvous_port(self._native)

    def rank_ended(self, rank, exit_code):
        """Ranks that wait for this one in init(), or will, hear at once that its process has ended. Until close()."""
        self._lib.bhvd_rendezvous_rank_ended(self._native, rank, exit_code)

    def close(self):
        """Ends the thread and frees the port. Idempotent."""
        native, self._native = self._native, None
        if native is not None:
            self._lib.bhvd_rendezvous_destroy(native)

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.close()
