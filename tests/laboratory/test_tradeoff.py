"""tests.laboratory.tradeoff: predictions against hand computations; the small mode measures and draws."""
import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys

import pytest

from bagua_hvd.bench import predict
from bagua_hvd.bench.predict import FRAMING, Network
from tests.laboratory import records, step_times
from tests.laboratory.hosts import why_impossible
from tests.laboratory.profiles import Profile
from tests.laboratory.tradeoff import __main__ as tradeoff
from tests.laboratory.tradeoff import page, predicted, to_quality
from tests.laboratory.tradeoff.__main__ import SMALL
from tests.laboratory.tradeoff.winners import winner

# Two gradients of 4 MB, each in its own bucket since BUCKET_NBYTES is 5 MB.
PROFILE = Profile("two", 0.010, 0.040, 0.005, [("b", (1000, 1000), 0.010), ("a", (1000, 1000), 0.040)])


def test_a_line_that_is_free_hides_all_but_the_last_bucket(monkeypatch):
    monkeypatch.setattr(predict, "BUCKET_NBYTES", 5 << 20)
    predict._buckets.cache_clear()
    one = 4e6 * FRAMING / 125e6 * 2         # an allreduce of two sends 2 (n-1)/n
    found = predicted.step_s("gradient_allreduce", PROFILE, Network(2, 125e6, 1e-3))
    assert one > 0.030                      # the second one waits for the link
    assert found == pytest.approx(0.010 + 0.010 + 2 * one / 2 * 1 + (2 + 2) * 1e-3 + 0.005)
    assert predicted.step_s("async", PROFILE, Network(2, 1.0)) == pytest.approx(0.055)
    assert predicted.step_s("gradient_allreduce, delay", PROFILE, Network(2, 125e6)) == pytest.approx(2 * one / 2)
    assert predicted.step_s("gradient_allreduce, delay", PROFILE, Network(2, 1250e6)) == pytest.approx(0.055)
    late = predicted.step_s("local_sgd", PROFILE, Network(2, 125e6))
    assert late == pytest.approx(0.055 + 2 * one / 2 / 4)


@pytest.mark.parametrize("option, wrong, sentence", [
    ("--rate", "none", "not a rate above 0"), ("--rate", "0gbit", "not a rate above 0"),
    ("--rate", "nangbit", "above 0"), ("--rate", "10", "not a rate such as"),
    ("--parameters", "10", "--parameters 50 or more"), ("--parameters", "nan", "50 or more"),
    ("--step-ms", "inf", "--step-ms more than 0"),
])
def test_figures_that_cannot_be_predicted_from(capsys, option, wrong, sentence):
    with pytest.raises(SystemExit):
        predict.main([option, wrong])
    assert sentence in capsys.readouterr().err


def test_the_least_relaxed_of_those_that_are_quick():
    assert winner(PROFILE, Network(2, 1e12)) == "gradient_allreduce"
    assert winner(PROFILE, Network(2, 1e3)) == "async"


def test_time_to_quality_is_time_per_step_times_steps(monkeypatch):
    base, exact, record = object(), object(), object()
    milliseconds = {base: 400.0, exact: 200.0, record: 100.0}
    monkeypatch.setattr(step_times, "newest", lambda **_: {
        "gradient_allreduce": base, "bytegrad, float8": exact,
        **dict.fromkeys(("bytegrad", "choco", "async", "topk"), record)})
    monkeypatch.setattr(step_times, "ms", milliseconds.get)
    monkeypatch.setattr(step_times, "why_not", lambda record: "")
    monkeypatch.setattr(to_quality, "trainings", lambda way, task: {"bytegrad": [(0.0, 1.25)], "choco": [(0.5, 0.6)],
                                                                    "async": [(math.inf, 0.0)]}.get(way, []))
    assert to_quality.sooner("gradient_allreduce", "1gbit") == 1.0
    assert page.speed_to_quality("bytegrad", "1gbit") == "3.2x"
    assert page.speed_to_quality("choco", "1gbit") == "2.5x"        # 0.5 in half of the time, 0.6 in a quarter of it
    assert page.speed_to_quality("async", "1gbit") == "never"
    assert to_quality.sooner("topk", "1gbit") is None         # no record of its quality
    monkeypatch.setattr(step_times, "why_not", lambda found: "unsteady" if found is record else "")
    assert page.speed_to_quality("bytegrad", "1gbit") == "?"


def test_steps_to_quality_are_of_the_same_arguments(monkeypatch):
    """local_sgd is timed with H = 4: trainings with 2 do not count for it, those from when 4 was the default do."""
    def curve(algorithm, arguments, losses, task="tokens", **defaults):
        setting = {"algorithm": algorithm, "arguments": arguments, "defaults": defaults, "task": task,
                   "optimizer": "adam", "rate": 0.1, "ranks": 4, "split": "iid", "seed": 0}
        samples = {"curve_steps": records.Samples("steps", [10, 20, 30]), "curve": records.Samples("nats", losses)}
        return records.Record("quality", setting, samples, "", None, {}, "", True)

    full_steps = {"full_steps": 4, "warmup_steps": 4}
    found = [curve("gradient_allreduce", {}, [3.05, 1.05, 1.0]),
             curve("local_sgd", {}, [3.05, 2.05, 1.05], communication_interval=4, **full_steps),
             curve("local_sgd", {}, [3.05, 1.05, 1.0], communication_interval=2, **full_steps),
             curve("local_sgd", {"communication_interval": 4}, [3.0, 2.0, 1.5], communication_interval=2, **full_steps)]
    monkeypatch.setattr(records, "read", lambda experiment, **setting: [
        record for record in found if all(record.setting[name] == value for name, value in setting.items())])
    grid = importlib.import_module("tests.laboratory.quality.grid")
    monkeypatch.setattr(grid, "defaults", lambda algorithm: {"communication_interval": 2, **full_steps})
    to_quality.trainings.cache_clear()
    # 30 steps, where gradient_allreduce needed 20; of these 0 to 3, 5, 7, 9, 11, 15, 19, 23 and 27 are exact.
    assert to_quality.trainings("local_sgd") == [(12 / 20, 18 / 20), (math.inf, 0.0)]
    assert to_quality.trainings("local_sgd", "images") == [] == to_quality.trainings("none")
    to_quality.trainings.cache_clear()


