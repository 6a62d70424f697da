"""Measures the collectives of bagua_hvd through its public interface, beside torch's gloo and MPI.

Starts its ranks itself. Started as the ranks of a job (`baguarun -np N python -m bagua_hvd.bench`) it measures in that
job, without peers unless --backends names gloo.

Exit codes: 0; 1, a rank failed or a result was wrong; 2, a wrong command line; 128 + n, stopped by signal n.
"""
import argparse
import os
import re
import signal
import sys
from contextlib import nullcontext

# Before anything imports torch: a job's ranks measure in this very process.
os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = "1"

from bagua_hvd import algorithms, primitives  # noqa: E402
from bagua_hvd.bench import ceiling as machine_ceiling  # noqa: E402
from bagua_hvd.bench import collectives, device, hosts, negotiation, records, report, rounds  # noqa: E402
from bagua_hvd.bench.rank import ITEM_NBYTES, OPS, cases, measure  # noqa: E402
from bagua_hvd.bench.results import describe  # noqa: E402
from bagua_hvd.core import native, variables  # noqa: E402

BACKENDS = ("bagua", "gloo", "mpi")
CODECS = ("minmax_uint8",)
SIZES = "4,1K,64K,1M,16M,64M"
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


class _Parser(argparse.ArgumentParser):
    """One sentence instead of the whole usage; in a job, once."""

    def error(self, message):
        if _job_rank() == 0:
            sys.stderr.write(f"bench: error: {message} (see `python -m bagua_hvd.bench --help`)\n")
        sys.exit(2)


def _job_rank():
    return variables.read("HOROVOD_RANK")


def _size(text):
    match = re.fullmatch(r"(\d+)([KMG]?)", text.upper())
    if not match or int(match[1]) == 0:
        raise ValueError(f"--sizes: {text!r} is not a number of bytes such as 4, 64K or 16M")
    return int(match[1]) * _UNITS[match[2]]


def _positive(text):
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return int(text)


def _listed(texts):
    """Values given apart or with commas, each once."""
    return list(dict.fromkeys(value for text in texts for value in text.split(",") if value))


def _delay(text):
    if not re.fullmatch(r"\d{1,4}(\.\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of milliseconds, 0 to 9999")
    return float(text)


def _known(option, texts, known):
    values = _listed(texts)
    for value in values:
        if value not in known:
            raise ValueError(f"{option}: {value!r} is unknown; choose from {', '.join(known)}")
    if not values:
        raise ValueError(f"{option} names nothing; choose from {', '.join(known)}")
    return values


def _build_parser():
    parser = _Parser(
        prog="python -m bagua_hvd.bench", allow_abbrev=False, formatter_class=argparse.RawDescriptionHelpFormatter,
        description=__doc__, epilog="Lists are given with commas or apart: --op allreduce,broadcast --sizes 4 64K 16M.")
    parser.add_argument("-n", "-np", "--np", type=_positive, metavar="N", help="ranks; default 2, in a job its size")
    parser.add_argument("--op", nargs="+", metavar="OP", help=f"of {', '.join(OPS)}; default allreduce")
    parser.add_argument("--sizes", nargs="+", metavar="BYTES", default=[SIZES],
                        help=f"of the larger of a rank's input and output; K, M, G: powers of 1024; default {SIZES}")
    parser.add_argument("--dtype", choices=list(ITEM_NBYTES), default="float32", help="default float32")
    parser.add_argument("--backends", nargs="+", metavar="NAME",
                        help="of bagua, gloo (torch.distributed) and mpi (mpi4py); default all, in a job bagua")
    parser.add_argument("--rounds", type=_positive, metavar="R", default=3, help="of fresh ranks a backend; default 3")
    parser.add_argument("--iterations", type=_positive, metavar="I",
                        help="timed calls a size and round; default by size")
    parser.add_argument("--hosts", type=_positive, metavar="H",
                        help="spread the ranks over H hosts: network namespaces of this machine, made for it (root)")
    parser.add_argument("--rate", metavar="RATE", help="of every host's link: 100mbit, 1gbit, 10gbit ..., or none")
    parser.add_argument("--delay", type=_delay, metavar="MS",
                        help="from one host to another, one way, also 0: a process carries the packets")
    where = parser.add_mutually_exclusive_group()
    where.add_argument("--in-place", dest="in_place", action="store_true", default=True,
                       help="allreduce and broadcast overwrite the tensor; the default")
    where.add_argument("--out-of-place", dest="in_place", action="store_false", help="they return a new one")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--algorithm", metavar="NAME",
                      help=f"bagua's allreduce by an algorithm: {', '.join(algorithms.names())}")
    kind.add_argument("--codec", choices=CODECS, help="bagua's allreduce by the primitive C_LP_S with this codec")
    parser.add_argument("--many", action="store_true",
                        help="161 gradients of the sizes of ResNet-50's: all posted one by one, then waited for")
    parser.add_argument("--ceiling", action="store_true", help="what the machine gives: memcpy and loopback TCP")
    parser.add_argument("--negotiation", nargs="*", type=_positive, metavar="N",
                        help="what agreeing on an operation costs, for these numbers of ranks; default 2 4 8 16 32")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu",
                        help="cuda: instead, what a GPU does: copies and kernels; in a job, allreduces of its tensors")
    parser.add_argument("--json", metavar="FILE", help="also write everything, samples included, to this file")
    parser.add_argument("--plot", metavar="FILE", help="also draw time over size into this file (needs matplotlib)")
    parser.add_argument("--record", action="store_true",
                        help="append a record \"collectives\" for each case and backend, and those of plain TCP")
    parser.add_argument("--folder", default=str(records.FOLDER), help="of the records")
    return parser


