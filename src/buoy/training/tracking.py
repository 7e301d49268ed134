"""What belongs to a run: the objects that the user named, its loaders, its random state, and whose steps count."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from buoy.errors import UsageError
from buoy.training.position import Loop
from buoy.training.resume import OURS, Resumption

if TYPE_CHECKING:
    from buoy.torch.data.loader import Feeds
    from buoy.torch.state.state_dict import Tracked
    from buoy.training.manager import CheckpointManager
    from buoy.training.ranks import Follower


class Counting:
    """The first optimizer that is named counts; so does one that trains where that one does not.

    One that is named after the training has begun is a stage of its own (a head first, then all layers), and so is one
    that went through a whole loop alone. Within a batch only one of them counts: the first that steps.
    """

    def __init__(self, saved: Iterable[str]) -> None:
        self._counts = set(saved)
        self._named = False
        self._in_loop: set[str] = set()
        self._of_batch: str | None = None
        self._in_batch = False

    def name(self, optimizer: str, *, late: bool) -> None:
        """An optimizer is tracked; `late`: loops were begun before."""
        if late or not self._named:
            self._counts.add(optimizer)
        self._named = True

    def stepped(self, optimizer: str) -> bool:
        """It has stepped: whether that is a step of the run."""
        self._in_loop.add(optimizer)
        if optimizer not in self._counts:
            return False
        if self._in_batch and self._of_batch is None:
            self._of_batch = optimizer
        return not self._in_batch or self._of_batch == optimizer

    def batch_begins(self) -> None:
        """A batch is handed out for training or evaluation, outside of any other's body."""
        self._of_batch, self._in_batch = None, True

    def loop_ends(self) -> None:
        """Such a loop is over."""
        if not self._in_loop & self._counts:
            self._counts |= self._in_loop
        self._in_loop.clear()
        self._in_batch = False

    def state(self) -> list[str]:
        """For the checkpoint."""
        return sorted(self._counts)


