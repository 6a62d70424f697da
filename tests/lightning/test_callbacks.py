"""Lightning features compared with DistributedDataParallel: callbacks that change optimizers, parameters or schedules,
several networks, other closures, other precisions, metrics over all ranks.

Follows Lightning's own tests on two processes: averages of weights, pruning, logs of all ranks."""
import pytest
import torch
import torchmetrics
from torch import nn

import bagua_hvd.torch as hvd
from lightning_training import Manual, Model, Unscheduled, data, pl, trainer, weights


class Backbone(Unscheduled):
    """A model for BackboneFinetuning, which unfreezes one of its two parts during training."""

    def __init__(self):
        super().__init__()
        self.backbone, self.head = nn.Sequential(self.layers[0], nn.Tanh()), self.layers[2]
        self.layers = nn.Sequential(self.backbone, self.head)

    def configure_optimizers(self):
        return torch.optim.SGD((p for p in self.parameters() if p.requires_grad), 0.3)


class Adversaries(Model):
    """Two adversarial networks: each backward pass has gradients of one of them."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.judge = nn.Linear(4, 1)

    def training_step(self, batch, index):
        made, judge = self.optimizers()
        for optimizer, wanted in ((made, 1.0), (judge, -1.0)):
            self.toggle_optimizer(optimizer)
            optimizer.zero_grad()
            self.manual_backward(-wanted * nn.functional.softplus(self.judge(self.layers(batch[0]))).mean())
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self):
        return torch.optim.Adam(self.layers.parameters(), 0.02), torch.optim.SGD(self.judge.parameters(), 0.1)


class SecondOrder(Model):
    """LBFGS evaluates its closure several times in a step."""

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), 0.1, max_iter=4)


class Plateau(Model):
    """A scheduler that steps by a validation metric."""

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=10.0)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val"}}


class Sometimes(Unscheduled):
    """A branch that no rank uses, and one that rank 1 uses in some steps. DDP: find_unused_parameters."""

    def __init__(self):
        super().__init__()
        self.never, self.seldom = nn.Linear(12, 4), nn.Linear(12, 4)

    def loss(self, batch):
        logits = self.layers(batch[0])
        if self.trainer.global_rank == 0 or self.trainer.global_step % 2:
            logits = logits + self.seldom(batch[0])
        return nn.functional.cross_entropy(logits, batch[1])


class Everyones(Unscheduled):
    """A loss over the outputs of all ranks, with gradients through the gathering; batches of two loaders."""

    def training_step(self, batch, index):
        logits = self.all_gather(self.layers(batch["a"][0]), sync_grads=True)
        return logits.square().mean() + self.loss(batch["b"])

    def train_dataloader(self):
        return pl.utilities.CombinedLoader({"a": data(96), "b": data(128)}, "min_size")


class Measured(Unscheduled):
    """A metric of torchmetrics, which synchronizes itself when computed."""

    def __init__(self):
        super().__init__()
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(4, average="micro")

    def validation_step(self, batch, index):
        self.accuracy(self.layers(batch[0]), batch[1])
        self.log("accuracy", self.accuracy)
        self.log("ranks", float(self.global_rank), sync_dist=True, reduce_fx="sum")      # in each of 4 batches



def pruning():
    return pl.callbacks.ModelPruning("l1_unstructured", amount=0.3, parameter_names=["weight"])


def thawing():
    return pl.callbacks.BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.1, verbose=False)


# name: model, callbacks, options
CASES = {
    "accumulation that changes": (Model, lambda: [pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2, 2: 4})], {}),
    "average of weights": (Model, lambda: [pl.callbacks.EMAWeightAveraging(decay=0.8)], {}),
    "stochastic averaging, accumulating": (Model, lambda: [pl.callbacks.StochasticWeightAveraging(0.05, 2)],
                                           {"accumulate_grad_batches": 2}),
    "pruning": (Unscheduled, lambda: [pruning()], {}),
    # DistributedDataParallel does not reduce parameters that were frozen at first, so its ranks diverge.
    "thawing": (Backbone, lambda: [thawing()], {"beside": "one process", "max_epochs": 12}),
    "two optimizers": (Manual, lambda: [], {}),
    "adversaries": (Adversaries, lambda: [], {"find_unused": True}),
    "second order": (SecondOrder, lambda: [], {"max_epochs": 1}),
    "plateau": (Plateau, lambda: [], {}),
    "gathering, two loaders": (Everyones, lambda: [], {}),
    "branches": (Sometimes, lambda: [], {"find_unused": True}),
    "double precision": (Model, lambda: [], {"precision": "64-true"}),
    "bfloat16 throughout": (Unscheduled, lambda: [], {"precision": "bf16-true", "atol": 0.02}),
    "rate found": (Unscheduled, lambda: [pl.callbacks.LearningRateFinder(num_training_steps=24)], {"max_epochs": 8}),
}


def trained(name, strategy, folder):
    model, callbacks, options = CASES[name]
    options = {"max_epochs": 4, **options}
    options.pop("atol", None)
    batch = 64 if options.pop("beside", None) else 16
    if strategy == "one process":       # with the samples of all ranks in each step
        strategy, options["devices"], batch = pl.strategies.SingleDeviceStrategy("cpu"), 1, 128
    if options.pop("find_unused", False) and strategy == "ddp":
        from lightning_training import ours

        strategy = pl.strategies.DDPStrategy(find_unused_parameters=True,
                                             cluster_environment=ours.BaguarunEnvironment())
    model, callbacks = model(), callbacks()
    run = trainer(strategy, -1, callbacks=callbacks, enable_checkpointing=True, default_root_dir=folder, **options)
    run.fit(model, None if name.startswith("gathering") else data(size=batch), data(size=batch))
    return weights(model).double()


def beside_ddp(folder):
    wrong = {}
    for name in CASES:
        beside = CASES[name][2].get("beside", "ddp")
        # Both ranks train alone and write checkpoints, to separate files.
        own = f"/{hvd.rank()}" if beside == "one process" else ""
        theirs = trained(name, beside, f"{folder}/{name}/{beside}{own}")
        mine = trained(name, "bagua", f"{folder}/{name}/bagua")
        difference = (theirs - mine).abs().max().item()
        everyones = hvd.allgather(mine.unsqueeze(0))
        if difference > CASES[name][2].get("atol", 2e-5) or not torch.equal(everyones[0], everyones[1]):
            wrong[name] = difference
    assert not wrong, wrong


def metrics(folder):
    for strategy in ("ddp", "bagua", "bagua_bytegrad"):
        model = Measured()
        run = trainer(strategy, 8, max_epochs=10)
        run.fit(model, data())
        [figures] = run.validate(model, data(), verbose=False)
        x, y = data(128, 128).dataset.tensors
        with torch.no_grad():
            expected = (model.layers(x).argmax(1) == y).float().mean().item()
        assert figures["accuracy"] == pytest.approx(expected) and figures["ranks"] == 4, (strategy, figures)


@pytest.mark.parametrize("function", [pytest.param(beside_ddp, marks=pytest.mark.long), metrics])
def test_two_ranks(run_ranks, tmp_path, function):
    run_ranks(2, function, arguments={"folder": str(tmp_path)})
