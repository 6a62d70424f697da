"""A worker without a framework: counts steps that all ranks agree on. Arguments: steps, seconds for each.

Prints `key=value` words, a line for each event.
"""
import os
import sys
import time

from bagua_hvd.common import basics, elastic, objects
from bagua_hvd.common.process_sets import ProcessSet


def say(event, **words):
    print(event, *(f"{key}={value}" for key, value in words.items()), flush=True)


def broadcast(value):
    return objects.broadcast_object(basics.context(), value, 0, basics.rank() == 0, "state")


def train(state, steps, seconds):
    place = [os.environ[f"HOROVOD_{name}"] for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK",
                                                        "CROSS_SIZE")]
    functions = (basics.rank, basics.size, basics.local_rank, basics.local_size, basics.cross_rank, basics.cross_size)
    assert place == [str(function()) for function in functions], place
    say("enter", step=state.step, rank=basics.rank(), size=basics.size(), local=f"{place[2]}/{place[3]}",
        cross=f"{place[4]}/{place[5]}", pair=PAIR.process_set_id is not None, pid=os.getpid(), at=time.time())
    while state.step < steps:
        seen = objects.allgather_object(basics.context(), state.step, "step")
        assert seen == [state.step] * basics.size(), seen
        if PAIR.process_set_id is not None and PAIR.included():
            assert objects.allgather_object(basics.context(), basics.rank(), "pair", PAIR.process_set_id) == [0, 1]
        state.step += 1
        time.sleep(seconds)
        state.commit()
    return state.step


def main():
    fault = os.environ.get("TEST_FAULT", "")
    if fault == f"start {os.environ['HOROVOD_HOSTNAME']}":
        sys.exit(3)
    basics.init(process_sets=[PAIR])
    say("up", rank=basics.rank(), size=basics.size(), pid=os.getpid())
    state = elastic.ObjectState(broadcast, basics.rank, step=0)
    state.register_reset_callbacks([lambda: say("reset", rank=basics.rank(), size=basics.size())])
    if fault == "training" and basics.rank() == 1:
        sys.exit(5)
    done = elastic.run_fn(train, elastic.reset)(state, int(sys.argv[1]), float(sys.argv[2]))
    say("done", step=done, rank=basics.rank(), size=basics.size())
    if fault == "end" and basics.rank() == 1:
        sys.exit(7)


PAIR = ProcessSet([0, 1])
main()
