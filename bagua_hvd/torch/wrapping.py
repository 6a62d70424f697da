"""What every wrapped torch optimizer is made of: its class, what it has of the given one, its parameters' names."""
from typing import TYPE_CHECKING

# What stands before an optimizer's class has its methods above; that class need not be one of torch's.
if TYPE_CHECKING:
    from torch.optim import Optimizer as Wrapped
else:
    Wrapped = object


def wrapped_class(optimizer, mixin):
    """The class of a wrapped optimizer: with the name of the given one, and "horovod" in what str() says of it.

    By the latter libraries recognize Horovod's optimizers.
    """
    cls = type(optimizer)
    return type(cls.__name__, (mixin, cls), {
        "__doc__": cls.__doc__, "__module__": mixin.__module__, "__qualname__": f"horovod.{cls.__name__}"})


def take_over(wrapped, optimizer, names):
    """Makes `wrapped` have what the optimizer has, without the class's own __init__, whose parameters are unknown.

    Hyperparameters and state are shared. Patched methods stay with the given one: an LR scheduler's step.
    """
    mixin = type(wrapped).__mro__[1]
    wrapped.__dict__.update({name: value for name, value in optimizer.__dict__.items() if not hasattr(mixin, name)})
    wrapped.__dict__["param_groups"] = list(optimizer.param_groups)
    wrapped._given = optimizer
    wrapped._parameter_names = {parameter: name for name, parameter in names}


def count_step(wrapped):
    """Tells LR schedulers that were made before the optimizer was wrapped that it makes steps."""
    wrapped._given._opt_called = True
    wrapped._given._step_count = getattr(wrapped._given, "_step_count", 0) + 1      # up to torch 2.2


def parameters_by_name(optimizer, named_parameters):
    """(name, parameter) of all parameters of the optimizer.

    In the order of named_parameters where given: the model's, equal on all ranks even where the optimizer's is not.
    """
    own = {
        parameter: f"noname.{g}.{i}"
        for g, group in enumerate(optimizer.param_groups) for i, parameter in enumerate(group["params"])
    }
    if named_parameters is None:
        pairs = [(name, parameter) for parameter, name in own.items()]
    else:
        pairs = list(named_parameters)
        if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
            raise ValueError(
                "named_parameters should be a sequence of tuples (name, parameter), as model.named_parameters() gives"
            )
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        if twice:
            raise ValueError(f"parameter names in named_parameters must be unique; found more than once: {twice}")
        pairs = list({parameter: (name, parameter) for name, parameter in reversed(pairs)}.values())[::-1]
        unnamed = own.keys() - {parameter for _, parameter in pairs}
        if unnamed:
            raise ValueError(
                "named_parameters was specified, but one or more model parameters were not named: "
                + ", ".join(sorted(f"group {own[p].split('.')[1]}, number {own[p].split('.')[2]}" for p in unnamed))
            )
    return [(name, parameter) for name, parameter in pairs if parameter in own]
