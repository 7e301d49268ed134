"""Cutting a batch along its samples, whatever it is made of: arrays, tuples, dicts, dataclasses, nested."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

from buoy.microbatch.errors import BadBatch

Split = tuple[int, Callable[[int, int], object]]
"""The user's own way to split: the number of samples, and a function from (start, stop) to that part."""
_PLAIN = (str, bytes, int, float, type(None))


class Batch:
    """A batch that knows its samples and can give any range of them."""

    __slots__ = (
        "_is_plain",
        "_listed",
        "_split",
        "arrays",
        "each",
        "elements",
        "hint",
        "once",
        "reason",
        "samples",
        "value",
    )

    def __init__(self, value: object, split: Split | None = None, listed: int | None = None) -> None:
        self.value = value
        self.reason: str | None = None
        """Why it cannot be split; None when it can."""
        self.hint: str | None = None
        """What to do about that."""
        self.once = False
        """It holds an iterator, which a comparison or a second try would find used up."""
        self.arrays: list[Any] = []
        self._split = split
        self._listed = listed
        """Lists of so many arrays or mappings are lists of samples."""
        self._is_plain = split is None and listed is None and self._look_plainly(value)
        """An array, or a tuple of arrays with as many samples each: nothing to look for, and nothing to copy."""
        if not self._is_plain:
            self._look(value, split, listed)
        self.elements = 0
        """Over all arrays: what memory grows with."""
        for array in self.arrays:
            self.elements += math.prod(array.shape)
        self.each = max(1.0, self.elements / self.samples)
        """Elements per sample."""

    def _look_plainly(self, value: object) -> bool:
        """Most batches are like this, and it is asked at every step."""
        arrays = value if type(value) is tuple else (value,)
        samples = 0
        for array in arrays:
            if not hasattr(type(array), "shape") or getattr(array, "is_nested", False):
                return False
            shape: Any = array.shape
            if not len(shape) or not shape[0] or (samples and shape[0] != samples):
                return False
            samples = shape[0]
        self.arrays, self.samples = list(arrays), int(samples)
        return samples > 0

    def _look(self, value: object, split: Split | None, listed: int | None) -> None:
        rows: list[int] = []
        try:
            _look(value, self.arrays, rows, listed)
            self.samples = listed or (_checked(split) if split is not None else self._count(rows))
        except _NeverCut as why:
            self.samples, self.reason, self.hint = 1 if split is None else _checked(split), *why.args
            self.reason = self.reason if split is None else None
            self.once = split is None and isinstance(why, _OnlyOnce)

    def take(self, start: int, stop: int) -> object:
        """The samples from `start` to `stop`; in containers of their own."""
        if self._is_plain and start == 0 and stop == self.samples:
            return self.value
        if self._split is not None:
            return self._split[1](start, stop)
        return _cut(self.value, start, stop, self.samples, self._listed)

    def part(self, start: int, stop: int) -> Batch:
        """The samples from `start` to `stop` as a batch, which is split as this one is."""
        if self._split is None:
            return Batch(self.take(start, stop), listed=self._listed and stop - start)
        cut = self._split[1]
        return Batch(cut(start, stop), (stop - start, lambda first, last: cut(start + first, start + last)))

    @property
    def gives_ranges_only(self) -> bool:
        """Whether the user's own way to split is used."""
        return self._split is not None

    @property
    def doubt(self) -> str | None:
        """What the user should hear when it is split: a list of arrays that are all alike may be a list of samples."""
        # What is one sample in all cannot be split: there a list of any arrays is worth a word.
        many = None if self._split is not None else _many_alike(self.value, any_shape=self.samples == 1)
        if many is None or len(many) == self._listed:
            return None
        if self.samples == 1:
            return (
                f"a list of {len(many)} arrays counts as one sample; if each of them is one, pass "
                "`split=(len(batch), lambda start, stop: batch[start:stop])`"
            )
        return (
            f"a list of {len(many)} arrays of shape {list(many[0].shape)} is split along their first dimension; if "
            "each of them is a sample, pass `split=(len(batch), lambda start, stop: batch[start:stop])`"
        )

    def pick(self, indices: list[int]) -> object:
        """These samples in this order; only where no split of the user's own is used."""
        return _cut(self.value, indices, None, self.samples, self._listed)

    def picked(self, indices: list[int]) -> Batch:
        """The same as a batch, whose lists are read as this one's are."""
        return Batch(self.pick(indices), listed=self._listed and len(indices))

    @property
    def entries(self) -> list[Any]:
        """The lists that have one entry per sample: of strings, of numbers, or of arrays or mappings."""
        found: list[Any] = []
        _look_for_entries(self.value, found, self.samples, self._listed)
        return found

    def _count(self, rows: list[int]) -> int:
        lengths = {int(array.shape[0]) for array in self.arrays if len(array.shape)} or set(rows)
        if not lengths:
            self.reason = f"a {type(self.value).__name__} in which no array was found"
            return 1
        if len(lengths) > 1:
            for many in sorted(_lists(self.value, False)):
                arrays: list[Any] = []
                _look(self.value, arrays, [], many)
                if {int(array.shape[0]) for array in arrays if len(array.shape)} <= {many}:
                    self.arrays, self._listed = arrays, many
                    return many
            named = [
                f"{path}: {array.shape[0]}" for path, array in _paths(self.value, "batch") if len(array.shape)
            ]
            raise _NeverCut(
                "its parts have different numbers of samples: "
                + (", ".join(named[:8]) or f"lists of {sorted(lengths)}"),
                "what belongs to no sample can reach the loss function by closure; or pass "
                "`split=(samples, lambda start, stop: ...)`",
            )
        samples = lengths.pop()
        if samples == 0:
            raise BadBatch("the batch is empty", received="0 samples", expected="at least one",
                           hint="`drop_last=True`, or a filter that dropped every sample?")  # fmt: skip
        return samples


