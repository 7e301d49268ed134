"""Random state around a PyTorch training, python's, numpy's, torch's, every accelerator's: taken, restored, seeded."""

from __future__ import annotations

import array
import functools
import hashlib
import random
import sys
from collections.abc import Callable
from typing import Any

import torch

from buoy._compat.torch import PYTHON_RNG, has_xpu, numpy_rng, vendor

State = dict[str, Any]
_MASK = (1 << 64) - 1


def mix(*parts: object) -> int:
    """A number of 64 bits that is the same for the same parts in every process.

    >>> mix(7, 0, "order") == mix(7, 0, "order") != mix(7, 1, "order")
    True
    """
    text = "\0".join(str(part) for part in parts).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


def initial_seed() -> int:
    """What the training was seeded with."""
    return torch.initial_seed()


def seed_everything(number: int) -> None:
    """Seed the generators that data code draws from: python's, numpy's and torch's on the CPU."""
    random.seed(number)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(number & 0xFFFFFFFF)
    torch.default_generator.manual_seed(number & (_MASK >> 1))  # torch.manual_seed takes 100 times as long


def seed_torch(number: int) -> None:
    """`torch.manual_seed` for the devices in use: it keeps the stack of its caller for each that is not."""
    torch.default_generator.manual_seed(number)
    for name, _, _ in device_generators():
        module = getattr(torch, name)
        getattr(module, "manual_seed_all", module.manual_seed)(number)


class Stream:
    """Random state of its own for data code that runs in the training's process; the training's is restored.

    >>> before = torch.get_rng_state()
    >>> with Stream(7):
    ...     drawn = torch.rand(3)
    >>> bool((torch.get_rng_state() == before).all())
    True
    """

    def __init__(self, number: int) -> None:
        self._number = number
        self._mine: tuple[Any, ...] | None = None
        self._theirs: tuple[Any, ...] | None = None

    def __enter__(self) -> None:
        self._theirs = take()
        if self._mine is not None:
            put(self._mine)
        else:
            seed_everything(self._number)

    def __exit__(self, *error: object) -> None:
        self._mine = take()
        if self._theirs is not None:
            put(self._theirs)

    def state_dict(self) -> State:
        """Where this stream is."""
        with self:
            return capture(accelerators=False)

    def load_state_dict(self, state: State) -> None:
        """Go on from there."""
        with self:
            restore(state)


def capture(*, accelerators: bool = True) -> State:
    """All random state of this process, in values that can be saved."""
    version, words, gauss = random.getstate()
    state: State = {
        "python": {"version": version, "words": array.array("Q", words).tobytes(), "gauss": gauss},
        "torch": torch.get_rng_state(),
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    if accelerators:
        for name, read, _ in device_generators():
            state[name] = read()
    return state


def restore(state: State, say: Callable[[str], None] | None = None) -> None:
    """Restore all random state; what this machine has no place for is told through `say`."""
    python = state["python"]
    words = array.array("Q")
    words.frombytes(python["words"])
    random.setstate((python["version"], tuple(words), python["gauss"]))
    torch.set_rng_state(state["torch"])
    if "numpy" in state:
        import numpy

        numpy.random.set_state(state["numpy"])
    known = {name: (read, write) for name, read, write in device_generators(even_idle=True)}
    for name in state:
        if name in ("python", "torch", "numpy"):
            continue
        try:
            known[name][1](state[name])
        except (KeyError, RuntimeError, IndexError, AssertionError):
            if say is not None:
                say(f"the RNG state of {name} could not be restored here: what is drawn there will differ")


def generator_state(generator: object) -> Any:
    """The state of somebody's own generator (torch's, numpy's, python's); None: it is no generator."""
    if isinstance(generator, torch.Generator):
        return generator.get_state()
    if isinstance(generator, random.Random) and not isinstance(generator, random.SystemRandom):
        version, words, gauss = generator.getstate()
        return {"version": version, "words": array.array("Q", words).tobytes(), "gauss": gauss}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(generator, numpy.random.Generator):
            return generator.bit_generator.state
        if isinstance(generator, numpy.random.RandomState):
            return generator.get_state(legacy=False)
    return None


def set_generator_state(generator: Any, state: Any) -> None:
    """Restore the state of somebody's own generator."""
    if isinstance(generator, torch.Generator):
        generator.set_state(state)
    elif isinstance(generator, random.Random):
        words = array.array("Q")
        words.frombytes(state["words"])
        generator.setstate((state["version"], tuple(words), state["gauss"]))
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = state
    else:
        generator.set_state(state)


def seed_generator(generator: Any, number: int) -> None:
    """Seed somebody's own generator."""
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number & (_MASK >> 1))
    elif isinstance(generator, random.Random):
        generator.seed(number)
    elif hasattr(generator, "bit_generator"):
        generator.bit_generator.state = type(generator.bit_generator)(number).state
    else:
        generator.seed(number & 0xFFFFFFFF)


