"""A step happens whole, with the batch that was asked for, or has not happened."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from buoy.errors import BuoyError, UsageError
from buoy.microbatch.errors import BadBatch, BadLoss, CannotSplit, OutOfMemory
from buoy.torch.step.gradient import Trained
from buoy.torch.step.snapshot import Rollback
from buoy.torch.step.transaction import Transaction

X, Y = torch.randn(10, 6), torch.randn(10, 4)


class Bench:
    """A model under a transaction, and all that it said."""

    def __init__(self, model: nn.Module | None = None, **options: Any) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.said: list[str] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.transaction = Transaction(
            say=self.said.append, event=lambda kind, **values: self.events.append((kind, values)), **options
        )
        self.transaction.track([self.model], [self.optimizer])

    def loss(self, part: Any) -> torch.Tensor:
        return F.mse_loss(self.model(part[0]), part[1])

    def backward(
        self, loss: Callable[[Any], Any] | None = None, batch: Any = (X, Y), **options: Any
    ) -> torch.Tensor:
        return self.transaction.backward(batch, loss or self.loss, **options)

    def state(self) -> list[torch.Tensor | None]:
        held = [*self.model.parameters(), *self.model.buffers()]
        grads = [parameter.grad for parameter in self.model.parameters()]
        return [None if t is None else t.detach().clone() for t in [*held, *grads, torch.get_rng_state()]]

    def fails_above(self, most: int) -> Callable[[Any], torch.Tensor]:
        def loss(part: Any) -> torch.Tensor:
            made = self.loss(part)
            if len(part[0]) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return made

        return loss


def same(one: list[torch.Tensor | None], other: list[torch.Tensor | None]) -> bool:
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(one, other, strict=True)
    )


def test_without_trouble_it_is_the_plain_loop_bit_for_bit() -> None:
    guarded, plain = Bench(), Bench()
    for _ in range(3):
        loss = guarded.backward()
        guarded.optimizer.step()
        guarded.optimizer.zero_grad()
        expected = plain.loss((X, Y))
        expected.backward()
        plain.optimizer.step()
        plain.optimizer.zero_grad()

        assert torch.equal(loss, expected.detach())
    assert same(guarded.state(), plain.state())
    assert not guarded.said


def test_running_out_of_memory_makes_the_parts_smaller_not_the_batch() -> None:
    bench, plain = Bench(), Bench()
    loss = bench.backward(bench.fails_above(5))
    expected = plain.loss((X, Y))
    expected.backward()

    assert torch.allclose(loss, expected, rtol=1e-6)
    for one, other in zip(bench.model.parameters(), plain.model.parameters(), strict=True):
        assert torch.allclose(one.grad, other.grad, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]
    assert bench.said == ["out of memory with 10 samples; retrying the step in micro-batches of 5"]
    assert ("retry", {"what": "oom", "step": 0, "samples": 10, "smaller": 5}) in bench.events


def test_the_size_that_failed_is_not_tried_at_the_next_step() -> None:
    bench = Bench()
    for _ in range(4):
        bench.backward(bench.fails_above(5))

    assert bench.transaction.retries == 1


def test_the_size_is_kept_with_the_checkpoint() -> None:
    bench = Bench()
    bench.backward(bench.fails_above(3))
    resumed = Bench()
    resumed.transaction.load_state_dict(bench.transaction.state_dict())
    resumed.backward(resumed.fails_above(3))

    assert not resumed.said
    assert resumed.transaction.steps == 2


def test_a_bound_that_was_given_anew_counts_more_than_the_log() -> None:
    bench = Bench(micro_batch=2)
    known = bench.transaction.state_dict()["sizer"]
    bench.transaction.replay([{"step": 5, "samples": 4, "sizer": known}])
    bench.backward()

    assert bench.transaction.sizes[0]["samples"] == 2


def test_when_one_sample_does_not_fit_the_error_says_what_owns_the_memory() -> None:
    bench = Bench()
    before = bench.state()
    with pytest.raises(OutOfMemory, match="do not fit") as caught:
        bench.backward(bench.fails_above(0))

    assert "parameters 368 B, gradients 368 B" in str(caught.value)
    assert "the largest layer is 0 with 224 B" in str(caught.value)
    assert isinstance(caught.value.__cause__, torch.OutOfMemoryError)
    assert same(bench.state(), before)
    assert len(bench.said) <= 6


def test_the_tensors_of_a_failed_try_are_freed_before_the_next() -> None:
    """Also those held by frames, and by a reference cycle."""
    import weakref

    bench = Bench()
    held: list[weakref.ref[Any]] = []
    alive_at_retry: list[int] = []

    def loss(part: Any) -> torch.Tensor:
        alive_at_retry.append(sum(ref() is not None for ref in held))
        activation = bench.model[0](part[0])
        cycle: list[Any] = [activation]
        cycle.append(cycle)
        if len(part[0]) > 5:
            held.append(weakref.ref(activation))
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return F.mse_loss(bench.model(part[0]), part[1])

    bench.backward(loss)

    assert held
    assert alive_at_retry[-1] == 0


def test_gradients_that_were_there_before_survive_a_failed_step_and_are_added_to() -> None:
    bench = Bench()
    bench.backward()
    first = [parameter.grad.clone() for parameter in bench.model.parameters()]  # type: ignore[union-attr]
    with pytest.raises(BadLoss):
        bench.backward(lambda part: bench.loss(part) * float("nan"))
    kept = [parameter.grad.clone() for parameter in bench.model.parameters()]  # type: ignore[union-attr]
    bench.backward(bench.fails_above(5))

    assert all(map(torch.equal, first, kept))
    for parameter, before in zip(bench.model.parameters(), first, strict=True):
        assert torch.allclose(parameter.grad, 2 * before, rtol=1e-5, atol=1e-7)  # type: ignore[arg-type]


def test_every_random_generator_is_put_back() -> None:
    import numpy as np

    bench = Bench()
    own = torch.Generator().manual_seed(1)
    bench.model.noise = own  # type: ignore[assignment]
    bench.transaction.track([bench.model], [])
    drawn: list[tuple[float, ...]] = []

    def loss(part: Any) -> torch.Tensor:
        numbers = (random.random(), float(np.random.rand()), float(torch.rand(())))
        drawn.append((*numbers, float(torch.rand((), generator=own))))
        made = bench.loss(part)
        if len(drawn) == 1:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return made

    bench.backward(loss, batch=(X[:1], Y[:1]))

    assert len(set(drawn)) == 1
    assert len(drawn) == 4, "two to see that the loss comes again, and the second try"


def test_a_step_that_draws_from_a_generator_of_a_tracked_module_is_split() -> None:
    """And one of no module is refused: nobody would restore it."""
    bench = Bench()
    own = torch.Generator().manual_seed(1)
    bench.model.noise = own  # type: ignore[assignment]
    bench.transaction.track([bench.model], [])

    def loss(part: Any, source: torch.Generator = own) -> torch.Tensor:
        if len(part[0]) > 4:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return bench.loss(part) * (1 + torch.rand((), generator=source))

    bench.backward(loss, batch=(X[:8], Y[:8]))
    with pytest.raises(CannotSplit, match=r"its own torch\.Generator"):
        bench.backward(lambda part: loss(part, torch.Generator()), batch=(X[:8], Y[:8]))


class Counting(nn.Module):
    """Makes a buffer during forward, and changes another in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 4)
        self.register_buffer("calls", torch.zeros(1))
        self.register_buffer("cache", None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.cache is None:
            self.cache = x.detach().mean(0)
        return self.inner(x)


def test_buffers_are_as_before_a_failed_step_even_new_ones() -> None:
    bench = Bench(Counting())
    with pytest.raises(KeyError):
        bench.backward(lambda part: {}[float(bench.loss(part))])

    assert bench.model.calls == 0
    assert bench.model.cache is None


def test_ctrl_c_while_a_computation_starts_over_restores_all_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    norm, trained = nn.BatchNorm1d(6), Trained()
    trained.add([norm])
    rollback = Rollback(trained)
    rollback.snapshot.watch([norm])
    rollback.begin(lambda part: part)
    before = norm.state_dict()["running_mean"].clone()
    restore, signals = rollback.snapshot.restore, [KeyboardInterrupt()]

    def interrupted() -> None:
        if signals:
            raise signals.pop()
        restore()

    monkeypatch.setattr(rollback.snapshot, "restore", interrupted)
    with pytest.raises(KeyboardInterrupt), rollback:
        norm(X + 5)
        rollback.start_over()

    assert torch.equal(norm.running_mean, before)  # type: ignore[arg-type]


def test_checkpointed_batch_statistics_count_once() -> None:
    from torch.utils.checkpoint import checkpoint

    norm = nn.BatchNorm1d(6)
    bench = Bench(nn.Sequential(norm, nn.Linear(6, 4)))
    bench.backward(
        lambda part: F.mse_loss(bench.model[1](checkpoint(norm, part[0], use_reentrant=False)), part[1])
    )

    assert norm.num_batches_tracked == 1
    assert torch.allclose(norm.running_mean, 0.1 * X.mean(0), atol=1e-6)  # type: ignore[arg-type]


def test_batch_norm_is_refused_in_words_only_when_it_must_be_cut() -> None:
    bench = Bench(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)))
    bench.backward()
    before = bench.state()
    with pytest.raises(CannotSplit, match="cannot be split") as caught:
        bench.backward(bench.fails_above(5))

    assert "1 is BatchNorm, which computes over all samples at once" in str(caught.value)
    assert 'inexact=("batchnorm",)' in (caught.value.hint or "")
    assert same(bench.state(), before)


