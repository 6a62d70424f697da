"""Random training programs, like those of users, compared with one process that computes the gradients of all ranks.

A program is drawn from its seed, equally on all ranks: parameters (0-d, empty, sparse, tied, channels_last, of two
dtypes), one or two optimizers with lossless algorithms, and steps. These accumulate by no_sync() or
backward_passes_per_step, make several windows or part of one, leave out ranks and parameters, freeze and unfreeze, add
groups, clip, scale, use schedulers, save and load. Ranks run many programs, one after the other.
"""
import copy
import gc
import itertools
import random
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.nn import functional

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms, codecs

# rtol and atol: for float64 with gradient_allreduce; for float32, or float64 with codecs that keep float32.
NEAR = {torch.float64: 1e-9, torch.float32: 2e-5}
EVERYTHING = codecs.topk(1.0)
LOSSLESS = {
    "gradient_allreduce": lambda average: "gradient_allreduce",
    "bytegrad": lambda average: algorithms.ByteGrad(codec=EVERYTHING, average=average),
    "topk": lambda average: algorithms.TopK(ratio=1.0, average=average),
    "doublesqueeze": lambda average: algorithms.DoubleSqueeze(codec=EVERYTHING, average=average),
    "powersgd": lambda average: algorithms.PowerSGD(rank=64),
}
# The mean of weights after steps by SGD without momentum equals a step with the mean gradient.
LOCAL = {"local_sgd": lambda average: algorithms.LocalSGD(1),
         "diloco": lambda average: algorithms.DiLoCo(1, outer_lr=1.0, outer_momentum=0.0, codec=None)}
MAKE = LOSSLESS | LOCAL
SHAPES = ((), (0, 3), (1,), (5,), (3, 4), (2, 3, 2, 2), (7, 1))


# ------------------------------------------------------------------------------------------------------ drawing ----


def draw_parameter(draw, owner, sparse, dtypes):
    if sparse and draw.random() < 0.5:
        return {"owner": owner, "shape": (6, 2), "rows": True, "dtype": torch.float64, "tied": False}
    return {"owner": owner, "shape": draw.choice(SHAPES), "rows": False, "tied": draw.random() < 0.3,
            "dtype": draw.choice(dtypes)}


def draw_optimizer(draw, n):
    name = draw.choice(["gradient_allreduce"] * 4 + list(MAKE))
    local = name in LOCAL
    op = hvd.Sum if not local and name != "powersgd" and draw.random() < 0.3 else hvd.Average
    sparse = not local and name == "gradient_allreduce" and draw.random() < 0.3
    delay = int(name in ("gradient_allreduce", "doublesqueeze") and n > 1 and draw.random() < 0.12 and not sparse)
    plain = local or sparse
    return {
        "algorithm": name, "op": op, "sparse": sparse, "delay": delay, "local": local,
        "base": "sgd" if plain else draw.choice(("sgd", "momentum", "nesterov", "adam", "adamw", "adagrad", "rmsprop")),
        "passes": 1 if delay else draw.choice((1, 1, 1, 2, 3)),
        "gradients_untouched": not delay and draw.random() < 0.2,
        "named": draw.random() < 0.5,
        "sparse_as_dense": draw.random() < 0.3,
        "groups": draw.choice((None, None, None, 1, 2)),
        "predivide": 2.0 if op == hvd.Average and name == "gradient_allreduce" and draw.random() < 0.2 else 1.0,
        "scheduler": draw.random() < 0.3,
        "momentum": 0.5 if name == "doublesqueeze" and not delay and draw.random() < 0.3 else 0.0,
    }


def keeps(optimizer):
    """Whether its algorithm has state that affects results, and that is lost when its parameters change."""
    return optimizer["delay"] or optimizer["momentum"] > 0


