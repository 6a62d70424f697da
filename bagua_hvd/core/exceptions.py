"""The exceptions that scripts catch, under Horovod's names."""


class HorovodInternalError(RuntimeError):
    """A collective failed: ranks disagreed, one was lost, or the runtime has been shut down.

    `status` is the native status code, or None when Python raised it itself. Elastic jobs restore and retry.
    """

    status = None


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
