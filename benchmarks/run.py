"""`make bench`: the figures that this project claims on a CPU, each beside its peer in the same run.

    run.py MODELS [--runs N] [--only decode,batch,start,overhead,quality] [--json FILE]

llama.cpp is built from source for this machine (llama-cpp-python, in an environment of its own), which takes long the
first time. Ours and the peer's processes alternate, and a ratio is of medians.
Everything made is kept in `.bench/`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

HERE = Path(__file__).resolve().parent
WORK = HERE.parent / ".bench"
PEER = "llama-cpp-python==0.3.36"


class Figure(NamedTuple):
    """One line of the result."""

    what: str
    ours: str
    peer: str
    value: float
    bar: float
    higher_is_better: bool

    @property
    def met(self) -> bool:
        return self.value >= self.bar if self.higher_is_better else self.value <= self.bar


def say(text: str) -> None:
    """Progress goes to stderr; the table to stdout."""
    print(text, file=sys.stderr, flush=True)


def run_json(command: list[str]) -> dict[str, Any]:
    """The JSON object that a command prints last."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


# --- what is measured -------------------------------------------------------------------------------------------------


def peer_python() -> str:
    """The interpreter of llama.cpp's environment, made on first use; $TOOLKIT_PEER_PYTHON names a ready one."""
    ready = os.environ.get("TOOLKIT_PEER_PYTHON")
    if ready:
        return ready
    folder = WORK / "peer"
    python = folder / "bin/python"
    if not (folder / "ready").exists():
        say(f"building {PEER} for this machine (tens of minutes on two cores, once) ...")
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON"}
        subprocess.run([str(python), "-m", "pip", "install", "-q", PEER], check=True, env=environment)
        (folder / "ready").touch()
    return str(python)


def random_1b(models: Path) -> Path:
    """The random 1.07B Q4_0 model."""
    path = models / "random-1b-q4_0.gguf"
    if not path.exists():
        say("writing the random 1.07B model ...")
        scratch = path.with_suffix(".part")
        maker = [sys.executable, str(HERE / "make_random_gguf.py"), str(models / "smollm2.gguf"), str(scratch)]
        subprocess.run(maker, check=True)
        scratch.rename(path)
    return path


@cache
def plan_of(model: Path, *options: str) -> Path:
    """The plan of a model, compiled once a run by the code as it is now: a plan on disk may be of older kernels."""
    plan = WORK / f"{model.stem}{''.join(options)}-plan"
    say(f"compiling {model.name} {' '.join(options)} ...")
    WORK.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "toolkit.cli.main", "compile", str(model), "--force", "-o", str(plan)]
    subprocess.run([*command, *options], check=True, stdout=subprocess.DEVNULL)
    return plan


def alternate(model: Path, runs: int, *options: str) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """Ours and the peer's figures of one model: whole processes in turn, `runs` times."""
    ours: dict[str, list[float]] = {}
    peer: dict[str, list[float]] = {}
    plan, python = plan_of(model), peer_python()
    for turn in range(runs):
        say(f"{model.stem} {' '.join(options)}: run {turn + 1} of {runs}")
        commands = (
            (ours, [sys.executable, str(HERE / "decode.py"), str(plan), "--runs", "2", *options]),
            (peer, [python, str(HERE / "peer_llama_cpp.py"), str(model), "--runs", "2", *options]),
        )
        for figures, command in commands:
            for name, values in run_json(command).items():
                if isinstance(values, list):
                    figures.setdefault(name, []).extend(values)
    return ours, peer


def against_peer(
    what: str, key: str, bar: float, pair: tuple[dict[str, list[float]], dict[str, list[float]]]
) -> Figure:
    """Tokens a second of ours and the peer's, and their ratio."""
    ours, peer = (statistics.median(side[key]) for side in pair)
    return Figure(what, f"{ours:.1f} tok/s", f"{peer:.1f} tok/s", ours / peer, bar, True)


