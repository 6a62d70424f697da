"""The exceptions that scripts catch, under Horovod's names."""


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks disagreed, one was lost, or the runtime has been shut down.

    Elastic jobs restore and retry.

    Attributes:
        status: the native status code; None: Python raised it itself.
        rank: the global rank whose failure or leaving this is a consequence of; None: nobody's, or several ranks'.
        cause: what became of that rank. "ended": its process ended or became unreachable without leaving. "silent":
            nothing comes from it any more: it was stopped, or its host is gone. "left": it left the job. "failed": it
            failed itself, and said so. "timeout": it did not take its part in time. "protocol": it sent what makes no
            sense. None: no other rank is the cause.
    """

    status: int | None = None
    rank: int | None = None
    cause: str | None = None


class HostsUpdatedInterrupt(RuntimeError):
    """The hosts of an elastic job changed; the state is good.

    Args:
        skip_sync: True when hosts were only removed, so that the next `state.sync()` is not needed.
    """

    def __init__(self, skip_sync: bool) -> None:
        super().__init__("the hosts of the job were updated")
        self.skip_sync = skip_sync


def get_version_mismatch_message(name: str | None, version: str, installed_version: str) -> str:
    """The sentence of HorovodVersionMismatchError."""
    return (
        f"bagua_hvd has been compiled against {name} version {version}, but {installed_version} is installed. "
        f"Reinstall bagua_hvd, or install {name}=={version}."
    )


class HorovodVersionMismatchError(ImportError):
    """The installed framework is not the one that the extension was built for (never so with this core)."""

    def __init__(self, name: str | None, version: str, installed_version: str) -> None:
        super().__init__(get_version_mismatch_message(name, version, installed_version))
        self.name = name
        self.version = version
        self.installed_version = installed_version
