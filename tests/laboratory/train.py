"""bagua_hvd.bench.train, the communication time of a training step, between emulated hosts; and its records."""
import sys

from bagua_hvd.bench import report, train
from bagua_hvd.bench.__main__ import run
from tests.laboratory import collectives
from tests.laboratory.__main__ import add_hosts, check_hosts, emulated, guard


def _parse():
    parser = train.build_parser()
    parser.prog = "python -m tests.laboratory.train"
    add_hosts(parser)
    options = train.parse_options(parser)
    try:
        check_hosts(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def _run(options):
    environment = report.machine()["environment"]
    with emulated(options) as where:
        results, others = train.measure_and_print(options, where, guard(options))
    if options.record:
        collectives.record_training(options, environment, results, others, train.OURS)


if __name__ == "__main__":
    sys.exit(run(_run, _parse()))
