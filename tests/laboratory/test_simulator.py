"""The core's simulator against hand computations. Wire: 16 bytes of header, 66 a packet of 1448."""
import math
import os

import pytest

from bagua_hvd.core import native
from tests.laboratory import records, simulator
from tests.laboratory.hosts import why_impossible
from tests.laboratory.simulation import Network, Operation, allreduces, operations

pytestmark = pytest.mark.timeout(120)

LATENCY, RATE = 5e-3, 125e6


def wire(nbytes, rate=RATE):
    payload = nbytes + 16
    return (payload + 66 * math.ceil(payload / 1448)) / rate


@pytest.mark.parametrize("nbytes", [4, 1000, 1 << 16])
def test_doubling_of_two(nbytes):
    costs = Network(LATENCY, RATE, message_s=20e-6, load_s_per_byte=1e-10, reduce_s_per_byte=2e-10,
                    scale_s_per_byte=3e-10, store_s_per_byte=4e-10)
    found = allreduces(2, [nbytes], costs, "doubling", agrees=False)
    assert found == pytest.approx([LATENCY + wire(nbytes) + 2 * 20e-6 + nbytes * 10e-10] * 2, rel=1e-6)


def test_segments_of_doubling_share_the_line():
    found = allreduces(2, [1 << 20], Network(LATENCY, RATE), "doubling", agrees=False)
    assert found == pytest.approx([LATENCY + 4 * wire(1 << 18)] * 2)


@pytest.mark.parametrize("hosts", [2, 3, 5, 8])
def test_a_ring(hosts):
    """One segment for each chunk: 2 (n-1) sequential hops."""
    chunk = 4096
    found = allreduces(hosts, [chunk * hosts], Network(LATENCY, RATE), "ring", agrees=False)
    assert found == pytest.approx([2 * (hosts - 1) * (LATENCY + wire(chunk))] * hosts)


