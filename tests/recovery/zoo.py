"""Pairs of model and loss, and whether their batch may be cut: the gradient of the parts against that of the whole."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

N = 12


class Pair(NamedTuple):
    """A model with its loss and batch."""

    model: nn.Module
    batch: Any
    loss: Callable[[Any], Any]
    reduction: str = "mean"
    exact: bool = True
    """Whether the gradient is a sum over samples."""


def _mlp(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(6, 10), *norm, nn.Tanh(), nn.Linear(10, 4))


def _xy() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(N, 6), torch.randint(0, 4, (N,))


def _supervised(
    model: nn.Module, loss: Callable[..., torch.Tensor] = F.cross_entropy, **options: Any
) -> Pair:
    return Pair(model, _xy(), lambda part: loss(model(part[0]), part[1]), **options)


def _token_batch() -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(1, 9, (N, 7))
    labels = ids.clone()
    for row in range(N):
        labels[row, 2 + row % 5 :] = -100
    return ids, labels


def _token_model() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))


def _token_mean() -> Pair:
    model = _token_model()
    return Pair(
        model,
        _token_batch(),
        lambda part: F.cross_entropy(model(part[0]).flatten(0, 1), part[1].flatten(), ignore_index=-100),
        exact=False,
    )


def _token_sum_and_weight() -> Pair:
    model = _token_model()

    def loss(part: Any) -> Any:
        logits, labels = model(part[0]).flatten(0, 1), part[1].flatten()
        return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum"), (labels != -100).sum()

    return Pair(model, _token_batch(), loss)


def _contrastive() -> Pair:
    model = nn.Linear(6, 6, bias=False)

    def loss(part: Any) -> torch.Tensor:
        query, key = F.normalize(model(part[0]), dim=1), F.normalize(part[1], dim=1)
        return F.cross_entropy(query @ key.T / 0.1, torch.arange(len(query)))

    return Pair(model, (torch.randn(N, 6), torch.randn(N, 6)), loss, exact=False)


def _neighbours() -> Pair:
    """Pairs of neighbours: any cut at an even place would pass."""
    model = nn.Linear(6, 3)

    def loss(part: Any) -> torch.Tensor:
        made = model(part)
        return (made[0::2][: len(made) // 2] - made[1::2]).square().sum() / max(1, len(part))

    return Pair(model, torch.randn(N, 6), loss, exact=False)


class OwnBatchNorm(nn.Module):
    """Not torch's class, and with its own evaluation mode."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / (x.std(0, unbiased=False) + 1e-3) if self.training else x


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + 0.1 * torch.randn_like(x) if self.training else x


def _with_regulariser(reduction: str) -> Pair:
    model = _mlp()

    def loss(part: Any) -> torch.Tensor:
        penalty = 1e-2 * sum(parameter.square().sum() for parameter in model.parameters())
        return F.cross_entropy(model(part[0]), part[1], reduction=reduction) + penalty

    return Pair(model, _xy(), loss, reduction, exact=reduction == "mean")


def _weighted_classes() -> Pair:
    weight = torch.tensor([1.0, 5.0, 0.1, 2.0])
    return _supervised(_mlp(), lambda x, y: F.cross_entropy(x, y, weight=weight.to(x)), exact=False)


def _weighted_classes_by_weight() -> Pair:
    weight, model = torch.tensor([1.0, 5.0, 0.1, 2.0]), _mlp()

    def loss(part: Any) -> Any:
        made = model(part[0])
        total = F.cross_entropy(made, part[1], weight=weight.to(made), reduction="sum")
        return total, weight.to(made)[part[1]].sum()

    return Pair(model, _xy(), loss)


def _mixup() -> Pair:
    model = _mlp()

    def loss(part: Any) -> torch.Tensor:
        order = torch.randperm(len(part[0]))
        return F.cross_entropy(model(0.7 * part[0] + 0.3 * part[0][order]), part[1])

    return Pair(model, _xy(), loss, exact=False)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(6, 5, batch_first=True)
        self.head = nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.rnn(x)[0][:, -1])


def _sequences(model: nn.Module) -> Pair:
    return Pair(
        model, (torch.randn(N, 3, 6), torch.randint(0, 4, (N,))), lambda p: F.cross_entropy(model(p[0]), p[1])
    )


