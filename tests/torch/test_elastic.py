"""hvd.elastic: handlers and sampler in one process, the loop with failures on two real ranks."""
import copy
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd.core.exceptions import HostsUpdatedInterrupt
from bagua_hvd.job.elastic import HostUpdateResult, notification_manager
from bagua_hvd.job.runtime import runtime
from bagua_hvd.torch.elastic import state as state_module
from bagua_hvd.torch.elastic.sampler import ElasticSampler
from bagua_hvd.torch.elastic.state import StateHandler, TorchState, get_handler_registry, set_handler_registry


@pytest.fixture
def one_rank():
    hvd.shutdown()
    hvd.init()
    yield
    hvd.shutdown()


def test_an_elastic_worker_has_imported_everything_before_init():
    """Imports happen before init(), because the other ranks would wait for a new rank that imports after it."""
    code = ("import sys, torch, bagua_hvd.torch as hvd\n"
            "before = set(sys.modules)\n"
            "hvd.init()\n"
            "model = torch.nn.Linear(1, 1)\n"
            "optimizer = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), model.named_parameters())\n"
            "hvd.elastic.TorchState(model, optimizer, every_step=True)\n"
            "print(len(set(sys.modules) - before))")
    counts = [int(subprocess.run([sys.executable, "-c", code], env={**os.environ, **elastic}, capture_output=True,
                                 check=True).stdout) for elastic in ({}, {"HOROVOD_ELASTIC": "1"})]
    assert counts[0] > 100 and counts[1] < 10, counts


# ----------------------------------------------------------------------------------------------------- sampler ----


def shares(job, size, sampler):
    """The indices of every rank of a job of `size` ranks."""
    result = []
    for rank in range(size):
        job(rank, size)
        sampler.reset()
        assert (sampler.rank, sampler.num_replicas) == (rank, size)
        result.append(list(sampler))
        assert len(sampler) == len(result[-1])
    return result


@pytest.mark.parametrize("count, size, processed", [
    (10, 2, 0), (10, 3, 0), (10, 4, 6), (10, 3, 9), (2, 5, 0), (1, 4, 0), (10, 2, 10), (10, 2, 12), (0, 3, 0)])
def test_every_rank_has_as_many_and_nothing_is_lost(job, count, size, processed):
    job(0, size)
    for shuffle in (False, True):
        sampler = ElasticSampler(range(count), shuffle=shuffle)
        order = list(sampler.remaining_indices)
        sampler.processed_num = processed
        parts = shares(job, size, sampler)
        left = order[processed:]
        assert len({len(part) for part in parts}) == 1
        assert len(parts[0]) == -(-len(left) // size)
        interleaved = [index for row in zip(*parts, strict=True) for index in row]
        assert interleaved[:len(left)] == left      # strided by rank
        assert interleaved[len(left):] == (left * size)[:len(interleaved) - len(left)]


def test_order_depends_on_seed_and_epoch_only(job):
    job(0, 2)
    sampler, same = ElasticSampler(range(50)), ElasticSampler(range(50))
    assert sampler.remaining_indices == same.remaining_indices != list(range(50))
    assert sorted(sampler.remaining_indices) == list(range(50))
    assert ElasticSampler(range(50), seed=1).remaining_indices != same.remaining_indices
    sampler.set_epoch(1)
    assert sampler.remaining_indices != same.remaining_indices
    assert ElasticSampler(range(4), shuffle=False).remaining_indices == [0, 1, 2, 3]


def test_goes_on_with_another_size(job):
    job(0, 2)
    sampler = ElasticSampler(range(20), shuffle=False)
    sampler.record_batch(0, 3)
    sampler.record_batch(1, 3)
    assert sampler.processed_num == 12
    assert len(sampler) == 10       # unchanged until the next iteration
    saved = sampler.state_dict()
    assert saved == {"epoch": 0, "processed_num": 12}
    assert shares(job, 4, sampler) == [[12, 16], [13, 17], [14, 18], [15, 19]]
    sampler.set_epoch(1)
    assert (sampler.epoch, sampler.processed_num, len(sampler)) == (1, 0, 5)
    sampler.load_state_dict(saved)
    assert (sampler.epoch, sampler.processed_num, len(sampler)) == (0, 12, 2)


# ------------------------------------------------------------------------------------------------------- state ----


def make_training(momentum=0.9):
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    return model, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model, optimizer, steps=1):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.ones(4, 3)).square().sum().backward()
        optimizer.step()


def condition(*objects):
    return copy.deepcopy([entry.state_dict() for entry in objects])


def assert_condition(objects, expected):
    for entry, its in zip(objects, expected, strict=True):
        torch.testing.assert_close(entry.state_dict(), its, rtol=0, atol=0)


