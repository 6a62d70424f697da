"""`python -m tests.laboratory.quality`: each algorithm's loss beside gradient_allreduce's, named without arguments.

    __main__      the command line
    grid          which trainings there are, the learning rates, the margin
    data          real data that ships with Python and with packages
    tasks         models, losses and batches: images, characters, tokens, tabular, fine-tuning;
                  and kept aside: aside, code, long
    training      one training on this rank
    rank          one rank of a job that makes many trainings, one after the other
    switching     what auto's switches in mid-run do to a training
    equivalence   two one-sided tests
    page          docs/results/quality.md, from the records
"""
from tests.laboratory.quality.page import (
    holds,
    interval,
    kept,
    losses,
    missed,
    optimizers,
    own,
    reference,
    steps,
    worst,
)

__all__ = ["holds", "interval", "kept", "losses", "missed", "optimizers", "own", "reference", "steps",
           "switches", "worst"]     # what tests/laboratory/records.py asks for


def switches() -> str:
    """See switching.table(). Imported here only: it is a program, too."""
    from tests.laboratory.quality.switching import table

    return table()
