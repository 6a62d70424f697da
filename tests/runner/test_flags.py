"""baguarun's flags: all are in --help, and one without an effect prints a warning."""
import re
from pathlib import Path

import pytest

from bagua_hvd.core import variables
from bagua_hvd.runner import flags

pytestmark = pytest.mark.timeout(60)

# horovodrun's flags, then our own.
FLAGS = """
    -np --num-proc -v --version -cb --check-build --verbose --disable-cache --start-timeout --network-interfaces
    --network-interface --output-filename --config-file -p --ssh-port -i --ssh-identity-file --fusion-threshold-mb
    --cycle-time-ms --cache-capacity --hierarchical-allreduce --no-hierarchical-allreduce --hierarchical-allgather
    --no-hierarchical-allgather --torus-allreduce --no-torus-allreduce --autotune --no-autotune --autotune-log-file
    --autotune-warmup-samples --autotune-steps-per-sample --autotune-bayes-opt-max-samples
    --autotune-gaussian-process-noise --min-np --min-num-proc --max-np --max-num-proc --slots-per-host
    --elastic-timeout --reset-limit --blacklist-cooldown-range --timeline-filename --timeline-mark-cycles
    --no-timeline-mark-cycles --no-stall-check --stall-check --stall-check-warning-time-seconds
    --stall-check-shutdown-time-seconds --mpi-threads-disable --no-mpi-threads-disable --mpi-args --tcp --binding-args
    --num-nccl-streams --thread-affinity --gloo-timeout-seconds --log-level --log-with-timestamp
    --log-without-timestamp --no-log-hide-timestamp --log-hide-timestamp -prefix-timestamp
    --prefix-output-with-timestamp -H --hosts -hostfile --hostfile --host-discovery-script --gloo --mpi --jsrun
    -h --help --help-environment --algorithm --auto-log --as-horovod --dashboard --dry-run --exclude-env --grace-seconds
""".split()


def test_help_names_every_flag_and_no_other(launcher):
    text = launcher.run("--help", env={"COLUMNS": "200"}).stdout
    lines = [re.split(r"\s{2,}", line.strip())[0] for line in text.splitlines() if line.startswith("  -")]
    named = [part.split()[0] for line in lines for part in line.split(", ") if part.startswith("-")]
    assert sorted(named) == sorted(FLAGS)


def test_mpirun_starts_no_elastic_jobs(launcher):
    done = launcher.run("--mpi", "--min-np", 1, "-np", 2, "true")
    assert done.returncode == 2 and "--mpi: mpirun starts no elastic jobs" in done.stderr


def test_a_flag_without_effect_is_a_warning(launcher):
    done = launcher.run("-np", 1, "--mpi-args=-v", "echo", "done")
    assert (done.returncode, done.stdout) == (0, "[0]<stdout>:done\n")
    assert re.fullmatch(r"baguarun: warning: --\S.*\n", done.stderr)


def markdown():
    """The table in the form of docs/reference/baguarun.md. Reasons for no effect are in docs/environment.md."""
    lines = []
    for heading, section in flags.SECTIONS.items():
        keyed = any(flag.key for flag in section)
        lines += [f"**{heading.capitalize()}**", "", "| flag | meaning | variable |" + " config key |" * keyed,
                  "|---|---|---|" + "---|" * keyed]
        for flag in section:
            shown = [f"`{name}`" for name in [*flag.spellings.split(), *flag.off.split()]]
            variable, key = (f"`{name.lstrip('!')}`" + ", the opposite" * name.startswith("!") if name else ""
                             for name in (flag.variable, flag.key))
            explained = "no effect" if flag.variable and flag.explained.startswith("no effect") else flag.explained
            lines.append(f"| {', '.join(shown)} {flag.metavar} | {explained} | {variable} |" + f" {key} |" * keyed)
        lines.append("")
    return "\n".join(lines)


def test_the_page_has_the_table():
    assert markdown() in (Path(__file__).parents[2] / "docs" / "reference" / "baguarun.md").read_text()


def test_every_variable_of_a_flag_is_in_the_table_of_variables():
    named = {flag.variable.lstrip("!") for flag in flags.TABLE.values()} - {"", "NCCL_IB_DISABLE"}
    assert named <= variables.TABLE.keys()


def test_a_flag_takes_what_its_variable_takes():
    for flag in flags.TABLE.values():
        if flag.kind is not flags.SWITCH and flag.variable:
            default = flag.default or flag.shown_default.split(" ")[0]
            if default:
                assert variables.TABLE[flag.variable].kind.parse(str(flag.parse(default))) is not None, flag.name
