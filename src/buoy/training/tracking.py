"""What belongs to a run: named by the person, refused at once if it cannot be saved, and watched for its steps."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from buoy.checkpoint.state import encode
from buoy.errors import UsageError
from buoy.training.counting import Counting
from buoy.training.follower import Follower
from buoy.training.keeper import Keeper
from buoy.training.resumption import OURS, Resumption, beside

if TYPE_CHECKING:
    from buoy.torch.state import Tracked


class Tracking:
    """The objects of one run, by name."""

    def __init__(
        self, saved: Resumption, on_step: Callable[[bool], None], say: Callable[[str], None]
    ) -> None:
        """`on_step` hears of every optimizer's steps, and whether each is one of the run."""
        from buoy.torch.left_out import LeftOut

        self._saved = saved
        self._on_step, self._say = on_step, say
        self._left_out = LeftOut(say)
        self._told_new: set[str] = set()
        self.counting = Counting(saved.mine.get("counting", ()))
        self._hooks: list[Any] = []
        self._looked_over = False
        self.objects: dict[str, object] = {}
        """As the person named them."""
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
        from buoy.torch.accelerate import unwrapped
        from buoy.torch.state import on_step, tracked
        from buoy.torch.tensors import as_tensor

        objects = {name: unwrapped(value) for name, value in objects.items()}
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
        from buoy.torch.grown import tell_of_new_parameters
        from buoy.torch.state import settings_of

        tell_of_new_parameters(self.things, self._told_new, self._say)
        self._left_out.look(self.objects, self.things)
        return {
            **beside(self.things),
            "counting": self.counting.state(),
            "settings": settings_of(self.things),
        }

    def load_again(self) -> None:
        """Everything as it was saved once more."""
        self._saved.load(self.things, arrived=True)

    def look_over(
        self, keeper: Keeper | Follower | None, step: int, own: Callable[[], dict[str, Any]]
    ) -> None:
        """Once, when all is named: tell what of the checkpoint is left over, and what a checkpoint will take.

        `own`: what the run will add to it for each rank.
        """
        if self._looked_over:
            return
        self._looked_over = True
        self._saved.announce()
        self._saved.name_what_is_left(self.things)
        if keeper is not None:
            from buoy.torch.distributed import world
            from buoy.torch.tensors import as_tensor

            items: dict[str, object] = {
                name: getattr(thing, "expected", thing.state)() for name, thing in self.things.items()
            }
            items[OURS] = {"ranks": [own()] * world()[1]}
            keeper.expect(items, as_tensor)
            if step:
                keeper.recorder.step(step)

    def let_go(self) -> None:
        """The optimizers step unheard from here on."""
        for hook in self._hooks:
            hook.remove()
