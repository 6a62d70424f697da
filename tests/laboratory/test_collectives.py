"""tests.laboratory.collectives: programs write records of their measurements, and tables are made from these."""
import os
import subprocess
import sys
from argparse import Namespace

import pytest

from bagua_hvd.bench.rank import MIB, Case
from tests.laboratory import ceiling, collectives, records

pytestmark = pytest.mark.timeout(500)

# The tables use only measurements without variables that affect them.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("HOROVOD_", "BAGUA_"))}
QUIET, BUSY = [0.0, 0.09], [0.0, 0.11]


def cells(table):
    """The cells of a Markdown table, without its rule."""
    header, _, *lines = ([cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines())
    return [header, *lines]


def options(folder, **changed):
    """A program's options: `changed`, on one host otherwise."""
    return Namespace(**{"dtype": "float32", "np": 2, "hosts": None, "rate": None, "delay": None,
                        "sizes": [4, 64 * MIB], "models": ["mlp"], "algorithm": "gradient_allreduce",
                        "folder": str(folder), **changed})


def measured(folder, nbytes, seconds, op="allreduce", environment=None, others=QUIET, **changed):
    """Writes records of an operation. seconds: {backend: a median, put between two other samples}."""
    case = Case(op, nbytes // 4, nbytes)
    results = {backend: {case.key: [[0.0, median], [median, 9.0]]} for backend, median in seconds.items()}
    collectives.record(options(folder, **changed), environment or {}, [case], results, dict.fromkeys(seconds, others))


def trained(folder, seconds, command, others=QUIET, **changed):
    """Writes records of a training. seconds: {backend: the median step}."""
    results = {backend: {"mlp": [[median]]} for backend, median in seconds.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(records, "_command", lambda: command)
        collectives.record_training(options(folder, **{"hosts": 0, "rate": "10gbit", **changed}), {}, results,
                                    dict.fromkeys(seconds, others), ours=("bagua",))


def test_what_a_program_measured_is_in_its_records(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "tests.laboratory", "--op", "allreduce", "allgather", "--sizes", "4", "--rounds",
               "2", "--iterations", "2", "--backends", "bagua,gloo", "--record", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=ENVIRONMENT)
    assert done.returncode == 0, done.stderr
    found = records.read("collectives", tmp_path)
    assert [(each.setting["op"], each.setting["nbytes"], each.setting["backend"]) for each in found] == [
        ("allreduce", 4, "bagua"), ("allreduce", 4, "gloo"), ("allgather", 8, "bagua"), ("allgather", 8, "gloo")]
    for each in found:
        assert each.setting.items() >= {"ranks": 2, "hosts": 0, "rate": None, "delay_ms": None}.items()
        assert each.samples["samples in each round"].values == [1, 1]
        assert each.samples["call"].unit == "s" and all(0 < value < 60 for value in each.samples["call"].values)
        assert len(each.samples["call"].values) == 2
        assert each.command.startswith("python -m tests.laboratory --op")
        assert each.shared == (max(each.samples["others"].values) >= collectives.QUIET)
    _, of_4_bytes, *_ = cells(collectives.one_host(tmp_path))
    assert of_4_bytes[1] != "-" and of_4_bytes[3] == "-" != collectives.faster_than_gloo(tmp_path)


@pytest.mark.long
def test_what_a_training_measured_is_in_its_records(tmp_path):
    pytest.importorskip("torch")
    command = [sys.executable, "-m", "tests.laboratory.train", "--models", "mlp", "--rounds", "1", "--steps", "2",
               "--warmup-steps", "1", "--backends", "bagua", "none", "--record", "--folder", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, env=ENVIRONMENT)
    assert done.returncode == 0, done.stdout + done.stderr
    none, bagua = records.read("training", tmp_path)
    assert none.setting == {"model": "mlp", "backend": "none", "ranks": 2, "hosts": 0, "rate": None,
                            "algorithm": None, "environment": {}}
    assert bagua.setting == {**none.setting, "backend": "bagua", "algorithm": "gradient_allreduce"}
    assert len(bagua.samples["step"].values) == 2 and bagua.samples["samples in each round"].values == [2]
    assert collectives.exposed("mlp", folder=tmp_path).endswith("%")


def test_nothing_run(tmp_path):
    for table in (collectives.one_host, collectives.two_hosts, collectives.training, collectives.conditions):
        assert table(tmp_path) == "Nothing run yet."
    assert {collectives.faster_than_gloo(tmp_path), collectives.tcp_to_gloo("1gbit", tmp_path),
            collectives.exposed("mlp", folder=tmp_path),
            *(of(case, tmp_path) for of in (collectives.ours, collectives.theirs) for case in collectives.CASES),
            } == {"-"}


def test_one_host(tmp_path):
    measured(tmp_path, 4, {"bagua": 1.0, "gloo": 1.0, "mpi": 1.0})                      # replaced by a newer one
    measured(tmp_path, 4, {"bagua": 4.62e-6, "gloo": 151.4e-6, "mpi": 2.2e-6})
    measured(tmp_path, 64 * MIB, {"bagua": 6.004e-3, "gloo": 46.04e-3})
    measured(tmp_path, collectives.MANY, {"bagua": 1e-3}, op="many")
    for changed in ({"environment": {"BAGUA_HVD_ALLREDUCE": "ring"}}, {"np": 4},
                    {"dtype": "float64"}, {"hosts": 2, "rate": "1gbit"}):
        measured(tmp_path, 4, {"bagua": 3.0}, **changed)                                # other settings
    assert cells(collectives.one_host(tmp_path)) == [
        ["allreduce, float32", "bagua_hvd", "gloo", "MPICH"], ["4 B", "4.6 us", "151 us", "2.2 us"],
        ["64 KiB", "-", "-", "-"], ["1 MiB", "-", "-", "-"], ["64 MiB", "6.00 ms", "46.0 ms", "-"],
        ["ResNet-50's 161 gradients, 97.5 MiB", "1.00 ms", "-", "-"]]
    assert collectives.faster_than_gloo(tmp_path) == "8 to 33"
    assert (collectives.ours("4B", tmp_path), collectives.theirs("4B", tmp_path)) == ("4.6 us", "2.2 us")
    assert collectives.ours("4B-4-ranks", tmp_path) == collectives.ours("4B-2-hosts", tmp_path) == "3000.0 ms"


def test_two_hosts(tmp_path):
    between = {"hosts": 2, "rate": "10Gbit"}
    measured(tmp_path, 64 * MIB, {"bagua": 57.34e-3, "gloo": 84.8e-3, "mpi": 1.0}, **between)
    lines = [(ceiling.LINK, nbytes, [60.8e-3]) for nbytes in (4, MIB, 64 * MIB)] + [("memcpy, 1 process", 4, [1.0])]
    collectives.record_ceiling(options(tmp_path, **between), {}, lines, 0.0)
    found = records.read("collectives", tmp_path, backend="tcp")
    assert [each.setting["nbytes"] for each in found] == [4, 64 * MIB] and not found[0].shared
    assert cells(collectives.two_hosts(tmp_path))[1:] == [
        ["1 Gbit/s", "-", "-", "-"], ["10 Gbit/s", "57.3 ms", "84.8 ms", "60.8 ms"]]
    assert collectives.tcp_to_gloo("10gbit", tmp_path) == "1.4x"


def test_exposed_is_by_the_run_it_was_measured_in(tmp_path):
    trained(tmp_path, {"bagua": 0.1, "none": 0.09, "gloo": 0.2}, "first")
    trained(tmp_path, {"none": 0.08, "bagua": 0.1}, "second")
    trained(tmp_path, {"gloo": 0.3}, "alone")                                           # without one to compare it to
    trained(tmp_path, {"none": 0.08, "bagua": 0.01}, "third", algorithm="bytegrad")
    trained(tmp_path, {"none": 0.05, "bagua": 0.1, "tcp": 0.04}, "hosts", hosts=2)
    table = cells(collectives.training(tmp_path))
    assert table[0] == ["", "without", "bagua_hvd", "exposed", "gloo (DDP)", "exposed"]
    assert table[1] == ["one host, perceptron", "80.0 ms", "100.0 ms", "20%", "200.0 ms", "55%"]
    assert table[2] == ["one host, convolutions", *"-----"]
    assert table[3] == ["2 hosts, 10 Gbit/s, perceptron", "50.0 ms", "100.0 ms", "50%", "-", "-"]
    assert collectives.exposed("mlp", "2", "10gbit", "tcp", tmp_path) == "0%"


def test_conditions_name_machine_revision_and_day_once(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "revision", lambda: "abc")
    measured(tmp_path, 4, {"bagua": 1.0, "gloo": 1.0})
    measured(tmp_path, 64 * MIB, {"bagua": 1.0}, others=BUSY)
    measured(tmp_path, MIB, {"bagua": 1.0}, others=[None, 0.0])
    measured(tmp_path, 12, {"bagua": 1.0})                                              # in no table
    trained(tmp_path, {"none": 1.0, "bagua": 1.0}, "run")
    sentence = collectives.conditions(tmp_path)
    machine = records.read("collectives", tmp_path)[0].machine
    assert sentence.startswith(f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB (")
    assert sentence.count(machine["cpu"]) == 1 and "), revision `abc`, 2" in sentence
    assert sentence.endswith("; other programs used less than 0.1 cores in every round of 4 of 6 measurements.")
