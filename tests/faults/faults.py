"""The faults, one small function each, and the expected result: the job fails with a reason, or continues.

A function injects its fault into a running Job immediately; `victim` is a rank, `rng` a seeded numpy Generator. It
returns when the fault is in effect, or, if the job must continue, when it is over.
"""
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass

import worker
from job import SIZE, Settings

DEAD_SECONDS = 5            # maximum until the end of a process is known


@dataclass
class Fault:
    """One line of the table.

    Attributes:
        name: in the table. inject: the function.
        fails: every survivor must raise; otherwise the job must continue. names: a pattern for their messages, with
            {victim} as a number. within: seconds, from the job's limit. hosts: each rank on a host of its own.
        victim_survives: the victim must raise, too; it may name another rank.
        starts: the job begins before the fault. settings: function of (folder, limit, victim).
        undo: called after the survivors ended.
    """

    name: str
    inject: Callable
    fails: bool = True
    names: str = r"rank {victim}\b"
    within: Callable = lambda limit: DEAD_SECONDS
    hosts: bool = False
    victim_survives: bool = False
    starts: bool = True
    settings: Callable = lambda folder, limit, victim: Settings(limit)
    undo: Callable = lambda job, victim: None

    @property
    def needs_root(self):
        """Whether it makes hosts or mounts a disk, which only root may do."""
        return self.hosts or self.settings is full_disk


def _the_limit(limit):
    return limit


# ----------------------------------------------------------------------------------------------------- processes

def kill(job, victim, rng):
    job.signal(victim, signal.SIGKILL)


def stop(job, victim, rng):
    job.signal(victim, signal.SIGSTOP)


def resume(job, victim):
    job.signal(victim, signal.SIGCONT)


def pause(job, victim, rng):
    job.signal(victim, signal.SIGSTOP)
    time.sleep(rng.uniform(0, 0.4) * job.settings.limit)
    job.signal(victim, signal.SIGCONT)


def pause_all(job, victim, rng):
    """Like Ctrl-Z, in any order, and for longer than the limit."""
    for number, seconds in ((signal.SIGSTOP, 1.25 * job.settings.limit), (signal.SIGCONT, 0)):
        for rank in rng.permutation(SIZE):
            job.signal(int(rank), number)
        time.sleep(seconds)


def kill_while_others_wait(job, victim, rng):
    """The victim is computing, has requested nothing, and dies."""
    job.act(victim, worker.compute)
    time.sleep(rng.uniform(0.1, 0.5))
    job.signal(victim, signal.SIGKILL)


def stop_while_others_wait(job, victim, rng):
    job.act(victim, worker.compute)
    time.sleep(rng.uniform(0.1, 0.5))
    job.signal(victim, signal.SIGSTOP)


def acts(function):
    """A fault that the victim causes itself, with one of worker.ACTS."""
    def inject(job, victim, rng):
        job.act(victim, function)
    return inject


def be_slow(job, victim, rng):
    job.act(victim, worker.compute)
    time.sleep(1.25 * job.settings.limit)


def exhaust_memory(job, victim, rng):
    job.act(victim, worker.run_out_of_memory)
    while job.board.acts[victim] and not job.has_ended(victim):
        time.sleep(0.001)
    job.board.large[0] = 1


# ------------------------------------------------------------------------------------------------------- network

def cut(job, victim, rng):
    job.hosts[victim].down()


def lose_packets(job, victim, rng):
    job.hosts[victim].drop()


def lose_packets_of_a_pair(job, victim, rng):
    """Not the packets to or from rank 0, which would be another fault."""
    job.hosts[1].drop_to(job.hosts[2])
    job.hosts[2].drop_to(job.hosts[1])


def cut_for_a_moment(job, victim, rng):
    job.hosts[victim].down()
    time.sleep(rng.uniform(0.05, 0.2) * job.settings.limit)
    job.hosts[victim].mend()


def throttle(job, victim, rng):
    job.hosts[victim].limit("2mbit")
    job.wait_for_steps(10)
    time.sleep(job.settings.limit)
    job.hosts[victim].mend()


