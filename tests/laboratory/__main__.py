"""Runs the collectives of bagua_hvd.bench between emulated hosts, and measures the machine's own limits.

Exit codes: 0; 1, a rank failed or a result was wrong; 2, invalid arguments; 128 + n, stopped by signal n.
"""
import argparse
import re
import sys
from contextlib import nullcontext

from bagua_hvd.bench import __main__ as bench
from bagua_hvd.bench import report, rounds
from bagua_hvd.bench.rank import cases
from tests.laboratory import ceiling, collectives, hosts, negotiation, records
from tests.laboratory.cores import Nearness


def _delay(text):
    if not re.fullmatch(r"\d{1,4}(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds, 0 to 9999")
    return float(text)


def add_hosts(parser, rate=None):
    """Adds the options for emulated hosts and for records."""
    parser.add_argument("--hosts", type=bench.positive, metavar="H",
                        help="spread the ranks over H hosts: network namespaces of this machine, made for it (root)")
    parser.add_argument("--rate", metavar="RATE", default=rate,
                        help="of every host's link: 100mbit, 1gbit, 10gbit ..., or none")
    parser.add_argument("--delay", type=_delay, metavar="MS",
                        help="from one host to another, one way, also 0: a process carries the packets")
    parser.add_argument("--record", action="store_true", help="append what was measured to the records")
    parser.add_argument("--folder", default=str(records.FOLDER), help="of the records")


def _build_parser():
    parser = bench.build_parser()
    parser.prog, parser.description = "python -m tests.laboratory", __doc__
    add_hosts(parser)
    parser.add_argument("--ceiling", action="store_true", help="what the machine gives: memcpy and TCP")
    parser.add_argument("--negotiation", nargs="*", type=bench.positive, metavar="N",
                        help="what agreeing on an operation costs, for these numbers of ranks; default 2 4 8 16 32")
    return parser


def check_hosts(options):
    """Checks them; raises ValueError."""
    if bench.job_size():
        raise ValueError("the laboratory starts ranks of its own: run it without baguarun")
    if options.hosts is None:
        for option in ("rate", "delay"):
            if getattr(options, option) is not None:
                raise ValueError(f"--{option} shapes the links between hosts: give --hosts too")
        return
    options.rate = options.rate or "none"
    options.np = options.np or max(2, options.hosts)
    if options.hosts > 250 or options.np % options.hosts:
        raise ValueError(f"--hosts {options.hosts}: {options.np} ranks cannot be spread evenly over them")
    if options.rate != "none" and not re.fullmatch(r"\d+(\.\d+)?[kmgt]?bit", options.rate.lower()):
        raise ValueError(f"--rate: {options.rate!r} is not a rate such as 1gbit, nor none")
    if why := hosts.why_impossible():
        raise ValueError(why)


def _check(options):
    check_hosts(options)
    if options.negotiation is not None:
        if options.hosts or options.op or options.many or options.record:
            raise ValueError("--negotiation is a measurement of its own: no --hosts, --op, --many or --record")
        options.negotiation = options.negotiation or [2, 4, 8, 16, 32]
    elif options.ceiling and options.op is None:
        options.op = []


def parse_options(arguments=None):
    """The checked options. Invalid ones end the process with one sentence and exit code 2."""
    return bench.parse_options(arguments, _build_parser(), _check)


def emulated(options):
    """A context manager that yields the hosts, or None if the options have none."""
    return hosts.Hosts(options.hosts, options.rate, options.delay) if options.hosts else nullcontext()


def guard(options):
    """On one host, repeats rounds in which its cores were moved apart; see Nearness."""
    return None if options.hosts else Nearness()


def _described(options):
    if not options.hosts:
        return ""
    late = "" if options.delay is None else f", {options.delay:g} ms one way"
    return f" on {options.hosts} hosts, links {options.rate}{late}"


def _run_negotiation(options):
    facts = report.machine()
    print(report.machine_line(facts), flush=True)
    found, others = [], {}
    for ranks in options.negotiation:
        options.np = ranks
        with rounds.others_cpu() as cpu:
            results = [rounds.run_round("bagua", options, program=negotiation.__name__) for _ in range(options.rounds)]
        others[f"{ranks} ranks"] = [cpu.used]
        found += negotiation.rows(ranks, results)
    print("\n" + report.table(negotiation.COLUMNS, [row.cells() for row in found], left=2), flush=True)
    if busy := report.others_line(others):
        print("\n" + busy, flush=True)
    if options.json:
        report.write_json(options.json, facts, options, found, others)


def _run_ceiling(options, environment, where):
    with rounds.others_cpu() as cpu:
        lines = ceiling.measure(where)
    if options.record:
        collectives.record_ceiling(options, environment, lines, cpu.used)
    print("\n" + report.table(ceiling.COLUMNS, list(map(ceiling.cells, ceiling.rows(lines))), left=2), flush=True)


def _run(options):
    if options.negotiation:
        _run_negotiation(options)
        return
    environment = report.machine()["environment"]
    with emulated(options) as where:
        if options.ceiling:
            _run_ceiling(options, environment, where)
        if options.op or options.many:
            results, others = bench.measure_and_print(options, where, _described(options), guard(options))
            if options.record:
                collectives.record(options, environment, cases(options, options.np), results, others)


if __name__ == "__main__":
    sys.exit(bench.run(_run, parse_options()))
