"""What a build function may return: losses of either kind, sparse gradients, and what is refused in words."""

from __future__ import annotations

import json
import runpy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from buoy.estimate.child import EstimateError, Request, explain

torch = pytest.importorskip("torch")
from torch import nn  # noqa: E402

from buoy.estimate import devices  # noqa: E402
from buoy.estimate.result import estimate  # noqa: E402
from buoy.estimate.tracing import build as trace_build  # noqa: E402
from buoy.estimate.tracing.loss import EitherWay  # noqa: E402
from buoy.estimate.tracing.steps import trace_steps  # noqa: E402
from buoy.estimate.tracing.torch import trace_request  # noqa: E402

BATCH = (torch.zeros(4, 8, 10), torch.zeros(4, 8, dtype=torch.long))


def of_both(y_hat: Any, y: Any) -> Any:
    return nn.functional.cross_entropy(y_hat.flatten(0, 1), y.flatten())


def of_model(a: Any, b: Any) -> Any:
    return of_both(a(b[0]), b[1])


def of_nothing(a: Any, b: Any) -> Any:
    return a.nonsense(b)


def given(monkeypatch: pytest.MonkeyPatch, returned: Any) -> Any:
    monkeypatch.setattr(trace_build, "load", lambda path, name: lambda: returned)
    return trace_build._from_function("train.py:build", [])


@pytest.mark.parametrize("loss", [of_both, of_model, lambda p, t: of_both(p, t)])
def test_a_loss_is_called_the_way_that_works_whatever_its_parameters_are_called(loss: Any) -> None:
    model = nn.Linear(10, 10)

    chosen = EitherWay(loss).decided(model, BATCH)

    assert chosen(model, BATCH).shape == ()


def test_a_loss_that_works_in_no_way_is_told_with_what_it_was_given() -> None:
    with pytest.raises(EstimateError) as caught:
        EitherWay(of_nothing).decided(nn.Linear(10, 10), BATCH)

    assert "of_nothing(output, target)" in str(caught.value.received)
    assert "of_nothing(model, batch)" in str(caught.value.received)


def test_a_misspelt_name_is_not_replaced_by_an_assumption(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EstimateError) as caught:
        given(monkeypatch, {"model": nn.Linear(10, 10), "batch": BATCH, "optimiser": torch.optim.SGD})

    assert caught.value.received == "`optimiser`" and "`optimizer`" in str(caught.value.hint)


def make_sgd(weights: Any) -> Any:
    return torch.optim.SGD(weights, lr=0.1)


@pytest.mark.parametrize("optimizer", [make_sgd, partial(torch.optim.SGD, lr=0.1)])
@pytest.mark.parametrize("loss", [of_both, nn.CrossEntropyLoss()])
@pytest.mark.parametrize("loss_first", [False, True])
def test_a_function_that_makes_the_optimizer_is_not_replaced_by_an_assumption(
    monkeypatch: pytest.MonkeyPatch, optimizer: Any, loss: Any, loss_first: bool
) -> None:
    if loss_first and optimizer is make_sgd and loss is of_both:
        pytest.skip("two functions are told apart by their order")
    rest = (loss, optimizer) if loss_first else (optimizer, loss)

    job = given(monkeypatch, (nn.Linear(10, 10), BATCH, *rest))

    assert job.optimizer is optimizer and not any("assumed" in note for note in job.notes)


@pytest.mark.parametrize(
    ("rest", "what"),
    [
        (("adamw", of_both), "optimizer"),
        (([torch.optim.SGD], of_both), "optimizer"),
        ((torch.optim.SGD, torch.optim.Adam), "loss"),
        (("mse",), "loss"),
    ],
)
def test_what_is_no_optimizer_and_no_loss_is_refused(
    monkeypatch: pytest.MonkeyPatch, rest: Any, what: str
) -> None:
    with pytest.raises(EstimateError, match=f"the given {what} is not"):
        given(monkeypatch, (nn.Linear(10, 10), BATCH, *rest))


class Margin(nn.Module):
    """A loss with a weight for each class, as ArcFace has."""

    def __init__(self) -> None:
        super().__init__()
        self.classes = nn.Parameter(torch.zeros(50_000, 10))

    def forward(self, output: Any, target: Any) -> Any:
        return of_both(output @ self.classes.t(), target)


