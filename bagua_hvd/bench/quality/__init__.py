"""`python -m bagua_hvd.bench.quality`: each algorithm's loss beside gradient_allreduce's, named without arguments.

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
from bagua_hvd.bench.quality.page import holds, losses, missed, optimizers, own, reference, seeds, steps, worst

__all__ = ["holds", "losses", "missed", "optimizers", "own", "reference", "seeds", "steps",
           "switches", "worst"]     # what bench/records.py asks for


def switches() -> str:
    """See switching.table(). Imported here only: it is a program, too."""
    from bagua_hvd.bench.quality.switching import table

    return table()