def draw_program(seed, n):
    draw = random.Random(seed)
    optimizers = [draw_optimizer(draw, n) for _ in range(draw.choice((1, 1, 2)))]
    for each in optimizers:
        if each["momentum"] or each["delay"]:       # their state does not survive other groups
            each["groups"] = None
        if each["momentum"]:
            each["base"] = "sgd"
    dtypes = draw.choice(((torch.float64,), (torch.float64,), (torch.float64, torch.float32)))
    parameters = []
    for owner, each in enumerate(optimizers):
        # Every rank uses the first parameter, which is never frozen, so all ranks count the same windows.
        parameters.append({"owner": owner, "shape": (3,), "rows": False, "tied": False, "dtype": torch.float64})
        parameters += [draw_parameter(draw, owner, each["sparse"], dtypes) for _ in range(draw.randrange(1, 5))]
    firsts = [i for i, p in enumerate(parameters) if i == 0 or p["owner"] != parameters[i - 1]["owner"]]
    for i, parameter in enumerate(parameters):
        parameter["frozen"] = (draw.random() < 0.2 and i not in firsts and not parameter["rows"]
                               and not keeps(optimizers[parameter["owner"]]))
    scaled = draw.random() < 0.15 and not any(each["local"] or each["delay"] or each["momentum"] or each["sparse"]
                                              for each in optimizers)
    # These allow one window per step only, or need the windows of all optimizers together.
    once = scaled or any(each["momentum"] or each["delay"] for each in optimizers)
    if once or any(each["gradients_untouched"] for each in optimizers):
        for each in optimizers:
            each["passes"] = 1 if any(other["delay"] for other in optimizers) else optimizers[0]["passes"]
    # A rank without a batch ends one window of each optimizer. In the first step it learns for which optimizers others
    # wait in backward(), but not for which they wait in step().
    may_idle = n > 1 and not scaled and len({each["passes"] for each in optimizers}) == 1
    learns = len({each["gradients_untouched"] for each in optimizers}) == 1
    steps = []
    for t in range(draw.randrange(3, 7)):
        kind = "window" if once else draw.choice(("window", "window", "part", "several", "no_sync"))
        step = {"kind": kind, "zero": once or draw.random() < 0.85, "none": draw.random() < 0.5,
                "clip": kind != "part" and draw.random() < 0.25, "closure": draw.random() < 0.1,
                "between": draw.random() < 0.15, "idle": None, "reload": None, "freeze": [], "unfreeze": [], "add": []}
        if may_idle and kind == "window" and not step["clip"] and draw.random() < 0.15:
            step["idle"] = draw.randrange(n)
        if t and draw.random() < 0.25:
            step["reload"] = draw.choice(("same", "new"))
            step["zero"] = step["zero"] or step["reload"] == "new"      # a new optimizer takes old sums for gradients
        fresh = t == 0 or step["reload"] == "new"
        if fresh and not learns:
            step["idle"] = None
        step["backwards"] = not (fresh and step["idle"] is not None) and draw.random() < 0.3
        for i, parameter in enumerate(parameters):
            free = i not in firsts and not parameter["rows"] and not keeps(optimizers[parameter["owner"]])
            if t and free and draw.random() < 0.15:
                step["unfreeze" if parameter["frozen"] else "freeze"].append(i)
        if t and draw.random() < 0.15:
            step["add"] = [draw.randrange(len(optimizers))]
        steps.append(step)
    # An algorithm's state is saved by names, and refused for a parameter that is frozen or has another name.
    changes = any(p["frozen"] for p in parameters) or any(s["freeze"] or s["unfreeze"] or s["add"] for s in steps)
    if changes and any(each["algorithm"] != "gradient_allreduce" or each["delay"] for each in optimizers):
        for step in steps:
            step["reload"] = step["reload"] and "same"
    return {"seed": seed, "n": n, "optimizers": optimizers, "parameters": parameters, "steps": steps, "scaled": scaled,
            "dtypes": dtypes}


# ------------------------------------------------------------------------------------------------- the training ----


def make_base(kind, parameters):
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.05),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5, nesterov=True),
        "of_momentum": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.5),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01, eps=1e-3, weight_decay=0.01),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, eps=1e-3),
        "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.05, eps=1e-3),
        "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, eps=1e-3),
    }[kind](parameters)


