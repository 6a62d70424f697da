"""A program that replaces ssh: every host name is this machine, without sshd. For the real one see SshHosts."""
from pathlib import Path

_HOST = "BAGUA_HVD_TEST_HOST"
# Called as `ssh option ... -- host command`.
_SCRIPT = f"""#!/bin/sh
[ -z "$TEST_SSH_REFUSES" ] || [ ! -e "$TEST_SSH_REFUSES" ] || {{ echo "ssh: Connection refused" >&2; exit 255; }}
while [ "$1" != -- ]; do shift; done
exec env {_HOST}="$2" /bin/sh -c "$3"
"""


class FakeSsh:
    """Like SshHosts.

    Args:
        launcher: Launcher.
    Attributes:
        environment: variables that make baguarun use it.
        refuses: a path; while this file exists, no host accepts connections.
    """

    def __init__(self, launcher):
        self._launcher = launcher
        program = launcher.folder / "fake_ssh"
        program.write_text(_SCRIPT)
        program.chmod(0o755)
        self.refuses = launcher.folder / "refuses"
        self.environment = {"BAGUA_HVD_SSH_COMMAND": str(program), "TEST_SSH_REFUSES": str(self.refuses)}

    def agent(self, host):
        """The pid of a host's agent."""
        return next(pid for pid in self._launcher.processes()
                    if f"{_HOST}={host}\0".encode() in Path(f"/proc/{pid}/environ").read_bytes()
                    and b"runner.ssh.agent" in Path(f"/proc/{pid}/cmdline").read_bytes())
