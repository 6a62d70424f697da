"""docs/results/quality.md, from the records: which losses are within the margin, with how many bytes and steps."""
import itertools
import json
import statistics
from collections.abc import Iterable
from typing import Any

from tests.laboratory import records
from tests.laboratory.quality import grid
from tests.laboratory.quality.equivalence import Verdict, judge
from tests.laboratory.quality.tasks import TASKS

Key = tuple[str, str]           # task, optimizer
_SHOWN = 3          # tasks listed by name: those with the largest increase
MARKS = {"within": "", "not equivalent": " **x**", "inconclusive": " ?", "diverged": "**diverged**"}


def _keys(own: bool | None = False) -> list[Key]:
    """own: True: tasks with OWN_OPTIMIZERS; False: with the others; None: with all."""
    return [(task, optimizer) for task in TASKS if task not in grid.OWN for optimizer in grid.optimizers(task)
            if own in (None, optimizer in grid.OWN_OPTIMIZERS)]


def _results(ranks: int, split: str) -> dict[tuple[str, Key], dict[int, records.Record]]:
    """By row and task: each seed's record, the latest if there are several."""
    found: dict[tuple[str, Key], dict[int, records.Record]] = {}
    for record in grid.recorded(ranks=ranks, split=split):
        said, row = record.setting, grid.row_of(record.setting)
        if row is not None and said["seed"] in grid.SEEDS:
            found.setdefault((row, (said["task"], said["optimizer"])), {})[said["seed"]] = record
    return found


def _value(record: records.Record, name: str) -> float:
    return record.samples[name].values[0]


def _ratios(mine: dict[int, records.Record], exact: dict[int, records.Record], name: str) -> list[float]:
    return [_value(mine[seed], name) / _value(exact[seed], name) for seed in sorted(mine.keys() & exact.keys())]


def _worse(task: str, mine: dict[int, records.Record], exact: dict[int, records.Record]) -> list[float]:
    """For each seed the loss relative to that of exact averages; or, for accuracy, 1 + the missing accuracy."""
    if task not in grid.ACCURACY_MARGINS:
        return _ratios(mine, exact, "test_loss")
    return [1 + _value(exact[seed], "test_accuracy") - _value(mine[seed], "test_accuracy")
            for seed in sorted(mine.keys() & exact.keys())]


def verdicts(ranks: int, split: str) -> dict[tuple[str, Key], Verdict]:
    """By row and task, for those with a seed in common with the reference."""
    found = _results(ranks, split)
    judged = {}
    for (row, key), mine in found.items():
        if key[0] in grid.OWN:
            continue
        exact = grid.REFERENCE
        ratios = _ratios(mine, found.get((exact, key), {}), "test_loss")
        if ratios and row != exact:
            judged[row, key] = judge(ratios, grid.MARGIN, grid.LEVEL)
    return judged


def _said(verdict: Verdict | None) -> str:
    if verdict is None:
        return ""
    if verdict.word == "diverged":
        return MARKS["diverged"]
    spread = f" ± {100 * verdict.spread:.1f}" if verdict.spread == verdict.spread else ""
    return f"{100 * verdict.change:+.1f}{spread}{MARKS[verdict.word]}"


def _table(head: Iterable[str], lines: Iterable[Iterable[str]]) -> str:
    head = list(head)
    return "\n".join("| " + " | ".join(cells) + " |" for cells in [head, ["---"] + ["---:"] * (len(head) - 1), *lines])


def losses(ranks: str = "4", split: str = "iid", nbytes: str = "shown") -> str:
    """The increase of the test loss over gradient_allreduce's, in percent.

    ranks: "4", or several: "8,16". nbytes: "shown" or "left_out": another table has them.
    """
    sizes = [int(each) for each in ranks.split(",")]
    found, judged = ({size: of(size, split) for size in sizes} for of in (_results, verdicts))
    keys = {size: [key for key in _keys() if any(key == other for _, other in judged[size])] for size in sizes}
    if not any(keys.values()):
        return "No trainings yet."

    def after(size: int) -> str:
        return f", {size} ranks" if len(sizes) > 1 else ""

    head, lines = ["%"], []
    for size in sizes:
        head += [f"{task}, {optimizer}{after(size)}" for task, optimizer in keys[size]]
        head += ["bytes" + after(size)] * (nbytes == "shown")
    for row in grid.rows():
        shown = [judged[size][row, key] for size in sizes for key in keys[size] if (row, key) in judged[size]]
        if all(abs(verdict.change) < 5e-4 for verdict in shown):        # equal to the reference, or not run
            continue
        cells = [f"`{row}`"]
        for size in sizes:
            ratios = [ratio for key in keys[size] for ratio in _ratios(
                found[size].get((row, key), {}), found[size].get((grid.REFERENCE, key), {}), "bytes_per_step")]
            cells += [_said(judged[size].get((row, key))) for key in keys[size]]
            cells += [f"{statistics.median(ratios):.2f}" if ratios else ""] * (nbytes == "shown")
        lines.append(cells)
    return _table(head, lines)


