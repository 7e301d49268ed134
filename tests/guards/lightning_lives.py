"""Lightning trainings for `tests.guards.lives`."""

from __future__ import annotations

import logging
import os
import signal
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import lightning as L  # noqa: N812 - as its own pages have it
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BackboneFinetuning,
    EarlyStopping,
    EMAWeightAveraging,
    ModelCheckpoint,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset

from buoy.flight.profile import Profiling
from buoy.lightning import Guard
from tests.guards import lives
from tests.guards.lives import Stage, fingerprint

warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Noisy(Dataset[Any]):
    """Each item is augmented with whatever random state there is."""

    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(8), x.sum()[None]


class Stream(IterableDataset[Any]):
    """Has no length: Lightning reads one batch ahead."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(42):
            yield Noisy()[index]


class Model(L.LightningModule):
    """Logs a mean and a metric, and tells the stage everything it sees."""

    def __init__(self, stage: Stage | None = None, dropout: float = 0.2) -> None:
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 16), torch.nn.Dropout(dropout), torch.nn.ReLU(), torch.nn.Linear(16, 1)
        )
        if not isinstance(self, Tight):
            self.error, self.now = torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()
        self.calls = 0
        self.losses: list[float] = []
        self.stage = stage

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, y = batch
        predicted = self.net(x)
        loss = torch.nn.functional.mse_loss(predicted, y)
        self.error(predicted, y)
        self.calls += 1
        self.losses.append(float(loss))
        self.log("error", self.error, on_step=False, on_epoch=True)
        self.now(predicted, y)
        self.log("now", self.now, on_step=True, on_epoch=False)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "predicted": predicted.detach()}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert len(outputs["predicted"]) == len(batch[0])
        if self.stage is not None:
            rate = self.trainer.optimizers[0].param_groups[0]["lr"]
            seen = float(self.trainer.callback_metrics["loss_step"])
            self.stage.log(
                self.trainer.fit_loop.total_batch_idx, float(outputs["loss"]), rate, seen, batch_idx
            )

    def on_train_epoch_end(self) -> None:
        if self.stage is not None:
            metrics = {name: float(value) for name, value in sorted(self.trainer.callback_metrics.items())}
            self.stage.log(f"epoch{self.current_epoch}", metrics, self.trainer.global_step)

    def on_train_end(self) -> None:
        if self.stage is not None:
            states = self.trainer.optimizers[0].state_dict()["state"]
            moments = [float(value.double().sum()) for state in states.values() for value in state.values()]
            self.stage.log(
                "end", fingerprint(self), moments, self.trainer.global_step, self.trainer.current_epoch
            )

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, y = batch
        self.log("val", torch.nn.functional.mse_loss(self.net(x), y))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        scheduler = {
            "scheduler": plateau,
            "monitor": "val",
            "interval": "step",
            "frequency": 3,
            "strict": False,
        }
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def trainer(folder: str, *callbacks: Any, **options: Any) -> Any:
    """One that says and writes nothing of its own."""
    L.seed_everything(7, verbose=False)
    quiet = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "accelerator": "cpu",
    }
    quiet["enable_checkpointing"] = any(isinstance(each, ModelCheckpoint) for each in callbacks)
    return L.Trainer(**{**quiet, "default_root_dir": folder, "callbacks": list(callbacks), **options})


def everything(stage: Stage) -> None:
    """Augmentation in workers whose number changes, validation inside epochs, a metric, a plateau schedule."""
    fit = trainer(
        stage.folder, Guard(stage.folder, save=1), EarlyStopping("val", patience=99),
        ModelCheckpoint(f"{stage.folder}-own", monitor="val"), max_epochs=3, val_check_interval=3,
    )  # fmt: skip
    loader = DataLoader(Noisy(), batch_size=8, shuffle=True, num_workers=stage.life % 2 * 2)
    fit.fit(Model(stage), loader, DataLoader(Noisy(), batch_size=21))


def stream(stage: Stage) -> None:
    """Data without a length, accumulated gradients, mixed precision, averaged weights, clipping."""
    average = EMAWeightAveraging(decay=0.9)
    fit = trainer(
        stage.folder, Guard(stage.folder, save=1), average, max_epochs=2, accumulate_grad_batches=2,
        precision="bf16-mixed", gradient_clip_val=0.5, limit_val_batches=1,
    )  # fmt: skip
    fit.fit(Model(stage), DataLoader(Stream(), batch_size=8), DataLoader(Noisy(), batch_size=21))


class ShortOnce(Model):
    """Once in a run, in its fourth batch, more than two samples do not fit; when it is done again they would."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert self.stage is not None
        is_short = self.trainer.fit_loop.total_batch_idx == 3 and not os.path.exists(
            f"{self.stage.folder}.short"
        )
        if is_short and len(batch[0]) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert self.stage is not None
        if self.trainer.fit_loop.total_batch_idx == 3:
            open(f"{self.stage.folder}.short", "w").close()
        super().on_train_batch_end(outputs, batch, batch_idx)