def test_restore_returns_to_the_last_save_again_and_again(one_rank):
    model, optimizer = make_training()
    sampler = ElasticSampler(range(10))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    first = condition(model, optimizer)
    train(model, optimizer)
    state.restore()
    assert_condition((model, optimizer), first)
    train(model, optimizer, 2)
    sampler.record_batch(0, 4)
    state.epoch = 1
    state.save()
    second = condition(model, optimizer)
    for _ in range(2):      # twice: the optimizer does not modify the saved tensors
        train(model, optimizer)
        sampler.set_epoch(3)
        state.epoch = 2
        state.restore()
        assert_condition((model, optimizer), second)
        assert (state.epoch, sampler.epoch, sampler.processed_num) == (1, 0, 4)


@pytest.mark.parametrize("fails", ["model", "optimizer", "sampler", "counters"])
def test_a_failed_sync_saves_nothing(one_rank, monkeypatch, fails):
    model, optimizer = make_training()
    sampler = ElasticSampler(range(10))
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0)
    first = condition(model, optimizer)

    def lost(*arguments, **options):
        raise hvd.HorovodInternalError("rank 1 was lost")

    train(model, optimizer)                     # as if another rank's weights had arrived
    sampler.record_batch(0, 4)
    state.epoch = 1
    if fails == "counters":
        monkeypatch.setattr(state, "_bcast_object", lost)
    else:
        monkeypatch.setattr(state._handlers[fails], "receive", lost)
    with pytest.raises(hvd.HorovodInternalError):
        state.sync()
    state.restore()
    assert_condition((model, optimizer), first)
    assert (state.epoch, sampler.processed_num) == (0, 0)


def test_assignment_replaces_and_saves(one_rank):
    model, optimizer = make_training()
    state = TorchState(model=model, epoch=0)
    other = nn.Linear(3, 2)
    weight = other.weight.detach().clone()
    state.model = other
    with torch.no_grad():
        other.weight.zero_()
    state.restore()
    assert state.model is other and other.weight.equal(weight)
    state.optimizer = optimizer         # it was None
    saved = condition(optimizer)
    train(model, optimizer)
    state.restore()
    assert state.optimizer is optimizer
    assert_condition([optimizer], saved)
    state.epoch = 5                     # no handler, so only save() saves it
    state.restore()
    assert state.epoch == 0
    state.optimizer = None
    state.save()
    state.restore()
    assert state.optimizer is None


def test_any_keyword_may_need_a_handler(one_rank):
    generator, discriminator = nn.Linear(2, 2), nn.Linear(2, 1)
    state = TorchState(generator=generator, discriminator=discriminator, opt=torch.optim.SGD(generator.parameters(), 1))
    weight = discriminator.weight.detach().clone()
    with torch.no_grad():
        discriminator.weight.zero_()
    state.restore()
    assert discriminator.weight.equal(weight) and state.model is None


def test_what_has_a_state_dict_is_restored_by_it(one_rank):
    model, optimizer = make_training()
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    state = TorchState(model, optimizer, scheduler=scheduler, kind=torch.optim.lr_scheduler.StepLR)
    train(model, optimizer)
    scheduler.step()
    state.save()
    kept = scheduler.get_last_lr()
    scheduler.step()
    state.restore()
    assert state.scheduler is scheduler and scheduler.optimizer is optimizer
    assert scheduler.get_last_lr() == kept == [optimizer.param_groups[0]["lr"]]
    assert state.kind is torch.optim.lr_scheduler.StepLR        # a class has no state
    for several in ([scheduler], {"lr": scheduler}, (1, model)):
        with pytest.raises(ValueError, match="several holds a (StepLR|Linear), which is saved .* pass each by itself"):
            TorchState(model, several=several)
    assert TorchState(history=[1.0, {"a": 2}]).history == [1.0, {"a": 2}]


class WithReducer(nn.Linear):
    """A model with a submodule named reducer, as DistributedDataParallel has."""

    def __init__(self):
        super().__init__(2, 2)
        self.reducer = nn.Linear(2, 2)


def test_a_model_may_have_a_reducer(one_rank):
    model = WithReducer()
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1.0), model.named_parameters())
    TorchState(model, optimizer).sync()
    TorchState(model, torch.optim.SGD(model.parameters(), lr=1.0)).sync()


