"""Which features work with which algorithm: the table of docs/algorithms.md, from the algorithms' declarations."""
from bagua_hvd import algorithms
from bagua_hvd.algorithms.base import Algorithm, Safety
from bagua_hvd.bench import report
from bagua_hvd.reduction.weight import check_weighable
from bagua_hvd.torch.distributed.options import besides_gradients

COLUMNS = ("algorithm", "class", "optimizer", "tape", "`tf.compat.v1`", "DDP hook", "`delay=1`", "`set_weight()`",
           "`every_step`", "sparse", "Keras' loss scaling", "save")


def _weighable(algorithm):
    try:
        check_weighable(algorithm)
    except ValueError:
        return False
    return True


def _mark(served):
    return "yes" if served else "no"


def _row(name):
    algorithm: Algorithm = algorithms.get(name)
    sees_weights = bool(algorithm.uses_weights) or algorithm.replaces_step      # see tensorflow/step.py: Uses.any
    return (f"`{name}`", Safety(algorithm.safety).name,
            "Adam, AdamW" if algorithm.uses_adam and algorithm.replaces_step else "any",
            _mark(not sees_weights), _mark(not algorithm.replaces_step),
            "hook" if not besides_gradients(algorithm) else "`wrap_optimizer`",
            _mark(algorithm.gradients_only), _mark(_weighable(algorithm)), _mark(algorithm.repeatable),
            "as dense" if algorithm.dense_only else "torch" if sees_weights else "gathered",
            _mark(not (algorithm.replaces_step or algorithm.remembers_gradients)),
            "mean" if algorithm.models_differ else "any")


def table():
    """The table: algorithms of the menu, the least relaxed first; then the others by name. Equal rows are one."""
    menu = algorithms.menu()
    ours = {name for name in algorithms.names() if type(algorithms.get(name)).__module__.startswith("bagua_hvd.")}
    alike: dict[tuple[str, ...], list[str]] = {}        # a row's other cells -> algorithms
    for name, *cells in map(_row, [*menu, *sorted(ours - {*menu})]):
        alike.setdefault(tuple(cells), []).append(name)
    return report.table(COLUMNS, [(", ".join(names), *cells) for cells, names in alike.items()], left=len(COLUMNS))