def mend(job, victim):
    for link in job.hosts:
        link.mend()


# -------------------------------------------------------------------------------------------------------- things

def full_disk(folder, limit, victim):
    """A disk of 64 KiB for the timeline."""
    disk = folder / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)], check=True)
    return Settings(limit, {"HOROVOD_TIMELINE": str(disk / "timeline.json")})


def fill_disk(job, victim, rng):
    """The timeline fills it."""
    disk = job.folder / "disk"
    while os.statvfs(disk).f_bavail and not job.has_ended(0):
        time.sleep(0.01)


def remove_disk(job, victim):
    subprocess.run(["umount", str(job.folder / "disk")], check=True)


def full_log(folder, limit, victim):
    """Every print of a rank fails: no space left on device. The stall check prints."""
    return Settings(limit, {"HOROVOD_STALL_CHECK_TIME_SECONDS": "1"}, output="/dev/full")


def few_descriptors(folder, limit, victim):
    return Settings(limit, {"HOROVOD_START_TIMEOUT": str(limit)}, descriptors={victim: 16})


def nothing(job, victim, rng):
    """The settings contain the fault."""


FAULTS = [
    Fault("SIGKILL", kill),
    Fault("SIGKILL, hosts", kill, hosts=True),
    Fault("SIGKILL while the others wait for it", kill_while_others_wait),
    Fault("SIGKILL, a forked child lives on", acts(worker.die_before_a_child)),
    Fault("exit code 0, without a goodbye", acts(worker.exit_abruptly)),
    Fault("exit code 0 in mid-training", acts(worker.exit_without_error)),
    Fault("an exception in the user's program", acts(worker.raise_an_error)),
    Fault("no memory for buffers", exhaust_memory),
    Fault("no memory for buffers, hosts", exhaust_memory, hosts=True),
    # A rank that lost its connection to the victim leaves, too, and a third rank may name that one.
    Fault("no descriptors in init()", nothing, within=lambda limit: limit + 1, starts=False, settings=few_descriptors,
          names="rank", hosts=True),
    Fault("SIGSTOP", stop, within=_the_limit, undo=resume, victim_survives=True),
    Fault("SIGSTOP, hosts", stop, within=_the_limit, undo=resume, victim_survives=True, hosts=True),
    Fault("SIGSTOP while the others wait for it", stop_while_others_wait, within=_the_limit, undo=resume,
          victim_survives=True),
    Fault("link down", cut, within=_the_limit, undo=mend, victim_survives=True, hosts=True),
    Fault("half-open: all packets dropped", lose_packets, within=_the_limit, undo=mend, victim_survives=True,
          hosts=True),
    Fault("half-open between two ranks", lose_packets_of_a_pair, within=_the_limit, undo=mend,
          victim_survives=True, hosts=True, names="rank"),
    Fault("SIGSTOP, SIGCONT", pause, fails=False),
    Fault("SIGSTOP, SIGCONT, hosts", pause, fails=False, hosts=True),
    Fault("the whole job stopped for longer than the limit", pause_all, fails=False),
    Fault("the whole job stopped for longer than the limit, hosts", pause_all, fails=False, hosts=True),
    Fault("link down for a moment", cut_for_a_moment, fails=False, hosts=True, undo=mend),
    Fault("link limited to 2 Mbit/s", throttle, fails=False, hosts=True, undo=mend),
    Fault("a rank computes for longer than the limit", be_slow, fails=False),
    Fault("a rank computes for longer than the limit, hosts", be_slow, fails=False, hosts=True),
    Fault("a rank forks", acts(worker.fork_a_child), fails=False),
    Fault("no descriptors", acts(worker.run_out_of_descriptors), fails=False),
    Fault("wall clock an hour ahead", acts(worker.jump_an_hour_ahead), fails=False),
    Fault("wall clock an hour back", acts(worker.jump_an_hour_back), fails=False),
    Fault("disk full for the timeline", fill_disk, fails=False, settings=full_disk, undo=remove_disk),
    Fault("disk full for the log", be_slow, fails=False, settings=full_log),
]
