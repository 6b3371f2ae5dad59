"""The calibration phase of `compile`: the model runs on a text, and weights are rounded for what they meet there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from ..compiler.calibration.calibrate import Method, calibrate
from ..compiler.ir import Graph
from ..compiler.weights import TensorSource
from ..models.random_weights import RandomSource
from ..passes.quantization import Quantization
from ..passes.quantize_weights import QuantizeWeights
from ..runtime.errors import UserError
from ..runtime.plan import Text
from .windows import cut, read_text

if TYPE_CHECKING:
    from ..models.source import OpenedModel

WINDOW = 512
"""Tokens that are run together."""
MAX_TOKENS = 8_192
"""Of a longer text, so many tokens are used, in windows that are evenly spread."""


def parse_method(text: str) -> Method:
    """One of the methods. Raises UserError for anything else."""
    for method in get_args(Method):
        if text == method:
            found: Method = method
            return found
    raise UserError(f"--calibration-method must be {', '.join(get_args(Method))}, not {text!r}")


def calibrated(
    graph: Graph,
    opened: OpenedModel,
    file: str | Path | None,
    *,
    method: str,
    quantization: Quantization,
    read: Callable[[str | Path], Sequence[Sequence[int]]],
    folder: Path,
    progress: Callable[[str, int, int], None],
) -> tuple[TensorSource, tuple[str, ...]]:
    """The captured model's weights, rounded on a text if one is given, and notes on the model and on that.

    `read` turns the file into windows of tokens. The weights lie in `folder` until they are packed. Raises UserError
    for an unknown method, and if the weights are random, or none is to be rounded.
    """
    if file is None:
        return opened.weights, opened.notes
    if isinstance(opened.weights, RandomSource):
        raise UserError("random weights can't be calibrated: leave out --calibrate, or give a model with its weights")
    chosen, known = QuantizeWeights(quantization)(graph), parse_method(method)
    source, notes = calibrate(chosen, opened.weights, read(file), method=known, folder=folder, progress=progress)
    return source, (*opened.notes, *notes)


def text_windows(file: Path, folder: Path, text: Text | None, bos: int | None, context: int) -> list[list[int]]:
    """Windows of a text, by the tokenizer that was written to `folder`. Raises UserError if either can't be used."""
    if text is None:
        raise UserError("--calibrate needs the model's tokenizer, and this model comes without one")
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokens = tokenizer.encode(read_text(file), add_special_tokens=False).ids
    windows = list(cut(tokens, min(WINDOW, context), bos if text.add_bos else None))
    if not windows:
        raise UserError(f"{file} has {len(tokens)} tokens: calibrate on a text of some thousand")
    wanted = max(1, MAX_TOKENS // WINDOW)
    return windows if len(windows) <= wanted else [windows[len(windows) * i // wanted] for i in range(wanted)]
