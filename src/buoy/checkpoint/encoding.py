"""From what a training holds to what a file can hold, and back: plain values as JSON, arrays as named tensors.

Nothing is pickled and nothing is executed on the way back. What is neither plain nor a tensor is refused by
its path, so that it is refused at the start of a training and not at step 10,000.
"""

from __future__ import annotations

import math
import struct
import sys
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType
from typing import Any

from buoy.errors import BuoyError

ITEM_BYTES = {
    "F64": 8, "I64": 8, "U64": 8, "C64": 8, "F32": 4, "I32": 4, "U32": 4,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2,
    "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1,
}  # fmt: skip
"""safetensors' word for a type, and the bytes of one element."""

_TAG = "$"  # a JSON object with this key stands for something that JSON has no word for
_DEEPEST = 100
_SAFE_INT = 1 << 64  # longer ones go as hexadecimal: Python refuses very long decimals
_INLINE_BYTES = 1024  # longer byte strings are stored as tensors, not as text
_NUMPY_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "complex64": "C64", "bool": "BOOL",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip


_DEFAULTS: dict[str, Any] = {
    f"defaultdict({kind.__name__})": kind for kind in (int, float, list, dict, set, deque, Counter)
}


class CannotSave(BuoyError):  # noqa: N818 - says what happened
    """Something tracked is neither a plain value nor a tensor."""


class BadTree(Exception):  # noqa: N818 - says what it is
    """JSON that `encode` never wrote."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """One array on its way to disk."""

    dtype: str
    """One of `ITEM_BYTES`."""
    shape: tuple[int, ...]
    copy_into: Callable[[memoryview], object]
    """Fills exactly `nbytes` bytes, C order, little endian; called on the training's thread."""
    key: Hashable | None = None
    """Equal keys mean the same memory (tied weights): stored once."""
    order: tuple[int, ...] | None = None
    """Its dimensions as they lie in memory, the outermost first (channels last: 0, 2, 3, 1); None: in C order."""
    address: int | None = None
    """Where it lies in this process's memory just as `copy_into` would write it; None: it does not."""

    @property
    def nbytes(self) -> int:
        """How many bytes it takes."""
        return ITEM_BYTES[self.dtype] * math.prod(self.shape)


AsTensor = Callable[[object], Tensor | None]
"""An adapter's: what it knows as a tensor; None for everything else."""


@dataclass(slots=True)
class Encoded:
    """A value ready for disk."""

    tree: object
    """JSON: the value with names in place of its tensors."""
    tensors: dict[str, Tensor]


@dataclass(slots=True)
class _Encoding:
    """What several values of one checkpoint share: the names that are taken, the memory already stored."""

    as_tensor: AsTensor
    tensors: dict[str, Tensor] = field(default_factory=dict)
    by_key: dict[object, str] = field(default_factory=dict)

    def tensor_name(self, path: tuple[str, ...], tensor: Tensor) -> str:
        same_memory = (tensor.key, tensor.dtype, tensor.shape)
        if tensor.key is not None and same_memory in self.by_key:
            return self.by_key[same_memory]
        # A name must be a Unicode text and one of a kind: "a.b" may be one key or two.
        plain = "/".join((path[0], ".".join(path[1:]))) if len(path) > 1 else path[0]
        plain = plain.encode("utf-8", "backslashreplace").decode()
        name, count = plain, 1
        while name in self.tensors or name == "__metadata__":
            count += 1
            name = f"{plain}~{count}"
        self.tensors[name] = tensor
        if tensor.key is not None:
            self.by_key[same_memory] = name
        return name


def encode(name: str, value: object, as_tensor: AsTensor) -> Encoded:
    """One named value; refuses by path what cannot be saved.

    >>> encode("scheduler", {"last_epoch": 3, "milestones": (10, 20)}, lambda value: None).tree
    {'last_epoch': 3, 'milestones': {'$': 'tuple', 'v': [10, 20]}}
    """
    encoding = _Encoding(as_tensor)
    return Encoded(_encode(value, (name,), encoding), encoding.tensors)


def encode_all(items: Mapping[str, object], as_tensor: AsTensor) -> Encoded:
    """All values of a checkpoint, as a tree by name; memory that they share is stored once."""
    encoding = _Encoding(as_tensor)
    trees = {name: _encode(value, (name,), encoding) for name, value in items.items()}
    return Encoded(trees, encoding.tensors)


