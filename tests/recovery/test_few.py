"""The samples of the trial show it wherever a loss counts some samples more than others."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F  # noqa: N812

from buoy.microbatch.batch import Batch
from buoy.microbatch.errors import BadLoss, CannotSplit
from buoy.microbatch.exactness import TRIALS
from buoy.torch.exactness.samples import SAMPLES, trials_of
from buoy.torch.step.transaction import Transaction

WORDS = 30
Loss = Callable[[dict[str, torch.Tensor]], torch.Tensor]


def other_array(random_: random.Random, n: int, words: int) -> torch.Tensor:
    """What a batch may hold besides: columns of categories, texts, masks, numbers."""
    return random_.choice(
        [
            lambda: torch.randint(0, random_.choice([3, 8, 20]), (n,)),
            lambda: torch.rand(n) < random_.choice([0.05, 0.3]),
            lambda: torch.randint(0, WORDS, (n, words)),
            lambda: (torch.arange(words)[None] < torch.randint(1, words + 1, (n, 1))).long(),
            lambda: torch.rand(n),
            lambda: torch.zeros(n, words, dtype=torch.long),
            lambda: torch.randperm(n),
        ]
    )()


def share_of_each(kind: str, random_: random.Random, n: int, words: int) -> tuple[torch.Tensor, Loss]:
    """An array in which few samples differ, and how much each counts in the loss by it."""
    rare = torch.randperm(n)[: random_.choice([1, 2, max(1, n // 8)])]
    labels = torch.randint(0, 3, (n,))
    if kind in ("class weights", "one-hot"):
        labels = labels.clamp(max=1)
        labels[rare] = 2
        array = labels if kind == "class weights" else F.one_hot(labels, random_.choice([3, 12]))
        weights = torch.tensor([1.0, 1.5, 20.0])
        return array, lambda part: weights[part["y"] if part["y"].dim() == 1 else part["y"].argmax(1)]
    if kind == "ignored":
        ignored = labels[rare] = random_.choice([-100, -1, 255])
        return labels, lambda part: part["y"] != ignored
    if kind in ("mask", "weight"):
        mask = torch.ones(n)
        mask[rare] = 0.0 if kind == "mask" else 5.0
        mask = random_.choice([mask, mask[:, None]])
        return (mask.bool() if kind == "mask" else mask), lambda part: part["y"].reshape(len(part["y"]))
    if kind == "unknown":
        target = torch.randn(n, random_.choice([1, 3]))
        target[rare, 0] = float("nan")
        return target, lambda part: (~part["y"].isnan()).sum(1)
    padding = {"tokens": 0, "padded by the highest": WORDS, "mask of tokens": 0}[kind]
    texts = torch.randint(1, WORDS, (n, words))
    lengths = torch.full((n,), words)
    lengths[rare] = torch.randint(1, words, (len(rare),))
    texts[torch.arange(words)[None] >= lengths[:, None]] = padding
    if kind == "mask of tokens":
        texts = (texts != padding).to(random_.choice([torch.bool, torch.long, torch.float32]))
    return texts, lambda part: (part["y"] != padding).sum(1)


KINDS = ("class weights", "one-hot", "ignored", "mask", "weight", "unknown", "tokens", "padded by the highest",
         "mask of tokens")  # fmt: skip


def pair(seed: int) -> tuple[str, dict[str, torch.Tensor], Loss]:
    """A batch of 1 to 8 arrays, of which one decides how much a sample counts."""
    torch.manual_seed(seed)
    random_ = random.Random(seed)
    n, words, kind = (
        random_.choice([8, 12, 16, 32, 64, 128]),
        random_.choice([5, 9, 16]),
        random_.choice(KINDS),
    )
    deciding, share = share_of_each(kind, random_, n, words)
    names = [f"other {number}" for number in range(random_.randint(0, 7))]
    names.insert(random_.randint(0, len(names)), "y")
    batch = {name: deciding if name == "y" else other_array(random_, n, words) for name in names}
    batch = {"x": torch.randn(n, 4), **batch} if random_.random() < 0.5 else {**batch, "x": torch.randn(n, 4)}
    return kind, batch, share


def shows(few: Batch, share: Loss) -> bool:
    """Whether the weighted mean of these is another one than the mean of the parts' weighted means."""
    counts = share(few.value).double()  # type: ignore[arg-type]
    half = (few.samples + 1) // 2
    each = torch.cat([counts[:half] / counts[:half].sum() * half, torch.ones(few.samples - half)])
    return not torch.allclose(each / few.samples, counts / counts.sum())