def test_batch_norm_is_cut_where_that_is_asked_for() -> None:
    bench = Bench(
        nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4)), inexact="batchnorm", micro_batch=5
    )
    bench.backward()

    assert bench.model[1].num_batches_tracked == 2
    assert bench.model[1].training


def test_a_later_batch_that_cannot_be_cut_is_found_out() -> None:
    """The first batches have no padding: a mean over tokens looks like one over samples."""
    model = nn.Sequential(nn.Embedding(9, 6), nn.Linear(6, 9))
    bench = Bench(model, micro_batch=4)

    def loss(part: Any) -> torch.Tensor:
        return F.cross_entropy(model(part).flatten(0, 1), part.flatten(), ignore_index=0)

    full = torch.randint(1, 9, (8, 5))
    padded = full.clone()
    padded[3, 1:] = 0
    bench.backward(loss, batch=full)
    with pytest.raises(CannotSplit, match="would change the gradient") as caught:
        bench.backward(loss, batch=padded)

    assert "(sum of the losses, how many)" in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (lambda b, part: (b.model(part[0]) - part[1]).square(), "not one number"),
        (lambda b, part: b.loss(part).item(), "not a tensor"),
        (lambda b, part: b.loss(part).detach(), "does not depend on any parameter"),
        (lambda b, part: b.loss(part) * float("nan"), "NaN"),
        (lambda b, part: (b.loss(part), 1, 2), "tuple"),
        (lambda b, part: (b.loss(part), "ten"), "weight of the loss is not a number"),
        (lambda b, part: b.optimizer.step() or b.loss(part), "steps the optimizer"),
        (lambda b, part: [b.loss(part).backward(), b.loss(part)][1], "computed gradients itself"),
        (lambda b, part: F.mse_loss(b.model(part[0].mul_(2)), part[1]), "changed the batch in place"),
        (lambda b, part: b.transaction.backward(part, b.loss), "computes another step"),
    ],
)
def test_what_is_no_loss_is_said_in_words_and_nothing_has_happened(loss: Any, words: str) -> None:
    bench = Bench()
    before = bench.state()
    with pytest.raises(BadLoss, match=words) as caught:
        bench.backward(lambda part: loss(bench, part), batch=(X.clone(), Y))

    assert caught.value.received
    assert caught.value.expected
    assert same(bench.state(), before)


