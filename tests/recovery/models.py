"""Small trainings of every kind, each with a whole step: loss, clipping, optimizer, scheduler, averages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from buoy.torch.step.transaction import Transaction

BATCH = 8


class Trainer:
    """A model and all that trains it, in the state after `warm` steps."""

    def __init__(self, make: Callable[[Trainer], None], warm: int, ahead: int = 0) -> None:
        torch.manual_seed(0)
        self.said: list[str] = []
        self.inexact: tuple[str, ...] = ()
        self.micro_batch: int | None = None
        self.scaler: Any = None
        self.after: Callable[[], None] = lambda: None
        self.before_step: Callable[[], None] = lambda: None
        self.accumulate = 1
        self.extra: dict[str, Callable[[], Any]] = {}
        self.optimizers: list[torch.optim.Optimizer] = []
        self.reduction = "mean"
        make(self)
        self.transaction = Transaction(
            say=self.said.append,
            event=lambda *a, **k: None,
            inexact=self.inexact,
            micro_batch=self.micro_batch,
        )
        self.transaction.track([self.model], self.optimizers, [self.scaler] if self.scaler else [])
        self.batches = [self.batch(number) for number in range((warm + ahead + 1) * self.accumulate)]
        for number in range(warm):
            self.step(number)

    model: nn.Module
    batch: Callable[[int], Any]
    loss: Callable[[Any], Any]

    def step(self, number: int) -> torch.Tensor:
        for part in range(self.accumulate):
            loss = self.transaction.backward(
                self.batches[number * self.accumulate + part],
                self.loss,
                reduction=self.reduction,
                scaler=self.scaler,
            )
        # What people write between is theirs: an error there is raised as ever.
        with _disable_current_modes():
            self.before_step()
        for optimizer in self.optimizers:
            self.scaler.step(optimizer) if self.scaler else optimizer.step()
            optimizer.zero_grad()
        if self.scaler:
            self.scaler.update()
        with _disable_current_modes():
            self.after()
        return loss

    def state(self) -> dict[str, Any]:
        """Everything that must be equal to the last bit."""
        found: dict[str, Any] = {f"model.{k}": v.clone() for k, v in self.model.state_dict().items()}
        for number, optimizer in enumerate(self.optimizers):
            saved = optimizer.state_dict()
            for index, values in saved["state"].items():
                for key, value in values.items():
                    found[f"optimizer{number}.{index}.{key}"] = (
                        value.clone() if torch.is_tensor(value) else value
                    )
            found[f"optimizer{number}.lr"] = [group["lr"] for group in saved["param_groups"]]
        found["rng"] = torch.get_rng_state()
        if self.scaler:
            found["scaler"] = self.scaler.state_dict()
        for name, read in self.extra.items():
            found[name] = read()
        found["grads"] = [p.grad is None for p in self.model.parameters()]
        return found


def _data(*shape: int, classes: int | None = None) -> Callable[[int], tuple[torch.Tensor, torch.Tensor]]:
    def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
        source = torch.Generator().manual_seed(100 + number)
        x = torch.randn(BATCH, *shape, generator=source)
        y = (
            torch.randint(0, classes, (BATCH,), generator=source)
            if classes
            else torch.randn(BATCH, 4, generator=source)
        )
        return x, y

    return batch


def _plain(
    trainer: Trainer, model: nn.Module, optimizer: Callable[[Any], torch.optim.Optimizer], *shape: int
) -> None:
    trainer.model = model
    trainer.optimizers = [optimizer(model.parameters())]
    trainer.batch = _data(*shape)
    trainer.loss = lambda part: F.mse_loss(trainer.model(part[0]), part[1])


def mlp(*, norm: bool = False, dropout: float = 0.0, width: int = 12) -> nn.Module:
    layers: list[nn.Module] = [nn.Linear(6, width)]
    if norm:
        layers.append(nn.BatchNorm1d(width))
    layers.append(nn.GELU())
    if dropout:
        layers.append(nn.Dropout(dropout))
    return nn.Sequential(*layers, nn.Linear(width, 4))


def adamw(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, **options)


def sgd(**options: Any) -> Callable[[Any], torch.optim.Optimizer]:
    return lambda parameters: torch.optim.SGD(parameters, lr=1e-2, **options)


class Lstm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8, num_layers=2, dropout=0.1, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.inward = nn.Linear(6, 8)
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.inward(x)).mean(1))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU())
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.first, x, use_reentrant=False))


class Tied(nn.Module):
    """Tokens in, a mean over the tokens that are not padding out."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.middle = nn.Linear(8, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.middle(self.embed(ids))) @ self.embed.weight.T


def _batchnorm(t: Trainer) -> None:
    t.inexact = ("batchnorm",)
    _plain(t, mlp(norm=True), adamw(), 6)


def _batchnorm_dropout(t: Trainer) -> None:
    t.inexact = ("batchnorm",)
    _plain(t, mlp(norm=True, dropout=0.2), adamw(foreach=True), 6)


def _batchnorm_whole(t: Trainer) -> None:
    """Not allowed to be split: once more as it is."""
    _plain(t, mlp(norm=True), adamw(), 6)


def _convolution(t: Trainer) -> None:
    t.inexact = ("batchnorm",)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    _plain(t, model, sgd(momentum=0.9), 2, 6, 6)