class Tracking:
    """The objects of one run, by name."""

    def __init__(
        self, saved: Resumption, on_step: Callable[[bool], None], say: Callable[[str], None]
    ) -> None:
        """`on_step` hears of every optimizer's steps, and whether each is one of the run."""
        from buoy.torch.state.forgotten import Forgotten

        self._saved = saved
        self._on_step, self._say = on_step, say
        self._forgotten = Forgotten(say)
        self.counting = Counting(saved.mine.get("counting", ()))
        self._hooks: list[Any] = []
        self._looked_over = False
        self.objects: dict[str, object] = {}
        """As the user named them."""
        self.things: dict[str, Tracked] = {}
        """Those of them that have state of their own, as it is saved and loaded."""

    @property
    def counts_steps(self) -> bool:
        """An optimizer is among them."""
        return bool(self._hooks)

    def add(self, objects: dict[str, object], *, late: bool) -> list[object]:
        """Name these; each is loaded from the checkpoint, or none if any does not fit. Those that are new.

        `late`: loops over batches were begun before.
        """
        from buoy.checkpoint.encoding import encode
        from buoy.torch.state.state_dict import inside_shell, on_step, tracked
        from buoy.torch.state.tensors import as_tensor

        objects = {name: inside_shell(value) for name, value in objects.items()}
        new: dict[str, Tracked] = {}
        for name, value in objects.items():
            if name == OURS or (name in self.objects and self.objects[name] is not value):
                raise UsageError(
                    f"the name {name!r} is taken",
                    received=f"track({name}={type(value).__name__}(...))",
                    expected="a name of its own for each object",
                    hint="choose another name",
                )
            thing = tracked(name, value, [*self.objects.values(), *objects.values()])
            if thing is not None and name not in self.objects:
                if self._saved.is_kept:
                    encode(name, thing.state(), as_tensor)  # refused now, by name, rather than at step 10,000
                new[name] = thing
        self._saved.load(new)
        if new:
            self._saved.announce()
        self._saved.name_what_is_late(new)
        unknown = {name: value for name, value in objects.items() if name not in self.objects}
        for name, value in unknown.items():
            hook = on_step(value, partial(self._stepped, name))
            if hook is not None:
                self._hooks.append(hook)
                self.counting.name(name, late=late)
        self.things.update(new)
        self.objects.update(objects)
        return list(unknown.values())

    def _stepped(self, optimizer: str) -> None:
        self._on_step(self.counting.stepped(optimizer))

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of them beside their own states; tells what it lacks."""
        from buoy.torch.state.forgotten import state_beside
        from buoy.torch.state.state_dict import settings_of

        self._forgotten.look_at_growth(self.things)
        self._forgotten.look(self.objects)
        return {
            **state_beside(self.things),
            "counting": self.counting.state(),
            "settings": settings_of(self.things),
        }

    def load_again(self) -> None:
        """Everything as it was saved once more."""
        self._saved.load(self.things)

    def look_over(
        self, manager: CheckpointManager | Follower | None, step: int, own: Callable[[], dict[str, Any]]
    ) -> None:
        """Once, when all is named: tell what of the checkpoint is left over, and what a checkpoint will take.

        `own`: what the run will add to it for each rank.
        """
        if self._looked_over:
            return
        self._looked_over = True
        self._saved.announce()
        self._saved.name_what_is_left(self.things)
        if manager is not None:
            from buoy.torch.state.tensors import as_tensor
            from buoy.torch.step.ranks import world

            items: dict[str, object] = {
                name: getattr(thing, "expected", thing.state)() for name, thing in self.things.items()
            }
            items[OURS] = {"ranks": [own()] * world()[1]}
            manager.expect(items, as_tensor)
            if step:
                manager.recorder.step(step)

    def let_go(self) -> None:
        """The optimizers step unheard from here on."""
        for hook in self._hooks:
            hook.remove()


class Loaders:
    """The loaders of a run, known by the first loop of an epoch that goes over them.

    A loop that is under way has the state of its loader in its place. These are the others: the next epoch begins
    with them, and a loop that was done is not begun again.
    """

    def __init__(self, feeds: Feeds, saved: dict[str, Any] | None) -> None:
        self._feeds = feeds
        self._saved: dict[str, Any] = dict(saved or {})
        """Of loaders that have not been seen in this process yet."""
        self._seen: dict[str, weakref.ref[Any]] = {}

    def begin(self, loop: Loop, loader: Any, tracked: Collection[object]) -> None:
        """A loop begins; its loader gets back what it had, unless the place of the loop has it."""
        name = str(loop.root)
        saved = self._saved.pop(name, None)
        if saved is not None and not loop.saved:
            self._feeds.restore_between_passes(loader, saved, {id(each) for each in tracked})
        try:
            self._seen[name] = weakref.ref(loader)
        except TypeError:  # a list of batches
            self._seen.pop(name, None)

    def state(self, under_way: Collection[int]) -> dict[str, Any]:
        """For the checkpoint; `under_way`: the loaders (by id) whose places have it."""
        states = dict(self._saved)
        for name, known in self._seen.items():
            loader = known()
            if loader is not None and id(loader) not in under_way:
                state = self._feeds.between_passes(loader)
                if state is not None:
                    states[name] = state
        return states


class Randomness:
    """What a run draws from. A resumed script draws on its way to the loop what it drew the first time."""

    def __init__(self, saved: Resumption, seed: int | None, say: Callable[[str], None]) -> None:
        from buoy.torch.data import rng

        self._rng, self._saved, self._say = rng, saved, say
        self._seed: int | None = saved.mine.get("seed", seed)
        if seed not in (None, self._seed):
            say(f"seed={seed} is ignored: this run was started with {self._seed}")
        self._before_loop: Any = saved.mine.get("before_loop") or rng.capture()
        """Where the way to the loop began."""

    @property
    def seed(self) -> int:
        """Decides the order of the data and what is drawn for it; torch's own where none was given."""
        if self._seed is None:
            self._seed = self._rng.initial_seed()
        return self._seed

    def begin_way(self) -> None:
        """The script sets out for its next loop."""
        self._before_loop = self._rng.capture()

    def return_to_way(self) -> None:
        """As it was saved where the script set out for the loop; does nothing once the run is past its checkpoint."""
        self._restore("before_loop")

    def return_to_place(self) -> None:
        """As it was saved in the loop; does nothing once the run is past its checkpoint."""
        self._restore("rng")

    def state(self) -> dict[str, Any]:
        """For the checkpoint."""
        return {"rng": self._rng.capture(), "before_loop": self._before_loop, "seed": self._seed}

    def _restore(self, which: str) -> None:
        if self._saved:
            with self._saved.reading("the state of the random numbers"):
                self._rng.restore(self._saved.mine[which], self._say)
