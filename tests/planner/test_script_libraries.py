"""What a script asks of PyTorch and the libraries on it that only a GPU grants: planned as asked, on a CPU too."""

from __future__ import annotations

from pathlib import Path

import pytest

from buoy.estimate.child import EstimateError
from tests.planner.test_scripts import planned

torch = pytest.importorskip("torch")

from buoy.torch.plan import script as first_step  # noqa: E402

PLAIN = """
import torch
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters())
CONTEXT
with context:
    loss = model(torch.randn(32, 64)).pow(2).mean()
loss.backward()
optimizer.step()
"""

ACCUMULATED = """
import weakref, torch
model = torch.nn.Linear(64, 10)
optimizer = torch.optim.AdamW(model.parameters())
made, right = [], 0
for micro in range(6):
    out = model(torch.randn(32, 64))
    made.append(weakref.ref(out))
    right += (out.argmax(1) == 1).sum()
    (out.pow(2).mean() / 6).backward()
del out
held = len([each for each in made if each() is not None])
assert held == 1, held
optimizer.step()
"""

# Two heads on one body: its graph is kept, and the last loss needs it.
SHARED = """
import torch
body, heads = torch.nn.Linear(64, 32), [torch.nn.Linear(32, 10) for _ in range(3)]
optimizer = torch.optim.AdamW([p for module in (body, *heads) for p in module.parameters()])
features = body(torch.randn(32, 64))
losses = [head(features).pow(2).mean() for head in heads]
for loss in losses:
    loss.backward(retain_graph=loss is not losses[-1])
optimizer.step()
"""

# It changes the weights before it calls the closure: a part of its own step.
SAM = """
import torch
class SAM(torch.optim.AdamW):
    @torch.no_grad()
    def step(self, closure):
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.add_(parameter.grad * 0.1)
        with torch.enable_grad():
            closure()
        super().step()
model = torch.nn.Linear(64, 10)
optimizer = SAM(model.parameters())
def closure():
    loss = model(torch.randn(32, 64)).pow(2).mean()
    loss.backward()
    return loss
closure()
optimizer.step(closure)
"""

TRAINER = """
import torch
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments
config = BertConfig(vocab_size=100, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=64)
sample = {"input_ids": torch.zeros(16, dtype=torch.long), "labels": torch.tensor(0)}
arguments = TrainingArguments("out", per_device_train_batch_size=8, tf32=True, report_to=[], PRECISION)
Trainer(BertForSequenceClassification(config), arguments, train_dataset=[sample] * 32).train()
"""

LIGHTNING = """
import torch, lightning
class Lit(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(64, 10)
    def training_step(self, batch, index):
        return self.layer(batch).pow(2).mean()
    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters())
loader = torch.utils.data.DataLoader(torch.randn(256, 64), batch_size=32)
lightning.Trainer(accelerator="gpu", devices=DEVICES, precision="16-mixed", accumulate_grad_batches=4, logger=False,
                  enable_checkpointing=False, max_epochs=1).fit(Lit(), loader)
"""


def found_in(script: str, folder: Path) -> dict[str, object]:
    path = folder / "train.py"
    path.write_text(script)
    return first_step.run(str(path), [], 60.0)


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ("torch.autocast('cuda', dtype=torch.float16)", "fp16"),
        ("torch.autocast('cuda', torch.bfloat16, True, None)", "bf16"),
        ("torch.autocast('cuda', dtype=torch.float16, enabled=False)", None),
        ("torch.amp.autocast('cuda', enabled=None is not None)", None),
    ],
)
def test_mixed_precision_that_the_script_turns_off_is_not_planned(
    context: str, expected: str | None, tmp_path: Path
) -> None:
    found = found_in(PLAIN.replace("CONTEXT", f"context = {context}"), tmp_path)

    assert found["autocast"] == expected


def test_mixed_precision_around_a_models_own_forward_is_found(tmp_path: Path) -> None:
    wrap = "import contextlib; context = contextlib.nullcontext()\n"
    wrap += "model.forward = torch.autocast('cpu', dtype=torch.bfloat16)(model.forward)"

    assert found_in(PLAIN.replace("CONTEXT", wrap), tmp_path)["autocast"] == "bf16"


def test_a_line_that_the_model_computes_without_it_takes_nothing_of_the_scripts_precision(
    tmp_path: Path,
) -> None:
    inner = "context = torch.autocast('cuda', dtype=torch.bfloat16)\n"
    inner += "class Model(torch.nn.Linear):\n    def forward(self, x):\n"
    inner += "        with torch.autocast('cuda', enabled=False):\n            return super().forward(x)\n"
    inner += "model.__class__ = Model"

    assert found_in(PLAIN.replace("CONTEXT", inner), tmp_path)["autocast"] == "bf16"


def test_an_optimizer_that_changes_weights_before_its_closure_is_the_optimizer(tmp_path: Path) -> None:
    found_in(SAM, tmp_path)

    assert type(first_step.build()["optimizer"]).__name__ == "SAM"


def test_accumulated_batches_are_not_all_held_in_host_ram(tmp_path: Path) -> None:
    assert found_in(ACCUMULATED, tmp_path)["accumulate"] == 6


def test_losses_that_share_a_kept_graph_are_planned_with_what_they_share(tmp_path: Path) -> None:
    found_in(SHARED, tmp_path)

    model = first_step.build()["model"]
    assert sum(p.numel() for p in model.parameters()) >= 64 * 32 + 32 + 32 * 10 + 10


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_the_trainers_mixed_precision_is_planned_without_a_gpu(precision: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    answer, _ = planned(TRAINER.replace("PRECISION", f"{precision}=True"), tmp_path, "--no-remedies")

    assert answer["facts"]["autocast"] == precision and answer["batch"] == 8  # type: ignore[index]


def test_a_lightning_trainer_on_a_gpu_is_planned_without_one(tmp_path: Path) -> None:
    pytest.importorskip("lightning")

    answer, _ = planned(LIGHTNING.replace("DEVICES", "1"), tmp_path, "--no-remedies")

    facts = answer["facts"]
    assert facts["autocast"] == "fp16" and facts["accumulate"] == 4  # type: ignore[index]


@pytest.mark.parametrize("devices", ["2", "'2'", "[0, 1]", "'0,1'"])
def test_a_lightning_trainer_on_several_gpus_is_refused_with_the_way_to_plan_it(
    devices: str, tmp_path: Path
) -> None:
    pytest.importorskip("lightning")

    with pytest.raises(EstimateError, match="does not train on one GPU"):
        found_in(LIGHTNING.replace("DEVICES", devices), tmp_path)