class _NeverCut(Exception):  # noqa: N818 - never leaves this module
    """Why, and what to do."""


class _OnlyOnce(_NeverCut):
    """Nor computed a second time."""


def _lists(value: Any, has_array_beside: bool) -> set[int]:
    """The lengths of lists that may be lists of samples: of mappings, or beside an array also of arrays.

    A tuple of two arrays alone is no such list: nothing else says how many samples there are.
    """
    if _is_array(value):
        return set()
    is_list = type(value) in (list, tuple) and _is_listed(value, None)
    found = {len(value)} if is_list and (has_array_beside or isinstance(value[0], Mapping)) else set()
    items = [item for _, item in _members(value, "")]
    return found.union(*(_lists(item, any(map(_is_array, items)) or _has_mappings(items)) for item in items))


def _has_mappings(items: list[Any]) -> bool:
    """A list of mappings is among them."""
    return any(type(each) in (list, tuple) and each and isinstance(each[0], Mapping) for each in items)


def _is_listed(value: Any, many: int | None) -> bool:
    if not value or (many is not None and len(value) != many):
        return False
    return all(map(_is_array, value)) or all(isinstance(item, Mapping) for item in value)


def _many_alike(value: Any, any_shape: bool) -> list[Any] | None:
    """The first list of three or more arrays of one shape; two are mostly inputs and labels."""
    if type(value) is list and len(value) > 2 and all(map(_is_array, value)):
        return value if any_shape or len({tuple(array.shape) for array in value}) == 1 else None
    if _is_array(value):
        return None
    found = (_many_alike(item, any_shape) for _, item in _members(value, ""))
    return next((many for many in found if many is not None), None)


def even(samples: int, most: int) -> list[int]:
    """Sizes of the fewest nearly equal parts of at most so many samples: never a tiny tail.

    >>> even(60, 32), even(10, 4), even(3, 8)
    ([30, 30], [4, 3, 3], [3])
    """
    if samples <= most:
        return [samples]
    parts = math.ceil(samples / max(1, most))
    size, larger = divmod(samples, parts)
    return [size + 1] * larger + [size] * (parts - larger)


def _checked(split: Split) -> int:
    if not (isinstance(split, tuple) and len(split) == 2 and callable(split[1]) and type(split[0]) is int):
        raise BadBatch("`split` cannot be used", received=repr(split),
                       expected="(samples, function of start and stop)",
                       hint="split=(len(images), lambda start, stop: images[start:stop])")  # fmt: skip
    if split[0] < 1:
        raise BadBatch(
            "the batch is empty", received=f"split=({split[0]}, ...)", expected="at least one sample"
        )
    return split[0]


def _is_array(value: object) -> bool:
    try:
        return hasattr(value, "shape") and hasattr(value, "__getitem__") and not isinstance(value, type)
    except Exception:  # noqa: BLE001 - a mapping whose __getattr__ raises KeyError is no array
        return False


