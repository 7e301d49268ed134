"""The same job under accelerate, Hugging Face's Trainer, Lightning and Composer; what they process, with which batch.

`python -m bench.recovery_peers` runs those that are installed; Composer wants a torch below 2.7.1, a Python of its own.
"""

from __future__ import annotations

import contextlib
import io
import logging
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

from buoy.testing import byte_budget


@dataclass
class Work:
    """Elements of input that went forward."""

    count: int = 0


@dataclass
class Job:
    """Batches to train on, and a device that is too small for some."""

    batches: list[tuple[torch.Tensor, torch.Tensor]]
    budget: int

    def __post_init__(self) -> None:
        self._arrays = [(x.numpy(), y.numpy()) for x, y in self.batches]

    @classmethod
    def too_big(cls) -> Job:
        """40 batches of 1024, of which about 400 samples fit."""
        source = torch.Generator().manual_seed(0)
        batches = [
            (torch.randn(1024, 1, 64, generator=source), torch.randn(1024, 8, generator=source))
            for _ in range(40)
        ]
        return cls(batches, cls.bytes_for(400, 1) + 4 * 1024 * 72)

    @classmethod
    def spike(cls) -> Job:
        """50 batches of 64 sequences; the 36th is four times as long as fits well."""
        source = torch.Generator().manual_seed(0)
        lengths = [8] * 35 + [32] + [8] * 14
        batches = [
            (torch.randn(64, length, 64, generator=source), torch.randn(64, 8, generator=source))
            for length in lengths
        ]
        return cls(batches, cls.bytes_for(64, 16) + 4 * 64 * 32 * 72)

    @classmethod
    def bytes_for(cls, samples: int, length: int) -> int:
        """What two plain steps with so many samples take at their worst."""
        model = cls.model()
        optimizer = torch.optim.AdamW(model.parameters())
        x, y = torch.randn(samples, length, 64), torch.randn(samples, 8)
        with byte_budget(1 << 40) as device:
            for _ in range(2):
                F.mse_loss(model(x), y).backward()
                optimizer.step()
                optimizer.zero_grad()
        # Copies while memory is short.
        return device.peak + 4 * sum(4 * p.numel() for p in model.parameters())

    @staticmethod
    def model() -> nn.Module:
        torch.manual_seed(0)
        return Model()

    @property
    def ideal(self) -> int:
        """Each element once."""
        return sum(x.numel() for x, _ in self.batches)

    @contextlib.contextmanager
    def counting(self, model: nn.Module) -> Iterator[Work]:
        """Count what goes forward."""
        work = Work()

        def count(module: nn.Module, inputs: Any, kwargs: Any) -> None:
            work.count += (inputs[0] if inputs else kwargs["x"]).numel()

        handle = model.register_forward_pre_hook(count, with_kwargs=True)
        yield work
        handle.remove()

    def on_device(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """One batch after the other: the budget counts what is there, and data wait elsewhere."""
        for x, y in self._arrays:
            yield torch.from_numpy(x.copy()), torch.from_numpy(y.copy())

    def samples(self) -> list[dict[str, Any]]:
        """The data as single samples outside of the device, for tools that make their own batches."""
        return [{"x": x[i], "labels": y[i]} for x, y in self._arrays for i in range(len(x))]

    @property
    def is_even(self) -> bool:
        """All samples are alike, so that other batches can be made of them."""
        return len({x.shape[1] for x, _ in self.batches}) == 1


class Model(nn.Module):
    """Over positions, then their mean: memory grows with samples times length."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 8))

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> Any:
        made = self.layers(x).mean(1)
        return made if labels is None else {"loss": F.mse_loss(made, labels), "logits": made}


def padded(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """One batch of samples of several lengths."""
    x = [torch.from_numpy(sample["x"]) for sample in samples]
    labels = torch.stack([torch.from_numpy(sample["labels"]) for sample in samples])
    return {"x": nn.utils.rnn.pad_sequence(x, batch_first=True), "labels": labels}


def accelerate(job: Job) -> dict[str, Any]:
    from accelerate.utils import find_executable_batch_size

    model = job.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    done: dict[str, Any] = {}

    @find_executable_batch_size(starting_batch_size=len(job.batches[0][0]))
    def train(batch_size: int) -> None:
        done.update(batch=batch_size, steps=0)
        for x, y in job.on_device():
            for start in range(0, len(x), batch_size):
                F.mse_loss(model(x[start : start + batch_size]), y[start : start + batch_size]).backward()
                optimizer.step()
                optimizer.zero_grad()
                done["steps"] += 1

    with job.counting(model) as work, byte_budget(job.budget):
        train()
    return {"work": work.count / job.ideal, **done}


def hugging_face(job: Job) -> dict[str, Any]:
    from transformers import Trainer, TrainingArguments

    class InOrder(Trainer):  # type: ignore[misc]
        """The batches of the job as long as the batch is the job's; others once it is smaller."""

        def _get_train_sampler(self, *arguments: Any) -> Any:
            return torch.utils.data.SequentialSampler(job.samples())  # type: ignore[arg-type]

    model = job.model()
    with tempfile.TemporaryDirectory() as folder, job.counting(model) as work:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=len(job.batches[0][0]), auto_find_batch_size=True, num_train_epochs=1,
            use_cpu=True, report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True,
        )  # fmt: skip
        trainer = InOrder(model=model, args=arguments, train_dataset=job.samples(), data_collator=padded)
        with byte_budget(job.budget + 2 * 4 * 1024 * 72):  # its own copy of a batch
            trainer.train()
        batch = trainer._train_batch_size
    return {"work": work.count / job.ideal, "steps": trainer.state.global_step, "batch": batch}


