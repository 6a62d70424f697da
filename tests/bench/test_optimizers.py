"""The comparison of optimizers' implementations: all of them take the same step, and one that does not is found."""
import pytest

torch = pytest.importorskip("torch")

from bagua_hvd.bench import optimizers  # noqa: E402

SHAPES = [(3, 5), (5,), (1,)]


@pytest.mark.parametrize("optimizer", optimizers.OPTIMIZERS)
def test_all_agree(optimizer):
    found = optimizers.measure(SHAPES, optimizer, 2, "cpu")
    assert list(found) == ["loop", "foreach", "fused", "flat, loop", "flat, fused"]
    assert all(ms > 0 for ms in found.values())


def test_one_that_does_another_step_is_found(monkeypatch):
    def other(parameters, fused=False, **options):
        return torch.optim.SGD(parameters, 0.2 if fused else 0.1)

    monkeypatch.setitem(optimizers.OPTIMIZERS, "adam", other)
    with pytest.raises(RuntimeError, match="adam: the variants' weights differ"):
        optimizers.measure(SHAPES, "adam", 2, "cpu")


def test_table(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["optimizers", "--rounds", "1"])
    monkeypatch.setattr(optimizers, "MODELS", {"small": SHAPES})
    optimizers.main()
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith("torch ") and len(rows) == len(optimizers.OPTIMIZERS)
    assert all(len(row.split()) >= 5 + 3 for row in rows)
