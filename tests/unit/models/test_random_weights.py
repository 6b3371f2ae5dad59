"""Random weights: reproducible however they are read, and of the promised distribution."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.models.random_weights import RandomSource, RandomTensor
from toolkit.runtime.encodings import BFLOAT16, FLOAT16, FLOAT32, Encoding
from toolkit.runtime.errors import UserError

WIDE = RandomTensor("wide", (300, 70_000), FLOAT32, seed=7)  # five blocks of rows


@settings(max_examples=10, deadline=None)
@given(start=st.integers(0, 310), count=st.integers(0, 10))
def test_rows_do_not_depend_on_how_they_are_read(start: int, count: int) -> None:
    part = WIDE.read(start, start + count).data
    assert part.shape == (max(0, min(300, start + count) - min(300, start)), 70_000)
    for row in {0, len(part) - 1} if len(part) else set():
        np.testing.assert_array_equal(part[row], WIDE.read(start + row, start + row + 1).data[0])


@pytest.mark.parametrize("encoding", [FLOAT32, FLOAT16, BFLOAT16])
@pytest.mark.parametrize("mean", [0.0, 1.0])
def test_the_distribution(encoding: Encoding, mean: float) -> None:
    values = RandomTensor("a", (1000, 500), encoding, seed=1, mean=mean).read().decode()
    assert values.mean() == pytest.approx(mean, abs=1e-4)
    assert values.std() == pytest.approx(0.02, rel=0.02)
    assert abs(np.corrcoef(values[:-1].ravel(), values[1:].ravel())[0, 1]) < 0.01


def test_names_seeds_and_runs() -> None:
    def read(name: str, seed: int) -> list[float]:
        return [float(x) for x in RandomTensor(name, (4,), FLOAT32, seed).read().data]

    assert read("a", 1) == read("a", 1)
    assert len({tuple(read(name, seed)) for name in "ab" for seed in (1, 2)}) == 4
    # the same on every machine and release, or cached and published plans would silently change
    np.testing.assert_allclose(read("a", 1), EXPECTED, rtol=1e-6)


EXPECTED = [-0.03262002766132355, 0.022431688383221626, 0.013468194752931595, -0.007263438776135445]


def test_norm_weights_are_near_one() -> None:
    shapes = {"model.norm.weight": (64,), "model.layers.0.mlp.up_proj.weight": (64, 64), "model.layers.0.x.bias": (64,)}
    source = RandomSource(shapes, 0, FLOAT32)
    means = {name: float(source[name].read().data.mean()) for name in source}
    assert means["model.norm.weight"] == pytest.approx(1.0, abs=0.02)
    assert means["model.layers.0.mlp.up_proj.weight"] == pytest.approx(0.0, abs=0.02)
    assert means["model.layers.0.x.bias"] == pytest.approx(0.0, abs=0.02)


def test_unknown_name() -> None:
    source = RandomSource({"a": (2,)}, 0, FLOAT32)
    assert "a" in source
    assert "b" not in source
    with pytest.raises(UserError, match="no tensor b"):
        source["b"]
