"""`toolkit compile`: turn a model into a plan."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import get_args

import click
import msgspec
from rich.console import Console

from ..runtime.encodings import FloatName
from ..runtime.load import read_plan
from ..runtime.plan import KvDType, Plan
from .driver import CALIBRATION_METHOD, OPTIMIZE
from .driver import compile as compile_model
from .missing import find_missing, print_missing
from .progress import Phases, TerminalPhases
from .requirements import Requirements, requirements, sentences
from .roofline import H200, read_bandwidth, seconds_per_token
from .units import size

SHOWN_NOTES = 4
COLLECT = (100_000, 50, 1_000)
"""How seldom to look for garbage: nearly every object of a compilation stays to its end, and to visit them all each
time that they have grown by a quarter takes a second of six.
"""


class Summary(msgspec.Struct, frozen=True):
    """What was compiled; `--json` prints it."""

    plan: str
    captured_ops: int
    fused_ops: int
    kernels: int
    launches: int
    weight_bytes: int
    activation_bytes: int
    activation_dtype: FloatName
    kv_bytes_per_token: float
    estimated_seconds_per_token: float
    """At batch 1 with a short context, if memory is read at this machine's full speed."""
    requirements: Requirements
    seconds: dict[str, float]
    """By phase."""
    notes: tuple[str, ...]


@click.command("compile")
@click.argument("model")
@click.option(
    "--target",
    default="cpu",
    show_default=True,
    help="What to compile for: cpu, or GPUs: sm80, sm86, sm89, sm90, or several.",
)
@click.option("-o", "--output", type=click.Path(path_type=Path), help="The plan's directory.  [default: NAME-plan]")
@click.option(
    "--quant",
    default="keep",
    show_default=True,
    metavar="NAME|FILE",
    help="How weights are stored: keep (as in the checkpoint), none (all in --dtype), fp16, bf16, int8, int4, "
    "int4-g64, int4-g128-asym, ... or a YAML recipe.",
)
@click.option(
    "--calibrate",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Round weights for what they meet when the model runs on this text.",
)
@click.option(
    "--calibration-method", default=CALIBRATION_METHOD, show_default=True, metavar="NAME", help="awq, gptq or awq+gptq."
)
@click.option(
    "--dtype", default="auto", show_default=True, help="auto (the checkpoint's), float32, bfloat16 or float16."
)
@click.option(
    "--kv-cache-dtype",
    type=click.Choice(["auto", *get_args(KvDType)]),
    default="auto",
    show_default=True,
    help="How the K/V cache is stored; int8 and, on GPUs, fp8 hold about twice the tokens of 16 bits.",
)
@click.option("--max-batch", type=int, help="Most sequences in a step.  [default: 64, 256 on GPUs]")
@click.option("--max-context", type=int, help="Most tokens of a sequence.  [default: the model's, at most 8192]")
@click.option("--weights", metavar="random[:SEED]", help="Random weights: MODEL needs only a config.json.")
@click.option(
    "-O",
    "optimize",
    type=click.IntRange(0, 3),
    default=OPTIMIZE,
    show_default=True,
    help="How much to optimize: 0 only what is needed, 1 simplify, 2 fuse, 3 reorder.",
)
@click.option("--check", is_flag=True, help="Check every pass: interpret the graph before and after it.")
@click.option(
    "--generator",
    type=click.Choice(["cpp", "tvm", "cuda", "triton", "race"]),
    help="Whose kernels: cpp, tvm where it has them, or race: the faster ones, timed here.  [default: cpp]  For GPUs "
    "cuda, triton where it has them, or race: both, for `toolkit tune`.  [default: cuda]",
)
@click.option(
    "--tuning", type=click.Path(path_type=Path), help="Use the results of a race in this file: a plan's tuning.json."
)
@click.option(
    "--deterministic",
    is_flag=True,
    help="Tokens depend on neither the batch nor chunks, cache hits and preemption; says what that costs.",
)
@click.option(
    "--alternatives",
    type=click.IntRange(0, 8),
    default=0,
    show_default=True,
    help="GPU plans: carry so many other kernels for each linear layer, for `toolkit tune` to choose from.",
)
@click.option("--dump-ir", type=click.Path(path_type=Path), help="Write the graph after each pass into this directory.")
@click.option(
    "--explain-missing", is_flag=True, help="Only say what keeps MODEL from being compiled; needs no weights."
)
@click.option("--force", is_flag=True, help="Replace an existing plan.")
@click.option(
    "--no-reuse",
    is_flag=True,
    help="Hash the model's files, capture and pack anew, whatever earlier compilations have left in the cache.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as JSON.")
