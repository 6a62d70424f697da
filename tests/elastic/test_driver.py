"""The driver's rules, without processes: what it starts, stops and prints after each event."""
import errno
import re
from pathlib import Path

import pytest

import bagua_hvd
from bagua_hvd.job.channel import name_of
from bagua_hvd.job.elastic_worker import Assignment, HostUpdateResult, Ping
from bagua_hvd.runner.elastic.discovery import FixedHosts, HostManager
from bagua_hvd.runner.elastic.driver import NO_HOSTS_LEFT, ElasticDriver
from bagua_hvd.runner.elastic.settings import ElasticSettings
from bagua_hvd.runner.job import WorkerFailed
from bagua_hvd.runner.ssh.network import NoRoute


@pytest.mark.parametrize("file", ["runner/elastic/run.py", "ray/elastic.py"])
def test_every_crew_does_what_the_driver_asks(file):
    """Without an import: Ray need not be installed."""
    package = Path(bagua_hvd.__file__).parent
    asked = set(re.findall(r"self\._crew\.(\w+)", (package / "runner/elastic/driver.py").read_text()))
    crew = re.split(r"\nclass _?Crew:", (package / file).read_text())[1]
    assert asked - set(re.findall(r"\n    def (\w+)", crew)) == set()


class Job:
    """A driver with numbers as workers, and a clock that the test advances. It is also the driver's crew."""

    def __init__(self, hosts, cooldown_range=None, survivors_seconds=0, **settings):
        self.now = 0.0
        self.closed = None      # two hosts without a connection between them
        self.frozen = set()     # numbers of workers that do not respond
        manager = HostManager(FixedHosts({}), cooldown_range, lambda: self.now, lambda low, high: 0)
        self.driver = ElasticDriver(ElasticSettings(**settings), manager, self,
                                    lambda *facts: self.ends.append(facts), lambda: self.now, survivors_seconds)
        self.hosts = {}         # number -> host, of all workers that were started
        self.slots = {}
        self.stopped, self.killed, self.sent, self.said, self.ends = [], [], [], [], []
        self.find(hosts)

    # The crew's interface.
    def start(self, number, host, slot):
        self.hosts[number] = host
        self.slots[number] = (slot.rank, slot.size)

    def stop(self, number, grace_seconds=5):
        self.stopped.append(number)
        self.killed += [number] if grace_seconds == 0 else []

    def send(self, number, message):
        self.sent.append((number, message))
        if message == Ping() and number not in self.frozen:
            self.driver.responded(number)

    def place(self, number, slot):
        pass

    def interface(self, host, hosts):
        if self.closed is not None and self.closed <= set(hosts):
            raise NoRoute("these two do not reach each other", self.closed)
        return "lo"

    def say(self, text):
        self.said.append(text)

    # Events.
    def find(self, hosts):
        self.driver.hosts_found(hosts)
        self.driver.step()

    def join(self, *numbers, **facts):
        for number in numbers:
            self.driver.joined(number, **facts)
        self.driver.step()

    def sync(self, *numbers):
        for number in numbers:
            self.driver.synced(number)
        self.driver.step()

    def end(self, number, exit_code, because_of=None):
        self.driver.ended(number, exit_code, None, because_of)
        self.driver.step()

    def wait(self, seconds):
        self.now += seconds
        self.driver.step()

    # Results.
    def take(self, kind):
        """(number, message) of this type sent since the last call; other messages stay queued."""
        taken = [entry for entry in self.sent if name_of(type(entry[1])) == kind]
        self.sent = [entry for entry in self.sent if name_of(type(entry[1])) != kind]
        return taken

    def ranks(self):
        """{number: rank} of the assignments sent since the last call, all of one rendezvous."""
        sent = self.take("assignment")
        assert len({message.scope for _, message in sent}) <= 1
        assert all(int(message.environment["HOROVOD_SIZE"]) == len(sent) for _, message in sent)
        return {number: int(message.environment["HOROVOD_RANK"]) for number, message in sent}


def running(hosts, **settings):
    """A Job whose workers have completed a rendezvous, and have the state."""
    job = Job(hosts, **settings)
    numbers = list(job.hosts)
    job.join(*numbers)
    assert job.ranks() == {number: number for number in numbers}
    job.sync(*numbers)
    return job


