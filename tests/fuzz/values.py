"""Edits of the dicts in a checkpoint: a value somewhere in them becomes another, honest in form or not."""

from __future__ import annotations

from typing import Any

from tests.forge import Call, Raw, Tensor, global_
from tests.fuzz.choice import Choice

_LAUGHS = Raw(
    b"](K\x01eq\x000"
    + b"".join(b"](" + (b"h" + bytes([i])) * 9 + b"eq" + bytes([i + 1]) + b"0" for i in range(60))
    + b"h\x3c"
)
_NUMBERS = (0, 1, 2, 3, 4, -1, 7, 255, 1 << 31, (1 << 48) - 1, 1 << 48, 1 << 62, 1 << 63, 1 << 64, 1 << 5000)
_KINDS = ("FloatStorage", "HalfStorage", "BFloat16Storage", "LongStorage", "ByteStorage", "QInt8Storage")
_NAMES = ("w", "b", "f", "buffer", "module", "", "a/b", "__metadata__", "\0", "\ud800", "x" * 2000, "_extra_state")
_CALLS = (
    Call("os", "system", ("id",)),
    Call("deepspeed.runtime.zero.config", "ZeroStageEnum", (3,)),
    Call("deepspeed.utils.tensor_fragment", "fragment_address", (0, 6)),
    Call("torch._utils", "_rebuild_sparse_tensor", ()),
    Call("torch._utils", "_rebuild_parameter", (Tensor("5", (2,)), False, None)),
    Call("torch", "Size", ([2, 3],)),
    Call("builtins", "set", ([1, 2],)),
    Call("collections", "OrderedDict", ([("w", 1)],)),
)


def edited(value: Any, choice: Choice, depth: int = 0) -> Any:
    """`value` with something in it replaced, taken away, doubled or added."""
    if depth < 6 and choice.byte() % 8:
        if isinstance(value, dict) and value:
            return _edited_dict(value, choice, depth)
        if isinstance(value, (list, tuple)) and value:
            return _edited_sequence(value, choice, depth)
    if isinstance(value, Tensor):
        return _edited_tensor(value, choice)
    if type(value) is int and choice.byte() % 2:
        return value + choice.of((1, -1, 2, -2, 1 << 32))
    return any_value(choice)


def _edited_dict(value: dict[Any, Any], choice: Choice, depth: int) -> dict[Any, Any]:
    key = choice.of(list(value))
    act = choice.below(8)
    if act == 0:
        return {each: item for each, item in value.items() if each != key}
    if act == 1:
        return {**value, any_key(choice): any_value(choice)}
    if act == 2:
        return {(any_key(choice) if each == key else each): item for each, item in value.items()}
    return {**value, key: edited(value[key], choice, depth + 1)}


def _edited_sequence(value: Any, choice: Choice, depth: int) -> Any:
    items, at = list(value), choice.below(len(value))
    act = choice.below(6)
    if act == 0:
        del items[at]
    elif act == 1:
        items.insert(at, items[at])
    elif act == 2:
        items.append(any_value(choice))
    else:
        items[at] = edited(items[at], choice, depth + 1)
    return tuple(items) if isinstance(value, tuple) else items


def _edited_tensor(value: Tensor, choice: Choice) -> Tensor:
    act = choice.below(5)
    key, shape, stride, offset, kind = value.key, value.shape, value.stride, value.offset, value.kind
    if act == 0:
        key = str(choice.below(9))
    elif act == 1:
        shape = tuple(choice.of(_NUMBERS[:9]) for _ in range(choice.below(4)))
    elif act == 2:
        stride = tuple(choice.of(_NUMBERS[:9]) for _ in shape)
    elif act == 3:
        offset = choice.of(_NUMBERS)
    else:
        kind = choice.of(_KINDS)
    try:
        return Tensor(key, shape, stride, offset, choice.below(20), kind)
    except TypeError:
        return value


def any_key(choice: Choice) -> Any:
    """A key for a dict: mostly a name."""
    return choice.of(_NAMES) if choice.byte() % 4 else choice.of((0, 7, None, True, 1 << 40, b"w"))


def any_value(choice: Choice, depth: int = 0) -> Any:
    """A value of any kind."""
    kind = choice.below(12)
    if kind < 2:
        return choice.of(_NUMBERS)
    if kind == 2:
        return choice.of((None, True, False, float("nan"), float("inf"), -0.5))
    if kind == 3:
        return choice.of(_NAMES)
    if kind == 4:
        return _LAUGHS if choice.byte() % 8 == 0 else choice.of(_NAMES)
    if kind == 5:
        return choice.of(_CALLS)
    if kind == 6:
        return Raw(global_(choice.of(("torch", "os", "collections")), choice.of(("float32", "system", "OrderedDict"))))
    if kind < 9:
        return Tensor(
            str(choice.below(9)), (choice.below(9),), None, choice.below(3), choice.below(17), choice.of(_KINDS)
        )
    if depth > 2:
        return None
    items = [any_value(choice, depth + 1) for _ in range(choice.below(4))]
    if kind == 9:
        return items
    return tuple(items) if kind == 10 else {any_key(choice): item for item in items}
