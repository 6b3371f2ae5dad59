"""Random weights as the compiler sees them: shapes and an encoding, no numbers."""

from __future__ import annotations

import pytest

from toolkit.models.random_weights import RandomSource
from toolkit.runtime.encodings import BFLOAT16, FLOAT32
from toolkit.runtime.errors import InternalError, UserError


def test_shapes_and_encodings() -> None:
    source = RandomSource({"a.weight": (4, 6), "odd.weight": (4, 7)}, BFLOAT16)
    assert list(source) == ["a.weight", "odd.weight"]
    assert source["a.weight"].shape == (4, 6)
    assert source["a.weight"].encoding == BFLOAT16
    assert source["odd.weight"].encoding == FLOAT32


def test_numbers_are_never_read() -> None:
    with pytest.raises(InternalError, match=r"a\.weight were read"):
        RandomSource({"a.weight": (4,)}, FLOAT32)["a.weight"].read()


def test_unknown_name() -> None:
    source = RandomSource({"a": (2,)}, FLOAT32)
    assert "a" in source
    assert "b" not in source
    with pytest.raises(UserError, match="no tensor b"):
        source["b"]
