"""A Slurm with one node, this host, for one test: munged, slurmctld and slurmd in their own folder.

Needs root. The programs of Debian's packages slurmctld, slurmd, slurm-client and munge are found in PATH, or in the
folder SLURM_ROOT, into which they were unpacked (dpkg -x).
"""
import os
import secrets
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from ports import free_port

_CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ctld_port}
SlurmdPort={slurmd_port}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/ctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
{plugins}
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 State=UNKNOWN
PartitionName=all Nodes={host} Default=YES State=UP
"""
_START_SECONDS = 60


def programs():
    """{name: path} of the required programs; missing ones have no path."""
    root = os.environ.get("SLURM_ROOT", "")
    path = os.pathsep.join(f"{root}/usr/{folder}" for folder in ("sbin", "bin")) if root else os.pathsep.join(
        [os.environ["PATH"], "/usr/sbin"])
    names = {"munged": ["munged"], "slurmctld": ["slurmctld", "slurmctld-wlm"], "slurmd": ["slurmd", "slurmd-wlm"],
             "slurmstepd": ["slurmstepd", "slurmstepd-wlm"], "srun": ["srun"], "sinfo": ["sinfo"]}
    return {name: next(filter(None, (shutil.which(each, path=path) for each in names[name])), None) for name in names}


class Slurm:
    """Runs from construction to close().

    Args:
        folder: an empty one that only this user can access.
    Attributes:
        environment: variables for srun. srun: its path.
    """

    def __init__(self, folder):
        self._folder = Path(folder)
        self._programs = programs()
        self.srun = self._programs["srun"]
        self._processes = []
        root = os.environ.get("SLURM_ROOT", "")
        library = f"{root}/usr/lib/x86_64-linux-gnu"
        self.environment = {"SLURM_CONF": str(self._folder / "slurm.conf")}
        if root:
            self.environment["LD_LIBRARY_PATH"] = f"{library}:{library}/slurm-wlm"
        host = socket.gethostname().split(".")[0]
        for name in ("state", "spool"):
            (self._folder / name).mkdir()
        (self._folder / "slurm.conf").write_text(_CONF.format(
            folder=folder, host=host, ctld_port=free_port(), slurmd_port=free_port(),
            plugins=f"PluginDir={library}/slurm-wlm" if root else ""))
        key = self._folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        try:
            self._start("munged", "--foreground", "--force", f"--key-file={key}", *(
                f"--{name}={folder}/munge.{name.split('-')[0]}" for name in ("socket", "pid-file", "log-file",
                                                                           "seed-file")))
            self._wait(lambda: (self._folder / "munge.socket").exists())
            self._start("slurmctld", "-D", "-c")
            self._start("slurmd", "-D", "-N", host, *(["-d", self._programs["slurmstepd"]] if root else []))
            self._wait(lambda: "idle" in subprocess.run(
                [self._programs["sinfo"], "-h", "-o", "%T"], capture_output=True, text=True,
                env={**os.environ, **self.environment}).stdout)
        except BaseException:
            self.close()
            raise

    def _start(self, name, *arguments):
        with open(self._folder / f"{name}.out", "wb") as output:
            self._processes.append(subprocess.Popen(
                [self._programs[name], *arguments], env={**os.environ, **self.environment}, stdout=output,
                stderr=subprocess.STDOUT, start_new_session=True))

    def _wait(self, ready):
        limit = time.monotonic() + _START_SECONDS
        while not ready():
            ended = any(process.poll() is not None for process in self._processes)
            if ended or time.monotonic() > limit:
                said = "\n".join(f"{path.name}: {path.read_text()[-2000:]}" for path in self._folder.glob("*.out"))
                raise RuntimeError(f"Slurm has not started:\n{said}")
            time.sleep(0.2)

    def close(self):
        """Stops it."""
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for pid in self._steps():       # they outlive slurmd if it ends before a failed step is over
            os.kill(pid, signal.SIGKILL)

    def _steps(self):
        """The slurmstepd processes that this Slurm has started, recognized by their configuration."""
        mark = f"SLURM_CONF={self.environment['SLURM_CONF']}".encode()
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if b"slurmstepd" in (path / "cmdline").read_bytes() and mark in (path / "environ").read_bytes():
                    yield int(path.name)
            except OSError:
                pass        # it has ended
