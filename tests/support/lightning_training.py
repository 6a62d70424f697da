"""Small models for Lightning's Trainer, and a Trainer without output."""
import logging
import os
import warnings

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import bagua_hvd.lightning as ours
from bagua_hvd import algorithms

logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
warnings.filterwarnings("ignore")
os.environ["GLOO_SOCKET_IFNAME"] = "lo"


def data(count=128, size=16):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(count, 12, generator=generator)
    return DataLoader(TensorDataset(x, x[:, :4].argmax(1)), size)


class Model(pl.LightningModule):
    """Automatic optimization with Adam; `lr` and a scheduler."""

    def __init__(self, lr=0.02):
        super().__init__()
        torch.manual_seed(1)
        self.layers = nn.Sequential(nn.Linear(12, 32), nn.Tanh(), nn.Linear(32, 4))
        self.lr = lr

    def loss(self, batch):
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])

    def training_step(self, batch, index):
        loss = self.loss(batch)
        self.log("loss", loss, sync_dist=True, on_epoch=True)
        return loss

    def validation_step(self, batch, index):
        self.log("val", self.loss(batch), sync_dist=True)

    def predict_step(self, batch, index):
        return self.layers(batch[0])

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), self.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    def train_dataloader(self):
        return data()


class Unscheduled(Model):
    """No scheduler: when Lightning resumes at the end of an epoch, it steps the scheduler once too often."""

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), self.lr)


class Manual(Model):
    """Two optimizers with manual steps; the second one steps in every other batch, with clipping."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        first, second = self.optimizers()
        for optimizer in (first, second):
            optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        first.step()
        if index % 2:
            self.clip_gradients(second, gradient_clip_val=0.05, gradient_clip_algorithm="norm")
            second.step()

    def configure_optimizers(self):
        return (torch.optim.SGD(self.layers[0].parameters(), 0.3), torch.optim.Adam(self.layers[2].parameters(), 0.02))


def trainer(strategy, steps=8, **options):
    """A Trainer for the ranks that baguarun has started."""
    from bagua_hvd.job import basics

    basics.init()
    if strategy == "ddp":
        strategy = pl.strategies.DDPStrategy(cluster_environment=ours.BaguarunEnvironment())
    elif isinstance(strategy, str) and strategy.startswith("bagua_") and strategy[6:] not in algorithms.menu():
        strategy = ours.BaguaStrategy(strategy.removeprefix("bagua_"))
    return pl.Trainer(**{
        "strategy": strategy, "accelerator": "cpu", "devices": basics.size(), "max_steps": steps, "logger": False,
        "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False,
        "num_sanity_val_steps": 0, **options})


def weights(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
