"""CachedDataset: each sample is loaded once, in any process; a sample that cannot be cached is loaded each time."""
import logging
import os
import pickle
import subprocess
import sys

import numpy as np
import pytest

from bagua_hvd.data import CachedDataset

pytest.importorskip("diskcache", reason="not installed: pip install 'bagua_hvd[cache]'")


class Squares:
    """Counts how often each sample is loaded. Samples have `size` float64."""

    def __init__(self, count=10, size=3):
        self.count, self.size, self.loaded = count, size, []

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        if not 0 <= i < self.count:
            raise IndexError(i)
        self.loaded.append(i)
        return np.full(self.size, float(i * i)), i


def test_loads_each_once(tmp_path):
    squares = Squares()
    cached = CachedDataset(squares, tmp_path / "new" / "folder", "squares")
    assert len(cached) == 10
    for order in (range(10), reversed(range(10)), np.arange(10)):
        for i in order:
            values, number = cached[i]
            assert number == i and values.tolist() == [i * i] * 3 and values.dtype == np.float64
    assert squares.loaded == list(range(10))
    assert (tmp_path / "new" / "folder").stat().st_mode & 0o777 == 0o700
    with pytest.raises(IndexError):
        cached[10]
    assert len(cached.cache) == 10


def test_what_is_cached_may_be_none_or_false(tmp_path):
    class Empty(Squares):
        def __getitem__(self, i):
            self.loaded.append(i)
            return [None, False, b""][i]

    cached = CachedDataset(Empty(3), tmp_path, "empty")
    assert [cached[i] for i in (0, 1, 2, 0, 1, 2)] == [None, False, b""] * 2 and cached.dataset.loaded == [0, 1, 2]


def test_names_and_later_runs(tmp_path):
    for name, loads in (("train", 10), ("train", 0), ("test", 10)):
        squares = Squares()
        cached = CachedDataset(squares, tmp_path, name)
        assert [cached[i][1] for i in range(10)] == list(range(10))
        assert len(squares.loaded) == loads


class Labels(list):
    """Samples with tensors, as pickles from another process may have."""

    def __getitem__(self, i):
        import torch

        return {"label": super().__getitem__(i), "image": torch.arange(4.0), "array": np.arange(3)}


def test_a_folder_without_a_name_is_for_one_data_set(tmp_path):
    pytest.importorskip("torch")
    train = CachedDataset(Labels(["t0", "t1"]), tmp_path)
    assert [train[i]["label"] for i in range(2)] == ["t0", "t1"]
    for other in (Labels(["v0", "t1"]), Labels(["t0", "t1", "t2"]), ["t0", "t1"]):
        with pytest.raises(ValueError, match="another data set, or of data that has changed.*give each data set a "):
            CachedDataset(other, tmp_path)
    named = CachedDataset(Labels(["v0", "v1"]), tmp_path, "val")
    assert [named[i]["label"] for i in range(2)] == ["v0", "v1"]
    assert [CachedDataset(Labels(["t0", "t1"]), tmp_path)[i]["label"] for i in range(2)] == ["t0", "t1"]
    same = subprocess.run([sys.executable, "-c", """
import numpy as np, torch
from bagua_hvd.data.cached_dataset import _digest
print(_digest({"label": "t0", "image": torch.arange(4.0), "array": np.arange(3)}))
"""], capture_output=True, text=True, timeout=100)
    assert same.stdout.strip() == train.cache["identity"][2], same.stderr


@pytest.mark.parametrize("policy", ["least-recently-stored", "least-recently-used", "least-frequently-used"])
def test_a_data_set_without_a_name_whose_identity_was_evicted(tmp_path, policy):
    first = CachedDataset(Squares(50, size=20_000), tmp_path, size_limit=4_000_000, eviction_policy=policy)
    for i in range(50):
        first[i], first[i], first[i]
    assert "identity" not in first.cache
    others = CachedDataset([f"other {i}" for i in range(50)], tmp_path)
    assert [others[i] for i in range(50)] == [f"other {i}" for i in range(50)]


def test_samples_of_an_earlier_data_set_without_a_name_are_removed(tmp_path):
    named, first = CachedDataset(Squares(), tmp_path, "named"), CachedDataset(Squares(), tmp_path)
    named[1], first[1], first[2]
    first.cache[":3"] = "of an earlier version"
    for _ in range(2):          # as by an eviction; the same data set keeps its samples
        del first.cache["identity"]
        assert CachedDataset(Squares(), tmp_path)[2][1] == 2 and len(first.cache) == 4
    del first.cache["identity"]
    others = CachedDataset(["other"], tmp_path)
    assert others[0] == "other" and sorted(key.partition(":")[2] for key in first.cache) == ["", "0", "1"]
    assert "named:1" in first.cache


def test_a_data_set_without_a_name_after_clear(tmp_path):
    squares = CachedDataset(Squares(), tmp_path)
    squares[5]
    squares.cache.clear()
    others = CachedDataset([f"other {i}" for i in range(10)], tmp_path)
    squares[5]
    assert others[5] == "other 5" and squares[5][1] == 5


