"""TorchState(every_step=True) on three real ranks, with failures at all points of a step, and its errors."""
import copy
import warnings

import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job.elastic import HostUpdateResult, notification_manager
from bagua_hvd.reduction.window import Window
from bagua_hvd.torch.elastic import state as state_module

RANKS, STEPS, BATCH = 3, 14, 2
DATA = torch.randn(STEPS * RANKS * BATCH * 2, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 1)).double()


def make_plain(model):
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def loss_of(model, indices):
    return (model(DATA[indices]) - 1).square().mean()


def replayed(passes):
    """The model of each rank after all steps, made by one process without failures."""
    model = make_model()
    models = [copy.deepcopy(model) for _ in range(RANKS)]
    optimizers = [make_plain(each) for each in models]
    states = [torch.Generator().manual_seed(100 + rank).get_state() for rank in range(RANKS)]
    together = BATCH * RANKS
    for step in range(STEPS):
        for rank, each in enumerate(models):
            optimizers[rank].zero_grad()
            torch.set_rng_state(states[rank])
            for begin in range(step * passes * together, (step + 1) * passes * together, together):
                loss_of(each, list(range(begin + rank, begin + together, RANKS))).backward()
            states[rank] = torch.get_rng_state()
        for parameters in zip(*(each.parameters() for each in models), strict=True):
            mean = sum(parameter.grad for parameter in parameters) / RANKS
            for parameter in parameters:
                parameter.grad = mean.clone()
        for optimizer in optimizers:
            optimizer.step()
    return models