def test_every_kind_of_unequal_share_is_shown_whatever_stands_beside_it() -> None:
    missed = []
    for seed in range(150):
        kind, batch, share = pair(seed)
        trials = trials_of(Batch(batch), SAMPLES)

        assert len(trials) <= TRIALS and all(few.samples == SAMPLES for few in trials)
        if not any(shows(few, share) for few in trials):
            missed.append((seed, kind))
    assert not missed


def backward(batch: Any, model: torch.nn.Module, loss: Any, **options: Any) -> None:
    transaction = Transaction(say=lambda text: None, event=lambda *a, **k: None, micro_batch=4)
    transaction.track([model], [])
    transaction.backward(batch, loss, **options)


@pytest.mark.parametrize("seed", range(4))
def test_a_rare_label_behind_padded_texts_is_seen(seed: int) -> None:
    """As in every batch of a text classifier: ids, types, mask, labels."""
    torch.manual_seed(seed)
    n, words = 32, 12
    mask = (torch.arange(words)[None] < torch.randint(4, words + 1, (n, 1))).long()
    labels = torch.zeros(n, dtype=torch.long)
    labels[torch.randperm(n)[:2]] = 1
    batch = {
        "ids": torch.randint(1, WORDS, (n, words)) * mask,
        "types": 0 * mask,
        "mask": mask,
        "labels": labels,
    }
    model = torch.nn.EmbeddingBag(WORDS, 2)

    with pytest.raises(CannotSplit, match="samples depend"):
        backward(batch, model, lambda part: F.cross_entropy(
            model(part["ids"]), part["labels"], torch.tensor([1.0, 10.0])))  # fmt: skip
    backward(batch, model, lambda part: F.cross_entropy(model(part["ids"]), part["labels"]))


def test_a_cut_of_the_persons_own_is_tried_where_neighbours_differ() -> None:
    """In a batch that is sorted by length the first samples are all as long."""
    torch.manual_seed(0)
    lengths = torch.tensor([10] * 20 + [5] * 12)
    texts = torch.randint(1, WORDS, (10, 32))
    texts[torch.arange(10)[:, None] >= lengths[None]] = 0
    model = torch.nn.Embedding(WORDS, WORDS)

    def mean(part: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model(part[:-1]).flatten(0, 1), part[1:].flatten(), ignore_index=0)

    def total(part: torch.Tensor) -> Any:
        logits = model(part[:-1]).flatten(0, 1)
        return F.cross_entropy(logits, part[1:].flatten(), ignore_index=0, reduction="sum"), (
            part[1:] > 0
        ).sum()

    split = (32, lambda start, stop: texts[:, start:stop])
    with pytest.raises(CannotSplit, match="samples depend"):
        backward(texts, model, mean, split=split)
    backward(texts, model, total, split=split)


def test_one_image_with_more_boxes_than_the_others_is_seen() -> None:
    torch.manual_seed(0)
    images, boxes = torch.randn(32, 4), [torch.rand(1, 4) for _ in range(32)]
    boxes[17] = torch.rand(3, 4)
    model = torch.nn.Linear(4, 4)

    def mean_over_boxes(part: Any) -> torch.Tensor:
        made = torch.cat([model(image).expand_as(box) for image, box in zip(*part, strict=True)])
        return (made - torch.cat(part[1])).square().mean()

    with pytest.raises(CannotSplit, match="samples depend"):
        backward((images, boxes), model, mean_over_boxes)


def test_a_box_on_the_border_of_a_cell_is_not_taken_for_rounding() -> None:
    """Moved by its last bit it lies in the next cell, and the gradient is another one by far more than rounding."""
    torch.manual_seed(0)
    images, places = torch.randn(12, 4), torch.tensor([[0.5], [0.25], [0.75]] * 4)
    boxes = [place.expand(1 + number % 2, 1) for number, place in enumerate(places)]
    model = torch.nn.Linear(4, 8)

    def mean_over_boxes(part: Any) -> torch.Tensor:
        made = model(part[0])
        cells = [made[number, (8 * each[:, 0]).long()] for number, each in enumerate(part[1])]
        return (torch.cat(cells) - 1).square().mean()

    with pytest.raises(CannotSplit, match="samples depend") as refusal:
        backward((images, boxes), model, mean_over_boxes)
    assert "(sum of the losses, how many)" in str(refusal.value.hint)


