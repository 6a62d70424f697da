"""Lightning's Trainer over bagua_hvd: the weights of DistributedDataParallel, checkpoints, every algorithm."""
import pytest
import torch

import bagua_hvd.torch as hvd
from bagua_hvd import algorithms
from bagua_hvd.torch.wrapping import kept_in, with_kept
from lightning_training import Manual, Model, Unscheduled, data, ours, pl, trainer, weights

# One algorithm of each kind.
SOME = ("gradient_allreduce", "bytegrad", "rotated", "onebit_adam", "diloco", "async")
WAYS = {
    "automatic": {}, "accumulating": {"accumulate_grad_batches": 2}, "clipping": {"gradient_clip_val": 0.1},
    "clipping values": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "accumulating and clipping": {"accumulate_grad_batches": 2, "gradient_clip_val": 0.1},
    "bfloat16": {"precision": "bf16-mixed"}, "scaler": {},
}


def options_of(way):
    options = dict(WAYS[way], max_epochs=10)
    if way == "scaler":
        options["plugins"] = [pl.plugins.MixedPrecision("bf16-mixed", "cpu")]
        options["plugins"][0].scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    return options


def everyones(model):
    flat = weights(model)
    return hvd.allgather(flat.unsqueeze(0))


def same_as_ddp():
    for way in WAYS:
        trained = {}
        for strategy in ("ddp", "bagua"):
            model, run = Model(), trainer(strategy, **options_of(way))
            run.fit(model, data())
            assert run.global_step == 8
            trained[strategy] = weights(model)
            assert (everyones(model) - trained[strategy]).abs().max() == 0, way
            assert run.callback_metrics["loss"] > 0
        assert torch.allclose(trained["ddp"], trained["bagua"], atol=2e-5), (way, trained)
        assert not torch.allclose(trained["bagua"], weights(Model()), atol=1e-2)
    trained = {}
    for strategy in ("ddp", "bagua"):
        model = Manual()
        trainer(strategy, 12, max_epochs=10).fit(model, data())     # optimizer steps of both
        trained[strategy] = weights(model)
    assert torch.allclose(trained["ddp"], trained["bagua"], atol=2e-5)


class Weighted(Unscheduled):
    """Batches of 4, 1 and 7 samples, one size per rank; `twice`: each in two passes."""

    sizes = (4, 1, 7)

    def __init__(self, twice=False):
        super().__init__()
        self.twice = twice

    def everyones(self):
        generator = torch.Generator().manual_seed(3)
        x = torch.randn(60, 12, generator=generator)
        return torch.split(x, sum(self.sizes)), torch.split(x[:, :4].argmax(1), sum(self.sizes))

    def train_dataloader(self):
        rank = hvd.rank()
        batches = [(x.split(self.sizes)[rank], y.split(self.sizes)[rank])
                   for x, y in zip(*self.everyones(), strict=True) for _ in range(1 + self.twice)]
        return torch.utils.data.DataLoader(batches, batch_size=None)

    def training_step(self, batch, index):
        self.optimizers().set_weight(len(batch[0]))
        return self.loss(batch)


def weighted():
    """Unequal batches train as one process on all the data, also with accumulation."""
    alone = Weighted()
    optimizer = alone.configure_optimizers()
    for batch in zip(*alone.everyones(), strict=True):
        optimizer.zero_grad()
        alone.loss(batch).backward()
        optimizer.step()
    for twice in (False, True):
        model = Weighted(twice)
        trainer("bagua", 5, accumulate_grad_batches=1 + twice, use_distributed_sampler=False).fit(model)
        torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=1e-6)


def test_weighted(run_ranks):
    run_ranks(3, weighted)


def train_with(names):
    for name in names:
        model = Model()
        before = model.loss(next(iter(data(64, 64)))).item()
        run = trainer(f"bagua_{name}", 16, max_epochs=10, val_check_interval=4, limit_val_batches=1)
        run.fit(model, data(), data())
        assert model.loss(next(iter(data(64, 64)))).item() < before, name
        hvd.consensus(model)
        assert (everyones(model) - weights(model)).abs().max() < 1e-6


