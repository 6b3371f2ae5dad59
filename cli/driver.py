"""The compile flow: open, capture, fuse, lower, compile kernels, pack weights, write the plan."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

from .. import __version__
from ..compiler.ir import Graph
from ..compiler.op_spec import int_attr
from ..compiler.program import Program
from ..compiler.shapes import Bounds, largest
from ..compiler.targets import CPU, Target, parse_kv_dtype, parse_target
from ..runtime.debug import debug
from ..runtime.errors import UserError
from ..runtime.plan import Model, PassReport, Plan, Report, RopeChanges, Text
from .progress import Phases
from .staging import check_output, staged
from .tune import Generators

if TYPE_CHECKING:
    from ..compiler.pass_ import Pass
    from ..compiler.weights import TensorSource
    from ..models.source import OpenedModel
    from ..passes.quantization import Quantization

OPTIMIZE = 3
"""Level of optimization, if none is asked for."""
CALIBRATION_METHOD = "awq+gptq"
"""How weights are rounded on a text, if nothing else is asked for."""


def compile(
    model: str | Path,
    *,
    target: str = "cpu",
    output: str | Path | None = None,
    quant: str = "keep",
    calibrate: str | Path | None = None,
    calibration_method: str = CALIBRATION_METHOD,
    dtype: str = "auto",
    kv_cache_dtype: str = "auto",
    max_batch: int | None = None,
    max_context: int | None = None,
    weights: str | None = None,
    optimize: int = OPTIMIZE,
    check: bool = False,
    generator: str | None = None,
    tuning: str | Path | None = None,
    deterministic: bool = False,
    alternatives: int = 0,
    dump_ir: str | Path | None = None,
    force: bool = False,
    reuse: bool = True,
    progress: Phases | None = None,
) -> Path:
    """Compile a model (a directory, a `.gguf` file or a hub id) into a plan and return the plan's directory.

    `quant` names an encoding (keep, none, bf16, int8, int4-g64-asym, ...) or a YAML recipe; `calibrate` is a text
    file on which weights are rounded, by `calibration_method` awq, gptq or awq+gptq; `dtype` is auto, float32,
    bfloat16 or float16, and `kv_cache_dtype` one of those, int8 or, on GPUs, fp8; `weights` "random" or "random:SEED"
    for a model without a checkpoint; `optimize` the level of `passes.pipelines`; `check` has every pass checked by
    the interpreter; `generator` is cpp, tvm or race, which takes the faster kernels, as timed here or as the file
    `tuning` says, and for GPUs cuda, triton or race, whose plans carry Triton's as alternatives; a `deterministic`
    plan's tokens depend on their request alone, and `progress` is told what that costs; a GPU plan carries up to so
    many `alternatives` to each linear layer's kernel, for `toolkit tune`; `dump_ir` is a directory that gets the
    graph after each pass. Without `output` the plan is `NAME-plan` in the current directory. An existing one is
    replaced only with `force`; whatever fails leaves no half plan. Without `reuse` the model's files are hashed,
    captured and packed as if no earlier compilation had done it. Raises UserError for what can't be used.
    """
    chosen = parse_target(target)
    wanted_kv, seed = parse_kv_dtype(kv_cache_dtype, chosen), _random_seed(weights)
    _check_options(chosen, alternatives, tuning=tuning, deterministic=deterministic)
    generators = Generators.parse(generator, tuning, chosen.kind)
    if output is not None:
        check_output(Path(output), force=force)
    with (phases := progress or Phases()).phase("Import"), _no_collection():
        require_compile_extra()
        from ..compiler import emit, onnx_io, pass_, weights_pack, weights_reuse
        from ..compiler.code import build_code
        from ..compiler.program import make_programs
        from ..models import recall, tokenizer
        from ..models.source import open_model
        from ..passes.quantization import Quantization
    with phases.phase("Open"), _no_collection():
        opened = open_model(
            str(model),
            dtype=dtype,
            quantized_dtype=chosen.quantized_dtype,
            keeps_float8=chosen.kind == "cuda",
            random=seed is not None,
            reuse=reuse,
        )
        quantization = Quantization.parse(quant, opened.dtype)
        bounds = chosen.bounds(model_context(opened, chosen), max_batch, max_context)
        destination = Path(output or f"{opened.name.rpartition('/')[2]}-plan")
    with staged(destination, force=force) as folder, TemporaryDirectory(dir=folder) as spool:
        with phases.phase("Capture"):
            captured = recall.captured_graph(
                opened.config, dtype=opened.dtype, bounds=bounds, tensors=opened.weights, reuse=reuse
            )
            text = tokenizer.write_text(opened, folder)
        with phases.phase("Calibrate") if calibrate is not None else nullcontext():
            source, notes = _calibrated(
                captured,
                opened,
                calibrate,
                method=calibration_method,
                quantization=quantization,
                text=text,
                context=bounds.max_context,
                folder=folder,
                spool=Path(spool),
                phases=phases,
            )
        with phases.phase("Fuse"):
            passes = _passes(chosen, quantization, source, optimize)
            fused, reports = pass_.run_passes(
                captured, passes, check=check, dump=Path(dump_ir) if dump_ir else None, progress=phases.advance
            )
        with phases.phase("Lower"):
            resolved = weights_pack.resolve_encodings(fused, source)
            kv_dtype = wanted_kv or chosen.kv_dtype(opened.dtype, quantized=is_quantized(resolved))
            lower = partial(make_programs, resolved, chosen, bounds, kv_dtype, dtype=opened.dtype)
            made = lower(deterministic=deterministic, alternatives=alternatives, generator=generators.gpu)
        with phases.phase("Race") if generators.races_here else nullcontext():
            tuned = generators.choose(made, chosen.isas, phases.advance, deterministic=deterministic)
            programs = (tuned.program, *made[1:])
        with phases.phase("Kernels"):
            code = build_code(chosen, programs, folder, phases.advance)
        with phases.phase("Weights"):
            packed = weights_reuse.packed_weights(
                made[0].lowered.weights,
                source,
                folder,
                destination,
                checkpoint=opened.hashes if calibrate is None else None,
                progress=phases.advance,
                random=seed is not None,
                reuse=reuse,
            )
        with phases.phase("Write"):
            onnx_io.write_onnx(captured, folder / "graph.onnx")
            describe = partial(
                emit.make_plan,
                model=_model(opened, captured, bounds, quant, seed),
                target=chosen.name,
                bounds=bounds,
                weights=packed,
                text=text,
                eos_token_ids=opened.eos_token_ids,
                bos_token_id=opened.bos_token_id,
                report=_report(captured, fused, reports, (*notes, *packed.notes, *tuned.notes)),
                tuning=None if tuned.tuning is None else emit.write_tuning(tuned.tuning, folder),
            )
            plan = describe(programs=programs, code=code, deterministic=deterministic)
            emit.write_plan(plan, folder)
        if deterministic and progress is not None:
            otherwise = (tuned.again or generators).choose(lower(), chosen.isas).program
            _note_cost(phases, folder, plan, otherwise, describe)
    _debug_stages(captured, fused, plan.report, programs, chosen)
    return destination


# --- steps ------------------------------------------------------------------------------------------------------------


@contextmanager
def _no_collection() -> Iterator[None]:
    """Imports make a million objects that stay: to look for garbage among them takes a sixth of their time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _calibrated(
    captured: Graph,
    opened: OpenedModel,
    file: str | Path | None,
    *,
    method: str,
    quantization: Quantization,
    text: Text | None,
    context: int,
    folder: Path,
    spool: Path,
    phases: Phases,
) -> tuple[TensorSource, tuple[str, ...]]:
    """The model's weights, rounded on a text file if there is one, in the meantime in `spool`; and notes on them."""
    from .calibration import calibrated, text_windows

    return calibrated(
        captured,
        opened,
        file,
        method=method,
        quantization=quantization,
        read=lambda file: text_windows(Path(file), folder, text, opened.bos_token_id, context),
        folder=spool,
        progress=phases.advance,
    )


