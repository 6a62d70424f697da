"""`python -m tests.laboratory.quality` compares each algorithm's loss, with default arguments, to gradient_allreduce's.

    __main__      the command line
    grid          the list of trainings, the learning rates, the margin
    data          real data that ships with Python and with packages
    tasks         models, losses and batches: images, characters, tokens, tabular, fine-tuning;
                  and held-out ones: aside, code, long
    training      one training on this rank
    rank          one rank of a job that runs many trainings, one after the other
    switching     the effect of auto's switches on a running training
    equivalence   two one-sided tests
    page          docs/results/quality.md, from the records
"""
from tests.laboratory.quality.page import (
    holds,
    interval,
    kept,
    losses,
    missed,
    own,
    reference,
    worst,
)

__all__ = ["holds", "interval", "kept", "losses", "missed", "own", "reference",
           "switches", "worst"]     # tests/laboratory/records.py calls these


def switches() -> str:
    """See switching.table(). Imported here only, because the module is a program, too."""
    from tests.laboratory.quality.switching import table

    return table()
