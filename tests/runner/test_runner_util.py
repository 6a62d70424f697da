import base64
import gc
import io
import os
import threading
import time
import uuid
from pathlib import Path

import pytest

from bagua_hvd.job.channel import make_secret_key
from bagua_hvd.job.environment import get_env_rank_and_size, host_hash
from bagua_hvd.runner import launch
from bagua_hvd.runner.common.util import codec, config_parser, safe_shell_exec, timeout
from bagua_hvd.runner.flags import build_parser
from launcher import MARK, processes_of, wait_until


@pytest.fixture
def environment(monkeypatch):
    for name in ("HOROVOD", "OMPI_COMM_WORLD", "PMI"):
        for suffix in ("_RANK", "_SIZE"):
            monkeypatch.delenv(name + suffix, raising=False)
    return monkeypatch


def test_rank_and_size_without_a_launcher(environment):
    assert get_env_rank_and_size() == (0, 1)


@pytest.mark.parametrize("prefix", ["HOROVOD", "OMPI_COMM_WORLD", "PMI"])
def test_rank_and_size(environment, prefix):
    environment.setenv(prefix + "_RANK", "3")
    with pytest.raises(RuntimeError, match=f"{prefix}_SIZE is not"):
        get_env_rank_and_size()
    environment.setenv(prefix + "_SIZE", "5")
    assert get_env_rank_and_size() == (3, 5)
    environment.setenv(prefix + "_SIZE", "five")
    with pytest.raises(ValueError, match="integers"):
        get_env_rank_and_size()


def test_rank_and_size_prefer_our_launcher(environment):
    for name, value in (("HOROVOD", 1), ("PMI", 2)):
        environment.setenv(name + "_RANK", str(value))
        environment.setenv(name + "_SIZE", "7")
    assert get_env_rank_and_size() == (1, 7)


def test_secret_key():
    key = make_secret_key()
    assert isinstance(key, bytes) and len(base64.b64decode(key, validate=True)) == 32
    assert key != make_secret_key()


def test_objects_as_text():
    text = codec.dumps_base64({"f": lambda x: x + 1, "b": b"\x00"})
    assert isinstance(text, str) and text.isascii()
    for encoded in (text, text.encode()):
        assert codec.loads_base64(encoded)["f"](1) == 2 and codec.loads_base64(encoded)["b"] == b"\x00"


@pytest.mark.parametrize("flags, expected", [
    ((None, None, None), "gloo"), ((True, None, None), "gloo"), ((None, True, False), "mpi"),
    ((False, False, True), "js"), ((True, True, None), None),
])
def test_choice_of_the_controller(flags, expected):
    called = []
    gloo, mpi, js = (lambda name=name: called.append(name) for name in ("gloo", "mpi", "js"))
    arguments = flags[0], gloo, flags[1], mpi, flags[2], js, 0
    if expected is None:
        with pytest.raises(ValueError, match="exclude each other"):
            launch.run_controller(*arguments)
    else:
        launch.run_controller(*arguments)
        assert called == [expected]
        assert launch.is_gloo_used(*flags) == (expected == "gloo")


def test_timeout():
    running = timeout.Timeout(60, "{activity} took more than {timeout} s")
    running.check_time_out_for("this")
    assert not running.timed_out() and 0 < running.remaining() <= 60
    over = timeout.Timeout(0, "{activity} took more than {timeout} s")
    time.sleep(0.001)
    assert over.timed_out() and over.remaining() == 0
    with pytest.raises(timeout.TimeoutException, match="start took more than 0 s"):
        over.check_time_out_for("start")


def test_host_hash():
    assert host_hash() == host_hash()
    assert host_hash(salt="a") != host_hash() != host_hash(salt="b")
    assert host_hash(salt="a") == host_hash(salt="a")


def test_hosts_of_one_name_differ_by_the_boot_of_their_kernels(monkeypatch):
    here = host_hash()
    monkeypatch.setattr(Path, "read_text", lambda path: "another boot")
    assert host_hash() != here


