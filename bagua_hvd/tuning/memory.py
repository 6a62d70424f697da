"""The available memory of this host, so that no plan is chosen with state that would not fit."""
from contextlib import suppress
from pathlib import Path

UNKNOWN_MIB = 2**31 - 2
_MEMINFO, _LIMIT, _USED = (Path(path) for path in (
    "/proc/meminfo", "/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"))


def available_mib() -> int:
    """MiB that are available without swapping, according to the kernel, and within the container's limit."""
    found = [UNKNOWN_MIB]
    with suppress(OSError, KeyError, ValueError):
        lines = dict(line.split(":", 1) for line in _MEMINFO.read_text().splitlines())
        found.append(int(lines["MemAvailable"].split()[0]) >> 10)
    with suppress(OSError, ValueError):         # no container, or one without a limit: "max"
        found.append(max(0, int(_LIMIT.read_text()) - int(_USED.read_text())) >> 20)
    return min(found)
