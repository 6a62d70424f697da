"""The rules of an elastic job: which workers run, when a rendezvous is held, who gets which rank, when the job ends.

A worker goes through these phases:

    STARTING    its process runs and has not called init()
    WAITING     it is in init(), until the driver assigns its rank
    RUNNING     it has a rank
    LEAVING     it was dismissed, is being stopped, or another worker failed on its host

and a job through generations, each of which begins with a rendezvous. It is held when all running workers that can
continue wait for it, and there are enough: then every member gets its rank and the name of the rendezvous. So

    a worker ends            the others notice by their connections, restore the last commit and call init(); those on
                             its host, which is not used any more, have a grace period to end by themselves
    a worker is silent       the others notice by heartbeats, call init(), and name it: it is killed, because a worker
                             that was suspended must not return when it is resumed; so is a worker that is cut off from
                             the others, although it calls init()
    a worker does not call   while others wait for the next rendezvous, it is sent a Ping. It is killed if it does not
    init()                   respond within start_timeout, since it is suspended; and after elastic_timeout in any case,
                             if there are enough others. So is a worker that keeps the others waiting for its
                             state.sync() after the rendezvous
    a host is taken away     rank 0 is notified; at the next commit all call init()
    a host is added          workers are started there; when they wait in init(), rank 0 is notified; at the next commit
                             all call init(). No worker waits for a process that is still starting, unless too few run

The first rendezvous waits up to start_timeout for all workers that were started.

This module knows no processes or connections: the driver acts through a crew (run.py), and receives events. All calls
come from one thread, which also calls step() after every event and now and then.
"""
import math
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from bagua_hvd.job.elastic_worker import Assignment, HostsUpdated, HostUpdateResult, Ping, Refused, Removed
from bagua_hvd.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE
from bagua_hvd.runner.elastic.discovery import HostManager
from bagua_hvd.runner.elastic.placement import Phase, Worker, assign, fit
from bagua_hvd.runner.elastic.settings import ElasticSettings
from bagua_hvd.runner.job import WorkerFailed
from bagua_hvd.runner.reports import first_cause
from bagua_hvd.runner.ssh.network import NoRoute

# News that arrives while a worker resets is dropped there, so it is repeated until it has led to a rendezvous.
_REPEAT_SECONDS = 1
_FAILED_RENDEZVOUS_MAX = 3
# After this process could not start a worker.
_NEXT_START_SECONDS = 10
# A worker that was dismissed may still have something to save.
_REMOVED_GRACE_SECONDS = 30

_KILLED = 128 + signal.SIGKILL
_NO_ROUTE = 255         # ssh's own exit code, as for hosts that cannot be reached

NO_HOSTS_LEFT = "No hosts from previous set remaining, unable to broadcast state."


@dataclass
class _Failure:
    """A failure of a member since the last rendezvous; before the first one, of any worker.

    rank: as in Worker. because_of: the rank that caused the failure.
    """

    rank: int | None
    because_of: int | None
    error: WorkerFailed


def _cause(failures):
    """The WorkerFailed of the failures' first_cause(); None: there is no failure."""
    if not failures:
        return None
    by_rank = {failure.rank: failure for failure in reversed(failures)}
    return by_rank[first_cause(failures[0].rank, {rank: failure.because_of for rank, failure in by_rank.items()})].error