def global_generators() -> list[Any]:
    """Those that data code draws from when it names none: python's, torch's on the CPU and numpy's."""
    found: list[Any] = [PYTHON_RNG, torch.default_generator]
    numpy = numpy_rng()
    return found if numpy is None else [*found, numpy]


def take() -> tuple[Any, ...]:
    """The global generators on the CPU as they are, quickly; for `put` in the same process, once.

    numpy's state takes 100 us to copy, so its generator is set aside as it is and another one put in its place.
    That drops the second half of a pair of normal numbers which it may hold, as `forget_half_pair` does.
    """
    return random.getstate(), torch.default_generator.get_state(), _take_numpy()


def put(state: tuple[Any, ...]) -> None:
    """Make them what they were."""
    python, torch_state, numpy_state = state
    random.setstate(python)
    torch.default_generator.set_state(torch_state)
    if numpy_state is not None:
        _put_numpy(numpy_state)


def forget_half_pair() -> None:
    """Drop the normal number that numpy's global generator may hold back.

    With workers nothing needs to be set aside; but the number of workers may change, and what the training draws
    must not change with it.
    """
    numpy = sys.modules.get("numpy")
    if numpy is not None and hasattr(numpy.random, "set_bit_generator"):
        numpy.random.set_bit_generator(numpy.random.get_bit_generator())


_spare: list[Any] = []
"""numpy generators that can be put in the place of the training's."""


def _take_numpy() -> Any:
    numpy = sys.modules.get("numpy")
    if numpy is None:
        return None
    if not hasattr(numpy.random, "set_bit_generator"):  # before numpy 1.24
        return numpy.random.get_state()
    mine = numpy.random.get_bit_generator()
    numpy.random.set_bit_generator(_spare.pop() if _spare else numpy.random.MT19937(0))
    return mine


def _put_numpy(state: Any) -> None:
    numpy = sys.modules["numpy"]
    if isinstance(state, tuple):
        numpy.random.set_state(state)
        return
    _spare.append(numpy.random.get_bit_generator())
    numpy.random.set_bit_generator(state)


Accelerator = tuple[str, Callable[[], Any], Callable[[Any], None]]


def has_accelerators() -> bool:
    """Whether this torch was built for any, or another package has brought one along."""
    return bool(_accelerators(vendor()))


def device_generators(even_idle: bool = False) -> list[Accelerator]:
    """Name, reader and writer of each accelerator's random state; one that was never used draws from its seed."""
    found: list[Accelerator] = []
    for name, module in _accelerators(vendor()):
        in_use = getattr(module, "is_initialized", None)
        if in_use is None or even_idle:
            in_use = torch.backends.mps.is_available if name == "mps" else module.is_available
        if not in_use():
            continue
        if hasattr(module, "get_rng_state_all"):
            found.append((name, module.get_rng_state_all, module.set_rng_state_all))
        elif hasattr(module, "get_rng_state"):
            found.append((name, module.get_rng_state, module.set_rng_state))
    return found


@functools.cache
def _accelerators(_vendor: str) -> list[tuple[str, Any]]:
    """Those that this torch was built for, and the one that another vendor's package has brought along."""
    kinds = [name for name in ("cuda", "mps") if getattr(torch.backends, name).is_built()]
    kinds += ["xpu"] if has_xpu() else []
    try:
        current = torch.accelerator.current_accelerator()
    except (AttributeError, RuntimeError):
        # Before 2.6 there is no such module; in 2.6 this raises where there is none.
        current = None
    if current is not None and current.type not in kinds:
        kinds.append(current.type)
    return [(name, getattr(torch, name)) for name in kinds if hasattr(torch, name)]