def _passes(target: Target, quantization: Quantization, source: TensorSource, level: int) -> tuple[Pass, ...]:
    """The pipeline of a level, which knows how the checkpoint stores each weight."""
    from ..compiler.weights import kept_encoding
    from ..passes.pipelines import pipeline

    return pipeline(target, quant=quantization, encoding_of=lambda name: kept_encoding(source[name]), level=level)


# --- choices ----------------------------------------------------------------------------------------------------------


def _check_options(target: Target, alternatives: int, **options: object) -> None:
    """Raise UserError for an option that has no meaning for the target; `options` are those of CPU plans."""
    if alternatives and target.kind != "cuda":
        raise UserError(f"only GPU plans have --alternatives, but the target is {target.name}: leave it out")
    given = [f"--{name}" for name, value in options.items() if value]
    if target.kind == "cuda" and given:
        raise UserError(f"only CPU plans have {', '.join(given)}, but the target is {target.name}: leave it out")


def _random_seed(weights: str | None) -> int | None:
    if weights is None:
        return None
    match = re.fullmatch(r"random(?::(\d{1,18}))?", weights)
    if match is None:
        raise UserError(f"--weights must be random or random:SEED with a whole number, found {weights!r}")
    return int(match[1] or 0)


def require_compile_extra() -> None:
    """Raise UserError unless everything that compiling needs is installed."""
    missing = [name for name in ("torch", "transformers", "onnx", "gguf") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"compiling needs {', '.join(missing)}, not installed here: pip install 'plan-toolkit[compile]'"
        )


