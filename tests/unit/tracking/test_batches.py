from __future__ import annotations

import pytest

from heats.tracking.batches import storable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain ünïcode 🙂", "plain ünïcode 🙂"),
        ("a\x00b", "a\ufffdb"),
        ("half \ud83d of a pair", "half \ufffd\ufffd\ufffd of a pair"),
    ],
)
def test_text_is_what_every_database_takes(text: str, expected: str) -> None:
    assert storable(text) == expected