def test_what_a_step_late_hides(monkeypatch):
    ms = {"none": [100.0, 102.0], "gradient_allreduce": [141.0], page.LATE: [105.0, 103.0, 900.0]}
    found = [records.Record("late", {"way": way, "rate": "2gbit"}, {"ms": records.Samples("ms", [each])}, "", None, {},
                            "", True) for way, all_of_them in ms.items() for each in all_of_them]
    monkeypatch.setattr(records, "read", lambda experiment, model: found)
    monkeypatch.setattr(step_times, "ms", lambda record: record.samples["ms"].values[0])
    monkeypatch.setattr(step_times, "why_not", lambda record: "queued" if step_times.ms(record) == 900 else "")
    cells = [cell.strip() for cell in page.hidden().splitlines()[-1].split("|")]
    assert cells[1:-1] == ["2gbit", "1x", "101", "141", "104", "92%", "90%, 95%"]


def test_the_page_recommends_nothing_that_is_not_equivalent(monkeypatch):
    monkeypatch.setattr(page, "CHOICES", (("a network", "async", "async", {"rate": "100mbit"}, None),))
    with pytest.raises(ValueError, match="async is not equivalent on .*images"):
        page.choose()


@pytest.mark.skipif(shutil.which("node") is None, reason="no node")
def test_the_figure_in_the_browser_predicts_as_python_does():
    places = [(hosts, rate, latency, parameters, computing) for hosts in (2, 4, 64) for rate in (1e7, 1e9, 1e11)
              for latency in (0, 1e-3, 0.05) for parameters in (1e6, 25e6, 1e9) for computing in (0.01, 0.2)]
    script = f"""
        const {{tradeoffStep, TRADEOFF: data}} = require({json.dumps(str(records.ROOT / "docs" / "tradeoff.js"))});
        console.log(JSON.stringify({json.dumps(places)}.map(([hosts, rate, latencyS, parameters, computingS]) =>
            Object.values(data.algorithms).map(algorithm => tradeoffStep(algorithm, data.constants,
                {{hosts, bytesPerS: rate / 8, latencyS, parameters, computingS}})))));"""
    done = subprocess.run(["node", "-e", script], capture_output=True, text=True, timeout=60, check=True)
    for (hosts, rate, latency, parameters, computing), row in zip(places, json.loads(done.stdout), strict=True):
        profile, network = predict.even_profile(parameters, computing), Network(hosts, rate / 8, latency)
        expected = [predicted.step_s(way, profile, network) for way in predicted.WAYS.values()]
        assert row == pytest.approx(expected, rel=1e-9)


def test_predictions_name_the_losses_of_the_records():
    quality = importlib.import_module("tests.laboratory.quality.page")
    measured = {name: quality.spread(name) for name in predicted.WAYS if name != predict.EXACT}
    assert predict.LOSSES == {predict.EXACT: "the reference", **measured}


def test_every_way_is_predicted():
    for way in step_times.WAYS:
        assert predicted.step_s(way, PROFILE, Network(4, 125e6)) >= PROFILE.computing_s - 1e-9


def test_pictures_that_cannot_be_drawn_are_refused_before_anything_is_measured(monkeypatch, capsys):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "matplotlib" else find(name))
    monkeypatch.setattr(tradeoff, "_measure", lambda *_: pytest.fail("it measures"))
    for arguments in (["--output", "folder"], ["--pictures"]):
        with pytest.raises(SystemExit):
            tradeoff.main(arguments)
        assert "pictures need matplotlib: install it" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.skipif(why_impossible() is not None or not os.path.exists("/dev/net/tun"),
                    reason="needs root, iproute2 and /dev/net/tun")
def test_the_small_form(tmp_path):
    pytest.importorskip("torch")
    pytest.importorskip("matplotlib")
    done = subprocess.run([sys.executable, "-m", "tests.laboratory.tradeoff", "--small", "--output", tmp_path],
                          capture_output=True, text=True, timeout=190)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "| way" in done.stdout and "the least relaxed within 10 % of the quickest, predicted: " in done.stdout
    found = step_times.newest("tradeoff", tmp_path)
    assert set(found) == set(SMALL)
    # A sleep is never shorter than requested; bytes follow the formulas, whatever else the machine does.
    assert all(step_times.ms(record) >= 20 for record in found.values())
    for way in ("gradient_allreduce", "bytegrad"):
        said = predicted.sends(way, 2, 1e6).nbytes * FRAMING
        assert step_times.nbytes(found[way]) == pytest.approx(said, rel=0.1)
    assert step_times.nbytes(found["none"]) < 1e4
    for picture in ("step_times.png", "map.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")
    assert all(record.samples["plain TCP"].values for record in records.read("tradeoff", tmp_path))
