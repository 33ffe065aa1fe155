"""Events as lines of a ledger: one JSON object each, its last field a checksum of the rest.

A field that is always a tuple or an enum is written as a list or a name. JSON knows no infinity, no
tuple and no enum; elsewhere a one-key object stands for one (`{"$float": "nan"}`,
`{"$tuple": [...]}`, `{"$enum": "Scheduler.asha"}`, and `$map` for a mapping with other keys than
text or with a key that looks like these). So every event reads back as it was written, and `jq`
reads every line.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
import zlib
from enum import Enum
from types import UnionType
from typing import Any, get_args

from heats.config import AshaMode, Check, Direction, Framework, Isolation, Scheduler
from heats.errors import LedgerError
from heats.trial import Event, Fault, Objective, Reported, SystemSampled, TrialState, Verdict

VERSION = 1

assert isinstance(Event, UnionType)  # noqa: S101 - narrows the alias to what get_args can take
_CLASSES: dict[str, type[Any]] = {
    re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__).lower(): cls for cls in get_args(Event)
}
_NAMES = {cls: name for name, cls in _CLASSES.items()}
_FIELDS = {cls: tuple(spec.name for spec in dataclasses.fields(cls)) for cls in _NAMES}
_ENUMS = {
    cls.__name__: cls
    for cls in (AshaMode, Check, Direction, Framework, Isolation, Scheduler, TrialState, Verdict)
}
_TUPLES = frozenset({"argv", "fixed", "overrides"})
_NAMED: dict[str, type[TrialState | Verdict | Fault]] = {
    "state": TrialState,
    "verdict": Verdict,
    "fault": Fault,
}
# Nearly all lines are of these two; their fields are plain JSON unless a number is not finite.
_HOT = frozenset({Reported, SystemSampled})

_CRC_HEAD = b',"crc":"'
_CRC_BYTES = len(_CRC_HEAD) + 8 + len(b'"}')

_dump = json.JSONEncoder(separators=(",", ":"), allow_nan=False, check_circular=False).encode


def encode_event(event: Event) -> bytes:
    r"""The line of an event, with its final newline.

    Raises:
        LedgerError: A field holds an object that no line can hold; the message names it.
    """
    cls = type(event)
    fields: dict[str, Any] = {"event": _NAMES[cls]}
    try:
        if cls in _HOT:
            for name in _FIELDS[cls]:
                fields[name] = getattr(event, name)
            try:
                body = _dump(fields)
            except ValueError:  # NaN or infinity
                body = _dump(_to_plain(fields))
        else:
            for name in _FIELDS[cls]:
                fields[name] = _field_to_plain(name, getattr(event, name))
            body = _dump(fields)
    except (TypeError, ValueError, RecursionError) as exc:
        msg = f"The event {_NAMES[cls]!r} cannot be written to a ledger: {exc}."
        raise LedgerError(msg) from exc
    rest = body[:-1].encode()
    return rest + _CRC_HEAD + b'%08x"}\n' % _crc(rest)


def decode_line(line: bytes) -> Event:
    """The event of a line, given with or without its newline.

    Raises:
        LedgerError: The checksum does not match, or a newer heats wrote the line. The message says
            which, without naming the file.
    """
    line = line.rstrip(b"\n")
    rest, crc = line[:-_CRC_BYTES], line[-_CRC_BYTES:]
    if crc != _CRC_HEAD + b'%08x"}' % _crc(rest):
        msg = "its checksum does not match its content"
        raise LedgerError(msg)
    fields = json.loads(rest + b"}")
    cls = _CLASSES.get(fields["event"])
    if cls is None or fields.get("version", VERSION) > VERSION:
        msg = "a newer heats wrote it; read it with that one"
        raise LedgerError(msg)
    event: Event = cls(
        **{name: _field_from_plain(name, fields[name]) for name in _FIELDS[cls] if name in fields}
    )
    return event


def _crc(rest: bytes) -> int:
    return zlib.crc32(b"}", zlib.crc32(rest))


def _field_to_plain(name: str, value: Any) -> Any:
    match value:
        case tuple() if name in _TUPLES:
            return [str(item) for item in value]
        case TrialState() | Verdict() | Fault():
            return value.name
        case Objective():
            return {
                "metric": value.metric,
                "direction": value.direction.name,
                "resource": value.resource,
            }
    return _to_plain(value)


def _field_from_plain(name: str, value: Any) -> Any:
    if name in _TUPLES:
        return tuple(value)
    if name in _NAMED and value is not None:
        return _NAMED[name][value]
    if name == "objective":
        return Objective(value["metric"], Direction[value["direction"]], value["resource"])
    return _from_plain(value)


def _to_plain(value: Any) -> Any:
    match value:
        case Enum() if _ENUMS.get(type(value).__name__) is type(value):
            return {"$enum": f"{type(value).__name__}.{value.name}"}
        case None | bool() | int() | str():
            return value
        case float():
            return value if math.isfinite(value) else {"$float": repr(float(value))}
        case tuple():
            return {"$tuple": [_to_plain(item) for item in value]}
        case list():
            return [_to_plain(item) for item in value]
        case dict() if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: _to_plain(item) for key, item in value.items()}
        case dict():
            return {"$map": [[_to_plain(key), _to_plain(item)] for key, item in value.items()]}
    msg = f"{type(value).__qualname__} {value!r:.80} is no JSON value"
    raise TypeError(msg)


def _from_plain(value: Any) -> Any:
    match value:
        case {"$float": str(text)}:
            return float(text)
        case {"$tuple": list(items)}:
            return tuple(_from_plain(item) for item in items)
        case {"$enum": str(text)}:
            cls, _, member = text.partition(".")
            return _ENUMS[cls][member]
        case {"$map": list(pairs)}:
            return {_from_plain(key): _from_plain(item) for key, item in pairs}
        case dict():
            return {key: _from_plain(item) for key, item in value.items()}
        case list():
            return [_from_plain(item) for item in value]
    return value
