"""DistributedOptimizer on real ranks, against plain torch on all ranks' data."""
import copy
import gc
import io
import warnings
from functools import partial

import pytest
import torch
from torch import nn

import bagua_hvd.torch as hvd
from bagua_hvd import codecs
from bagua_hvd.algorithms import Algorithm, ByteGrad
from bagua_hvd.primitives import c_fp_s
from bagua_hvd.torch.wrapping import kept_in
from diloco import whole_diloco


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batch_of(rank, step=0):
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(5, 6, generator=generator)


def loss_of(model, batch):
    return model(batch).pow(2).mean()


def local_gradients(model, batches):
    """The sum over some batches of the gradients, by plain torch."""
    model = copy.deepcopy(model)
    for parameter in model.parameters():        # deepcopy copies hooks
        parameter._post_accumulate_grad_hooks = None
    model.zero_grad()
    for batch in batches:
        loss_of(model, batch).backward()
    return [parameter.grad for parameter in model.parameters()]


def mean(lists):
    return [torch.stack(entries).mean(0) for entries in zip(*lists, strict=True)]


def gradients(model):
    return [parameter.grad for parameter in model.parameters()]


def assert_close(actual, expected, **tolerance):
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, e, **tolerance)


def assert_same_everywhere(model):
    flat = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
    everyone = hvd.allgather(flat.view(1, -1))
    assert (everyone == everyone[0]).all()


def wrap(model, lr=0.1, **options):
    options.setdefault("named_parameters", model.named_parameters())
    return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9), **options)


# ---------------------------------------------------------------------------------------------------- the mean ----


def training_equals_one_process():
    hvd.init()
    n = hvd.size()
    for options in ({}, {"groups": 2}, {"gradient_predivide_factor": 2.0}, {"op": hvd.Sum}, {"named_parameters": None}):
        model, reference = make_model(), make_model()
        opt = wrap(model, **options)
        plain = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9)
        for step in range(3):
            opt.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            opt.step()
            expected = mean([local_gradients(reference, [batch_of(r, step)]) for r in range(n)])
            for parameter, gradient in zip(reference.parameters(), expected, strict=True):
                parameter.grad = gradient * n if options.get("op") == hvd.Sum else gradient
            plain.step()
        assert_close(model.parameters(), reference.parameters(), rtol=1e-4, atol=1e-5)
        assert_same_everywhere(model)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_training_equals_one_process(run_ranks, n):
    run_ranks(n, training_equals_one_process)


def relaxed():
    hvd.init()
    model = make_model()
    for algorithm in ("bytegrad", ByteGrad(error_feedback=True)):
        opt = wrap(model, algorithm=algorithm)
        for step in range(3):
            opt.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            opt.synchronize()
            expected = mean([local_gradients(model, [batch_of(r, step)]) for r in range(hvd.size())])
            largest = max(gradient.abs().max() for gradient in expected)
            assert_close(gradients(model), expected, rtol=0, atol=largest.item() / 20)
            with opt.skip_synchronize():
                opt.step()
        assert_same_everywhere(model)
    # The algorithm's state is one key of the first group, saved with a checkpoint; gradient_allreduce adds none.
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert state.keys() == {"state", "param_groups"}
    other = wrap(model, algorithm=ByteGrad(error_feedback=True))
    other.load_state_dict(state)
    assert kept_in(other.state_dict()) == kept_in(state)
    assert "bagua_hvd" not in other.param_groups[0]
    exact, plain = (opt.state_dict()["param_groups"][0] for opt in (wrap(model), torch.optim.SGD(model.parameters())))
    assert exact.keys() == plain.keys()


def test_relaxed_algorithms_and_their_state(run_ranks):
    run_ranks(2, relaxed)


class Doubled(Algorithm):
    def communicate(self, bucket, group):
        return c_fp_s(bucket, group, postscale_factor=2.0)


