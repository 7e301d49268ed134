"""Terminals, `timeout` and schedulers signal a training and its workers: the checkpoint must still be made."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import pytest

from buoy.checkpoint.store import Store
from tests.processes import wait_until

SCRIPT = """
import os, signal, sys, time
import torch
import buoy

class Slow(torch.utils.data.Dataset):
    def __init__(self, fails_at=None): self.fails_at = fails_at
    def __len__(self): return 4000
    def __getitem__(self, index):
        if index == self.fails_at:  # as a loader does whose workers were ended by the same signal
            os.kill(os.getpid(), signal.SIGINT)
            raise RuntimeError("DataLoader worker exited unexpectedly")
        time.sleep(0.01)  # the training mostly waits for its workers
        return torch.randn(4), torch.tensor(1.0)

def train(folder, loader):
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    with buoy.Run(folder) as run:
        run.track(model=model, optimizer=optimizer, loader=loader)
        for epoch in run.epochs(1):
            for x, y in run.batches(loader):
                (model(x).squeeze() - y).square().mean().backward()
                optimizer.step(); optimizer.zero_grad()
                print("step", run.step, flush=True)

if __name__ == "__main__":
    try:
        train(sys.argv[1] + "/failing", torch.utils.data.DataLoader(Slow(8), batch_size=4))
    except KeyboardInterrupt:
        print("interrupted", flush=True)
    train(sys.argv[1] + "/workers", torch.utils.data.DataLoader(Slow(), batch_size=4, num_workers=2))
"""


def test_ctrl_c_saves_whether_the_workers_live_through_it_or_take_the_loader_with_them(
    tmp_path: Path,
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    training = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    lines: list[str] = []
    assert training.stdout is not None
    while lines[-1:] != ["step 3"]:
        lines.append(training.stdout.readline().strip())
        assert training.poll() is None, training.communicate()
    os.killpg(training.pid, signal.SIGINT)
    out, err = training.communicate(timeout=400)

    assert lines == ["step 1", "step 2", "interrupted", "step 1", "step 2", "step 3"]
    (failing,) = Store(str(tmp_path / "failing")).list()
    assert failing.complete and (failing.step, failing.about["reason"]) == (2, "interrupt")
    (workers,) = Store(str(tmp_path / "workers")).list()
    assert workers.complete and workers.about["reason"] == "interrupt", err
    assert workers.step >= int((out.splitlines() or ["step 3"])[-1].split()[1])
    assert err.rstrip().endswith("KeyboardInterrupt")


HOLD = """
import os, time

def hold(lines=iter(range(1, 1 << 30))):  # whoever sends the signal may be slow: some lines later it is waited for
    if next(lines) == int(os.environ.get("SENT_AT") or -9) + 6:
        while not os.path.exists(os.environ["SENT"]): time.sleep(0.01)
"""

TRAINING = (
    HOLD
    + """
import hashlib, sys
import torch
torch.set_num_threads(1)
torch.manual_seed(3)
FOLDER, PERSISTENT, CONTEXT, EVALUATES = sys.argv[1], sys.argv[2] == "persistent", sys.argv[3], sys.argv[4:]

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 48
    def __getitem__(self, index):
        time.sleep(0.004)
        return torch.randn(16), torch.tensor(float(index % 5))

def loader(shuffle=False):
    return torch.utils.data.DataLoader(
        Rows(), batch_size=4, num_workers=2, shuffle=shuffle, persistent_workers=PERSISTENT,
        multiprocessing_context=CONTEXT,
    )

def layers():
    return torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Dropout(0.2), torch.nn.Linear(32, 1))

def tell(*words): print(*words, flush=True); hold()

def tell_weights(values):
    tell("weights", hashlib.sha256(b"".join(value.tobytes() for value in values)).hexdigest())
"""
)

OWN_LOOP = """
import buoy

if __name__ == "__main__":
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    run, train, held_out = buoy.Run(FOLDER), loader(shuffle=True), loader()
    run.track(model=model, optimizer=optimizer)
    for epoch in run.epochs(5):
        for x, y in run.batches(train):
            run.backward((x, y), lambda part: (model(part[0]).squeeze(-1) - part[1]).square().mean() / 2)
            if run.batch % 2 == 0:  # in between, the step that is under way needs another batch
                optimizer.step(); optimizer.zero_grad()
            tell("batch", run.batch, "step", run.step)
            if run.batch == 6 and EVALUATES:
                for number, _ in enumerate(held_out):  # a loader that buoy knows nothing of
                    tell("held out", number)
    run.finish()
    tell_weights(p.detach().numpy() for p in model.parameters())
