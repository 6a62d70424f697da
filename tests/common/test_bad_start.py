"""Errors before a job runs: each names the fact and the remedy, and nothing hangs."""
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bagua_hvd.job import basics

PACKAGE = Path(basics.__file__).parents[1]


def init_with_another_secret():
    with pytest.raises(ValueError, match="_HOROVOD_SECRET_KEY"):
        basics.init()
    assert not basics.is_initialized()


def test_stale_secret(run_ranks):
    run_ranks(2, init_with_another_secret, env={"_HOROVOD_SECRET_KEY": "c3RhbGU=", "HOROVOD_START_TIMEOUT": "5"})


def init_without_others():
    with pytest.raises(ValueError, match="rank 1 of 2 did not arrive"):
        basics.init()


def test_missing_rank(run_ranks):
    run_ranks(1, init_without_others, env={"HOROVOD_SIZE": "2", "HOROVOD_START_TIMEOUT": "3"}, rendezvous=True)


def init_with_nobody_listening():
    with pytest.raises(ValueError, match=r"127\.0\.0\.1:1\b"):
        basics.init()


def test_no_rendezvous(run_ranks):
    run_ranks(1, init_with_nobody_listening, env={"HOROVOD_SIZE": "2", "HOROVOD_START_TIMEOUT": "1"})


def test_extension_not_built(tmp_path):
    shutil.copytree(PACKAGE, tmp_path / "bagua_hvd", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    # -S: an editable installation must not provide the extension that this copy lacks.
    done = subprocess.run([sys.executable, "-S", "-c", "import bagua_hvd.core.native"], cwd=tmp_path, text=True,
                          env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, timeout=60)
    assert done.returncode == 1
    assert "the native extension of bagua_hvd is not built: run `pip install .`" in done.stderr