def test_handler_registry(one_rank):
    class Counter:
        n = 0

    class CounterHandler(StateHandler):
        def __init__(self, value):
            super().__init__(value)
            self.save()

        def save(self):
            self.saved = self.value.n

        def restore(self):
            self.value.n = self.saved

        def sync(self):
            self.value.n = hvd.broadcast_object(self.value.n)
            self.save()

    before = get_handler_registry()
    assert [handler for _, handler in before] == [
        state_module.ModelStateHandler, state_module.OptimizerStateHandler, state_module.SamplerStateHandler,
        state_module.SamplerStateHandler]
    try:
        set_handler_registry([(Counter, CounterHandler), *before])
        counter = Counter()
        state = TorchState(counter=counter)
        counter.n = 3
        state.sync()
        counter.n = 4
        state.restore()
        assert counter.n == 3
        state.on_reset()
    finally:
        set_handler_registry(before)


# ------------------------------------------------------------------------------------------------- on two ranks ----

DATASET = [float(i) for i in range(24)]


class Simulated(Exception):
    pass


def elastic_training():
    """Failures, a removal and an addition in one run; both ranks must end with the weights of a run without them."""
    hvd.init()
    rank = hvd.rank()
    torch.manual_seed(rank)         # sync() makes them equal
    model = nn.Linear(1, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9),
                                         model.named_parameters())
    sampler = hvd.elastic.ElasticSampler(DATASET, shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, sampler=sampler, epoch=0, batch=0, owner=rank)
    resets, events, entered = [], [], []
    state.register_reset_callbacks([lambda: resets.append((hvd.rank(), hvd.size()))])
    start = []

    def step(state, i):
        state.optimizer.zero_grad()
        x = torch.tensor([[DATASET[i]]])
        if events == ["both fail"] and state.batch == 5:
            events.append("one fails")
            if rank == 1:       # before its gradients, for which the other rank waits in vain
                raise hvd.HorovodInternalError("simulated")
        state.model(x).square().sum().backward()
        if events == [] and state.batch == 3:
            events.append("both fail")
            hvd.barrier()       # else a rank could see the other's failure before its own
            raise hvd.HorovodInternalError("simulated")      # while gradients are in flight
        state.optimizer.step()

    @hvd.elastic.run
    def train(state, result):
        assert state.owner == 0 and state.sampler is sampler
        if not start:
            start.append(copy.deepcopy(model.state_dict()))
        entered.append((state.epoch, state.batch, state.sampler.processed_num))
        while state.epoch < 2:
            for i in list(state.sampler):
                step(state, i)
                state.batch += 1
                state.sampler.record_batch(state.batch, 1)
                if events == ["both fail", "one fails"] and state.batch == 8:
                    events.append("removed")
                    if rank == 0:       # only rank 0 is notified
                        notification_manager.handle_hosts_updated(1, HostUpdateResult.removed)
                if events[-1:] == ["removed"] and state.batch == 9:
                    events.append("added")
                    notification_manager.handle_hosts_updated(2 + rank, HostUpdateResult.added)
                if state.batch % 2 == 0:
                    state.commit()
                else:
                    state.check_host_updates()
            state.epoch += 1
            state.batch = 0
            state.sampler.set_epoch(state.epoch)
            state.commit()
        return result

    assert train(state, "result") == "result"
    assert events == ["both fail", "one fails", "removed", "added"]
    assert resets == [(rank, 2)] * 4
    # A failure returns to the last commit, an update does not; then the remaining samples are distributed again.
    assert entered == [(0, 0, 0), (0, 2, 4), (0, 4, 8), (0, 8, 16), (0, 9, 18)], entered
    # A run without failures over the same pairs of entries.
    clean = nn.Linear(1, 1)
    clean.load_state_dict(start[0])
    plain = torch.optim.SGD(clean.parameters(), lr=1e-3, momentum=0.9)
    for _ in range(2):
        for i in range(0, len(DATASET), 2):
            plain.zero_grad()
            (clean(torch.tensor([[DATASET[i]], [DATASET[i + 1]]])).square().sum() / 2).backward()
            plain.step()
    torch.testing.assert_close(model.state_dict(), clean.state_dict())


def synchronization():
    """sync() copies rank 0's state to all ranks, also state that the others do not have yet."""
    hvd.init()
    rank = hvd.rank()
    model, optimizer = make_training()
    if rank == 0:
        train(model, optimizer, 3)
    sampler = ElasticSampler(range(10))
    sampler.record_batch(0, 2 - rank)
    state = TorchState(model, optimizer, sampler=sampler, best=0.5 + rank, names=[str(rank)])
    state.best += 1
    state.sync()
    assert (state.best, state.names, sampler.processed_num) == (1.5, ["0"], 4)
    conditions = hvd.allgather_object(condition(model, optimizer))
    torch.testing.assert_close(conditions[0], conditions[1], rtol=0, atol=0)
    assert conditions[0][1]["state"][0]["step"] == 3
    train(model, optimizer)
    state.restore()
    assert_condition((model, optimizer), conditions[0])

    # Both ranks raise in the same call, although only rank 0 was notified.
    if rank == 0:
        state.on_hosts_updated(1, HostUpdateResult.removed)
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.check_host_updates()
    assert raised.value.skip_sync is True
    # A notification on another rank has no effect.
    if rank == 1:
        state.on_hosts_updated(9, HostUpdateResult.added)
    state.commit()

    @hvd.elastic.run
    def fails(state):
        raise Simulated

    with pytest.raises(Simulated):
        fails(state)
    assert hvd.is_initialized()


