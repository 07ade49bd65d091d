"""YAML, the part of it that a description of a cluster needs: objects, lists, numbers, texts.

Anchors, tags and several documents are refused, so that a short hostile text stays short, and words such as
``12:30`` or ``no`` stay texts: only what JSON calls a number, ``true``, ``false`` and ``null`` are more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from hdtensor.errors import PlannerError
from hdtensor.plan.fields import shown
from hdtensor.plan.reader import MAX_DEPTH


MAX_CHARACTERS = 1 << 18
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,17})")
_FLOAT = re.compile(r"-?(?:0|[1-9][0-9]{0,17})(?:\.[0-9]{1,18})?(?:[eE][+-]?[0-9]{1,2})?")
_WORDS = {"true": True, "false": False, "null": None, "~": None, "": None}


def parse_yaml(text: str, what: str = "the file") -> Any:
    """Return the JSON value that a YAML text says.

    >>> parse_yaml("nodes: [8x H800]\\nnetwork: 50 GB/s")
    {'nodes': ['8x H800'], 'network': '50 GB/s'}

    Args:
        text: At most 262,144 characters.
        what: What an error calls it.

    Raises:
        PlannerError: If it is no YAML, or more than the part above.
    """
    if len(text) > MAX_CHARACTERS:
        raise PlannerError(
            f"{what} has {len(text)} characters; allowed: {MAX_CHARACTERS}. Write it as JSON."
        )
    try:
        return _Builder(what).document(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" at line {mark.line + 1}, column {mark.column + 1}" if mark is not None else ""
        problem = getattr(error, "problem", None) or "a character that YAML does not allow"
        raise PlannerError(f"{what} is not YAML: {problem}{where}.") from None


class _Builder:
    """Makes values from the events of a parser."""

    def __init__(self, what: str) -> None:
        self._what = what

    def document(self, events: Iterator[Any]) -> Any:
        """Return the value of the only document; None if there is none."""
        value: Any = None
        num_documents = 0
        for event in events:
            if isinstance(event, yaml.DocumentStartEvent):
                num_documents += 1
                if num_documents > 1:
                    raise self._refused(event, "a second document")
            elif isinstance(event, yaml.NodeEvent):
                value = self._value(event, events, 0)
        return value

    def _value(self, event: Any, events: Iterator[Any], depth: int) -> Any:
        if depth > MAX_DEPTH:
            raise PlannerError(f"{self._what} is nested deeper than {MAX_DEPTH} levels.")
        if isinstance(event, yaml.AliasEvent) or event.anchor is not None:
            raise self._refused(event, "an anchor")
        if isinstance(event, yaml.ScalarEvent):
            return self._scalar(event)
        if event.tag is not None:
            raise self._refused(event, "a tag")
        if isinstance(event, yaml.SequenceStartEvent):
            return [
                self._value(item, events, depth + 1)
                for item in _until(events, yaml.SequenceEndEvent)
            ]
        return self._object(events, depth)

    def _object(self, events: Iterator[Any], depth: int) -> dict[str, Any]:
        out: dict[str, Any] = {}
        for event in _until(events, yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent) or event.anchor or event.tag:
                raise self._refused(event, "a key that is no word")
            if event.value in out:
                raise PlannerError(
                    f"{self._what}: the key {shown(event.value)} stands twice in one object; keep one."
                )
            out[event.value] = self._value(next(events), events, depth + 1)
        return out

    def _scalar(self, event: Any) -> Any:
        text = event.value
        if event.tag is not None:
            raise self._refused(event, "a tag")
        if not event.implicit[0]:  # quoted
            return text
        if text.lower() in _WORDS:
            return _WORDS[text.lower()]
        if _INTEGER.fullmatch(text):
            return int(text)
        return float(text) if _FLOAT.fullmatch(text) else text

    def _refused(self, event: Any, what: str) -> PlannerError:
        return PlannerError(
            f"{self._what}: {what} at line {event.start_mark.line + 1} is not read; write values out as "
            f"objects, lists, numbers and texts."
        )


def _until(events: Iterator[Any], end: type) -> Iterator[Any]:
    for event in events:
        if isinstance(event, end):
            return
        yield event