def own_algorithm():
    hvd.init()
    model = make_model()
    opt = wrap(model, algorithm=Doubled)
    loss_of(model, batch_of(hvd.rank())).backward()
    expected = mean([local_gradients(model, [batch_of(r)]) for r in range(hvd.size())])
    opt.synchronize()
    assert_close(gradients(model), [2 * gradient for gradient in expected])
    assert isinstance(opt.algorithm, Doubled)


def test_own_algorithm_and_the_environment(run_ranks):
    run_ranks(2, own_algorithm, env={"BAGUA_ALGORITHM": "bytegrad"})


# ----------------------------------------------------------------------------------------- windows of gradients ----


def accumulation():
    hvd.init()
    model = make_model()
    opt = wrap(model, backward_passes_per_step=2)
    mine = [batch_of(hvd.rank(), step) for step in range(3)]

    def expected(steps):
        return mean([local_gradients(model, [batch_of(r, s) for s in steps]) for r in range(hvd.size())])

    for batch in mine[:2]:
        loss_of(model, batch).backward()
    opt.synchronize()
    assert_close(gradients(model), expected([0, 1]))          # a sum over the passes, a mean over the ranks
    opt.zero_grad()
    loss_of(model, mine[2]).backward()                         # an incomplete window
    opt.synchronize()
    assert_close(gradients(model), expected([2]))
    opt.zero_grad()
    for batch in mine[:2]:
        loss_of(model, batch).backward()
    assert_close(gradients(model), expected([0, 1]))          # after the last pass of a window
    loss_of(model, mine[2]).backward()                         # another pass begins a new window
    opt.synchronize()
    assert_close(gradients(model), expected([0, 1, 2]))
    opt.zero_grad()
    opt.set_backward_passes_per_step(3)
    for batch in mine:
        loss_of(model, batch).backward()
    opt.synchronize()
    assert_close(gradients(model), expected([0, 1, 2]))
    with pytest.raises(ValueError, match="backward_passes_per_step"):
        opt.set_backward_passes_per_step(0)


def test_accumulation(run_ranks):
    run_ranks(2, accumulation)


def unused_parameters():
    hvd.init()
    torch.manual_seed(0)
    branches = nn.ModuleList([nn.Linear(3, 2) for _ in range(hvd.size() + 1)])
    opt = wrap(branches)
    for _ in range(2):
        opt.zero_grad()
        branches[hvd.rank()](torch.ones(1, 3)).sum().backward()
        opt.synchronize()
        for branch in branches[:-1]:
            assert_close(gradients(branch), [torch.ones(2, 3) / hvd.size(), torch.ones(2) / hvd.size()])
        assert_close(gradients(branches[-1]), [torch.zeros(2, 3), torch.zeros(2)])
        with opt.skip_synchronize():
            opt.step()
    opt.step()                                                  # without a backward pass
    assert_same_everywhere(branches)
    # Parameters added later.
    late = nn.Linear(3, 2)
    hvd.broadcast_parameters(late.state_dict(), 0)
    opt.add_param_group({"params": late.parameters()})
    opt.zero_grad()
    (late(torch.ones(1, 3)).sum() * hvd.rank()).backward()
    opt.step()
    assert_same_everywhere(nn.ModuleList([branches, late]))
    assert late.bias.grad[0].item() == (hvd.size() - 1) / 2
    # Added after a backward pass whose gradients are dropped.
    opt = hvd.DistributedOptimizer(torch.optim.SGD(branches[0].parameters(), lr=0.1), gradients_untouched=True)
    for _ in range(2):
        branches[0](torch.ones(1, 3)).sum().backward()
        opt.step()
        opt.zero_grad()
    branches[0](torch.ones(1, 3)).sum().backward()
    opt.add_param_group({"params": late.parameters()})
    opt.zero_grad()
    (branches[0](torch.ones(1, 3)).sum() + late(torch.ones(1, 3)).sum()).backward()
    opt.step()
    assert late.bias.grad[0].item() == branches[0].bias.grad[0].item() == 1