FLAGS = [
    (["--algorithm", "bytegrad"], "BAGUA_ALGORITHM", "bytegrad"),
    (["--start-timeout", "7"], "HOROVOD_START_TIMEOUT", "7"),
    (["--grace-seconds", "2.5"], "BAGUA_HVD_GRACE_SECONDS", "2.5"),
    (["--fusion-threshold-mb", "2"], "HOROVOD_FUSION_THRESHOLD", "2097152"),
    (["--fusion-threshold-mb", "0"], "HOROVOD_FUSION_THRESHOLD", "0"),
    (["--cycle-time-ms", "2.5"], "HOROVOD_CYCLE_TIME", "2.5"),
    (["--cache-capacity", "0"], "HOROVOD_CACHE_CAPACITY", "0"),
    (["--hierarchical-allreduce"], "HOROVOD_HIERARCHICAL_ALLREDUCE", "1"),
    (["--no-hierarchical-allreduce"], "HOROVOD_HIERARCHICAL_ALLREDUCE", "0"),
    (["--hierarchical-allgather"], "HOROVOD_HIERARCHICAL_ALLGATHER", "1"),
    (["--torus-allreduce"], "HOROVOD_TORUS_ALLREDUCE", "1"),
    (["--autotune"], "HOROVOD_AUTOTUNE", "1"),
    (["--no-autotune"], "HOROVOD_AUTOTUNE", "0"),
    (["--autotune-log-file", "a.csv"], "HOROVOD_AUTOTUNE_LOG", "a.csv"),
    (["--autotune-warmup-samples", "1"], "HOROVOD_AUTOTUNE_WARMUP_SAMPLES", "1"),
    (["--autotune-steps-per-sample", "2"], "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE", "2"),
    (["--autotune-bayes-opt-max-samples", "3"], "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES", "3"),
    (["--auto-log", "b.json"], "BAGUA_AUTO_LOG", "b.json"),
    (["--autotune-gaussian-process-noise", "0.5"], "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE", "0.5"),
    (["--elastic-timeout", "5"], "HOROVOD_ELASTIC_TIMEOUT", "5"),
    (["--mpi-threads-disable"], "HOROVOD_MPI_THREADS_DISABLE", "1"),
    (["--no-mpi-threads-disable"], "HOROVOD_MPI_THREADS_DISABLE", "0"),
    (["--num-nccl-streams", "2"], "HOROVOD_NUM_NCCL_STREAMS", "2"),
    (["--thread-affinity", "0,1"], "HOROVOD_THREAD_AFFINITY", "0,1"),
    (["--tcp"], "NCCL_IB_DISABLE", "1"),
    (["--timeline-mark-cycles"], "HOROVOD_TIMELINE_MARK_CYCLES", "1"),
    (["--log-with-timestamp"], "HOROVOD_LOG_HIDE_TIME", "0"),
    (["--log-hide-timestamp"], "HOROVOD_LOG_HIDE_TIME", "1"),
    (["--log-without-timestamp"], "HOROVOD_LOG_HIDE_TIME", "1"),
    (["--gloo-timeout-seconds", "9"], "HOROVOD_GLOO_TIMEOUT_SECONDS", "9"),
    (["--timeline-filename", "t.json"], "HOROVOD_TIMELINE", "t.json"),
    (["--log-level", "debug"], "HOROVOD_LOG_LEVEL", "DEBUG"),
    (["--no-stall-check"], "HOROVOD_STALL_CHECK_DISABLE", "1"),
    (["--stall-check"], "HOROVOD_STALL_CHECK_DISABLE", "0"),
    (["--stall-check-warning-time-seconds", "5"], "HOROVOD_STALL_CHECK_TIME_SECONDS", "5"),
    (["--stall-check-shutdown-time-seconds", "90"], "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS", "90"),
]


@pytest.mark.parametrize("flags, variable, value", FLAGS, ids=[" ".join(flags) for flags, _, _ in FLAGS])
def test_each_flag_sets_its_variable_and_no_other(flags, variable, value):
    args = build_parser().parse_args([*flags, "-np", "1", "true"])
    config_parser.validate_config_args(args)
    assert config_parser.set_env_from_args({"KEPT": "1", variable: "before"}, args) == {"KEPT": "1", variable: value}


def test_flags_not_given_keep_what_the_user_exported():
    args = build_parser().parse_args(["-np", "1", "true"])
    assert config_parser.set_env_from_args({"HOROVOD_CYCLE_TIME": "3"}, args) == {"HOROVOD_CYCLE_TIME": "3"}


