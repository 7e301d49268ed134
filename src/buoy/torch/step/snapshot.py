"""What a failed try must restore: RNGs, buffers, gradients, and the weights that computing a loss changes."""

from __future__ import annotations

import ctypes
import random
import struct
import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch

from buoy._compat import torch as compat
from buoy.microbatch.errors import BadLoss
from buoy.torch.data.rng import device_generators, has_accelerators
from buoy.torch.step.gradient import LossFunction, Trained, Upstream, untracked_leaves

_MERSENNE_BYTES = 2500  # 624 words and a position


class Snapshot:
    """The buffers of some modules and every generator in sight, copied into memory that is kept for the next time."""

    def __init__(self) -> None:
        self._modules: list[torch.nn.Module] = []
        self._homes: list[tuple[dict[str, Any], str]] = []
        self._buffers: list[torch.Tensor] = []
        self._copies: list[torch.Tensor] = []
        self._versions: list[int] | None = None
        self._weights: dict[int, torch.Tensor] = {}
        self.statistics: list[torch.Tensor] = []
        """Running means and variances: they count a batch once, however often its forward pass is computed."""
        self._statistics_copies: list[torch.Tensor] = []
        self._statistics_versions: list[int] | None = None
        self._tells = True
        """Whether each of these counts its batches, by which a pass shows: `F.batch_norm` alone leaves no mark."""
        self._owners: list[tuple[torch.nn.Module, dict[str, Any]]] = []
        """Modules with buffers that are not PyTorch's own, and their plain attributes when it was taken."""
        self._random = _RandomStates()
        self.generators = self._random.generators
        """Attributes of modules."""
        self._count = -1
        self._all_buffers: list[dict[str, Any]] = []
        self.taken = False

    def watch(self, modules: Iterable[torch.nn.Module]) -> None:
        """The modules whose buffers count."""
        for module in modules:
            for part in module.modules():
                self._modules.append(part)
                self.generators += [v for v in vars(part).values() if isinstance(v, torch.Generator)]

    def keep(self, parameters: Iterable[torch.Tensor]) -> None:
        """From now on these too: a teacher that follows inside the loss function."""
        self._weights |= {id(parameter): parameter for parameter in parameters}
        self._count = -1  # to be found anew

    def keeps(self, parameter: torch.Tensor) -> bool:
        """Whether this weight would be restored."""
        return id(parameter) in self._weights

    def take(self) -> None:
        """Copy what a try may change."""
        self.taken = False
        if self._changed():
            self._find_buffers()
        if self._buffers:
            compat.copy_all(self._copies, self._buffers)
            self._versions = _versions(self._buffers)
        if self._owners:
            self._owners = [(owner, _plain(owner)) for owner, _ in self._owners]
        self._random.take()
        self.taken = True

    def restore(self) -> None:
        """Everything as it was when it was taken."""
        if not self.taken:
            return
        pairs = zip(self._homes, self._buffers, strict=False)
        known = {(id(home), name): buffer for (home, name), buffer in pairs}
        for (
            owner,
            plain,
        ) in self._owners:  # whether a table is made, and for how many places, is a plain attribute
            now = compat.buffers_of(owner)
            if any(b is not None and known.get((id(now), name)) is not b for name, b in now.items()):
                vars(owner).update(plain)
        for module in self._modules:  # a buffer made by the failed try goes
            now = compat.buffers_of(module)
            for name in [name for name in now if (id(now), name) not in known]:
                now[name] = None
        # Weights stand behind the buffers, and have no such home.
        for (home, name), buffer in zip(self._homes, self._buffers, strict=False):
            home[name] = buffer
        if self._buffers:
            compat.copy_all(self._buffers, self._copies)
        _set_versions(self._buffers, self._versions)
        self._random.restore()
        compat.forget_parametrizations()

    def keep_statistics(self) -> None:
        """Remember batch statistics as the forward pass left them."""
        compat.copy_all(self._statistics_copies, self.statistics)
        self._statistics_versions = _versions(self.statistics)

    def restore_statistics(self) -> None:
        """Activation checkpointing runs a forward pass again in backward; its batch counts once."""
        versions = _versions(self.statistics)
        if not self._tells or versions is None or versions != self._statistics_versions:
            compat.copy_all(self.statistics, self._statistics_copies)
            _set_versions(self.statistics, versions)

    def _changed(self) -> bool:
        if self._count != sum(map(len, self._all_buffers)):
            return True
        for (home, name), buffer, copy in zip(self._homes, self._buffers, self._copies, strict=False):
            if home.get(name) is not buffer or buffer.shape != copy.shape:
                return True
        return False

    def _find_buffers(self) -> None:
        homes: list[tuple[dict[str, Any], str]] = []
        statistics: list[torch.Tensor] = []
        tells = True
        for module in self._modules:
            own = compat.buffers_of(module)
            for name, buffer in own.items():
                if buffer is not None:
                    homes.append((own, name))
                    if isinstance(module, compat.NormBase):
                        statistics.append(buffer)
                        tells = tells and _counts_batches(module)
        buffers = [*(home[name] for home, name in homes), *self._weights.values()]
        copies = [buffer.detach().clone() for buffer in buffers]
        kept = [buffer.detach().clone() for buffer in statistics]
        self._random.has_devices = has_accelerators()
        self._homes, self._buffers, self._copies = homes, buffers, copies
        self._all_buffers = [compat.buffers_of(module) for module in self._modules]
        self._count = sum(map(len, self._all_buffers))
        foreign = (
            m for m in self._modules if compat.buffers_of(m) and not type(m).__module__.startswith("torch.")
        )
        self._owners = [(module, {}) for module in foreign]
        self.statistics, self._statistics_copies, self._tells = statistics, kept, tells