def test_the_members_of_a_meeting_hear_of_an_end():
    job = running({"a": 1, "b": 1, "c": 1}, num_proc=3, min_num_proc=1)
    job.end(1, 137)
    job.join(0, 2)
    assert job.ranks() == {0: 0, 2: 1}
    job.end(2, 9)
    assert job.ends == [(1, 137, "elastic.1"), (1, 9, "elastic.2")]


def test_a_worker_that_this_process_cannot_start_is_not_charged_to_its_host():
    shortage = OSError(errno.EMFILE, "Too many open files")
    job = running({"a": 1}, num_proc=1, min_num_proc=1)
    job.find({"a": 1, "b": 1})
    job.driver.ended(1, None, shortage)
    job.driver.step()
    assert list(job.hosts) == [0, 1]
    assert "on b: baguarun's own host lacks resources (Too many open files); retrying in" in job.said[-1]
    job.wait(20)
    assert job.hosts[2] == "b"      # again
    job.join(2)
    job.join(0)
    assert job.ranks() == {0: 0, 2: 1}
    begun = Job({"a": 1, "b": 1}, num_proc=2, min_num_proc=1)
    begun.driver.ended(1, None, shortage)
    assert begun.driver.failure is shortage


def test_begins_with_num_proc_slots_and_waits_for_all():
    job = Job({"a": 1}, num_proc=3, min_num_proc=2, max_num_proc=4)
    assert job.hosts == {}
    job.find({"b": 2, "a": 1, "c": 2})
    assert job.hosts == {0: "a", 1: "b", 2: "b", 3: "c"}       # old hosts first, at most max_num_proc
    assert job.slots == {0: (0, 4), 1: (1, 4), 2: (2, 4), 3: (3, 4)}
    job.join(0, 1, 3)
    assert job.ranks() == {}
    job.join(2)
    assert job.ranks() == {0: 0, 1: 1, 2: 2, 3: 3}


def test_first_meeting_does_not_wait_for_ever():
    job = Job({"a": 1, "b": 1}, min_num_proc=1, start_timeout=30)
    job.join(1)
    job.wait(29)
    assert job.ranks() == {}
    job.wait(2)
    assert job.ranks() == {1: 0}


def test_survivors_go_on_at_once_and_keep_their_order():
    job = running({"a": 1, "b": 1, "c": 1}, min_num_proc=1)
    job.end(0, 137)
    job.join(2)
    assert job.ranks() == {}        # 1 has not called init() yet
    job.join(1)
    assert job.ranks() == {1: 0, 2: 1}
    assert job.stopped == []


def test_a_silent_worker_is_killed_and_its_host_blacklisted():
    job = running({"a": 1, "b": 2, "c": 1}, min_num_proc=1)
    job.join(0, 3, silent=1)        # no time for the other worker on that host to join
    assert job.killed == [1] and job.stopped == [1, 2]
    assert job.said == ["baguarun: a worker on b did not respond, and was killed: the host is blacklisted.",
                        "baguarun: the job continues with size 2, on a, c."]
    assert job.ranks() == {0: 0, 3: 1}
    job.end(1, 137)
    job.end(2, 143)
    assert len(job.said) == 2


def test_a_member_that_hangs_before_it_has_connected_is_killed():
    job = running({"a": 2, "b": 1}, num_proc=3, min_num_proc=2, start_timeout=30)
    job.join(0, 1, 2)
    assert len(job.ranks()) == 3
    job.frozen = {2}
    job.join(0, 1, failure="rank 2 did not connect")
    job.wait(29)
    assert job.killed == []             # it may still join
    job.wait(2)
    assert job.killed == [2]
    assert "baguarun: a worker on b did not respond, and was killed: the host is blacklisted." in job.said
    assert job.ranks() == {0: 0, 1: 1}


def test_one_that_works_after_init_while_others_could_not_connect_is_not_silent():
    job = Job({"a": 1, "b": 1, "c": 1}, num_proc=3, min_num_proc=1, start_timeout=30, elastic_timeout=600)
    job.join(0, 1, 2)
    job.ranks()
    job.end(2, 137)         # 0 had connected to it, and runs its script
    job.join(1, failure="rank 2 has ended")
    job.wait(599)
    assert job.killed == []
    job.wait(1)
    assert job.killed == [0]


