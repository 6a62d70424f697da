"""HostManager: order, changes and blacklist of hosts; the discovery script."""
import os
import threading
import time

import pytest

from bagua_hvd.runner.elastic import discovery as discovery_module
from bagua_hvd.runner.elastic.constants import RESET_LIMIT_EXCEEDED_MESSAGE
from bagua_hvd.runner.elastic.discovery import FixedHosts, HostDiscoveryScript, HostManager, searched
from bagua_hvd.runner.elastic.placement import assign, fit
from launcher import wait_until


class Worker:
    def __init__(self, number, host, rank=None, has_state=False):
        self.number, self.host, self.rank, self.has_state = number, host, rank, has_state


def test_order():
    manager = HostManager(FixedHosts({}))
    manager.take({"b": 1, "a": 2})
    assert list(manager.current_hosts.items()) == [("b", 1), ("a", 2)]
    manager.take({"c": 1, "a": 1, "b": 1})
    assert list(manager.current_hosts.items()) == [("b", 1), ("a", 1), ("c", 1)]
    manager.take({"a": 1, "b": 3})
    assert list(manager.current_hosts.items()) == [("b", 3), ("a", 1)]
    manager.take({"c": 1, "b": 3, "a": 1})
    assert list(manager.current_hosts) == ["b", "a", "c"]      # c counts as new


def test_blacklist_for_ever():
    manager = HostManager(FixedHosts({}), clock=lambda: 1e12)
    manager.take({"a": 1, "b": 1})
    manager.blacklist("a")
    assert list(manager.current_hosts) == ["b"] and not manager.all_lost
    manager.blacklist("b")
    assert manager.all_lost and not manager.come_back


@pytest.mark.parametrize("jitter, delays", [(0, [10, 20, 40, 60, 60]), (10, [20, 30, 50, 60, 60])])
def test_cooldown(jitter, delays):
    now = [0.0]
    asked = []
    manager = HostManager(FixedHosts({}), (10, 60), lambda: now[0],
                          lambda low, high: asked.append((low, high)) or jitter)
    manager.take({"a": 1, "b": 1})
    for delay in delays:
        manager.blacklist("a")
        now[0] += delay - 0.25
        assert list(manager.current_hosts) == ["b"]
        now[0] += 0.25
        assert list(manager.current_hosts) == ["b", "a"]       # b, which is back, counts as new
    assert set(asked) == {(0, 10)}
    assert manager.come_back and not manager.all_lost


def script(tmp_path, text):
    path = tmp_path / "discover.sh"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(0o755)
    return str(path)


def test_script(tmp_path):
    path = script(tmp_path, "printf 'a:2\\n\\n b \\na:4\\n'")
    assert HostDiscoveryScript(path, 7).find_available_hosts_and_slots() == {"a": 4, "b": 7}
    assert HostDiscoveryScript(script(tmp_path, ":")).find_available_hosts_and_slots() == {}
    with pytest.raises(RuntimeError, match="expected name:slots"):
        HostDiscoveryScript(script(tmp_path, "echo 'a b:2'")).find_available_hosts_and_slots()
    path = script(tmp_path, "echo '[fd00::2]:3'; echo '[fd00::3]'")
    assert HostDiscoveryScript(path, 7).find_available_hosts_and_slots() == {"fd00::2": 3, "fd00::3": 7}
    with pytest.raises(RuntimeError, match=r"printed '\[fd00::3\]' without a number of slots"):
        HostDiscoveryScript(path).find_available_hosts_and_slots()


def test_names_are_horovods():
    discovery = HostDiscoveryScript(discovery_script="/no/such", slots=2)
    with pytest.raises(RuntimeError, match="'/no/such' cannot be run: No such file or directory"):
        discovery.find_available_hosts_and_slots()
    assert RESET_LIMIT_EXCEEDED_MESSAGE.format(3) == (
        "Horovod was shutdown because number of resets during elastic job exceeded limit: 3")


def test_a_script_without_an_interpreter_line_is_for_the_shell(tmp_path):
    path = tmp_path / "discover it"
    path.write_text("for i in 1 2; do echo host$i:$i; done\n")
    path.chmod(0o755)
    assert HostDiscoveryScript(str(path)).find_available_hosts_and_slots() == {"host1": 1, "host2": 2}


