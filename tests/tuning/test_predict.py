"""Predictions and decisions as pure functions: deterministic, monotone, within the allowed plans."""
from itertools import accumulate
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_hvd.algorithms import ByteGrad, GradientAllReduce
from bagua_hvd.core import native
from bagua_hvd.primitives import block, float16, minmax_uint8
from bagua_hvd.training.model import StepTimes
from bagua_hvd.tuning import network as network_module
from bagua_hvd.tuning.cost import Ranks, allreduced, coded
from bagua_hvd.tuning.hysteresis import FIRST_PERCENT, GAIN_PERCENT, STAYS_STEPS, Hysteresis
from bagua_hvd.tuning.network import MOST_US, SIZES, Measured, critical_hops, extrapolated_us, speeds
from bagua_hvd.tuning.predict import (
    AGREED_HOPS,
    AT_ONCE,
    POINTS,
    RATE_KNOWN_TO,
    Part,
    Predictor,
    Window,
    points,
    total_line_bytes,
    window,
)
from bagua_hvd.tuning.tuner import Plan, Tuner

CODECS = float16, block(8), minmax_uint8
STEP = Window(30_000, 20_000, 15_000, tuple(range(5000, 5000 + 600 * 16, 600)), tuple(k / 16 for k in range(1, 17)))


def measured(hosts=2, small=200, large=20_000, oversubscribed=False):
    return Measured(Ranks(hosts, hosts), small, 1 << 21, large, (300,) * 3, (300,) * 3, 0, oversubscribed)


