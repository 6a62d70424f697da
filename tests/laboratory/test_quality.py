"""tests.laboratory.quality: verdicts, skipping of recorded trainings, and a training of each task."""
import math

import pytest
import torch

import bagua_hvd.torch as hvd
from tests.laboratory import records
from tests.laboratory.quality import grid, page
from tests.laboratory.quality.equivalence import judge
from tests.laboratory.quality.tasks import TASKS
from tests.laboratory.quality.training import OPTIMIZERS, UNITS, train


@pytest.mark.parametrize("ratios, word", [
    ([1.01, 1.02, 1.0, 1.015, 0.99], "within"), ([0.9, 0.91, 0.905], "within"),      # a lower loss is fine
    ([1.10, 1.11, 1.12, 1.10, 1.105], "not equivalent"), ([1.0, 1.2, 0.9, 1.1, 1.05], "inconclusive"),
    ([1.0, 1.0], "inconclusive"), ([1.0, 1.0, 1.0], "within"), ([1.0, math.nan, 1.0], "diverged"),
])
def test_verdicts(ratios, word):
    assert judge(ratios, 0.05, 0.05).word == word


def test_p_is_of_two_one_sided_tests():
    """By hand: the mean of the logarithms is 0.02, their deviation 0.01, with 4: t = (0.02 - ln 1.05) / 0.005."""
    logs = [0.02 + 0.01 * math.sqrt(3) / 2 * sign for sign in (-1, -1, 1, 1)]
    verdict = judge([math.exp(each) for each in logs], 0.05, 0.05)
    assert verdict.spread == pytest.approx(0.01) and verdict.change == pytest.approx(math.expm1(0.02))
    assert verdict.p == pytest.approx(0.005204, abs=1e-6)        # Student's t, 3 degrees of freedom, at -5.758


def append(folder, cell, loss, curve=(3.0, 2.0, 1.0), nbytes=8.0):
    samples = {"test_loss": ("nats", [loss]), "validation_loss": ("nats", [loss]),
               "bytes_per_step": ("bytes", [nbytes]), "curve_steps": ("steps", [10, 20, 30]), "curve": ("nats", curve)}
    return records.append(grid.EXPERIMENT, cell.setting(), samples, folder=folder, command="by hand")


def test_goes_on_where_it_was(tmp_path):
    assert grid.recorded(tmp_path) == []
    for cell in grid.tuning(["tabular"]):
        assert cell in grid.missing(grid.tuning(["tabular"]), grid.recorded(tmp_path))
        append(tmp_path, cell, abs(cell.rate - 0.1) + 1)
    found = grid.recorded(tmp_path)
    assert grid.missing(grid.tuning(["tabular"]), found) == []
    assert grid.best_rate("tabular", "sgd", found) == 0.1
    assert grid.best_rate("images", "sgd", found) is None
    with pytest.raises(ValueError, match="images, sgd: run --tune first"):
        grid.cells(["images"], ["bytegrad"], 4, ["iid"], [0], found)
    wanted = grid.cells(["tabular"], ["gradient_allreduce", "qadam"], 4, ["iid", "skewed"], [0, 1], found)
    assert len(wanted) == 12 and wanted[0].rate == 0.1      # qadam has no SGD
    record = append(tmp_path, wanted[0], 0.8)
    assert grid.missing(wanted, grid.recorded(tmp_path)) == wanted[1:]
    # A different default makes it another training.
    record.setting["defaults"]["average"] = False
    assert wanted[0].setting() != record.setting
    assert "object at" not in str(grid.defaults("auto")), "an address: no training would be found again"
    assert grid.defaults("topk")["empties_errors"]          # default behaviour is part of the training
    # A single rate needs no tuning.
    assert not grid.tuning(["code"]) and grid.cells(["code"], ["bytegrad"], 4, ["iid"], [0], [])[0].task == "code"
    # A task of OWN is for its rows only, and these are for no other.
    every = list(grid.rows())
    own = grid.cells(["long"], every, 4, ["iid"], [0], [])
    assert {"bytegrad", "diloco"} < {cell.algorithm for cell in own} and len(own) == len(grid.OWN["long"])
    sparing = grid.VARIANTS["diloco sparing"][1]
    code = grid.cells(["code"], every, 4, ["iid"], [0], [])
    assert sparing in [cell.arguments for cell in own] and sparing not in [cell.arguments for cell in code]
    assert any(cell.algorithm == "bytegrad" for cell in code)
    assert [page.steps_to(record, target) for target in (2.5, 2.0, 0.5)] == [15, 20, None]