# The launcher's own flags, in all their forms.
@pytest.mark.parametrize("flags, attribute, value", [
    (["--num-proc", "3"], "num_proc", 3),
    (["--min-np", "2"], "min_num_proc", 2), (["--min-num-proc", "2"], "min_num_proc", 2),
    (["--max-np", "4"], "max_num_proc", 4), (["--max-num-proc", "4"], "max_num_proc", 4),
    (["--slots-per-host", "2"], "slots", 2), (["--reset-limit", "0"], "reset_limit", 0),
    (["--blacklist-cooldown-range", "1", "9"], "cooldown_range", [1, 9]),
    (["--host-discovery-script", "./x"], "host_discovery_script", "./x"),
    (["-H", "a:1"], "hosts", "a:1"), (["--hosts", "a:1"], "hosts", "a:1"),
    (["-hostfile", "f"], "hostfile", "f"), (["--hostfile", "f"], "hostfile", "f"),
    (["-p", "22"], "ssh_port", 22), (["--ssh-port", "22"], "ssh_port", 22),
    (["-i", "k"], "ssh_identity_file", "k"), (["--ssh-identity-file", "k"], "ssh_identity_file", "k"),
    (["--network-interfaces", "a,b"], "network_interfaces", ["a", "b"]),
    (["--network-interface", "a", "--network-interface", "b"], "nic", [["a"], ["b"]]),
    (["--disable-cache"], "disable_cache", True), (["--verbose"], "verbose", True),
    (["--gloo"], "use_gloo", True), (["--mpi"], "use_mpi", True), (["--jsrun"], "use_jsrun", True),
    (["--mpi-args=-a -b"], "mpi_args", "-a -b"), (["--binding-args=-c"], "binding_args", "-c"),
    (["--output-filename", "d"], "output_filename", "d"), (["--config-file", "c"], "config_file", "c"),
    (["-prefix-timestamp"], "prefix_output_with_timestamp", True), (["--as-horovod"], "as_horovod", True),
    (["--dry-run"], "dry_run", True), (["-cb"], "check_build", True), (["--check-build"], "check_build", True),
], ids=lambda value: " ".join(value) if isinstance(value, list) and value and isinstance(value[0], str) else "")
def test_flags_of_the_launcher(flags, attribute, value):
    args = build_parser().parse_args([*flags, "train", "--gloo"])
    assert getattr(args, attribute) == value and args.command == ["train", "--gloo"]
    assert config_parser.set_env_from_args({}, args) == {}


CONFIG = {
    "params": {"fusion_threshold_mb": 32, "cycle_time_ms": 5, "cache_capacity": 9, "hierarchical_allreduce": True,
               "hierarchical_allgather": False, "torus_allreduce": False, "algorithm": "bytegrad"},
    "autotune": {"enabled": True, "log_file": "a.csv", "warmup_samples": 5, "steps_per_sample": 20,
                 "bayes_opt_max_samples": 50, "gaussian_process_noise": 0.9, "auto_log": "b.json"},
    "timeline": {"filename": "t.json", "mark_cycles": True},
    "stall_check": {"enabled": False, "warning_time_seconds": 120, "shutdown_time_seconds": 240},
    "library_options": {"mpi_threads_disable": True, "num_nccl_streams": 2, "thread_affinity": 1,
                        "gloo_timeout_seconds": 60},
    "logging": {"level": "INFO", "with_timestamp": False},
    "controller": "gloo",
}


def test_config_file():
    args = build_parser().parse_args(["-np", "1", "true"])
    assert config_parser.set_args_from_config(args, CONFIG, set()) == []
    config_parser.validate_config_args(args)
    assert args.use_gloo is True and config_parser.set_env_from_args({}, args) == {
        "HOROVOD_FUSION_THRESHOLD": str(32 << 20), "HOROVOD_CYCLE_TIME": "5", "HOROVOD_CACHE_CAPACITY": "9",
        "HOROVOD_HIERARCHICAL_ALLREDUCE": "1", "HOROVOD_HIERARCHICAL_ALLGATHER": "0", "HOROVOD_TORUS_ALLREDUCE": "0",
        "BAGUA_ALGORITHM": "bytegrad", "HOROVOD_AUTOTUNE": "1", "HOROVOD_AUTOTUNE_LOG": "a.csv",
        "HOROVOD_AUTOTUNE_WARMUP_SAMPLES": "5", "HOROVOD_AUTOTUNE_STEPS_PER_SAMPLE": "20",
        "HOROVOD_AUTOTUNE_BAYES_OPT_MAX_SAMPLES": "50", "HOROVOD_AUTOTUNE_GAUSSIAN_PROCESS_NOISE": "0.9",
        "BAGUA_AUTO_LOG": "b.json",
        "HOROVOD_TIMELINE": "t.json", "HOROVOD_TIMELINE_MARK_CYCLES": "1", "HOROVOD_STALL_CHECK_DISABLE": "1",
        "HOROVOD_STALL_CHECK_TIME_SECONDS": "120", "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS": "240",
        "HOROVOD_MPI_THREADS_DISABLE": "1", "HOROVOD_NUM_NCCL_STREAMS": "2", "HOROVOD_THREAD_AFFINITY": "1",
        "HOROVOD_GLOO_TIMEOUT_SECONDS": "60", "HOROVOD_LOG_LEVEL": "INFO", "HOROVOD_LOG_HIDE_TIME": "1"}