class ElasticDriver:
    """One elastic job.

    Args:
        crew: carries out the driver's decisions, see Crew in run.py.
        rank_ended: function of (rank, exit code, name of its rendezvous): Rendezvous.rank_ended.
        clock: seconds.
        survivors_seconds: how long other workers of a host may continue after a failure there. 0: they are stopped.
    Attributes:
        finished: no worker is left, and none will be started.
        failure: the exception that the job ends with; None: none so far. Its cause, if workers failed since the last
            rendezvous, is the WorkerFailed of the first by cause, not by the end of its process.
        generation: number of rendezvous held so far.
    """

    def __init__(self, settings: ElasticSettings, hosts: HostManager, crew: Any,
                 rank_ended: Callable[[int, int | None, str], object], clock: Callable[[], float] = time.monotonic,
                 survivors_seconds: float = 0) -> None:
        self.finished = False
        self.failure: Exception | None = None
        self.generation = 0
        self._settings = settings
        assert settings.num_proc is not None and settings.min_num_proc is not None      # guaranteed by ElasticSettings
        self._num_proc, self._min_num_proc = settings.num_proc, settings.min_num_proc
        self._hosts = hosts
        self._crew = crew
        self._rank_ended = rank_ended
        self._clock = clock
        self._survivors_seconds = survivors_seconds
        self._workers: dict[int, Worker] = {}       # by number, while its process runs
        self._next_number = 0
        self._begun = False             # there were enough slots to begin once
        self._state_exists = False      # all members of a generation have had the job's state
        self._ending = False            # a member, or a worker before the first rendezvous, ended with 0
        self._failures: list[_Failure] = []
        self._last_loss = ""            # the message about the last failed worker
        self._failed_rendezvous = 0     # consecutive rendezvous that failed to connect without a failed member
        self._failed_starts = 0         # while no worker runs: workers that ended before they had a rank
        self._no_start_before = -math.inf   # this process lacks what it needs for one more worker
        self._waiting_since: float | None = None        # since when workers wait for slots or other workers
        self._host_changes: tuple[Any, int, float] | None = None        # (what, timestamp, when sent last)
        self._timestamp = 0

    # ---- events -------------------------------------------------------------------------------------------------

    def hosts_found(self, found: dict[str, int]) -> None:
        """Takes the hosts that the discovery found, {name: slots}."""
        self._hosts.take(found)

    def joined(self, number: int, skip_sync: bool = False, failure: str | None = None,
               silent: int | None = None) -> None:
        """A worker called init(); see elastic_worker.Join."""
        worker = self._workers.get(number)
        if worker is None:
            return
        if worker.phase is Phase.LEAVING:
            self._crew.send(number, Removed())
            return
        self._enter(worker, Phase.WAITING)
        worker.skip_sync, worker.failure, worker.silent, worker.respond_by = skip_sync, failure, silent, None

    def _kill_silent(self):
        """Kills the member that most others report as silent, once all members on other hosts have called init().

        A member that is cut off receives from none of the others, and may call init() before them. A member that has
        called init() is killed only if it reports a silent member, too. Reports about lost ranks do not count.
        """
        while True:
            members = {worker.rank: worker for worker in self._live() if worker.rank is not None}
            missed = Counter(worker.silent for worker in members.values() if worker.silent in members)
            hosts = {members[rank].host for rank in missed}
            if any(worker.phase is Phase.RUNNING and worker.host not in hosts for worker in members.values()):
                return
            silent = [rank for rank in missed
                      if members[rank].phase is Phase.RUNNING or members[rank].silent in members]
            if not silent:
                return
            self._kill(members[max(silent, key=lambda rank: (missed[rank], rank))], "did not respond")

    def _kill(self, worker, why):
        self._enter(worker, Phase.LEAVING)
        self._crew.stop(worker.number, grace_seconds=0)
        self._failed(worker, _KILLED, f"a worker on {worker.host} {why}, and was killed")

    def syncing(self, number: int) -> None:
        """A worker synchronizes its state: the others no longer wait for its script."""
        if number in self._workers:
            self._workers[number].syncs = True

    def synced(self, number: int) -> None:
        """A worker has synchronized its state. Ignored from a worker that is not in the present generation."""
        worker = self._workers.get(number)
        if worker is not None and worker.rank is not None:
            worker.has_state = True
            self._state_exists = self._state_exists or all(
                other.has_state for other in self._live() if other.rank is not None)

    def responded(self, number: int) -> None:
        """A worker has responded to a Ping."""
        worker = self._workers.get(number)
        if worker is not None and worker.respond_by is not None:
            worker.respond_by = math.inf

    def disconnected(self, number: int) -> None:
        """A connection broke: its worker no longer waits in init(), until it reconnects and repeats its join."""
        worker = self._workers.get(number)
        if worker is not None and worker.phase is Phase.WAITING:
            self._enter(worker, Phase.STARTING if worker.rank is None else Phase.RUNNING)

    def ended(self, number: int, exit_code: int | None, note: str | OSError | None = None,
              because_of: int | None = None) -> None:
        """A process has ended.

        Args:
            exit_code: None: this process could not start it. note: further information about its end, or then the
            OSError. because_of: the rank whose failure caused this one.
        """
        worker = self._workers.pop(number)
        if worker.rank is not None:
            self._rank_ended(worker.rank, exit_code, self._scope())
        if worker.phase is Phase.LEAVING:
            # It ended by itself, and may be the cause of the failure because of which it was leaving.
            if exit_code and worker.leave_by is not None:
                self._note_failure(worker, exit_code, note, because_of)
            return
        if exit_code is None:
            self._not_started(worker, note)
            return
        if exit_code == 0 and self._matters(worker):
            self._ending = True
            return
        if worker.phase is not Phase.RUNNING and worker.rank is None and not self._running():
            self._failed_starts += 1
        details = f" ({note})" if note else "" if exit_code else " before it had a rank"
        self._failed(worker, exit_code, f"a worker on {worker.host} ended with exit code {exit_code}{details}", note,
                     because_of)

    def _not_started(self, worker, error):
        """Ends a job that has not begun; else the next attempt is later. The worker's host is not to blame."""
        if self._ending:
            return
        if self.generation == 0:
            self._fail(error)
            return
        if self._clock() >= self._no_start_before:      # else said already, of another worker
            self._crew.say(f"baguarun: no worker can be started on {worker.host}: baguarun's own host lacks resources "
                           f"({error.strerror}); retrying in {_NEXT_START_SECONDS} s.")
        self._no_start_before = self._clock() + _NEXT_START_SECONDS

    def _failed(self, worker, exit_code, said, note=None, because_of=None):
        if worker.host not in self._hosts.current_hosts:
            self._crew.say(f"baguarun: {said}; its host is no longer in the list of hosts.")
            return
        self._note_failure(worker, exit_code, note, because_of)
        if self._ending:
            return
        self._hosts.blacklist(worker.host)
        for other in self._live():
            if other.host == worker.host:
                self._end_gracefully(other)
        self._last_loss = f" The last host was lost since {said}."
        self._crew.say(f"baguarun: {said}: the host is blacklisted.")

    def _matters(self, worker):
        """Whether its end counts for the job: it is a member, or there was no rendezvous yet."""
        return worker.rank is not None or self.generation == 0

    def _note_failure(self, worker, exit_code, note, because_of):
        if not self._matters(worker):
            return
        failure = WorkerFailed(worker.label, exit_code, f". {note}" if note else "", worker.number)
        self._failures.append(_Failure(worker.rank, because_of, failure))

    def _end_gracefully(self, worker):
        """Lets a worker of a host that is no longer used save something, unless it has not begun."""
        if worker.phase is Phase.WAITING:
            self._send_removed(worker, self._survivors_seconds)
        elif worker.phase is Phase.RUNNING and self._survivors_seconds:
            self._enter(worker, Phase.LEAVING)
            worker.leave_by = worker.since + self._survivors_seconds
        else:
            self._stop(worker)

    # ---- consequences -------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Takes all actions that are due."""
        if self.failure is not None:
            return
        self._kill_silent()
        if self._ending:
            self._end()
            return
        now = self._clock()
        hosts = self._hosts.current_hosts
        if not self._begun:
            self._begun = sum(hosts.values()) >= self._num_proc
        staying, places = self._fit(hosts)
        self._release_unplaced(staying, now)
        if self._begun and places and now >= self._no_start_before:
            self._start(places)
            staying, _ = self._fit(hosts)
        self._notify_host_changes(staying, now)
        self._hold_rendezvous(staying, hosts, now)
        self._give_up(staying, hosts, now)

    def _scope(self):
        """The name of the present rendezvous."""
        return f"elastic.{self.generation}"

    def _live(self):
        return [worker for worker in self._workers.values() if worker.phase is not Phase.LEAVING]

    def _running(self):
        return [worker for worker in self._workers.values() if worker.phase is Phase.RUNNING]

    def _enter(self, worker, phase):
        worker.phase = phase
        worker.since = self._clock()

    def _release_unplaced(self, staying, now):
        """Stops workers without a slot that have nothing to lose, and those whose time to leave is over.

        So is the time of a worker that was left out of a rendezvous, and has not called init() for elastic_timeout.
        """
        for worker in self._workers.values():
            left_out = worker.phase is Phase.RUNNING and not self._matters(worker)
            if worker.leave_by is not None and now > worker.leave_by:
                self._stop(worker)
            elif worker not in staying and left_out and now > worker.since + self._settings.elastic_timeout:
                self._stop(worker)
            elif worker not in staying and worker.phase is Phase.STARTING:
                self._stop(worker)
            elif worker not in staying and worker.phase is Phase.WAITING and worker.rank is None:
                self._send_removed(worker)

    def _fit(self, hosts):
        leaving = [worker for worker in self._workers.values() if worker.phase is Phase.LEAVING]
        return fit(self._live(), leaving, hosts, self._settings.max_num_proc)

    def _start(self, places):
        """Starts workers with the ranks that they are expected to get."""
        new = []
        for host in places:
            worker = Worker(self._next_number, host, self._clock())
            self._next_number += 1
            self._workers[worker.number] = worker
            new.append(worker)
        slots = assign(self._live(), list(self._hosts.current_hosts))
        for worker in new:
            worker.label = slots[worker].rank
            self._crew.start(worker.number, worker.host, slots[worker])

    def _stop(self, worker):
        self._enter(worker, Phase.LEAVING)
        worker.leave_by = None
        self._crew.stop(worker.number)

    def _send_removed(self, worker, seconds=_REMOVED_GRACE_SECONDS):
        """Tells a worker in init() that it has no slot; it ends by itself."""
        self._enter(worker, Phase.LEAVING)
        worker.leave_by = worker.since + seconds
        self._crew.send(worker.number, Removed())

    def _end(self):
        """Ends the job after a worker has finished. The others finish their work; no worker joins any more."""
        # Before the first rendezvous, workers may not need one.
        members = [worker for worker in self._live() if self._matters(worker)]
        self._release_unplaced(members, self._clock())
        if self._failures:      # the others may wait for one that is suspended
            self._ping(members, self._clock())
        for worker in members:
            if worker.phase is Phase.WAITING:
                self._enter(worker, Phase.RUNNING)
                self._crew.send(worker.number, Refused("Another worker has finished, which ended the job before "
                                                        "this one was done."))
        if not self._workers:
            self.finished = True
            self.failure = _cause(self._failures)

    def _notify_host_changes(self, staying, now):
        """Tells rank 0 which hosts were added or removed since the last rendezvous."""
        running = self._running()
        rank0 = next((worker for worker in running if worker.rank == 0), None)
        lost = frozenset(worker for worker in running if worker not in staying and worker.rank is not None)
        new = frozenset(worker for worker in staying if worker.phase is Phase.WAITING and not worker.has_state)
        if any(worker.phase is Phase.STARTING for worker in staying) and all(
                now < worker.since + self._settings.start_timeout for worker in new):
            new = frozenset()       # one rendezvous for all workers that are starting, if they do not take too long
        if rank0 is None or not (lost or new):
            return
        if self._host_changes is None or self._host_changes[0] != (lost, new):
            self._timestamp += 1
        elif now < self._host_changes[2] + _REPEAT_SECONDS:
            return
        self._host_changes = ((lost, new), self._timestamp, now)
        result = HostUpdateResult.removed * bool(lost) | HostUpdateResult.added * bool(new)
        self._crew.send(rank0.number, HostsUpdated(self._timestamp, result))

    def _hold_rendezvous(self, staying, hosts, now):
        """Holds a rendezvous, if possible."""
        if any(worker.phase is Phase.WAITING and worker.rank is not None for worker in staying):
            self._ping(staying, now)
        timeout = self._settings.elastic_timeout
        if self._state_exists:
            self._kill_after(timeout, [worker for worker in staying if not (worker.has_state or worker.syncs)], now,
                             f"has not synchronized its state {timeout:g} s after init()")
        members = [worker for worker in staying if worker.phase is Phase.WAITING]
        if len(members) < self._min_num_proc or any(worker.phase is Phase.RUNNING for worker in staying):
            return
        first_wait = self.generation == 0 and now < (
            min(worker.since for worker in members) + self._settings.start_timeout)
        if first_wait and any(worker.phase is Phase.STARTING for worker in staying):
            return
        if self._state_exists and not any(worker.has_state for worker in members):
            if not self._running() and not self._any_in_grace():
                self._fail(RuntimeError(NO_HOSTS_LEFT))
            return
        if self._exceeds_limit(self.generation):
            return
        for worker in self._live():
            if worker.phase is Phase.WAITING and worker not in members:
                self._send_removed(worker)
        places = list(dict.fromkeys(worker.host for worker in members))
        try:
            interfaces = {host: self._crew.interface(host, places) for host in places}
        except NoRoute as error:
            # The last of the hosts that cannot reach each other is excluded; with too few left, the job ends.
            host = [host for host in places if host in error.hosts][-1]
            worker = next(worker for worker in self._live() if worker.host == host)
            self._failed(worker, _NO_ROUTE, str(error), str(error))
            return
        # A worker that is no member any more reports on an earlier generation.
        failure = next((worker.failure for worker in members if worker.failure and worker.rank is not None), None)
        self._failed_rendezvous = self._failed_rendezvous + 1 if failure and not self._failures else 0
        if self._failed_rendezvous < _FAILED_RENDEZVOUS_MAX:
            self._assign(members, hosts, interfaces)
        else:
            self._fail(RuntimeError(f"the workers could not connect to each other {_FAILED_RENDEZVOUS_MAX} times in a "
                                    f"row: {failure}"))

    def _ping(self, workers, now):
        """Kills workers that neither call init() nor respond. A response counts until the next rendezvous."""
        for worker in workers:
            if worker.phase is not Phase.RUNNING:
                continue
            if worker.respond_by is None:
                worker.respond_by = now + self._settings.start_timeout
                self._crew.send(worker.number, Ping())
            elif now >= worker.respond_by:
                self._kill(worker, "did not respond")

    def _kill_after(self, seconds, workers, now, why):
        for worker in workers:
            if worker.phase is Phase.RUNNING and now >= worker.since + seconds:
                self._kill(worker, why)

    def _exceeds_limit(self, changes):
        """Ends the job if it has changed too often. Failed starts while no worker runs count as changes, too."""
        limit = self._settings.reset_limit
        if limit is None or changes + self._failed_starts <= limit:
            return False
        self._fail(RuntimeError(RESET_LIMIT_EXCEEDED_MESSAGE.format(limit)))
        return True

    def _assign(self, members, hosts, interfaces):
        self.generation += 1
        skip_sync = all(worker.skip_sync and worker.has_state for worker in members)
        for worker in self._workers.values():
            if worker not in members:       # its state is out of date from now on
                worker.rank, worker.has_state = None, False
                if worker.phase is Phase.RUNNING:
                    worker.since = self._clock()
        for worker, slot in assign(members, list(hosts)).items():
            self._enter(worker, Phase.RUNNING)
            worker.syncs, worker.silent, worker.respond_by = False, None, None
            worker.rank = worker.label = slot.rank
            self._crew.place(worker.number, slot)
            environment = {**slot.environment, "HOROVOD_GLOO_IFACE": interfaces[worker.host]}
            joins = self._state_exists and not worker.has_state
            self._crew.send(worker.number, Assignment(environment, self._scope(), skip_sync, joins))
        self._host_changes = self._waiting_since = None
        self._failed_starts = 0
        self._failures.clear()
        if self.generation > 1:
            self._crew.say(f"baguarun: the job continues with size {len(members)}, on {', '.join(interfaces)}.")

    def _give_up(self, staying, hosts, now):
        """Ends the job if it cannot continue, or has not for too long."""
        if self._any_in_grace():
            return
        live = self._live()
        if self._state_exists and not any(worker.has_state for worker in live):
            failure = _cause(self._failures)
            self._fail(WorkerFailed(failure.rank, failure.exit_code, f". {NO_HOSTS_LEFT}", failure.process)
                       if failure else RuntimeError(NO_HOSTS_LEFT))
            return
        if not live and self._failures and self._hosts.all_lost:
            self._fail(_cause(self._failures))
            return
        if self._failed_starts and self._exceeds_limit(max(0, self.generation - 1)):
            return
        needed = self._min_num_proc if self._begun else self._num_proc
        slots = sum(hosts.values())
        waiting = any(worker.phase is Phase.WAITING and (worker.rank is not None or not self._running())
                      for worker in live)
        if live and not waiting and not (self._failed_starts and not self._running()):
            self._waiting_since = None
            return
        if self._waiting_since is None:
            self._waiting_since = now
            if slots < needed and not self._settings.hosts_are_fixed:
                self._crew.say(f"baguarun: waiting for slots: {needed} needed, {slots} available.")
        timeout = self._settings.elastic_timeout
        waited = now >= self._waiting_since + timeout
        if slots < needed and (waited or self._settings.hosts_are_fixed and not self._hosts.come_back):
            how_long = f"for {timeout:g} s" if waited else "and no host can come back"
            self._fail(RuntimeError(
                f"Timed out waiting for minimum number of slots to become available: {needed} needed, {slots} "
                f"available, {how_long}. Give the job more hosts, a lower --min-np, a --blacklist-cooldown-range, or a "
                f"longer --elastic-timeout.{self._last_loss}"))
        elif waited:
            missing = [worker for worker in staying if worker.phase is not Phase.WAITING]
            if len(staying) - len(missing) >= needed:       # the others continue without the missing ones
                self._kill_after(0, missing, now, f"has not called init() for {timeout:g} s while others waited")
                return
            where = ", ".join(dict.fromkeys(worker.host for worker in missing))
            self._fail(RuntimeError(
                f"Timed out waiting for workers to call init() after {timeout:g} s: {len(missing)} of {len(staying)}, "
                f"on {where}, have not. Check what they are doing, or give a longer --elastic-timeout."))

    def _any_in_grace(self):
        """Whether a member is ending by itself, which may be the cause of the failure."""
        return any(worker.leave_by is not None and worker.rank is not None for worker in self._workers.values())

    def _fail(self, error):
        """Ends the job. In workers, init() raises now or at the next call; they may save their work."""
        if not isinstance(error, WorkerFailed):
            error.__cause__ = _cause(self._failures)
        self.failure = error
        for number in self._workers:
            self._crew.send(number, Refused(f"The elastic job has ended: {error}"))