def test_unused_and_late_parameters(run_ranks):
    run_ranks(3, unused_parameters)


def layouts():
    hvd.init()
    torch.manual_seed(0)
    model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    opt = wrap(model)
    model(torch.full((1, 3, 3, 3), float(hvd.rank()))).sum().backward()
    assert not model.weight.grad.is_contiguous()
    opt.synchronize()
    torch.testing.assert_close(model.weight.grad, torch.full_like(model.weight, (hvd.size() - 1) / 2))
    # Two dtypes in one optimizer, and compression.
    for compression in (hvd.Compression.none, hvd.Compression.fp16):
        model = make_model()
        model[2].double()
        opt = wrap(model, compression=compression)
        for parameter in model.parameters():
            parameter.grad = torch.full_like(parameter, hvd.rank() + 1.0)
        opt.synchronize()
        for parameter in model.parameters():
            torch.testing.assert_close(parameter.grad, torch.full_like(parameter, (hvd.size() + 1) / 2))


def test_layouts_dtypes_and_compression(run_ranks):
    run_ranks(2, layouts)


def sparse():
    hvd.init()
    rank = hvd.rank()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for sparse_as_dense, algorithm in ((False, None), (True, None), (False, "bytegrad")):
            torch.manual_seed(0)
            model = nn.ModuleDict({"embedding": nn.Embedding(7, 2, sparse=True), "linear": nn.Linear(2, 1)})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            opt = hvd.DistributedOptimizer(optimizer, sparse_as_dense=sparse_as_dense, algorithm=algorithm)
            for used in ([rank, 5], [5], [] if rank else [1]):
                opt.zero_grad()
                if used:
                    model["linear"](model["embedding"](torch.tensor(used))).sum().backward()
                opt.step()
                assert model["embedding"].weight.grad.is_sparse
            assert_same_everywhere(model)
            if algorithm is None:       # frozen with momentum: no gradient, no step
                weight = model["embedding"].weight
                opt.param_groups[0]["momentum"] = 0.9
                for frozen in (False, True):
                    weight.requires_grad_(not frozen)
                    before = weight.detach().clone()
                    opt.zero_grad()
                    model["linear"](model["embedding"](torch.tensor([rank]))).sum().backward()
                    opt.step()
                    assert torch.equal(weight, before) == frozen, sparse_as_dense
    said = [str(w.message) for w in caught if "sparse gradients" in str(w.message)]
    assert len(said) == (rank == 0), said


def test_sparse_gradients(run_ranks):
    run_ranks(2, sparse)


def parameters_come_and_go():
    """Parameters that come by another way than add_param_group() are an error; those that go are not."""
    hvd.init()

    def opt_of(model):
        return hvd.DistributedOptimizer(torch.optim.SGD([{"params": model[0].parameters()},
                                                         {"params": model[2].parameters()}], lr=0.1))

    def replace(opt):
        opt.param_groups[0]["params"][0] = nn.Parameter(torch.zeros(2))

    def append(opt):
        opt.param_groups[1]["params"].append(nn.Parameter(torch.zeros(2)))

    def add(opt):
        opt._given.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})

    def remove(opt):
        del opt.param_groups[1]

    def exchange(opt):
        del opt.param_groups[1]
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2))]})

    def regroup(opt):
        for parameter in opt.param_groups.pop()["params"]:
            opt.add_param_group({"params": [parameter], "lr": 0.2})

    for change in (replace, append, add, remove, exchange, regroup):
        model = make_model()
        opt = opt_of(model)
        for step in range(3):
            opt.zero_grad()
            loss_of(model, batch_of(hvd.rank(), step)).backward()
            if step == 1:
                change(opt)
                if change in (replace, append, add):
                    with pytest.raises(RuntimeError, match="was added to the param_groups of a DistributedOptimizer"):
                        opt.step()
                    break
            opt.step()
        assert_same_everywhere(model)


@pytest.mark.parametrize("n", [1, 2])
def test_parameters_come_and_go(run_ranks, n):
    run_ranks(n, parameters_come_and_go)


