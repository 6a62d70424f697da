"""How the tests went with other versions of Python, PyTorch and TensorFlow: the table of docs/support.md.

`.ci/versions` runs them, and writes a record for each run.
"""
from bagua_hvd.bench import report
from tests.laboratory import records


def _newest(folder):
    """The last record of each job, by versions."""
    found = {record.setting["job"]: record for record in records.read("versions", folder)}
    return [found[job] for job in sorted(found, key=lambda job: [
        tuple(map(int, part.split("."))) if part[0].isdigit() else part for part in job.split("-")])]


def table(folder=records.FOLDER):
    """What was installed, how many tests passed, failed and were skipped, and of which revision and day that is."""
    lines = []
    for record in _newest(folder):
        said = record.setting
        frameworks = [f"{shown} {said[name]}" for name, shown in (
            ("torch", "PyTorch"), ("tensorflow_cpu", "TensorFlow"), ("keras", "Keras"),
            ("keras_nightly", "Keras")) if name in said and not (name == "keras" and "keras_nightly" in said)]
        counts = (f"{record.samples[name].values[0]:.0f}" for name in ("passed", "failed", "skipped"))
        lines.append((said["python"], ", ".join(frameworks), said["tests"], *counts, record.revision or "?",
                      record.date.split()[0]))
    return report.table(("Python", "with", "tests", "passed", "failed", "skipped", "revision", "on"), lines,
                        left=3) if lines else "Nothing run yet."
