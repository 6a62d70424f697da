"""Runs torch's own backend tests, `torch.testing._internal.distributed.distributed_test`, on "bagua" or another.

    python tests/torch_distributed/torch_tests.py --backend bagua --ranks 3 [-k allreduce] [--tests-of mpi] [--json out]

At import the module selects tests by the backend's name. Here it selects those of gloo (--tests-of gloo), so that
"bagua" must pass all that gloo does; --tests-of mpi has CPU tests that gloo's list lacks, such as all_to_all. Processes
are forked rather than spawned, which saves the import of torch in each.
"""
import argparse
import json
import os
import sys
import tempfile
import time
import unittest


class _InPlaceOf(str):
    """A backend's name that equals another one's, for tests that compare names with ==."""

    def __new__(cls, name, other):
        text = super().__new__(cls, name)
        text.other = other
        return text

    def __eq__(self, other):
        return str(self) == other or self.other == other

    def __ne__(self, other):
        return not self == other

    __hash__ = str.__hash__


def load(backend, ranks, tests_of, seconds):
    """Imports the module with `tests_of` as its backend, which is `backend` from then on."""
    os.environ.update(BACKEND=tests_of, WORLD_SIZE=str(ranks), TEMP_DIR=tempfile.mkdtemp(prefix="torch_tests."),
                      DISTRIBUTED_TESTS_DEFAULT_TIMEOUT=str(seconds), GLOO_SOCKET_IFNAME="lo", MASTER_ADDR="127.0.0.1")
    from torch.testing._internal.distributed import distributed_test

    if backend == "bagua":
        import bagua_hvd.torch.distributed  # noqa: F401  (registers it)
    os.environ["BACKEND"] = backend
    distributed_test.BACKEND = backend if backend == tests_of else _InPlaceOf(backend, tests_of)
    return distributed_test


def make_case(module):
    import torch

    class Case(module.TestDistBackend, module.DistributedTest._DistTestBase):
        def setUp(self):
            super().setUp()
            self._start_processes(torch.multiprocessing.get_context("fork").Process)

    Case.__qualname__ = Case.__name__ = "DistributedTest"
    return Case


class Result(unittest.TestResult):
    """The outcome of each test, with its time and reason; printed immediately."""

    def __init__(self):
        super().__init__()
        self.rows = {}

    def startTest(self, test):
        super().startTest(test)
        self._started = time.monotonic()

    def _note(self, test, outcome, reason=""):
        name = test._testMethodName
        if self.rows.get(name, {}).get("outcome") in ("failed", "skipped"):
            return
        self.rows[name] = {"outcome": outcome, "seconds": round(time.monotonic() - self._started, 2), "reason": reason}
        last = reason.strip().splitlines()[-1] if reason else ""
        print(f"{outcome:8} {self.rows[name]['seconds']:6.1f} s  {name}  {last}", flush=True)

    def addSuccess(self, test):
        self._note(test, "passed")

    def addSkip(self, test, reason):
        self._note(test, "skipped", reason)

    def addFailure(self, test, error):
        self._note(test, "failed", self._exc_info_to_string(error, test))

    addError = addFailure


def names_of(case, pattern):
    names = unittest.TestLoader().getTestCaseNames(case)
    return [name for name in names if any(part in name for part in pattern.split(","))] if pattern else names


def run(backend, ranks, pattern="", tests_of="gloo", seconds=100):
    """{name: {"outcome": ..., "seconds": ..., "reason": ...}} of the tests whose names have a part of the pattern."""
    case, result = make_case(load(backend, ranks, tests_of, seconds)), Result()
    for name in names_of(case, pattern):
        case(name).run(result)
    return result.rows


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="bagua")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("-k", dest="pattern", default="", help="parts of names, separated by commas")
    parser.add_argument("--tests-of", default="gloo", choices=["gloo", "mpi"])
    parser.add_argument("--seconds", type=int, default=100, help="limit for a test")
    parser.add_argument("--json", help="a file for the results")
    arguments = parser.parse_args()
    rows = run(arguments.backend, arguments.ranks, arguments.pattern, arguments.tests_of, arguments.seconds)
    counts = {outcome: sum(row["outcome"] == outcome for row in rows.values()) for outcome in
              ("passed", "failed", "skipped")}
    print(f"{arguments.backend}, {arguments.ranks} ranks, tests of {arguments.tests_of}:",
          ", ".join(f"{count} {outcome}" for outcome, count in counts.items()))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(rows, file, indent=1)
    sys.exit(counts["failed"] > 0)


if __name__ == "__main__":
    main()
