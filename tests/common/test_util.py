"""The helpers under Horovod's names."""
import inspect
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from bagua_hvd.common import util
from bagua_hvd.core.exceptions import HorovodVersionMismatchError, HostsUpdatedInterrupt
from bagua_hvd.core.util import doc_from, in_window


def test_env_sets_and_restores(monkeypatch):
    monkeypatch.setenv("BAGUA_TEST_A", "old")
    monkeypatch.delenv("BAGUA_TEST_B", raising=False)
    with util.env(BAGUA_TEST_A="new", BAGUA_TEST_B=1, BAGUA_TEST_C=None):
        assert os.environ["BAGUA_TEST_A"] == "new" and os.environ["BAGUA_TEST_B"] == "1"
        assert "BAGUA_TEST_C" not in os.environ
    assert os.environ["BAGUA_TEST_A"] == "old" and "BAGUA_TEST_B" not in os.environ


@pytest.mark.parametrize("count, n", [(0, 3), (1, 3), (7, 3), (9, 3), (10, 1)])
def test_split_list(count, n):
    pieces = util.split_list(list(range(count)), n)
    assert sum(pieces, []) == list(range(count)) and len(pieces) == n
    lengths = [len(piece) for piece in pieces]
    assert lengths == sorted(lengths, reverse=True) and lengths[0] - lengths[-1] <= 1


def test_versions():
    assert util.is_version_greater_equal_than("2.10.0", "2.9.1")
    assert util.is_version_greater_equal_than("2.1.0+cpu", "2.1.0")
    assert not util.is_version_greater_equal_than("1.99.9", "2.0.0")
    for wrong in (2, "2", "2.1", "a.b.c"):
        with pytest.raises(ValueError):
            util.is_version_greater_equal_than(wrong, "1.0.0")


def test_average_and_op():
    resolve = util.get_average_backwards_compatibility_fun(SimpleNamespace(Average=0, Sum=1))
    assert resolve(None, None) == 0 and resolve(1, None) == 1 and resolve(4, None) == 4
    sentence = "parameter `average` is deprecated, use `op`; bagua_hvd 2.0 removes it"
    with pytest.warns(DeprecationWarning, match=sentence):
        assert resolve(None, True) == 0
    with pytest.warns(DeprecationWarning, match=sentence):
        assert resolve(None, False) == 1
    with pytest.raises(ValueError):
        resolve(0, True)


def test_every_deprecation_names_its_end():
    package = Path(util.__file__).parents[1]
    users = [path.relative_to(package) for path in package.rglob("*.py") if "DeprecationWarning" in path.read_text()]
    assert users == [Path("core", "util.py")], "call deprecated() of core/util.py"


def test_without_docstrings():
    code = "import bagua_hvd.torch, bagua_hvd.torch.elastic, bagua_hvd.runner.launch, bagua_hvd.lightning"
    subprocess.run([sys.executable, "-OO", "-c", code], check=True, timeout=120)


def test_small_facts():
    assert [n for n in range(-1, 9) if util.num_rank_is_power_2(n)] == [1, 2, 4, 8]
    assert util.is_iterable([]) and util.is_iterable("x") and not util.is_iterable(3)
    assert util.get_extension_full_path("/a/b.py", "c", "lib") == "/a/c/lib" + util.get_ext_suffix()
    calls = []
    cached = util._cache(lambda x: calls.append(x) or x)
    assert [cached(1), cached(1), cached(2)] == [1, 1, 2] and calls == [1, 2]


def test_version_mismatch():
    with pytest.raises(HorovodVersionMismatchError) as caught:
        util.check_installed_version("pytest", "0.0.1", ImportError("cause"))
    assert (caught.value.name, caught.value.version) == ("pytest", "0.0.1")
    assert isinstance(caught.value, ImportError)
    with pytest.warns(UserWarning, match="0.0.1"):
        util.check_installed_version("pytest", "0.0.1")
    util.check_installed_version("pytest", pytest.__version__)


def test_hosts_updated():
    assert HostsUpdatedInterrupt(True).skip_sync is True
    assert isinstance(HostsUpdatedInterrupt(False), RuntimeError)


@pytest.mark.parametrize("python", ["before 3.13", "from 3.13 on"])      # which strips what indents a docstring
def test_doc_from(python):
    def source(tensor, name, group):
        """Sums.

        Args:
            tensor: what is summed,
                in place.
            name: by which ranks match it. group: all ranks.
        Raises:
            ValueError: no.
        """

    def form(tensor, compression):
        pass

    if python != "before 3.13":
        source.__doc__ = inspect.cleandoc(source.__doc__)
    assert inspect.getdoc(doc_from(source, "In graphs.", compression="a codec.")(form)) == """In graphs.

Sums.

Args:
    tensor: what is summed,
        in place.
    compression: a codec.
Raises:
    ValueError: no."""


@pytest.mark.parametrize("failing, finished", [(1, [0, 1, 2]), (3, [0, 1, 2, 3])])
def test_what_is_in_flight_is_finished_after_a_failure(failing, finished):
    seen = []

    def finish(item):
        seen.append(item)
        if item == failing:
            raise ValueError("lost")

    with pytest.raises(ValueError, match="lost"):
        in_window(range(4), lambda item: item, finish, lambda item: 1, limit=2)
    assert seen == finished