"""

LIGHTNING = """
import lightning, buoy.lightning

class Model(lightning.LightningModule):
    def __init__(self): super().__init__(); self.layers = layers()
    def training_step(self, batch, number):
        tell("batch", number)
        return (self.layers(batch[0]).squeeze(-1) - batch[1]).square().mean()
    def validation_step(self, batch, number): tell("held out", number)
    def configure_optimizers(self): return torch.optim.AdamW(self.parameters(), 0.01)

if __name__ == "__main__":
    model, off = Model(), dict.fromkeys(("enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    lightning.Trainer(
        max_epochs=2, accumulate_grad_batches=2, val_check_interval=6, logger=False, accelerator="cpu",
        num_sanity_val_steps=0, callbacks=[buoy.lightning.Guard(FOLDER)], **off,
    ).fit(model, loader(shuffle=True), loader())
    tell_weights(p.detach().numpy() for p in model.parameters())
"""

TRANSFORMERS = """
import transformers, buoy.transformers

class Named(Rows):
    def __getitem__(self, index): return dict(zip(("x", "labels"), super().__getitem__(index)))

class Model(torch.nn.Module):
    def __init__(self): super().__init__(); self.layers = layers()
    def forward(self, x, labels):
        made = self.layers(x).squeeze(-1)
        return {"loss": (made - labels).square().mean(), "logits": made}

class Tell(transformers.TrainerCallback):
    def on_step_end(self, *_, **__): tell("step")
    def on_prediction_step(self, *_, **__): tell("held out")

if __name__ == "__main__":
    model = Model()
    arguments = transformers.TrainingArguments(
        FOLDER + "-theirs", num_train_epochs=2, per_device_train_batch_size=4, gradient_accumulation_steps=2,
        dataloader_num_workers=2, dataloader_persistent_workers=PERSISTENT, eval_strategy="steps", eval_steps=3,
        save_strategy="no", logging_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True,
    )
    transformers.Trainer(
        model, arguments, train_dataset=Named(), eval_dataset=Named(),
        callbacks=[buoy.transformers.Guard(FOLDER), Tell()],
    ).train()
    tell_weights(p.detach().numpy() for p in model.parameters())
"""

KERAS = (
    HOLD
    + """
os.environ.update(KERAS_BACKEND="tensorflow", TF_CPP_MIN_LOG_LEVEL="3", CUDA_VISIBLE_DEVICES="")
import hashlib, sys
import keras, numpy as np
import buoy.keras

class Rows(keras.utils.PyDataset):
    def __init__(self): super().__init__(workers=2, use_multiprocessing=True)
    def __len__(self): return 20
    def __getitem__(self, index):
        time.sleep(0.02)
        numbers = np.random.default_rng(index).normal(size=(4, 17)).astype("float32")
        return numbers[:, 1:], numbers[:, :1]

class Tell(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None): print("batch", batch, flush=True); hold()

if __name__ == "__main__":
    keras.utils.set_random_seed(0)
    layers = [keras.layers.Input((16,)), keras.layers.Dense(32), keras.layers.Dropout(0.1), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile("adam", "mse")
    model.fit(Rows(), epochs=2, verbose=0, callbacks=[Tell(), buoy.keras.Guard(sys.argv[1])])
    print("weights", hashlib.sha256(b"".join(value.tobytes() for value in model.get_weights())).hexdigest())
"""
)

SCRIPTS = {
    "loop": TRAINING + OWN_LOOP,
    "lightning": TRAINING + LIGHTNING,
    "transformers": TRAINING + TRANSFORMERS,
    "keras": KERAS,
}
Send = Callable[[int], object]


class Life:
    """One process of a training: its lines, and what it said, until it ended."""

    def __init__(self, kind: str, folder: Path, *options: str, send: Send | None = None, at: int = 0) -> None:
        """`send` is called with its pid when it has printed `at` lines."""
        script = folder.parent / f"train_{kind}.py"
        script.write_text(SCRIPTS[kind])
        command = [sys.executable, str(script), str(folder), *(options or ("new", "fork", "evaluates"))]
        errors, sent = folder.parent / "errors", folder.parent / "sent"
        sent.unlink(missing_ok=True)
        environment = {**os.environ, "SENT": str(sent), "SENT_AT": str(at or "")}
        with open(errors, "w") as file:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=file,
                text=True,
                start_new_session=True,
                env=environment,
            )
        assert process.stdout is not None
        self.lines: list[str] = []
        for line in process.stdout:
            self.lines.append(line.strip())
            if send is not None and len(self.lines) == at:
                time.sleep(random.random() * 0.02)
                send(process.pid)
                sent.touch()
        self.code, self.said = process.wait(), errors.read_text()

    @property
    def weights(self) -> str:
        assert self.code == 0 and self.lines[-1].startswith("weights"), self.said[-2000:]
        return self.lines[-1]


@contextmanager
def busy_machine() -> Iterator[None]:
    """Where the workers die before the training has come to the end of its step."""
    loads = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        yield
    finally:
        for load in loads:
            load.kill()
            load.wait()


def to_group(number: int) -> Send:
    return lambda pid: os.killpg(pid, number)


def children_of(pid: int) -> list[int]:
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True)
    return [int(word) for word in listed.stdout.split()]


def to_each(number: int) -> Send:
    """As SLURM does: process by process, wherever their groups are."""

    def send(pid: int) -> None:
        for each in [pid, *children_of(pid)]:
            try:
                os.kill(each, number)
            except ProcessLookupError:
                pass

    return send


def assert_saved(life: Life) -> None:
    assert re.search(r"buoy: step \d+ is saved", life.said), (life.lines[-3:], life.said[-2000:])
    assert "is killed by signal" not in life.said


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The weights of a training that nobody interrupts."""

    @cache
    def weights(kind: str, *options: str) -> str:
        return Life(kind, tmp_path_factory.mktemp(kind) / "run", *options).weights

    return weights


@pytest.mark.slow
@pytest.mark.parametrize("workers", ["new", "persistent"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_the_group_is_answered_with_a_checkpoint_each_time(
    tmp_path: Path, undisturbed: Callable[..., str], number: signal.Signals, workers: str
) -> None:
    """In the middle of an accumulation too, and while a loader that is not the run's own is read."""
    with busy_machine():
        for at in (3, 7, 12, 5):
            life = Life("loop", tmp_path / "run", workers, "fork", "evaluates", send=to_group(number), at=at)
            assert_saved(life)
            assert life.code == -number, life.said[-2000:]

    assert Life("loop", tmp_path / "run").weights == undisturbed("loop")


@pytest.mark.slow
@pytest.mark.parametrize(("workers", "context"), [("new", "fork"), ("persistent", "fork"), ("new", "spawn")])
def test_workers_that_the_signal_ends_are_replaced_until_the_step_is_done(
    tmp_path: Path, undisturbed: Callable[..., str], workers: str, context: str
) -> None:
    for at in (3, 5, 4):
        life = Life("loop", tmp_path / "run", workers, context, send=to_each(signal.SIGTERM), at=at)
        assert_saved(life)

    assert Life("loop", tmp_path / "run", "new", "fork").weights == undisturbed("loop", "new", "fork")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["lightning", "transformers", "keras"])
def test_the_guards_of_other_loops_answer_it_too(
    tmp_path: Path, undisturbed: Callable[..., str], kind: str
) -> None:
    """Also while they evaluate."""
    pytest.importorskip("tensorflow" if kind == "keras" else kind)
    for at in (3, 8):
        assert_saved(Life(kind, tmp_path / "run", send=to_group(signal.SIGTERM), at=at))

    assert Life(kind, tmp_path / "run").weights == undisturbed(kind)


def test_a_worker_that_dies_by_itself_ends_the_training_as_ever(tmp_path: Path) -> None:
    def kill_one(pid: int) -> None:
        worker = next(each for each in children_of(pid) if comm(each) == "pt_data_worker")
        os.kill(worker, signal.SIGKILL)

    life = Life("loop", tmp_path / "run", send=kill_one, at=3)

    # Which of the two PyTorch raises depends on whether the parent was reading from the worker.
    assert life.code == 1 and (
        "RuntimeError: DataLoader worker" in life.said or "ConnectionResetError" in life.said
    )
    assert "is saved" not in life.said


def comm(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def test_workers_end_with_a_training_whose_group_is_killed(tmp_path: Path) -> None:
    workers: list[int] = []

    def kill(pid: int) -> None:
        workers.extend(each for each in children_of(pid) if comm(each) == "pt_data_worker")
        os.killpg(pid, signal.SIGTERM)
        os.killpg(pid, signal.SIGKILL)  # as `timeout --kill-after` does

    life = Life("loop", tmp_path / "run", send=kill, at=3)

    assert life.code == -signal.SIGKILL and workers
    wait_until(lambda: not any(Path(f"/proc/{pid}/comm").exists() for pid in workers), "the workers to end")