def test_an_unknown_reduction_is_an_error() -> None:
    with pytest.raises(BadLoss, match="unknown reduction"):
        Bench().backward(reduction="average")


def test_an_exception_in_the_third_of_five_parts_leaves_the_state_of_before() -> None:
    bench = Bench(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 4)), micro_batch=2)
    before = bench.state()

    def loss(part: Any) -> torch.Tensor:
        if torch.equal(part[0], X[4:6]):
            raise KeyError("label")
        return bench.loss(part)

    with pytest.raises(KeyError, match="label"):
        bench.backward(loss)

    assert same(bench.state(), before)


def test_ctrl_c_leaves_the_state_of_before() -> None:
    bench = Bench()
    before = bench.state()

    def loss(part: Any) -> torch.Tensor:
        bench.loss(part).backward()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        bench.backward(loss)

    assert same(bench.state(), before)


def test_what_only_sounds_like_an_oom_is_raised_as_it_is() -> None:
    bench = Bench()
    with pytest.raises(ValueError, match="CUDA out of memory"):
        bench.backward(lambda part: (_ for _ in ()).throw(ValueError("CUDA out of memory")))

    assert bench.transaction.retries == 0


def test_batches_of_one_and_of_none() -> None:
    bench = Bench()

    assert bench.backward(batch=(X[:1], Y[:1])).shape == ()
    with pytest.raises(BadBatch, match="empty"):
        bench.backward(batch=(X[:0], Y[:0]))


