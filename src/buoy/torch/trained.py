"""The parameters of a training, and which of them get a gradient now: layers are frozen and thawed on the way."""

from __future__ import annotations

from collections.abc import Iterable
from weakref import ref

import torch


class Trained:
    """Of some modules and optimizers. Modules are walked once; afterwards only flags are read."""

    def __init__(self) -> None:
        self.all: list[torch.Tensor] = []
        """Frozen ones too: whatever thaws them, also a loss function, their gradients are guarded."""
        self.now: list[torch.Tensor] = []
        """Those that require a gradient, as of the last `look`; always the same list."""
        self.gradient_bytes = 0
        """What the gradients of these take."""
        self._known: set[int] = set()
        self._passing: list[ref[torch.Tensor]] = []
        self._flags: list[bool] = []
        self._optimizers: list[torch.optim.Optimizer] = []
        self._groups = 0

    @property
    def first(self) -> torch.Tensor:
        """The one whose device counts."""
        return (self.now or self.all)[0]

    def add(
        self, modules: Iterable[torch.nn.Module], optimizers: Iterable[torch.optim.Optimizer] = ()
    ) -> None:
        """These are trained too."""
        self._optimizers += optimizers
        self._append(parameter for module in modules for parameter in module.parameters())
        self.look()

    def also(self, beside: Iterable[torch.Tensor]) -> None:
        """These get a gradient too, though nobody tracked them; `look` tells."""
        leaves = list(beside)
        self._append(leaf for leaf in leaves if isinstance(leaf, torch.nn.Parameter))
        self._passing += [ref(leaf) for leaf in leaves if not isinstance(leaf, torch.nn.Parameter)]

    @property
    def guarded(self) -> list[torch.Tensor]:
        """All of them, and other tensors that get a gradient, as long as somebody has them: most live for a step."""
        if not self._passing:
            return self.all
        self._passing = [known for known in self._passing if known() is not None]
        return self.all + [leaf for known in self._passing if (leaf := known()) is not None]

    def look(self) -> bool:
        """What is trained now; whether that has changed. To be asked at each step."""
        groups = sum([len(optimizer.param_groups) for optimizer in self._optimizers])
        if groups != self._groups:
            self._groups = groups
            self._append(p for o in self._optimizers for group in o.param_groups for p in group["params"])
        flags = [parameter.requires_grad for parameter in self.all]
        if flags == self._flags:
            return False
        self._flags = flags
        self.now[:] = [parameter for parameter in self.all if parameter.requires_grad]
        self.gradient_bytes = sum(parameter.numel() * parameter.element_size() for parameter in self.now)
        return True

    def _append(self, parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            if id(parameter) not in self._known:
                self._known.add(id(parameter))
                self.all.append(parameter)