# ------------------------------------------------------------------------------------- the protocol of one step ----


def protocol():
    hvd.init()
    model = make_model()
    opt = wrap(model)
    loss_of(model, batch_of(hvd.rank())).backward()
    opt.synchronize()
    reduced = [gradient.clone() for gradient in gradients(model)]
    opt.synchronize()
    assert_close(gradients(model), reduced)
    with pytest.warns(UserWarning, match=r"optimizer.skip_synchronize\(\)"):
        opt.step()
    opt.zero_grad(set_to_none=False)
    # Clipping, and step hooks, which run once and see reduced gradients.
    seen = []
    opt.register_step_pre_hook(lambda *_: seen.append([gradient.clone() for gradient in gradients(model)]))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss_of(model, batch_of(hvd.rank(), 1)).backward()
        opt.synchronize()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        with opt.skip_synchronize():
            opt.step()
        assert_close(seen.pop(), gradients(model))
        assert not seen
        opt.zero_grad()
        # An LR scheduler patches step().
        scheduler = torch.optim.lr_scheduler.StepLR(opt, 1, 0.5)
        loss_of(model, batch_of(hvd.rank(), 2)).backward()
        expected = mean([local_gradients(model, [batch_of(r, 2)]) for r in range(hvd.size())])
        opt.step()
        scheduler.step()
        assert_close(seen.pop(), expected)
        assert opt.param_groups[0]["lr"] == 0.05

        # A closure.
        def closure(opt=opt):
            opt.zero_grad()
            loss = loss_of(model, batch_of(hvd.rank(), 3))
            loss.backward()
            return loss

        assert opt.step(closure).requires_grad
    assert_same_everywhere(model)
    # load_state_dict() drops pending work.
    loss_of(model, batch_of(hvd.rank(), 4)).backward()
    opt.synchronize()
    state = opt.state_dict()
    opt.zero_grad()
    opt.load_state_dict(state)
    hvd.broadcast_optimizer_state(opt, 0)
    # A deleted optimizer removes its hooks.
    del opt, scheduler, closure
    gc.collect()
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_protocol_of_a_step(run_ranks):
    run_ranks(2, protocol)


