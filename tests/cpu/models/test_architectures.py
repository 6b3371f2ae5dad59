"""Every tested architecture, compiled and as ONNX, computes what its Hugging Face implementation does.

`models/tested.json` says what is proved of each. `TOOLKIT_UPDATE_DOCS=1` writes it anew from what is found here.
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from functools import cached_property, partial
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu.compiler.plan_runner import PlanRunner
from cpu.models.architectures import (
    ARCHITECTURES,
    CASES,
    half_model,
    reference_logits,
    sequences,
    tiny_config,
    tiny_model,
)
from cpu.models.features import features, rope_kinds
from unit.runtime.engine_harness import make_request, run

from toolkit.cli.driver import compile as compile_model
from toolkit.compiler.codegen import cpu as codegen
from toolkit.compiler.interpret import from_source
from toolkit.compiler.ir import Graph
from toolkit.compiler.onnx_io import to_onnx
from toolkit.compiler.targets import CPU
from toolkit.models import recall
from toolkit.models.coverage import PROOFS, TESTED_FILE
from toolkit.models.source import open_model
from toolkit.passes.pipelines import LEVELS, pipeline
from toolkit.passes.quantization import Quantization
from toolkit.runtime.encodings import FLOAT32
from toolkit.runtime.engine import Engine
from toolkit.runtime.errors import UserError
from toolkit.runtime.options import EngineOptions, SpeculativeConfig

Array = npt.NDArray[Any]
Row = dict[str, list[str]]

LENGTHS = (37, 5, 18)
CHUNKS = ((0, 3), (3, 16), (16, 17), (17, 37))
"""Pieces of the first prompt: they end anywhere in a page of 16 tokens."""
GREEDY = 12
DRAFTS = SpeculativeConfig(
    method="ngram", num_speculative_tokens=3, prompt_lookup_min=1, prompt_lookup_max=3, adaptive=False
)
TOLERANCE = 1e-4


class Subject:
    """One case and its prompts: compiled, as ONNX, and as Hugging Face runs it."""

    def __init__(self, case: str, folder: Path) -> None:
        self.case, self.folder = case, folder
        self.prompts = sequences(case, LENGTHS)
        self.runners: dict[str, PlanRunner] = {}
        self.graph: Graph | None = None

    def runner(self, dtype: str = "float32") -> PlanRunner:
        """The plan compiled from a checkpoint in a dtype."""
        if dtype not in self.runners:
            model = tiny_model(self.case) if dtype == "float32" else half_model(self.case)
            model.save_pretrained(self.folder / f"{dtype}-model")
            plan = compile_model(self.folder / f"{dtype}-model", output=self.folder / dtype, max_batch=8)
            self.runners[dtype] = PlanRunner(plan, threads=1)
        return self.runners[dtype]

    def close(self) -> None:
        for runner in self.runners.values():
            runner.close()

    @cached_property
    def expected(self) -> list[Array]:
        """Log-probabilities [n, V] of each prompt run alone by Hugging Face."""
        return [log_softmax(reference_logits(self.case, prompt)) for prompt in self.prompts]


def log_softmax(logits: Array) -> Array:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    result: Array = wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))
    return result


def close(found: Array, expected: Array) -> None:
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, rtol=0, atol=TOLERANCE)


# --- proofs -----------------------------------------------------------------------------------------------------------


def packed(subject: Subject) -> None:
    """Several prompts in one step."""
    found = subject.runner().step([(f"packed {number}", tokens) for number, tokens in enumerate(subject.prompts)])
    for logprobs, expected in zip(found, subject.expected, strict=True):
        close(logprobs, expected)


def chunked(subject: Subject) -> None:
    """A prompt in pieces, with another sequence decoding beside it."""
    long, _, other = subject.prompts
    whole = {"long": len(long), "other": len(other)}
    parts = [
        subject.runner().step([("long", long[start:stop]), ("other", other[number : number + 1])], whole)
        for number, (start, stop) in enumerate(CHUNKS)
    ]
    close(np.concatenate([part[0] for part in parts]), subject.expected[0])
    close(np.concatenate([part[1] for part in parts]), subject.expected[2][: len(CHUNKS)])


def stepwise(subject: Subject) -> None:
    """Token by token, three sequences of different lengths together."""
    parts: list[list[Array]] = [[] for _ in subject.prompts]
    whole = {str(number): length for number, length in enumerate(LENGTHS)}
    for index in range(max(LENGTHS)):
        live = [number for number, tokens in enumerate(subject.prompts) if index < len(tokens)]
        found = subject.runner().step([(str(number), [subject.prompts[number][index]]) for number in live], whole)
        for number, logprobs in zip(live, found, strict=True):
            parts[number].append(logprobs)
    for part, expected in zip(parts, subject.expected, strict=True):
        close(np.concatenate(part), expected)


def drafted(subject: Subject) -> None:
    """Greedy and drawn outputs are the same, to the last bit of a log-probability, when several tokens a step are
    guessed and verified. Prompts are said twice, so that there are guesses."""
    requests = [
        make_request(
            str(number),
            2 * prompt[:9],
            max_tokens=GREEDY,
            ignore_eos=True,
            logprobs=2,
            temperature=float(number == 1),
            seed=5,
            frequency_penalty=0.5 * (number == 2),
        )
        for number, prompt in enumerate(subject.prompts)
    ]
    device, found = subject.runner().device, []
    for config in (None, DRAFTS):
        engine = Engine(device, EngineOptions(speculative_config=config))
        found.append([output.result for output in run(engine, requests).values()])
    assert engine.stats().spec_drafts > 0
    assert found[0] == found[1]


def bfloat16(subject: Subject) -> None:
    """Where greedy tokens first differ, each side's is among the five likeliest of the other."""
    runner = subject.runner("bfloat16")
    found = [
        part[-1:] for part in runner.step([(f"{number}", tokens) for number, tokens in enumerate(subject.prompts)])
    ]
    for _ in range(GREEDY - 1):
        step = runner.step([(f"{number}", [int(part[-1].argmax())]) for number, part in enumerate(found)])
        found = [np.concatenate(pair) for pair in zip(found, step, strict=True)]
    for prompt, ours in zip(subject.prompts, found, strict=True):
        assert np.isfinite(ours).all()
        tokens = ours.argmax(axis=1)
        theirs = reference_logits(subject.case, [*prompt, *tokens[:-1].tolist()], "bfloat16")[-GREEDY:]
        differing = np.flatnonzero(tokens != theirs.argmax(axis=1))[:1]
        for index in differing:
            assert tokens[index] in top(theirs[index], 5)
            assert theirs[index].argmax() in top(ours[index], 5)