def model_context(opened: OpenedModel, target: Target) -> int:
    """The longest sequence the model was made for: for some RoPE, the length of its training times a factor."""
    found = getattr(opened.config, "max_position_embeddings", None)
    if not isinstance(found, int) or found <= 0:
        return target.default_context
    rope = getattr(opened.config, "rope_parameters", None) or {}
    lengths = {"dynamic": found, "yarn": rope.get("original_max_position_embeddings") or 0}
    trained = lengths.get(str(rope.get("rope_type")), 0)
    return max(found, int(trained * (rope.get("factor") or 1)))


def is_quantized(graph: Graph) -> bool:
    """Whether any weight of a graph with resolved encodings has integer codes."""
    encodings = (param.recipe.encoding for param in graph.params)
    return any(encoding is not None and encoding.kind == "affine" for encoding in encodings)


def _note_cost(phases: Phases, folder: Path, plan: Plan, otherwise: Program, describe: Callable[..., Plan]) -> None:
    """Note what the deterministic plan costs, beside one of the program that there would be otherwise."""
    from ..compiler.code import build_code, cpu_code
    from .determinism import cost_note, same_kernels

    with phases.phase("Cost"), TemporaryDirectory() as temporary:
        other, place = describe(programs=(otherwise,), code=cpu_code(otherwise, plan.libraries)), folder
        if not same_kernels(plan, other):
            place = Path(temporary)
            for file in plan.weight_files:
                if not file.random:
                    (place / file.file).symlink_to((folder / file.file).resolve())
            other = describe(programs=(otherwise,), code=build_code(CPU, (otherwise,), place))
        phases.notes.append(cost_note([(folder, plan), (place, other)]))


# --- records ----------------------------------------------------------------------------------------------------------


def _model(opened: OpenedModel, graph: Graph, bounds: Bounds, quant: str, seed: int | None) -> Model:
    (logits,) = graph.outputs
    vocabulary = logits.type.shape[-1]
    assert isinstance(vocabulary, int)
    return Model(
        name=opened.name,
        architecture=opened.config.model_type,
        vocab_size=vocabulary,
        hidden_size=opened.config.hidden_size,
        layers=opened.config.num_hidden_layers,
        max_context=bounds.max_context,
        dtype=opened.dtype,
        quantization=Path(quant).name,
        source_hashes=opened.hashes,
        random_weights=seed,
        rope_changes=_rope_changes(graph),
    )


def _rope_changes(graph: Graph) -> RopeChanges | None:
    """Between which lengths of a sequence any of the model's RoPE frequencies change."""
    tables = [op for op in graph.ops if op.kind == "rope_table"]
    firsts = [int_attr(op.attrs, "first") for op in tables]
    lasts = [first + largest(op.inputs[2].type.shape[0]) - 1 for first, op in zip(firsts, tables, strict=True)]
    return RopeChanges(min(firsts), max(lasts)) if tables else None


def _report(captured: Graph, fused: Graph, passes: tuple[PassReport, ...], notes: tuple[str, ...]) -> Report:
    packages = ("numpy", "torch", "transformers")
    versions = {"toolkit": __version__} | {name: version(name) for name in packages}
    return Report(len(captured.ops), len(fused.ops), passes, notes, versions)


# --- TOOLKIT_DEBUG ----------------------------------------------------------------------------------------------------


def _debug_stages(captured: Graph, fused: Graph, report: Report, programs: Sequence[Program], target: Target) -> None:
    from ..compiler.text import print_graph
    from ..kernels_templates.render import render, render_cuda

    kernels = {name: kernel for program in programs for name, kernel in program.lowered.kernels.items()}
    debug(1, f"{len(captured.ops)} ops captured, {len(fused.ops)} after fusion, {len(kernels)} kernels")
    for each in report.passes:
        debug(2, f"{each.name}: {each.matches} matches, {each.ops_before} -> {each.ops_after} ops")
    for program in programs:
        _debug_program(program)
    debug(4, print_graph(captured))
    debug(4, print_graph(fused))
    for kernel in kernels.values():
        debug(4, render_cuda(kernel, target.archs[-1]) if target.archs else render(kernel, target.isas[0]))


def _debug_program(program: Program) -> None:
    for number, launch in enumerate(program.bucket.launches):
        debug(3, f"launch {number}: {launch.op} -> {launch.kernel}{' | barrier' if launch.barrier else ''}")
    for buffer in program.buffers:
        debug(
            3, f"buffer {buffer.value}: [{buffer.offset}, {buffer.offset + buffer.bytes}) {buffer.first}..{buffer.last}"
        )