def test_all_that_are_stopped_at_once_are_silent():
    """The others report only the first of them."""
    job = running({"a": 1, "b": 1, "c": 1, "d": 1}, min_num_proc=1, start_timeout=30)
    job.driver.responded(3)      # it has reconnected on its own
    job.frozen = {2, 3}
    job.join(0, silent=2)
    job.wait(29)
    assert job.killed == []
    job.join(1, silent=2)
    job.wait(1)
    assert job.killed == [2, 3]
    assert job.ranks() == {0: 0, 1: 1}


def test_a_worker_that_has_come_is_not_silent():
    """If only the path between two workers is broken, both stay: the first to report it, and the one that joined."""
    job = running({"a": 1, "b": 1, "c": 1}, min_num_proc=1)
    job.join(1)
    job.join(0, silent=1)
    job.join(2, silent=7)
    assert job.stopped == [] and job.ranks() == {0: 0, 1: 1, 2: 2}


def test_a_silent_worker_is_the_cause_of_too_few_slots():
    job = running({"a": 1, "b": 1}, min_num_proc=2, hosts_are_fixed=True)
    job.join(0, silent=1)
    assert "Timed out waiting for minimum number of slots" in str(job.driver.failure)
    assert (job.driver.failure.__cause__.rank, job.driver.failure.__cause__.exit_code) == (1, 137)


def test_a_failure_stops_the_others_of_the_host():
    job = running({"a": 2, "b": 1}, min_num_proc=1)
    job.end(0, 1)
    assert job.stopped == [1]
    job.end(1, 143)
    job.join(2)
    assert job.ranks() == {2: 0}


def test_the_others_of_the_host_have_a_grace():
    job = running({"a": 3, "b": 1}, survivors_seconds=5, min_num_proc=1)
    job.join(2)
    job.end(0, 1)
    assert job.stopped == [] and [number for number, _ in job.take("removed")] == [2]      # it waited in init()
    job.join(3)
    assert job.ranks() == {3: 0}    # the others do not wait for removed ones
    job.wait(4)
    assert job.stopped == []
    job.join(1)
    assert [number for number, _ in job.take("removed")] == [1]
    job.end(2, 0)
    job.wait(2)
    assert job.stopped == [1]


def test_one_that_ends_in_its_grace_may_be_the_cause():
    job = running({"a": 2, "b": 1}, survivors_seconds=5, min_num_proc=3, hosts_are_fixed=True)
    job.end(0, 1, because_of=1)
    job.join(2)
    assert job.driver.failure is None
    job.end(1, 7)
    failure = job.driver.failure.__cause__
    assert (failure.rank, failure.exit_code) == (1, 7)


def test_one_that_is_stopped_after_its_grace_is_no_cause():
    job = running({"a": 2, "b": 1}, survivors_seconds=5, min_num_proc=3, hosts_are_fixed=True)
    job.end(0, 1, because_of=1)
    job.wait(6)
    assert job.stopped == [1]
    job.end(1, 143)
    job.join(2)
    assert job.driver.failure.__cause__.rank == 0


def test_new_workers_are_announced_when_they_are_ready():
    job = running({"a": 1}, min_num_proc=1)
    job.find({"a": 1, "b": 2})
    assert [job.hosts[number] for number in (1, 2)] == ["b", "b"]
    job.join(1)
    assert job.take("hosts_updated") == []
    job.join(2)
    (number, message), = job.take("hosts_updated")
    assert number == 0 and message.result == HostUpdateResult.added
    # Sent again, with the same timestamp, until the next rendezvous.
    job.wait(0.5)
    assert job.take("hosts_updated") == []
    job.wait(0.6)
    assert job.take("hosts_updated") == [(0, message)]
    job.join(0)
    assert job.ranks() == {0: 0, 1: 1, 2: 2}
    job.wait(5)
    assert job.take("hosts_updated") == []