def top(scores: Array, count: int) -> list[int]:
    result: list[int] = np.argsort(-scores)[:count].tolist()
    return result


def onnx(subject: Subject) -> None:
    """onnxruntime runs the plan's ONNX twin: several prompts in one step, and one in pieces over its past."""
    subject.runner()
    graph, plan = subject.graph, subject.folder / "float32"
    assert graph is not None
    assert (plan / "graph.onnx").read_bytes() == to_onnx(graph).SerializeToString()
    weights = from_source(open_model(str(subject.folder / "float32-model")).weights)
    written = to_onnx(graph, weights).SerializeToString()
    session = open_onnx(written)
    found = run_onnx(session, [(prompt, 0, len(prompt)) for prompt in subject.prompts], {})["logits"]
    close(log_softmax(found), np.concatenate(subject.expected))
    past, parts = dict[str, Array](), []
    for start, stop in CHUNKS:
        outputs = run_onnx(session, [(subject.prompts[0], start, stop)], past)
        parts.append(outputs.pop("logits"))
        past = {name.replace("present", "past"): array for name, array in outputs.items()}
    close(log_softmax(np.concatenate(parts)), subject.expected[0])


def open_onnx(model: bytes) -> Any:
    """A session of one thread that runs the graph as it was written."""
    onnxruntime = import_module("onnxruntime")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])


def run_onnx(session: Any, parts: list[tuple[list[int], int, int]], past: Mapping[str, Array]) -> dict[str, Array]:
    """Outputs by name of a step over parts of prompts, given as (prompt, start, stop)."""
    specs = session.get_inputs()
    columns = {
        "tokens": [token for prompt, start, stop in parts for token in prompt[start:stop]],
        "positions": [position for _, start, stop in parts for position in range(start, stop)],
        "lengths": [len(prompt) for prompt, start, stop in parts for _ in range(start, stop)],
        "rows": range(sum(stop - start for _, start, stop in parts)),
    }
    inputs = {spec.name: np.array(columns[spec.name], np.int32) for spec in specs if spec.name in columns}
    empty = {spec.name: np.zeros((0, *spec.shape[1:]), np.float32) for spec in specs if spec.name not in columns}
    names = [spec.name for spec in session.get_outputs()]
    return dict(zip(names, session.run(names, {**inputs, **empty, **past}), strict=True))


