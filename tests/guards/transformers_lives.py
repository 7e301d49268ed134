"""Hugging Face trainings for `tests.guards.lives`: tiny models from a configuration, made data, nothing downloaded."""

from __future__ import annotations

import os
import signal
import warnings
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.utils.data import Dataset, IterableDataset
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertForSequenceClassification,
    DataCollatorForLanguageModeling,
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)

from buoy.transformers import Guard
from tests.guards import lives
from tests.guards.lives import Stage, fingerprint

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


class Texts(Dataset[Any]):
    """Token sequences with padding of different lengths; each item is augmented with whatever random state there is."""

    def __init__(self, labels: str = "tokens", noisy: bool = True) -> None:
        self._labels, self._noisy = labels, noisy

    def __len__(self) -> int:
        return 26

    def __getitem__(self, index: int) -> Any:
        tokens = torch.randint(0, 50, (12,), generator=torch.Generator().manual_seed(index))
        if self._noisy:
            tokens[int(torch.randint(0, 12, (1,)))] = 3
        labels = tokens.clone()
        labels[12 - index % 7 :] = -100
        return {
            "input_ids": tokens,
            "labels": labels if self._labels == "tokens" else torch.tensor(index % 2),
        }


class Stream(IterableDataset[Any]):
    """The same, without a length."""

    def __iter__(self) -> Iterator[Any]:
        for index in range(26):
            yield Texts()[index]


class Watch(TrainerCallback):
    """Tells the stage what each step gave."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        rate = others["lr_scheduler"].get_last_lr()
        self._stage.log(state.global_step, fingerprint(others["model"].transformer.wte), rate, state.epoch)


def causal(dropout: float = 0.1) -> Any:
    """A tiny GPT-2, whose loss takes the number of tokens in the whole step."""
    drop = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            bos_token_id=1,
            eos_token_id=1,
            **drop,
        )
    )


def _bert(kind: Any) -> Any:
    return kind(
        BertConfig(
            vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32,
            max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        )
    )  # fmt: skip


def arguments(folder: str, **options: Any) -> TrainingArguments:
    """Nothing written, nothing shown."""
    standard = {
        "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "learning_rate": 1e-2, "use_cpu": True,
        "report_to": [], "disable_tqdm": True, "save_strategy": "no", "logging_steps": 3, "seed": 3,
    }  # fmt: skip
    return TrainingArguments(f"{folder}-hf", **{**standard, **options})


def _history(trainer: Any) -> list[dict[str, Any]]:
    times = ("runtime", "per_second", "train_loss", "total_flos")
    return [
        {name: value for name, value in entry.items() if not any(word in name for word in times)}
        for entry in trainer.state.log_history
    ]


def _end(stage: Stage, trainer: Any) -> None:
    states = trainer.optimizer.state_dict()["state"]
    moments = [float(torch.as_tensor(v).double().sum()) for state in states.values() for v in state.values()]
    stage.log("end", fingerprint(trainer.model), moments, _history(trainer), float(torch.rand(1)))


def everything(stage: Stage) -> None:
    """Dropout, augmentation in workers whose number changes, accumulation with a rest, evaluation.

    The Trainer saves too, brings its best model back, and is stopped early: only a whole count finds that step.
    """
    transformers.set_seed(3)
    args = arguments(
        stage.folder, num_train_epochs=3, eval_strategy="steps", eval_steps=3, lr_scheduler_type="cosine",
        warmup_steps=2, dataloader_num_workers=stage.life % 2 * 2, metric_for_best_model="eval_loss",
        save_strategy="steps", save_steps=3, load_best_model_at_end=True,
    )  # fmt: skip
    never_enough = EarlyStoppingCallback(2, early_stopping_threshold=99.0)
    callbacks = [Guard(stage.folder, save=1), never_enough, Watch(stage)]
    trainer = Trainer(
        causal(), args, train_dataset=Texts(), eval_dataset=Texts(noisy=False), callbacks=callbacks
    )
    trainer.train()
    state = trainer.state
    stage.log("own", state.global_step, state.best_global_step, state.stateful_callbacks)
    _end(stage, trainer)


def stream(stage: Stage) -> None:
    """Data without a length, more of it than one pass gives; micro-batches; bfloat16 autocast."""
    transformers.set_seed(3)
    args = arguments(stage.folder, max_steps=7, bf16=True, logging_steps=2)
    callbacks = [Guard(stage.folder, save=2, micro_batch=3), Watch(stage)]
    trainer = Trainer(causal(), args, train_dataset=Stream(), callbacks=callbacks)
    trainer.train()
    _end(stage, trainer)


def _masking() -> Any:
    words = {"[PAD]": 0, "[MASK]": 1, "[UNK]": 2, **{f"word{number}": number for number in range(3, 50)}}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="[UNK]")),
        pad_token="[PAD]",
        mask_token="[MASK]",
    )
    return DataCollatorForLanguageModeling(tokenizer, mlm_probability=0.3, seed=5)


def two_calls(stage: Stage) -> None:
    """`train` called twice: with layers frozen, then for more epochs; masks of a generator of their own."""
    transformers.set_seed(3)
    model = causal()
    model.transformer.h.requires_grad_(False)
    args = arguments(stage.folder, num_train_epochs=1, logging_steps=3)
    trainer = Counting(
        model, args, train_dataset=Texts(), data_collator=_masking(), callbacks=[Guard(stage.folder, save=1)]
    )
    trainer.add_callback(Watch(stage))
    trainer.train()
    args.num_train_epochs = 3
    trainer.add_callback(Unfreeze())
    trainer.train()
    _end(stage, trainer)


class Counting(Trainer):  # type: ignore[misc]
    """Counts tokens and collects what it logs in attributes of its own, as TRL's trainers do."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._metrics: dict[str, Any] = {"train": defaultdict(list)}
        self._tokens = 0

    def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **options: Any) -> Any:
        self._tokens += inputs["input_ids"].numel()
        self._metrics["train"]["entropy"].append(float(torch.rand(1)))
        return super().compute_loss(model, inputs, *arguments, **options)

    def log(self, logs: dict[str, float], *arguments: Any) -> None:
        seen = self._metrics["train"].pop("entropy", [])
        super().log({**logs, "entropy": sum(seen), "tokens": self._tokens}, *arguments)


