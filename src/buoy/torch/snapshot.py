"""What a failed try must put back: generators, buffers, gradients, and the weights that computing a loss changes."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import SyncBatchNorm, _BatchNorm, _NormBase

from buoy.torch.rng import device_generators
from buoy.torch.unmoved import places

_MERSENNE_BYTES = 2500  # 624 words and a position

Restore = Callable[[], object]


class Snapshot:
    """The buffers of some modules and every generator in sight, copied into memory that is kept for the next time."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._roots: list[torch.nn.Module] = []
        self._homes: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._versions: list[int] | None = None
        self._weights: dict[int, torch.Tensor] = {}
        self._statistics: list[torch.Tensor] = []
        self._statistics_copies: list[torch.Tensor] = []
        self._statistics_versions: list[int] | None = None
        self._tells = True
        """Whether each of these counts its batches, by which a pass shows: `F.batch_norm` alone leaves no mark."""
        self._generators: list[torch.Generator] = []
        self._count = -1
        self._numpy = _Numpy()
        self._restore_random: list[Restore] = []
        self.taken = False

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """The modules whose buffers count."""
        for module in modules:
            self._roots.append(module)
            for part in module.modules():
                self._modules.append(part)
                self._generators += [v for v in vars(part).values() if isinstance(v, torch.Generator)]

    def keep(self, names: Iterable[str]) -> None:
        """From now on these parameters too: a teacher that follows inside the loss function."""
        homes = places(self._roots, "_parameters")
        for part, name in [homes[label] for label in names if label in homes]:
            parameter = part._parameters[name]
            if parameter is not None:
                self._weights[id(parameter)] = parameter
        self._count = -1  # to be found anew

    def take(self) -> None:
        """Copy what a try may change."""
        self.taken = False
        if self._changed():
            self._find_buffers()
        _copy(self._copies, self._buffers)
        self._versions = _versions(self._buffers)
        self._restore_random = [
            *_random_states(),
            *self._numpy.state(),
            *map(_generator_state, self._generators),
        ]
        self.taken = True

    def restore(self) -> None:
        """Everything as it was when it was taken."""
        if not self.taken:
            return
        known = {(id(home), name) for home, name in self._homes}
        for module in self._modules:  # a buffer made by the failed try goes
            for name in [name for name in module._buffers if (id(module._buffers), name) not in known]:
                module._buffers[name] = None
        # Weights stand behind the buffers, and have no such home.
        for (home, name), buffer in zip(self._homes, self._buffers, strict=False):
            home[name] = buffer
        _copy(self._buffers, self._copies)
        _set_versions(self._buffers, self._versions)
        for restore in self._restore_random:
            restore()

    def replaced(self) -> frozenset[int]:
        """The modules, by id, that have other buffers than when it was taken: made, or made anew."""
        if not self.taken:
            return frozenset()
        pairs = zip(self._homes, self._buffers, strict=False)
        before = {(id(home), name): buffer for (home, name), buffer in pairs}
        return frozenset(
            id(module)
            for module in self._modules
            for name, buffer in module._buffers.items()
            if buffer is not None and before.get((id(module._buffers), name)) is not buffer
        )

    def keep_statistics(self) -> None:
        """Remember batch statistics as the forward pass left them."""
        if self._statistics:
            _copy(self._statistics_copies, self._statistics)
            self._statistics_versions = _versions(self._statistics)

    def put_statistics_back(self) -> None:
        """Activation checkpointing runs a forward pass again in backward; its batch counts once."""
        if not self._statistics:
            return
        versions = _versions(self._statistics)
        if not self._tells or versions is None or versions != self._statistics_versions:
            _copy(self._statistics, self._statistics_copies)
            _set_versions(self._statistics, versions)

    def _changed(self) -> bool:
        if self._count != sum([len(module._buffers) for module in self._modules]):
            return True
        current = zip(self._homes, self._buffers, self._copies, strict=False)
        return any(
            home.get(name) is not buffer or buffer.shape != copy.shape
            for (home, name), buffer, copy in current
        )

    def _find_buffers(self) -> None:
        homes: list[tuple[dict[str, Any], str]] = []
        statistics: list[torch.Tensor] = []
        tells = True
        for module in self._modules:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    homes.append((module._buffers, name))
                    if isinstance(module, _NormBase):
                        statistics.append(buffer)
                        tells = tells and _counts_batches(module)
        buffers = [*(home[name] for home, name in homes), *self._weights.values()]
        copies = [buffer.detach().clone() for buffer in buffers]
        kept = [buffer.detach().clone() for buffer in statistics]
        self._homes, self._buffers, self._copies = homes, buffers, copies
        self._count = sum([len(module._buffers) for module in self._modules])
        self._statistics, self._statistics_copies, self._tells = statistics, kept, tells