def grad_scaler():
    hvd.init()
    for explicit in (False, True):
        model = make_model()
        opt = wrap(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            overflow = step == 1 and hvd.rank() == 0            # all ranks must skip the step
            opt.zero_grad()
            before = [parameter.detach().clone() for parameter in model.parameters()]
            scaler.scale(loss_of(model, batch_of(hvd.rank(), step)) * (float("inf") if overflow else 1)).backward()
            if explicit:
                opt.synchronize()
                scaler.unscale_(opt)
                with opt.skip_synchronize():
                    scaler.step(opt)
            else:
                scaler.unscale_(opt)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                scaler.step(opt)
            scaler.update()
            if step == 1:
                assert_close(model.parameters(), before, rtol=0, atol=0)
            else:
                plain = make_model()
                plain.load_state_dict({k: b for k, b in zip(plain.state_dict(), before, strict=True)})
                expected = mean([local_gradients(plain, [batch_of(r, step)]) for r in range(hvd.size())])
                assert_close(gradients(model), expected)
        assert scaler.get_scale() == 512.0
        assert_same_everywhere(model)


def test_grad_scaler(run_ranks):
    run_ranks(2, grad_scaler)


def compiled():
    hvd.init()
    model = make_model()
    fast = torch.compile(model, backend="aot_eager")
    opt = wrap(model, named_parameters=fast.named_parameters(), gradients_untouched=True)
    for step in range(3):
        opt.zero_grad()
        loss_of(fast, batch_of(hvd.rank(), step)).backward()
        # Hooks have posted all gradients, except in the first step, in which ranks agree on sparse ones.
        assert opt.reducer.pending
        assert len(opt.reducer._window.operations) == (len(opt.reducer.buckets) if step else 0)
        expected = mean([local_gradients(model, [batch_of(r, step)]) for r in range(hvd.size())])
        opt.step()
        assert_close(gradients(model), expected)
    assert_same_everywhere(model)


def test_compiled_model(run_ranks):
    run_ranks(2, compiled)


def failure():
    hvd.init()
    model = make_model()
    opt = wrap(model)
    odd = nn.Linear(3, 4 + hvd.rank())                          # another shape on each rank
    other = wrap(odd)
    loss_of(model, batch_of(hvd.rank())).backward()
    with pytest.raises(hvd.HorovodInternalError, match=(
            r"gradient 0: on rank 0 it is that of 'weight' \(float32\[4, 3\]\), on rank 1 that of 'weight' \(")):
        odd(torch.ones(1, 3)).sum().backward()
    other.zero_grad()
    opt.step()
    opt.zero_grad()
    loss_of(model, batch_of(hvd.rank(), 1)).backward()
    opt.step()
    assert_same_everywhere(model)


def test_disagreement_fails_everywhere_and_the_job_goes_on(run_ranks):
    run_ranks(2, failure)


def subset():
    members = hvd.ProcessSet([0, 2])
    hvd.init(process_sets=[members])
    rank = hvd.rank()
    model = make_model()
    opt = wrap(model, process_set=members)
    loss_of(model, batch_of(rank)).backward()
    mine = local_gradients(model, [batch_of(rank)])
    opt.synchronize()
    expected = mean([local_gradients(model, [batch_of(r)]) for r in (0, 2)]) if rank != 1 else mine
    assert_close(gradients(model), expected)
    with opt.skip_synchronize():
        opt.step()


def test_process_set(run_ranks):
    run_ranks(3, subset)


# ------------------------------------------------------------------------------------------------- construction ----


def construction():
    with pytest.raises(ValueError, match="has not been initialized"):
        wrap(make_model())
    hvd.init()
    model = make_model()
    base = torch.optim.Adagrad(model.parameters(), lr=0.3, weight_decay=0.01)   # has state from the beginning
    opt = hvd.DistributedOptimizer(base, backward_passes_per_step=2)
    assert type(opt).__name__ == "Adagrad" and isinstance(opt, torch.optim.Adagrad)
    assert "horovod" in str(type(opt))                          # libraries recognize Horovod's optimizers by it
    assert opt.defaults == base.defaults and opt.param_groups[0]["lr"] == 0.3
    assert (opt.backward_passes_per_step, opt.op, opt.gradient_predivide_factor) == (2, hvd.Average, 1.0)
    loss_of(model, batch_of(0)).backward()
    opt.step()

    named = list(model.named_parameters())
    first = named[0][1]
    for message, options in {
        "sequence of tuples": {"named_parameters": model.parameters()},
        "more than once: \\['0.bias'\\]": {"named_parameters": named + [named[1]]},
        "not named: group 0, number 3": {"named_parameters": named[:3]},
        "backward_passes_per_step must be > 0": {"backward_passes_per_step": 0},
        "> 0 and an int, not 1.5": {"backward_passes_per_step": 1.5},
        "> 0 and an int, not True": {"backward_passes_per_step": True},
        "gradient_predivide_factor not": {"gradient_predivide_factor": 2.0, "op": hvd.Sum},
        "factor=0: expected a finite number": {"gradient_predivide_factor": 0},
        "factor=nan: expected a finite number": {"gradient_predivide_factor": float("nan")},
        "factor='2': expected a finite number": {"gradient_predivide_factor": "2"},
        "call it, as in model.named_parameters..": {"named_parameters": model.named_parameters},
        "only appear once": {"groups": [[first], [first]]},
        "non-negative integer or a list": {"groups": -1},
        "list of lists": {"groups": [first]},
        "unknown algorithm 'bytegard'. Did you mean 'bytegrad'": {"algorithm": "bytegard"},
        "op=Sum.*average=True": {"algorithm": ByteGrad(), "op": hvd.Sum},
        "hvd.Average, hvd.Sum or hvd.Adasum": {"op": hvd.Max},
        "QAdam cannot serve this optimizer: it needs torch.optim.Adam or AdamW, not SGD": {"algorithm": "qadam"},
        "not registered": {"process_set": hvd.ProcessSet([0])},
    }.items():
        with pytest.raises(ValueError, match=message):
            wrap(model, **options)
    with pytest.raises(ValueError, match="already"):
        hvd.DistributedOptimizer(opt)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        wrap(model, num_groups=2)
    wrap(model, named_parameters=named + [("elsewhere", nn.Parameter(torch.zeros(1)))], groups=[[first]])
    if hvd.size() > 1:
        with pytest.raises(ValueError, match="Adasum is an algorithm of its own"):
            wrap(model, op=hvd.Adasum, algorithm="bytegrad")
    # A single process has no hooks and nothing to communicate.
    if hvd.size() == 1:
        assert opt.reducer is None
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


@pytest.mark.parametrize("n", [1, 2])
def test_construction(run_ranks, n):
    run_ranks(n, construction)


def test_elastic_job_of_one_rank_has_hooks(run_ranks):
    run_ranks(1, accumulation, env={"HOROVOD_ELASTIC": "1"})


def trained(algorithm, make, steps=10):
    torch.manual_seed(0)
    model = nn.Linear(6, 6)
    opt = hvd.DistributedOptimizer(make(model.parameters()), model.named_parameters(), algorithm=algorithm)
    x, y = torch.randn(2, 16, 6)
    for _ in range(steps):
        opt.zero_grad()
        (model(x) - y).square().mean().backward()
        opt.step()
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def what_trains_one_rank_too(path):
    """With equal batches one rank and two give the same weights, also for algorithms with momenta."""
    hvd.init()
    adam, sgd = partial(torch.optim.AdamW, lr=0.05), partial(torch.optim.SGD, lr=0.05)
    weights = {"qadam": trained(hvd.algorithms.QAdam(warmup_steps=2, codec=codecs.float16), adam)}
    weights["squeezed"] = trained(hvd.algorithms.DoubleSqueeze(codecs.float16, momentum=0.9, full_steps=0), sgd)
    weights["diloco"] = trained(whole_diloco(2, full_steps=0), sgd)
    plain = {"adam": trained("gradient_allreduce", adam), "sgd": trained("gradient_allreduce", sgd)}
    for name, values in weights.items():
        assert not torch.allclose(values, plain["adam" if name == "qadam" else "sgd"], atol=1e-3), name
    if hvd.size() == 1:
        torch.save(weights, path)
    else:
        for name, values in torch.load(path).items():
            torch.testing.assert_close(weights[name], values, rtol=1e-2, atol=1e-3, msg=name)


def test_what_trains_one_rank_too(run_ranks, tmp_path):
    for n in (1, 2):
        run_ranks(n, what_trains_one_rank_too, arguments={"path": str(tmp_path / "weights")})


class _StepsTwice(torch.optim.Adam):
    def step(self, closure=None):
        super().step()
        super().step()


def hooks_around_a_replaced_step():
    """Step hooks run once per step, on reduced gradients, also if an algorithm makes it. A custom step() is called."""
    hvd.init()
    for algorithm in (hvd.algorithms.QAdam(warmup_steps=2), "gradient_allreduce"):
        p, calls = nn.Parameter(torch.ones(4)), []
        opt = hvd.DistributedOptimizer(torch.optim.Adam([p]), algorithm=algorithm)
        opt.register_step_pre_hook(lambda opt, args, kwargs, calls=calls, p=p: calls.append(p.detach().clone()))
        opt.register_step_post_hook(lambda opt, args, kwargs, calls=calls, p=p: calls.append(p.detach().clone()))
        for _ in range(4):
            opt.zero_grad()
            (p * (hvd.rank() + 1)).sum().backward()
            opt.step()
        assert len(calls) == 8, algorithm
        assert all(torch.equal(calls[i], calls[i + 1]) == bool(i % 2) for i in range(7)), algorithm
    with pytest.raises(ValueError, match=r"makes the optimizer's step itself and would bypass _StepsTwice.step"):
        hvd.DistributedOptimizer(_StepsTwice([p]), algorithm="qadam")
    opt = hvd.DistributedOptimizer(_StepsTwice([p], lr=0.1))
    before = p.detach().clone()
    p.sum().backward()
    opt.step()
    torch.testing.assert_close(before - p.detach(), torch.full((4,), 0.2))


@pytest.mark.parametrize("n", [1, 2])
def test_hooks_around_a_replaced_step(run_ranks, n):
    run_ranks(n, hooks_around_a_replaced_step)


def other_order():
    """Ranks that list weights of equal shape in different orders get an error that names them; equal orders work."""
    hvd.init()
    first, second = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    named = [("first", first), ("second", second)]
    for _ in range(2):
        opt = hvd.DistributedOptimizer(torch.optim.SGD([first, second], 1.0), named[::-1] if hvd.rank() == 1 else named)
        with pytest.raises(hvd.HorovodInternalError, match=(
                r"Ranks disagree on gradient 0: on rank 0 it is that of 'first' \(float32\[4\]\), on rank 1 that of "
                r"'second' \(float32\[4\]\). List the same variables in the same order on all ranks")):
            (first.sum() + 100 * second.sum()).backward()
        del opt
    opt = hvd.DistributedOptimizer(torch.optim.SGD([first, second], 1.0), named)
    opt.zero_grad()
    (first.sum() + 100 * second.sum()).backward()
    opt.step()
    assert torch.equal(torch.stack((first, second)).detach(), torch.tensor([[-1.0], [-100.0]]).expand(2, 4))


@pytest.mark.parametrize("n", [2, 3])
def test_other_order(run_ranks, n):
    run_ranks(n, other_order)


class _ScalesWhileDecompressing(hvd.Compression.none):
    """Does its work in decompress."""

    @staticmethod
    def decompress(tensor, context):
        return tensor * 2


def decompress_is_always_called():
    hvd.init()
    parameter = nn.Parameter(torch.zeros(3))
    opt = hvd.DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), compression=_ScalesWhileDecompressing)
    (parameter.sum() * (hvd.rank() + 1)).backward()
    opt.synchronize()
    assert torch.equal(parameter.grad, torch.full((3,), 3.0))       # twice the average of 1 and 2