def exact(elements=1 << 20):
    return [Part(0.25, allreduced(elements // 4, native.FLOAT32)),
            Part(1.0, allreduced(3 * elements // 4, native.FLOAT32))]


def by_codes(codec, ranks, elements=1 << 20):
    return [Part(0.25, coded(codec, elements // 4, native.FLOAT32, ranks, True)),
            Part(1.0, coded(codec, 3 * elements // 4, native.FLOAT32, ranks, True))]


def step_us(parts, **network):
    return Predictor(measured(**network), CODECS).step_us(parts, STEP)


@pytest.mark.parametrize("hosts", [2, 3, 4])
def test_a_rate_is_what_was_measured(hosts):
    """On the network derived from a measurement, the simulator predicts the measured times."""
    from bagua_hvd.tuning.network import allreduces

    network = measured(hosts, small=400, large=90_000).network()
    assert max(allreduces(hosts, [4], network)) * 1e6 == pytest.approx(400, rel=0.05)
    assert max(allreduces(hosts, [1 << 21], network)) * 1e6 == pytest.approx(90_000, rel=0.1)


@given(st.integers(2, 5), st.integers(100, 50_000), st.lists(st.integers(0, 2_000_000), min_size=2, max_size=2))
def test_no_plan_is_slower_on_a_quicker_line(hosts, small, extra):
    quick, slow = sorted(extra)
    for parts in (exact(), *(by_codes(codec, Ranks(hosts, hosts)) for codec in CODECS)):
        assert step_us(parts, hosts=hosts, small=small, large=small * 6 + quick) <= \
            step_us(parts, hosts=hosts, small=small, large=small * 6 + slow) + 1


@given(st.integers(1000, 5_000_000))
def test_the_slower_the_line_the_more_codes_gain(large):
    """Once codes are faster than exact averages, they are on every slower link: the choice is monotone in the rate."""
    def gain(large):
        return step_us(exact(), large=large) - step_us(by_codes(block(8), Ranks(2, 2)), large=large)

    if gain(large) > 0:
        assert gain(large * 2) >= gain(large)


def test_a_far_line_is_measured_by_large_messages():
    """20 ms one way, 1 Gbit/s: 32 KiB take hardly longer than 4 bytes, so measuring 2 MiB is affordable."""
    assert extrapolated_us(0, 60_000, SIZES[0], 60_500, SIZES[1]) * 4 < MOST_US
    assert extrapolated_us(SIZES[0], 60_500, SIZES[1], 63_000, SIZES[2]) * 4 < MOST_US
    assert extrapolated_us(0, 1000, SIZES[0], 60_000, SIZES[1]) * 4 > MOST_US   # 4 Mbit/s


def test_hops_of_the_first_size_are_not_its_bytes():
    """Between 4 hosts 32 KiB have twice as many hops as 4 bytes, whose time must not count as a slow link."""
    assert critical_hops(4, SIZES[0]) == pytest.approx(2 * critical_hops(4, 4))
    slow = Measured(Ranks(4, 4), 41_164, SIZES[0], 84_011, (), (), 0, False)
    assert slow.network().bytes_per_s * 8e-6 > 300          # it used to be 49


@pytest.mark.parametrize("hosts, small, next_us, large, least, most", [
    (2, 40_850, 44_000, 59_001, 900, 1100),         # 1 Gbit/s, 20 ms: 2 MiB took a hop less than a single allreduce
    (2, 10_742, 12_700, 31_200, 700, 1100),         # 1 Gbit/s, 5 ms
    (2, 10_644, 11_300, 15_400, 3200, 4400),        # 4 Gbit/s, 5 ms
    (4, 41_164, 86_700, 116_000, 500, 1100),        # 1 Gbit/s, 20 ms, 4 hosts
])
def test_the_rate_of_a_far_line(hosts, small, next_us, large, least, most):
    """Measured between emulated hosts; earlier, the first rate was estimated as 2855 Mbit/s, the third as 11229."""
    known = Measured(Ranks(hosts, hosts), small, SIZES[2], large, (), (), 0, False, SIZES[1], next_us)
    assert least <= known.network().bytes_per_s * 8e-6 <= most


def test_the_rate_that_was_used_is_named():
    known = Measured(Ranks(2, 2), 10_742, SIZES[2], 400_000, (), (), 0, False, SIZES[1], 70_000)
    measured_rate = known.network().bytes_per_s * 8e-6
    assert known.describe() == f"2 hosts, {measured_rate:.0f} Mbit/s, 5.37 ms"
    assert known.describe(seen=1.0) == known.describe()
    assert known.describe(seen=1e8) == \
        f"2 hosts, 800 Mbit/s as training has sent ({measured_rate:.0f} when measured), 5.37 ms"


def test_a_line_carries_what_training_has_sent():
    """The rate is measured 20 times too low, with an allreduce for another link; the steps themselves correct it."""
    parts, slow = exact(), measured(large=400_000)
    assert total_line_bytes(parts, 2) == 4 * (1 << 20)  # 2 (n - 1) / n of each bucket, float32
    assert slow.network(seen=50e6).bytes_per_s == 50e6
    assert slow.network(seen=1.0) == slow.network()
    seen = Predictor(slow, CODECS, seen=50e6).step_us(parts, STEP)
    assert seen < step_us(parts, large=400_000) / 4
    assert seen == pytest.approx(1e6 * 4 * (1 << 20) / 50e6, rel=0.3)


@pytest.mark.parametrize("slower", [0.7, 1.0, 1.2, 1.6, 3.0])
def test_a_step_tells_the_rate(slower):
    """A step raises a rate that was measured too low, at most to twice the rate; a rate that was too high stays."""
    parts, true = exact(), measured(large=50_000)
    known = measured(large=round(50_000 * slower))
    was = known.network().bytes_per_s
    took = Predictor(true, CODECS).step_us(parts, STEP)
    assert Predictor(known, CODECS).rate(parts, STEP._replace(step=took)) == \
        pytest.approx(min(max(was, true.network().bytes_per_s), RATE_KNOWN_TO * was), rel=0.03)


class Gru(Tuner):
    """A tuner for a model with 7 gradients, 10.9 MB, on two hosts, 1 Gbit/s and 20 ms: exact plans and one of codes."""

    SIZES = (8000, 8_826_880, 2_048_000), (8000, 4_096_000, 6144, 3_145_728, 1_579_008, 2_048_000)
    UNTIL = tuple(done / 10_882_880 for done in (8000, 4_104_000, 4_110_144, 7_255_872, 8_834_880, 10_882_880))

    def __init__(self):
        self._model, self._codecs, self._carried = SimpleNamespace(delay=0), [block(8)], 0.0
        self._plans = [Plan("exact", GradientAllReduce(), None), Plan("exact", GradientAllReduce(), 2 << 20),
                       Plan("codes", ByteGrad(codec=block(8)), None)]
        self._parts = [[
            Part(done / sum(sizes), plan.algorithm.cost(size // 4, native.FLOAT32, Ranks(2, 2)))
            for size, done in zip(sizes, accumulate(sizes), strict=True)
        ] for plan, sizes in zip(self._plans, (*self.SIZES, self.SIZES[0]), strict=True)]
        self.plan = self._plans[0]

    def figures(self, step):
        return Window(step, 34_700, 32_900, (9200, 12_500, 31_200, 31_300, 32_700, 32_800), self.UNTIL)


@pytest.mark.parametrize("next_us, large, mbit", [
    (81_000, 151_000, 752), (81_000, 142_000, 863), (78_000, 125_000, 1120),
])
def test_what_is_wrong_with_a_rate_decides_nothing(next_us, large, mbit):
    """Measured: 170 ms a step, 150 in buckets of 2 MiB, 135 by codes. If a link was measured too slow, only the plan in
    use was predicted correctly, and the tuner stayed with it.
    """
    known = Measured(Ranks(2, 2), 40_724, 8 << 20, large, (300,), (300,), 0, False, 2 << 20, next_us)
    assert known.network().bytes_per_s * 8e-6 == pytest.approx(mbit, rel=0.03)
    gru = Gru()
    predicted = gru.predict(gru.figures(170_000), known)
    assert predicted == pytest.approx([170_000, 150_000, 135_000], rel=0.06)
    hysteresis = Hysteresis(kinds=(0, 0, 1))
    for number in (1, 2):
        verdict = hysteresis.decide(25 * number, 170_000, predicted, (True, True, False))
    assert (verdict.plan, verdict.why) == (1, "gain")


def test_a_line_that_hides_nothing():
    """By hand: all gradients ready at 10 ms, one bucket, computing 20 ms: the rest of the transfer is added."""
    flat = Window(0, 20_000, 10_000, (10_000,), (1.0,))
    predictor = Predictor(measured(small=2, large=1 << 21), CODECS)      # 1 byte per us
    assert predictor.step_us([Part(1.0, allreduced(1 << 18, native.FLOAT32))], flat) == \
        pytest.approx(20_000 + (1 << 20), rel=0.02)
    assert predictor.step_us([], flat) == 20_000


@pytest.mark.parametrize("buckets", [7, 8, 9, 17])
def test_many_buckets_wait_for_a_place(buckets):
    """On a link without transfer time: the latencies are those of the core's simulator for the same allreduces."""
    from bagua_hvd.tuning.network import allreduces

    known = measured(small=40_000, large=1)._replace(nbytes=1 << 20)
    network = known.network(1e12)
    flat = Window(0, 0, 0, (0,), (1.0,))
    parts = [Part((k + 1) / buckets, allreduced(1 << 15, native.FLOAT32)) for k in range(buckets)]
    simulated = max(allreduces(2, [1 << 17] * buckets, network))
    assert Predictor(known, CODECS, seen=1e12).step_us(parts, flat) == pytest.approx(simulated * 1e6, rel=0.01)
    rounds = -(-buckets // AT_ONCE)
    coded_parts = [Part((k + 1) / buckets, coded(float16, 1 << 10, native.FLOAT32, Ranks(2, 2), True))
                   for k in range(buckets)]
    assert Predictor(known, CODECS, seen=1e12).step_us(coded_parts, flat) == \
        pytest.approx((AGREED_HOPS + 2 * rounds) * network.latency_s * 1e6, rel=0.01)


def test_crowded_processors_pay_for_codes():
    parts = by_codes(block(8), Ranks(2, 2))
    assert step_us(parts, large=2, oversubscribed=True) > step_us(parts, large=2)


@pytest.mark.parametrize("ranks, hierarchical, sent", [
    (Ranks(4, 4), True, 2 * 3 / 4), (Ranks(4, 4), False, 2 * 3 / 4), (Ranks(4, 2), True, 2 * 1 / 2),
    (Ranks(4, 2), False, 2 * 2 * 2 / 4), (Ranks(4, 1), True, 2 * 3 / 4),
])
def test_bytes_of_codes(ranks, hierarchical, sent):
    """The bytes that the ranks of a host send to other hosts over its link."""
    cost = coded(minmax_uint8, 1 << 20, native.FLOAT32, ranks, hierarchical)
    assert cost.sent == pytest.approx(sent * (1 << 20), rel=0.001) and cost.rounds == 2


def test_what_errors_take():
    """The errors of a rank's contribution, and of the means that it sends on."""
    assert coded(float16, 1 << 20, native.FLOAT32, Ranks(4, 4), False, error_feedback=True).kept == 5 << 20
    assert coded(float16, 1 << 20, native.FLOAT32, Ranks(4, 4), False).kept == 0


def test_memory_that_is_left(tmp_path, monkeypatch):
    for name, text in (("_MEMINFO", "MemTotal: 9 kB\nMemAvailable:   3145728 kB\n"), ("_LIMIT", "1073741824\n"),
                       ("_USED", "1048576\n")):
        monkeypatch.setattr(network_module, name, tmp_path / name)
        (tmp_path / name).write_text(text)
    assert network_module.available_mib() == 1023
    (tmp_path / "_LIMIT").write_text("max\n")
    assert network_module.available_mib() == 3072
    (tmp_path / "_MEMINFO").unlink()
    assert network_module.available_mib() == network_module.UNKNOWN_MIB


def test_codecs_have_speeds():
    assert all(encode > 0 and decode > 0 for encode, decode in speeds(CODECS).result())


# ------------------------------------------------------------------------------------------------------------- windows


def test_a_window_is_medians_and_when_bytes_are_ready():
    steps = [StepTimes(30_000_000 + k, 10_000_000, 18_000_000, {0: 17_000_000, 1: 4_000_000}) for k in (0, 1000, 9000)]
    found = window(steps, [1, 0, 2], [100, 200, 100], [0.25, 0.26, 0.75, 1.0])
    assert (found.step, found.computing, found.backward) == (30_001, 20_001, 18_000)
    # A quarter of the bytes is ready at 4 ms, three quarters at 17; gradient 2 was never seen, so it counts at the end.
    assert found.ready == (4000, 17_000, 17_000, 18_000)
    assert [found.ready_at(part) for part in (0.01, 0.25, 0.255, 0.5, 0.75, 0.9, 1.0)] == \
        [4000, 4000, 17_000, 17_000, 17_000, 18_000, 18_000]


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=40))
def test_what_ends_a_bucket_is_ready_when_its_last_gradient_is(sizes):
    whole, times = sum(sizes), {place: 1000 * (place + 1) for place in range(len(sizes))}
    steps = [StepTimes(10**9, 0, 10**8, times)]
    until = [sum(sizes[:place + 1]) / whole for place in range(len(sizes))]
    found = window(steps, list(times), sizes, until)
    assert found.ready == tuple(range(1, len(sizes) + 1))
    assert [found.ready_at(part) for part in until] == list(found.ready)


@given(st.lists(st.floats(0.001, 1), max_size=200))
def test_points_are_the_ends_of_buckets_of_too_many_some(ends):
    found = points(ends)
    assert found == sorted(set(found)) and found[-1] == 1 and len(found) <= POINTS
    assert set(found) == {*ends, 1.0} if len({*ends, 1.0}) <= POINTS else set(found) < {*ends, 1.0}


# ----------------------------------------------------------------------------------------------------------- decisions

TIMES = st.lists(st.integers(1000, 10**6), min_size=4, max_size=4)
HISTORY = st.lists(st.tuples(st.integers(1000, 10**6), TIMES, st.booleans()), min_size=1, max_size=40)


def run(history, usable=(True,) * 4):
    hysteresis, taken = Hysteresis(kinds=(0, 1, 1, 1)), []
    for number, (step_us, predicted, lossy) in enumerate(history):
        before = hysteresis.plan
        verdict = hysteresis.decide(25 * (number + 1), step_us, predicted, usable, lossy)
        taken.append((before, verdict, step_us, predicted))
    return hysteresis, taken


@given(HISTORY, st.lists(st.booleans(), min_size=4, max_size=4))
def test_never_what_is_not_usable_and_never_again_what_loses(history, usable):
    usable[0] = True
    hysteresis, taken = run(history, usable)
    assert all(usable[verdict.plan] for _, verdict, *_ in taken)
    barred = set()
    for before, verdict, *_ in taken:
        assert verdict.plan not in barred
        barred |= {before} if verdict.why == "losses" else set()
    assert barred == {plan for plan, barred in enumerate(hysteresis.barred) if barred}


@given(HISTORY)
def test_equal_histories_decide_alike(history):
    assert run(history) == run(history)


@given(HISTORY)
def test_no_flapping(history):
    """A switch for a gain comes at least 200 steps after the previous switch, and was predicted in two windows."""
    _, taken = run(history)
    last = None
    for number, (before, verdict, measured_us, _) in enumerate(taken):
        if verdict.why == "gain":
            assert last is None or 25 * (number - last) >= STAYS_STEPS
            least = FIRST_PERCENT if last is None else GAIN_PERCENT
            assert (measured_us - verdict.predicted) * 100 >= least * measured_us
            assert number and taken[number - 1][1].plan == before
        if verdict.plan != before:
            last = number


def test_the_first_choice_takes_a_small_gain_and_the_next_ones_do_not():
    first, second = [100_000, 92_000, 95_000, 99_000], [100_000, 92_000, 80_000, 99_000]
    _, taken = run([(100_000, first, False)] * 2 + [(92_000, first, False)] * 12 + [(92_000, second, False)] * 2)
    assert [verdict.plan for _, verdict, *_ in taken] == [0] + [1] * 15
    assert taken[1][1].why == "gain" and taken[3][1].why == "confirmed"


def test_one_slow_window_makes_no_gain():
    """A trial is compared with the better of the two windows before it."""
    predicted = [100_000, 80_000, 90_000, 95_000]
    _, taken = run([(100_000, predicted, False), (140_000, predicted, False)] + [(100_000, predicted, False)] * 2)
    assert [verdict.why for _, verdict, *_ in taken] == ["", "gain", "", "disappointed"]


def test_a_gain_that_comes_is_kept_and_one_that_does_not_is_taken_back():
    predicted = [100_000, 50_000, 90_000, 95_000]
    for came, why, plan in ((60_000, "confirmed", 1), (90_000, "disappointed", 0)):
        hysteresis, taken = run([(100_000, predicted, False)] * 2 + [(came, predicted, False)] * 2)
        assert [verdict.why for _, verdict, *_ in taken] == ["", "gain", "", why]
        assert hysteresis.plan == plan
    # Afterwards it is not tried again on the same network.
    for number in range(5, 60):
        assert hysteresis.decide(25 * number, 100_000, predicted, (True,) * 4).why == ""
    # Other plans of its kind are expected to disappoint, too; on another network it may be tried again.
    assert any(hysteresis.decide(25 * number, 500_000, [500_000, 60_000, 450_000, 470_000], (True,) * 4).why == "gain"
               for number in range(60, 63))
