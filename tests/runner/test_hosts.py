import pytest

from bagua_hvd.runner.common.util.hosts import (
    INVALID_SLOT_INFO,
    HostInfo,
    SlotInfo,
    get_host_assignments,
    parse_host_files,
    parse_hosts,
    parse_hosts_and_slots,
)


def test_parse_hosts():
    assert parse_hosts("a:2,b.example.org:4,c") == [HostInfo("a", 2), HostInfo("b.example.org", 4), HostInfo("c", 1)]
    assert parse_hosts_and_slots("a:2,b:4") == (["a", "b"], {"a": 2, "b": 4})
    assert parse_hosts("[fd00::2]:4,a,[FD00::3]") == [HostInfo("fd00::2", 4), HostInfo("a", 1), HostInfo("FD00::3", 1)]


@pytest.mark.parametrize("text", ["", "a:", "a:x", "a:-1", ":2", "a:2,,b:1", "a b", "a:0", "a:1:2"])
def test_parse_hosts_refuses(text):
    with pytest.raises(ValueError, match="expected|slots"):
        parse_hosts(text)


def test_a_host_named_twice_has_all_its_slots():
    assert parse_hosts_and_slots("a:2,b:1,a:1") == (["a", "b"], {"a": 3, "b": 1})
    assert _numbers(get_host_assignments(parse_hosts("a:1,b:1,a:1"), 3)) == [
        ("a", 0, 0, 0, 3, 2, 2), ("b", 1, 0, 1, 3, 1, 2), ("a", 2, 1, 0, 3, 2, 1)]


@pytest.mark.parametrize("text, remedy", [
    ("fd88::2", r"such as localhost:4 or \[fd00::2\]:4"), ("[a]:1", "such as localhost:4"),
    ("tom@a:2", "the user in ~/.ssh/config")])
def test_what_cannot_be_a_host_says_what_to_do(text, remedy):
    with pytest.raises(ValueError, match=remedy):
        parse_hosts(text)


def test_parse_host_files(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("# ours\na slots=2\n\nb  slots = 4  # big\nc\nd:3\ne slots=2 max_slots=4\nf max-slots=8\n"
                    "[fd00::2] slots=2\n[fd00::3]:4\n[fd00::4]\n")
    assert parse_host_files(path) == "a:2,b:4,c:1,d:3,e:2,f:1,[fd00::2]:2,[fd00::3]:4,[fd00::4]:1"
    path.write_text("a slots=2\n", encoding="utf-8-sig")
    assert parse_host_files(path) == "a:2"
    path.write_bytes(b"\xe9 slots=2\n")
    with pytest.raises(ValueError, match="hosts is not text in UTF-8: save it so"):
        parse_host_files(path)
    path.write_text("a slots=2\nb slots two\n")
    with pytest.raises(ValueError, match="line 2"):
        parse_host_files(path)
    path.write_text("\n")
    with pytest.raises(ValueError, match="no host"):
        parse_host_files(path)


def _numbers(plan):
    return [(s.hostname, s.rank, s.local_rank, s.cross_rank, s.size, s.local_size, s.cross_size) for s in plan]


def test_assignments_fill_hosts_in_order():
    assert _numbers(get_host_assignments(parse_hosts("a:2,b:2"), 4)) == [
        ("a", 0, 0, 0, 4, 2, 2), ("a", 1, 1, 0, 4, 2, 2), ("b", 2, 0, 1, 4, 2, 2), ("b", 3, 1, 1, 4, 2, 2)]


def test_cross_rank_counts_only_hosts_with_that_local_rank():
    assert _numbers(get_host_assignments(parse_hosts("a:1,b:3,c:2"), 6)) == [
        ("a", 0, 0, 0, 6, 1, 3), ("b", 1, 0, 1, 6, 3, 3), ("b", 2, 1, 0, 6, 3, 2), ("b", 3, 2, 0, 6, 3, 1),
        ("c", 4, 0, 2, 6, 2, 3), ("c", 5, 1, 1, 6, 2, 2)]


def test_assignments_stop_at_the_maximum():
    plan = get_host_assignments(parse_hosts("a:2,b:4,c:1"), 1, 3)
    assert _numbers(plan) == [("a", 0, 0, 0, 3, 2, 2), ("a", 1, 1, 0, 3, 2, 1), ("b", 2, 0, 1, 3, 1, 2)]
    assert len(get_host_assignments(parse_hosts("a:2,b:4"), 1)) == 6


def test_localhost_and_its_address_are_two_hosts():
    assert [s.cross_size for s in get_host_assignments(parse_hosts("localhost:1,127.0.0.1:1"), 2)] == [2, 2]


def test_too_few_slots():
    with pytest.raises(ValueError, match=r"Requested more processes \(5\) than there are available slots \(4\)"):
        get_host_assignments(parse_hosts("a:2,b:2"), 5)


def test_slot_info():
    assert INVALID_SLOT_INFO == SlotInfo("", -1, -1, -1, -1, -1, -1)
    assert list(SlotInfo("a", 1, 0, 1, 2, 1, 2).environment.values()) == ["1", "2", "0", "1", "1", "2"]