def test_a_command_with_arguments_is_for_the_shell(tmp_path):
    path = script(tmp_path, 'echo "$1:$2"')
    assert HostDiscoveryScript(f"{path} a 3").find_available_hosts_and_slots() == {"a": 3}
    with pytest.raises(RuntimeError, match="ended with exit code 127.*no/such"):
        HostDiscoveryScript("/no/such --flag").find_available_hosts_and_slots()


@pytest.mark.parametrize("end, words", [("wait", "has not ended after 1 s, and was killed"),
                                        ("exit 0", "has ended, but what it started held its output open for 1 s")])
def test_a_script_that_hangs_is_killed_with_what_it_started(tmp_path, monkeypatch, end, words):
    monkeypatch.setattr(HostDiscoveryScript, "limit_seconds", 1)
    discovery = HostDiscoveryScript(script(tmp_path, f"sleep 600 & echo $! > '{tmp_path / 'pid'}'; {end}"))
    with pytest.raises(RuntimeError, match=words):
        discovery.find_available_hosts_and_slots()
    wait_until(lambda: not os.path.exists(f"/proc/{(tmp_path / 'pid').read_text().strip()}")
               or "State:\tZ" in open(f"/proc/{(tmp_path / 'pid').read_text().strip()}/status").read())


def test_closing_ends_a_script_that_hangs(tmp_path):
    discovery = HostDiscoveryScript(script(tmp_path, "sleep 600 & echo $! > '%s'; wait" % (tmp_path / "pid")))
    failures = []

    def find():
        try:
            discovery.find_available_hosts_and_slots()
        except RuntimeError as error:
            failures.append(str(error))

    thread = threading.Thread(target=find)
    thread.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text().strip():
        time.sleep(0.01)
    discovery.close()
    thread.join(60)
    assert not thread.is_alive() and len(failures) == 1


def test_a_script_serves_one_job_after_the_other(tmp_path):
    discovery = HostDiscoveryScript(script(tmp_path, "echo a:1"))
    for _ in range(2):
        assert discovery.find_available_hosts_and_slots() == {"a": 1}
        found = threading.Event()
        with searched(discovery, lambda hosts, found=found: found.set(), print):
            assert found.wait(60)


def test_a_search_closes_its_discovery_once(monkeypatch):
    discovery, closed = FixedHosts({"a": 1}), []
    monkeypatch.setattr(discovery, "close", lambda: closed.append(None))
    with searched(discovery, print, print):
        pass
    assert len(closed) == 1


def test_a_search_that_begins_at_the_end_of_the_job_is_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(discovery_module, "_DISCOVERY_SECONDS", 0)
    discovery = HostDiscoveryScript(script(tmp_path, "exec sleep 600"))
    find, close, closed = discovery.find_available_hosts_and_slots, discovery.close, threading.Event()
    monkeypatch.setattr(discovery, "find_available_hosts_and_slots", lambda: closed.wait() and find())
    monkeypatch.setattr(discovery, "close", lambda: (close(), closed.set()))
    with searched(discovery, print, print) as search:
        pass
    assert not search.is_alive()


def test_fit_prefers_old_workers():
    old = [Worker(0, "a", 0, True), Worker(1, "b", 1, True), Worker(2, "b", 2, True)]
    assert fit(old, [], {"a": 2, "b": 2}, 3) == (old, [])
    assert fit(old, [], {"a": 2, "b": 2, "c": 1}, None) == (old, ["a", "c"])
    assert fit(old, [], {"c": 3, "b": 1}, 3) == ([old[1]], ["c", "c"])
    assert fit(old[:1], [old[1]], {"a": 1, "b": 2}, None) == (old[:1], ["b"])


def test_assignment_puts_a_worker_with_state_first():
    new, old, older = Worker(5, "a"), Worker(1, "b", 2, True), Worker(2, "c", 1, True)
    late = Worker(6, "c")
    slots = assign([new, old, older, late], ["a", "b", "c"])
    assert {worker.number: slot.rank for worker, slot in slots.items()} == {2: 0, 6: 1, 1: 2, 5: 3}
    assert [(slots[worker].local_rank, slots[worker].local_size) for worker in (older, late)] == [(0, 2), (1, 2)]
    assert [(slots[worker].cross_rank, slots[worker].cross_size) for worker in (older, old, new, late)] == [
        (0, 3), (1, 3), (2, 3), (0, 1)]
