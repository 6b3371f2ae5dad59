"""Compiles a plan from a captured graph's text, in an interpreter without torch and transformers.

    python after_capture.py JOB

JOB is a JSON file: `graph` and `constants`, files of the text and of its large constants; `model`, a directory of
safetensors; `output`; `text`, a plan with the text files and what it says of them; `choices` of `toolkit.compile`;
`opened` and `config`, what else opening the model told; `versions` of packages and the C++ `compiler`, as the
interpreter that captured has them. Everything behind capture is the usual flow.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import msgspec
import numpy as np

from toolkit.cli import driver
from toolkit.compiler.codegen import cpu, tvm
from toolkit.compiler.text import parse_graph
from toolkit.models.checkpoint import Checkpoint
from toolkit.runtime.plan import Text


def stand_in(name: str, **values: Any) -> None:
    """A module of the front end that gives what was found before."""
    module = ModuleType(f"toolkit.models.{name}")
    module.__dict__.update(values)
    sys.modules[module.__name__] = module


def copy_text(folder: Path, plan: str, fields: dict[str, Any]) -> Text:
    """The text files of a plan, which the tokenizer's own library wrote."""
    for name in fields["files"]:
        shutil.copy(Path(plan, name), folder)
    return msgspec.convert(fields, Text)


def main(job: dict[str, Any]) -> None:
    config = SimpleNamespace(**job["config"])
    weights = Checkpoint(Path(job["model"]))
    opened = SimpleNamespace(**job["opened"], config=config, weights=weights, text=None, notes=())
    opened.eos_token_ids = tuple(opened.eos_token_ids)
    with np.load(job["constants"]) as stored:
        graph = parse_graph(Path(job["graph"]).read_text(), dict(stored))
    stand_in("source", open_model=lambda *_, **__: opened)
    stand_in("recall", captured_graph=lambda *_, **__: graph)
    stand_in("tokenizer", write_text=lambda _, folder: copy_text(folder, **job["text"]))
    driver.require_compile_extra = lambda: None
    for module in (driver, tvm):
        vars(module).update(version=job["versions"].__getitem__)
    compiler = cpu.Compiler(tuple(job["compiler"]["command"]), job["compiler"]["version"])
    cpu.find_compiler = lambda: compiler  # type: ignore[assignment]
    driver.compile(job["model"], output=job["output"], **job["choices"])
    assert not {"torch", "transformers", "tvm"} & set(sys.modules)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()))