def test_class_numbers_held_as_floats_are_not_moved() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 8)
    boxes = [torch.tensor([[float(number % 8)]] * (1 + number % 2)) for number in range(12)]

    def loss(part: Any) -> torch.Tensor:
        made = model(part[0])
        chosen = [made[number, each[:, 0].long()] for number, each in enumerate(part[1])]
        return (torch.cat(chosen) - 1).square().mean()

    with pytest.raises(CannotSplit, match="samples depend"):
        backward((torch.randn(12, 4), boxes), model, loss)


def test_ignored_samples_are_not_taken_for_a_sum() -> None:
    """Where the last sample alone has no gradient, the others have that of all, as in a sum."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 3)
    x, mask = torch.randn(6, 4), torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 0.0])

    def loss(part: Any) -> torch.Tensor:
        return (model(part[0]).square().sum(1) * part[1]).sum() / part[1].sum().clamp(min=1)

    with pytest.raises(CannotSplit, match="samples depend"):
        backward((x, mask), model, loss)


@pytest.mark.parametrize("kind", ["margin", "hardest"])
def test_samples_that_count_by_what_is_computed_are_seen(kind: str) -> None:
    """One of ten misses the margin: six at random would mostly not show it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 1)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.bias.fill_(0.0)
    x = 0.6 + 0.1 * torch.rand(40, 3)
    x[5::10] -= 0.5

    def loss(part: torch.Tensor) -> torch.Tensor:
        each = torch.relu(1 - model(part)[:, 0]) if kind == "margin" else (model(part)[:, 0] - 2).square()
        counts = each > (0 if kind == "margin" else 0.5)
        return (each * counts).sum() / counts.sum().clamp(min=1)

    run = Transaction(say=lambda words: None, event=lambda *a, **k: None, micro_batch=15)
    run.track([model], [])
    with pytest.raises(CannotSplit):
        run.backward(x, loss)
    assert model.weight.grad is None


def test_a_few_samples_without_a_loss_are_not_taken_for_a_batch_without_one() -> None:
    model = torch.nn.Linear(3, 1)
    x = torch.rand(40, 3) + 1
    x[5] += 9
    counted = lambda part: model(part)[:, 0][part[:, 0] > 5].mean()  # noqa: E731

    run = Transaction(say=lambda words: None, event=lambda *a, **k: None, micro_batch=15)
    run.track([model], [])
    with pytest.raises(BadLoss, match="for a few samples of the batch") as caught:
        run.backward(x, counted)
    assert "return (sum of the losses, how many)" in (caught.value.hint or "")


@pytest.mark.parametrize(("missing", "first"), [(-1.0, 0), (-999.0, 0), (99.0, 0), (-1.0, 2)])
def test_a_number_that_stands_for_a_missing_one_is_seen_among_measurements(
    missing: float, first: int
) -> None:
    """In one sample of many, from the beginning or in a later batch; a mean over what is there is none over samples."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    transaction = Transaction(say=lambda words: None, event=lambda *a, **k: None, micro_batch=3)
    transaction.track([model], [])

    def loss(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        is_there = (part[1] > 0) & (part[1] < 50)
        return (model(part[0]) - part[1])[is_there].square().mean()

    batches = [(torch.randn(32, 5), torch.rand(32, 3) + 0.01) for _ in range(3)]
    batches[first][1][17, :2] = missing
    for batch in batches[:first]:
        transaction.backward(batch, loss)
    with pytest.raises(CannotSplit):
        transaction.backward(batches[first], loss)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("kind", ["hardest eight", "clipped", "without the largest"])
def test_losses_that_do_not_add_up_are_seen(kind: str, seed: int) -> None:
    """Six samples in a few parts show none of these, or only where the hardest comes late."""
    torch.manual_seed(seed)
    model = torch.nn.Linear(5, 3)

    def loss(part: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        each = F.cross_entropy(model(part[0]), part[1], reduction="none")
        if kind == "hardest eight":
            return each.topk(min(8, len(each))).values.mean()
        if kind == "clipped":
            return each.clamp(max=each.detach().quantile(0.95)).mean()
        return each.sort().values[: -(-9 * len(each) // 10)].mean()

    run = Transaction(say=lambda words: None, event=lambda *a, **k: None, micro_batch=4)
    run.track([model], [])
    with pytest.raises(CannotSplit, match="samples depend"):
        run.backward((torch.randn(32, 5), torch.randint(0, 3, (32,))), loss)
    assert model.weight.grad is None