def _checkpointed(t: Trainer) -> None:
    t.inexact = ("batchnorm",)
    _plain(t, Checkpointed(), adamw(), 6)


def _scaled(t: Trainer, **options: Any) -> None:
    _plain(t, mlp(dropout=0.1), adamw(**options), 6)
    t.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    model = t.model

    def loss(part: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            made = model(part[0])
        return F.mse_loss(made.float(), part[1])

    t.loss = loss


def _autocast(t: Trainer) -> None:
    _scaled(t)
    t.scaler = None


def _clipped(t: Trainer) -> None:
    _plain(t, mlp(), adamw(), 6)
    t.before_step = lambda: nn.utils.clip_grad_norm_(t.model.parameters(), 0.1) and None


def _scheduled(t: Trainer) -> None:
    _plain(t, mlp(), adamw(), 6)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(t.optimizers[0], 0.1, total_steps=20)
    average = torch.optim.swa_utils.AveragedModel(t.model)

    def after() -> None:
        scheduler.step()
        average.update_parameters(t.model)

    t.after = after
    t.extra = {
        "scheduler": lambda: scheduler.state_dict()["last_epoch"],
        "average": lambda: [p.detach().clone() for p in average.parameters()],
    }


def _tokens(t: Trainer) -> None:
    t.model = Tied()
    t.optimizers = [adamw()(t.model.parameters())]

    def batch(number: int) -> dict[str, torch.Tensor]:
        source = torch.Generator().manual_seed(number)
        ids = torch.randint(1, 20, (BATCH, 7), generator=source)
        labels = ids.roll(-1, 1)
        for row in range(BATCH):
            labels[row, 1 + row % 6 :] = -100
        return {"ids": ids, "labels": labels}

    def loss(part: Any) -> tuple[torch.Tensor, torch.Tensor]:
        logits, labels = t.model(part["ids"]), part["labels"]
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total, (labels != -100).sum()

    t.batch, t.loss = batch, loss


def _two_optimizers(t: Trainer) -> None:
    _plain(t, mlp(), adamw(), 6)
    t.optimizers = [adamw()(t.model[0].parameters()), sgd(momentum=0.9)(t.model[2].parameters())]


def _groups(t: Trainer) -> None:
    _plain(t, mlp(), adamw(), 6)
    groups = [
        {"params": t.model[0].parameters(), "lr": 0.1},
        {"params": t.model[2].parameters(), "weight_decay": 0.0},
    ]
    t.optimizers = [adamw(amsgrad=True)(groups)]


def _accumulating(t: Trainer) -> None:
    _plain(t, mlp(dropout=0.1), adamw(), 6)
    t.accumulate = 2


def _summed(t: Trainer) -> None:
    _plain(t, mlp(), adamw(), 6)
    t.loss = lambda part: F.mse_loss(t.model(part[0]), part[1], reduction="sum")
    t.reduction = "sum"


def _fixed(t: Trainer) -> None:
    _plain(t, mlp(dropout=0.2), adamw(), 6)
    t.micro_batch = 3


def _simple(optimizer: Callable[[Any], torch.optim.Optimizer], **options: Any) -> Callable[[Trainer], None]:
    return lambda t: _plain(t, mlp(**options), optimizer, 6)


MODELS: dict[str, Callable[[Trainer], None]] = {
    "adamw foreach": _simple(adamw(foreach=True)),
    "adamw single": _simple(adamw(foreach=False)),
    "adamw fused": _simple(adamw(fused=True)),
    "sgd": _simple(sgd()),
    "sgd momentum nesterov": _simple(sgd(momentum=0.9, nesterov=True, weight_decay=0.1)),
    "sgd fused momentum": _simple(sgd(momentum=0.9, fused=True)),
    "rmsprop centered": _simple(lambda p: torch.optim.RMSprop(p, lr=1e-3, centered=True, momentum=0.9)),
    "adafactor": _simple(lambda p: torch.optim.Adafactor(p, lr=1e-2)),
    "adagrad": _simple(lambda p: torch.optim.Adagrad(p, lr=1e-2)),
    "nadam": _simple(lambda p: torch.optim.NAdam(p, lr=1e-3)),
    "dropout": _simple(adamw(), dropout=0.2),
    "batchnorm": _batchnorm,
    "batchnorm and dropout": _batchnorm_dropout,
    "batchnorm that may not be split": _batchnorm_whole,
    "convolution with batchnorm": _convolution,
    "checkpointed batchnorm": _checkpointed,
    "lstm": lambda t: _plain(t, Lstm(), adamw(), 3, 6),
    "attention": lambda t: _plain(t, Attention(), adamw(), 3, 6),
    "autocast": _autocast,
    "autocast with a scaler": _scaled,
    "scaler and a fused optimizer": lambda t: _scaled(t, fused=True),
    "clipping": _clipped,
    "scheduler and averaged weights": _scheduled,
    "mean over tokens, tied weights": _tokens,
    "two optimizers": _two_optimizers,
    "parameter groups, amsgrad": _groups,
    "accumulation of one's own": _accumulating,
    "sum of losses": _summed,
    "micro-batch chosen by hand": _fixed,
}
