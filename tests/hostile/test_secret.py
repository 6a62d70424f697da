"""Only the user's own processes can see a job's secret: no process list, log or file of others contains it."""
import os
import re
import stat
import subprocess
import sys
import threading
from base64 import b64decode
from pathlib import Path

import pytest

from launcher import wait_until

pytestmark = pytest.mark.timeout(120)
HERE = Path(__file__).parent
# All output options at their most verbose, into the launcher's folder.
VERBOSE = ["--verbose", "--log-level", "TRACE", "--output-filename", "logs", "--timeline-filename", "timeline.json"]


def environment_of(pid):
    return dict(each.split(b"=", 1) for each in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0") if b"=" in each)


def forms_of(pid):
    """The forms in which the secret could be written, from a rank's environment."""
    text = environment_of(pid)[b"_HOROVOD_SECRET_KEY"]
    raw = b64decode(text)
    assert len(raw) >= 16
    return [text, raw, raw.hex().encode(), text.rstrip(b"=")]


def holds(data, forms):
    return any(form in data for form in forms)


def command_lines():
    """{pid: command line} of all processes."""
    found = {}
    for name in filter(str.isdigit, os.listdir("/proc")):
        try:
            found[int(name)] = Path(f"/proc/{name}/cmdline").read_bytes()
        except OSError:
            pass
    return found


def open_files(pids):
    """Paths of the regular files that these processes have open."""
    found = set()
    for pid in pids:
        for descriptor in os.scandir(f"/proc/{pid}/fd"):
            try:
                path = os.readlink(descriptor.path)
                if stat.S_ISREG(os.stat(path).st_mode):
                    found.add(Path(path))
            except OSError:
                pass
    return found


def files_of_others(pids, *folders):
    """Files that the processes have open or that are in the folders, and that other users may read."""
    found = open_files(pids)
    for folder in folders:
        found |= {path for path in folder.rglob("*") if path.is_file()}
    return [path for path in found if path.exists() and path.stat().st_mode & (stat.S_IRGRP | stat.S_IROTH)]


class Reader:
    """Collects a stream's output while it is written."""

    def __init__(self, stream):
        self.data = b""
        self._thread = threading.Thread(target=self._read, args=(stream,), daemon=True)
        self._thread.start()

    def _read(self, stream):
        while data := stream.read1(65536):
            self.data += data

    def join(self):
        self._thread.join(10)


@pytest.mark.parametrize("hosts", ["local", pytest.param("ssh", marks=pytest.mark.long)])
def test_the_secret_is_seen_by_nobody_else(launcher, request, hosts):
    environment, flags = {"TEST_STOP": str(launcher.folder)}, ["-np", 2]
    if hosts == "ssh":
        ssh_hosts = request.getfixturevalue("ssh_hosts")
        environment |= ssh_hosts.environment
        flags += ["-H", "far1:1,far2:1"]
    popen = launcher.start(*flags, *VERBOSE, sys.executable, "-u", HERE / "summing.py", env=environment)
    output, errors = Reader(popen.stdout), Reader(popen.stderr)
    wait_until(lambda: output.data.count(b"up first") == 2 or popen.poll() is not None, 60)
    assert popen.poll() is None, errors.data
    ranks = [int(pid) for pid in re.findall(rb"up first (\d+)", output.data)]
    forms = forms_of(ranks[0])
    assert forms_of(ranks[1]) == forms

    processes = [*launcher.processes(), *ranks]
    shown = command_lines()
    assert set(ranks) <= set(shown)
    assert [pid for pid, line in shown.items() if holds(line, forms)] == []
    # Only the environment contains it, which the kernel shows to the same user only.
    for pid in processes:
        assert stat.S_IMODE(os.stat(f"/proc/{pid}/environ").st_mode) == 0o400
    assert [path for path in files_of_others(processes, launcher.folder) if holds(path.read_bytes(), forms)] == []

    for name in ("first", "second"):
        (launcher.folder / name).touch()
    assert popen.wait(60) == 0, errors.data
    output.join()
    errors.join()
    assert output.data.count(b"right") == 2 * 2
    written = [path for path in launcher.folder.rglob("*") if path.is_file()]
    assert len([path for path in written if path.stat().st_size]) >= 2      # logs were written
    assert [path for path in written if holds(path.read_bytes(), forms)] == []
    assert not holds(output.data + errors.data, forms)


def test_an_error_does_not_say_the_secret(tmp_path):
    """The message repeats neither a wrong secret nor a malformed one."""
    for secret in ("bm90IHRoZSBzZWNyZXQ=", "not-base64-but-private!"):
        environment = {**os.environ, "HOROVOD_RANK": "0", "HOROVOD_SIZE": "2", "HOROVOD_LOCAL_RANK": "0",
                       "HOROVOD_LOCAL_SIZE": "2", "HOROVOD_CROSS_RANK": "0", "HOROVOD_CROSS_SIZE": "1",
                       "HOROVOD_GLOO_RENDEZVOUS_ADDR": "127.0.0.1", "HOROVOD_GLOO_RENDEZVOUS_PORT": "1",
                       "HOROVOD_START_TIMEOUT": "2", "_HOROVOD_SECRET_KEY": secret,
                       "TEST_STOP": str(tmp_path)}
        done = subprocess.run([sys.executable, str(HERE / "summing.py")], env=environment, capture_output=True,
                              timeout=60)
        assert done.returncode != 0 and (b"Error" in done.stderr or b"InitializationFailed" in done.stderr)
        assert secret.encode() not in done.stdout + done.stderr