class Unfreeze(TrainerCallback):
    """In the second epoch."""

    def on_epoch_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        if round(state.epoch) == 1:
            model.transformer.h.requires_grad_(True)


TRAININGS = {"everything": everything, "stream": stream, "two_calls": two_calls}


def _weights(model: Any) -> list[float]:
    return [float(value) for parameter in model.parameters() for value in parameter.detach().flatten()]


class Tight(TrainerCallback):
    """From the third step on more than three samples do not fit."""

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **others: Any) -> None:
        def refuse(module: Any, given: Any, options: Any, made: Any) -> None:
            if module.training and state.global_step >= 2 and len(options["input_ids"]) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

        model.register_forward_hook(refuse, with_kwargs=True)


class InOrder(Trainer):  # type: ignore[misc]
    """Without a shuffle, so that a training without a guard sees the same batches."""

    def _get_train_sampler(self, *arguments: Any) -> Any:
        return torch.utils.data.SequentialSampler(self.train_dataset)


def recovery(folder: str) -> Any:
    """A batch that stops to fit, for three kinds of losses, each beside a training in which it fits."""
    kinds = {
        "divided by the tokens of the step": (lambda: causal(0.0), "tokens"),
        "a mean over samples": (lambda: _bert(BertForSequenceClassification), "class"),
        "a mean over tokens": (lambda: _bert(BertForMaskedLM), "tokens"),
    }
    results = {}
    for number, (name, (build, labels)) in enumerate(kinds.items()):
        both = []
        for guards in ([], [Guard(f"{folder}-{number}"), Tight()]):
            torch.manual_seed(1)
            model = build().double()
            args = arguments(folder, num_train_epochs=2, logging_steps=1, optim="sgd")
            data = Texts(labels, noisy=False)
            trainer = InOrder(model, args, train_dataset=data, callbacks=guards)
            trainer.train()
            losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
            both.append({"weights": _weights(model), "losses": losses, "steps": trainer.state.global_step})
        results[name] = both
    return results