def test_flags_win_over_the_config_file():
    args = build_parser().parse_args(["-np", "1", "--fusion-threshold-mb", "7", "--stall-check", "true"])
    config_parser.set_args_from_config(args, CONFIG, {"fusion_threshold_mb", "no_stall_check"})
    assert (args.fusion_threshold_mb, args.no_stall_check, args.cache_capacity) == (7, False, 9)


@pytest.mark.parametrize("config, words", [
    ({"params": {"cache_capacity": "many"}}, "params.cache_capacity: 'many': expected an integer"),
    ({"params": {"cache_capacity": True}}, "params.cache_capacity: True: expected an integer"),
    ({"autotune": {"enabled": 1}}, "autotune.enabled: 1: expected true or false"),
    ({"controller": "bare hands"}, "controller: 'bare hands' is none of gloo, mpi"),
    (["params"], "holds sections"),
])
def test_wrong_config_files(config, words):
    with pytest.raises(ValueError, match=words):
        config_parser.set_args_from_config(build_parser().parse_args([]), config, set())


def test_unknown_keys_of_a_config_file_are_told():
    config = {"params": {"cycle_time": 1}, "more": 2}
    assert config_parser.set_args_from_config(build_parser().parse_args([]), config, set()) == ["more",
                                                                                               "params.cycle_time"]


class TestExecute:
    def execute(self, command, **options):
        out, err = io.StringIO(), io.StringIO()
        code = safe_shell_exec.execute(command, stdout=out, stderr=err, **options)
        return code, out.getvalue(), err.getvalue()

    def test_output_and_exit_code(self):
        assert self.execute("echo out; echo err >&2; printf 'no end'; exit 7") == (7, "out\nno end", "err\n")

    def test_prefix(self):
        assert self.execute("echo out; printf err >&2", index=3) == (0, "[3]<stdout>:out\n", "[3]<stderr>:err\n")

    def test_signal(self):
        assert self.execute("kill -9 $$")[0] == 137

    def test_environment(self):
        assert self.execute("echo $A-$HOME", env={"A": "x"}) == (0, "x-\n", "")

    def test_event_stops_the_whole_tree(self):
        event = threading.Event()
        mark = uuid.uuid4().hex
        threading.Timer(0.5, event.set).start()
        code = self.execute("sleep 600 & sleep 600", env={**os.environ, MARK: mark}, events=[event])[0]
        assert code == 143
        assert processes_of(mark) == []

    def test_background_processes_end_with_the_command(self):
        mark = uuid.uuid4().hex
        assert self.execute("sleep 600 & echo done", env={**os.environ, MARK: mark})[:2] == (0, "done\n")
        wait_until(lambda: not processes_of(mark))

    def test_from_another_thread(self):
        results = []
        thread = threading.Thread(target=lambda: results.append(self.execute("echo a; exit 2")))
        thread.start()
        thread.join()
        assert results == [(2, "a\n", "")]

    def test_without_pidfd(self, monkeypatch):
        """Kernels before 5.3 lack it."""
        monkeypatch.delattr(os, "pidfd_open")
        assert self.execute("echo a; exit 2") == (2, "a\n", "")
        assert self.execute("kill -9 $$")[0] == 137

    def test_an_exception_leaves_nothing(self, monkeypatch):
        mark = uuid.uuid4().hex

        def interrupt():
            raise KeyboardInterrupt

        event = threading.Event()
        monkeypatch.setattr(event, "is_set", interrupt)
        with pytest.raises(KeyboardInterrupt):
            self.execute("sleep 60 & sleep 60", env={**os.environ, MARK: mark}, events=[event])
        assert processes_of(mark) == []

    def test_no_descriptors_left_behind(self):
        self.execute("true")
        gc.collect()            # may close descriptors that other tests left
        before = os.listdir("/proc/self/fd")
        self.execute("sleep 60 & exit 1")
        assert set(os.listdir("/proc/self/fd")) <= set(before)