def decode(
    tree: object, tensor: Callable[..., object], raw: Callable[[str], memoryview] | None = None
) -> object:
    """The exact inverse of `encode`: `tensor` turns a stored tensor's name (and its `order`, if it has one) into the
    adapter's own.

    `raw` gives a stored tensor's bytes, for long byte strings and numpy arrays, which are stored as tensors too.

    >>> decode({"$": "tuple", "v": [1, {"$": "float", "v": "7ff0000000000000"}]}, str)
    (1, inf)
    """
    if isinstance(tree, list):
        return [decode(item, tensor, raw) for item in tree]
    if not isinstance(tree, dict):
        return tree
    if _TAG not in tree:
        return {key: decode(value, tensor, raw) for key, value in tree.items()}
    kind, value = tree[_TAG], tree.get("v")
    if kind == "tensor":
        return tensor(_text(value), tree["order"]) if "order" in tree else tensor(_text(value))
    if kind in ("bytes", "bytearray"):
        data = _from_hex(value) if "v" in tree else _stored_bytes(raw, tree)
        return data if kind == "bytes" else bytearray(data)
    if kind == "array":
        return _numpy_array(raw, tree)
    if kind in ("int", "float"):
        return _number(kind, value)
    if kind == "enum":
        plain = decode(value, tensor, raw)
        member = _enum_member(tree.get("named"))
        return plain if member is None else member
    if kind == "scalar":
        return _numpy_scalar(_text(tree.get("dtype")), decode(value, tensor, raw))
    if not isinstance(value, list):
        raise BadTree(f"a {kind!r} without its list of items")
    if kind == "dict":
        if not all(isinstance(pair, list) and len(pair) == 2 for pair in value):
            raise BadTree("a dict that is not made of key-value pairs")
        pairs = {_hashable(decode(key, tensor, raw)): decode(item, tensor, raw) for key, item in value}
        return _dict_of(tree.get("of"), pairs)
    items = [decode(item, tensor, raw) for item in value]
    if kind == "complex" and [type(part) for part in items] == [float, float]:
        return complex(*items)  # type: ignore[call-overload]
    if kind == "tuple":
        named = _named_tuple(tree.get("named"))
        return tuple(items) if named is None else tuple.__new__(named, items)
    if kind == "deque":
        most = tree.get("most")
        if most is not None and (type(most) is not int or not 0 <= most <= sys.maxsize):
            raise BadTree("a deque with an invalid maximum length")
        return deque(items, most)
    if kind in ("set", "frozenset"):
        members = {_hashable(item) for item in items}
        return members if kind == "set" else frozenset(members)
    raise BadTree(f"an unknown type of value, {kind!r}")


def _encode(value: object, path: tuple[str, ...], encoding: _Encoding) -> object:
    if value is None or value is True or value is False:
        return value
    kind = type(value)
    if kind is str or (kind is int and -_SAFE_INT < value < _SAFE_INT):  # type: ignore[operator]
        return value
    if kind is float:
        return value if math.isfinite(value) else _tagged("float", struct.pack(">d", value).hex())  # type: ignore[arg-type]
    tensor = encoding.as_tensor(value)
    if tensor is not None:
        if tensor.dtype not in ITEM_BYTES:
            raise _refused(path, f"is a tensor of dtype {tensor.dtype}, which safetensors does not support")
        named_tensor = _tagged("tensor", encoding.tensor_name(path, tensor))
        return named_tensor if tensor.order is None else {**named_tensor, "order": list(tensor.order)}
    if len(path) > _DEEPEST:
        raise _refused(path[:6], f"is nested more than {_DEEPEST} levels deep, or contains itself")
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, encoding)
    if isinstance(value, (list, tuple, deque)):
        items = [_encode(item, (*path, str(place)), encoding) for place, item in enumerate(value)]
        if isinstance(value, deque):
            return {**_tagged("deque", items), "most": value.maxlen}
        if isinstance(value, list):
            return items
        named = [kind.__module__, kind.__qualname__, *getattr(kind, "_fields", ())]
        if kind is not tuple and _named_tuple(named) is kind:
            return {**_tagged("tuple", items), "named": named}
        return _tagged("tuple", items)
    return _encode_rare(value, path, encoding)


