"""What quantization costs: perplexity, KL divergence and top-1 agreement of plans of one model, by encoding.

    quantization.py MODEL --calibrate TEXT [--text FILE] [--only NAME,...] [--json FILE]

Each plan is compiled with `toolkit compile --quant NAME` (and again with `--calibrate TEXT`) and measured with `toolkit
bench quality PLAN --reference MODEL --text FILE`. Prints a table in Markdown.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from run import machine

PLAIN = ("fp32", "bf16", "int8")
"""Encodings that calibration would hardly change."""
ROUNDED = ("int4", "int4-g64", "int4-g128", "int4-asym", "int4-g64-asym", "int4-g128-asym")
HEAD = "| `--quant` | calibrated | weights | perplexity | KL | 99% below | top-1 |\n|---|---|---|---|---|---|---|"


def toolkit(*arguments: str) -> dict[str, Any]:
    """What a command says with `--json`."""
    command = [sys.executable, "-m", "toolkit.cli.main", *arguments, "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr}")
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def measured(model: str, quant: str, calibrate: str | None, text: list[str]) -> dict[str, Any]:
    """One plan's row."""
    with tempfile.TemporaryDirectory() as folder:
        plan = str(Path(folder) / "plan")
        calibration = [] if calibrate is None else ["--calibrate", calibrate]
        made = toolkit("compile", model, "-o", plan, "--quant", quant, *calibration)
        found = toolkit("bench", "quality", plan, "--reference", model, *text)
    row = {"quant": quant, "calibrated": calibrate is not None, "weight_bytes": made["weight_bytes"]}
    kept = ("perplexity", "reference_perplexity", "kl", "kl_p99", "top1_agreement", "tokens", "window", "text")
    return row | {name: found[name] for name in kept}


def line(row: dict[str, Any]) -> str:
    """A row of the table."""
    calibrated = "yes" if row["calibrated"] else ""
    return (
        f"| `{row['quant']}` | {calibrated} | {row['weight_bytes'] / 1e6:.0f} MB | {row['perplexity']:.2f} | "
        f"{row['kl']:.4f} | {row['kl_p99']:.3f} | {row['top1_agreement']:.1%} |"
    )


def plans(args: argparse.Namespace) -> Iterator[tuple[str, str | None]]:
    """Encodings, and the text that they are calibrated on."""
    chosen = args.only.split(",") if args.only else [*PLAIN, *ROUNDED]
    for quant in chosen:
        yield quant, None
        if quant not in PLAIN:
            yield quant, args.calibrate


def main() -> None:
    """Measure, print, and write what was found."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--calibrate", required=True)
    parser.add_argument("--text")
    parser.add_argument("--only", default="")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(HEAD, flush=True)
    rows = []
    for quant, calibrate in plans(args):
        rows.append(measured(args.model, quant, calibrate, ["--text", args.text] if args.text else []))
        print(line(rows[-1]), flush=True)
        if args.json is not None:
            names = {"model": Path(args.model).name, "calibrated_on": Path(args.calibrate).name}
            args.json.write_text(json.dumps({**machine(), **names, "rows": rows}, indent=1) + "\n")
    print(f"reference: perplexity {rows[0]['reference_perplexity']:.2f} over {rows[0]['tokens']} tokens")


if __name__ == "__main__":
    main()