def test_halving_of_four():
    nbytes = 1 << 14
    hops = [nbytes // 2, nbytes // 4, nbytes // 4, nbytes // 2]
    found = allreduces(4, [nbytes], Network(LATENCY, RATE), "halving", agrees=False)
    assert found == pytest.approx([sum(LATENCY + wire(hop) for hop in hops)] * 4)


def test_one_slow_line():
    slow = Network(LATENCY, RATE, slow_rank=1, slow_latency_s=4 * LATENCY, slow_bytes_per_s=RATE / 10)
    found = allreduces(2, [1 << 16], slow, "doubling", agrees=False)
    # Rank 1's sends occupy its link for long; so do its receives.
    assert found == pytest.approx([4 * LATENCY + wire(1 << 16, RATE / 10)] * 2)
    ring = allreduces(4, [4 << 16], slow, "ring", agrees=False)
    assert max(ring) > 3 * max(allreduces(4, [4 << 16], Network(LATENCY, RATE), "ring", agrees=False))


def test_agreeing_takes_a_round_trip():
    found = allreduces(2, [], Network(LATENCY, RATE))
    # Rank 0 is done when its response has left.
    assert found == pytest.approx([LATENCY + 2 * wire(32), 2 * (LATENCY + wire(32))])
    carried = allreduces(2, [4], Network(LATENCY, RATE))
    assert carried == pytest.approx(found)
    found = allreduces(2, [4], Network(LATENCY, RATE), "doubling")
    assert max(found) == pytest.approx(2 * (LATENCY + wire(32)) + LATENCY + wire(4), rel=1e-3)


def test_allreduces_overlap_within_the_window():
    """Small ones do not wait for each other, up to 8 at once."""
    one, many = (max(allreduces(2, [4] * count, Network(LATENCY, RATE), agrees=False)) for count in (1, 8))
    assert many < 1.01 * one
    assert max(allreduces(2, [4] * 16, Network(LATENCY, RATE), agrees=False)) == pytest.approx(2 * one, rel=0.01)
    # 128 MiB each: nothing runs beside such an operation except small ones.
    large = max(allreduces(2, [128 << 20], Network(LATENCY, RATE), agrees=False))
    assert max(allreduces(2, [128 << 20, 1 << 17], Network(LATENCY, RATE), agrees=False)) > large + 0.9 * LATENCY
    assert max(allreduces(2, [128 << 20, 4], Network(LATENCY, RATE), agrees=False)) < large + 0.1 * LATENCY


def test_the_chosen_path_is_one_of_them():
    """It depends on the sizes: many hosts and few bytes do not take the ring, few hosts and many bytes do."""
    for hosts, nbytes, path in ((8, 4, "doubling"), (4, 1 << 24, "ring"), (64, 1 << 20, "halving")):
        chosen, forced = (allreduces(hosts, [nbytes], Network(1e-6, RATE), by, agrees=False) for by in ("chosen", path))
        assert chosen == forced


def test_four_thousand_hosts():
    found = max(allreduces(4096, [1 << 20], Network(50e-6, 10 * RATE), "halving"))
    assert 24 * 50e-6 < found < 0.1
    with pytest.raises(Exception, match="4096 hosts do more than .* steps on this path"):
        allreduces(4096, [1 << 20], Network(50e-6, RATE), "ring")


@pytest.mark.parametrize("path, hosts, nbytes", [("shared", 2, 4), ("ring", 1, 4), ("ring", 2, 5), ("star", 2, 4)])
def test_wrong_arguments(path, hosts, nbytes):
    with pytest.raises(ValueError):
        allreduces(hosts, [nbytes], Network(LATENCY, RATE), path)


def test_the_table(capsys):
    assert simulator.main(["--hosts", "2", "--rate", "1gbit", "--latency", "5", "--sizes", "4", "65536"]) == 0
    assert capsys.readouterr().out.count("\n") >= 2


def coded(kind, **how):
    """One operation over 1,000 floats, unencoded, or as one byte each with a header of 16."""
    codec = native.lib.BHVD_CODEC_MINMAX_UINT8 if kind != native.D_FP_S else 0
    return Operation(kind, 4000, codec=codec, **how)


def test_primitives():
    """Peers with their neighbours; owners: each gets its chunk, and sends it back."""
    network = Network(LATENCY, RATE)
    pair = operations(4, [coded(native.D_FP_S)], network, agrees=False)
    assert pair == pytest.approx([LATENCY + wire(4000)] * 4)
    code = native.lib.bhvd_encoded_size(native.lib.BHVD_CODEC_MINMAX_UINT8, native.FLOAT32, 1000, native.NULL)
    ring = operations(4, [coded(native.D_LP_S)], network, agrees=False)
    assert ring == pytest.approx([LATENCY + 2 * wire(code)] * 4)
    chunk = native.lib.bhvd_encoded_size(native.lib.BHVD_CODEC_MINMAX_UINT8, native.FLOAT32, 250, native.NULL)
    owners = operations(4, [coded(native.C_LP_S)], network, agrees=False)
    assert owners == pytest.approx([2 * (LATENCY + 3 * wire(chunk))] * 4)
    gathered = operations(4, [coded(native.C_LP_S, exchange=native.lib.BHVD_EXCHANGE_ALLGATHER)], network, agrees=False)
    assert gathered == pytest.approx([LATENCY + 3 * wire(code)] * 4)


def test_what_coding_costs():
    network = Network(LATENCY, RATE, encode_s_per_byte=1e-8, decode_s_per_byte=2e-8)
    free = operations(2, [coded(native.D_LP_S)], Network(LATENCY, RATE), agrees=False)
    found = operations(2, [coded(native.D_LP_S)], network, agrees=False)
    # Encoded once, and two codes are added: its own and the peer's.
    assert found == pytest.approx([free[0] + 4000 * (1e-8 + 2 * 2e-8)] * 2)


@pytest.mark.parametrize("wrong", [Operation(native.ALLGATHER, 4), Operation(native.C_LP_S, 4),
                                   Operation(native.D_FP_S, 5), Operation(native.D_FP_S, 4, topology=9)])
def test_wrong_operations(wrong):
    with pytest.raises(ValueError):
        operations(2, [wrong], Network(LATENCY, RATE))


@pytest.mark.skipif(why_impossible() is not None or not os.path.exists("/dev/net/tun"),
                    reason="hosts need root, iproute2 and TUN")
def test_measured_beside_simulated(tmp_path, capsys):
    """Real ranks on hosts with a delay of 2 ms."""
    assert simulator.main(["--measure", "--hosts", "2", "--rate", "1gbit", "--latency", "2", "--sizes", "4", "65536",
                           "--folder", str(tmp_path)]) == 0
    found = records.read("allreduce", tmp_path)
    assert [record.setting["nbytes"] for record in found] == [4, 65536]
    for record in found:
        expected = max(allreduces(2, [record.setting["nbytes"]], Network(2e-3, 125e6)))
        assert record.samples["simulated"].values == [expected]
        measured = record.samples["measured"].values
        assert len(measured) == simulator.COUNT and min(measured) >= 4e-3
        assert record.samples["processor"].values[0] > 0
    assert capsys.readouterr().out.count("measured") == 2