class Transformer(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=dropout, batch_first=True)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).mean(1))


def _images(model: nn.Module, **options: Any) -> Pair:
    batch = (torch.randn(N, 2, 5, 5), torch.randint(0, 4, (N,)))
    return Pair(model, batch, lambda part: F.cross_entropy(model(part[0]), part[1]), **options)


def _conv(*norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), *norm, nn.ReLU(), nn.Flatten(), nn.Linear(36, 4))


def _frozen(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()
    return model


def _variance_penalty() -> Pair:
    model = _mlp()

    def loss(part: Any) -> torch.Tensor:
        made = model(part[0])
        return F.cross_entropy(made, part[1]) + 0.1 * made.var(0).sum()

    return Pair(model, _xy(), loss, exact=False)


def _time_first(kind: str) -> Pair:
    """PyTorch's default layout: the first dimension is time, and what comes later hangs on what came before."""
    embed, core, head = nn.Embedding(9, 6), getattr(nn, kind)(6, 8), nn.Linear(8, 9)
    ids = torch.randint(0, 9, (N, 5))
    return Pair(
        nn.ModuleList([embed, core, head]),
        (ids, ids.roll(-1, 0)),
        lambda part: F.cross_entropy(head(core(embed(part[0]))[0]).flatten(0, 1), part[1].flatten()),
        exact=False,
    )


def _against_the_first() -> Pair:
    model = _mlp()

    def loss(part: Any) -> torch.Tensor:
        made = model(part[0])
        return (made - made[:1]).square().mean()

    return Pair(model, _xy(), loss, exact=False)


def _with_labels(labels: list[int], loss: Callable[..., torch.Tensor]) -> Pair:
    model = _mlp()
    batch = (torch.randn(N, 6), torch.tensor(labels))
    return Pair(model, batch, lambda part: loss(model(part[0]), part[1]), exact=False)


def _rare(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out, labels, weight=torch.tensor([1.0, 1.0, 20.0, 1.0]).to(out))


def _pairs_by_label(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """As samplers make them that put two of each class into a batch."""
    apart = (out[:, None] - out[None]).square().sum(-1)
    return (apart * (labels[:, None] == labels[None])).mean()


class Codebook(nn.Module):
    """Follows what it sees by a moving average in a buffer, which the next forward pass then uses."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 4), nn.Linear(4, 4)
        self.register_buffer("codes", torch.randn(3, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        near = torch.cdist(made, self.codes).argmin(1)
        quantized = self.codes[near]
        with torch.no_grad():
            for code in near.unique().tolist():
                self.codes[code] = 0.9 * self.codes[code] + 0.1 * made[near == code].mean(0)
        return self.last(made + (quantized - made).detach())  # type: ignore[no-any-return]


class Counting(nn.Module):
    """Another model with each call, by a number that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.calls = _mlp(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x) * self.calls  # type: ignore[no-any-return]


class Teaching(nn.Module):
    """A teacher that follows its student inside the loss function."""

    def __init__(self) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        return self.student(x) - self.teacher(x)  # type: ignore[no-any-return]


def _sometimes_mixed() -> Pair:
    model = _mlp()

    def loss(part: Any) -> torch.Tensor:
        x, y = part
        order = torch.randperm(len(x)) if torch.rand(1) < 0.5 else slice(None)
        return F.cross_entropy(model(0.7 * x + 0.3 * x[order]), y)

    return Pair(model, _xy(), loss, exact=False)


def _over_positives(out: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    positive = (labels == 0).to(out)
    each = F.binary_cross_entropy_with_logits(out[:, 0], positive, reduction="none")
    return each.sum() / positive.sum().clamp(min=1)


def _positives_as_weight() -> Pair:
    model = _mlp()

    def loss(part: Any) -> Any:
        positive = (part[1] == 0).to(part[0])
        each = F.binary_cross_entropy_with_logits(model(part[0])[:, 0], positive, reduction="none")
        return each.sum(), positive.sum()

    return Pair(model, _xy(), loss)


class Clamped(nn.Module):
    """Holds its weight in bounds itself: the second time that changes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.linear.weight.clamp_(-0.2, 0.2)
        return self.linear(x)  # type: ignore[no-any-return]


ZOO: dict[str, Callable[[], Pair]] = {
    "cross entropy": lambda: _supervised(_mlp()),
    "squared error": lambda: _supervised(_mlp(), lambda x, y: F.mse_loss(x, F.one_hot(y, 4).to(x))),
    "hinge": lambda: _supervised(_mlp(), F.multi_margin_loss),
    "label smoothing": lambda: _supervised(_mlp(), lambda x, y: F.cross_entropy(x, y, label_smoothing=0.1)),
    "sum said to be one": lambda: _supervised(
        _mlp(), lambda x, y: F.cross_entropy(x, y, reduction="sum"), reduction="sum"
    ),
    "sum said to be a mean": lambda: _supervised(
        _mlp(), lambda x, y: F.cross_entropy(x, y, reduction="sum"), exact=False
    ),
    "mean said to be a sum": lambda: _supervised(_mlp(), reduction="sum", exact=False),
    "mean over tokens": _token_mean,
    "tokens as (sum, weight)": _token_sum_and_weight,
    "weighted classes": _weighted_classes,
    "weighted classes as (sum, weight)": _weighted_classes_by_weight,
    "in-batch contrastive": _contrastive,
    "pairs of neighbours": _neighbours,
    "mixup inside the loss": _mixup,
    "variance over the batch": _variance_penalty,
    "penalty beside a mean": lambda: _with_regulariser("mean"),
    "penalty beside a sum": lambda: _with_regulariser("sum"),
    "layer norm": lambda: _supervised(_mlp(nn.LayerNorm(10))),
    "group norm": lambda: _images(_conv(nn.GroupNorm(2, 4))),
    "instance norm": lambda: _images(_conv(nn.InstanceNorm2d(4, affine=True))),
    "batch norm": lambda: _supervised(_mlp(nn.BatchNorm1d(10)), exact=False),
    "batch norm of images": lambda: _images(_conv(nn.BatchNorm2d(4)), exact=False),
    "frozen batch norm": lambda: _images(_frozen(_conv(nn.BatchNorm2d(4)))),
    "a batch norm of one's own": lambda: _supervised(_mlp(OwnBatchNorm()), exact=False),
    "a batch norm of one's own, with dropout": lambda: _supervised(
        _mlp(OwnBatchNorm(), nn.Dropout(0.3)), exact=False
    ),
    "dropout": lambda: _supervised(_mlp(nn.Dropout(0.3))),
    "noise": lambda: _supervised(_mlp(Noise())),
    "functional dropout": lambda: _supervised(_mlp(nn.Dropout1d(0.2), nn.AlphaDropout(0.1))),
    "recurrent": lambda: _sequences(Recurrent()),
    "attention": lambda: _sequences(Transformer(0.0)),
    "attention with dropout": lambda: _sequences(Transformer(0.2)),
    "convolution": lambda: _images(_conv()),
    "time first": lambda: _time_first("GRU"),
    "time first, plain": lambda: _time_first("RNN"),
    "compared with the first sample": _against_the_first,
    "a rare class of large weight": lambda: _with_labels([0, 1, 0, 1, 0, 1, 0, 1, 0, 2, 0, 1], _rare),
    "a rare ignored label": lambda: _with_labels([0, 1, 3, 1, 0, 1, -100, 1, 0, 2, 0, 1], F.cross_entropy),
    "pairs of a label": lambda: _with_labels([number // 2 for number in range(N)], _pairs_by_label),
    "a moving codebook": lambda: _supervised(Codebook(), exact=False),
    "a spectral norm": lambda: _supervised(
        nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 4))), exact=False
    ),
    "a counter in the model": lambda: _supervised(Counting(), exact=False),
    "a teacher that follows inside the loss": lambda: _supervised(Teaching(), exact=False),
    "a weight that is held in bounds": lambda: _supervised(Clamped()),
    "mixup for every second batch": _sometimes_mixed,
    "over positives, said to be a sum": lambda: _supervised(
        _mlp(), _over_positives, reduction="sum", exact=False
    ),
    "over positives, said to be a mean": lambda: _supervised(_mlp(), _over_positives, exact=False),
    "over positives as (sum, weight)": _positives_as_weight,
}