def own(task: str, ranks: str = "4", split: str = "iid") -> str:
    """For a task of OWN, the increase of the test loss over gradient_allreduce's in percent, and bytes.

    For accuracy: the missing percentage points. ranks: "4", or several: "4,8".
    """
    lines, seeds = [], set()
    margin = grid.ACCURACY_MARGINS.get(task, grid.MARGIN)
    sizes = [int(each) for each in ranks.split(",")]
    for size, optimizer in itertools.product(sizes, TASKS[task]().optimizers):
        found, key = _results(size, split), (task, optimizer)
        exact = found.get((grid.REFERENCE, key), {})
        for row in grid.OWN[task][1:]:
            mine = found.get((row, key), {})
            ratios = _worse(task, mine, exact)
            if not ratios:
                continue
            seeds.add(len(ratios))
            less = [1 / ratio for ratio in _ratios(mine, exact, "bytes_per_step")]
            lines.append([f"`{row}`" + (f", {size} ranks" if size != sizes[0] else ""),
                          _said(judge(ratios, margin, grid.LEVEL)), f"{min(less):.0f}"])
    if not lines:
        return "No trainings yet."
    lost = "accuracy lost, points" if task in grid.ACCURACY_MARGINS else "loss, %"
    many = " to ".join(map(str, sorted({min(seeds), max(seeds)})))
    return _table([f"{task}, {many} seeds", lost, "times fewer bytes"], lines)


def interval(algorithm: str, short: str, long: str) -> str:
    """The cost of a longer communication_interval: by task, the loss above gradient_allreduce's with either one.

    Compares trainings that are otherwise equal, with the seeds that both have; 4 ranks, equal data.
    """
    exact: dict[tuple, records.Record] = {}
    forms: dict[str, dict[int, dict[tuple, records.Record]]] = {}
    for record in records.read(grid.EXPERIMENT, ranks=4, split="iid"):
        said = record.setting
        told = said["defaults"] | said["arguments"]
        place = tuple(said[name] for name in ("task", "optimizer", "rate", "steps", "seed"))
        if said["algorithm"] == grid.REFERENCE:
            exact[place] = record
        elif said["algorithm"] == algorithm:
            steps = told.pop("communication_interval")
            forms.setdefault(json.dumps(told, sort_keys=True), {}).setdefault(steps, {})[place] = record
    pair, = ((form[int(short)], form[int(long)]) for form in forms.values() if {int(short), int(long)} <= form.keys())
    changes: dict[Key, list[list[float]]] = {}
    for place in sorted(pair[0].keys() & pair[1].keys() & exact.keys()):
        base = _value(exact[place], "test_loss")
        changes.setdefault(place[:2], []).append([100 * (_value(each[place], "test_loss") / base - 1) for each in pair])
    means = {key: [statistics.mean(each) for each in zip(*values, strict=True)] for key, values in changes.items()}
    order = sorted(means, key=lambda key: means[key][0] - means[key][1])
    shown = "; ".join(f"{', '.join(key)} {means[key][0]:+.1f} and {means[key][1]:+.1f} %" for key in order[:_SHOWN])
    most = max((means[key][1] - means[key][0] for key in order[_SHOWN:]), default=0)
    return f"{shown}; on {len(order[_SHOWN:])} other tasks at most {most:.1f} points more" if order[_SHOWN:] else shown


def missed(task: str, ranks: str = "4", split: str = "iid") -> str:
    """The rows whose mean over the seeds is beyond the margin in a task, and those with any seed beyond it."""
    found, words = _results(int(ranks), split), dict[str, list[str]](mean=[], seed=[])
    for row in grid.rows():
        for key in _keys(None):
            exact = grid.REFERENCE
            ratios = _ratios(found.get((row, key), {}), found.get((exact, key), {}), "test_loss")
            if key[0] == task and ratios and row != exact:
                if statistics.mean(ratios) > 1 + grid.MARGIN:
                    words["mean"].append(f"`{row}`")
                if max(ratios) > 1 + grid.MARGIN:
                    words["seed"].append(f"`{row}`")
    return (f"in the mean of the seeds: {', '.join(words['mean']) or 'none'}; "
            f"in any one seed: {', '.join(words['seed']) or 'none'}")


def reference(ranks: str = "4", split: str = "iid") -> str:
    """The results of exact averages and their rates: a row for each task, a column for each optimizer."""
    found = _results(int(ranks), split)
    exact = {key: mine for key in _keys(None) if (mine := found.get((grid.REFERENCE, key)))}
    if not exact:
        return "No trainings yet."
    columns = list(dict.fromkeys(_family(optimizer) for _, optimizer in exact))
    tasks: dict[str, list[str]] = {}
    for (task, optimizer), mine in exact.items():
        losses, accuracies = ([_value(record, name) for record in mine.values()]
                              for name in ("test_loss", "test_accuracy"))
        one: Any = next(iter(mine.values()))
        loss = f"{statistics.mean(losses):.3f}" + (f" ± {statistics.stdev(losses):.3f}" if len(mine) > 1 else "")
        line = tasks.setdefault(task, [task, str(one.setting["steps"]), f"{_value(one, 'parameters'):.0f}",
                                       *("" for _ in columns)])
        line[3 + columns.index(_family(optimizer))] = (
            f"{loss}, {100 * statistics.mean(accuracies):.1f} %, {one.setting['rate']:g}")
    seeds, = {len(mine) for mine in exact.values()}             # equally many of each
    return _table([f"{seeds} seeds", "steps", "parameters", *columns], tasks.values())