def lightning(job: Job) -> dict[str, Any]:
    import lightning as pl
    from lightning.pytorch.tuner import Tuner
    from torch.utils.data import DataLoader

    if not job.is_even:
        raise NotImplementedError("searches before training only")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()
            self.batch_size = 2

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return F.mse_loss(self.model(batch["x"]), batch["labels"])

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

        def train_dataloader(self) -> Any:
            return DataLoader(job.samples(), batch_size=min(self.batch_size, 1024))  # type: ignore[arg-type]

    module = Module()
    with tempfile.TemporaryDirectory() as home, job.counting(module.model) as work:
        trainer = pl.Trainer(max_epochs=1, accelerator="cpu", logger=False, enable_checkpointing=False,
                             enable_progress_bar=False, enable_model_summary=False, default_root_dir=home)  # fmt: skip
        with byte_budget(job.budget + 2 * 4 * 1024 * 72), contextlib.redirect_stdout(io.StringIO()):
            Tuner(trainer).scale_batch_size(module, mode="power", max_trials=12)
            trainer.fit(module)
    return {"work": work.count / job.ideal, "steps": trainer.global_step, "batch": module.batch_size}


def composer(job: Job) -> dict[str, Any]:
    from composer import Trainer
    from composer.models import ComposerModel

    class Wrapped(ComposerModel):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = job.model()

        def forward(self, batch: Any) -> torch.Tensor:
            return self.model(batch[0])  # type: ignore[no-any-return]

        def loss(self, outputs: torch.Tensor, batch: Any, *arguments: Any, **options: Any) -> torch.Tensor:
            return F.mse_loss(outputs, batch[1])

    class Batches:
        """A loader of the job's own batches, made one by one."""

        def __len__(self) -> int:
            return len(job.batches)

        def __iter__(self) -> Iterator[Any]:
            return job.on_device()

    wrapped = Wrapped()
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-3)
    trainer = Trainer(model=wrapped, optimizers=optimizer, train_dataloader=Batches(), max_duration="1ep", device="cpu",
                      device_train_microbatch_size=len(job.batches[0][0]), progress_bar=False)  # fmt: skip
    trainer.state.auto_microbatching = True  # which it refuses on a CPU, though it works
    # Composer makes a copy of each micro-batch, beside its loader's.
    with job.counting(wrapped.model) as work, byte_budget(job.budget + 2 * 4 * 1024 * 72):
        trainer.fit()
    steps = int(trainer.state.timestamp.batch)
    batch = f"{len(job.batches[0][0])}, {trainer.state.device_train_microbatch_size} at a time"
    trainer.close()
    return {"work": work.count / job.ideal, "steps": steps, "batch": batch}


PEERS = {"accelerate": accelerate, "Hugging Face": hugging_face, "Lightning": lightning, "Composer": composer}


def main() -> None:
    for kind, job in (("too big from the start", Job.too_big()), ("one long batch, late", Job.spike())):
        for name, train in PEERS.items():
            try:
                print(kind, name, train(job), sep="; ", flush=True)
            except Exception as error:  # noqa: BLE001 - what became of it is the result
                print(
                    kind,
                    name,
                    f"{type(error).__name__}: {str(error).splitlines()[0][:100]}",
                    sep="; ",
                    flush=True,
                )


if __name__ == "__main__":
    main()