@pytest.mark.parametrize("options", [{"micro_batch": 0}, {"micro_batch": "8"}, {"inexact": ("dropout",)}])
def test_settings_that_cannot_be_are_refused_at_the_start(options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        Bench(**options)


def test_nothing_tracked_is_an_error_that_says_what_to_do() -> None:
    transaction = Transaction(say=lambda text: None, event=lambda *a, **k: None)
    with pytest.raises(BuoyError, match=r"buoy does not know what to train") as caught:
        transaction.backward(X, lambda part: part.sum())

    assert "run.track(" in (caught.value.expected or "")


def test_a_compiled_model_is_recovered() -> None:
    model = torch.compile(nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.2), nn.Linear(8, 4)), backend="eager")
    bench = Bench(model)  # type: ignore[arg-type]
    bench.backward(bench.fails_above(5))

    assert bench.said == ["out of memory with 10 samples; retrying the step in micro-batches of 5"]


def test_a_resumed_run_uses_the_sizes_of_the_log() -> None:
    bench = Bench()
    for most in (10, 5, 5):
        bench.backward(bench.fails_above(most))
    again = Bench()
    again.transaction.replay([*bench.transaction.sizes, {"step": 99, "samples": None}])
    seen: list[int] = []
    for _ in range(3):
        again.backward(lambda part: seen.append(len(part[0])) or again.loss(part))

    assert seen.count(10) == 1
    assert seen.count(5) == 4
    assert not again.said


def test_sharded_models_are_refused_in_words() -> None:
    class FullyShardedDataParallel(nn.Linear):
        pass

    with pytest.raises(CannotSplit, match="FSDP"):
        Bench(nn.Sequential(FullyShardedDataParallel(6, 4)))


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.GELU()) for _ in range(3)])
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def test_checkpointing_by_one_argument_gives_the_same_gradient_and_is_recorded() -> None:
    plain = Bench(Blocks())
    plain.backward()
    bench = Bench(Blocks(), remedies="checkpointing")
    bench.model.load_state_dict(plain.model.state_dict())
    forwards: list[int] = []
    bench.model.layers[0][0].register_forward_hook(lambda *a: forwards.append(1))
    bench.backward()

    assert ("remedy", {"name": "checkpointing", "blocks": 3}) in bench.events
    assert len(forwards) == 2
    for one, other in zip(plain.model.parameters(), bench.model.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)  # type: ignore[arg-type]


def test_mixed_precision_by_one_argument() -> None:
    bench = Bench(remedies=("amp",))
    dtypes: list[torch.dtype] = []
    bench.model[0].register_forward_hook(lambda module, inputs, output: dtypes.append(output.dtype))
    bench.backward()

    assert set(dtypes) == {torch.bfloat16}


def test_expandable_segments_by_one_argument(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "garbage_collection_threshold:0.8")
    Bench(remedies=("expandable_segments",))

    import os

    wanted = "garbage_collection_threshold:0.8,expandable_segments:True"
    assert os.environ["PYTORCH_CUDA_ALLOC_CONF"] == wanted


def test_remedies_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="unknown remedy"):
        Bench(remedies=("magic",))
    with pytest.raises(UsageError, match="no blocks"):
        Bench(nn.Linear(6, 4), remedies=("checkpointing",))