def _encode_mapping(value: Mapping[object, object], path: tuple[str, ...], encoding: _Encoding) -> object:
    of = _kind_of_dict(value)
    if _TAG not in value and of is None and all(type(key) is str for key in value):
        return {str(key): _encode(item, (*path, str(key)), encoding) for key, item in value.items()}
    pairs = []
    for key, item in value.items():
        if encoding.as_tensor(key) is not None:
            raise _refused(path, "has a tensor as a dict key")
        pairs.append([_encode(key, path, encoding), _encode(item, (*path, str(key)), encoding)])
    return _tagged("dict", pairs) if of is None else {**_tagged("dict", pairs), "of": of}


def _encode_rare(value: object, path: tuple[str, ...], encoding: _Encoding) -> object:
    kind = type(value)
    if isinstance(value, (set, frozenset)):
        members = sorted(value, key=repr)  # the same set gives the same bytes in every process
        items = [_encode(item, (*path, str(place)), encoding) for place, item in enumerate(members)]
        return _tagged("set" if isinstance(value, set) else "frozenset", items)
    if isinstance(value, (bytes, bytearray)):
        word = "bytearray" if isinstance(value, bytearray) else "bytes"
        if len(value) <= _INLINE_BYTES:
            return _tagged(word, value.hex())
        data = bytes(value)
        tensor = Tensor("U8", (len(data),), lambda room: room.__setitem__(slice(None), data))
        return {_TAG: word, "tensor": encoding.tensor_name(path, tensor)}
    if kind.__module__ == "numpy":
        return _encode_numpy(value, path, encoding)
    if isinstance(value, complex):
        return _tagged("complex", [_encode(part, path, encoding) for part in (value.real, value.imag)])
    if kind is int:
        return _tagged("int", hex(value))  # type: ignore[arg-type]
    if isinstance(value, (int, float, str)):  # a subclass: what it is worth, as a plain value
        plain: object = str.__str__(value) if isinstance(value, str) else None
        if plain is None:
            plain = _encode(int(value) if isinstance(value, int) else float(value), path, encoding)
        if isinstance(value, Enum):  # `if state["phase"] is Phase.WARM_UP` must hold for what comes back
            named = [kind.__module__, kind.__qualname__, value.name]
            return {**_tagged("enum", plain), "named": named} if _enum_member(named) is value else plain
        return plain
    raise _refused(path, f"is {_article(_kind_in_words(value))}")


def _encode_numpy(value: object, path: tuple[str, ...], encoding: _Encoding) -> object:
    """numpy's values without importing numpy: whoever has one has imported it."""
    shape, word = getattr(value, "shape", None), str(getattr(value, "dtype", type(value).__name__))
    if type(value).__name__ == "ndarray" and isinstance(shape, tuple):
        if word not in _NUMPY_TYPES:
            raise _refused(path, f"is a numpy array of dtype {word}, which safetensors does not support")

        def copy_into(room: memoryview) -> None:
            room[:] = memoryview(value.reshape(-1).view("uint8"))  # type: ignore[attr-defined]

        tensor = Tensor(_NUMPY_TYPES[word], shape, copy_into)
        return {
            _TAG: "array",
            "tensor": encoding.tensor_name(path, tensor),
            "dtype": word,
            "shape": list(shape),
        }
    item = getattr(value, "item", None)
    plain = item() if callable(item) else None
    if word in _NUMPY_TYPES:  # a float32 that came back as a double would round otherwise from then on
        return {**_tagged("scalar", _encode(plain, path, encoding)), "dtype": word}
    if type(plain) in (bool, int, float, complex, str, bytes):
        return _encode(plain, path, encoding)
    raise _refused(path, f"is a numpy {word}")


def _numpy_array(raw: Callable[[str], memoryview] | None, tree: Mapping[str, object]) -> object:
    from importlib import import_module

    dtype, shape, data = _text(tree.get("dtype")), tree.get("shape"), _stored_bytes(raw, tree)
    if dtype not in _NUMPY_TYPES or not isinstance(shape, list):
        raise BadTree("a numpy array without a supported dtype and shape")
    try:
        # Its own, writable memory.
        return import_module("numpy").frombuffer(data, dtype=dtype).reshape(shape).copy()
    except (ValueError, TypeError, OverflowError) as error:
        raise BadTree(f"an invalid numpy array: {error}") from None


