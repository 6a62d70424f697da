"""State, ObjectState, run_fn and notification_manager in one process: saved values, errors, and the order of calls."""
import gc
import weakref

import pytest

from bagua_hvd.core import native
from bagua_hvd.core.exceptions import HorovodInternalError, HostsUpdatedInterrupt
from bagua_hvd.job.elastic import HostUpdateResult, ObjectState, State, notification_manager, run_fn


def make_state(rank=0, bcast_object=lambda obj: obj, **kwargs):
    return ObjectState(bcast_object=bcast_object, get_rank=lambda: rank, **kwargs)


class Recorder(State):
    """Records the calls."""

    def __init__(self):
        super().__init__(lambda obj: obj, lambda: 0)
        self.calls = []

    def save(self):
        self.calls.append("save")

    def restore(self):
        self.calls.append("restore")

    def sync(self):
        self.calls.append("sync")

    def reset(self):
        self.calls.append("state.reset")


def run_with(outcomes, state=None):
    """The result and the calls of a run_fn with these outcomes (exceptions or results) of its function."""
    state = state or Recorder()
    state.register_reset_callbacks([lambda: state.calls.append("callback 1")])
    state.register_reset_callbacks([lambda: state.calls.append("callback 2")])
    outcomes = list(outcomes)

    def func(given, *args, **kwargs):
        assert given is state and args == (1,) and kwargs == {"two": 2}
        state.calls.append("func")
        outcome = outcomes.pop(0)
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    wrapped = run_fn(func, lambda: state.calls.append("reset"))
    assert wrapped.__name__ == "func"
    return wrapped(state, 1, two=2), state.calls


RESET = ["reset", "state.reset", "callback 1", "callback 2"]


def test_no_failure():
    assert run_with(["result"]) == ("result", ["sync", "func"])


class Batch:
    """A local variable of a step."""


@pytest.mark.parametrize("error", [HorovodInternalError("x"), HostsUpdatedInterrupt(False)])
def test_nothing_keeps_what_a_failed_step_had(error):
    """A frame that refers to its own error is a cycle, as in Reducer.synchronize()."""
    batches = []

    def func(state):
        if batches:
            return batches[0]() is None
        batch = Batch()
        batches.append(weakref.ref(batch))
        try:
            raise HorovodInternalError("first")
        except HorovodInternalError as first:
            failure = error
            raise failure from first

    gc.disable()
    try:
        assert run_fn(func, lambda: None)(Recorder())
    finally:
        gc.enable()


def test_lost_rank_restores_and_synchronizes(caplog):
    assert run_with([HorovodInternalError("x"), 3]) == (3, ["sync", "func", "restore", *RESET, "sync", "func"])
    assert caplog.messages == ["x"]


@pytest.mark.parametrize("status", [native.ERR_MISMATCH, native.ERR_UNSUPPORTED])
def test_calls_that_would_fail_again_end_the_job(status):
    error, state = HorovodInternalError("x"), Recorder()
    error.status = status
    with pytest.raises(HorovodInternalError) as raised:
        run_with([error], state)
    assert raised.value is error and state.calls == ["sync", "func"]


def test_hosts_added_keeps_the_state():
    assert run_with([HostsUpdatedInterrupt(False), 3]) == (3, ["sync", "func", *RESET, "sync", "func"])


def test_hosts_removed_skips_one_sync_only():
    outcomes = [HostsUpdatedInterrupt(True), HorovodInternalError("x"), HostsUpdatedInterrupt(True),
                HostsUpdatedInterrupt(False), 3]
    assert run_with(outcomes) == (3, ["sync", "func", *RESET, "func", "restore", *RESET, "sync", "func", *RESET, "func",
                                      *RESET, "sync", "func"])


