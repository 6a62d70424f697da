"""Trains on scikit-learn's handwritten digits with Lightning, over bagua_hvd.

    python examples/lightning_digits.py --devices 2 --strategy bagua_bytegrad       Lightning starts the processes
    baguarun -np 2 python examples/lightning_digits.py --devices 2                  baguarun does

Compared with a script for strategy="ddp", it only has one more import, and the strategy's name.
"""
import argparse

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

import bagua_hvd.lightning  # noqa: F401  (registers the strategies)
import bagua_hvd.torch as hvd


class Digits(pl.LightningModule):
    """Two linear layers over 8 x 8 pixels."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def training_step(self, batch, index):
        images, labels = batch
        return nn.functional.cross_entropy(self.layers(images), labels)

    def validation_step(self, batch, index):
        images, labels = batch
        self.log("accuracy", (self.layers(images).argmax(1) == labels).float().mean(), sync_dist=True)

    def on_train_epoch_end(self):
        if hvd.is_initialized():            # by our strategies only
            self.log("bagua_hvd/bytes_sent", float(hvd.statistics().recent.bytes_sent), sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 2e-3)


class Weighted(Digits):
    """Each image once an epoch: its last batches are not equal on all ranks, so gradients are weighted by images."""

    def train_dataloader(self):
        images = digits()[0].dataset
        return DataLoader(Subset(images, range(hvd.rank(), len(images), hvd.size())), 32, shuffle=True)

    def training_step(self, batch, index):
        self.optimizers().set_weight(len(batch[0]))
        return super().training_step(batch, index)


def digits():
    """Loaders of 1437 images for training and 360 for testing."""
    images, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images, labels = torch.tensor(images, dtype=torch.float32)[order] / 16, torch.tensor(labels)[order]
    return (DataLoader(TensorDataset(images[:1437], labels[:1437]), 32, shuffle=True),
            DataLoader(TensorDataset(images[1437:], labels[1437:]), 32))


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--strategy", default="bagua")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--weighted", action="store_true", help="repeat no images to make the ranks' data equal")
    arguments = parser.parse_args()
    pl.seed_everything(1, verbose=False)
    trainer = pl.Trainer(strategy=arguments.strategy, accelerator="cpu", devices=arguments.devices,
                         max_epochs=arguments.epochs, logger=False, enable_checkpointing=False,
                         enable_progress_bar=False, enable_model_summary=False,
                         use_distributed_sampler=not arguments.weighted)
    training, test = digits()
    if arguments.weighted:
        trainer.fit(Weighted(), val_dataloaders=test)
    else:
        trainer.fit(Digits(), training, test)
    if trainer.is_global_zero:
        print(f"{trainer.world_size} ranks, test accuracy: {100 * trainer.callback_metrics['accuracy']:.1f} %")
        sent = trainer.callback_metrics.get("bagua_hvd/bytes_sent")
        if sent is not None:
            print(f"bytes sent in the last epoch, by a rank: {sent:.0f}")


if __name__ == "__main__":
    main()
