"""The records of the collectives and of training steps, and the parts of docs/performance.md made from them.

    python -m bagua_hvd.bench --record          appends a record "collectives" for each case and backend
    python -m bagua_hvd.bench.train --record    appends a record "training" for each model and backend

The newest of the records with equal settings counts. Times are medians over all rounds' samples. Plain TCP (--ceiling)
is the backend "tcp" with the op "exchange": two processes send each other nbytes simultaneously.
"""
import statistics
from typing import Any

from bagua_hvd.bench import report
from bagua_hvd.bench.rank import ITEM_NBYTES, KIB, MIB, human_nbytes, resnet50_counts
from tests.laboratory import ceiling, records

# Maximum of the cores that other programs use in each round of a record that is not `shared`.
QUIET = 0.1
# Default settings of the tables' cases.
USUAL: dict[str, Any] = {
    "op": "allreduce", "dtype": "float32", "ranks": 2, "hosts": 0, "rate": None, "delay_ms": None, "in_place": True,
    "environment": {}}
SHOWN = {"bagua": "bagua_hvd", "gloo": "gloo", "mpi": "MPICH"}
MANY = ITEM_NBYTES["float32"] * sum(resnet50_counts())
ONE_HOST: dict[str, dict[str, Any]] = {
    **{human_nbytes(nbytes): {"nbytes": nbytes} for nbytes in (4, 64 * KIB, MIB, 64 * MIB)},
    f"ResNet-50's 161 gradients, {MANY / MIB:.1f} MiB": {"op": "many", "nbytes": MANY}}
TWO_HOSTS: dict[str, dict[str, Any]] = {
    shown: {"nbytes": 64 * MIB, "hosts": 2, "rate": rate}
    for shown, rate in (("1 Gbit/s", "1gbit"), ("10 Gbit/s", "10gbit"))}
TCP: dict[str, Any] = {"op": "exchange", "dtype": None, "in_place": None}
# Single figures in the text, most of them cases where MPICH is or was faster.
CASES: dict[str, dict[str, Any]] = {
    "64MiB": {"nbytes": 64 * MIB},
    "4B": {"nbytes": 4}, "1KiB": {"nbytes": KIB}, "4B-4-ranks": {"nbytes": 4, "ranks": 4},
    **{f"{op}-{shown}": {"op": op, "nbytes": nbytes} for op in ("alltoall", "allgather")
       for shown, nbytes in (("4KiB", 4 * KIB), ("64MiB", 64 * MIB))},
    "4B-2-hosts": {"nbytes": 4, "hosts": 2, "rate": "1gbit"},
}
# Of CASES, where MPICH is faster: a name, and why.
SLOWER = {
    "4B": ("4 B, one host", "half of it is Python"), "1KiB": ("1 KiB, one host", "the same"),
    "4B-4-ranks": ("4 B, 4 ranks on 2 cores", "MPICH never sleeps"),
    "alltoall-4KiB": ("alltoall of 4 KiB", "Python"), "allgather-4KiB": ("allgather of 4 KiB", "Python"),
    "alltoall-64MiB": ("alltoall of 64 MiB", "the result is new memory: page faults"),
    "allgather-64MiB": ("allgather of 64 MiB", "the same"),
    "4B-2-hosts": ("4 B between 2 hosts", "rank 0 adds the values: one round trip; MPICH's ranks send to each other "
                                          "directly"),
}
TRAINED: dict[str, dict[str, Any]] = {
    f"{where}, {what}": {"model": model, "hosts": hosts, "rate": rate}
    for where, hosts, rate in (("one host", 0, None), ("2 hosts, 10 Gbit/s", 2, "10gbit"))
    for what, model in (("perceptron", "mlp"), ("convolutions", "cnn"))}
NOTHING = "Nothing run yet."


def _append(experiment, setting, name, rounds, others, folder):
    """rounds: [round: [seconds]]. others: [round: cores used by other programs, None: unknown]."""
    known = [used for used in others if used is not None]
    quiet = bool(others) and len(known) == len(others) and max(known) < QUIET
    samples = {name: ("s", [sample for samples in rounds for sample in samples]),
               "samples in each round": ("1", list(map(len, rounds)))}
    if known:
        samples["others"] = "cores", known
    return records.append(experiment, setting, samples, shared=not quiet, folder=folder)