def test_decompress_is_always_called(run_ranks):
    run_ranks(2, decompress_is_always_called)


def gradients_are():
    hvd.init()
    model = make_model()
    after = {}
    for name, options in {
            "exact": {}, "sum": {"op": hvd.Sum}, "late": {"delay": 1}, "untouched": {"gradients_untouched": True},
            "coded": {"algorithm": "bytegrad"}, "weights": {"algorithm": "local_sgd"}}.items():
        opt = wrap(model, **options)
        opt.zero_grad()
        loss_of(model, batch_of(hvd.rank())).backward()
        after[name] = opt.gradients_are
        if after[name] in ("averages", "sums"):
            assert (hvd.allgather(flat := torch.cat([g.flatten() for g in gradients(model)])[None]) == flat).all(), name
        if after[name] == "pending":
            opt.synchronize()
            assert opt.gradients_are == "averages"
            with opt.skip_synchronize():
                opt.step()
        else:
            opt.step()
    alone = "local" if hvd.size() == 1 else None
    assert after == {
        "exact": alone or "averages", "sum": alone or "sums", "late": alone or "averages of the last step",
        "untouched": alone or "pending", "coded": alone or "averages", "weights": "local"}, after


@pytest.mark.parametrize("ranks", [1, 2])
def test_gradients_are(run_ranks, ranks):
    """The documented content of p.grad after backward() is true: averages are equal on all ranks."""
    run_ranks(ranks, gradients_are)
