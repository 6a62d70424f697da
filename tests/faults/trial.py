"""One run of a fault: a job, the fault at a seeded time, and the outcome."""
import re
import time
import zlib
from dataclasses import dataclass, field

import numpy as np

from job import SIZE, Job

STEPS_BEFORE, STEPS_AFTER = 5, 5


@dataclass
class Outcome:
    """seconds: from the fault until the last survivor raised; None: the job continued. hang: a rank neither raised nor
    continued. wrong: results that differ from NumPy's. problems: sentences, empty if all is as expected. message: of
    a survivor."""

    seconds: float | None = None
    hang: bool = False
    wrong: int = 0
    problems: list = field(default_factory=list)
    message: str = ""


def run(fault, folder, zygote, seed, limit, links):
    """Returns the Outcome. `links`: SIZE hosts, for faults that need them."""
    rng = np.random.default_rng((zlib.crc32(fault.name.encode()), seed))
    victim = int(rng.integers(SIZE))
    settings = fault.settings(folder, limit, victim)
    outcome = Outcome()
    try:
        with Job(folder, zygote, seed, settings, links if fault.hosts else None) as job:
            if fault.starts and not job.wait_for_steps(STEPS_BEFORE):
                outcome.problems.append("the job did not begin")
            time.sleep(rng.uniform(0, 0.2))
            injected_at = time.monotonic()
            fault.inject(job, victim, rng)
            try:
                if fault.fails:
                    _must_fail(fault, job, victim, injected_at, outcome)
                else:
                    _must_go_on(job, outcome)
            finally:
                fault.undo(job, victim)
            if not job.wait_for_end(range(SIZE)):
                outcome.hang = True
            elif fault.victim_survives and _last(job, victim)["event"] != "raised":
                outcome.problems.append(f"rank {victim}, the victim, did not raise HorovodInternalError")
            outcome.wrong = sum(event["event"] == "wrong" for rank in range(SIZE) for event in job.events(rank))
            if outcome.problems or outcome.hang:
                outcome.problems += [f"rank {rank}{' (victim)' * (rank == victim)}: {job.events(rank)}"
                                     for rank in range(SIZE)]
            left = job.close()
            if left:
                outcome.problems.append(f"left behind: {', '.join(left)}")
    finally:
        for link in links or ():
            link.mend()
    if outcome.hang:
        outcome.problems.append("somebody hangs")
    if outcome.wrong:
        outcome.problems.append(f"{outcome.wrong} wrong results")
    return outcome


def _last(job, rank):
    events = job.events(rank)
    return events[-1] if events else {"event": "nothing", "at": 0, "message": ""}


def _must_fail(fault, job, victim, injected_at, outcome):
    survivors = [rank for rank in range(SIZE) if rank != victim]
    if not job.wait_for_end(survivors):
        outcome.hang = True
        return
    last = [_last(job, rank) for rank in survivors]
    moments = [event["at"] for rank in range(SIZE) for event in job.events(rank)
               if event["event"] == ("acts" if fault.starts else "begins")]
    injected_at = max([injected_at, *moments])      # the victim's own acts begin later
    outcome.seconds = max(event["at"] for event in last) - injected_at
    outcome.message = last[0].get("message", "")
    name = re.compile(fault.names.format(victim=victim))
    for rank, event in zip(survivors, last, strict=True):
        # init() raises a ValueError, or a HorovodInternalError on a rank that has already left it.
        if event["event"] != "raised" and (fault.starts or event["event"] != "failed"):
            outcome.problems.append(f"rank {rank} did not raise HorovodInternalError")
        elif not name.search(event["message"]):
            outcome.problems.append(f"rank {rank} does not name {name.pattern!r}")


def _must_go_on(job, outcome):
    went_on = job.wait_for_steps(STEPS_AFTER)
    job.board.last[0] = 1
    if not job.wait_for_end(range(SIZE)):
        outcome.hang = True
    elif not went_on or any(_last(job, rank)["event"] != "ended" for rank in range(SIZE)):
        outcome.problems.append("the job did not go on")