def _setting(options, environment, **more):
    return {"dtype": options.dtype, "ranks": options.np, "hosts": options.hosts or 0,
            "rate": options.rate and options.rate.lower(), "delay_ms": options.delay, "in_place": True,
            "environment": environment, **more}


def record(options, environment, cases, results, others):
    """Appends a record for each case and backend.

    Args:
        options: of the program. environment: variables that affect the measurement.
        results, others: as returned by rounds.interleaved().
    """
    for case in cases:
        for backend, times in results.items():
            _append("collectives", _setting(options, environment, op=case.op, nbytes=case.nbytes, backend=backend),
                    "call", times[case.key], others[backend], options.folder)


def record_ceiling(options, environment, lines, others):
    """Appends a record for each TCP line of ceiling.measure() with a selected size.

    Args:
        others: cores used by other programs during the measurement, or None.
    """
    for what, nbytes, samples in lines:
        if what in (ceiling.LOOPBACK, ceiling.LINK) and nbytes in options.sizes:
            setting = _setting(options, environment, nbytes=nbytes, backend="tcp", **TCP) | {"ranks": 2}
            _append("collectives", setting, "call", [samples], [others], options.folder)


def record_training(options, environment, results, others, ours):
    """Appends a record for each model and backend; the one without communication comes first, as the reference.

    Args:
        ours: backends with the algorithm of the options; for all others it is None.
    """
    for model in options.models:
        for backend in sorted(results, key=lambda backend: backend != "none"):
            setting = {"model": model, "backend": backend, "ranks": options.np, "hosts": options.hosts or 0,
                       "rate": options.rate.lower() if options.hosts else None,
                       "algorithm": options.algorithm if backend in ours else None, "environment": environment}
            _append("training", setting, "step", results[backend][model], others[backend], options.folder)


def _newest(folder, **setting):
    """The newest record with this setting, or None."""
    return next(reversed(records.read("collectives", folder, **{**USUAL, **setting})), None)


def _seconds(found):
    """The median time, or None."""
    return found and statistics.median(found.samples["call" if found.experiment == "collectives" else "step"].values)


def _shown(seconds):
    if seconds is None:
        return "-"
    if seconds < 1e-3:
        return f"{report.microseconds(1e6 * seconds)} us"
    return f"{1e3 * seconds:.{1 if seconds >= 1e-2 else 2}f} ms"


def _table(head, rows):
    """rows: {label: [record or None]}."""
    if not any(found for row in rows.values() for found in row):
        return NOTHING
    return report.table(head, [(label, *(_shown(_seconds(found)) for found in row)) for label, row in rows.items()],
                        left=1)


def _on_one_host(folder):
    return {label: [_newest(folder, backend=backend, **case) for backend in SHOWN] for label, case in ONE_HOST.items()}


def _between_two(folder):
    return {label: [*(_newest(folder, backend=backend, **case) for backend in ("bagua", "gloo")),
                    _newest(folder, backend="tcp", **case, **TCP)] for label, case in TWO_HOSTS.items()}


def one_host(folder=records.FOLDER):
    """Allreduces in shared memory, compared with gloo and MPICH."""
    return _table(("allreduce, float32", *SHOWN.values()), _on_one_host(folder))


def two_hosts(folder=records.FOLDER):
    """Allreduces of 64 MiB by the rate of the links, compared with gloo and plain TCP."""
    return _table(("allreduce of 64 MiB", "bagua_hvd", "gloo", "plain TCP, both ways at once"), _between_two(folder))


def _speed(mine, theirs):
    return _seconds(theirs) / _seconds(mine) if mine and theirs else None


def faster_than_gloo(folder=records.FOLDER):
    """The smallest and the largest speedup over gloo in the rows of one_host(): "9 to 73"."""
    speeds = [speed for ours, gloo, _ in _on_one_host(folder).values() if (speed := _speed(ours, gloo))]
    return " to ".join(dict.fromkeys(f"{speed:.0f}" for speed in (min(speeds), max(speeds)))) if speeds else "-"