def by_teacher(teacher: nn.Module) -> Any:
    def distilled(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            wanted = teacher(batch[0])
        return nn.functional.mse_loss(model(batch[0]), wanted)

    return distilled


@pytest.mark.parametrize(
    ("make", "weights", "moments"),
    [
        (Margin, 500_000, 1_000_000),
        (lambda: partial(of_output_and_more, Margin()), 500_000, 1_000_000),
        (lambda: by_teacher(nn.Linear(10, 10)), 110, 0),
        (lambda: by_class(nn.CrossEntropyLoss(torch.ones(10))), 0, 0),
    ],
)
@pytest.mark.parametrize("device", ["t4", "cpu"])
@pytest.mark.parametrize("lazily", [True, False])
def test_what_a_loss_brings_along_is_on_the_device_and_counted(
    monkeypatch: pytest.MonkeyPatch, make: Any, weights: int, moments: int, device: str, lazily: bool
) -> None:
    def build() -> Any:
        return nn.Linear(10, 10), BATCH, torch.optim.AdamW, make()

    monkeypatch.setattr(trace_build, "load", lambda path, name: build)
    job = trace_build.build(Request("torch", {"build": "train.py:build"}), lazily=lazily)
    trace = trace_steps(job, devices.by_id(device))

    parts = estimate(trace, devices.by_id("t4")).parts
    assert trace.facts["parameters"] == 110 + weights
    assert parts["weights"] >= 4 * weights
    assert 4 * moments <= parts["optimizer"] <= 4 * moments + 8192
    assert any("weights of its own" in note for note in job.notes) is (weights > 0)


def by_class(weighted: nn.Module) -> Any:
    return lambda output, target: weighted(output.flatten(0, 1), target.flatten())


def of_output_and_more(margin: Any, output: Any, target: Any) -> Any:
    return margin(output, target)


def test_an_empty_batch_and_nothing_to_train_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(EstimateError, match="the batch is empty"):
        given(monkeypatch, (nn.Linear(10, 10), (torch.zeros(0, 10), torch.zeros(0, dtype=torch.long))))
    with pytest.raises(EstimateError, match="nothing to train"):
        given(monkeypatch, (nn.Linear(10, 10).requires_grad_(False), BATCH))


def test_sparse_gradients_are_counted_as_dense_and_said_so(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Embedding(100, 4, sparse=True))

    job = given(monkeypatch, (model, (torch.zeros(4, dtype=torch.long),), torch.optim.SparseAdam))

    assert not model[0].sparse and any("sparse gradients" in note for note in job.notes)
    assert not isinstance(job.optimizer([nn.Parameter(torch.zeros(1))]), torch.optim.SparseAdam)


def test_sequences_end_where_learned_positions_do() -> None:
    learned = nn.ModuleDict({"wpe": nn.Embedding(1024, 8)})
    config, notes = SimpleNamespace(max_position_embeddings=1024), list[str]()

    trace_build._must_have_positions(learned, config, 1024, notes)
    assert notes == []
    with pytest.raises(EstimateError, match="longer than the model has positions"):
        trace_build._must_have_positions(learned, config, 1025, notes)
    trace_build._must_have_positions(nn.Linear(2, 2), config, 1025, notes)
    assert "longer than" in notes[0], "positions that are computed go on"


SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "vocab_size": 99,
}


@pytest.mark.parametrize(
    ("config", "shapes"),
    [
        ({"model_type": "bert", "architectures": ["BertForSequenceClassification"], **SMALL}, "1x8 int64, 1 int64"),
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"], **SMALL}, "1x8 int64, 1x8 int64"),
        ({"model_type": "bert", "architectures": ["BertForQuestionAnswering"], **SMALL}, "1x8 int64, 1 int64, 1 int64"),
        ({"model_type": "vit", "architectures": ["ViTForImageClassification"], "image_size": 32, **SMALL},
         "1x3x32x32 float32, 1 int64"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "d_model": 32, "d_ff": 32,
          "num_layers": 1, "vocab_size": 99}, "1x8 int64, 1x8 int64"),
    ],
)  # fmt: skip
def test_a_config_is_planned_with_the_head_it_names(
    tmp_path: Path, config: dict[str, Any], shapes: str
) -> None:
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(config))

    job = trace_build.from_config(str(tmp_path / "config.json"), 8, [])

    assert [type(job.model).__name__] == config["architectures"]
    assert trace_build.shapes(job.batch) == shapes and job.loss(job.model, job.batch).shape == ()
    assert any(config["architectures"][0] in note for note in job.notes)


def test_a_config_without_a_loss_of_its_own_is_told_what_to_do(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path, notes = tmp_path / "config.json", list[str]()
    path.write_text(json.dumps({"model_type": "clip", "architectures": ["CLIPModel"]}))
    with pytest.raises(EstimateError, match="no training step is known") as caught:
        trace_build.from_config(str(path), 8, notes)
    path.write_text(json.dumps({"model_type": "bert", "architectures": ["BertModel"], **SMALL}))
    trace_build.from_config(str(path), 8, notes)

    assert "train.py:build" in str(caught.value.hint)
    assert "names BertModel, which has no loss" in notes[0], "a head that nobody asked for is said"


def test_the_line_that_raised_is_named_not_the_one_that_imported_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = tmp_path / "train.py"
    script.write_text("import bars_of_mine\n")
    (tmp_path / "bars_of_mine.py").write_text("import json\n\njson.loads('{')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ValueError, match="property name") as caught:
        runpy.run_path(str(script))

    refusal = explain(caught.value, Request("torch", {"build": f"{script}:"}))

    assert str(refusal.received).endswith("bars_of_mine.py:3")


def test_a_teacher_that_nobody_froze_gets_no_optimizer_state_in_real_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    teacher = nn.Linear(1000, 10)

    def distilled(model: Any, batch: Any) -> Any:
        with torch.no_grad():
            wanted = teacher(torch.ones(1, 1000))
        loss = (model(batch[0]) - wanted).square().mean()
        return loss * 2 if loss.item() > 1 else loss  # reads a value: computed for real

    monkeypatch.setattr(
        trace_build,
        "load",
        lambda path, name: lambda: (nn.Linear(10, 10), BATCH, torch.optim.AdamW, distilled),
    )
    trace = trace_request(Request("torch", {"build": "train.py:build"}, device="cpu"))

    assert trace.facts["engine"] == "real"
    assert trace.facts["parameters"] == 110 + 10_010
    assert estimate(trace, devices.by_id("cpu")).parts["optimizer"] < 4 * 10_010
