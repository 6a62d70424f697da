"""The partition of gradients into buckets, and the bookkeeping of one bucket."""
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bagua_hvd.core import native
from bagua_hvd.core.native import TensorView
from bagua_hvd.training.buckets import Bucket, Member, partition, partition_groups


def members_of(*sizes, dtype=native.FLOAT32):
    return {i: Member(f"p{i}", (size,), dtype) for i, size in enumerate(sizes)}


def test_runs_backwards_and_cuts_before_the_limit():
    assert partition(members_of(10, 10, 10, 10, 10), limit=80) == [[4, 3], [2, 1], [0]]


def test_first_bucket_is_small():
    plan = partition(members_of(*[1 << 16] * 100))      # 256 KiB each
    assert [len(indices) for indices in plan] == [4, 40, 40, 16]


def test_member_above_the_limit_travels_alone():
    assert partition(members_of(1, 100, 1), limit=40) == [[2], [1], [0]]


def test_dtypes_and_devices_never_mix():
    members = members_of(4, 4, 4, 4, 4)
    members[1] = members[1]._replace(dtype=native.BFLOAT16)
    members[3] = members[3]._replace(dtype=native.BFLOAT16)
    members[2] = members[2]._replace(device="cuda:0")
    assert partition(members, limit=1 << 20) == [[4, 0], [3, 1], [2]]


def test_groups_are_kept_whole_and_the_rest_is_cut():
    members = members_of(10, 10, 10, 10)
    members[1] = members[1]._replace(dtype=native.FLOAT64)
    assert partition_groups(members, [[0, 1, 2]]) == [[0, 2], [1], [3]]


@given(st.lists(st.tuples(st.integers(0, 50), st.sampled_from([native.FLOAT32, native.FLOAT16])), max_size=40),
       st.integers(1, 300))
def test_every_member_once_one_dtype_and_below_the_limit(sizes, limit):
    members = {i: Member(f"p{i}", (size,), dtype) for i, (size, dtype) in enumerate(sizes)}
    plan = partition(members, limit)
    assert sorted(index for indices in plan for index in indices) == list(members)
    for indices in plan:
        assert len({members[index].dtype for index in indices}) == 1
        assert indices == sorted(indices, reverse=True)
        assert len(indices) == 1 or sum(members[index].nbytes for index in indices) <= limit


def test_limit_comes_from_the_environment(monkeypatch):
    members = members_of(1024, 1024, 1024)
    monkeypatch.delenv("BAGUA_DEFAULT_BUCKET_SIZE", raising=False)
    assert partition(members) == [[2, 1, 0]]
    monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", "4096")
    assert partition(members) == [[2], [1], [0]]
    for text in ("0", "-1", "10M"):
        monkeypatch.setenv("BAGUA_DEFAULT_BUCKET_SIZE", text)
        with pytest.raises(ValueError, match="BAGUA_DEFAULT_BUCKET_SIZE"):
            partition(members)


def test_bucket_bookkeeping():
    bucket = Bucket("b", members_of(2, 3))
    assert (bucket.count, bucket.missing, bucket.dtype) == (5, 2, native.FLOAT32)
    view = TensorView(64, 64, (3,), native.FLOAT16, None)
    bucket.place(1, view)
    assert bucket.missing == 1
    bucket.remove(0)
    assert (bucket.views, bucket.missing, bucket.count, bucket.dtype) == ([view], 0, 3, native.FLOAT16)
    bucket.clear()
    assert (bucket.views, bucket.missing) == ([None], 1)


def test_bucket_refuses_mixed_members():
    with pytest.raises(ValueError, match="dtype or device"):
        Bucket("b", {0: Member("p", (1,), native.FLOAT32), 1: Member("q", (1,), native.FLOAT16)})
