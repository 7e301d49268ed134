"""Steps are counted in scripts that know nothing of buoy."""

from __future__ import annotations

from pathlib import Path

from tests.processes import attempt, event, read, run_python


def where(folder: Path) -> dict[str, object]:
    return read(attempt(folder) / "verdict.json")["where"]  # type: ignore[no-any-return]


_TORCH = """
import torch
from torch.utils.data import DataLoader, TensorDataset
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = DataLoader(TensorDataset(torch.randn(70, 4)), batch_size=10)
for epoch in range(3):
    for (x,) in loader:
        model(x).sum().backward(); optimizer.step(); optimizer.zero_grad()
torch.save(model.state_dict(), SAVED)
raise KeyError("after training")
"""


def test_an_unmodified_torch_loop_is_counted_and_its_save_seen(tmp_path: Path) -> None:
    saved = str(tmp_path / "model.pt")
    run_python(tmp_path / "run", _TORCH.replace("SAVED", repr(saved)))

    assert where(tmp_path / "run")["step"] == 21
    save = event(tmp_path / "run", "save")
    assert save is not None and save["path"] == saved
    assert Path(saved).exists()


_GAN = """
import torch
a, b = (torch.nn.Linear(2, 2) for _ in range(2))
critic, generator = (torch.optim.SGD(m.parameters(), 0.1) for m in (a, b))
for step in range(10):
    generator.step()
    for _ in range(5): critic.step()
later = torch.optim.SGD(a.parameters(), 0.1)
for step in range(7): later.step()
import os; os._exit(1)
"""


def test_two_optimizers_count_as_one_training_and_a_new_one_takes_over(tmp_path: Path) -> None:
    run_python(tmp_path / "run", _GAN)

    step = where(tmp_path / "run")["step"]
    # The critic's 50 steps, then the later one's, give or take a hand-over.
    assert isinstance(step, int) and 50 <= step <= 57


_KERAS = """
import os
os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
import keras, numpy
model = keras.Sequential([keras.layers.Dense(1)])
model.compile("sgd", "mse", steps_per_execution=2)
model.fit(numpy.ones((64, 4)), numpy.ones(64), batch_size=8, epochs=3, verbose=0, validation_split=0.5)
os._exit(1)
"""


def test_an_unmodified_keras_fit_is_counted(tmp_path: Path) -> None:
    done = run_python(tmp_path / "run", _KERAS)

    assert done.returncode == 1, done.stderr
    place = where(tmp_path / "run")
    assert (place["step"], place["epoch"]) == (12, 2)