def make_parameter(seed, index, spec):
    generator = torch.Generator().manual_seed(1000 * seed + index)
    values = torch.randn(spec["shape"], generator=generator, dtype=torch.float64).to(spec["dtype"])
    if values.dim() == 4:
        values = values.to(memory_format=torch.channels_last)
    return nn.Parameter(values)


class Trainer:
    """The program's parameters and optimizers. `ranks`: those whose losses are computed here."""

    def __init__(self, program, ranks):
        self.program = program
        self.ranks = ranks
        self.specs = copy.deepcopy(program["parameters"])
        self.parameters = [make_parameter(program["seed"], i, spec) for i, spec in enumerate(self.specs)]
        for parameter, spec in zip(self.parameters, self.specs, strict=True):
            parameter.requires_grad_(not spec["frozen"])
        self.groups = [[[i for i, spec in enumerate(self.specs) if spec["owner"] == owner]]
                       for owner in range(len(program["optimizers"]))]
        self.optimizers = [self.make(owner) for owner in range(len(self.groups))]
        self.schedulers = [self.schedule(owner) for owner in range(len(self.groups))]

    def base(self, owner):
        spec = self.program["optimizers"][owner]
        first, *others = ([self.parameters[i] for i in group] for group in self.groups[owner])
        kind = "of_momentum" if spec["momentum"] and not isinstance(self, Distributed) else spec["base"]
        optimizer = make_base(kind, first)
        for group in others:
            optimizer.add_param_group({"params": group})
        return optimizer

    make = base

    def schedule(self, owner):
        if not self.program["optimizers"][owner]["scheduler"]:
            return None
        return torch.optim.lr_scheduler.StepLR(self.optimizers[owner], 2, 0.5)

    def used(self, t, passes, rank):
        """The parameters in a rank's loss; the first one of each optimizer always."""
        draw = random.Random(hash((self.program["seed"], t, passes, rank)))
        return [i for i, spec in enumerate(self.specs)
                if (draw.random() < 0.7) + (i == 0 or self.specs[i - 1]["owner"] != spec["owner"])
                and self.parameters[i].requires_grad]

    def loss(self, t, passes, rank):
        generator = torch.Generator().manual_seed(hash((self.program["seed"], t, passes, rank)) % 2**31)
        total = torch.zeros((), dtype=torch.float64)
        for i in self.used(t, passes, rank):
            p, spec = self.parameters[i], self.specs[i]
            if spec["rows"]:
                places = torch.randint(0, 4, (3,), generator=generator)
                values = functional.embedding(places, p, sparse=isinstance(self, Distributed))
            else:
                values = p
            d = torch.randn(values.shape, generator=generator, dtype=torch.float64)
            total = total + (values.double() * d).sum() + 0.05 * (values.double() ** 2).sum()
            if spec["tied"]:
                total = total + 0.1 * (p.double().sin() * d).sum()
        return total

    def change(self, t, step):
        for i in (*step["freeze"], *step["unfreeze"]):
            self.specs[i]["frozen"] = not self.specs[i]["frozen"]
            self.parameters[i].requires_grad_(not self.specs[i]["frozen"])
        for owner in step["add"]:
            draw = random.Random(hash((self.program["seed"], t)))
            spec = draw_parameter(draw, owner, False, self.program["dtypes"]) | {"frozen": False}
            self.specs.append(spec)
            self.parameters.append(make_parameter(self.program["seed"], len(self.parameters), spec))
            self.groups[owner].append([len(self.parameters) - 1])
            self.optimizers[owner].add_param_group({"params": [self.parameters[-1]]})

    def clip(self, owner):
        how = self.program["optimizers"][owner]
        if not how["local"] and not how["momentum"]:
            dense = [i for group in self.groups[owner] for i in group if not self.specs[i]["rows"]]
            nn.utils.clip_grad_norm_([self.parameters[i] for i in dense], 0.5)

    def stepped(self):
        for scheduler in self.schedulers:
            if scheduler is not None:
                scheduler.step()