class Gradients:
    """The gradients that were there before a try, set aside while it makes its own."""

    def __init__(self) -> None:
        self._parameters: list[torch.Tensor] = []
        self.before: list[tuple[torch.Tensor, torch.Tensor]] = []
        """Parameters that had one, and that."""
        self.are_apart = False
        """From `begin` to `commit` or `undo`."""
        self._merged: dict[int, torch.Tensor | None] = {}
        """By id: parameters whose gradient has the old one in it already, and that gradient."""

    def begin(self, parameters: list[torch.Tensor]) -> None:
        """Start from none."""
        before = []
        for parameter in parameters:
            if parameter.grad is not None:
                before.append((parameter, parameter.grad))
        self.before, self._merged, self._parameters, self.are_apart = before, {}, parameters, True
        for parameter, _ in before:
            parameter.grad = None

    def also(self, parameters: list[torch.Tensor]) -> None:
        """In the middle of a try: these get a gradient too."""
        begun = [*self._parameters, *parameters], self.before
        self.begin(parameters)
        self._parameters, self.before = begun[0], [*begun[1], *self.before]

    def merge(self, *, hooked: bool = False) -> None:
        """Bring copies of the old ones in already now: DDP exchanges what it finds.

        `hooked`: only where a hook looks at `.grad`, which has to be all that was accumulated.
        """
        for parameter, before in self.before:
            if hooked and not compat.accumulation_hooks(parameter):
                continue
            if parameter.grad is None:
                parameter.grad = before.clone()
            else:
                parameter.grad = parameter.grad.add_(before)
            self._merged[id(parameter)] = parameter.grad if hooked else None

    def commit(self) -> None:
        """The new ones on top of the old."""
        if not self.before:
            self._parameters, self.are_apart = [], False
            return
        left = [pair for pair in self.before if id(pair[0]) not in self._merged]
        sums = [_sum(before, parameter.grad) for parameter, before in left]
        for (parameter, before), total in zip(left, sums, strict=True):
            if total is before and parameter.grad is not None:
                before.add_(parameter.grad)  # allocates nothing, so it cannot fail half-way
            parameter.grad = total
        for parameter, before in self.before if self._merged else ():
            # The old one may be known to somebody; a hook may have put another in its place, or none.
            if parameter.grad is not None and self._merged.get(id(parameter)) is parameter.grad:
                parameter.grad = before.copy_(parameter.grad)
        self._parameters, self.before, self.are_apart = [], [], False  # most live for a step only

    def undo(self) -> None:
        """As before the try."""
        if not self.are_apart:
            return
        for parameter in self._parameters:
            parameter.grad = None
        for parameter, before in self.before:
            parameter.grad = before
        self._parameters, self.before, self.are_apart = [], [], False  # most live for a step only


