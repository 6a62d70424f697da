"""Auto on several ranks: when it switches plans, how switches affect a training, and events during a switch.

Decisions depend on times, which tests cannot control: where a switch must happen, the test sets the predictions.
"""
import io
import json
import os
import signal
import time
import warnings

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.algorithms import Auto, ByteGrad, DoubleSqueeze, LocalSGD, PowerSGD, QAdam, Safety, auto
from bagua_hvd.codecs import block, float16, sign
from bagua_hvd.core import native
from bagua_hvd.core.vectors import array_view
from bagua_hvd.training.buckets import Bucket, Member
from bagua_hvd.tuning import tuner
from bagua_hvd.tuning.cost import Ranks
from bagua_hvd.tuning.network import UNKNOWN_MIB, Measured, measure
from bagua_hvd.tuning.predict import Window
from bagua_hvd.tuning.tuner import HOROVOD_HEADER, MEASURED_AFTER, SETTLES, Decision, Record

pytestmark = pytest.mark.timeout(150)
SHAPES = [(300, 20), (20,), (40, 50), (50,)]
GOOD, BAD = 50, 200             # per cent of the measured time


def predict(chosen):
    """Makes all windows equal, and predicts a plan to be fast if chosen(plan), else slow."""
    def predicted(self, figures, measured):
        return [figures.step * (GOOD if chosen(plan) else BAD) // 100 for plan in self._plans]

    tuner.Tuner.predict = predicted
    tuner.window = lambda *_: Window(10_000, 9_000, 5_000, (5_000,), (1.0,))


class Training:
    """Parameters whose gradients do not depend on them, so that sums over steps are known."""

    def __init__(self, algorithm, lr=0.125, **options):
        self.parameters = [nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
        named = [(f"p{place}", parameter) for place, parameter in enumerate(self.parameters)]
        self.optimizer = hvd.DistributedOptimizer(torch.optim.SGD(self.parameters, lr=lr), named, algorithm=algorithm,
                                                  **options)
        self.history = []
        self.made = 0

    def gradients(self, rank, step, scales=None):
        generator = np.random.default_rng([rank, step])
        return [torch.from_numpy(generator.standard_normal(shape).astype(np.float32)) * scale
                for shape, scale in zip(SHAPES, scales or [1] * len(SHAPES), strict=True)]

    def step(self, **options):
        self.optimizer.zero_grad()
        gradients = self.gradients(hvd.rank(), self.made, **options)
        sum((p * g).sum() for p, g in zip(self.parameters, gradients, strict=True)).backward()
        self.optimizer.step()
        self.made += 1
        algorithm, model = self.optimizer.algorithm, self.optimizer.reducer.model
        self.history.append((str(algorithm._tuner(model).plan), len(model.gradients)))

    def flat(self):
        return torch.cat([parameter.detach().flatten() for parameter in self.parameters])

    def exact(self, lr=0.125):
        """The parameters after all steps with exact averages."""
        total = [torch.zeros(shape, dtype=torch.float64) for shape in SHAPES]
        for step in range(self.made):
            for rank in range(hvd.size()):
                for part, gradient in zip(total, self.gradients(rank, step), strict=True):
                    part -= lr / hvd.size() * gradient.double()
        return torch.cat([part.flatten() for part in total]).float()

    def switches(self):
        """(step, plan) of every change."""
        names = [name for name, _ in self.history]
        return [(place, name) for place, (name, before) in enumerate(zip(names[1:], names, strict=False), 1)
                if name != before]


def all_alike(training):
    assert hvd.allgather_object(training.history) == [training.history] * hvd.size()
    assert torch.equal(training.flat(), hvd.broadcast(training.flat(), 0))


# --------------------------------------------------------------------------------------------- allowed algorithms


def test_classes():
    classes = {"gradient_allreduce": 0, "bytegrad": 1, "rotated": 1, "doublesqueeze": 2,
               "topk": 2, "powersgd": 2, "qadam": 2, "onebit_adam": 2,
               "decentralized": 3, "low_precision_decentralized": 3, "choco": 3, "local_sgd": 3, "diloco": 3,
               "async": 4, "auto": 0}
    assert {name: algorithms.get(name).safety for name in algorithms.names()} == classes
    assert ByteGrad(error_feedback=True).safety == Safety.E2
    assert algorithms.Algorithm.safety == Safety.E4         # the default


def test_what_may_be_chosen():
    assert list(Auto().algorithms) == ["gradient_allreduce"]
    assert list(Auto(up_to="E1").algorithms) == ["gradient_allreduce", "float16", "block(8)", "rotated(2)"]
    assert list(Auto(up_to="E2").algorithms)[4:] == ["block(4) with error feedback"]
    assert list(Auto(allow=[DoubleSqueeze(), "bytegrad", ByteGrad(hierarchical=False)]).algorithms) == \
        ["gradient_allreduce", "bytegrad", "ByteGrad", "DoubleSqueeze"]
    assert not Auto().relaxed and Auto(up_to="E1").relaxed and Auto(up_to="E2").safety == Safety.E2
    assert Auto(average=False).algorithms["gradient_allreduce"].average is False


def delay_with_strong_codecs():
    hvd.init()

    def adam():
        return torch.optim.Adam([nn.Parameter(torch.ones(3))])

    with pytest.warns(UserWarning, match=r"delay=1 with rotated\(2\): delay amplifies"):
        hvd.DistributedOptimizer(adam(), algorithm=Auto(up_to="E1"), delay=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        hvd.DistributedOptimizer(adam(), algorithm=Auto(up_to="E1"))
        hvd.DistributedOptimizer(adam(), algorithm=Auto(["bytegrad"]), delay=1)


def test_delay_with_strong_codecs(run_ranks):
    run_ranks(2, delay_with_strong_codecs)


NAMED = st.lists(st.sampled_from(["bytegrad", "doublesqueeze", "topk",
                                  "gradient_allreduce"]), max_size=4)


@given(NAMED, st.sampled_from(["E0", "E1", "E2"]))
def test_never_outside_of_what_is_allowed(allow, up_to):
    """Auto may choose exact averages (the first), named algorithms, and the defaults of a class up to `up_to`."""
    try:
        found = Auto(allow=allow, up_to=up_to).algorithms
    except ValueError as error:
        assert "Auto cannot choose" in str(error)
        return
    named = [type(algorithms.get(name)) for name in allow]
    assert next(iter(found)) == "gradient_allreduce"
    for name, algorithm in list(found.items())[1:]:
        defaults = any(name in added for safety, added in auto.DEFAULTS.items() if safety <= Safety[up_to])
        assert defaults or type(algorithm) in named
        assert not defaults or algorithm.safety <= Safety[up_to]


@pytest.mark.parametrize("arguments, sentence", [
    ({"up_to": "E3"}, "up_to='E3': expected E0, E1 or E2; algorithms of E3"),
    ({"allow": [QAdam()]}, "Auto cannot choose QAdam: it makes the optimizer's steps"),
    ({"allow": [DoubleSqueeze(momentum=0.9)]}, "Auto cannot choose DoubleSqueeze: with momentum of its own"),
    ({"allow": [LocalSGD()]}, "Auto cannot choose LocalSGD: leaving it would need the optimizer's state"),
    ({"allow": [PowerSGD()]}, "Auto cannot choose PowerSGD: its cost is unknown"),
    ({"allow": ["auto"]}, "Auto cannot choose auto: it is itself an Auto"),
    ({"allow": ["bytegrat"]}, "unknown algorithm 'bytegrat'"),
    ({"plan": {"algorithm": "bytegrad"}}, "the plan is of 'bytegrad', which is not allowed here"),
    ({"window": 0}, "window=0"),
])
def test_refusals(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        Auto(**arguments)


def test_a_model_ends_before_the_auto_that_served_it():
    class Model:
        cut_by_user = False

    served, model = Auto(up_to="E1"), Model()
    assert served.plan(model)["algorithm"] == "gradient_allreduce" and len(served._tuners) == 1
    del model
    assert not served._tuners


def test_autotune_is_auto(monkeypatch):
    monkeypatch.delenv("BAGUA_ALGORITHM", raising=False)
    monkeypatch.setenv("HOROVOD_AUTOTUNE", "1")
    assert isinstance(algorithms.choose(None, average=True), Auto)
    assert isinstance(algorithms.choose("gradient_allreduce", average=True), algorithms.GradientAllReduce)
    monkeypatch.setenv("BAGUA_ALGORITHM", "bytegrad")
    assert isinstance(algorithms.choose(None, average=True), ByteGrad)


# ------------------------------------------------------------------------------------------------------------ switches


def exact_all_along():
    """Buckets are repartitioned back and forth; results equal gradient_allreduce up to the order of additions."""
    auto.BUCKET_BYTES = None, 9000
    hvd.init()
    training = Training(Auto(window=2))
    predict(lambda plan: plan.bucket_bytes == 9000)
    for _ in range(60):
        training.step()
    all_alike(training)
    assert len(training.switches()) == 2 and training.history[-1][0] == "gradient_allreduce"
    assert {buckets for _, buckets in training.history} == {1, 2}
    torch.testing.assert_close(training.flat(), training.exact(), rtol=1e-4, atol=1e-4)
    assert hvd.statistics().plans[training.optimizer.reducer.model.name]["plan"] == "gradient_allreduce"
    limited = bool(os.environ.get("HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES"))
    assert (training.optimizer.reducer.model.timing is None) == limited        # nothing is recorded any more


def test_e0_changes_buckets_only(run_ranks):
    run_ranks(3, exact_all_along)


def test_the_last_window_does_not_end_a_trial(run_ranks):
    run_ranks(2, exact_all_along, env={"HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "2"})


def any_sizes():
    """For any shapes and any repartitions of buckets, the sums are those of exact averages."""
    sizes = None, 4000, 20_000
    auto.BUCKET_BYTES = sizes

    class Told(Auto):
        def after_step(self, model):
            tuner = self._tuner(model)
            tuner.plan = next(plan for plan in self._plans(model) if plan.bucket_bytes == wanted[training.made])

    hvd.init()
    training, wanted = None, []

    @settings(max_examples=12, derandomize=True, database=None, deadline=None, phases=[Phase.generate])
    @given(st.lists(st.integers(1, 3000), min_size=1, max_size=8),
           st.lists(st.sampled_from(sizes), min_size=2, max_size=6))
    def exact(lengths, plans):
        nonlocal training, wanted
        SHAPES[:] = [(length,) for length in lengths]
        wanted = plans
        training = Training(Told())
        for _ in plans:
            training.step()
        torch.testing.assert_close(training.flat(), training.exact(), rtol=1e-4, atol=1e-5)
        assert torch.equal(training.flat(), hvd.broadcast(training.flat(), 0))

    exact()


def test_e0_is_exact_for_any_sizes(run_ranks):
    run_ranks(3, any_sizes)


def with_errors(kind):
    """Switches to E2 and back, because the predicted gain does not come: no gradient is lost."""
    hvd.init()
    allowed = {"bytegrad": ByteGrad(error_feedback=True, hierarchical=True), "doublesqueeze": DoubleSqueeze(sign),
               "topk": algorithms.TopK(ratio=0.1)}[kind]
    training = Training(Auto(allow=[allowed], window=2))
    predict(lambda plan: plan.algorithm is allowed and plan.bucket_bytes is None)
    lossy = 0.0
    for _ in range(60):
        training.step()
        if training.history[-1][0] != "gradient_allreduce":
            lossy = max(lossy, (training.flat() - training.exact()).abs().max().item())
    all_alike(training)
    assert [name for _, name in training.switches()] == [type(allowed).__name__, "gradient_allreduce"]
    assert lossy > 1e-3
    torch.testing.assert_close(training.flat(), training.exact(), rtol=1e-4, atol=2e-4)
    assert not any("error" in bucket.state for bucket in training.optimizer.reducer.buckets) or \
        not any(array.any() for bucket in training.optimizer.reducer.buckets
                for array in (bucket.state["error"].worker, bucket.state["error"].server))


@pytest.mark.parametrize("kind", ["bytegrad", "doublesqueeze", pytest.param("topk", marks=pytest.mark.long)])
@pytest.mark.parametrize("hosts", ["aaa", "aab"])
def test_leaving_error_feedback_sends_what_it_holds(run_ranks, kind, hosts):
    run_ranks(3, with_errors, arguments={"kind": kind}, env=[{"BAGUA_HVD_HOST_ID": host} for host in hosts])


def changed_again():
    """The link changes twice; the second change is not measured yet, so predictions are for the first."""
    hvd.init()
    training = Training(Auto(up_to="E1", window=2))
    times = [10_000, 20_000, 20_000]
    tuner.window = lambda *_: Window(times.pop(0) if times else 40_000, 9_000, 5_000, (5_000,), (1.0,))
    tuner.Tuner.predict = lambda self, figures, measured: [
        figures.step // 2 if plan.name == "float16" and figures.step == 40_000 else figures.step
        for plan in self._plans]
    tuner.SHARE = 10**9
    for _ in range(60):
        training.step()
    assert not training.switches()
    assert training.optimizer.algorithm._tuner(training.optimizer.reducer.model)._spare_us < 0      # measured anew


def test_nothing_is_decided_on_a_line_that_is_not_known(run_ranks):
    run_ranks(2, changed_again)


def the_last_step_ends_a_window(late):
    """One rank leaves the job before the other one reports its window."""
    hvd.init()
    training = Training(Auto(up_to="E1", window=2))
    given = tuner.window

    def window(*arguments):
        time.sleep(2 * (hvd.rank() == late))
        return given(*arguments)

    tuner.window = window
    for _ in range(MEASURED_AFTER + SETTLES + 2):
        training.step()
    assert training.optimizer.algorithm._tuner(training.optimizer.reducer.model)._parts


@pytest.mark.parametrize("late", [0, 1])
def test_the_last_step_ends_a_window(run_ranks, late):
    run_ranks(2, the_last_step_ends_a_window, arguments={"late": late})


def without_memory():
    """A plan with error feedback is predicted to be the fastest, but its state does not fit in memory."""
    hvd.init()
    training = Training(Auto(up_to="E2", window=2))
    predict(lambda plan: plan.name.startswith("block(4)"))
    measure = tuner.measure
    tuner.measure = lambda *arguments: measure(*arguments)._replace(free_mib=0)
    for _ in range(40):
        training.step()
    assert not training.switches()


def test_a_plan_whose_state_does_not_fit_is_not_taken(run_ranks):
    run_ranks(2, without_memory)


def losing(name, scales):
    hvd.init()
    training = Training(Auto(allow=["bytegrad"], up_to="E1", window=2))
    predict(lambda plan: plan.name == name and plan.bucket_bytes is None)
    for _ in range(60):
        training.step(scales=scales if training.switches() else None)
    assert hvd.allgather_object(training.history) == [training.history] * hvd.size()
    assert [name for _, name in training.switches()] == [name, "gradient_allreduce"]
    first, second = (step for step, _ in training.switches())
    assert second - first < 20          # at the end of the first window, before the trial ends, and never again
    assert "is not tried again" in hvd.statistics().plans[training.optimizer.reducer.model.name]["why"]


@pytest.mark.parametrize("name, scales", [
    ("bytegrad", (1e-4, 1e-4, 1e3, 1e3)),       # layers of different ranges share a scale, which loses the small ones
    ("float16", (1, 1, 1, 1e5)),                # above 65504 is infinity
])
def test_codes_that_lose_too_much_are_left(run_ranks, name, scales):
    outputs = run_ranks(2, losing, arguments={"name": name, "scales": scales})
    assert f"codes of {name} lose" in outputs[0].output and f"codes of {name}" not in outputs[1].output


def overflowing():
    """Only one rank has the large gradient, in the last bucket; no step is made with the codes that would lose it."""
    hvd.init()
    training = Training(Auto(up_to="E1", window=2))
    predict(lambda plan: plan.name in ("float16", "block(8)") and plan.bucket_bytes is None)
    for _ in range(40):
        training.step(scales=(1e6 if hvd.rank() else 1, 1, 1, 1))
    all_alike(training)
    assert training.flat().isfinite().all() and [name for _, name in training.switches()] == ["block(8)"]
    tuner = training.optimizer.algorithm._tuner(training.optimizer.reducer.model)
    barred = {plan.name for plan, barred in zip(tuner._plans, tuner._hysteresis.barred, strict=True) if barred}
    assert barred == {"float16"}            # in every bucket size


def test_codes_are_tried_before_they_are_used(run_ranks):
    [first, _] = run_ranks(2, overflowing, env={"HOROVOD_LOG_LEVEL": "INFO", "BAGUA_DEFAULT_BUCKET_SIZE": "9000"})
    assert "codes of float16 would lose" in first.output


@pytest.mark.parametrize("values, ppm", [
    ([1, 2, 0], 0),
    ([1, 1e30, 0], tuner._PPM_MAX),
    ([1, np.inf, 0], 0),
    ([1, np.nan, 0], 0),
])
def test_only_what_was_finite_can_be_lost(values, ppm):
    bucket = Bucket("b", {0: Member("w", (3,), native.FLOAT32)})
    bucket.place(0, array_view(np.array(values, np.float32)))
    with np.errstate(invalid="ignore"):
        assert tuner._losses_ppm(bucket, float16) == ppm


def test_an_overflow_beyond_the_sample_is_seen():
    values = np.ones(3 * tuner._SAMPLE, np.float32)
    bucket = Bucket("b", {0: Member("w", values.shape, native.FLOAT32)})
    bucket.place(0, array_view(values))
    assert tuner._losses_ppm(bucket, float16) == 0
    values[-1] = 1e30
    assert tuner._losses_ppm(bucket, float16) == tuner._PPM_MAX
    assert tuner._losses_ppm(bucket, block(8)) < tuner._PPM_MAX


def noisy():
    """rotated loses a third of a gradient's norm, but another part of it in every step, so it may stay."""
    hvd.init()
    training = Training(Auto(up_to="E1", window=2))
    predict(lambda plan: plan.name == "rotated(2)" and plan.bucket_bytes is None)
    for _ in range(30):
        training.step()
    all_alike(training)
    assert [name for _, name in training.switches()] == ["rotated(2)"]


def test_noise_of_codes_is_no_loss(run_ranks):
    run_ranks(2, noisy)


def explained(folder):
    hvd.init()
    training = Training(Auto(up_to="E1", window=3, log=f"{folder}/auto.json"))
    predict(lambda plan: plan.name == "block(8)" and plan.bucket_bytes is None)
    for _ in range(36):
        training.step()
    if hvd.rank() == 0:
        training.optimizer.algorithm.save_plan(f"{folder}/plan.json")
    hvd.barrier()
    pinned = Training(Auto(up_to="E1", plan=f"{folder}/plan.json"))
    for _ in range(3):
        pinned.step()
    assert {name for name, _ in pinned.history} == {training.history[-1][0]}


def test_optimizers_share_the_files(tmp_path, monkeypatch):
    log, table = tmp_path / "auto.json", tmp_path / "tune.csv"
    for path in (log, table):
        path.write_text("of an earlier process\n")
    monkeypatch.setenv("BAGUA_AUTO_LOG", str(log))
    monkeypatch.setenv("HOROVOD_AUTOTUNE_LOG", str(table))
    network = Measured(Ranks(2, 2), 100, 1 << 20, 10000, (), (), 5, False)
    one, other = Record(), Record()
    order = [(one, "weights.0"), (one, "weights.0"), (other, "weights.1"), (one, "weights.0")]
    for step, (record, model) in enumerate(order):
        record.write(Decision(model, step, step + 4, "", "a", "a", 1, 1, 1, 0, 100, network, {"a": 1}, {"a": 1}, None),
                     True)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert [(row["model"], row["step"]) for row in rows] == [(model, step) for step, (_, model) in enumerate(order)]
    header, *lines = table.read_text().splitlines()
    assert header == HOROVOD_HEADER and len(lines) == 4 and header not in lines


def test_explained(run_ranks, tmp_path):
    env = {"HOROVOD_LOG_LEVEL": "INFO", "HOROVOD_AUTOTUNE_LOG": str(tmp_path / "tune.csv")}
    first, second = (result.output for result in run_ranks(2, explained, arguments={"folder": str(tmp_path)}, env=env))
    assert "auto: 2 ranks of one host, " in first and "auto: " not in second
    assert ": block(8) predicted " in first and "ms a step, gradient_allreduce measured " in first
    rows = [json.loads(line) for line in (tmp_path / "auto.json").read_text().splitlines()]
    assert [row["why"] for row in rows][:3] == ["first", "gain", ""]
    assert rows[0]["others"].keys() >= {"gradient_allreduce", "float16", "block(8)"}
    header, *table = (tmp_path / "tune.csv").read_text().splitlines()
    assert header == ("hierarchical_allreduce,hierarchical_allgather,torus_allreduce,cache_enabled,cycle_time_ms,"
                      "tensor_fusion_threshold,score")
    assert len(table) == len(rows) and all(row.startswith("0,0,0,1,0,") for row in table)
    for row, line in zip(rows, table, strict=True):
        assert float(line.split(",")[-1]) == pytest.approx(row["nbytes"] / row["measured_us"], rel=1e-4)


# ------------------------------------------------------------------------------------------ events during a switch


def killed():
    """Rank 1 dies after all ranks have decided, and before they switch."""
    hvd.init()
    training = Training(Auto(up_to="E2", window=2))
    predict(lambda plan: plan.name.startswith("block(4)"))
    deciding = training.optimizer.algorithm._tuner(training.optimizer.reducer.model)._hysteresis
    try:
        for _ in range(60):
            training.step()
            deciding = training.optimizer.algorithm._tuner(training.optimizer.reducer.model)._hysteresis
            if deciding.plan and hvd.rank() == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    except hvd.HorovodInternalError as error:
        assert error.rank == 1 and not training.switches()
        print("rank 1 is gone")
        return
    raise AssertionError("nobody noticed")


def test_a_rank_killed_in_the_middle_of_a_switch(run_ranks):
    results = run_ranks(3, killed, check=False)
    assert [result.returncode for result in results] == [0, -signal.SIGKILL, 0], results
    assert all("rank 1 is gone" in results[rank].output for rank in (0, 2))


def resumed():
    hvd.init()
    training = Training(Auto(up_to="E2", window=2))
    predict(lambda plan: plan.name.startswith("block(4)") and plan.bucket_bytes is None)
    while not training.history or training.history[-1][0] == "gradient_allreduce":
        training.step()
    for _ in range(3):
        training.step()
    file = io.BytesIO()
    torch.save(training.optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    again = Training(Auto(up_to="E2", window=1000))
    again.optimizer.load_state_dict(saved)
    with torch.no_grad():
        for mine, theirs in zip(again.parameters, training.parameters, strict=True):
            mine.copy_(theirs)
    again.made = training.made
    again.step()
    assert again.history[-1][0] == "block(4) with error feedback"
    tuner.Tuner.stepped = lambda self: None         # so that this tuner does not switch either
    training.step()
    assert torch.equal(again.flat(), training.flat()), "errors, too"
    # A plan that is no longer allowed, or has the number of another: exact averages, without the saved errors.
    for allowed in (), ["bytegrad", "doublesqueeze", "topk", ByteGrad()]:
        exact = Training(Auto(allowed, window=1000))
        exact.optimizer.load_state_dict(saved)
        exact.step()
        assert exact.history[-1][0] == "gradient_allreduce"


def test_checkpoint_and_resume(run_ranks):
    run_ranks(2, resumed)


def remembering():
    """Knowledge about plans survives join(), a new rank without it, and a checkpoint."""
    hvd.init()

    def known(training):
        learned = training.optimizer.algorithm._tuner(training.optimizer.reducer.model)._hysteresis
        return learned.barred, learned.ratios

    training = Training(Auto(up_to="E1", window=2))
    predict(lambda plan: plan.name == "float16" and plan.bucket_bytes is None)
    while not training.switches() or training.history[-1][0] == "float16":
        training.step(scales=[1e5 if training.switches() else 1] * len(SHAPES))
    barred, ratios = known(training)
    assert sum(barred) == 1 and sum(ratio > 0 for ratio in ratios) == 2
    if hvd.rank() == 1:
        training.optimizer.algorithm._tuners.clear()
    hvd.join()
    training.step()
    assert known(training) == (barred, ratios)
    again = Training(Auto(up_to="E1", window=2))
    again.optimizer.load_state_dict(training.optimizer.state_dict())
    again.step()
    assert known(again) == (barred, ratios)
    for _ in range(40):
        again.step()
    assert not again.switches()


def test_what_is_known_of_plans_is_not_forgotten(run_ranks):
    run_ranks(2, remembering)


def joining():
    """Rank 1 runs out of data before the others switch; afterwards it uses the same plan."""
    hvd.init()
    training = Training(Auto(up_to="E1", window=2))
    predict(lambda plan: plan.name == "float16" and plan.bucket_bytes is None)
    for _ in range(8 if hvd.rank() == 1 else 25):
        training.step()
    hvd.join()
    names = hvd.allgather_object(training.history[-1][0])
    assert names == ["float16", "gradient_allreduce", "float16"], names
    training.made = 30
    training.step()
    assert hvd.allgather_object(training.history[-1][0]) == ["float16"] * 3
    assert hvd.allgather_object(training.history[-1][1]) == [training.history[-1][1]] * 3


def test_a_rank_in_join_takes_up_the_plan(run_ranks):
    run_ranks(3, joining)


def disagreeing():
    """If rank 1 decides differently, all ranks stay exact."""
    hvd.init()
    training = Training(Auto(up_to="E1", window=2))
    predict(lambda plan: plan.name == ("float16" if hvd.rank() else "block(8)") and plan.bucket_bytes is None)
    for _ in range(40):
        training.step()
    all_alike(training)
    assert not training.switches()


def test_ranks_that_decide_differently(run_ranks):
    first, _ = run_ranks(2, disagreeing)
    assert "decided differently from equal inputs: all continue with gradient_allreduce" in first.output


def measured_here():
    hvd.init()
    training = Training("auto")
    for _ in range(45):
        training.step()
    found = training.optimizer.algorithm._tuner(training.optimizer.reducer.model)._measured
    assert hvd.allgather_object(found) == [found] * hvd.size()
    assert 0 < found.free_mib < UNKNOWN_MIB
    assert 0 < found.spent < 2_000_000 and found.small > 0 and found.large > 0
    all_alike(training)


def test_all_ranks_know_the_same(run_ranks):
    run_ranks(2, measured_here)


def hosts_of_process_sets():
    sets = [hvd.ProcessSet([0, 1]), hvd.ProcessSet([0, 2])]
    hvd.init(process_sets=sets)
    for group, hosts in zip(sets, (1, 2), strict=True):
        if group.included():
            assert measure(f"hosts.{hosts}", group, []).ranks == Ranks(2, hosts)


def test_the_hosts_of_a_process_set_are_its_own(run_ranks):
    run_ranks(3, hosts_of_process_sets, env=[{"BAGUA_HVD_HOST_ID": host} for host in "aab"])
