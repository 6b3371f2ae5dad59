"""`toolkit compile --explain-missing`: everything that keeps a model from being compiled, and what is understood."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

import click
import msgspec

from ..compiler.targets import parse_kv_dtype, parse_target
from ..runtime.errors import InternalError, UserError
from .driver import is_quantized, model_context, require_compile_extra

NAMES = {"attention": "attention op", "norm": "norm", "rope": "rotation", "linear": "matrix product"}
"""How the op kinds that matter most are called; all others are counted together."""


class Missing(msgspec.Struct, frozen=True):
    """What a model lacks on a target; `--json` prints it."""

    model: str
    architecture: str
    target: str
    missing: tuple[str, ...]
    """A sentence each; none if the model would compile."""
    understood: dict[str, int]
    """Ops of each kind that could be captured or, if all could, that the target has kernels for."""


def find_missing(
    model: str | Path,
    *,
    target: str = "cpu",
    quant: str = "keep",
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    max_batch: int | None = None,
    max_context: int | None = None,
) -> Missing:
    """Capture, fuse and lower a model, of which only the configuration is read, and say all that is missing.

    The choices are those of `compile`. Raises UserError for what can't be opened or chosen.
    """
    chosen = parse_target(target)
    wanted_kv = parse_kv_dtype(kv_cache_dtype, chosen)
    require_compile_extra()
    from ..compiler.lower import NoKernelError, lower
    from ..compiler.pass_ import run_passes
    from ..compiler.weights_pack import resolve_encodings
    from ..models.capture import MissingPartsError, capture
    from ..models.source import open_model, quantization_problem
    from ..passes.pipelines import pipeline
    from ..passes.quantization import Quantization

    opened = open_model(str(model), dtype=dtype, quantized_dtype=chosen.quantized_dtype, random=True)
    quantization = Quantization.parse(quant, opened.dtype)
    bounds = chosen.bounds(model_context(opened, chosen), max_batch, max_context)
    missing: list[str] = []
    understood: Mapping[str, int] = {}
    try:
        graph = capture(opened.config, dtype=opened.dtype, bounds=bounds, has_weight=opened.weights.__contains__)
        understood = Counter(op.kind for op in graph.ops)
        passes = pipeline(chosen, quant=quantization, encoding_of=lambda name: opened.weights[name].encoding)
        fused, _ = run_passes(graph, passes)
        resolved = resolve_encodings(fused, opened.weights)
        kv_dtype = wanted_kv or chosen.kv_dtype(opened.dtype, quantized=is_quantized(resolved))
        lower(resolved, chosen, bounds, kv_dtype, dtype=opened.dtype)
    except MissingPartsError as error:
        missing, understood = list(error.problems), error.found
    except NoKernelError as error:
        missing = [f"{chosen.name} has no kernel for {blocker}" for blocker in error.blockers]
    except (UserError, InternalError) as error:
        missing = [str(error)]
    problem = quantization_problem(opened.config)
    if problem is not None:
        missing.append(f"its checkpoint {problem}")
    return Missing(opened.name, opened.config.model_type, chosen.name, tuple(missing), dict(understood))


def print_missing(found: Missing) -> None:
    """The explanation for people."""
    if not found.missing:
        click.echo(f"nothing is missing: {found.model} ({found.architecture}) compiles for {found.target}")
        return
    count = "1 thing is" if len(found.missing) == 1 else f"{len(found.missing)} things are"
    click.echo(f"{found.model} ({found.architecture}) can't be compiled for {found.target}: {count} missing")
    for sentence in found.missing:
        click.echo(f"  - {sentence}")
    click.echo(f"understood: {_listed(found.understood)}")


def _listed(counts: Mapping[str, int]) -> str:
    parts = [f"{counts[kind]} {name}{'s' * (counts[kind] > 1)}" for kind, name in NAMES.items() if counts.get(kind)]
    rest = sum(count for kind, count in counts.items() if kind not in NAMES)
    return ", ".join([*parts, *([f"{rest} other ops"] if rest else [])]) or "nothing"
