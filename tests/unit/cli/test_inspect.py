"""`inspect`: its figures, its text and JSON, its page as a file, and what differs between two plans."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.cli.tiny_plans import make_tiny_plan
from unit.runtime.sample_plan import sample_plan, write_sample_plan

from toolkit.cli import main
from toolkit.cli.compile_ import print_summary, summarize
from toolkit.cli.inspect.diff import Change, compare
from toolkit.cli.inspect.examine import examine
from toolkit.cli.inspect.page import live_bytes, render_page
from toolkit.cli.inspect.text import describe_code, memory_map
from toolkit.cli.profile import LaunchTime, Profile
from toolkit.cli.progress import Phases
from toolkit.cli.roofline import Machine
from toolkit.cli.workload import StepSize, work
from toolkit.compiler.emit import write_plan
from toolkit.runtime.encodings import Q4_0
from toolkit.runtime.layers import split_layers
from toolkit.runtime.load import read_plan
from toolkit.runtime.plan import Buffer, Choice, Kernel, PassReport, Plan, TuningFile, WeightEntry
from toolkit.runtime.tuning import Race, Tuning, encode_tuning

MACHINE = Machine(bandwidth=1e9, arithmetic=1e9, integer=4e9)


def made_profile(directory: Path, size: StepSize) -> Profile:
    """A profile of a plan with invented times."""
    plan = read_plan(directory)
    size = size.of(plan)
    launches = tuple(
        LaunchTime(launch.op, launch.kernel, 1e-6 * (1 + index % 7), 0.5, 0, 0)
        for index, launch in enumerate(size.bucket(plan).launches)
    )
    seconds = sum(launch.seconds for launch in launches)
    return Profile("plan", plan.content_digest, "x86-64-v3", 2, MACHINE, size, 5, seconds, launches)


# --- figures ----------------------------------------------------------------------------------------------------------


def test_inspection_follows_the_roofline() -> None:
    plan = sample_plan(b"library", b"weights", b"{}")
    bucket = plan.buckets[0]
    launches = [
        msgspec.structs.replace(bucket.forward[0], op="linear:layers.0.a", bytes=2_000_000, flops=10),
        msgspec.structs.replace(bucket.forward[0], op="linear:layers.1.a", bytes=0, flops=4_000_000),
    ]
    weight = WeightEntry("weights.safetensors", 64, 5000, (4, 4), Q4_0, "panel16")
    plan = msgspec.structs.replace(
        plan,
        buckets=(msgspec.structs.replace(bucket, forward=tuple(launches)),),
        weights={**plan.weights, "v": weight},
    )
    found = examine(plan, MACHINE, StepSize())
    assert [(each.seconds, each.bound) for each in found.launches] == [(0.002, "memory"), (0.004, "arithmetic")]
    assert found.seconds == pytest.approx(0.006)
    assert [(each.op, each.launches, each.seconds) for each in found.ops] == [("linear:layers.*.a", 2, found.seconds)]
    assert [(each.encoding, each.bytes) for each in found.weights] == [("a4g32", 5000), ("f32", 64)]
    assert [(each.family, each.launches) for each in found.kernels] == [("embedding", 2)]
    assert found.kv_bytes_per_token == sum(each.bytes_per_token for each in found.caches) == 256


def test_codes_are_multiplied_faster_than_floats(llama_plan: Path) -> None:
    plan = read_plan(llama_plan)
    size = StepSize(1, 256, 256)
    for launch, report in zip(plan.buckets[0].launches, examine(plan, MACHINE, size).launches, strict=True):
        need = work(plan, launch, size)
        rate = 4e9 if launch.op.startswith("linear") else 1e9
        assert report.seconds == max(need.bytes / 1e9, need.flops / rate)


def test_a_profile_is_set_beside_the_roofline(llama_plan: Path) -> None:
    profile = made_profile(llama_plan, StepSize(2, 1, 50))
    found = examine(read_plan(llama_plan), MACHINE, profile.size, profile=profile)
    assert [each.measured for each in found.launches] == [each.seconds for each in profile.launches]
    assert found.measured == found.time == profile.seconds
    assert sum(each.measured or 0 for each in found.ops) == pytest.approx(profile.seconds)
    assert sum(each.measured or 0 for each in found.kernels) == pytest.approx(profile.seconds)


def tuned_plan(directory: Path) -> Plan:
    """Write a tuning file into the plan: its first quantized linear kernel was raced."""
    plan = read_plan(directory)
    name = next(name for name, kernel in plan.kernels.items() if kernel.family == "linear")
    shape = {"N": 64, "K": 96}
    choices = (Choice("x86-64-v3", 1, "tvm"), Choice("x86-64-v3", 512, "cpp"))
    races = (
        Race(name, shape, "x86-64-v3", 1, {"cpp": 3e-6, "tvm": 2e-6}, "tvm"),
        Race(name, shape, "x86-64-v3", 512, {"cpp": 1e-4, "tvm": 2e-4}, "cpp"),
        Race(name, {"N": 1, "K": 32}, "x86-64-v3", 1, {"cpp": 9e-6}, "cpp"),
    )
    data = encode_tuning(Tuning("toolkit-tuning", 1, 0, "a CPU", 2, {"c++": "13"}, races))
    (directory / "tuning.json").write_bytes(data)
    kernel = msgspec.structs.replace(plan.kernels[name], shape=shape, choices=choices)
    file = TuningFile("tuning.json", len(data), hashlib.sha256(data).hexdigest())
    plan = msgspec.structs.replace(plan, kernels={**plan.kernels, name: kernel}, tuning=file)
    write_plan(plan, directory)
    return plan


def test_the_races_of_a_kernel_are_told(llama_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(llama_plan, tmp_path / "plan")
    plan = tuned_plan(tmp_path / "plan")
    assert main.run(["inspect", str(tmp_path / "plan"), "--json"]) == 0
    kernels = [each for each in json.loads(capsys.readouterr().out)["kernels"] if each["choices"]]
    assert [race["seconds"] for race in kernels[0]["races"]] == [{"cpp": 3e-6, "tvm": 2e-6}, {"cpp": 1e-4, "tvm": 2e-4}]
    assert main.run(["inspect", str(tmp_path / "plan")]) == 0
    text = capsys.readouterr().out
    assert "x86-64-v3, 1 row: tvm 2 µs (cpp 3 µs)" in text
    assert "x86-64-v3, 512 rows: cpp 100 µs (tvm 200 µs)" in text
    without = examine(plan, MACHINE, StepSize())
    choices = "x86-64-v3, up to 1 row: tvm\nx86-64-v3, up to 512 rows: cpp"
    assert {describe_code(each) for each in without.kernels} == {"C++", choices}


def test_inspect_has_the_notes_for_which_compile_has_no_room(
    llama_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama_plan, tmp_path / "plan")
    plan = read_plan(llama_plan)
    (first, *others), notes = plan.report.passes, [f"so much of what number {n} was" for n in range(8)]
    passes = (msgspec.structs.replace(first, notes=tuple(notes[5:])), *others)
    report = msgspec.structs.replace(plan.report, notes=tuple(notes[:5]), passes=passes)
    write_plan(msgspec.structs.replace(plan, report=report), tmp_path / "plan")
    plan = read_plan(tmp_path / "plan")
    print_summary(summarize(tmp_path / "plan", plan, Phases()), plan)
    said = capsys.readouterr().out
    missing = sum(note not in said for note in (*notes, *(note for each in others for note in each.notes)))
    assert missing
    assert f"and {missing} more notes, see: toolkit inspect {tmp_path / 'plan'}\n" in said
    assert main.run(["inspect", str(tmp_path / "plan")]) == 0
    shown = capsys.readouterr().out
    assert all(note in shown for note in notes)


def test_a_plan_of_another_catalog_can_still_be_seen(llama_plan: Path) -> None:
    """Kernels that this version has no longer, or with other arguments, have no names of arguments."""
    plan = read_plan(llama_plan)
    kernels = {name: msgspec.structs.replace(kernel, params={}) for name, kernel in plan.kernels.items()}
    first = next(iter(kernels))
    kernels[first] = msgspec.structs.replace(kernels[first], family="forgotten")
    plan = msgspec.structs.replace(plan, kernels=kernels)
    found = examine(plan, MACHINE, StepSize())
    assert [each.bytes for each in found.launches if "lm_head" in each.op] == [
        launch.bytes for launch in plan.buckets[0].launches if "lm_head" in launch.op
    ]
    assert [] in [kernel["args"] for kernel in page_data(render_page(plan, found, None))["kernels"]]


# --- layers -----------------------------------------------------------------------------------------------------------


def test_layers_that_are_alike_are_one_part(llama_plan: Path, gemma_plan: Path) -> None:
    for directory, norm, expected in (
        (llama_plan, "add_norm", ["before the layers", "layer 0", "layers 1–2", "layer 3"]),
        (gemma_plan, "reduction", ["before the layers", "layer 0", "layers 1, 3", "layer 2", "layer 4"]),
    ):
        plan = read_plan(directory)
        program = plan.buckets[0].launches
        *parts, last = split_layers(plan, program)
        assert [part.name for part in parts] == expected
        assert [program[index].op for index in last.launches[0]] == [
            *(f"{norm}:model.norm", "linear:lm_head", "sample")
        ]
        found = sorted(index for part in (*parts, last) for members in part.launches for index in members)
        assert found == list(range(len(program)))
        for part in parts[1:]:
            for layer, members in zip(part.layers, part.launches, strict=True):
                named = [program[index].op for index in members if "layers." in program[index].op]
                assert len(named) > 7
                assert all(f"layers.{layer}." in f"{op}." for op in named)
                kernels = [program[index].kernel for index in members]
                assert kernels == [program[index].kernel for index in part.launches[0]]


def test_a_program_without_layers_is_one_part() -> None:
    plan = sample_plan(b"", b"", b"")
    (part,) = split_layers(plan, plan.buckets[0].launches)
    assert (part.name, part.layers, part.launches) == ("program", (), ((0,),))


# --- text and JSON ----------------------------------------------------------------------------------------------------


def test_inspect_prints_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_sample_plan(tmp_path / "plan")
    assert main.run(["inspect", str(tmp_path / "plan")]) == 0
    text = capsys.readouterr().out
    for shown in (
        "sample",
        "10 ops captured, 5 after",
        "fuse",
        "embedding:model.embed_tokens",
        "KV cache",
        "x86-64-v3",
        "tool calls: hermes, reasoning: no known form",
    ):
        assert shown in text
    assert main.run(["inspect", str(tmp_path / "plan"), "--launches"]) == 0
    assert re.search(r"embedding:model.embed_tokens +0 ", capsys.readouterr().out)
    assert main.run(["inspect", str(tmp_path / "plan"), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["model"]["name"] == "sample"
    assert data["size"] == {"batch": 1, "tokens": 1, "context": 128}
    assert data["machine"]["bandwidth"] > 1e8
    assert data["machine"]["integer"] > data["machine"]["arithmetic"] > 1e8
    assert main.run(["inspect", str(tmp_path)]) == 2
    assert "has no plan.json" in capsys.readouterr().err


def test_measured_times_are_printed(llama_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    profile = made_profile(llama_plan, StepSize(2, 1, 50))
    file = tmp_path / "step.json"
    file.write_bytes(msgspec.json.encode(profile))
    assert main.run(["inspect", str(llama_plan), "--profile", str(file)]) == 0
    text = capsys.readouterr().out
    assert f"{profile.seconds * 1e3:.2f} ms measured one by one" in text
    assert "2 sequences × 1 new tokens, context 50; 1.0 GB/s, 1 GFLOP/s, 8 bits 4 GOP/s" in text
    assert main.run(["inspect", str(llama_plan), "--profile", str(file), "--batch", "2", "--context", "50"]) == 0
    capsys.readouterr()
    assert main.run(["inspect", str(llama_plan), "--profile", str(file), "--batch", "3"]) == 2
    assert "--batch 2 --tokens 1 --context 50" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--html", "--json"], "different reports"),
        (["--diff", "other", "--launches"], "different reports"),
        (["--html", "no/such/folder/page.html"], "can't write no/such/folder/page.html: No such file"),
        (["--html", "."], "can't write .: Is a directory"),
        (["--context", "500"], "--context must be 1 to 256"),
        (["--batch", "9"], "at most 512 tokens and 8 sequences"),
        (["--profile", "absent.json"], "bench kernels"),
        (["--diff", "absent"], "absent does not exist"),
    ],
)
def test_what_inspect_refuses(
    options: list[str], reason: str, llama_plan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main.run(["inspect", str(llama_plan), *options]) == 2
    assert reason in capsys.readouterr().err


def test_the_memory_map_shows_where_and_when() -> None:
    buffers = [Buffer("a", 0, 600, 0, 0), Buffer("b", 600, 600, 1, 1)]
    lines = memory_map(buffers, 1200).splitlines()
    half = len(lines[0]) // 2
    assert lines[0] == "█" * half + " " * half
    assert lines[-1] == " " * half + "█" * half


# --- the page ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7), st.integers(0, 7)), max_size=8))
def test_live_bytes(spans: list[tuple[int, int, int]]) -> None:
    buffers = [Buffer(str(number), 0, size, *sorted(span)) for number, (size, *span) in enumerate(spans)]
    expected = [sum(each.bytes for each in buffers if each.first <= launch <= each.last) for launch in range(8)]
    assert live_bytes(buffers, 8) == expected


def page_data(page: str) -> dict[str, Any]:
    (found,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    data: dict[str, Any] = json.loads(found)
    return data


def test_the_page_holds_the_plan_and_nothing_from_elsewhere(
    llama_plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main.run(["inspect", str(llama_plan), "--html"]) == 0
    assert capsys.readouterr().out.startswith("plan.html: ")
    page = (tmp_path / "plan.html").read_text()
    assert not re.findall(r"(?:src|href)\s*=\s*[\"'](?!#|data:)|@import|url\(|https?://(?!www\.w3\.org/2000/svg)", page)
    plan, data = read_plan(llama_plan), page_data(page)
    tables = {
        name: [dict(zip(data[name]["columns"], row, strict=True)) for row in data[name]["rows"]]
        for name in ("launches", "weights", "buffers")
    }
    assert [each["op"] for each in tables["launches"]] == [launch.op for launch in plan.buckets[0].launches]
    assert {each["name"]: each["bytes"] for each in tables["weights"]} == {
        name: entry.bytes for name, entry in plan.weights.items()
    }
    assert [(each["value"], each["offset"]) for each in tables["buffers"]] == [
        (each.value, each.offset) for each in plan.memory.buffers
    ]
    names = [kernel["args"] for kernel in data["kernels"] if kernel["family"] == "attention"]
    assert names[0][:2] == [["q", False], ["cache", False]]


def test_the_page_says_what_did_not_fuse(llama_plan: Path) -> None:
    plan = read_plan(llama_plan)
    passes = (PassReport("fuse_most", 3, 9, 5, notes=("<b> & co. were left",)), PassReport("idle", 0, 5, 5))
    plan = msgspec.structs.replace(plan, report=msgspec.structs.replace(plan.report, passes=passes, notes=("in all",)))
    page = render_page(plan, examine(plan, MACHINE, StepSize()), None)
    for text in ("&lt;b&gt; &amp; co. were left", ">in all</p>", "9 → 5 ops", "0 matches", "3 matches"):
        assert text in page


def test_nothing_in_a_plan_can_leave_its_place_in_the_page() -> None:
    plan = sample_plan(b"library", b"weights", b"{}")
    evil = "</script><script>alert(1)</script>\"'<!--"
    bucket = plan.buckets[0]
    launch = msgspec.structs.replace(bucket.forward[0], op=f"linear:{evil}")
    plan = msgspec.structs.replace(
        plan,
        model=msgspec.structs.replace(plan.model, name=evil, quantization=evil),
        buckets=(msgspec.structs.replace(bucket, forward=(launch,)),),
        weights={"w": msgspec.structs.replace(plan.weights["w"], sources=(evil,))},
        kernels={"k": Kernel(evil, {evil: evil}, evil)},
    )
    page = render_page(plan, examine(plan, MACHINE, StepSize()), None)
    assert "alert(1)</script>" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert page_data(page)["launches"]["rows"][0][0] == f"linear:{evil}"


def test_a_large_model_has_a_modest_page(llama_plan: Path) -> None:
    """130 layers of the tiny llama's third one."""
    plan = read_plan(llama_plan)
    bucket = plan.buckets[0]
    layer = [launch for launch in bucket.forward if ".2." in launch.op]
    copies = [msgspec.structs.replace(one, op=one.op.replace(".2.", f".{n}.")) for n in range(130) for one in layer]
    weights = {name.replace(".2.", f".{n}."): entry for n in range(130) for name, entry in plan.weights.items()}
    plan = msgspec.structs.replace(
        plan, buckets=(msgspec.structs.replace(bucket, forward=tuple(copies)),), weights=weights
    )
    page = render_page(plan, examine(plan, MACHINE, StepSize()), None)
    assert len(copies) > 1000
    assert len(page) < 1_000_000


