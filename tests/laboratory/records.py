"""Measurements, one line of JSON for each run, and the parts of the documentation made from them.

    docs/results/records/EXPERIMENT.jsonl       one Record a line; lines are appended, and never edited

    python -m tests.laboratory.records           regenerates every generated part of the documentation
    python -m tests.laboratory.records --check   exit code 1, and their names, if any would change

Each part of a page, or of a script of the site, names its source: `<!-- from MODULE.FUNCTION KEY=VALUE ... -->` before
it, `<!-- end -->` after it.
tests.laboratory.MODULE has the function. It takes these texts as keyword arguments and returns the part: a table, a
sentence, or a figure within one. It reads only records.
"""
import argparse
import functools
import importlib
import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from bagua_hvd.bench import report

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "results" / "records"
# Old names in records, mapped to the current ones, by field of a setting.
RENAMED = {"algorithm": {"streaming_diloco": "diloco"}, "way": {"streaming_diloco, 8": "diloco"}}
_PART = re.compile(r"(<!-- from (\w+)\.(\w+)((?: [\w-]+=\S+)*) -->)(.*?)((?:// )?<!-- end -->)", re.DOTALL)


@dataclass(frozen=True)
class Samples:
    """All values of one quantity, in measurement order. unit: s, bytes, 1 (a ratio), ..."""

    unit: str
    values: list[float]


@dataclass(frozen=True)
class Record:
    """One run.

    Attributes:
        experiment: names the file.
        setting: chosen by the experimenter; two records with equal settings measured the same.
        samples: by name.
        revision: of the code: git's short hash, "+changes" if files differed from it; None: not a checkout.
        machine: cores, cpu, memory_gib, system, versions, load, environment (variables that affect the measurement).
        shared: whether other programs ran on the machine at the same time.
    """

    experiment: str
    setting: dict
    samples: dict[str, Samples]
    date: str
    revision: str | None
    machine: dict
    command: str
    shared: bool


def _git(*arguments):
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def revision() -> str | None:
    """The revision of this checkout. Changed records do not count as changes."""
    try:
        commit = _git("rev-parse", "--short=10", "HEAD")
    except FileNotFoundError:
        return None
    if commit is None:
        return None
    return commit + ("+changes" if _git("status", "--porcelain", "--", ".", ":!docs") else "")


def _machine():
    facts = report.machine()
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"memory_gib": round(memory, 1)} | {key: value for key, value in facts.items() if key != "date"}


def _command():
    module = getattr(sys.modules["__main__"], "__spec__", None)
    program = ["-m", module.name.removesuffix(".__main__")] if module else [os.path.basename(sys.argv[0])]
    return shlex.join(["python", *program, *sys.argv[1:]])


def append(experiment: str, setting: Mapping, samples: Mapping[str, tuple[str, Sequence[float]]], shared: bool = True,
           folder: str | os.PathLike = FOLDER, command: str | None = None) -> Record:
    """Writes one run atomically, even if others append at the same time.

    Args:
        setting: JSON values.
        samples: name: (unit, all values), without omissions or averages.
        shared: False if nothing else ran on this machine.
        command: repeats it; None: this process's own.
    """
    record = Record(experiment, dict(setting), {name: Samples(unit, list(map(float, values)))
                                                for name, (unit, values) in samples.items()},
                    time.strftime("%Y-%m-%d %H:%M:%S%z"), revision(), _machine(), command or _command(), shared)
    Path(folder).mkdir(parents=True, exist_ok=True)
    line = json.dumps(asdict(record), sort_keys=True) + "\n"
    file = os.open(Path(folder, f"{experiment}.jsonl"), os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
    return record


@functools.lru_cache(maxsize=8)
def _parsed(path, mtime_ns, nbytes):
    """The lines of a file in this state; cached, because the documentation asks for the same ones a hundred times."""
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for setting, (field, names) in itertools.product((fields["setting"] for fields in found), RENAMED.items()):
        if setting.get(field) in names:
            setting[field] = names[setting[field]]
    return found


def read(experiment: str, folder: str | os.PathLike = FOLDER, **setting) -> list[Record]:
    """The records whose settings have these values, oldest first; [] if there are none."""
    path = Path(folder, f"{experiment}.jsonl")
    try:
        state = path.stat()
    except FileNotFoundError:
        return []
    found = []
    for fields in _parsed(path, state.st_mtime_ns, state.st_size):
        if all(key in fields["setting"] and fields["setting"][key] == value for key, value in setting.items()):
            samples = {name: Samples(**values) for name, values in fields["samples"].items()}
            found.append(Record(**{**fields, "samples": samples}))
    return found


def _made(match):
    begin, module, function, arguments, old, end = match.groups()
    keywords = dict(argument.split("=", 1) for argument in arguments.split())
    part = getattr(importlib.import_module(f"tests.laboratory.{module}"), function)(**keywords)
    # A block is on lines of its own; a part within a sentence stays there.
    return f"{begin}\n{part}\n{end}" if "\n" in old or "\n" in part else begin + part + end


def pages(folder: str | os.PathLike = ROOT) -> dict[Path, tuple[str, str]]:
    """{page or script: (current text, text with newly generated parts)}."""
    found = {}
    docs = Path(folder, "docs")
    for path in sorted([*Path(folder).glob("*.md"), *docs.rglob("*.md"), *docs.glob("*.js")]):
        old = path.read_text()
        if _PART.search(old):
            found[path] = old, _PART.sub(_made, old)
    return found


def main(arguments=None):
    """Runs the program. Returns its exit code."""
    parser = argparse.ArgumentParser(prog="python -m tests.laboratory.records", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    options = parser.parse_args(arguments)
    differing = {path: new for path, (old, new) in pages().items() if old != new}
    for path, new in differing.items():
        print(("differs: " if options.check else "written: ") + str(path.relative_to(ROOT)))
        if not options.check:
            path.write_text(new)
    return int(options.check and bool(differing))


if __name__ == "__main__":
    sys.exit(main())