def _counts_batches(module: compat.NormBase) -> bool:
    own = type(module).forward not in (
        compat.BatchNorm.forward,
        torch.nn.SyncBatchNorm.forward,
    ) or "forward" in vars(module)
    return not own and module.num_batches_tracked is not None


def _sum(before: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    """Of sparse gradients, which cannot be added in place; otherwise `before`, into which it is added later."""
    if after is None or before.layout == after.layout == torch.strided:
        return before
    return before + after


def _versions(tensors: list[torch.Tensor]) -> list[int] | None:
    try:
        return compat.versions_of(tensors)
    except RuntimeError:  # made in inference mode: these have none, and no graph needs them
        return None


def _set_versions(tensors: list[torch.Tensor], versions: list[int] | None) -> None:
    """What is restored is as it was, also for a graph from before that has kept it."""
    if versions:
        compat.set_versions(tensors, versions)


_PLAIN = (bool, int, float, str, type(None))


def _plain(owner: torch.nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(owner).items() if type(value) in _PLAIN}


class _RandomStates:
    """The state of every RNG in sight. Taken at each step, so plain reads where there are some."""

    def __init__(self) -> None:
        self.generators: list[torch.Generator] = []
        """Others than the global ones."""
        self.has_devices = False
        """This torch was built for some accelerator."""
        self._torch: torch.Tensor | None = None
        self._own: list[torch.Tensor] = []
        self._devices: list[tuple[Callable[[Any], object], Any]] = []
        self._python: Any = None
        self._numpy: Any = None
        """The module; None while it is not loaded."""
        self._numpy_generator: Any = None
        """Kept: its memory is read."""
        self._numpy_words: memoryview | None = None
        self._numpy_bytes = b""
        self._numpy_state: Any = None

    def take(self) -> None:
        """Read them all."""
        self._torch = torch.default_generator.get_state()
        if self.generators:
            self._own = [generator.get_state() for generator in self.generators]
        if self.has_devices:
            self._devices = [(write, read()) for _, read, write in device_generators()]
        # `random.getstate()` makes 625 numbers; the RNG's memory is a tenth of the work.
        if _PYTHON_WORDS is None:
            self._python = random.getstate()
        else:
            self._python = bytes(_PYTHON_WORDS), _PYTHON.gauss_next
        if self._numpy is None:
            self._numpy = sys.modules.get("numpy")
            if self._numpy is not None:
                self._find_numpy_words()
        if self._numpy is not None:
            self._take_numpy()

    def restore(self) -> None:
        """Write back what was read."""
        if self._torch is not None:
            torch.default_generator.set_state(self._torch)
        for generator, state in zip(self.generators, self._own, strict=False):
            generator.set_state(state)
        for write, state in self._devices:
            write(state)
        if _PYTHON_WORDS is None:
            random.setstate(self._python)
        else:
            words, normal = self._python
            random.setstate((3, _python_tuple(words), normal))
        if self._numpy_state is not None:
            self._numpy.random.set_state(self._numpy_state)

    def _take_numpy(self) -> None:
        """Most trainings never use numpy's global RNG: its state is read only once it was seen to move."""
        numpy = self._numpy.random
        if self._numpy_words is not None and numpy.get_bit_generator() is not self._numpy_generator:
            self._numpy_words = None  # another was put in its place
        raw = None if self._numpy_words is None else bytes(self._numpy_words)
        if self._numpy_state is not None and raw is not None and raw == self._numpy_bytes:
            return
        if raw is not None and self._numpy_bytes:
            self._numpy_words = (
                None  # in use: from now on always in full, with the normal number that may be kept
            )
        self._numpy_state, self._numpy_bytes = numpy.get_state(legacy=False), raw or b""

    def _find_numpy_words(self) -> None:
        """The RNG's own memory, read twenty times as fast as its state."""
        try:
            generator = self._numpy.random.get_bit_generator()
            if type(generator).__name__ == "MT19937":
                self._numpy_generator = generator
                self._numpy_words = _mersenne_at(int(generator.ctypes.state_address))
        except Exception:  # noqa: BLE001 - an older numpy: in full each time
            self._numpy_words = None


def _python_tuple(words: bytes) -> tuple[int, ...]:
    position, *key = struct.unpack("=625I", words)
    return (*key, position)


def _find_python_words() -> memoryview | None:
    """Where CPython's RNG keeps its state, if reading there gives what `getstate` says."""
    if sys.implementation.name != "cpython":
        return None
    words = _mersenne_at(id(_PYTHON) + object.__basicsize__)
    version, state, _ = random.getstate()
    return words if version == 3 and _python_tuple(bytes(words)) == state else None


def _mersenne_at(address: int) -> memoryview:
    """An RNG's own memory; whoever reads it keeps the RNG."""
    return memoryview((ctypes.c_ubyte * _MERSENNE_BYTES).from_address(address))


_PYTHON = compat.PYTHON_RNG
_PYTHON_WORDS = _find_python_words()


class Rollback:
    """Around a computation (`with`): gradients, buffers and RNGs are restored after it.

    Unless `gradients.commit()` says that it went well: then the new gradients are added to the old.
    """

    def __init__(self, trained: Trained) -> None:
        self._trained = trained
        self.snapshot = Snapshot()
        self.gradients = Gradients()
        self.upstream = Upstream()
        """Of the batch under way."""
        self.at_start: list[torch.Tensor] = []
        """The leaves when the computation began."""
        self.inside = False
        """A loss is being computed."""
        self._new: LossFunction | None = None
        self._known: set[Any] = set()
        """Code of loss functions of which a first loss was looked at."""
        self._written: list[int] = []
        """How often each weight was written before the computation."""
        self._moved: list[torch.Tensor] = []
        """Weights that a loss function changes itself: to be restored from the next step on."""

    @property
    def leaves(self) -> list[torch.Tensor]:
        """What gets a gradient: parameters, and the arrays of a batch that was itself computed with gradients."""
        guarded = self._trained.guarded
        return guarded + self.upstream.leaves if self.upstream.leaves else guarded

    def begin(self, loss_fn: LossFunction) -> bool:
        """A step with this loss function begins; whether it is the first."""
        code = getattr(loss_fn, "__code__", None)  # nothing is around most of them
        self._new = None if code in self._known or code_of(loss_fn) in self._known else loss_fn
        if self._moved:
            self.snapshot.keep(self._moved)
            self._moved = []
        return self._new is not None

    def __enter__(self) -> Rollback:
        if self.inside:
            raise BadLoss("a loss function computes another step", received="run.backward inside a loss function",
                          expected="only the loss")  # fmt: skip
        self.inside = True
        try:
            self.snapshot.take()
            self._written = list(map(compat.VERSION, self._trained.all))
            self.at_start = self.leaves
            self.gradients.begin(self.at_start)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self.inside = False
        if self.gradients.are_apart:
            self.gradients.undo()
            self.snapshot.restore()

    def start_over(self) -> None:
        """In the middle of guarded work: as at its beginning."""
        self.snapshot.restore()  # first: interrupted here, `__exit__` must still know that there is something to undo
        self.gradients.undo()
        self.gradients.begin(self.leaves)

    def forward_done(self, loss: torch.Tensor) -> None:
        """Between a forward pass and its backward pass.

        The first loss of a function shows what gets a gradient and is not tracked, and which weights it changes itself.
        Batch statistics count once, even if backward computes them again.
        """
        if self._new is not None:
            self._known.add(code_of(self._new))
            self._new = None
            untracked = untracked_leaves(loss, self.leaves)
            self._moved = self.written()
            self._trained.also(untracked)
            self.gradients.also(untracked)
            self._written += compat.versions_of(self._trained.all[len(self._written) :])
        if self.snapshot.statistics:
            self.snapshot.keep_statistics()

    def backward_done(self) -> None:
        """Of a micro-batch."""
        if self.snapshot.statistics:
            self.snapshot.restore_statistics()

    def written(self) -> list[torch.Tensor]:
        """Weights that were written since the computation began, and would not be restored."""
        now = list(map(compat.VERSION, self._trained.all))
        if now == self._written:
            return []
        pairs = zip(self._trained.all, self._written, now, strict=False)
        return [each for each, one, other in pairs if one != other and not self.snapshot.keeps(each)]


def code_of(loss_fn: Any) -> Any:
    """The same for a lambda that is written anew for each batch, whatever is wrapped around it."""
    loss_fn = getattr(loss_fn, "__wrapped__", loss_fn)
    if isinstance(loss_fn, partial):
        return code_of(loss_fn.func)
    return getattr(loss_fn, "__code__", type(loss_fn))
