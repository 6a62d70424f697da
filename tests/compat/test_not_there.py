"""Importing a part of Horovod that bagua_hvd lacks raises an error that names an alternative, under both names."""
import importlib
import subprocess
import sys

import pytest


@pytest.mark.parametrize("name, words", [("mxnet", "no front end for MXNet")])
def test_the_import_says_what_to_use(name, words):
    for module in (name, f"{name}.torch"):
        with pytest.raises(ModuleNotFoundError) as raised:
            importlib.import_module(f"bagua_hvd.{module}")
        assert words in str(raised.value) and raised.value.name == f"bagua_hvd.{name}"


@pytest.mark.parametrize("name", ["mxnet"])
def test_by_horovods_name(name):
    code = f"import bagua_hvd.as_horovod, horovod.{name}.torch"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "ModuleNotFoundError: bagua_hvd has no " in done.stderr.splitlines()[-1]


@pytest.mark.parametrize("package, module", [("ray", "bagua_hvd.ray"), ("pyspark", "bagua_hvd.spark")])
def test_without_the_package_the_import_says_what_to_install(package, module):
    code = f"import sys; sys.modules[{package!r}] = None; import {module}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and f"pip install 'bagua_hvd[{module.split('.')[1]}]'" in done.stderr.splitlines()[-1]
