"""Test results with other versions of Python, PyTorch and TensorFlow: the table of docs/support.md.

`.ci/versions` runs them, and writes a record for each run.
"""
from bagua_hvd.bench import report
from tests.laboratory import records


def _newest(folder):
    """Each job's last record, by versions."""
    found = {record.setting["job"]: record for record in records.read("versions", folder)}
    return [found[job] for job in sorted(found, key=lambda job: [
        tuple(map(int, part.split("."))) if part[0].isdigit() else part for part in job.split("-")])]


def table(folder=records.FOLDER):
    """How many tests passed, failed and were skipped, and when they last ran; one row for equal versions."""
    rows: dict[tuple, list[tuple[str, str]]] = {}
    for record in _newest(folder):
        said = record.setting
        (name, version), *others = [(shown, said[key]) for key, shown in (
            ("torch", "PyTorch"), ("tensorflow_cpu", "TensorFlow"), ("keras", "Keras"),
            ("keras_nightly", "Keras")) if key in said and not (key == "keras" and "keras_nightly" in said)]
        counts = [f"{record.samples[name].values[0]:.0f}" for name in ("passed", "failed", "skipped")]
        rows.setdefault((said["python"], name, *others, *counts), []).append(
            (version, record.date.split()[0]))
    lines = []
    for (python, name, *others, passed, failed, skipped), runs in rows.items():
        versions = f"{name} {', '.join(version for version, _ in runs)}"
        lines.append((python, "; ".join([versions, *map(" ".join, others)]), passed, failed, skipped,
                      max(date for _, date in runs)))
    head = "Python", "with", "passed", "failed", "skipped", "last run"
    return report.table(head, lines, left=2) if lines else "Nothing run yet."