def test_ranks_stand_for_hosts(tmp_path, monkeypatch):
    """low_precision_decentralized with hierarchy, on one host, is an average in full precision."""
    cell = grid.Cell("tabular", "adam", 0.016, "low_precision_decentralized", {}, 4, "iid", 0)
    append(tmp_path, cell, 1.0)
    assert grid.missing([cell], grid.recorded(tmp_path)) == [cell]
    monkeypatch.setenv("BAGUA_HIERARCHY", "0")
    append(tmp_path, cell, 1.0)
    assert grid.missing([cell], grid.recorded(tmp_path)) == []


def test_accuracy(tmp_path, monkeypatch):
    for seed, (exact, mine) in enumerate(((0.90, 0.89), (0.91, 0.91), (0.92, 0.90))):
        for cell in grid.cells(["mnist1d"], ["rotated"], 4, ["iid"], [seed], []):
            accuracy = exact if cell.algorithm == grid.REFERENCE else mine
            samples = {"test_loss": ("nats", [1.0]), "test_accuracy": ("1", [accuracy]),
                       "bytes_per_step": ("bytes", [8.0])}
            records.append(grid.EXPERIMENT, cell.setting(), samples, folder=tmp_path)
    read = grid.recorded
    monkeypatch.setattr(grid, "recorded", lambda **setting: read(tmp_path, **setting))
    head, _, line = page.own("mnist1d").splitlines()
    assert "accuracy lost, points" in head
    assert line == "| `rotated` | +1.0 ± 1.0 ? | 1 |"


def test_a_form_stays_what_it_is(tmp_path, monkeypatch):
    """By arguments or by default; a former default that is now a row with arguments counts for that row."""
    cell = grid.Cell("tabular", "adam", 0.016, "topk", {}, 4, "iid", 0)
    append(tmp_path, cell, 1.0)
    then = grid.defaults("topk")
    monkeypatch.setattr(grid, "defaults", lambda algorithm: {**then, "ratio": 0.1} if algorithm == "topk" else {})
    assert grid.recorded(tmp_path) == [] and grid.missing([cell], records.read(grid.EXPERIMENT, tmp_path)) == [cell]
    monkeypatch.setattr(grid, "VARIANTS", {"sparser": ("topk", {"ratio": then["ratio"]})})
    assert [grid.row_of(record.setting) for record in grid.recorded(tmp_path)] == ["sparser"]
    said = cell._replace(arguments={"ratio": then["ratio"]})
    assert grid.missing([said], grid.recorded(tmp_path)) == []


def test_optimizers_of_their_own(tmp_path, monkeypatch):
    """Muon has its own rates; algorithms with Muon are compared with full gradients with Muon."""
    assert grid.optimizers("tabular").keys() == {"sgd", "adam", "muon"}
    assert grid.optimizers("code").keys() == {"adam", "muon"} and len(grid.optimizers("code")["muon"]) == 1
    found = grid.cells(["code"], ["gradient_allreduce", "diloco"], 4, ["iid"], [0], [])
    assert [(cell.optimizer, cell.algorithm) for cell in found] == [
        ("adam", "gradient_allreduce"), ("adam", "diloco"), ("muon", "gradient_allreduce"), ("muon", "diloco")]
    for cell, loss in zip(found, (1.0, 1.1, 2.0, 2.2), strict=True):
        append(tmp_path, cell, loss)
    read = grid.recorded
    monkeypatch.setattr(grid, "recorded", lambda **setting: read(tmp_path, **setting))
    assert page.verdicts(4, "iid")["diloco", ("code", "muon")].change == pytest.approx(0.1)
    assert "diloco" in page.losses() and "muon" not in page.losses()