def _train(folder: str, *callbacks: Any, model: Any = None, **options: Any) -> Any:
    transformers.set_seed(3)
    args = arguments(folder, **{"num_train_epochs": 1, **options})
    trainer = Trainer(model or causal(), args, train_dataset=Texts(), callbacks=list(callbacks))
    return trainer, trainer.train()


class Steps(TrainerCallback):
    """Counts; sends a signal in the step that is named."""

    def __init__(self, signal_at: int | None = None) -> None:
        self.seen: list[int] = []
        self._signal_at = signal_at

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.seen.append(state.global_step)
        if state.global_step == self._signal_at:
            os.kill(os.getpid(), signal.SIGINT)


def interrupt(folder: str) -> Any:
    """Ctrl-C in its third step; then started again."""
    ended = "not at all"
    try:
        _train(folder, Guard(folder, save="10h"), Steps(2))
    except KeyboardInterrupt:
        ended = "KeyboardInterrupt"
    steps = Steps()
    _train(folder, Guard(folder, save="10h"), steps)
    return {
        "ended": ended,
        "steps": steps.seen,
        "handler": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
    }


def finished(folder: str) -> Any:
    """Trained three times: to its end, again, and for one more epoch."""
    counts, weights, losses = [], [], []
    for epochs in (1, 1, 2):
        steps = Steps()
        trainer, output = _train(folder, Guard(folder), steps, num_train_epochs=epochs)
        counts.append([len(steps.seen), trainer.state.global_step])
        weights.append(_weights(trainer.model))
        losses.append(output.training_loss)
    same = weights[0] == weights[1] and losses[0] == losses[1]
    return {"counts": counts, "same": same, "trained on": weights[1] != weights[2]}


def without(folder: str) -> Any:
    """A trainer without a guard, in a process that has made one."""
    Guard(folder)
    trainer, output = _train(folder, logging_steps=1)
    return {"steps": output.global_step, "loader": type(trainer.get_train_dataloader()).__name__}


def refusals(folder: str) -> Any:
    """What cannot be made safe, and in which words."""
    _train(folder, Guard(folder))
    smaller = GPT2LMHeadModel(GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2))
    tries = [
        lambda: _train(folder, Guard(folder), auto_find_batch_size=True),
        lambda: _train(folder, Guard(folder), model=smaller),
        lambda: _train(folder, Guard(folder), Guard(f"{folder}-2")),
    ]
    return [lives.refusal(attempt) for attempt in tries]


def two_processes(folder: str) -> Any:
    """DDP over gloo: what each rank is told."""

    def work(rank: int) -> str:
        return lives.refusal(lambda: _train(folder, Guard(folder), ddp_backend="gloo"))

    return lives.two_processes(folder, work)


def remedies(folder: str) -> Any:
    """Losses with and without checkpointing, and the precision in which the last layer computed."""
    made = []
    for number, given in enumerate(((), "checkpointing", ("amp",))):
        transformers.set_seed(3)
        model, seen = causal(dropout=0.0), []
        model.lm_head.register_forward_hook(lambda *args, seen=seen: seen.append(str(args[2].dtype)))
        _train(f"{folder}-{number}", Guard(f"{folder}-{number}", remedies=given), model=model)
        made.append([fingerprint(model), sorted(set(seen))])
    return made


CHECKS = {
    "remedies": remedies,
    "two_processes": two_processes,
    "recovery": recovery,
    "interrupt": interrupt,
    "finished": finished,
    "without": without,
    "refusals": refusals,
}