def test_new_workers_do_not_wait_for_an_endless_row_of_others():
    job = running({"a": 1}, min_num_proc=1, start_timeout=30)
    job.find({"a": 1, "b": 1, "c": 1})
    job.join(1)
    job.wait(20)
    job.find({"a": 1, "b": 1, "c": 1, "d": 1})      # the autoscaler adds one more
    job.join(2)
    job.wait(9)
    assert job.take("hosts_updated") == []
    job.wait(1)
    assert [message.result for _, message in job.take("hosts_updated")] == [HostUpdateResult.added]
    job.join(0)
    assert job.ranks() == {0: 0, 1: 1, 2: 2}


def test_removal_is_announced_at_once_and_needs_no_synchronization():
    job = running({"a": 1, "b": 1, "c": 1}, min_num_proc=1)
    job.find({"b": 1, "c": 1})
    (number, message), = job.take("hosts_updated")
    assert number == 0 and message.result == HostUpdateResult.removed
    job.join(0, 1, 2, skip_sync=True)
    (number, _), = job.take("removed")
    assert number == 0
    assert [message.skip_sync for _, message in job.sent] == [True, True]
    assert job.ranks() == {1: 0, 2: 1}
    job.end(0, 0)
    assert not job.driver.finished and job.driver.failure is None


def test_one_that_needs_synchronization_decides_for_all():
    job = running({"a": 1, "b": 1, "c": 1}, min_num_proc=1)
    job.find({"a": 1, "b": 1})
    job.join(0, skip_sync=True)
    job.join(1, skip_sync=False)
    assert [message.skip_sync for _, message in job.take("assignment")] == [False, False]


def test_a_new_worker_needs_synchronization():
    job = running({"a": 1, "b": 1}, min_num_proc=1)
    job.find({"a": 1, "c": 1})
    job.join(2)
    assert [message.result for _, message in job.take("hosts_updated")] == [
        HostUpdateResult.removed, HostUpdateResult.mixed]
    job.join(0, 1, skip_sync=True)
    assert [message.skip_sync for _, message in job.sent if isinstance(message, Assignment)] == [False, False]
    assert job.ranks() == {0: 0, 2: 1}


def test_one_that_comes_too_late_is_sent_away():
    job = running({"a": 1, "b": 1}, min_num_proc=1)
    job.find({"a": 1})
    job.join(0)
    assert job.ranks() == {0: 0}        # it does not wait for a worker without a slot
    job.join(1)
    assert [number for number, _ in job.take("removed")] == [1]


def test_one_that_missed_a_meeting_has_no_state():
    job = running({"a": 1, "b": 1}, min_num_proc=1)
    job.find({"a": 1})
    job.join(0)
    assert job.ranks() == {0: 0}
    job.sync(0)
    job.sync(1)                     # late
    job.find({"a": 1, "b": 1})      # it is back before it noticed
    job.join(1)
    (number, message), = job.take("hosts_updated")[-1:]
    assert number == 0 and message.result == HostUpdateResult.added
    job.end(0, 137)
    assert isinstance(job.driver.failure, WorkerFailed) and NO_HOSTS_LEFT in str(job.driver.failure)


def test_hosts_that_were_all_replaced():
    job = running({"a": 1}, min_num_proc=1)
    job.find({"b": 1})
    job.join(1)
    assert job.driver.failure is None
    job.join(0)
    assert str(job.driver.failure) == NO_HOSTS_LEFT


def test_nothing_is_lost_before_the_first_synchronization():
    job = Job({"a": 1, "b": 1}, min_num_proc=1)
    job.join(0, 1)
    job.ranks()
    job.sync(0)
    job.end(0, 137)     # the only one with the state, which is still the initial one
    job.join(1)
    assert job.ranks() == {1: 0} and job.driver.failure is None


def test_places_that_became_free_are_filled():
    job = running({"a": 1, "b": 1, "c": 1}, min_num_proc=2, max_num_proc=2)
    assert set(job.hosts.values()) == {"a", "b"}
    job.end(1, 1)
    assert job.hosts[2] == "c"
    job.join(0)
    assert job.ranks() == {}        # min_num_proc is 2
    job.join(2)
    assert job.ranks() == {0: 0, 2: 1}