class Warming(Model):
    """SGD with a learning rate that rises for three steps, and twice in each later step."""

    def __init__(self):
        super().__init__()
        self.used = []

    def training_step(self, batch, index):
        self.used.append(self.optimizers().param_groups[0]["lr"])
        return super().training_step(batch, index)

    def configure_optimizers(self):
        optimizer, lr = torch.optim.SGD(self.parameters(), 1.0), torch.optim.lr_scheduler
        parts = [lr.LinearLR(optimizer, 0.1, 1.0, 3), lr.ExponentialLR(optimizer, 0.5)]
        return [optimizer], [{"scheduler": lr.SequentialLR(optimizer, parts, [3]), "interval": "step"}]


class Growing(Unscheduled):
    """Gives the output layer to its optimizer in the third step."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.layers[0].parameters(), self.lr)

    def training_step(self, batch, index):
        if self.global_step == 2:
            self.optimizers().add_param_group({"params": list(self.layers[2].parameters())})
        return super().training_step(batch, index)


def after_fit(folder):
    """A group may be added, and after fit() each rank has its model, without hooks, and may train it again."""
    for name in ("bagua", "bagua_bytegrad"):
        model, run = Growing(), trainer(name)
        run.fit(model, data())
        if hvd.rank() == 0:
            model.loss(next(iter(data()))).backward()
            assert model.layers[0].weight.grad.abs().sum() > 0
        assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())
        run.save_checkpoint(f"{folder}/{name}.ckpt")
        assert (everyones(model) == weights(model)).all()
        model.zero_grad()
        before = weights(model)
        trainer(name).fit(model, data())
        assert not torch.equal(weights(model), before)
        assert (everyones(model) == weights(model)).all()


def checkpoints(folder):
    """Each rank resumes from its state; models that differ are saved as their mean."""
    # Only one more step, because later batches depend on Lightning, also with its own DDPStrategy.
    whole, resumed, forgetful = Unscheduled(), Unscheduled(), Unscheduled()
    trainer("bagua_doublesqueeze", 9, max_epochs=10).fit(whole, data())
    half = trainer("bagua_doublesqueeze", 8, max_epochs=10)
    half.fit(Unscheduled(), data())
    file = f"{folder}/half.ckpt"
    half.save_checkpoint(file)
    trainer("bagua_doublesqueeze", 9, max_epochs=10).fit(resumed, data(), ckpt_path=file, weights_only=False)
    assert torch.equal(weights(resumed), weights(whole))
    if hvd.rank() == 0:
        state = torch.load(file, weights_only=False)
        kept = state["optimizer_states"][0]
        assert len(kept_in(kept)["of_ranks"]) == 2
        state["optimizer_states"] = [with_kept(kept, {})]
        torch.save(state, file)
    hvd.barrier()
    trainer("bagua_doublesqueeze", 9, max_epochs=10).fit(forgetful, data(), ckpt_path=file, weights_only=False)
    assert not torch.equal(weights(forgetful), weights(whole))
    # A scheduler of schedulers resumes, too.
    model = Warming()
    run = trainer("bagua", 3, max_epochs=10)
    run.fit(model, data())
    run.save_checkpoint(file)
    model = Warming()
    trainer("bagua", 7, max_epochs=10).fit(model, data(), ckpt_path=file, weights_only=False)
    assert model.used == pytest.approx([1.0, 0.5, 0.25, 0.125])
    for name in ("decentralized", "async"):
        apart, run = Model(), trainer(f"bagua_{name}", 6, max_epochs=10)
        run.fit(apart, data())
        run.save_checkpoint(f"{folder}/apart.ckpt")
        saved = Model()
        saved.load_state_dict(torch.load(f"{folder}/apart.ckpt", weights_only=False)["state_dict"])
        hvd.consensus(apart)
        assert torch.allclose(weights(saved), weights(apart), atol=1e-6), name


def around():
    """Evaluation and prediction, the process group backend, errors."""
    model = Model()
    run = trainer(ours.BaguaStrategy("bytegrad", process_group_backend="bagua"), 4)
    run.fit(model, data(), data())
    trainer("bagua", 1).fit(Describing(), data())
    assert torch.distributed.get_backend() == "bagua"
    [metrics] = run.validate(model, data(), verbose=False)
    assert (hvd.allgather(torch.tensor([metrics["val"]])) == metrics["val"]).all()
    assert run.strategy.cluster_environment.main_port > 0
    assert isinstance(run.strategy.cluster_environment, ours.BaguarunEnvironment)
    with pytest.raises(ValueError, match="so its options have no effect: remove find_unused_parameters"):
        ours.BaguaStrategy(find_unused_parameters=True)
    with pytest.raises(ValueError, match="devices=3 and num_nodes=1 make 3 ranks, but baguarun has started 2"):
        trainer("bagua", devices=3).fit(Model(), data())
    with pytest.raises(ValueError, match="unknown algorithm 'bytegrat'"):
        trainer(ours.BaguaStrategy("bytegrat")).fit(Model(), data())


class Raising(Unscheduled):
    """Rank 1 raises in its third step, and then rank 0."""

    def training_step(self, batch, index):
        if index == 2:
            if hvd.rank() == 0:
                hvd.barrier()
            raise RuntimeError("boom")
        return super().training_step(batch, index)


def one_raises():
    """A rank that raises leaves fit() while another rank is still in it."""
    with pytest.raises(RuntimeError, match="boom"):
        trainer(ours.BaguaStrategy(algorithms.Async(full_steps=0))).fit(Raising(), data())
    if hvd.rank() == 1:
        hvd.barrier()


class Describing(Model):
    """Its state_dict has an entry that is not a tensor."""

    def get_extra_state(self):
        return {"extra": hvd.rank()}

    def set_extra_state(self, state):
        raise AssertionError("under DistributedDataParallel it stays each rank's own, too")


def callbacks(folder):
    """Lightning's callbacks change optimizers and weights as under DistributedDataParallel."""
    trained = {}
    for strategy in ("ddp", "bagua"):
        # The monitored value is equal on all ranks; the scheduler is that of stochastic weight averaging.
        saver = pl.callbacks.ModelCheckpoint(f"{folder}/{strategy}", monitor="val", save_top_k=1)
        monitor = pl.callbacks.LearningRateMonitor("step")
        run = trainer(strategy, -1, max_epochs=4, enable_checkpointing=True, logger=pl.loggers.CSVLogger(folder),
                      log_every_n_steps=1,
                      callbacks=[saver, monitor, pl.callbacks.StochasticWeightAveraging(0.05, swa_epoch_start=2),
                                 pl.callbacks.EarlyStopping("val", patience=10)])
        model = Model()
        run.fit(model, data(), data())
        best = torch.load(saver.best_model_path, weights_only=False)["state_dict"]
        trained[strategy] = weights(model), torch.cat([tensor.reshape(-1) for tensor in best.values()])
        assert list(monitor.lrs) == ["lr-Adam"]
        predicted = run.predict(Model(), data())
        assert len(predicted) == 4
    for theirs, ours_ in zip(*trained.values(), strict=True):
        assert torch.allclose(theirs, ours_, atol=2e-5)


@pytest.mark.parametrize("function", [same_as_ddp, around, one_raises])
def test_two_ranks(run_ranks, function):
    run_ranks(2, function)


@pytest.mark.parametrize("names", [SOME, pytest.param(algorithms.menu(), marks=pytest.mark.long)], ids=["some", "all"])
def test_algorithms(run_ranks, names):
    run_ranks(2, train_with, arguments={"names": list(names)})


def test_callbacks(run_ranks, tmp_path):
    run_ranks(2, callbacks, arguments={"folder": str(tmp_path)})


def test_after_fit(run_ranks, tmp_path):
    run_ranks(2, after_fit, arguments={"folder": str(tmp_path)})


def test_checkpoints(run_ranks, tmp_path):
    run_ranks(2, checkpoints, arguments={"folder": str(tmp_path)})