class Alone(Trainer):
    """One process with the losses of all ranks: `p.grad` is the reduced gradient, with delay=1 of the last step."""

    def __init__(self, program, ranks):
        super().__init__(program, ranks)
        self.late = {}

    def backward(self, t, passes, idle):
        for rank in self.ranks:
            if rank != idle:
                before = [p.grad for p in self.parameters]
                for p in self.parameters:
                    p.grad = None
                self.loss(t, passes, rank).backward()
                for p, old, spec in zip(self.parameters, before, self.specs, strict=True):
                    average = self.program["optimizers"][spec["owner"]]["op"] == hvd.Average
                    if p.grad is not None and average:
                        p.grad /= len(self.ranks)
                    if old is not None:
                        p.grad = old if p.grad is None else p.grad + old

    def step(self, t, step):
        if step["zero"]:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=step["none"])
        for passes in range(passes_of(self.program, step)):
            self.backward(t, passes, step["idle"])
        for i, (p, spec) in enumerate(zip(self.parameters, self.specs, strict=True)):
            how = self.program["optimizers"][spec["owner"]]
            reduced = not how["local"] and (len(self.ranks) > 1 or how["momentum"])
            if p.grad is None and p.requires_grad and reduced:
                p.grad = torch.zeros_like(p)
            if how["delay"]:
                p.grad, self.late[i] = self.late.get(i, torch.zeros_like(p)), p.grad
        for owner, optimizer in enumerate(self.optimizers):
            if step["clip"]:
                self.clip(owner)
            optimizer.step()
        self.stepped()


class Distributed(Trainer):
    """This rank's losses, through DistributedOptimizer."""

    def __init__(self, program, rank):
        self.rank = rank
        super().__init__(program, [rank])
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2) if program["scaled"] else None

    def make(self, owner):
        spec = self.program["optimizers"][owner]
        algorithm = MAKE[spec["algorithm"]](spec["op"] == hvd.Average)
        if spec["momentum"]:
            algorithm = algorithms.DoubleSqueeze(codec=EVERYTHING, average=spec["op"] == hvd.Average,
                                                 momentum=spec["momentum"])
        named = [(f"p{i}", p) for i, p in enumerate(self.parameters)] if spec["named"] else None
        return hvd.DistributedOptimizer(
            self.base(owner), named, backward_passes_per_step=spec["passes"], op=spec["op"], algorithm=algorithm,
            gradient_predivide_factor=spec["predivide"], groups=spec["groups"], delay=spec["delay"],
            sparse_as_dense=spec["sparse_as_dense"], gradients_untouched=spec["gradients_untouched"])

    def reload(self, how):
        for owner in range(len(self.optimizers)):
            state = copy.deepcopy(self.optimizers[owner].state_dict())
            if how == "new":
                schedule = self.schedulers[owner] and self.schedulers[owner].state_dict()
                self.optimizers[owner] = self.schedulers[owner] = None
                self.optimizers[owner] = self.make(owner)
                self.schedulers[owner] = self.schedule(owner)
                if schedule:
                    self.schedulers[owner].load_state_dict(schedule)
            self.optimizers[owner].load_state_dict(state)

    def backward(self, t, passes):
        loss = self.loss(t, passes, self.rank)
        (loss if self.scaler is None else self.scaler.scale(loss)).backward()

    def step(self, t, step):
        if step["reload"]:
            self.reload(step["reload"])
        if step["zero"]:
            for optimizer in self.optimizers:
                optimizer.zero_grad(set_to_none=step["none"])
        count = passes_of(self.program, step)
        closure = step["closure"] and len(self.optimizers) == count == 1 and step["idle"] is None and not step["clip"]
        if step["idle"] != self.rank and not (closure and self.scaler is None):
            for passes in range(count):
                quiet = step["kind"] == "no_sync" and passes < count - self.most_passes()
                with nullcontext() if not quiet else self.no_sync():
                    self.backward(t, passes)
        if step["between"] and self.rank == 0:
            first = self.parameters[0]
            torch.autograd.grad((first ** 2).sum(), [first])
        for owner in reversed(range(len(self.optimizers))) if step["backwards"] else range(len(self.optimizers)):
            self.step_one(t, step, owner, self.optimizers[owner], closure)
        if self.scaler is not None:
            self.scaler.update()
        self.stepped()

    def most_passes(self):
        return max(spec["passes"] for spec in self.program["optimizers"])

    def no_sync(self):
        return self.optimizers[0].no_sync() if len(self.optimizers) == 1 else _both(self.optimizers)

    def step_one(self, t, step, owner, optimizer, closure):
        if self.scaler is not None:
            if step["clip"]:
                self.scaler.unscale_(optimizer)
                self.clip(owner)
            self.scaler.step(optimizer)
        elif closure:
            def compute():
                loss = self.loss(t, 0, self.rank)
                loss.backward()
                return loss

            optimizer.step(compute)
        elif step["clip"]:
            optimizer.synchronize()
            self.clip(owner)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()


