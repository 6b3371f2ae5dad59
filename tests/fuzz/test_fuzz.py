"""Damaged files of every kind are loaded or refused in a sentence: no crash, hang, huge allocation or other error."""

from __future__ import annotations

import pytest
from fuzz.campaign import NAMES, Campaign
from fuzz.loaders import LOADERS


def test_damaged_files_are_loaded_or_refused() -> None:
    result = Campaign(seed=0).run(0, 1000)
    assert not result.failures, "\n".join(result.lines())
    assert result.outcomes.total() == 1000
    for loader in NAMES:
        # Damage that goes unnoticed everywhere, or that everything is refused for, would test nothing.
        assert result.outcomes[loader, "loaded"] > 0
        assert result.outcomes[loader, "refused"] > 20


def test_every_loader_takes_part() -> None:
    assert tuple(LOADERS) == NAMES


@pytest.mark.parametrize(
    ("loader", "outcome"),
    [
        ("crash", "crash: the process ended with SIGABRT"),
        ("hang", "hang: it ran into the time limit"),
        ("huge", "MemoryError at misbehaving.py"),
        ("wrong", "ValueError at misbehaving.py"),
        ("lines", "a message of bad form"),
    ],
)
def test_faults_are_found_and_named(loader: str, outcome: str) -> None:
    result = Campaign(3, ("good", loader), "fuzz.misbehaving", seconds=1).run(0, 12)
    assert result.outcomes.total() == 12
    assert result.outcomes["good", "failed"] == 0
    failures = {index: found for (_, index), found in result.failures.items()}
    assert failures
    assert all(found.startswith(outcome) for found in failures.values())
    index = min(failures)
    again = Campaign(3, (loader,), "fuzz.misbehaving", seconds=1).run(index, index + 1)
    assert again.failures == {(loader, index): failures[index]}
    assert f"again: make fuzz FUZZ='--seed 3 --loader {loader} --first {index} --count 1'" in "\n".join(again.lines())