def test_no_worker_is_started_where_another_one_is_leaving():
    job = running({"a": 2}, min_num_proc=1)
    job.find({"a": 1})
    job.join(0, 1)
    assert [number for number, _ in job.take("removed")] == [1]
    job.find({"a": 2})
    assert set(job.hosts) == {0, 1}
    job.end(1, 0)
    assert set(job.hosts) == {0, 1, 2}


def test_cooldown_doubles_up_to_its_limit():
    job = running({"a": 1, "b": 1}, min_num_proc=1, cooldown_range=(10, 25))
    number = 1
    for delay in (10, 20, 25, 25):
        job.end(number, 1)
        job.join(0)
        assert job.ranks() == {0: 0}
        job.wait(delay - 1)
        assert number + 1 not in job.hosts
        job.wait(1)
        number += 1
        assert job.hosts[number] == "b"
        job.join(number)
        job.join(0)
        assert job.ranks() == {0: 0, number: 1}
        job.sync(0, number)


def test_reset_limit():
    job = running({"a": 1, "b": 1, "c": 1}, min_num_proc=1, reset_limit=1)
    job.end(2, 1)
    job.join(0, 1)
    assert job.ranks() == {0: 0, 1: 1}
    job.end(1, 1)
    job.join(0)
    assert str(job.driver.failure).endswith("exceeded limit: 1") and job.ranks() == {}


def test_meetings_that_fail_in_a_row():
    job = running({"a": 1, "b": 1}, min_num_proc=2)
    for _ in range(2):
        job.join(0, 1)
        for _ in range(2):
            job.join(0, 1, failure="no route")
            assert job.driver.failure is None
    job.join(0, 1, failure="no route")
    assert str(job.driver.failure).endswith("3 times in a row: no route")
    assert [number for number, _ in job.take("refused")] == [0, 1]


def test_meetings_that_fail_since_members_fail_are_no_reason_to_give_up():
    job = running(dict.fromkeys("abcdef", 1), min_num_proc=2)
    for lost in 5, 4, 3, 2:
        job.join(0, failure="the others did not connect")
        job.end(lost, 137)
        job.join(*range(lost), failure=f"rank {lost} has ended")
        assert job.driver.failure is None and len(job.ranks()) == lost


def test_only_members_report_a_failed_rendezvous():
    job = left_out()
    job.join(2, failure="no route")         # of an earlier generation
    job.join(0, 1)
    job.join(0, 1, failure="no route")
    job.find({"b": 1})
    job.driver.joined(0, failure="no route")        # it is dismissed
    job.join(1)
    job.join(1, failure="no route")
    job.join(1, failure="no route")
    assert job.driver.failure is None
    job.join(1, failure="no route")
    assert str(job.driver.failure).endswith("3 times in a row: no route")


def test_one_that_does_not_come():
    for needed in (1, 2):
        job = running({"a": 1, "b": 1}, min_num_proc=needed, elastic_timeout=60)
        job.join(0)
        job.wait(59)
        assert job.driver.failure is None and job.killed == []
        job.wait(2)
        if needed == 1:
            job.wait(1)
            assert job.killed == [1] and job.ranks() == {0: 0}
        else:
            assert "1 of 2, on b, have not" in str(job.driver.failure)


@pytest.mark.parametrize("order", [(2, 0, 1), (2, 1, 0), (0, 1, 2)])
def test_one_that_is_cut_off_is_killed_and_not_whom_it_does_not_hear(order):
    job = running({"a": 1, "b": 1, "c": 1}, min_num_proc=1)
    for number in order:
        job.join(number, silent=0 if number == 2 else 2)
    assert job.killed == [2]
    assert job.ranks() == {0: 0, 1: 1}


def test_of_two_that_are_cut_off_from_the_others_one_is_killed_and_not_whom_the_other_does_not_hear():
    job = running({"a": 1, "b": 1, "c": 1, "d": 1, "e": 1}, min_num_proc=1)
    for number, silent in enumerate([3, 3, 3, 0, 0]):
        job.join(number, silent=silent)
    assert job.killed == [3]
    assert job.ranks() == {0: 0, 1: 1, 2: 2, 4: 3}


