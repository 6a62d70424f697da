"""A DistributedOptimizer after another init() in one process: its number, and operations that had begun before."""
import pytest

torch = pytest.importorskip("torch")

import bagua_hvd.torch as hvd  # noqa: E402


def make(algorithm=None):
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
                                         algorithm=algorithm)
    return model, optimizer


def step(model, optimizer):
    optimizer.zero_grad()
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()


def again():
    hvd.shutdown()
    hvd.init()


def test_optimizers_made_before_and_after_a_reset_go_together(growing_job):
    before = make()
    again()
    after = make()
    assert after[1].reducer.number == before[1].reducer.number + 1
    # Both have buckets in flight, which must have different names.
    for model, _ in (before, after):
        model(torch.ones(2, 3)).sum().backward()
    for _, optimizer in (before, after):
        optimizer.step()


def test_sync_gives_numbers_of_rank_0(growing_job):
    from bagua_hvd.reduction.agreement import share_numbers

    _, optimizer = make()
    late = optimizer.reducer
    share_numbers([late], lambda mine: ([late.number + 4], {}, {0: mine[2][0] + 7}))
    assert {bucket.name for bucket in late.buckets} == {f"gradients.{late.number}.0"}
    assert late.model.name == f"weights.{late.number}"
    assert make()[1].reducer.number == late.number + 4


def test_sync_matches_optimizers_outside_of_the_state_by_their_parameters(growing_job):
    from bagua_hvd.reduction.agreement import share_numbers, takes_one_of

    def make_wide():
        model = torch.nn.Linear(5, 1)
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()).reducer

    ours, wide = make()[1].reducer, make_wide()     # on rank 0 in the other order, with another one of `ours`
    shared = {(0, wide.key): [20], (0, ours.key): [21, 22]}
    share_numbers((), lambda mine: ([], shared, {0: 30}))
    # Other ranks end the windows of these with another one: a rank without a batch takes part.
    assert not takes_one_of(wide, {21, 22}) and wide.numbered is None
    assert takes_one_of(wide, {20, 21}) and wide.buckets[0].name == "gradients.20.0"
    assert [make()[1].reducer.numbered, ours.number, make()[1].reducer.numbered] == [21, 22, 30]


def test_what_an_algorithm_had_begun_ends_with_the_connections(growing_job):
    model, optimizer = make(hvd.algorithms.get("async", sync_interval_ms=0))
    step(model, optimizer)
    step(model, optimizer)
    rounds = optimizer.reducer.model.scratch["rounds"]
    again()
    step(model, optimizer)
    assert optimizer.reducer.model.scratch["rounds"] is not rounds


def test_a_fragment_that_travels_is_saved_and_ends_with_the_connections(growing_job):
    def new():
        return make(hvd.algorithms.DiLoCo(3, 1, 1, mixing=0.5, outer_lr=2.0, outer_momentum=0.5, codec=None))

    model, optimizer = new()
    start = model.weight.detach().clone()
    for _ in range(3):
        step(model, optimizer)
    saved = {name: value.clone() for name, value in model.state_dict().items()}, optimizer.state_dict()
    again()
    step(model, optimizer)          # the fragment in flight is lost
    assert torch.allclose(model.weight, start - 0.8)
    for _ in range(3):              # then part of the next one: Delta = 1.2
        step(model, optimizer)
    assert torch.allclose(model.weight, start - (1.4 + 2 * 1.5 * 1.2) / 2)
    model, optimizer = new()
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    step(model, optimizer)          # the fragment arrives: Delta = 0.6
    assert torch.allclose(model.weight, start - (0.8 + 2 * 1.5 * 0.6) / 2)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_an_optimizer_made_alone_communicates(growing_job, op):
    model = torch.nn.Linear(3, 1)
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), op=op)
    assert hasattr(optimizer, "renumber") or optimizer.reducer is not None
    start = model.weight.detach().clone()
    step(model, optimizer)
    assert torch.allclose(model.weight, start - 0.2)