def decode(models: Path, runs: int) -> list[Figure]:
    """One sequence: decode and prefill."""
    small = alternate(models / "smollm2.gguf", runs)
    large = alternate(random_1b(models), runs)
    return [
        against_peer("decode, SmolLM2 Q4_1, batch 1", "decode", 1.2, small),
        against_peer("decode, 1.07B Q4_0, batch 1", "decode", 0.95, large),
        against_peer("prefill 512, SmolLM2 Q4_1", "prefill", 1.0, small),
        against_peer("prefill 512, 1.07B Q4_0", "prefill", 1.0, large),
    ]


def batch(models: Path, runs: int) -> list[Figure]:
    """Eight concurrent requests."""
    pair = alternate(random_1b(models), runs, "--batch", "8")
    return [
        against_peer("8 requests, 1.07B Q4_0, prompts included", "batch_whole", 1.5, pair),
        against_peer("8 requests, 1.07B Q4_0, decode alone", "batch_decode", 1.5, pair),
    ]


def start(models: Path, runs: int) -> list[Figure]:
    """From exec of `toolkit serve` to the first streamed token."""
    command = [sys.executable, str(HERE / "start.py"), str(plan_of(models / "smollm2.gguf")), "--runs", str(2 * runs)]
    seconds = statistics.median(run_json(command)["seconds"])
    return [Figure("serve: exec to first streamed token, SmolLM2", f"{seconds:.2f} s", "", seconds, 1.5, False)]


def overhead(models: Path, runs: int) -> list[Figure]:
    """What an engine step costs outside the kernels."""
    command = [sys.executable, str(HERE / "engine_overhead.py"), "--batch", "8"]
    cost = statistics.median(float(run_json(command)["loop_ms"]) for _ in range(runs))
    return [Figure("engine step outside the kernels, batch 8", f"{cost:.3f} ms", "", cost, 0.3, False)]


def quality(models: Path, runs: int) -> list[Figure]:
    """Greedy tokens against Hugging Face on the same weights."""
    figures = []
    for name, options in (
        ("smollm2", ("--quant", "none", "--dtype", "float32")),
        ("smollm2", ()),
        ("gemma-3-270m-q4_k_m", ()),
    ):
        model = models / f"{name}.gguf"
        found = run_json([sys.executable, str(HERE / "quality.py"), str(model), str(plan_of(model, *options))])
        what = (
            f"{name} {'float32' if options else 'as quantized'}: prompts that follow Hugging Face by the logprob rule"
        )
        same = f"{found['exact']} of {found['prompts']} identical"
        figures.append(Figure(what, same, "", found["agree"] / found["prompts"], 1.0, True))
    return figures


PARTS: dict[str, Callable[[Path, int], list[Figure]]] = {
    "decode": decode,
    "batch": batch,
    "start": start,
    "overhead": overhead,
    "quality": quality,
}


def machine() -> dict[str, Any]:
    """What the figures were taken on, and of which code."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    described = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=HERE, capture_output=True, text=True, check=False
    )
    return {
        "cpu": names[0],
        "cores": len(os.sched_getaffinity(0)),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
        "commit": described.stdout.strip(),
    }


def report(found: dict[str, Any], figures: Sequence[Figure], path: Path | None) -> int:
    """Print the figures with the machine as it was found, and write them to a file; 1 if a bar was missed."""
    print(f"{found}\n")
    print(f"{'what':72} {'ours':>16} {'llama.cpp':>14} {'value':>7} {'bar':>7}")
    for figure in figures:
        bar = f"{'>=' if figure.higher_is_better else '<='} {figure.bar:g}"
        verdict = "" if figure.met else "MISSED"
        print(f"{figure.what:72} {figure.ours:>16} {figure.peer:>14} {figure.value:7.2f} {bar:>7} {verdict}")
    if path:
        record = {
            "time": time.strftime("%Y-%m-%d %H:%M"),
            **found,
            "figures": [figure._asdict() for figure in figures],
        }
        path.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if all(figure.met for figure in figures) else 1


def main() -> int:
    """Print the table; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", type=Path)
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    found = machine()
    figures = [figure for part in args.only.split(",") for figure in PARTS[part](args.models, args.runs)]
    return report(found, figures, args.json)


if __name__ == "__main__":
    sys.exit(main())