def test_a_new_worker_that_does_not_synchronize():
    job = running({"a": 1, "b": 1}, min_num_proc=1, elastic_timeout=60)
    job.find({"a": 1, "b": 1, "c": 2})
    job.join(0, 1, 2, 3)
    assert {number: message.joins for number, message in job.take("assignment")} == {
        0: False, 1: False, 2: True, 3: True}
    job.driver.syncing(2)       # receiving may take any time
    job.sync(0, 1)
    job.wait(59)
    assert job.killed == []
    job.wait(2)
    assert job.killed == [3] and job.stopped == [3, 2]      # the host is no longer used


def test_a_member_whose_connection_breaks_in_init_may_come_again():
    job = running({"a": 1, "b": 1, "c": 1}, min_num_proc=1)
    job.end(2, 137)
    job.join(0)
    job.driver.joined(1)
    job.driver.disconnected(1)
    job.driver.step()
    assert job.stopped == [] and job.ranks() == {}
    job.join(1)
    assert job.ranks() == {0: 0, 1: 1}


def test_long_training_is_not_waiting():
    job = running({"a": 1, "b": 1}, min_num_proc=2, elastic_timeout=60)
    job.wait(1000)
    job.wait(1000)
    assert job.driver.failure is None


def test_success_ends_the_job_when_all_have_ended():
    job = running({"a": 1, "b": 1}, min_num_proc=1)
    job.find({"a": 1, "b": 1, "c": 2})
    job.join(2)
    job.end(1, 0)
    assert [number for number, _ in job.take("removed")] == [2] and job.stopped == [3]
    job.end(2, 0)
    job.end(3, 143)
    assert not job.driver.finished
    job.end(0, 0)
    assert job.driver.finished and job.driver.failure is None


def test_one_that_wants_to_go_on_after_another_ones_success():
    job = running({"a": 1, "b": 1}, min_num_proc=1)
    job.end(1, 0)
    job.join(0)
    (number, _), = job.take("refused")
    assert number == 0
    job.end(0, 1)
    assert job.driver.finished and job.driver.failure.exit_code == 1


def test_a_lost_member_that_nobody_missed_is_a_failure_of_the_job():
    job = running({"a": 1, "b": 1}, min_num_proc=1)
    job.end(1, 9)
    job.end(0, 0)
    assert job.driver.finished and job.driver.failure.exit_code == 9


def test_a_new_worker_that_failed_is_none():
    job = running({"a": 1}, min_num_proc=1)
    job.find({"a": 1, "b": 1})
    job.end(1, 9)
    job.end(0, 0)
    assert job.driver.finished and job.driver.failure is None


def test_a_new_worker_that_ends_with_success_at_once_does_not_end_the_job():
    """For example `[ -d /data ] || exit 0` in a script, on a host without the data."""
    job = running({"a": 1, "b": 1}, min_num_proc=1)
    job.find({"a": 1, "b": 1, "c": 1})
    job.end(2, 0)
    assert job.said == ["baguarun: a worker on c ended with exit code 0 before it had a rank: the host is blacklisted."]
    job.find({"a": 1, "b": 1, "c": 1, "d": 1})
    assert job.hosts[3] == "d"
    job.end(1, 137)
    job.join(0, 3)
    assert job.ranks() == {0: 0, 3: 1}


@pytest.mark.parametrize("exit_code", [0, 7])
def test_workers_that_never_call_init(exit_code):
    job = Job({"a": 1, "b": 1}, min_num_proc=1)
    job.end(0, 0)
    assert job.stopped == [] and not job.driver.finished
    job.end(1, exit_code)
    assert job.driver.finished and getattr(job.driver.failure, "exit_code", 0) == exit_code


def test_all_hosts_blacklisted_before_anything_was_done():
    job = Job({"a": 1, "b": 1}, min_num_proc=1)
    job.end(0, 3)
    assert job.driver.failure is None
    job.end(1, 4)
    assert job.driver.failure.exit_code == 3


@pytest.mark.parametrize("numbers, sentence", [
    ({}, "needs --min-np or -np"), ({"num_proc": 1, "min_num_proc": 2}, "below --min-np 2"),
    ({"min_num_proc": 2, "max_num_proc": 1}, "--max-np 1 is below"), ({"min_num_proc": 0}, "give 1 or more")])
