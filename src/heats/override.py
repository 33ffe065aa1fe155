"""Hydra override texts: read one, and write the text of a value."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Quote, QuotedString, Sweep
from hydra.errors import HydraException

from heats.compose import config_error
from heats.errors import ConfigError

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override

_BARE_TEXT = re.compile(r"[A-Za-z_][A-Za-z0-9_./-]*")
_RESERVED_TEXT = {"null", "true", "false", "inf", "nan"}


def parse_override(text: str) -> Override:
    """The override as Hydra's parser reads it.

    Raises:
        ConfigError: The parser cannot read it.
    """
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except HydraException as exc:
        raise config_error(exc) from exc
    except RecursionError as exc:
        raise refusal(text, "it is nested too deeply", "Move the value into a config file") from exc


def element_text(value: Any) -> str:
    """Hydra override text that parses back to exactly `value`, type included.

    Args:
        value: None, bool, int, float, str, or lists and dicts of them.
    """
    if value is None:
        return "null"
    if isinstance(value, str):
        if _BARE_TEXT.fullmatch(value) and value.lower() not in _RESERVED_TEXT:
            return value
        return QuotedString(value, Quote.single).with_quotes()
    if isinstance(value, list):
        return f"[{','.join(map(element_text, value))}]"
    if isinstance(value, dict):
        items = (f"{_dict_key_text(key)}:{element_text(item)}" for key, item in value.items())
        return f"{{{','.join(items)}}}"
    return repr(value)


def _dict_key_text(key: Any) -> str:
    # The grammar has no quoted dict keys: special characters are escaped.
    return (
        re.sub(r"([\\()\[\]{}:=, \t])", r"\\\1", key) if isinstance(key, str) else element_text(key)
    )


def plain(element: Any) -> Any:
    """The element without the parser's quotes."""
    if isinstance(element, QuotedString):
        return element.text
    if isinstance(element, list):
        return [plain(item) for item in element]
    if isinstance(element, dict):
        return {key: plain(item) for key, item in element.items()}
    return element


def refuse_nested_sweep(text: str, value: Any) -> None:
    """Raise ConfigError for a sweep inside of a value, which Hydra reads but cannot sweep."""
    if isinstance(value, (Sweep, Glob)):
        raise refusal(
            text, "a sweep cannot stand inside a value", "Sweep the whole value: key=[1,2],[3,4]"
        )
    for item in (
        value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    ):
        refuse_nested_sweep(text, item)


def refusal(text: str, problem: str, remedy: str) -> ConfigError:
    """The error for an override that can be read but not used, its value cut to 80 characters."""
    key, _, value = text.partition("=")
    return ConfigError(f"{key}={value:.80} is not valid: {problem}. {remedy}.")