def test_failure_in_sync_and_in_a_callback_is_a_lost_rank_too():
    class Failing(Recorder):
        def sync(self):
            super().sync()
            if self.calls.count("sync") == 1:
                raise HorovodInternalError("x")

        def reset(self):
            super().reset()
            if self.calls.count("state.reset") == 1:
                raise HorovodInternalError("x")

    assert run_with([3], Failing()) == (
        3, ["sync", "restore", "reset", "state.reset", "restore", *RESET, "sync", "func"])


def test_other_exceptions_pass_and_end_the_notifications():
    state = Recorder()
    with pytest.raises(KeyError):
        run_with([KeyError("x")], state)
    notification_manager.handle_hosts_updated(1, HostUpdateResult.added)
    state.check_host_updates()


def test_notifications_reach_a_running_state():
    state = Recorder()

    def func(state):
        if state.calls.count("sync") == 1:
            notification_manager.handle_hosts_updated(1, HostUpdateResult.added)
            state.commit()
            raise AssertionError("not reached")
        state.commit()
        return "done"

    assert run_fn(func, lambda: state.calls.append("reset"))(state) == "done"
    assert state.calls == ["sync", "save", "reset", "state.reset", "sync", "save"]


@pytest.mark.parametrize("results, skip_sync", [
    ([HostUpdateResult.removed], True),
    ([HostUpdateResult.removed, HostUpdateResult.removed], True),
    ([HostUpdateResult.added], False),
    ([HostUpdateResult.mixed], False),
    ([HostUpdateResult.removed, HostUpdateResult.added], False),
    ([HostUpdateResult.no_update], False),
])
def test_skip_sync_only_for_pure_removals(results, skip_sync):
    state = Recorder()
    for timestamp, result in enumerate(results, 1):
        state.on_hosts_updated(timestamp, result)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert raised.value.skip_sync is skip_sync
    state.check_host_updates()      # raised once only


def test_repeated_timestamps_are_one_update():
    state = Recorder()
    state.on_hosts_updated(5, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    state.on_hosts_updated(5, HostUpdateResult.added)
    state.check_host_updates()


def test_reset_forgets_news():
    state = Recorder()
    state.on_hosts_updated(1, HostUpdateResult.added)
    state.on_reset()
    state.check_host_updates()


def test_rank_0_decides():
    others = make_state(rank=1, bcast_object=lambda obj: None)      # rank 0 has no update
    others.on_hosts_updated(1, HostUpdateResult.added)
    others.check_host_updates()
    told = make_state(rank=1, bcast_object=lambda obj: HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        told.check_host_updates()
    assert raised.value.skip_sync is True


def test_commit_saves_before_it_raises():
    state = make_state(epoch=0)
    state.epoch = 7
    state.on_hosts_updated(1, HostUpdateResult.added)
    with pytest.raises(HostsUpdatedInterrupt):
        state.commit()
    state.epoch = 8
    state.restore()
    assert state.epoch == 7


def test_object_state_saves_and_restores():
    state = make_state(epoch=1, history=[])
    state.epoch = 2
    state.restore()
    assert state.epoch == 1     # the constructor saves its values
    state.epoch = 3
    state.save()
    state.epoch, state.untracked = 4, "mine"
    state.restore()
    assert (state.epoch, state.untracked) == (3, "mine")
    state.history.append(1)     # references, not copies
    state.restore()
    assert state.history == [1]


def test_object_state_synchronizes_the_present_values():
    sent = []
    root = make_state(rank=0, bcast_object=lambda obj: sent.append(dict(obj)) or obj, epoch=0, batch=1)
    root.epoch = 5
    root.sync()
    assert sent == [{"epoch": 5, "batch": 1}]
    other = make_state(rank=1, bcast_object=lambda obj: sent[0], epoch=0, batch=0)
    other.sync()
    assert (other.epoch, other.batch) == (5, 1)
    other.epoch = 9
    other.restore()
    assert other.epoch == 5
    make_state(bcast_object=None).sync()        # nothing to send


def test_state_is_abstract():
    with pytest.raises(TypeError):
        State(lambda obj: obj, lambda: 0)