def _look(value: Any, found: list[Any], rows: list[int], listed: int | None = None) -> None:
    """Collect the arrays, and the lengths of lists with one entry per sample. Runs at every step."""
    kind = type(value)
    if kind is tuple or kind is list:
        if listed is not None and _is_listed(value, listed):
            return
        if _is_rows(value):
            rows.append(len(value))
            return
        for item in value:
            _look(item, found, rows, listed)
    elif _is_array(value):
        if getattr(value, "is_nested", False):
            raise _NeverCut(
                "the samples of a nested tensor differ in length",
                "make it in the loss function, of padded arrays",
            )
        found.append(value)
    elif kind.__name__ == "PackedSequence":
        raise _NeverCut(
            "a packed sequence has no first dimension of samples", "pack them in the loss function"
        )
    elif hasattr(kind, "__next__"):
        raise _OnlyOnce(
            f"it holds an iterator ({kind.__name__}), which can be gone through only once",
            "pass what it gives: `list(...)`",
        )
    else:
        for _, item in _members(value, ""):
            _look(item, found, rows, listed)


def _look_for_entries(value: Any, found: list[Any], samples: int, listed: int | None) -> None:
    if _is_array(value):
        return
    is_listed = type(value) in (list, tuple) and listed is not None and _is_listed(value, listed)
    if is_listed or (isinstance(value, (list, tuple)) and _is_rows(value)):
        found += [value] if len(value) == samples else []
        return
    for _, item in _members(value, ""):
        _look_for_entries(item, found, samples, listed)


def _members(value: Any, path: str) -> list[tuple[str, Any]]:
    """What a container holds, with names for people."""
    if isinstance(value, Mapping):
        return [(f"{path}[{key!r}]", value[key]) for key in value]
    if isinstance(value, (list, tuple)):
        names = getattr(value, "_fields", None)
        return [
            (f"{path}.{names[number]}" if names else f"{path}[{number}]", item)
            for number, item in enumerate(value)
        ]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return [(f"{path}.{field.name}", getattr(value, field.name)) for field in dataclasses.fields(value)]
    return []


def _paths(value: Any, path: str) -> list[tuple[str, Any]]:
    if _is_array(value):
        return [(path, value)]
    return [found for name, item in _members(value, path) for found in _paths(item, name)]


def _is_rows(value: list[Any] | tuple[Any, ...]) -> bool:
    """A list of strings or numbers is one value per sample; a list of arrays is a container."""
    if not value or not isinstance(value[0], _PLAIN) or hasattr(value, "_fields"):
        return False
    return all(isinstance(item, _PLAIN) for item in value[:8])


def _cut(value: Any, start: Any, stop: int | None, samples: int, listed: int | None = None) -> Any:
    """`start` to `stop`; or, without `stop`, the samples whose numbers `start` lists."""

    def array(each: Any) -> Any:
        if not len(each.shape) or (start == 0 and stop == samples):
            return each
        return each[start] if stop is None else each[start:stop]

    def rows(each: Any) -> Any:
        if not ((listed is not None and _is_listed(each, listed)) or _is_rows(each)):
            return None
        if len(each) != samples:
            return each
        return each[start:stop] if stop is not None else type(each)(each[index] for index in start)

    return rebuilt(value, array, rows)


def rebuilt(
    value: Any, of_array: Callable[[Any], Any], of_list: Callable[[Any], Any] = lambda each: None
) -> Any:
    """The same containers with other arrays; `of_list` may give another list as a whole.

    >>> rebuilt({"a": [None, "text"]}, of_array=len)
    {'a': [None, 'text']}
    """
    if _is_array(value):
        return of_array(value)
    if isinstance(value, Mapping):
        parts = {key: rebuilt(value[key], of_array, of_list) for key in value}
        if type(value) is dict or not isinstance(value, MutableMapping):
            return parts
        mapping = copy.copy(value)  # keeps a BatchEncoding's attributes
        for key, part in parts.items():
            mapping[key] = part
        return mapping
    if isinstance(value, (list, tuple)):
        whole = of_list(value)
        if whole is not None:
            return whole
        items = [rebuilt(item, of_array, of_list) for item in value]
        if hasattr(value, "_fields"):
            return type(value)(*items)
        return tuple(items) if isinstance(value, tuple) else items
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        made = copy.copy(value)
        for field in dataclasses.fields(value):
            object.__setattr__(made, field.name, rebuilt(getattr(value, field.name), of_array, of_list))
        return made
    return value