def test_samples_that_cannot_be_pickled(tmp_path, caplog):
    lambdas = [lambda: 0, lambda: 1]
    cached = CachedDataset(lambdas, tmp_path)
    with caplog.at_level(logging.WARNING, "bagua_hvd"):
        assert [cached[i]() for i in (0, 1, 0)] == [0, 1, 0]
    assert "pickle" in caplog.records[0].getMessage() and len(caplog.records) == 1


def test_what_can_no_longer_be_unpickled_is_loaded(tmp_path, monkeypatch):
    class Gone(int):
        pass

    monkeypatch.setitem(globals(), "Gone", Gone)
    Gone.__qualname__ = "Gone"
    CachedDataset([Gone(1)], tmp_path, "a")[0]
    monkeypatch.delitem(globals(), "Gone")
    assert CachedDataset([2], tmp_path, "a")[0] == 2


def test_other_processes_of_the_host_have_it(tmp_path):
    """Processes that run one after the other share a cache, as do copies of the object in a loader's workers."""
    cached = CachedDataset(Squares(), tmp_path, "squares")
    for i in range(5):
        cached[i]
    copy = pickle.loads(pickle.dumps(cached))
    copy.dataset.loaded.clear()
    assert [copy[i][1] for i in range(10)] == list(range(10)) and copy.dataset.loaded == [5, 6, 7, 8, 9]
    code = f"""
from bagua_hvd.data import CachedDataset
class Nothing:
    def __getitem__(self, i): raise AssertionError(i)
print(sum(CachedDataset(Nothing(), {str(tmp_path)!r}, "squares")[i][1] for i in range(10)))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "45", done.stderr


def test_workers_of_a_loader(tmp_path):
    data = pytest.importorskip("torch.utils.data")
    cached = CachedDataset(Squares(40), tmp_path, "squares")
    for _ in range(2):
        loader = data.DataLoader(cached, batch_size=8, shuffle=True, num_workers=2, multiprocessing_context="fork")
        assert sorted(i for _, numbers in loader for i in numbers.tolist()) == list(range(40))
    assert len(cached.cache) == 40 and cached.dataset.loaded == []      # loaded in the workers
    assert sum(cached[i][1] for i in range(40)) == 780 and cached.dataset.loaded == []


def test_views_of_a_tensor_cost_what_they_show(tmp_path):
    torch = pytest.importorskip("torch")
    data = torch.utils.data.TensorDataset(torch.randn(200, 100, 50).transpose(1, 2), torch.arange(200))     # 4 MB
    cached = CachedDataset(data, tmp_path, "views", 16_000_000)
    for _ in range(2):
        for i in range(200):
            values, number = cached[i]
            assert torch.equal(values, data.tensors[0][i]) and number == i
    assert len(cached.cache) == 200 and cached.cache.volume() < 6_000_000
    sparse = torch.eye(3).to_sparse()
    assert torch.equal(CachedDataset([sparse], tmp_path, "sparse")[0].to_dense(), torch.eye(3))


def test_a_full_cache_keeps_what_it_has(tmp_path, caplog):
    squares = Squares(50, size=20_000)       # 8 MB in all
    cached = CachedDataset(squares, tmp_path, "squares", 4_000_000)
    with caplog.at_level(logging.WARNING, "bagua_hvd"):
        for _ in range(3):
            assert [cached[i][1] for i in range(50)] == list(range(50))
    record, = caplog.records
    assert f"is full: it has {len(cached.cache)} entries, and size_limit is 4000000 bytes" in record.getMessage()
    kept = len(cached.cache)
    assert 20 <= kept <= 26 and cached.cache.volume() < 4_500_000
    assert len(squares.loaded) == 50 + 2 * (50 - kept)


def test_a_full_cache_that_evicts(tmp_path):
    squares = Squares(50, size=20_000)
    cached = CachedDataset(squares, tmp_path, "squares", 4_000_000, eviction_policy="least-recently-used")
    for i in range(50):
        cached[i]
    loaded = len(squares.loaded)
    cached[49], cached[48]
    assert len(squares.loaded) == loaded and len(cached.cache) < 30
    cached[0]
    assert squares.loaded[-1] == 0


def test_goes_on_without_its_cache(tmp_path, caplog, monkeypatch):
    cached = CachedDataset(Squares(), tmp_path, "squares")

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cached.cache, "set", full)
    with caplog.at_level(logging.WARNING, "bagua_hvd"):
        assert [cached[i][1] for i in (1, 2, 1)] == [1, 2, 1]
    record, = caplog.records
    assert "No space left" in record.getMessage() and str(tmp_path) in record.getMessage()


def test_refuses_a_folder_that_others_may_write(tmp_path):
    (tmp_path / "open").mkdir()
    os.chmod(tmp_path / "open", 0o777)
    with pytest.raises(PermissionError, match="others, who could run code"):
        CachedDataset(Squares(), tmp_path / "open")
    assert os.listdir(tmp_path / "open") == []


def test_an_unknown_policy(tmp_path):
    with pytest.raises(ValueError, match="least-recently-used"):
        CachedDataset(Squares(), tmp_path, eviction_policy="newest")


def test_without_diskcache(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "diskcache", None)
    with pytest.raises(ImportError, match="pip install"):
        CachedDataset(Squares(), tmp_path)
