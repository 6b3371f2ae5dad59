"""How close a plan is to a reference: perplexity, KL divergence and agreement over a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from ..runtime.engine import MAX_SCORE_BYTES, Engine, open_engine
from ..runtime.errors import InternalError, UserError
from ..runtime.options import EngineOptions
from ..runtime.prompt import Prompts
from ..runtime.request import Add, Error, Finished, SamplingParams, Tokens
from .windows import cut, read_text

TEXT = Path(__file__).with_name("quality_text.txt")
"""The text that is used without `--text`: stories, explanations, code, a recipe, sums, and three other languages."""

Rows = Sequence[npt.NDArray[np.float32]]
"""Log-probabilities over the vocabulary, a position each."""


class Quality(msgspec.Struct, frozen=True):
    """What was measured; `--json` prints it."""

    plan: str
    reference: str
    text: str
    tokens: int
    """Positions at which the next token was predicted."""
    window: int
    """Tokens that were run together, each window without those before it."""
    perplexity: float
    reference_perplexity: float
    kl: float
    """Mean KL divergence of the plan's distribution from the reference's, in nats a token."""
    kl_p99: float
    """The divergence that 99% of the positions stay below."""
    top1_agreement: float
    """Share of the positions where both find the same token likeliest."""


class Scorer(Protocol):
    """A model that predicts a sequence."""

    @property
    def vocabulary(self) -> int: ...

    def logprobs(self, tokens: Sequence[int]) -> Rows:
        """Log-probabilities [V] of what follows each of n tokens but the last."""


class PlanScorer:
    """A plan, by the engine's prompt scoring."""

    def __init__(self, directory: Path, options: EngineOptions) -> None:
        self._engine: Engine = open_engine(
            directory, msgspec.structs.replace(options, max_num_seqs=1, prefix_cache=False)
        )
        self.plan = self._engine.plan
        self.vocabulary = self.plan.model.vocab_size
        self.longest = min(self._engine.max_tokens - 1, MAX_SCORE_BYTES // (4 * self.vocabulary))
        """Most tokens that can be scored together."""

    def logprobs(self, tokens: Sequence[int]) -> Rows:
        params = SamplingParams(max_tokens=1, temperature=0, prompt_logprobs=-1)
        self._engine.add(Add(request="score", prompt=list(tokens), params=params))
        rows: list[npt.NDArray[np.float32]] = []
        while self._engine.has_work:
            for event in self._engine.step():
                if isinstance(event, Error):
                    raise (UserError if event.user_fault else InternalError)(event.message)
                if isinstance(event, Tokens):
                    rows += [np.frombuffer(entry.row, "<f4") for entry in event.prompt_logprobs or () if entry]
                if isinstance(event, Finished):
                    return rows
        raise InternalError("the engine ended without scores")

    def close(self) -> None:
        """Free the plan's memory."""
        self._engine.device.close()


def measure(
    plan: Scorer, reference: Scorer, windows: Sequence[Sequence[int]], progress: Callable[[int], None]
) -> dict[str, float]:
    """The numbers of `Quality` over windows of tokens; `progress` is told the tokens that are done."""
    table: list[tuple[float, float, float, bool]] = []
    done = 0
    for window in windows:
        for ours, theirs, token in zip(plan.logprobs(window), reference.logprobs(window), window[1:], strict=True):
            wide = theirs.astype(np.float64)
            seen = np.isfinite(wide)  # a token that the reference rules out adds nothing to the divergence
            kl = float(np.dot(np.exp(wide[seen]), (wide - ours)[seen]))
            table.append((float(ours[token]), float(theirs[token]), kl, ours.argmax() == theirs.argmax()))
        done += len(window)
        progress(done)
    ours_, theirs_, kls, same = (np.array(column, np.float64) for column in zip(*table, strict=True))
    return {
        "tokens": len(table),
        "perplexity": math.exp(-ours_.mean()),
        "reference_perplexity": math.exp(-theirs_.mean()),
        "kl": float(kls.mean()),
        "kl_p99": float(np.quantile(kls, 0.99)),
        "top1_agreement": float(same.mean()),
    }


def quality(
    directory: Path,
    reference: str,
    options: EngineOptions,
    *,
    text: Path | None,
    window: int,
    progress: Callable[[str, int, int], None],
) -> Quality:
    """Compare a plan with a model run by transformers in float32, or with another plan, over a text.

    Raises UserError if the plan has no tokenizer, the text is too short, or the vocabularies differ.
    """
    progress(f"loading {directory}", 0, 1)
    plan = PlanScorer(directory, options)
    try:
        windows = list(_windows(directory, plan, text, window))
        progress(f"loading {reference}", 0, 1)
        other = _open_reference(reference, options)
        if other.vocabulary != plan.vocabulary:
            raise UserError(
                f"the reference has {other.vocabulary} tokens in its vocabulary, the plan {plan.vocabulary}: give the "
                "model that the plan was compiled from"
            )
        total = sum(map(len, windows))
        found = measure(plan, other, windows, lambda done: progress("scoring", done, total))
    finally:
        plan.close()
    name = "built-in" if text is None else text.name
    return msgspec.convert(
        {"plan": str(directory), "reference": reference, "text": name, "window": len(windows[0]), **found}, Quality
    )


def _windows(directory: Path, plan: PlanScorer, text: Path | None, window: int) -> Iterator[list[int]]:
    prompts = Prompts.open(directory, plan.plan)
    if prompts.tokenizer is None or plan.plan.text is None:
        raise UserError(f"{directory} has no tokenizer, so it can't read a text: compile a model that has one")
    content = read_text(text or TEXT)
    tokens = prompts.tokenizer.encode(content, add_special_tokens=False)
    if len(tokens) < 2:
        raise UserError(f"{text} has {len(tokens)} tokens: give a text of some thousand")
    return cut(tokens, min(window, plan.longest), plan.plan.bos_token_id if plan.plan.text.add_bos else None)


def _open_reference(reference: str, options: EngineOptions) -> Scorer:
    if (Path(reference) / "plan.json").is_file():
        return PlanScorer(Path(reference), options)
    if find_spec("torch") is None or find_spec("transformers") is None:
        raise UserError(
            "a reference model is run by transformers, which is not installed here: pip install "
            "'plan-toolkit[compile]', or give another plan as --reference"
        )
    from ..models.reference import Reference

    return Reference(reference)


def print_quality(result: Quality) -> None:
    """The measurement for people."""
    import click

    worse = 100 * (result.perplexity / result.reference_perplexity - 1)
    click.echo(
        f"quality of {result.plan} against {result.reference}: {result.tokens} tokens of the {result.text} text in "
        f"windows of {result.window}"
    )
    for name, value in (
        ("perplexity", f"{result.perplexity:.3f}, reference {result.reference_perplexity:.3f} ({worse:+.2f}%)"),
        ("KL divergence", f"{result.kl:.4f} nats a token, 99% below {result.kl_p99:.3f}"),
        ("top-1 agreement", f"{result.top1_agreement:.1%}"),
    ):
        click.echo(f"  {name:<16} {value}")