def test_settings(numbers, sentence):
    with pytest.raises(ValueError, match=sentence):
        ElasticSettings(**numbers)


# ---- the cause of a failure -------------------------------------------------------------------------------------

@pytest.mark.parametrize("ends, rank, code", [
    ([(0, 1, 2), (1, 1, 0), (2, 7, None)], 2, 7),       # a chain, from the last to the first
    ([(0, 1, None), (1, 7, 0)], 0, 1),                  # by time, which is the cause here as well
    ([(0, 1, 5), (1, 1, 5)], 0, 1),                     # the cause is unknown
    ([(0, 1, 1), (1, 3, 0)], 0, 1)])                    # each reports the other
def test_the_cause_is_blamed_not_its_consequences(ends, rank, code):
    job = running({"a": 1, "b": 1, "c": 1}, min_num_proc=3)
    for number, exit_code, because_of in ends[:-1]:
        job.driver.ended(number, exit_code, None, because_of)
    job.end(*ends[-1])
    job.join(2)
    job.wait(600)
    failure = job.driver.failure if isinstance(job.driver.failure, WorkerFailed) else job.driver.failure.__cause__
    assert (failure.rank, failure.exit_code) == (rank, code)


def test_a_new_worker_that_failed_is_not_blamed_for_what_follows():
    job = running({"a": 1}, min_num_proc=1)
    job.find({"a": 1, "b": 1})
    job.end(1, 255)
    job.end(0, 7)
    assert (job.driver.failure.rank, job.driver.failure.exit_code) == (0, 7)
    job = running({"a": 1, "b": 1}, min_num_proc=2, elastic_timeout=60)
    job.find({"a": 1, "b": 1, "c": 1})
    job.end(2, 255)
    job.end(1, 7)
    job.join(0)
    job.wait(60)
    assert (job.driver.failure.__cause__.rank, job.driver.failure.__cause__.exit_code) == (1, 7)


def test_workers_that_wait_hear_that_the_job_has_ended():
    job = running({"a": 1, "b": 1}, min_num_proc=2, elastic_timeout=5)
    job.end(1, 9)
    job.join(0)
    job.wait(5)
    (number, message), = job.take("refused")
    assert number == 0 and message.reason.startswith("The elastic job has ended: Timed out waiting for minimum")


def test_workers_that_have_not_come_yet_hear_so_too():
    job = running({"a": 1, "b": 1}, min_num_proc=2, elastic_timeout=5)
    job.join(0)
    job.wait(5)
    refused = job.take("refused")
    assert [number for number, _ in refused] == [0, 1]
    assert all("Timed out waiting for workers to call init()" in message.reason for _, message in refused)


@pytest.mark.parametrize("limits, said", [
    ({"reset_limit": 2}, "number of resets during elastic job exceeded limit: 2"),
    ({"elastic_timeout": 20}, "Timed out waiting")])
def test_starts_that_never_join_are_limited(limits, said):
    job = Job({"a": 1}, cooldown_range=(1, 2), min_num_proc=1, **limits)
    for _ in range(40):
        newest = max(job.hosts)
        if newest in job.driver._workers:
            job.end(newest, 1)
        job.wait(1)
    assert said in str(job.driver.failure)
    assert len(job.hosts) <= 20
    assert isinstance(job.driver.failure.__cause__, WorkerFailed)


@pytest.mark.parametrize("disconnects", [False, True])
def test_workers_that_end_in_the_first_init_are_limited(disconnects):
    """Whichever the driver notices first, the end of the process or that of its connection."""
    job = Job({"a": 1, "b": 1}, cooldown_range=(1, 2), num_proc=2, min_num_proc=2, start_timeout=600, reset_limit=2)
    for _ in range(40):
        newest = max(job.hosts)
        if newest in job.driver._workers and job.hosts[newest] == "b":
            job.join(newest)
            if disconnects:
                job.driver.disconnected(newest)
            job.end(newest, 1)
        job.wait(1)
    assert "exceeded limit: 2" in str(job.driver.failure)
    assert len(job.hosts) == 4