# --- differences ------------------------------------------------------------------------------------------------------


def changes_of(before: Path, after: Path) -> dict[str, list[Change]]:
    found: dict[str, list[Change]] = {}
    for change in compare(read_plan(before), read_plan(after), MACHINE, StepSize()):
        found.setdefault(change.section, []).append(change)
    return found


def test_a_plan_is_the_same_as_itself_and_its_copy(
    llama_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(llama_plan, tmp_path / "copy")
    assert main.run(["inspect", str(llama_plan), "--diff", str(tmp_path / "copy")]) == 0
    assert "are the same" in capsys.readouterr().out
    assert main.run(["inspect", str(llama_plan), "--diff", str(tmp_path / "copy"), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == []


def test_another_quantization_changes_weights_kernels_and_bytes(
    llama_plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = make_tiny_plan(tmp_path, "llama", quant="int8", max_context=200)
    found = changes_of(llama_plan, other)
    assert {"model", "launches", "kernels", "weights", "memory", "estimate"} <= found.keys()
    assert not {"text", "ops", "passes", "notes", "versions"} & found.keys()
    assert Change("model", "quantization", "int4", "int8") in found["model"]
    assert Change("model", "max_context", 256, 200) in found["model"]
    assert Change("kernels", "linear: encoding", "a4g32", "a8g32") in found["kernels"]
    down = "model.layers.*.mlp.down_proj.weight"
    assert Change("weights", down, "4 × a4g32 in panel16, 64 × 96", "4 × a8g32 in panel16, 64 × 96") in found["weights"]
    before, after = read_plan(llama_plan).memory.weights, read_plan(other).memory.weights
    assert Change("memory", "weights bytes", before, after) in found["memory"]
    read = next(change for change in found["estimate"] if change.name == "bytes read")
    assert isinstance(read.before, int)
    assert isinstance(read.after, int)
    assert read.before < read.after
    assert main.run(["inspect", str(llama_plan), "--diff", str(other)]) == 1
    text = capsys.readouterr().out
    assert "quantization  int4 → int8" in " ".join(text.split()).replace("int4 → int8", " int4 → int8")
    assert main.run(["inspect", str(llama_plan), "--diff", str(other), "--json"]) == 1
    assert {"section": "model", "name": "quantization", "before": "int4", "after": "int8"} in json.loads(
        capsys.readouterr().out
    )


def test_plans_of_two_models_can_be_compared(llama_plan: Path, gemma_plan: Path) -> None:
    found = changes_of(llama_plan, gemma_plan)
    assert Change("model", "architecture", "llama", "gemma3_text") in found["model"]
    ops = {change.name: (change.before, change.after) for change in found["ops"]}
    assert ops["paged_attention"] == (4, 5)
    assert ops["linear"] == (17, 21)
    kinds = Counter(launch.op.partition(":")[0] for launch in read_plan(gemma_plan).buckets[0].launches)
    assert ops["reduction"][1] == kinds["reduction"]
    assert any(change.before is None for change in found["kernels"])
    backwards = changes_of(gemma_plan, llama_plan)
    assert len(backwards["ops"]) == len(found["ops"])


def test_no_difference_goes_unseen(llama_plan: Path) -> None:
    """Whatever top-level part of a plan is changed, something is reported."""
    plan = read_plan(llama_plan)
    bucket, kernel = plan.buckets[0], next(iter(plan.kernels))
    weight = next(iter(plan.weights))
    changed: dict[str, Any] = {
        "eos_token_ids": (7,),
        "max_batch": plan.max_batch + 1,
        "buckets": (msgspec.structs.replace(bucket, forward=(*bucket.forward[1::-1], *bucket.forward[2:])),),
        "kernels": {**plan.kernels, kernel: msgspec.structs.replace(plan.kernels[kernel], source_hash="other")},
        "weights": {**plan.weights, weight: msgspec.structs.replace(plan.weights[weight], sources=("x",))},
        "memory": msgspec.structs.replace(plan.memory, buffers=plan.memory.buffers[::-1]),
        "libraries": (msgspec.structs.replace(plan.libraries[0], sha256="0" * 64),),
        "caches": (msgspec.structs.replace(plan.caches[0], page_tokens=8),),
        "report": msgspec.structs.replace(plan.report, notes=("new",)),
        "model": msgspec.structs.replace(plan.model, random_weights=2),
    }
    for name, value in changed.items():
        other = msgspec.structs.replace(plan, **{name: value})
        assert compare(plan, other, MACHINE, StepSize()), name


def test_reading_a_plan_needs_no_torch(llama_plan: Path) -> None:
    import subprocess

    code = (
        "import sys; from toolkit.cli.main import run\n"
        f"assert run(['inspect', {str(llama_plan)!r}, '--html', '/dev/null']) == 0\n"
        "print({'torch', 'transformers', 'onnx', 'triton', 'tvm', 'toolkit.models'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "set()"