def muon():
    hvd.init()
    torch.manual_seed(0)
    x = torch.nn.Parameter(torch.randn(12, 3, 3, 3)), torch.nn.Parameter(torch.randn(5))
    mine = hvd.DistributedOptimizer(OPTIMIZERS["muon"](x, 0.1), algorithm="gradient_allreduce")
    y = [torch.nn.Parameter(each.detach().clone()) for each in x]
    adam, momentum = torch.optim.Adam(y[1:], 0.1), torch.zeros(12, 27, dtype=torch.float64)
    for _ in range(3):
        for each in (*x, *y):
            each.grad = None
        for one in (x, y):
            (one[0] ** 4).sum().add((one[1] ** 2).sum()).backward()
        mine.step()
        adam.step()
        momentum = 0.95 * momentum + y[0].grad.reshape(12, 27)
        # The nearest orthonormal matrix: M (M^T M)^(-1/2), by eigenvalues, on the smaller side.
        values, vectors = torch.linalg.eigh(momentum @ momentum.T)
        nearest = vectors @ torch.diag(values.rsqrt()) @ vectors.T @ momentum
        y[0].data -= 0.1 * 0.2 * math.sqrt(27) * nearest.reshape(y[0].shape).float()
        for one, other in zip(x, y, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_muon_steps_along_the_nearest_orthonormal_matrix(run_ranks):
    run_ranks(2, muon)


def test_arguments_that_came_later(tmp_path, monkeypatch):
    append(tmp_path, grid.Cell("tabular", "adam", 0.016, "topk", {}, 4, "iid", 0), 1.0)
    then = grid.defaults("topk")
    for value, counts in ((False, 1), (None, 1), (0, 0), (0.5, 0)):        # off: the training is the same
        monkeypatch.setattr(grid, "defaults", lambda algorithm, value=value: {**then, "later": value})
        assert len(grid.recorded(tmp_path)) == counts


def test_who_missed_the_margin(tmp_path, monkeypatch):
    for seed, (exact, mine, other) in enumerate(((1.0, 1.06, 1.08), (2.0, 2.04, 2.06))):
        losses = {"gradient_allreduce": exact, "bytegrad": mine, "topk": other}
        for cell in grid.cells(["code"], losses, 4, ["iid"], [seed], []):
            append(tmp_path, cell, losses[cell.algorithm])
    read = grid.recorded
    monkeypatch.setattr(grid, "recorded", lambda **setting: read(tmp_path, **setting))
    assert page.missed("code") == "in the mean of the seeds: `topk`; in any one seed: `bytegrad`, `topk`"
    assert page.missed("aside") == "in the mean of the seeds: none; in any one seed: none"
    assert page.worst("topk") == "within on 0 of 1, at worst +5 % (code, adam)"          # two seeds: undecided
    assert page.worst("topk+10+%") == "not trained yet"


def test_a_longer_interval(tmp_path, monkeypatch):
    exact = grid.Cell("tabular", "adam", 0.016, "gradient_allreduce", {}, 4, "iid", 0)
    for task, losses in (("tabular", (1.0, 1.1, 1.3)), ("tokens", (2.0, 2.1, 2.2)), ("code", (1.0, 1.0, 1.05)),
                         ("aside", (1.0, 0.9, 0.92))):
        for seed in (0, 1):
            base = exact._replace(task=task, seed=seed)
            diloco = base._replace(algorithm="diloco", arguments={"full_steps": 32})
            append(tmp_path, base, losses[0])
            append(tmp_path, diloco, losses[1])
            append(tmp_path, diloco._replace(arguments={}), 9.0)            # differs in more than the interval
            if seed == 0:
                append(tmp_path, diloco._replace(arguments={"full_steps": 32, "communication_interval": 16}), losses[2])
    read = records.read
    monkeypatch.setattr(records, "read", lambda experiment, **setting: read(experiment, tmp_path, **setting))
    assert page.interval("diloco", "8", "16") == (
        "tabular, adam +10.0 and +30.0 %; code, adam +0.0 and +5.0 %; tokens, adam +5.0 and +10.0 %; "
        "on 1 other tasks at most 2.0 points more")


def test_a_task_of_its_own(tmp_path, monkeypatch):
    for seed, (loss, nbytes) in enumerate(((1.02, 4.0), (1.03, 5.0), (1.04, 4.0))):
        rows = [grid.REFERENCE, "diloco sparing"]
        exact, mine = grid.cells(["long"], rows, 4, ["iid"], [seed], [])
        append(tmp_path, exact, 1.0, nbytes=200.0)
        append(tmp_path, mine, loss, nbytes=nbytes)
    read = grid.recorded
    monkeypatch.setattr(grid, "recorded", lambda **setting: read(tmp_path, **setting))
    assert page.own("long").splitlines()[-1] == "| `diloco sparing` | +3.0 ± 1.0 | 40 |"
    assert page.losses() == "No trainings yet." and not page.verdicts(4, "iid")


def trainings():
    hvd.init()
    for name, make in TASKS.items():
        if name in ("tabular", "mnist1d", "book"):
            continue        # their packages are not among the suite's
        task = make()
        for skewed in (False, True) if task.classes else (False,):
            shares = [torch.cat([y for (_, y), _ in zip(task.batches(rank, 4, 0, skewed), range(20), strict=False)])
                      for rank in (0, 2)]           # of four; they have different favoured labels
            counts = [torch.bincount(share.flatten(), minlength=400).float() for share in shares]
            alike = torch.nn.functional.cosine_similarity(counts[0], counts[1], dim=0)
            assert (alike < 0.8) == skewed, (name, skewed, alike)
        task.steps = 24
        if task.then:
            task.then.steps = 12
        got = train(task, next(iter(task.optimizers)), 0.01, "local_sgd", {}, 0, False)
        assert got.keys() == UNITS.keys()
        assert got["curve"][-1] < got["curve"][0] and got["test_loss"] < 6 and got["bytes_per_step"] > 0
        assert (got["apart"] > 0) == (task.steps % 2 != 0)
    for hook in grid.HOOKS:
        task = TASKS["images"]()
        task.steps = 24
        got = train(task, "adam", 0.01, hook, {}, 0, False)
        assert got["curve"][-1] < got["curve"][0] and got["apart"] == 0


@pytest.mark.long
def test_trainings(run_ranks):
    run_ranks(2, trainings, timeout=110)


def told():
    from tests.laboratory.quality.switching import USED, Told

    hvd.init()
    parameter = torch.nn.Parameter(torch.zeros(300))
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=0.1), [("p", parameter)], algorithm=Told(9))
    used = []
    for _ in range(9):
        optimizer.zero_grad()
        (parameter * torch.linspace(-1, 1, 300)).sum().backward()
        optimizer.step()
        plan = optimizer.algorithm.plan(optimizer.reducer.model)
        used.append((plan["algorithm"], plan["bucket_bytes"]))
    assert used == [USED[0]] * 2 + [USED[1]] * 3 + [USED[2]] * 4, used      # of the next step
    torch.testing.assert_close(parameter.detach(), torch.linspace(0.9, -0.9, 300), rtol=0.02, atol=0.02)


def test_told_when_to_switch(run_ranks):
    """Each plan is used for a third of the steps; the weights are those of exact averages, up to the codecs' errors."""
    run_ranks(2, told)