def tcp_to_gloo(rate, folder=records.FOLDER):
    """Plain TCP's speedup over gloo's allreduce of 64 MiB between two hosts, the upper bound for any implementation."""
    case = {"nbytes": 64 * MIB, "hosts": 2, "rate": rate}
    speed = _speed(_newest(folder, backend="tcp", **case, **TCP), _newest(folder, backend="gloo", **case))
    return f"{speed:.1f}x" if speed else "-"


def ours(case, folder=records.FOLDER):
    """Our time for one of CASES."""
    return _shown(_seconds(_newest(folder, backend="bagua", **CASES[case])))


def theirs(case, folder=records.FOLDER):
    """MPICH's time for one of CASES."""
    return _shown(_seconds(_newest(folder, backend="mpi", **CASES[case])))


def slower(folder=records.FOLDER):
    """Where MPICH is faster, and why."""
    return report.table(("", "why", "bagua_hvd", "MPICH"), [
        (name, why, ours(case, folder), theirs(case, folder)) for case, (name, why) in SLOWER.items()], left=2)


def _runs(backend, folder, **where):
    """[(record without communication, record with it)] of each run, oldest first."""
    algorithm = "gradient_allreduce" if backend == "bagua" else None
    none, runs = {}, []
    for found in records.read("training", folder, ranks=2, environment={}, **where):
        if found.setting["backend"] == "none":
            none[found.command] = found
        elif (found.setting["backend"], found.setting["algorithm"]) == (backend, algorithm) and found.command in none:
            runs.append((none[found.command], found))
    return runs


def _exposed(none, found):
    return report.exposed(_seconds(none), _seconds(found))


def _last(runs):
    return runs[-1] if runs else (None, None)


def _trained(folder):
    """{label: (without, with us, without, with gloo)}, records of the newest runs."""
    return {label: (*_last(_runs("bagua", folder, **case)), *_last(_runs("gloo", folder, **case)))
            for label, case in TRAINED.items()}


def training(folder=records.FOLDER):
    """Steps without communication, with ours and gloo's, and their exposed times: each relative to its own run."""
    rows = _trained(folder)
    if not any(found for row in rows.values() for found in row):
        return NOTHING
    lines = []
    for label, (none, mine, beside, gloo) in rows.items():
        cells = [_shown(_seconds(none or beside))]
        for without, found in ((none, mine), (beside, gloo)):
            cells += [_shown(_seconds(found)), f"{_exposed(without, found):.0%}" if found else "-"]
        lines.append((label, *cells))
    return report.table(("", "without", "bagua_hvd", "exposed", "gloo (DDP)", "exposed"), lines, left=1)


def exposed(model, hosts="0", rate=None, backend="bagua", folder=records.FOLDER):
    """The share of a step beyond the step without communication, in the newest run."""
    runs = _runs(backend, folder, model=model, hosts=int(hosts), rate=rate)
    return f"{_exposed(*runs[-1]):.0%}" if runs else "-"


def _machine(found):
    machine = found.machine
    versions = [f"{name} {machine['versions'][name]}" for name in ("Python", "torch", "mpich")
                if name in machine["versions"]]
    return (f"{machine['cores']} cores of {machine['cpu']}, {machine['memory_gib']} GiB "
            f"({', '.join([machine['system'], *versions])})")


def conditions(folder=records.FOLDER):
    """A sentence with the machines, revisions and days of all records used for the two pages."""
    tables = _on_one_host(folder), _between_two(folder), _trained(folder)
    used = [found for rows in tables for row in rows.values() for found in row]
    used += [_newest(folder, backend=backend, **case) for case in CASES.values() for backend in ("bagua", "mpi")]
    used = list({(found.date, str(found.setting)): found for found in used if found}.values())
    if not used:
        return NOTHING
    machines = " and ".join(dict.fromkeys(map(_machine, used)))
    revisions = ", ".join(dict.fromkeys(f"`{found.revision}`" for found in used))
    days = sorted(found.date.split()[0] for found in used)
    alone = sum(not found.shared for found in used)
    return (f"{machines}, revision {revisions}, {' to '.join(dict.fromkeys((days[0], days[-1])))}; "
            f"other programs used less than {QUIET} cores in every round of {alone} of {len(used)} measurements.")