CHECKS: Mapping[str, Callable[[Subject], None]] = {
    each.__name__: each for each in (packed, chunked, stepwise, bfloat16, onnx)
}
PROOFS_OF_VARIANTS = tuple(name for name in PROOFS if name != "bfloat16")
"""Rounding is tested once for each model type."""


# --- passes -----------------------------------------------------------------------------------------------------------


def changed_again(graph: Graph) -> list[str]:
    """Passes that still change something when they are applied a second time: right after the first, and together after
    the whole pipeline of a level.
    """
    found = []
    for level in LEVELS:
        passes = pipeline(CPU, quant=Quantization.parse("int4"), encoding_of=lambda name: FLOAT32, level=level)
        done = graph
        for each in passes:
            done = each(done)
            again = each.run(done)
            if again.matches or again.graph != done:
                found.append(f"-O{level}: {each.name}")
        found += [f"-O{level}, after all: {each.name}" for each in passes if each.run(done).graph != done]
    return found


# --- the table --------------------------------------------------------------------------------------------------------


@pytest.fixture
def subject(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Subject]:
    """A case, to be compiled quickly and for one ISA level that every machine has, whose graph is kept."""
    lowest = codegen.ISA_LEVELS[:1]
    compile_object = codegen.compile_object

    def compile_quickly(source: str, level: codegen.IsaLevel, name: str, optimize: str = "-O3") -> Path:
        return compile_object(source, level, name, "-O0" if name == "step" else optimize)

    monkeypatch.setattr(codegen, "build_libraries", partial(codegen.build_libraries, levels=lowest))
    monkeypatch.setattr(codegen, "compile_object", compile_quickly)
    original = recall.captured_graph
    with closing(Subject(case, tmp_path)) as subject:

        def captured_graph(*args: Any, **kwargs: Any) -> Graph:
            graph = original(*args, **kwargs)
            subject.graph = subject.graph or graph
            return graph

        monkeypatch.setattr(recall, "captured_graph", captured_graph)
        yield subject


@pytest.mark.parametrize("case", CASES)
def test_what_is_proved(case: str, subject: Subject) -> None:
    proved, failed = list[str](), dict[str, Exception]()
    for name in PROOFS if case in ARCHITECTURES else PROOFS_OF_VARIANTS:
        try:
            CHECKS[name](subject)
            proved.append(name)
        except (AssertionError, UserError) as problem:
            failed[name] = problem
    if not failed:
        drafted(subject)
    graph = subject.graph
    assert graph is None or changed_again(graph) == []
    row = {
        "proved": proved,
        "failed": list(failed),
        "rope": rope_kinds(graph, tiny_config(case)) if graph is not None else [],
        "features": features(graph) if graph is not None else [],
    }
    committed = read_rows().get(case, {"failed": []})
    if os.environ.get("TOOLKIT_UPDATE_DOCS"):
        write_row(case, row)
    for name in failed.keys() - set(committed["failed"]):
        raise failed[name]
    assert committed == row or os.environ.get("TOOLKIT_UPDATE_DOCS"), "TOOLKIT_UPDATE_DOCS=1 writes the table anew"


def test_the_table_has_these_cases_alone() -> None:
    table = json.loads(TESTED_FILE.read_text())
    assert {kind: row["names"] for kind, row in table.items()} == {kind: x.names for kind, x in ARCHITECTURES.items()}
    assert set(read_rows()) == set(CASES)


def read_rows() -> dict[str, Row]:
    """The committed row of each case."""
    table = json.loads(TESTED_FILE.read_text() or "{}")
    return {case: row for each in table.values() for case, row in each["cases"].items()}


def write_row(case: str, row: Row) -> None:
    """Put a case's row into the table, and drop what is tested no more. Several processes may run tests."""
    with open(TESTED_FILE, "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        rows = read_rows() | {case: row}
        entries = [
            _entry(kind, {name: rows[name] for name in CASES if CASES[name][0] == kind and name in rows})
            for kind in ARCHITECTURES
        ]
        file.truncate(0)
        file.write("{\n" + ",\n".join(filter(None, entries)) + "\n}\n")


def _entry(kind: str, cases: Mapping[str, Row]) -> str:
    """A model type in the table, with a line for each case."""
    lines = ",\n".join(f"  {json.dumps(case)}: {json.dumps(row)}" for case, row in cases.items())
    names = json.dumps(ARCHITECTURES[kind].names)
    return f' {json.dumps(kind)}: {{"names": {names}, "cases": {{\n{lines}\n }}}}' if cases else ""