def test_starts_that_fail_while_others_train_do_not_end_the_job():
    job = running({"a": 1}, cooldown_range=(1, 2), min_num_proc=1, reset_limit=1, elastic_timeout=20)
    job.find({"a": 1, "b": 1})
    for _ in range(30):
        newest = max(job.hosts)
        if newest and newest in job.driver._workers:
            job.end(newest, 1)
        job.wait(1)
    assert job.driver.failure is None


def test_a_host_that_does_not_reach_another_is_left_out():
    job = Job({"a": 1, "b": 1, "c": 1}, min_num_proc=2)
    job.closed = {"a", "c"}
    job.join(0, 1, 2)
    job.wait(1)
    assert job.ranks() == {0: 0, 1: 1}
    assert any("these two do not reach each other" in line for line in job.said)


def test_too_few_hosts_that_reach_each_other():
    job = Job({"a": 1, "b": 1}, min_num_proc=2, hosts_are_fixed=True)
    job.closed = {"a", "b"}
    job.join(0, 1)
    job.wait(1)
    assert "Timed out waiting for minimum number of slots" in str(job.driver.failure)
    assert "these two do not reach each other" in str(job.driver.failure)


def left_out(**settings):
    """A Job of three whose worker 2 was left out of the last rendezvous, after 700 s, since its host was taken away."""
    job = running({"a": 1, "b": 1, "c": 1}, num_proc=3, min_num_proc=1, **settings)
    job.wait(700)
    job.find({"a": 1, "b": 1})
    job.join(0, 1)
    assert job.ranks() == {0: 0, 1: 1}
    job.sync(0, 1)
    return job


def test_a_worker_that_is_left_out_and_hangs_is_stopped():
    job = left_out(elastic_timeout=60)
    job.wait(59)
    assert job.stopped == []
    job.end(0, 0)
    job.end(1, 0)
    assert not job.driver.finished
    job.wait(2)
    assert job.stopped == [2]
    job.end(2, 143)
    assert job.driver.finished and job.driver.failure is None


def test_a_host_that_returns_has_time_to_synchronize():
    job = left_out(elastic_timeout=60)
    job.find({"a": 1, "b": 1, "c": 1})
    job.wait(30)
    assert job.stopped == [] and job.killed == []
    job.join(2)
    job.join(0, 1)
    assert job.ranks() == {0: 0, 1: 1, 2: 2}


def test_a_deadline_for_a_response_ends_when_the_worker_joins():
    job = running({"a": 1, "b": 1, "c": 1}, num_proc=3, min_num_proc=1, start_timeout=30)
    job.frozen = {1, 2}
    job.join(0)                     # the others are sent a Ping
    job.frozen = {2}
    job.wait(20)
    job.join(1)
    job.driver.disconnected(1)
    job.wait(11)                    # past the first deadline
    assert job.killed == [2]


def test_a_suspended_worker_does_not_keep_the_end_waiting():
    job = running({"a": 1, "b": 1, "c": 1, "d": 1}, num_proc=4, min_num_proc=1, start_timeout=30)
    job.frozen = {2}
    job.end(1, 0)
    job.join(0, silent=2)
    job.join(3, silent=2)
    job.end(0, 1)
    job.end(3, 1)
    job.wait(31)
    job.wait(31)
    assert job.killed == [2]
    job.end(2, 137)
    assert job.driver.finished and job.driver.failure is not None


def test_the_first_rendezvous_waits_from_the_first_that_still_waits():
    job = Job({"a": 1, "b": 1, "c": 1}, cooldown_range=(1, 2), num_proc=3, min_num_proc=1, start_timeout=30)
    job.join(0)
    job.end(0, 1)
    job.wait(40)
    job.join(1)
    assert job.ranks() == {}        # worker 2 is still starting
    job.wait(31)
    assert job.ranks() == {1: 0}


def test_newcomers_do_not_end_a_job_whose_last_member_with_the_state_ends_by_itself():
    job = running({"a": 2}, survivors_seconds=5, min_num_proc=1)
    job.find({"a": 2, "b": 1})
    job.join(2)
    job.end(0, 1, because_of=1)
    assert job.driver.failure is None
    job.end(1, 7)
    assert (job.driver.failure.rank, job.driver.failure.exit_code) == (1, 7)