def micro_batches(stage: Stage) -> None:
    """Every batch is cut, from the fourth on into smaller parts."""
    fit = trainer(stage.folder, Guard(stage.folder, save=2, micro_batch=3), max_epochs=2)
    fit.fit(
        ShortOnce(stage), DataLoader(Noisy(), batch_size=8, shuffle=True), DataLoader(Noisy(), batch_size=21)
    )


class Unfreezing(Model):
    """Its schedule is as long as the fit, so that Lightning sets its data up while it makes the optimizer."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.backbone = self.net[0]

    def train_dataloader(self) -> Any:
        return DataLoader(Noisy(), batch_size=8 - self.trainer.current_epoch // 2, shuffle=True)

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.net[-1].parameters()}, {"params": self.net[0].parameters(), "lr": 1e-3}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=steps)
        return [optimizer], [{"scheduler": cycle, "interval": "step"}]


class Thawing(L.Callback):
    """The first layer is frozen in the first epoch."""

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(False)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 1:
            pl_module.net[0].requires_grad_(True)


def unfreezing(stage: Stage) -> None:
    """Layers frozen at first, and trained from the second epoch on; other loaders in the third and fifth."""
    guard = Guard(stage.folder, save=1)
    fit = trainer(stage.folder, guard, Thawing(), max_epochs=6, reload_dataloaders_every_n_epochs=2)
    fit.fit(Unfreezing(stage))


TRAININGS = {
    "everything": everything, "stream": stream, "micro_batches": micro_batches, "unfreezing": unfreezing,
}  # fmt: skip


class Fixed(Dataset[Any]):
    """The same items always: for comparisons with a training without a guard."""

    def __len__(self) -> int:
        return 42

    def __getitem__(self, index: int) -> Any:
        x = torch.randn(8, generator=torch.Generator().manual_seed(index)).double()
        return x, x.sum()[None]


def _fixed(folder: str, model: Model, *callbacks: Any, **options: Any) -> Any:
    fit = trainer(folder, *callbacks, **{"max_epochs": 2, "gradient_clip_val": 1.0, **options})
    loader = DataLoader(Fixed(), batch_size=8)
    fit.fit(model.double(), loader, DataLoader(Fixed(), batch_size=21))
    return fit


def _weights(model: Model) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


class Tight(Model):
    """From its fifth step on more than four samples do not fit; its metrics are made when the training begins."""

    def on_train_start(self) -> None:
        self.error, self.now = torchmetrics.MeanSquaredError(), torchmetrics.MeanAbsoluteError()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        made = super().training_step(batch, batch_idx)
        if self.global_step >= 5 and len(batch[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
        return made


def recovery(folder: str) -> Any:
    """A batch that stops to fit, beside a training in which it fits."""
    results = []
    for kind, callbacks in ((Model, []), (Tight, [Guard(folder)])):
        torch.manual_seed(1)
        model = kind(dropout=0.0)
        fit = _fixed(folder, model, *callbacks)
        metrics = {name: float(value) for name, value in fit.callback_metrics.items()}
        calls = [model.calls, len(model.losses)]
        results.append(
            {
                "weights": _weights(model),
                "metrics": metrics,
                "steps": fit.global_step,
                "calls": calls,
            }
        )
    return results


def sigterm(folder: str) -> Any:
    """Told to stop in its fifth step; then started again."""

    class Told(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            if self.global_step == 4:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().training_step(batch, batch_idx)

    ended = "not at all"
    try:
        _fixed(folder, Told(), Guard(folder, save="10h"))
    except SystemExit as error:
        ended = type(error).__name__
    guard = Guard(folder, save="10h")
    steps: list[int] = []

    class Counting(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            steps.append(self.global_step)
            return super().training_step(batch, batch_idx)

    _fixed(folder, Counting(), guard, max_epochs=1)
    handler = signal.getsignal(signal.SIGTERM)
    return {"ended": ended, "first": steps[0], "last": steps[-1], "handler": handler == signal.SIG_DFL}


def finished(folder: str) -> Any:
    """Fitted three times: to its end, again, and for one more epoch."""
    counts, weights, metrics = [], [], []
    for epochs in (1, 1, 2):
        calls: list[int] = []

        class Counting(Model):
            def training_step(self, batch: Any, batch_idx: int, calls: list[int] = calls) -> Any:
                calls.append(self.global_step)
                return super().training_step(batch, batch_idx)

        model = Counting()
        fit = _fixed(folder, model, Guard(folder), max_epochs=epochs)
        counts.append([len(set(calls)), fit.current_epoch, fit.global_step])
        weights.append(_weights(model))
        metrics.append({name: float(value) for name, value in fit.callback_metrics.items()})
    same = weights[0] == weights[1] and metrics[0] == metrics[1]
    return {"counts": counts, "metrics": metrics[1], "same": same, "trained on": weights[1] != weights[2]}


def left_as_found(folder: str) -> Any:
    """What the guard replaced in the trainer is gone after the fit; no thread of its stays."""
    fit = _fixed(folder, Model(), Guard(folder), max_epochs=1)
    owners = (fit.strategy, fit.fit_loop.epoch_loop, fit.fit_loop.epoch_loop.automatic_optimization)
    names = {"process_dataloader", "advance", "_make_closure"}
    return sorted(name for owner in owners for name in vars(owner) if name in names), threading.active_count()


def odd_batches(folder: str) -> Any:
    """Parts of different lengths, and a step that the module skips: as without a guard."""

    class Odd(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            x, y, table = batch
            assert len(table) == 3
            return None if batch_idx == 2 else super().training_step((x, y), batch_idx)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            pass

    def collate(items: list[Any]) -> Any:
        return (*torch.utils.data.default_collate(items), torch.zeros(3))

    made = []
    for callbacks in ([], [Guard(folder)]):
        torch.manual_seed(1)
        model = Odd(dropout=0.0).double()
        fit = trainer(folder, *callbacks, max_epochs=1, limit_val_batches=0)
        fit.fit(model, DataLoader(Fixed(), batch_size=8, collate_fn=collate))
        made.append(_weights(model))
    return made[0] == made[1]


def _finetune(folder: str, epochs: int) -> None:
    """Lightning's own callback gives the optimizer a group in the second epoch."""

    class Headed(Model):
        def __init__(self) -> None:
            super().__init__()
            self.backbone = self.net[0]

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.net[-1].parameters(), lr=1e-2)

    _fixed(
        folder, Headed(), Guard(folder), BackboneFinetuning(unfreeze_backbone_at_epoch=1), max_epochs=epochs
    )