def schedulers(of_given):
    """On a rank that joins, scheduler and GradScaler get rank 0's state, and stay bound to its optimizer."""
    model, given = make_training()
    optimizer = hvd.DistributedOptimizer(given, model.named_parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(given if of_given else optimizer, 1, 0.5)
    scaler = torch.amp.GradScaler("cpu", init_scale=1.0 if hvd.rank() else 8.0)
    if hvd.rank() == 0:
        for _ in range(3):
            scheduler.optimizer._opt_called = True      # rank 0 has trained; the other rank is new
            scheduler.step()
    state = TorchState(model, optimizer, scheduler=scheduler, scaler=scaler)
    state.sync()
    assert state.scheduler is scheduler and scheduler.optimizer is (given if of_given else optimizer)
    for _ in range(2):
        train(model, optimizer)
        state.scheduler.step()
    rates = hvd.allgather_object((optimizer.param_groups[0]["lr"], scheduler.last_epoch, scaler.get_scale()))
    assert rates[0] == rates[1] and rates[0][1:] == (5, 8.0), rates
    state.restore()
    assert scheduler.last_epoch == 3
    assert optimizer.param_groups[0]["lr"] == scheduler.get_last_lr()[0] == 8 * rates[0][0] / 2


def frozen_weights():
    """A model with a large, frozen, equal part, as with LoRA: only the other weights, and differences, are sent."""
    torch.manual_seed(0)
    base, other, adapter = nn.Linear(1000, 1000), nn.Linear(3, 3), nn.Linear(1000, 2)
    for parameter in (*base.parameters(), *other.parameters()):
        parameter.requires_grad_(False)
    with torch.no_grad():
        for parameter in (*other.parameters(), *adapter.parameters()):
            parameter += hvd.rank()
    model = nn.ModuleList([base, other, adapter])
    for thawed in (False, True):        # rank 0 has already unfrozen a weight
        if thawed and hvd.rank() == 0:
            base.bias.requires_grad_(True).data += 1
        state = TorchState(model, hvd.DistributedOptimizer(torch.optim.SGD(adapter.parameters(), 0.1)))
        before = hvd.statistics().total.bytes_sent
        state.sync()
        sent = hvd.statistics().total.bytes_sent - before
        assert sent < 100_000, sent
        weights = hvd.allgather_object([parameter.detach() for parameter in model.parameters()])
        assert all(map(torch.equal, *weights))


def parts_of_the_job():
    """sync() of an optimizer whose process set leaves out rank 1, and then of one whose set leaves out rank 0."""
    sets = [hvd.ProcessSet([0]), hvd.ProcessSet([1])]
    hvd.init(process_sets=sets)
    for process_set in sets:
        model, optimizer = make_training()
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), process_set=process_set)
        state = TorchState(model, optimizer, epoch=hvd.rank())
        state.sync()
        assert state.epoch == 0
        train(model, optimizer)
        state.commit()
    hvd.shutdown()


def outside_of_the_state():
    """Equal optimizers that no state has sent: ranks match them, though one has no batch in the first step."""
    hvd.init()
    runtime.options.elastic = True
    algorithm = hvd.algorithms.get("doublesqueeze", full_steps=0)       # of several phases
    pairs = [make_training() for _ in range(2)]
    wrapped = [hvd.DistributedOptimizer(optimizer, model.named_parameters(), algorithm=algorithm)
               for model, optimizer in pairs]
    TorchState(None).sync()
    if hvd.rank() == 0:
        sum(model(torch.ones(4, 3)).sum() * factor for factor, (model, _) in enumerate(pairs)).backward()
    for optimizer in wrapped:
        optimizer.step()
    numbers = [optimizer.reducer.number for optimizer in wrapped]
    assert numbers == sorted(numbers)
    hvd.shutdown()


def both():
    synchronization()
    frozen_weights()
    for of_given in (False, True):      # whether the scheduler was made for the given optimizer, or the wrapped one
        schedulers(of_given)
    hvd.shutdown()
    parts_of_the_job()
    outside_of_the_state()
    elastic_training()


def test_two_ranks(run_ranks):
    run_ranks(2, both)