def _family(optimizer: str) -> str:
    return "adam, adamw" if optimizer.startswith("adam") else optimizer


def steps_to(record: records.Record, target: float) -> float | None:
    """Steps until the validation loss reached `target`, interpolated between evaluations; None: it did not."""
    steps, curve = (record.samples[name].values for name in ("curve_steps", "curve"))
    before: tuple[float, float] | None = None
    for step, loss in zip(steps, curve, strict=True):
        if loss <= target:
            if before is None or before[1] == loss:
                return step
            return before[0] + (step - before[0]) * (before[1] - target) / (before[1] - loss)
        before = step, loss
    return None


def holds(ranks: str = "4", split: str = "iid") -> str:
    """The rows within the margin on all tasks, and those that are not on some."""
    judged = verdicts(int(ranks), split)
    words: dict[str, set[str]] = {}
    for (row, _), verdict in judged.items():
        words.setdefault(row, set()).add(verdict.word)

    def listed(rows: Iterable[str]) -> str:
        return ", ".join(f"`{row}`" for row in rows) or "none"

    order = [row for row in grid.rows() if row in words]
    bad = [row for row in order if words[row] & {"not equivalent", "diverged"}]
    decided = {row: {verdict.word for (name, key), verdict in judged.items()
                     if name == row and key[0] != "images" and verdict.seeds > 2} for row in order}
    almost = [row for row in order if "inconclusive" in words[row] and row not in bad and decided[row] == {"within"}]
    return "\n".join([
        f"- Within {100 * grid.MARGIN:g} % on all tasks: {listed(row for row in order if words[row] == {'within'})}.",
        f"- Within 5 % on all tasks with three seeds except images, where the test is inconclusive: {listed(almost)}.",
        f"- Not equivalent on some: {listed(bad)}.",
        "- Inconclusive on other tasks too, not equivalent on none: "
        + listed(row for row in order if "inconclusive" in words[row] and row not in bad + almost) + "."])


def worst(row: str, ranks: str = "4", split: str = "iid") -> str:
    """On how many tasks a row is within the margin, and not equivalent, and its largest mean. A "+" is a space."""
    row = row.replace("+", " ")
    judged = {key: verdict for (name, key), verdict in verdicts(int(ranks), split).items() if name == row}
    if not judged:
        return "not trained yet"
    key = max(judged, key=lambda key: judged[key].change)
    far = "diverged" if judged[key].word == "diverged" else f"{100 * judged[key].change:+.0f} %"
    words = [verdict.word for verdict in judged.values()]
    bad = sum(word in ("not equivalent", "diverged") for word in words)
    on = f"within on {words.count('within')} of {len(words)}" + (f", not equivalent on {bad}" if bad else "")
    return f"{on}, at worst {far} ({', '.join(key)})"


def kept(row: str, optimizer: str | None = None, ranks: str = "4", split: str = "iid") -> str:
    """The difference of a row's loss from gradient_allreduce's, and on how many tasks it is shown to be within 5 %.

    optimizer: the first letters of its name; None: all. Raises ValueError: the row is not equivalent on some task.
    """
    judged = {key: verdict for (name, key), verdict in verdicts(int(ranks), split).items()
              if name == row and key[1].startswith(optimizer or "")}
    if bad := [key for key, verdict in judged.items() if verdict.word in ("not equivalent", "diverged")]:
        raise ValueError(f"{row} is not equivalent on {bad}")
    changes = [100 * verdict.change for verdict in judged.values()]
    spreads = [100 * verdict.spread for verdict in judged.values() if verdict.seeds > 2]
    shown = sum(verdict.word == "within" for verdict in judged.values())
    return (f"{min(changes):+.0f} to {max(changes):+.0f} % (seeds ± {min(spreads, default=0):.1f} to "
            f"{max(spreads, default=0):.0f}); within 5 % on {shown} of {len(judged)} tasks")


def spread(row: str, ranks: str = "4", split: str = "iid") -> str:
    """The smallest and the largest difference of a row's loss, and where it is not equivalent."""
    judged = {key: verdict for (name, key), verdict in verdicts(int(ranks), split).items() if name == row}
    changes = [100 * verdict.change for verdict in judged.values()]
    bad = [", ".join(key) for key, verdict in judged.items() if verdict.word in ("not equivalent", "diverged")]
    return f"{min(changes):+.0f} to {max(changes):+.0f} %" + (f"; not equivalent: {'; '.join(bad)}" if bad else "")