def refusals(folder: str) -> Any:
    """What cannot be made safe, and in which words."""

    class Manual(Model):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

    class Another(Model):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(8, 9), torch.nn.Linear(9, 1))

    _fixed(folder, Model(), Guard(folder), max_epochs=1)
    _finetune(f"{folder}-3", 2)
    two = {"a": DataLoader(Fixed(), batch_size=8), "b": DataLoader(Fixed(), batch_size=8)}
    tries = [
        lambda: _fixed(folder, Manual(), Guard(folder), gradient_clip_val=None),
        lambda: _fixed(folder, Another(), Guard(folder)),
        lambda: trainer(folder, Guard(f"{folder}-2"), max_epochs=1).fit(Model().double(), two),
        lambda: _finetune(f"{folder}-3", 3),
    ]
    return [lives.refusal(attempt) for attempt in tries]


def two_processes(folder: str) -> Any:
    """DDP over gloo: what each rank is told."""

    def work(rank: int) -> str:
        return lives.refusal(
            lambda: _fixed(folder, Model(), Guard(folder), devices=2, strategy="ddp", max_epochs=1)
        )

    return lives.two_processes(folder, work)


def remedies(folder: str) -> Any:
    """Losses with and without checkpointing, and the precision in which the last layer computed."""
    made = []
    for number, given in enumerate(((), "checkpointing", ("amp",))):
        fit = trainer(f"{folder}-{number}", Guard(f"{folder}-{number}", remedies=given), max_epochs=1)
        model, seen = Model(), []
        model.net[-1].register_forward_hook(lambda *args, seen=seen: seen.append(str(args[2].dtype)))
        fit.fit(model, DataLoader(Noisy(), batch_size=8), DataLoader(Noisy(), batch_size=21))
        made.append([fingerprint(model), sorted(set(seen))])
    return made


def asked_for_a_profile(folder: str) -> Any:
    """What `%buoy profile` leaves behind, and how the guard shows itself before and after its fit."""
    Profiling.of_next_training = 3
    guard = Guard(folder)
    before = guard._repr_html_()
    _fixed(folder, Model(), guard, max_epochs=1)
    return Profiling.of_next_training, repr(guard), before, guard._repr_html_()


CHECKS = {
    "asked_for_a_profile": asked_for_a_profile,
    "remedies": remedies,
    "two_processes": two_processes,
    "recovery": recovery,
    "sigterm": sigterm,
    "finished": finished,
    "left_as_found": left_as_found,
    "odd_batches": odd_batches,
    "refusals": refusals,
}
