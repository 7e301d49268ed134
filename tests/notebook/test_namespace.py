"""Which of a notebook's names `%buoy plan` takes, and what it asks where it cannot tell."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from buoy.errors import UsageError
from buoy.notebook.namespace import find


def loader(**options: Any) -> DataLoader[Any]:
    data = TensorDataset(torch.arange(40.0).reshape(20, 2), torch.arange(20))
    return DataLoader(data, batch_size=8, **options)


def test_a_training_is_found_by_what_its_names_hold_and_said() -> None:
    net = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2))
    criterion = nn.CrossEntropyLoss()
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    held = {
        "net": net, "same": net, "head": net[1], "criterion": criterion, "opt": opt, "_": nn.Linear(9, 9),
        "train_loader": loader(shuffle=True), "test_loader": loader(), "epochs": 3,
    }  # fmt: skip

    found = find(held, {})

    assert (found.model, found.optimizer, found.loss) == (net, opt, criterion)
    assert [tuple(part.shape) for part in found.batch] == [(8, 2), (8,)]
    assert found.words == [
        "model `net`",
        "one batch of `train_loader`",
        "optimizer `opt`",
        "loss `criterion`",
    ]


def test_a_loaders_batch_takes_no_random_number_and_nothing_from_the_loader() -> None:
    class Noisy(TensorDataset):
        def __getitem__(self, index: int) -> Any:
            return super().__getitem__(index)[0] + torch.rand(1)

    held = {
        "net": nn.Linear(2, 2),
        "noisy": DataLoader(Noisy(torch.zeros(20, 2)), batch_size=4, shuffle=True, num_workers=2),
    }
    before = torch.get_rng_state()

    batch = find(held, {}).batch

    assert batch.shape == (4, 2) and batch.any()  # the data set's own code made it
    assert torch.equal(torch.get_rng_state(), before)


def test_names_that_were_given_come_first_and_the_rest_is_found() -> None:
    student, teacher = nn.Linear(2, 3), nn.Linear(2, 3)
    images, labels = torch.zeros(5, 2), torch.zeros(5, dtype=torch.long)
    held = {"student": student, "teacher": teacher, "loader": loader(), "loss_fn": nn.MSELoss()}

    found = find(held, {"teacher": teacher, "images,labels": (images, labels)})

    assert found.model is teacher
    assert found.batch[0] is images
    assert found.words[:2] == ["model `teacher`", "batch `images,labels`"]
    assert found.words[-1] == "loss `loss_fn`"


def test_of_two_models_the_one_that_the_only_optimizer_trains_is_meant() -> None:
    student, teacher = nn.Linear(2, 3), nn.Linear(2, 3)
    held = {
        "teacher": teacher, "student": student, "batch": torch.zeros(5, 2),
        "optimizer": torch.optim.Adam(student.parameters()),
    }  # fmt: skip

    assert find(held, {}).model is student


def test_what_is_assumed_is_said() -> None:
    def loss_fn(part: Any) -> Any:  # what run.backward takes: of no use to a plan
        return part

    words = find({"net": nn.Linear(2, 2), "batch": torch.zeros(5, 2), "loss_fn": loss_fn}, {}).words

    assert "AdamW (assumed: no optimizer of this model was found)" in words
    assert "the model's own loss or cross-entropy (assumed: no loss was found)" in words


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        raise AssertionError("the user's data must not be used up")


@pytest.mark.parametrize(
    ("held", "asked"),
    [
        ({}, "no model in this notebook yet"),
        ({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)}, "more than one model"),
        ({"net": nn.Linear(1, 1)}, "a model alone is not enough"),
        ({"net": nn.Linear(1, 1), "one": loader(), "two": loader()}, "more than one loader"),
        ({"net": nn.Linear(1, 1), "data": DataLoader(Stream(), batch_size=2)}, "without taking one"),
    ],
)
def test_where_it_cannot_tell_it_asks(held: dict[str, Any], asked: str) -> None:
    with pytest.raises(UsageError, match=asked):
        find(held, {})