class Gradients:
    """The gradients that were there before a try, set aside while it makes its own."""

    def __init__(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self._before: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._begun = False
        self._merged: dict[int, torch.Tensor | None] = {}
        """By id: parameters whose gradient has the old one in it already, and that gradient."""

    def begin(self, parameters: list[torch.Tensor]) -> None:
        """Start from none."""
        self._begun, self._merged, self._parameters = True, {}, parameters
        self._before = []
        for parameter in parameters:
            if parameter.grad is not None:
                self._before.append((parameter, parameter.grad))
                parameter.grad = None

    def also(self, parameters: list[torch.Tensor]) -> None:
        """In the middle of a try: these get a gradient too."""
        begun = [*self._parameters, *parameters], self._before
        self.begin(parameters)
        self._parameters, self._before = begun[0], [*begun[1], *self._before]

    def merge(self, *, hooked: bool = False) -> None:
        """Bring copies of the old ones in already now: DDP exchanges what it finds.

        `hooked`: only where a hook looks at `.grad`, which has to be all that was accumulated.
        """
        for parameter, before in self._before:
            if hooked and not parameter._post_accumulate_grad_hooks:
                continue
            if parameter.grad is None:
                parameter.grad = before.clone()
            else:
                parameter.grad = parameter.grad.add_(before)
            self._merged[id(parameter)] = parameter.grad if hooked else None

    def commit(self) -> None:
        """The new ones on top of the old."""
        left = [pair for pair in self._before if id(pair[0]) not in self._merged]
        sums = [_sum(before, parameter.grad) for parameter, before in left]
        for (parameter, before), total in zip(left, sums, strict=True):
            if total is before and parameter.grad is not None:
                before.add_(parameter.grad)  # allocates nothing, so it cannot fail half-way
            parameter.grad = total
        for parameter, before in self._before if self._merged else ():
            # The old one may be known to somebody; a hook may have put another in its place, or none.
            if parameter.grad is not None and self._merged.get(id(parameter)) is parameter.grad:
                parameter.grad = before.copy_(parameter.grad)
        self._parameters, self._before, self._begun = [], [], False  # most live for a step only

    def undo(self) -> None:
        """As before the try."""
        if not self._begun:
            return
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, before in self._before:
            parameter.grad = before
        self._parameters, self._before, self._begun = [], [], False  # most live for a step only


def _counts_batches(module: _NormBase) -> bool:
    own = type(module).forward not in (_BatchNorm.forward, SyncBatchNorm.forward) or "forward" in vars(module)
    return not own and module.num_batches_tracked is not None


def _sum(before: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    """Of sparse gradients, which cannot be added in place; otherwise `before`, into which it is added later."""
    if after is None or before.layout == after.layout == torch.strided:
        return before
    return before + after


def _copy(into: list[torch.Tensor], source: list[torch.Tensor]) -> None:
    if not into:
        return
    # Between two steps `with torch.no_grad()` takes longer than copying a network's batch statistics.
    is_recorded = torch.is_grad_enabled()
    torch._C._set_grad_enabled(False)
    try:
        torch._foreach_copy_(into, source)
    finally:
        torch._C._set_grad_enabled(is_recorded)


def _versions(tensors: list[torch.Tensor]) -> list[int] | None:
    try:
        return [tensor._version for tensor in tensors]
    except RuntimeError:  # made in inference mode: these have none, and no graph needs them
        return None


def _set_versions(tensors: list[torch.Tensor], versions: list[int] | None) -> None:
    """What is put back is as it was, also for a graph from before that has kept it."""
    if versions:
        try:
            torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))
        except (AttributeError, TypeError):  # another torch: such a graph says so itself
            return


def _random_states() -> list[Restore]:
    """One function per generator of this process, which puts it back."""
    state = torch.get_rng_state()
    found: list[Restore] = [lambda: torch.set_rng_state(state), _python_state()]
    found += [partial(write, read()) for _, read, write in device_generators()]
    return found


def _python_state() -> Restore:
    """`random.getstate()` makes 625 numbers, at every step; the generator's memory is a tenth of the work."""
    if _PYTHON_WORDS is None:
        state = random.getstate()
        return lambda: random.setstate(state)
    words, normal = bytes(_PYTHON_WORDS), _PYTHON.gauss_next
    return lambda: random.setstate((3, _python_tuple(words), normal))


def _python_tuple(words: bytes) -> tuple[int, ...]:
    position, *key = struct.unpack("=625I", words)
    return (*key, position)


def _find_python_words() -> memoryview | None:
    """Where CPython's generator keeps its state, if reading there gives what `getstate` says."""
    if sys.implementation.name != "cpython":
        return None
    words = _mersenne_at(id(_PYTHON) + object.__basicsize__)
    version, state, _ = random.getstate()
    return words if version == 3 and _python_tuple(bytes(words)) == state else None


def _mersenne_at(address: int) -> memoryview:
    """A generator's own memory; whoever reads it keeps the generator."""
    return memoryview((ctypes.c_ubyte * _MERSENNE_BYTES).from_address(address))


_PYTHON: Any = random._inst
_PYTHON_WORDS = _find_python_words()


class _Numpy:
    """numpy's global generator, which most trainings never use: its state is read only once it was seen to move."""

    def __init__(self) -> None:
        self._module: Any = None
        self._generator: Any = None
        """Kept: its memory is read."""
        self._words: memoryview | None = None
        self._bytes = b""
        self._state: Any = None

    def state(self) -> list[Restore]:
        """The function that puts it back; none while numpy is not loaded."""
        if self._module is None:
            self._module = sys.modules.get("numpy")
            if self._module is None:
                return []
            self._find_words()
        numpy = self._module
        if self._words is not None and numpy.random.get_bit_generator() is not self._generator:
            self._words = None  # another was put in its place
        raw = None if self._words is None else bytes(self._words)
        if self._state is None or raw is None or raw != self._bytes:
            if raw is not None and self._bytes:
                self._words = (
                    None  # in use: from now on always in full, with the normal number that may be kept
                )
            self._state, self._bytes = numpy.random.get_state(legacy=False), raw or b""
        state = self._state
        return [lambda: numpy.random.set_state(state)]

    def _find_words(self) -> None:
        """The generator's own memory, read twenty times as fast as its state."""
        try:
            generator = self._module.random.get_bit_generator()
            if type(generator).__name__ == "MT19937":
                self._generator, self._words = generator, _mersenne_at(int(generator.ctypes.state_address))
        except Exception:  # noqa: BLE001 - an older numpy: in full each time
            self._words = None


def _generator_state(generator: torch.Generator) -> Restore:
    state = generator.get_state()
    return lambda: generator.set_state(state)
