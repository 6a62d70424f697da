"""An elastic job under baguarun, with names of this machine as hosts, and a discovery that a test can change."""
import os
import re
import signal
import sys
import threading
from collections import namedtuple

from launcher import wait_until

Event = namedtuple("Event", "source name words")
_LINE = re.compile(r"\[(\d+)\]<(\w+)>:(.*)")


def with_rank(events, rank):
    """This rank's first event. The ranks' output is in no order."""
    return next(event for event in events if event.words["rank"] == str(rank))


class ElasticJob:
    """Starts baguarun through a Launcher. The discovery finds `hosts`, {name: slots}; None: it fails.

    Args:
        launcher: Launcher. hosts: initial ones.
    Attributes:
        output: all lines so far, of baguarun's stdout and stderr.
    """

    def __init__(self, launcher, hosts):
        self._launcher = launcher
        self._file = launcher.folder / "hosts"
        self.script = launcher.folder / "discover.sh"
        self.script.write_text(f"#!/bin/sh\ncat '{self._file}'\n")
        self.script.chmod(0o755)
        self._stop = launcher.folder / "stop"
        self.set_hosts(hosts)
        self.output = []
        self._popen = None

    def set_hosts(self, hosts):
        """Changes the discovery's result."""
        if hosts is None:
            self._file.unlink()
            return
        part = self._file.with_suffix(".part")
        part.write_text("".join(f"{name}:{slots}\n" for name, slots in hosts.items()))
        os.replace(part, self._file)

    def start(self, *flags, command, python=(sys.executable,), env=None, script=True, prefix=()):
        """Starts the job. command: a Python script and its arguments. prefix: see Launcher.start."""
        discovery = ["--host-discovery-script", self.script] if script else []
        env = {"TEST_STOP": str(self._stop), **(env or {})}
        self._popen = self._launcher.start(*discovery, *flags, *python, *command, env=env, prefix=prefix)
        self._threads = [threading.Thread(target=self._read, args=(file,), daemon=True)
                         for file in (self._popen.stdout, self._popen.stderr)]
        for thread in self._threads:
            thread.start()

    def _read(self, file):
        for line in file:
            self.output.append(line.decode(errors="replace").rstrip("\n"))

    @property
    def pid(self):
        """baguarun's pid."""
        return self._popen.pid

    def let_end(self):
        """Lets the workers end their training."""
        self._stop.touch()

    @property
    def events(self):
        """The events of the workers' lines `name key=value ...`, in output order."""
        found = []
        for line in list(self.output):
            match = _LINE.fullmatch(line)
            words = match[3].split() if match and match[2] == "stdout" else []
            if words and all("=" in word for word in words[1:]):
                found.append(Event(int(match[1]), words[0], dict(word.split("=", 1) for word in words[1:])))
        return found

    def of(self, name, **words):
        """The events with this name and these words."""
        wanted = {(key, str(value)) for key, value in words.items()}
        return [event for event in self.events if event.name == name and wanted <= set(event.words.items())]

    def wait_for(self, name, count=1, seconds=60, **words):
        """Waits for `count` events of this name, and returns them; see of()."""
        def found():
            assert self._popen.poll() is None or len(self.of(name, **words)) >= count, self.text
            events = self.of(name, **words)
            return len(events) >= count and events

        try:
            return wait_until(found, seconds)
        except AssertionError:
            raise AssertionError(f"no {count} times {name} {words} in:\n{self.text}") from None

    def wait_for_text(self, text, seconds=60):
        """Waits until a line of the output contains the text."""
        try:
            wait_until(lambda: text in self.text, seconds)
        except AssertionError:
            raise AssertionError(f"no {text!r} in:\n{self.text}") from None

    def committed(self):
        """The last step for which a worker's commit() has returned."""
        return max((int(event.words["step"]) for event in self.of("committed")), default=0)

    @property
    def text(self):
        return "\n".join(self.output)

    def signal(self, signum):
        """Sends a signal to baguarun."""
        self._popen.send_signal(signum)

    def kill(self, event):
        """Kills the process that printed the event."""
        os.kill(int(event.words["pid"]), signal.SIGKILL)

    def finish(self, seconds=60):
        """let_end(), then returns the exit code; checks that no process is left."""
        self.let_end()
        try:
            code = self._popen.wait(seconds)
        except Exception:
            raise AssertionError(f"the job does not end:\n{self.text}") from None
        for thread in self._threads:
            thread.join()
        assert self._launcher.processes() == [], self.text
        assert "Traceback" not in "\n".join(line for line in self.output if not _LINE.fullmatch(line)), self.text
        return code