def training(passes, behind):
    """behind: a rank that fails in a step whose average is complete on the other ranks only."""
    hvd.init()
    rank = hvd.rank()
    model = make_model()
    if rank:
        with torch.no_grad():
            model[0].weight.zero_()     # sync() copies rank 0's state to all ranks
    optimizer = hvd.DistributedOptimizer(make_plain(model), model.named_parameters(), backward_passes_per_step=passes)
    sampler = hvd.elastic.ElasticSampler(range(len(DATA)), shuffle=False)
    state = hvd.elastic.TorchState(model, optimizer, every_step=True, sampler=sampler, step=0, micro=0, log=())
    torch.manual_seed(100 + rank)
    entered, happened, made, wait = [], set(), [], Window.wait

    def once(event, step):
        return state.step == step and event not in happened and not happened.add(event)

    def fails_after_wait(window):
        failure = wait(window)
        return HorovodInternalError("simulated") if once("behind", 3) and rank == behind else failure

    Window.wait = fails_after_wait

    @hvd.elastic.run
    def train(state):
        entered.append((state.step, state.micro, sampler.processed_num))
        indices = list(sampler)
        while state.step < STEPS:
            for p in range(passes):
                share, indices = indices[:BATCH], indices[BATCH:]
                loss = loss_of(model, share)
                if once(f"before {p}", 5) and rank == 2:
                    raise HorovodInternalError("simulated")
                if p == 0 and rank == 0 and once("hosts", 9):
                    notification_manager.handle_hosts_updated(1, HostUpdateResult.added)
                loss.backward()
                if p < passes - 1:
                    count(state)
            optimizer.step()
            count(state)
            made.append(state.step)
            state.step += 1
            state.log = (*state.log, state.step)
            optimizer.zero_grad()
            if once("after", 8) and rank == 1:
                raise HorovodInternalError("simulated")

    def count(state):
        state.micro += 1
        sampler.record_batch(state.micro, BATCH)

    train(state)
    per_step = RANKS * BATCH * passes
    # The other ranks have completed the step that rank `behind` did not finish, so it continues with the next one.
    assert entered == [(step, step * passes, step * per_step) for step in (0, 4, *[5] * passes, 8, 9)], entered
    assert made == [step for step in range(STEPS) if (rank, step) != (behind, 3)], made
    assert state.log == tuple(range(1, STEPS + 1))
    models = replayed(passes)
    for parameter, expected in zip(model.parameters(), models[rank].parameters(), strict=True):
        torch.testing.assert_close(parameter, expected, rtol=1e-10, atol=1e-10)
    # Running statistics differ between ranks until all get those of the first rank that is ahead.
    statistics = hvd.allgather_object([model[1].running_mean, model[1].num_batches_tracked])
    assert {int(number) for _, number in statistics} == {STEPS * passes}
    first = 1 if behind == 0 else 0
    torch.testing.assert_close(statistics[first][0], models[first][1].running_mean, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("passes, behind", [(1, 1), (1, 0), (2, 2)])
def test_three_ranks(run_ranks, passes, behind):
    run_ranks(RANKS, training, arguments={"passes": passes, "behind": behind})


def joins(changes):
    """Rank 2 is new; changes: the rank that has changed its optimizer's state before."""
    hvd.init()
    rank = hvd.rank()
    model = make_model()
    optimizer = make_distributed(model)
    state = hvd.elastic.TorchState(model, optimizer, every_step=True)
    state.sync()
    loss_of(model, [0, 1, 2]).backward()
    optimizer.step()
    if rank == 2:
        state._every_step.completed = None
    if changes == rank:
        momentum = optimizer.state[model[4].bias]["momentum_buffer"]
        momentum.copy_(torch.nextafter(momentum, momentum + 1))
    if changes == 1:
        with pytest.raises(RuntimeError, match="rank 1 after step 1: weights or optimizer state are not bit-equal to "
                                               "those of rank 0"):
            state.sync()
    else:           # a new rank's state need not be equal
        state.sync()


@pytest.mark.parametrize("changes", [1, 2])
def test_ranks_that_differ_are_named_when_one_joins(run_ranks, changes):
    run_ranks(RANKS, joins, arguments={"changes": changes})


def recovers():
    """Few round trips: counters, samplers and random states are sent with the steps, unless they are large."""
    hvd.init()
    rank = hvd.rank()
    model = make_model()
    sampler = hvd.elastic.ElasticSampler(range(50))
    state = hvd.elastic.TorchState(model, make_distributed(model), every_step=True, sampler=sampler, step=rank, log="")
    state.sync()
    for log in ("", "x" * 5000):
        state.log = log
        before = hvd.statistics().total.operations
        state.sync()
        made = hvd.statistics().total.operations - before
        assert made == (3 if log else 1), made
        if rank == 1:       # becomes a new rank
            state._every_step.completed = None
            state.step, state.log = 9, "other"
            sampler.set_epoch(7)
        state.sync()
        assert (state.step, state.log, sampler.epoch) == (0, log, 0)


def test_a_recovery_takes_few_operations(run_ranks):
    run_ranks(2, recovers)


# --------------------------------------------------------------------------------------------------------- errors ----


def make_distributed(model=None, plain=make_plain, **arguments):
    model = model or make_model()
    return hvd.DistributedOptimizer(plain(model), model.named_parameters(), **arguments)


def make_lbfgs(model):
    return torch.optim.LBFGS(model.parameters())


@pytest.mark.parametrize("why, arguments", [
    ("with LocalSGD ranks have different models", {"algorithm": "local_sgd"}),
    ("with Async ranks have different models", {"algorithm": "async"}),
    ("with Auto a rank may be lost while weights change", {"algorithm": "auto"}),
    ("with op=Adasum a rank may be lost while weights change", {"op": hvd.Adasum}),
    ("with delay=1, losing a rank loses the gradients", {"delay": 1}),
    ("LBFGS changes weights between", {"plain": make_lbfgs}),
])
def test_one_sentence_names_what_cannot_keep_every_step(growing_job, why, arguments):
    state = hvd.elastic.TorchState(make_model(), make_distributed(**arguments), every_step=True)
    with pytest.raises(ValueError, match=f"cannot keep every step: {why}.*leave out every_step and call commit"):
        hvd.elastic.run(lambda state: None)(state)


@pytest.mark.parametrize("algorithm", ["gradient_allreduce", "bytegrad", "rotated", "topk", "powersgd"])
def test_algorithms_that_average_gradients_keep_it(growing_job, algorithm):
    model = make_model()
    state = hvd.elastic.TorchState(model, make_distributed(model, algorithm=algorithm), every_step=True)
    assert hvd.elastic.run(lambda state: 7)(state) == 7


def test_one_optimizer_and_handlers_that_receive(growing_job, monkeypatch):
    def refusal(**values):
        with pytest.raises(ValueError) as raised:
            hvd.elastic.TorchState(every_step=True, **values).sync()
        return str(raised.value)

    assert "the state holds no DistributedOptimizer" in refusal(optimizer=make_plain(make_model()))
    assert "between the steps of 2 optimizers" in refusal(optimizer=make_distributed(), other=make_distributed())

    class Counter:
        pass

    monkeypatch.setattr(state_module, "_handler_registry", [
        (Counter, state_module.StateHandler), *state_module.get_handler_registry()])
    assert "StateHandler has no receive(root_rank)" in refusal(optimizer=make_distributed(), counter=Counter())


def test_nothing_is_copied_and_commit_says_so_once(growing_job):
    model = make_model()
    optimizer = make_distributed(model)
    state = hvd.elastic.TorchState(model, optimizer, every_step=True, step=0)

    def step():
        loss_of(model, [0, 1, 2]).backward()
        optimizer.step()

    state.sync()
    step()
    weights = copy.deepcopy(model.state_dict())
    with pytest.warns(UserWarning, match="have nothing to do: delete these calls"):
        state.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state.commit()
        state.save()
    assert not any(vars(handler).get("_saved") for handler in state._handlers.values())
    loss_of(model, [3, 4]).backward()
    state.restore()
    torch.testing.assert_close(model.state_dict(), weights, rtol=0, atol=0)


def test_what_follows_the_training_function_is_not_observed(growing_job):
    model = make_model()
    optimizer = make_distributed(model)
    state = hvd.elastic.TorchState(model, optimizer, every_step=True)

    @hvd.elastic.run
    def train(state):
        assert optimizer.reducer.observer is not None
        hvd.shutdown()
        return "ended"

    assert train(state) == "ended" and optimizer.reducer.observer is None


@pytest.fixture
def one_rank():
    hvd.init()
    yield
    hvd.shutdown()


def test_the_script_runs_without_a_launcher(one_rank):
    """A single rank needs no communication."""
    model = make_model()
    optimizer = make_distributed(model)
    state = hvd.elastic.TorchState(model, optimizer, every_step=True, step=0)

    @hvd.elastic.run
    def train(state):
        while state.step < 2:
            optimizer.zero_grad()
            loss_of(model, [0, 1, 2]).backward()
            optimizer.step()
            state.step += 1
        return state.step

    assert train(state) == 2
