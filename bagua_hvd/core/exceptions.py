"""The exceptions that scripts catch, under Horovod's names."""


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks disagreed, one was lost, or the runtime has been shut down.

    Elastic jobs restore and retry, unless ranks disagreed.

    Attributes:
        status: the native status code; None: raised by Python code.
        rank: the global rank whose failure or departure caused this; None: no rank, or several.
        cause: what happened to that rank. "ended": its process ended or became unreachable without leaving. "silent":
            it sends nothing any more: it was stopped, or its host is gone. "left": it left the job. "failed": it
            reported a failure of its own. "timeout": it did not take part in time. "protocol": it sent invalid
            data. None: no other rank is the cause.
    """

    status: int | None = None
    rank: int | None = None
    cause: str | None = None


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed; the training state is intact.

    Args:
        skip_sync: True if hosts were only removed, so the next `state.sync()` is not needed.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job were updated")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str | None, version: str, installed_version: str) -> str:
    """The message of HorovodVersionMismatchError."""
    return (
        f"bagua_hvd has been compiled against {name} version {version}, but {installed_version} is installed. "
        f"Reinstall bagua_hvd, or install {name}=={version}."
    )


class HorovodVersionMismatchError(ImportError):
    """The installed framework is not the one that the extension was built for (never happens with this core)."""

    def __init__(self, name: str | None, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