class _both:
    """no_sync() of two optimizers."""

    def __init__(self, optimizers):
        self.contexts = [optimizer.no_sync() for optimizer in optimizers]

    def __enter__(self):
        for each in self.contexts:
            each.__enter__()

    def __exit__(self, *error):
        for each in self.contexts:
            each.__exit__(*error)


def passes_of(program, step):
    """Backward passes of a step: a window, part of one, two windows, or some within no_sync() before a window."""
    most = max(spec["passes"] for spec in program["optimizers"])
    waits = any(spec["gradients_untouched"] for spec in program["optimizers"])
    alike = len({spec["passes"] for spec in program["optimizers"]}) == 1
    if step["kind"] == "part":
        return max(1, most - 1)
    if step["kind"] == "several" and not waits and alike:
        return 2 * most
    return most + (2 if step["kind"] == "no_sync" else 0)


def run_program(seed):
    program = draw_program(seed, hvd.size())
    try:
        torch.manual_seed(seed)
        alone, mine = Alone(program, range(hvd.size())), Distributed(program, hvd.rank())
        for t, step in enumerate(program["steps"]):
            for trainer in (alone, mine):
                trainer.change(t, step)
                trainer.step(t, step)
            for i, (p, expected) in enumerate(zip(mine.parameters, alone.parameters, strict=True)):
                spec = program["optimizers"][mine.specs[i]["owner"]]
                wide = spec["algorithm"] == "gradient_allreduce" and torch.float32 not in program["dtypes"]
                near = NEAR[torch.float64 if wide else torch.float32]
                torch.testing.assert_close(p.detach(), expected.detach(), rtol=near, atol=near,
                                           msg=lambda said, t=t, i=i: f"step {t}, parameter {i}: {said}")
        weights = torch.cat([p.detach().double().flatten() for p in mine.parameters])
        everyone = hvd.allgather(weights[None], name="weights")
        assert (everyone == everyone[0]).all(), "the ranks' weights differ"
    except BaseException:
        print(f"seed {seed} of {hvd.size()} ranks, on rank {hvd.rank()}: {program}", flush=True)
        raise


def run_programs(first, last):
    hvd.init()
    torch.set_num_threads(1)
    gc.freeze()         # makes garbage collection fast
    warnings.simplefilter("ignore")
    for seed in itertools.takewhile(lambda seed: seed < last, itertools.count(first)):
        run_program(seed)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_programs(run_ranks, n):
    run_ranks(n, run_programs, arguments={"first": 0, "last": 40})


@pytest.mark.long
@pytest.mark.timeout(500)
@pytest.mark.parametrize(("n", "part"), [(1, 0), (1, 1), (2, 0), (3, 0), (2, 1), (3, 1)])
def test_many_programs(run_ranks, n, part):
    first, count = 1000 + 1000 * part, {1: 150, 2: 425, 3: 425}[n]
    run_ranks(n, run_programs, arguments={"first": first, "last": first + count}, timeout=450)
