"""Which layers a callback has frozen or thawed in the middle of a training: no variable tells that."""

from __future__ import annotations

from typing import Any


class FrozenLayers:
    """The `trainable` of every layer, as far as the training changed what the script had set."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._of_script = self._in_step = _flags(model)
        self._step: Any = None

    def look(self) -> None:
        """Note what the training step is made with: until it is made anew, Keras trains what it trained before."""
        step = self._model.train_function
        if step is not None and step is not self._step:
            self._step, self._in_step = step, _flags(self._model)

    def state(self) -> list[bool]:
        """For the checkpoint: of each layer, in order; empty when all are as the script set them."""
        self.look()
        return [] if self._in_step == self._of_script else self._in_step

    def load(self, stored: list[bool]) -> None:
        """Freeze and thaw them as they were; a layer comes before those in it, which it takes along."""
        layers = list(self._model._flatten_layers())
        if len(stored) == len(layers):
            self._in_step = list(stored)
            for _ in layers:  # one that two models share is taken along by the later one too
                if _flags(self._model) == self._in_step:
                    break
                for layer, flag in zip(layers, stored, strict=True):
                    if bool(layer.trainable) != flag:
                        layer.trainable = flag


def _flags(model: Any) -> list[bool]:
    return [bool(layer.trainable) for layer in model._flatten_layers()]