def command(
    *,
    model: str,
    target: str,
    output: Path | None,
    quant: str,
    calibrate: Path | None,
    calibration_method: str,
    dtype: str,
    kv_cache_dtype: str,
    max_batch: int | None,
    max_context: int | None,
    weights: str | None,
    optimize: int,
    check: bool,
    generator: str | None,
    tuning: Path | None,
    deterministic: bool,
    alternatives: int,
    dump_ir: Path | None,
    explain_missing: bool,
    force: bool,
    no_reuse: bool,
    as_json: bool,
) -> int:
    """Turn MODEL into a plan.

    MODEL is a directory with config.json and safetensors, a .gguf file, or a Hugging Face hub id.

    \b
    Examples:
      toolkit compile SmolLM2-135M-Instruct.Q4_1.gguf -o smol-plan
      toolkit compile Qwen/Qwen3-0.6B --quant int8 -o qwen-plan
      toolkit compile Qwen/Qwen3-0.6B --quant int4-g64 --calibrate text.txt
      toolkit compile ./my-model --dtype float32 --quant none --max-context 2048
      toolkit compile ./only-config --weights random:7
      toolkit compile model.gguf --generator race -o fast-plan
    """
    if explain_missing:
        found = find_missing(
            model,
            target=target,
            quant=quant,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_batch=max_batch,
            max_context=max_context,
        )
        click.echo(msgspec.json.encode(found)) if as_json else print_missing(found)
        return 2 if found.missing else 0
    gc.set_threshold(*COLLECT)
    console = Console(stderr=True)
    with TerminalPhases(console) if console.is_terminal and not as_json else Phases() as phases:
        path = compile_model(
            model,
            target=target,
            output=output,
            quant=quant,
            calibrate=calibrate,
            calibration_method=calibration_method,
            dtype=dtype,
            kv_cache_dtype=kv_cache_dtype,
            max_batch=max_batch,
            max_context=max_context,
            weights=weights,
            optimize=optimize,
            check=check,
            generator=generator,
            tuning=tuning,
            deterministic=deterministic,
            alternatives=alternatives,
            dump_ir=dump_ir,
            force=force,
            reuse=not no_reuse,
            progress=phases,
        )
    plan = read_plan(path)
    summary = summarize(path, plan, phases)
    if as_json:
        click.echo(msgspec.json.encode(summary))
    else:
        print_summary(summary, plan)
    return 0


def summarize(path: Path, plan: Plan, phases: Phases) -> Summary:
    """The figures of a finished plan."""
    notes = (*phases.notes, *plan.report.notes, *(note for each in plan.report.passes for note in each.notes))
    return Summary(
        plan=str(path),
        captured_ops=plan.report.captured_ops,
        fused_ops=plan.report.fused_ops,
        kernels=len(plan.kernels),
        launches=len(plan.buckets[0].launches),
        weight_bytes=plan.memory.weights,
        activation_bytes=plan.memory.arena,
        activation_dtype=plan.model.dtype if plan.modules else "float32",
        kv_bytes_per_token=plan.kv_bytes_per_token,
        estimated_seconds_per_token=seconds_per_token(plan, H200.bandwidth if plan.modules else read_bandwidth()),
        requirements=requirements(plan),
        seconds={name: round(value, 3) for name, value in phases.seconds.items()},
        notes=notes,
    )


def print_summary(summary: Summary, plan: Plan) -> None:
    """The summary for people."""
    place = "on an H200" if plan.modules else "here"
    for name, value in (
        ("ops", f"{summary.captured_ops} captured, {summary.fused_ops} after fusion"),
        ("kernels", f"{summary.kernels}, in {summary.launches} launches a step"),
        ("weights", size(summary.weight_bytes)),
        ("activations", f"{size(summary.activation_bytes)}, {summary.activation_dtype}"),
        ("KV cache", f"{size(summary.kv_bytes_per_token)} a token"),
        ("estimate", f"{summary.estimated_seconds_per_token * 1e3:.3g} ms a token {place}, if memory is the limit"),
        *(("needs", sentence) for sentence in sentences(summary.requirements, plan)),
        ("time", ", ".join(f"{name.lower()} {value:.1f} s" for name, value in summary.seconds.items())),
        ("plan", summary.plan),
    ):
        click.echo(f"{click.style(f'{name:<12}', bold=True)} {value}")
    for note in summary.notes[:SHOWN_NOTES]:
        click.echo(f"note: {note}")
    if len(summary.notes) > SHOWN_NOTES:
        click.echo(f"and {len(summary.notes) - SHOWN_NOTES} more notes, see: toolkit inspect {summary.plan}")
    click.echo(f"\nNext: toolkit serve {summary.plan}")