def parse_options(arguments=None):
    """The options, checked. Wrong ones end the process with one sentence and exit code 2."""
    parser = _build_parser()
    options = parser.parse_args(arguments)
    try:
        _check(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _check(options):
    job_size = variables.read("HOROVOD_SIZE") if variables.given("HOROVOD_SIZE") else None
    if job_size and options.np not in (None, job_size):
        raise ValueError(f"-n {options.np}, but this is a job of {job_size} ranks: leave out -n, or baguarun")
    options.np = job_size or options.np or max(2, options.hosts or 0)
    _check_hosts(options, job_size)
    if options.device == "cuda":
        _check_device(options)
    if options.negotiation is not None:
        _check_negotiation(options, job_size)
    if options.op is None:
        # --many, --ceiling and --negotiation are measurements of their own.
        options.op = [] if options.many or options.ceiling or options.negotiation else ["allreduce"]
    else:
        options.op = _known("--op", options.op, OPS)
    options.sizes = list(map(_size, _listed(options.sizes)))
    options.backends = _known("--backends", options.backends or (["bagua"] if job_size else BACKENDS), BACKENDS)
    if job_size and "mpi" in options.backends:
        raise ValueError("--backends mpi: not in a running job; run `python -m bagua_hvd.bench` without baguarun")
    if options.algorithm or options.codec:
        _check_relaxed(options)
    if options.record:
        _check_record(options, job_size)
    for file in filter(None, (options.json, options.plot)):
        folder = os.path.dirname(file) or "."
        if not os.access(folder, os.W_OK) or os.path.isdir(file):
            raise ValueError(f"{file!r} cannot be written")
    if options.plot:
        _check_plot(options)


def _check_hosts(options, job_size):
    if options.hosts is None:
        for option in ("rate", "delay"):
            if getattr(options, option) is not None:
                raise ValueError(f"--{option} shapes the links between hosts: give --hosts too")
        return
    options.rate = options.rate or "none"
    if job_size:
        raise ValueError("--hosts: not in a running job; run `python -m bagua_hvd.bench` without baguarun")
    if options.hosts > 250 or options.np % options.hosts:
        raise ValueError(f"--hosts {options.hosts}: {options.np} ranks cannot be spread evenly over them")
    if options.rate != "none" and not re.fullmatch(r"\d+(\.\d+)?[kmgt]?bit", options.rate.lower()):
        raise ValueError(f"--rate: {options.rate!r} is not a rate such as 1gbit, nor none")
    if why := hosts.why_impossible():
        raise ValueError(why)


def _check_device(options):
    if options.hosts or options.op or options.many or options.ceiling or options.negotiation is not None:
        raise ValueError("--device cuda is a measurement of its own: only --sizes goes with it")
    if why := device.missing():
        raise ValueError(f"--device cuda: {why}")


def _check_negotiation(options, job_size):
    if job_size or options.hosts or options.op or options.many:
        raise ValueError("--negotiation starts jobs of its own on this host: no baguarun, --hosts, --op or --many")
    options.negotiation = options.negotiation or [2, 4, 8, 16, 32]


def _check_record(options, job_size):
    if job_size:
        raise ValueError("--record: not in a running job; run `python -m bagua_hvd.bench` without baguarun")
    if options.negotiation is not None or options.device == "cuda":
        raise ValueError("--record is for collectives and --ceiling: leave out --negotiation and --device cuda")


def _check_relaxed(options):
    dtype = getattr(native, options.dtype.upper())
    option = "--codec" if options.codec else "--algorithm"
    if options.op != ["allreduce"] or options.many or not options.in_place:
        raise ValueError(f"{option} is for allreduce in place only: leave out --many, --out-of-place and other --op")
    if options.codec:
        takes = getattr(primitives, options.codec).takes(dtype)
    else:
        algorithm = algorithms.get(options.algorithm)
        if type(algorithm).communicate is algorithms.Algorithm.communicate:
            raise ValueError(f"--algorithm {options.algorithm} does not communicate gradients: it has no allreduce")
        takes = algorithm.takes(dtype) and options.dtype.startswith(("float", "bfloat"))
    if not takes:
        raise ValueError(f"{option} {options.codec or options.algorithm} does not take {options.dtype}")


def _check_plot(options):
    if not options.op and not options.many and not options.negotiation:
        raise ValueError("--plot draws collectives: give --op or --many besides --ceiling")
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed: `pip install matplotlib`") from None
    extension = os.path.splitext(options.plot)[1][1:]
    known = Figure().canvas.get_supported_filetypes()
    if extension not in known:
        raise ValueError(f"--plot: {options.plot!r} ends in no format that matplotlib writes, such as .png or .svg")


def _label(name, options):
    """What a backend is called in the table."""
    relaxed = options.codec or options.algorithm
    return f"bagua:{relaxed}" if name == "bagua" and relaxed else name


def _measure_fresh(options, where):
    """What interleaved() returns, each round in ranks of its own. where: Hosts, or None."""
    names = []
    for name in options.backends:
        why = rounds.why_left_out(name, options)
        if why:
            print(f"note: {name} is left out: {why}.")
        else:
            names.append(name)
    return rounds.interleaved(names, options, lambda name: rounds.slowest(rounds.run_round(name, options, where)))


def _measure_in_job(options):
    """The same in the ranks of this job, of which this process is one."""
    from bagua_hvd.bench import backends

    bagua = backends.Bagua(options)
    made = {"bagua": bagua}
    if "gloo" in options.backends:
        made["gloo"] = backends.create_gloo_within(bagua)

    def run(name):
        return rounds.slowest(bagua.hvd.allgather_object(measure(name, made[name], options)))

    results, _ = rounds.interleaved(options.backends, options, run)
    for backend in reversed(made.values()):
        backend.close()
    # The other ranks are programs too: what is not ours is not known.
    return results, {}


def _run_negotiation(options):
    facts = report.machine()
    print(report.machine_line(facts), flush=True)
    found, others = [], {}
    for ranks in options.negotiation:
        options.np = ranks
        with rounds.OthersCpu() as cpu:
            results = [rounds.run_round("bagua", options, program="bagua_hvd.bench.negotiation")
                       for _ in range(options.rounds)]
        others[f"{ranks} ranks"] = [cpu.used]
        found += negotiation.rows(ranks, results)
    print("\n" + report.table(negotiation.COLUMNS, [row.cells() for row in found], left=2), flush=True)
    if busy := report.others_line(others):
        print("\n" + busy, flush=True)
    if options.json:
        report.write_json(options.json, facts, options, found, [], others)
    if options.plot:
        negotiation.write_plot(options.plot, found, report.machine_line(facts))


def _run(options):
    if options.negotiation:
        _run_negotiation(options)
        return
    if options.device == "cuda" and variables.given("HOROVOD_SIZE"):
        device.measure_job(options.sizes)
        return
    if options.device == "cuda":
        device.measure_kernels()
        return
    with hosts.Hosts(options.hosts, options.rate, options.delay) if options.hosts else nullcontext() as where:
        _run_on(options, where)


def _run_on(options, where):
    in_job = variables.given("HOROVOD_SIZE")
    speaks = _job_rank() == 0
    facts = report.machine()
    ceiling, rows, others = [], [], {}
    if speaks:
        print(report.machine_line(facts), flush=True)
    if options.ceiling and speaks:
        with rounds.OthersCpu() as cpu:
            lines = machine_ceiling.measure(where)
        if options.record:
            collectives.record_ceiling(options, facts["environment"], lines, cpu.used)
        ceiling = report.ceiling_rows(lines)
        print("\n" + report.table(report.CEILING_COLUMNS, list(map(report.ceiling_cells, ceiling)), left=2), flush=True)
    if options.op or options.many:
        if speaks:
            print(report.method_line(options, in_job), flush=True)
        results, others = _measure_in_job(options) if in_job else _measure_fresh(options, where)
        results, others = ({_label(name, options): of for name, of in found.items()} for found in (results, others))
        rows = report.rows(results, cases(options, options.np), options.np)
        if options.record:
            collectives.record(options, facts["environment"], cases(options, options.np), results, others)
        if speaks:
            print("\n" + report.table(report.COLUMNS, [row.cells() for row in rows], left=3), flush=True)
            if busy := report.others_line(others):
                print("\n" + busy, flush=True)
    if speaks and options.json:
        report.write_json(options.json, facts, options, rows, ceiling, others)
    if speaks and options.plot and rows:
        report.write_plot(options.plot, rows, report.machine_line(facts))


def _stop(signum, frame):
    sys.exit(128 + signum)


def main(arguments=None):
    """The program. Returns its exit code; a wrong command line and signals end the process."""
    options = parse_options(arguments)
    signal.signal(signal.SIGTERM, _stop)
    try:
        _run(options)
    except KeyboardInterrupt:
        print("bench: stopped by SIGINT.", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        sentence = str(error) if isinstance(error, rounds.RoundFailed) else describe(error)
        print(f"bench: error: {sentence}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
