"""What a training changes about what it trains: parameters it freezes or unfreezes, groups it adds to an optimizer.

A script that starts again builds both as they were at first. The epoch in which it changed them is not done again.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

_COMPILED = "_orig_mod."
Names = list[tuple[str, str]]
"""Parameters, each by the name of its tracked module and its own name there."""


class Freezing:
    """Which parameters of a module are trained (`requires_grad`), as far as that was changed since it was tracked."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._at_first = {name: each.requires_grad for name, each in self.parameters().items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """By their names, as they are in a checkpoint."""
        return {name.replace(_COMPILED, ""): each for name, each in self._module.named_parameters()}

    def changed(self) -> dict[str, bool]:
        """Those that are trained and were frozen, or the other way."""
        found = {name: each.requires_grad for name, each in self.parameters().items()}
        return {name: flag for name, flag in found.items() if self._at_first.get(name, flag) != flag}

    def load(self, changed: Mapping[str, bool]) -> None:
        """Make each what it was; one that had not been changed is as the script has built it."""
        for name, parameter in self.parameters().items():
            wanted = changed.get(name, self._at_first.get(name, parameter.requires_grad))
            if parameter.requires_grad != wanted:
                parameter.requires_grad_(wanted)


class Groups:
    """The parameter groups of an optimizer that were added since it was tracked."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._built = len(optimizer.param_groups)

    def added(self, known: Mapping[int, tuple[str, str]]) -> list[Names] | None:
        """The parameters of each; None where one of them is in no tracked module, by which it could be found again."""
        groups = [
            [known.get(id(each)) for each in group["params"]]
            for group in self._optimizer.param_groups[self._built :]
        ]
        named = [[name for name in group if name is not None] for group in groups]
        return named if named == groups else None

    def lacks(self, added: list[Names]) -> bool:
        """The script has not added them (yet)."""
        return len(self._optimizer.param_groups) < self._built + len(added)

    def add(self, added: list[Names], parameters: Mapping[tuple[str, str], nn.Parameter]) -> None:
        """Add what the script has not; where a parameter is not there any more, loading says what differs."""
        for group in added[len(self._optimizer.param_groups) - self._built :]:
            names = [(module, name) for module, name in group]
            if any(name not in parameters for name in names):
                return
            self._optimizer.add_param_group({"params": [parameters[name] for name in names]})


def changes_of(things: Mapping[str, Any]) -> dict[str, Any]:
    """What was changed in tracked things, for the checkpoint."""
    freezing = {name: thing.freezing for name, thing in things.items() if hasattr(thing, "freezing")}
    known = {
        id(each): (module, name)
        for module, one in freezing.items()
        for name, each in one.parameters().items()
    }
    groups = {name: thing.groups.added(known) for name, thing in things.items() if hasattr(thing, "groups")}
    return {
        "frozen": {name: one.changed() for name, one in freezing.items()},
        "groups": {name: added for name, added in groups.items() if added},
    }


def lacking(things: Mapping[str, Any], changes: Mapping[str, Any]) -> set[str]:
    """The optimizers that have fewer groups than they were saved with, and will get them."""
    added = changes.get("groups", {})
    return {name for name, thing in things.items() if name in added and thing.groups.lacks(added[name])}


def add_groups(optimizers: Mapping[str, Any], modules: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Give these optimizers the groups that they lack, of the modules' parameters."""
    parameters = {
        (module, name): each
        for module, thing in modules.items()
        if hasattr(thing, "freezing")
        for name, each in thing.freezing.parameters().items()
    }
    for name in lacking(optimizers, changes):
        optimizers[name].groups.add(changes["groups"][name], parameters)


def freeze_as_saved(things: Mapping[str, Any], changes: Mapping[str, Any]) -> None:
    """Have each module train what it trained."""
    for name, changed in changes.get("frozen", {}).items():
        if name in things and hasattr(things[name], "freezing"):
            things[name].freezing.load(changed)
