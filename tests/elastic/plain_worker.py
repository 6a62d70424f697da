"""A worker without a framework: counts steps that all ranks agree on, and ends when rank 0 finds the file TEST_STOP.

Prints a line `event key=value ...` for each event.
"""
import os
import socket
import sys
import threading
import time

from bagua_hvd.core import objects
from bagua_hvd.core.exceptions import HorovodInternalError
from bagua_hvd.job import basics, elastic, elastic_worker
from bagua_hvd.job.process_sets import ProcessSet


def say(event, **words):
    print(event, *(f"{key}={value}" for key, value in words.items()), flush=True)


def broadcast(value):
    return objects.broadcast_object(basics.context(), value, 0, basics.rank() == 0, "state")


def cut():
    """Breaks the connection to the driver."""
    elastic_worker.worker.link._connection.socket.shutdown(socket.SHUT_RDWR)


def cut_until_training():
    link = elastic_worker.worker.link
    connect = link._connect
    link._connect = lambda again: TRAINS.wait() and connect(again)
    cut()


def train(state):
    TRAINS.set()
    place = [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK",
                                                        "CROSS_SIZE")]
    functions = (basics.rank, basics.size, basics.local_rank, basics.local_size, basics.cross_rank, basics.cross_size)
    assert place == [str(function()) for function in functions], place
    say("enter", step=state.step, rank=basics.rank(), size=basics.size(), local=f"{place[2]}/{place[3]}",
        cross=f"{place[4]}/{place[5]}", pair=PAIR.process_set_id is not None, pid=os.getpid(), at=time.time(),
        rate=basics.context().network().bytes_per_s)
    stop = False
    while not stop:
        seen = objects.allgather_object(basics.context(), (state.step, os.path.exists(os.environ["TEST_STOP"])), "step")
        assert {step for step, _ in seen} == {state.step} and len(seen) == basics.size(), seen
        stop = seen[0][1]
        if PAIR.process_set_id is not None and PAIR.included():
            assert objects.allgather_object(basics.context(), basics.rank(), "pair", PAIR.process_set_id) == [0, 1]
        state.step += 1
        if state.step == 5 and basics.rank() == 1 and os.environ.get("TEST_FAULT") == "raise":
            raise LookupError("mine alone")
        if state.step == 5 and basics.rank() == 0 and os.environ.get("TEST_FAULT") == "cut":
            cut()
        time.sleep(0.02)
        state.commit()
        say("committed", step=state.step, at=time.time())
    return state.step


def train_and_save(state):
    try:
        return train(state)
    except HorovodInternalError:
        if "TEST_SAVE" in os.environ:
            rank = basics.rank()
            time.sleep(float(os.environ["TEST_SAVE"]) if rank == 0 else 0)
            say("saved", step=state.step, rank=rank)
        raise


def main():
    fault = os.environ.get("TEST_FAULT", "")
    if fault == f"start {os.environ['HOROVOD_HOSTNAME']}":
        sys.exit(3)
    basics.init(process_sets=[PAIR])
    say("up", rank=basics.rank(), size=basics.size(), pid=os.getpid())
    if fault == f"hang {os.environ['HOROVOD_HOSTNAME']}":
        time.sleep(1000)
    if fault == f"cut {os.environ['HOROVOD_HOSTNAME']}":
        cut_until_training()
    if fault == f"collective {os.environ['HOROVOD_HOSTNAME']}":
        objects.allgather_object(basics.context(), 0, "before the state is synchronized")
    state = elastic.ObjectState(broadcast, basics.rank, step=0)
    state.register_reset_callbacks([lambda: say("reset", rank=basics.rank(), size=basics.size())])
    if fault == "training" and basics.rank() == 1:
        sys.exit(5)
    done = elastic.run_fn(train_and_save, elastic.reset)(state)
    say("done", step=done, rank=basics.rank(), size=basics.size())
    if fault == "end" and basics.rank() == 1:
        sys.exit(7)


def assigned(driver, failure):
    """Like join_generation, but a worker with TEST_FAULT ends when it has received its second assignment."""
    assignment = join_generation(driver, failure)
    if assignment.scope == "elastic.2" and os.environ.get("TEST_FAULT") == f"assigned {os.environ['HOROVOD_HOSTNAME']}":
        os._exit(9)
    return assignment


join_generation = elastic_worker.join_generation
elastic_worker.join_generation = assigned
TRAINS = threading.Event()
PAIR = ProcessSet([0, 1])
main()
