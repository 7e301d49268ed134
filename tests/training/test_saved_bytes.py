"""What is kept for the backward pass, by module: the bytes that there are, each once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")
nn = torch.nn
BATCH = 8


class Attention(nn.Module):  # type: ignore[misc,name-defined]
    """Queries, keys and values of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.attention(x, x, x, need_weights=False)[0]


class Last(nn.Module):  # type: ignore[misc,name-defined]
    """The state of an LSTM after the last step."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(16, 32, num_layers=2, batch_first=True)

    def forward(self, x: Any) -> Any:
        return self.lstm(x)[0][:, -1]


MODELS: dict[str, tuple[Callable[[], Any], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(512, 512), nn.Linear(512, 512)), (BATCH, 512)),
    "shared": (lambda: nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), (BATCH, 64)),
    "convolution": (
        lambda: nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(288, 4)
        ),
        (BATCH, 3, 14, 14),
    ),
    "attention": (Attention, (BATCH, 12, 64)),
    "lstm": (Last, (BATCH, 10, 16)),
}


def profiled(model: Any, train: Callable[[], None]) -> dict[str, int]:
    """By module, as a profile of this one step tells it."""
    from buoy.torch.profile import Profile

    profile = Profile(None, [model], [torch.optim.SGD(model.parameters(), lr=0.1)])
    profile.prepare()
    profile.begin(lambda: None, lambda: None)
    train()
    profile.whole_step()
    profile.stop()
    return profile._saved.at_peak()


def truth(model: Any, train: Callable[[], None]) -> int:
    """Bytes of all storages that autograd is given to keep, without those of the model itself."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda t: t):
        train()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for address, size in storages.items() if address not in own)


@pytest.mark.parametrize("name", MODELS)
def test_the_modules_together_keep_what_autograd_keeps(name: str) -> None:
    build, shape = MODELS[name]
    model, x = build(), torch.randn(shape)

    def train() -> None:
        model(x).square().mean().backward()

    told = profiled(model, train)
    expected = truth(model, train)

    assert sum(told.values()) == expected
    assert all(size > 0 for size in told.values())


def test_a_block_is_told_for_the_module_that_had_it_kept_first() -> None:
    model = MODELS["shared"][0]()
    x = torch.randn(BATCH, 64)
    told = profiled(model, lambda: model(x).sum().backward())
    block = BATCH * 64 * 4

    assert told == {"0 (Linear)": block, "1 (ReLU)": block}  # the second Linear keeps what the ReLU made


def test_a_batch_that_is_a_slice_does_not_stand_for_all_the_data() -> None:
    model, data = nn.Linear(64, 64), torch.randn(1000, 64)

    told = profiled(model, lambda: model(data[:BATCH]).sum().backward())

    assert told == {"Linear's own forward": BATCH * 64 * 4}


def test_what_two_forwards_keep_adds_up_until_a_backward_lets_it_go() -> None:
    model = nn.Linear(64, 64)
    block = BATCH * 64 * 4

    def one_by_one() -> None:
        for _ in range(2):
            model(torch.randn(BATCH, 64)).sum().backward()

    def together() -> None:
        (model(torch.randn(BATCH, 64)) + model(torch.randn(BATCH, 64))).sum().backward()

    assert profiled(model, one_by_one) == {"Linear's own forward": block}
    assert profiled(model, together) == {"Linear's own forward": 2 * block}


def test_a_part_that_is_computed_again_is_time_of_the_backward_pass_only() -> None:
    from torch.utils.checkpoint import checkpoint

    from buoy.torch.profile import Profile

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    profile = Profile(None, [model], [])
    profile.prepare()
    profile.begin(lambda: None, lambda: None)
    out = checkpoint(model, torch.randn(BATCH, 64, requires_grad=True), use_reentrant=False)
    before = profile._spent["forward"]
    out.sum().backward()
    profile.whole_step()
    profile.stop()

    assert profile._spent["forward"] == before > 0
    assert profile._spent["backward"] > 0
