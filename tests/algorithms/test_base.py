"""Names of algorithms, and combinations of `algorithm=` and `op=`."""
import inspect

import pytest

from bagua_hvd import algorithms
from bagua_hvd.algorithms import Algorithm, ByteGrad, GradientAllReduce


class Own(Algorithm):
    pass


def test_names():
    assert {"gradient_allreduce", "bytegrad"} <= set(algorithms.names())
    assert isinstance(algorithms.get("gradient_allreduce"), GradientAllReduce)
    assert isinstance(algorithms.get("bytegrad"), ByteGrad)


def test_unknown_name_lists_the_known_and_the_closest():
    with pytest.raises(ValueError, match="unknown algorithm 'bytgrad'.*Did you mean 'bytegrad'.*gradient_allreduce"):
        algorithms.get("bytgrad")


@pytest.mark.parametrize("name, instead", [
    ("async_low_precision", '"async"'), ("async_decentralized", '"async" or "decentralized"'),
    ("async_low_precision_decentralized", '"async" or "low_precision_decentralized"')])
def test_a_name_of_an_earlier_version_says_what_to_use(name, instead):
    with pytest.raises(ValueError, match=f"the algorithm '{name}' was removed: use {instead}$"):
        algorithms.get(name)


def test_instance_class_and_nonsense():
    own = Own()
    assert algorithms.get(own) is own
    assert isinstance(algorithms.get(Own), Own)
    with pytest.raises(TypeError, match="algorithm=3"):
        algorithms.get(3)


def test_register():
    algorithms.register("bytegrad", ByteGrad)       # registering it again is allowed
    with pytest.raises(ValueError, match="taken by ByteGrad"):
        algorithms.register("bytegrad", Own)
    with pytest.raises(TypeError, match="subclass of Algorithm"):
        algorithms.register("own", Own())


def test_default_comes_from_the_environment_and_code_wins(monkeypatch):
    monkeypatch.delenv("BAGUA_ALGORITHM", raising=False)
    assert isinstance(algorithms.choose(None, average=True), GradientAllReduce)
    monkeypatch.setenv("BAGUA_ALGORITHM", "bytegrad")
    assert isinstance(algorithms.choose(None, average=True), ByteGrad)
    assert isinstance(algorithms.choose("gradient_allreduce", average=True), GradientAllReduce)
    monkeypatch.setenv("BAGUA_ALGORITHM", "nonsense")
    with pytest.raises(ValueError, match="unknown algorithm 'nonsense'"):
        algorithms.choose(None, average=True)


def test_sum_and_average():
    assert algorithms.choose("bytegrad", average=False).average is False
    assert algorithms.choose(ByteGrad(average=False), average=False).average is False
    with pytest.raises(ValueError, match="op=Sum.*average=True"):
        algorithms.choose(ByteGrad(), average=False)


def test_a_switch_leaves_the_users_algorithm_as_it_is(monkeypatch):
    monkeypatch.setenv("BAGUA_HIERARCHY", "0")
    algorithm = ByteGrad(hierarchical=True)
    assert not algorithms.choose(algorithm, average=True).hierarchical and algorithm.hierarchical


def test_own_algorithm_must_communicate():
    with pytest.raises(NotImplementedError):
        Own().communicate(None, None)


def test_default_of_hierarchical():
    """On, except where hosts would replace ranks as peers and the ranks of a host would wait for each other."""
    said = {name: inspect.signature(type(algorithms.get(name))).parameters.get("hierarchical")
            for name in algorithms.names()}
    assert {name for name, parameter in said.items() if parameter and not parameter.default} == {"choco"}
