"""A rank that adds until it carries out its part of a fault: `python summing_worker.py RANK ACTION`, see ACTIONS."""
import os
import sys
import time

import numpy as np

from bagua_hvd.core import native, vectors
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job import basics


def add(context, value):
    values = np.full(100, value, np.float32)
    context.post(native.ALLREDUCE, "sum", [vectors.array_view(values)], op=native.OP_SUM, blocking=True).wait()


def fail():
    raise LookupError("mine alone")


def fail_in_two_steps():
    try:
        fail()
    except LookupError as error:
        raise OSError("the second") from error


ACTIONS = {
    "raise": fail,
    "raise twice": fail_in_two_steps,
    "sys.exit": lambda: sys.exit(7),
    "os._exit": lambda: os._exit(7),
    "kill": lambda: os.kill(os.getpid(), 9),
}


def main():
    rank, action = int(sys.argv[1]), sys.argv[2]
    basics.init()
    steps = 0
    try:
        while True:
            if steps == 20 and basics.rank() == rank:
                ACTIONS[action]()
            add(basics.context(), steps)
            steps += 1
    except HorovodInternalError:
        if "TEST_SAVE" in os.environ:
            time.sleep(float(os.environ["TEST_SAVE"]))
            print("saved", steps)
        raise


main()