def _numpy_scalar(dtype: str, value: object) -> object:
    from importlib import import_module

    if dtype not in _NUMPY_TYPES or type(value) not in (bool, int, float, complex):
        raise BadTree("a numpy number without a supported dtype")
    try:
        return import_module("numpy").dtype(dtype).type(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise BadTree(f"an invalid numpy number: {error}") from None


def _named_tuple(named: object) -> type[tuple[object, ...]] | None:
    """The class of a named tuple, if this process has it: looked up where it was defined, and nothing is imported."""
    if not isinstance(named, list) or len(named) < 2 or not all(isinstance(word, str) for word in named):
        return None
    found = _looked_up(named[0], named[1])
    if found is None or not issubclass(found, tuple):
        return None
    # Other tuples (torch.Size, os.stat_result) have no such names, and may not be made without their own code.
    fields = getattr(found, "_fields", None)
    return found if isinstance(fields, tuple) and list(fields) == named[2:] else None


def _enum_member(named: object) -> Enum | None:
    """A member of an `IntEnum`, `StrEnum` or their like, if this process has it."""
    if not isinstance(named, list) or len(named) != 3 or not all(isinstance(word, str) for word in named):
        return None
    found = _looked_up(named[0], named[1])
    return found.__members__.get(named[2]) if found is not None and issubclass(found, Enum) else None


def _looked_up(module: str, path: str) -> type | None:
    """In modules and classes only: no code of theirs runs."""
    found: object = sys.modules.get(module)
    for name in path.split("."):
        found = vars(found).get(name) if isinstance(found, (ModuleType, type)) else None
    return found if isinstance(found, type) else None


def _kind_of_dict(value: object) -> str | None:
    """A counter, or a dict with one of the usual defaults; any other is saved as a plain one."""
    if type(value) is defaultdict:
        return next((name for name, kind in _DEFAULTS.items() if kind is value.default_factory), None)
    return "Counter" if type(value) is Counter else None


def _dict_of(of: object, pairs: dict[Any, Any]) -> dict[Any, Any]:
    if of == "Counter":
        return Counter(pairs)
    return defaultdict(_DEFAULTS[of], pairs) if isinstance(of, str) and of in _DEFAULTS else pairs


def _stored_bytes(raw: Callable[[str], memoryview] | None, tree: Mapping[str, object]) -> bytes:
    if raw is None:
        raise BadTree("bytes stored as a tensor, where none is allowed")
    return bytes(raw(_text(tree.get("tensor"))))


def _number(kind: str, value: object) -> int | float:
    try:
        return int(_text(value), 16) if kind == "int" else struct.unpack(">d", _from_hex(value))[0]
    except (ValueError, struct.error):
        raise BadTree(f"not a valid {kind}") from None


def _from_hex(value: object) -> bytes:
    try:
        return bytes.fromhex(_text(value))
    except ValueError:
        raise BadTree("bytes that are not valid hexadecimal") from None


def _tagged(kind: str, value: object) -> dict[str, object]:
    return {_TAG: kind, "v": value}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise BadTree("a string is missing")
    return value


def _hashable(value: object) -> Hashable:
    try:
        hash(value)
    except TypeError:
        raise BadTree("a dict key or set member that cannot be hashed") from None
    return value


def _refused(path: tuple[str, ...], what: str) -> CannotSave:
    return CannotSave(
        f"{_shown(path)} {what}",
        expected="tensors, numpy arrays, numbers, strings, and lists, tuples, deques, sets and dicts of them",
        hint="track it under its own name, or leave it out: give its owner a state_dict() without it",
    )


def _shown(path: tuple[str, ...]) -> str:
    """The path as a user would write it: `scheduler.lr_lambdas[0]`."""
    text = path[0]
    for part in path[1:]:
        if part.isdigit():
            text += f"[{part}]"
        else:
            text += f".{part}" if part.isprintable() and len(part) < 200 else f"[{part[:40]!r}]"
    return text


def _kind_in_words(value: object) -> str:
    kind = type(value)
    if kind.__name__ in ("function", "method", "builtin_function_or_method", "generator", "module", "type"):
        return {"builtin_function_or_method": "function", "type": "class"}.get(kind.__name__, kind.__name__)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"


def _article(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"
