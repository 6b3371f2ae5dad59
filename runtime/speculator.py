"""Speculative decoding: how many guessed tokens a step is to verify.

A step with rows for guessed tokens draws after each of them what plain decoding would have drawn there: a draw depends
on its seed and output index alone. As long as draws and guesses agree the draws are kept, and the first other one, too.
So outputs are those without speculation, token for token, greedy or not.

What remains is a question of speed. A guess costs a row; what rows cost is measured, and so is how often a sequence's
guesses are right. Each step verifies as many as should yield the most tokens a second, which may be none.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence as Seq
from typing import Any

from .drafts import Drafter, SharedOutputs
from .options import SpeculativeConfig
from .sequence import Sequence

LEAST_GAIN = 1.05
"""More tokens a second than without, by the estimate, for guesses to be verified."""
LEAST_CHANCE = 0.05
"""That a guess and those before it are right, for it to be considered."""
FORGET_STEPS = 256
"""Steps after which the cost of a step's size has to be measured again."""
_NEW = 0.2
"""Weight of a new measurement."""


class StepCosts:
    """Seconds that decoding steps take by their rows: as measured, and in between by interpolation.

    Sizes above the largest measured are thought to cost no more, so they are tried, once.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measured: dict[int, int] = {}
        self._sizes: list[int] = []
        self._steps = 0

    def add(self, rows: int, seconds: float) -> None:
        """Take in a measurement. One that is much longer than the last counts less: something else was at work."""
        self._steps += 1
        known = self._seconds.get(rows)
        if known is None:
            insort(self._sizes, rows)
            self._seconds[rows] = seconds
        else:
            self._seconds[rows] = known + _NEW * (min(seconds, 2 * known) - known)
        self._measured[rows] = self._steps

    def is_known(self, rows: int) -> bool:
        """Whether this size was measured lately."""
        return rows in self._measured and self._steps - self._measured[rows] < FORGET_STEPS

    def forget(self, rows: int) -> None:
        """Drop what was measured too long ago, for sizes above `rows`."""
        for size in [size for size in self._sizes if size > rows and not self.is_known(size)]:
            del self._seconds[size], self._measured[size]
            self._sizes.remove(size)

    def __call__(self, rows: int) -> float:
        """The estimate for a size."""
        sizes, seconds = self._sizes, self._seconds
        at = bisect_left(sizes, rows)
        if at == len(sizes):
            return seconds[sizes[-1]]
        above = sizes[at]
        if above == rows or at == 0:
            return seconds[above]
        below = sizes[at - 1]
        share = (rows - below) / (above - below)
        return seconds[below] + share * (seconds[above] - seconds[below])


class Speculator:
    """Starts drafters, decides what a step verifies, and counts."""

    def __init__(self, config: SpeculativeConfig, most_rows: int) -> None:
        """A step may have so many rows."""
        self._config, self._most_rows = config, most_rows
        self._shared = SharedOutputs(config) if config.method == "suffix" else None
        self._costs = StepCosts()
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self.accepted_at = [0] * config.most
        """Accepted tokens by their place in the guess."""

    def start(self, sequence: Sequence) -> None:
        """Begin to guess for a sequence that starts to run, if that can be done."""
        sequence.drafter = Drafter(self._config, self._shared)
        sequence.drafter.take(sequence.tokens[: sequence.known].tolist())

    def finish(self, sequence: Sequence) -> None:
        """Remember what a sequence said."""
        if self._shared is not None and sequence.drafter is not None:
            self._shared.add(sequence.tokens[sequence.prompt_length : sequence.known].tolist())

    def choose(self, decoding: Seq[Sequence]) -> int:
        """Set how many guessed tokens the next step verifies for each of these sequences, whose tokens are all known,
        and write them behind those; how many it is in all."""
        total = 0
        for sequence, count in zip(decoding, self._counts(decoding), strict=True):
            sequence.drafts = 0
            if count and sequence.drafter is not None:
                guess = _allowed(sequence, sequence.drafter.guess[:count])
                sequence.tokens[sequence.length : sequence.length + len(guess)] = guess
                sequence.drafts = len(guess)
            total += sequence.drafts
        return total

    def is_promising(self, decoding: Seq[Sequence]) -> bool:
        """Whether to wait for the step in flight, since guesses of what follows it will probably be worth verifying."""
        return any(self._counts(decoding))

    def _counts(self, decoding: Seq[Sequence]) -> list[int]:
        room = self._most_rows - len(decoding)
        if not self._config.adaptive:
            counts = []
            for sequence in decoding:
                counts.append(min(_usable(sequence), room))
                room -= counts[-1]
            return counts
        counts = [0] * len(decoding)
        for index in self._worthwhile(decoding)[: max(0, room)]:
            counts[index] += 1
        return counts

    def _worthwhile(self, decoding: Seq[Sequence]) -> list[int]:
        """Whose next guessed token is worth a row, an index for each row."""
        base = len(decoding)
        if not self._costs.is_known(base):
            return []  # a step without guesses tells what it costs
        chances: list[tuple[float, int]] = []
        for index, sequence in enumerate(decoding):
            if usable := _usable(sequence):
                assert sequence.drafter is not None
                chance = each = sequence.drafter.chance
                while usable and chance >= LEAST_CHANCE:
                    chances.append((chance, index))
                    chance *= each
                    usable -= 1
        if not chances:
            return []
        chances.sort(key=lambda entry: -entry[0])
        self._costs.forget(base)
        expected, best, count = float(base), LEAST_GAIN * base / self._costs(base), 0
        for extra, (chance, _) in enumerate(chances, 1):
            expected += chance
            rate = expected / self._costs(base + extra)
            if rate > best:
                best, count = rate, extra
        return [index for _, index in chances[:count]]

    def verified(self, drafts: int, accepted: int) -> None:
        """Count a sequence's guessed tokens that a step verified."""
        self.drafts += 1
        self.draft_tokens += drafts
        self.accepted_tokens += accepted
        for place in range(accepted):
            self.accepted_at[place] += 1

    def stats(self) -> dict[str, Any]:
        """The counters, as `request.Stats` names them."""
        return {
            "spec_drafts": self.drafts,
            "spec_draft_tokens": self.draft_tokens,
            "spec_accepted_tokens": self.accepted_tokens,
            "spec_accepted_per_position": tuple(self.accepted_at),
        }

    def measured(self, rows: int, seconds: float) -> None:
        """Take in how long a step took that had nothing but so many rows of decoding sequences."""
        if self._config.adaptive:
            self._costs.add(rows, seconds)


def _usable(sequence: Sequence) -> int:
    """How many guessed tokens a step can verify: the last draw is one token more."""
    drafter = sequence.drafter
    return 0 if drafter is None else min(len(drafter.guess), max(0, sequence.horizon - sequence.length - 1))


def _allowed(sequence: Sequence, guess: list[int]) -> list[int]:
    """As many of these tokens as a sequence's rules allow, before one that would end it."""
    if sequence.rules is None:
        return guess
    count = next((at for at, token in enumerate(guess) if token in sequence.sampling.stops), len(guess))
    return guess[: sequence.rules.usable(guess[:count])]
