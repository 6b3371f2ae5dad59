"""The HTML page of `inspect` in a real browser, opened from disk."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
from playwright.sync_api import Browser, Page, expect

from toolkit.cli import main
from toolkit.cli.inspect.examine import Inspection, examine
from toolkit.cli.inspect.page import render_page
from toolkit.cli.profile import LaunchTime, Profile
from toolkit.cli.roofline import Machine
from toolkit.cli.units import duration, size
from toolkit.cli.workload import StepSize, work
from toolkit.runtime.layers import split_layers
from toolkit.runtime.load import read_plan
from toolkit.runtime.plan import ArenaArg, Plan

MACHINE = Machine(bandwidth=20e9, arithmetic=100e9, integer=400e9)
PHONE, DESKTOP = (390, 844), (1440, 900)


@dataclass
class Made:
    """A page, what it was made of, and the plan."""

    file: Path
    plan: Plan
    inspection: Inspection


@dataclass
class Opened:
    """A page in the browser, with everything that went wrong or over the network."""

    page: Page
    trouble: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def text(self, selector: str) -> str:
        """The text of an element, spaces folded."""
        return " ".join(self.page.locator(selector).inner_text().split())

    def figure(self, name: str) -> str:
        """A figure of the selected launch."""
        return self.text(f"#details dd[data-figure={name}]")


@pytest.fixture(scope="module")
def estimated(smollm2_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """SmolLM2's page, its step estimated."""
    plan = read_plan(smollm2_plan)
    return make(plan, examine(plan, MACHINE, StepSize()), None, tmp_path_factory.mktemp("page"))


@pytest.fixture(scope="module")
def measured(smollm2_plan: Path, tmp_path_factory: pytest.TempPathFactory) -> Made:
    """SmolLM2's page with invented times: each launch takes twice as long as the roofline and a microsecond."""
    plan, folder = read_plan(smollm2_plan), tmp_path_factory.mktemp("measured")
    step = StepSize(2, 3, 100)
    times = []
    for launch in plan.buckets[0].launches:
        need = work(plan, launch, step)
        seconds = 2 * max(MACHINE.seconds(need)) + 1e-6
        times.append(LaunchTime(launch.op, launch.kernel, seconds, 0.75, need.bytes, need.flops))
    total = sum(each.seconds for each in times)
    profile = Profile("plan", plan.content_digest, "x86-64-v3", 2, MACHINE, step, 9, total, tuple(times))
    (folder / "step.json").write_bytes(msgspec.json.encode(profile))
    arguments = [str(smollm2_plan), "--profile", str(folder / "step.json"), "--html", str(folder / "page.html")]
    assert main.run(["inspect", *arguments]) == 0
    return Made(folder / "page.html", plan, examine(plan, MACHINE, step, profile=profile))


def make(plan: Plan, inspection: Inspection, profile: Profile | None, folder: Path) -> Made:
    file = folder / "page.html"
    file.write_text(render_page(plan, inspection, profile))
    return Made(file, plan, inspection)


@pytest.fixture
def opened(browser: Browser) -> Iterator[Any]:
    """Opens pages, and says at the end whether any of them complained."""
    found: list[Opened] = []

    def open_page(made: Made, viewport: tuple[int, int] = DESKTOP, scheme: Any = "light", part: str = "") -> Opened:
        page = browser.new_page(
            viewport={"width": viewport[0], "height": viewport[1]}, color_scheme=scheme, reduced_motion="reduce"
        )
        each = Opened(page)
        page.on("console", lambda message: each.trouble.append(message.text))
        page.on("pageerror", lambda error: each.trouble.append(str(error)))
        page.on("dialog", lambda dialog: each.trouble.append(dialog.message))
        page.on("request", lambda request: each.requests.append(request.url))
        page.goto(made.file.as_uri() + part)
        found.append(each)
        return each

    yield open_page
    for each in found:
        each.page.close()
        assert each.trouble == []
        assert all(re.match(r"file:///\S+/page\.html|data:", url) for url in each.requests)


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_complaint_and_without_a_network(
    opened: Any, measured: Made, viewport: tuple[int, int], scheme: str
) -> None:
    page = opened(measured, viewport, scheme).page
    for section in ("graph", "step", "memory", "weights", "kernels", "passes", "plan"):
        assert page.locator(f"#{section}").is_visible()
    assert page.evaluate("document.documentElement.scrollWidth") <= viewport[0]
    background = page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) > 384) == (scheme == "light")


def test_the_head_has_the_plans_figures(opened: Any, estimated: Made) -> None:
    view, plan, data = opened(estimated), estimated.plan, estimated.inspection
    assert view.text("h1") == plan.model.name
    expected = {
        "step-time": duration(data.seconds),
        "weights-size": size(plan.memory.weights),
        "arena-size": size(plan.memory.arena),
        "kv-size": size(plan.kv_bytes_per_token),
        "launch-count": str(len(plan.buckets[0].launches)),
        "kernel-count": str(len(plan.kernels)),
    }
    assert {name: view.text(f"#{name}") for name in expected} == expected
    assert f"{plan.report.captured_ops} ops captured" in view.text("#top")
    assert all(version in view.text("#top") for version in plan.report.versions.values())
    assert f"{size(data.requirements.memory)} of memory for one sequence" in view.text("#needs")


def test_everything_in_the_plan_is_drawn_once(opened: Any, estimated: Made) -> None:
    view, plan = opened(estimated), estimated.plan
    launches = plan.buckets[0].launches
    parts = split_layers(plan, launches)
    assert view.page.locator(".part").count() == len(parts)
    assert view.page.locator(".op").count() == sum(len(part.launches[0]) for part in parts)
    assert view.page.locator("#strip i").count() == plan.model.layers
    assert view.page.locator("#timeline rect.fill").count() == len(launches)
    assert view.page.locator("#arena rect.buffer").count() == len(plan.memory.buffers)
    assert view.page.locator("#passes li").count() == len(plan.report.passes)
    assert view.page.locator("#kernels tbody tr").count() == len(plan.kernels)
    assert view.text("#found") == f"{len(plan.weights)} tensors, {size(plan.memory.weights)}"


def test_the_timeline_is_to_scale(opened: Any, estimated: Made) -> None:
    page, data = opened(estimated).page, estimated.inspection
    widths = page.evaluate(
        "[...document.querySelectorAll('#timeline rect.fill')].map((each) => +each.getAttribute('width'))"
    )
    assert widths == pytest.approx([10000 * each.seconds / data.seconds for each in data.launches], rel=1e-3)


def test_the_arena_is_to_scale(opened: Any, estimated: Made) -> None:
    page, memory = opened(estimated).page, estimated.plan.memory
    places = page.evaluate(
        "[...document.querySelectorAll('#arena rect.buffer')].map((each) => "
        "['x', 'width', 'y', 'height'].map((name) => +each.getAttribute(name)))"
    )
    scale = 280 / memory.arena
    expected = [(b.first, b.last + 1 - b.first, b.offset * scale, b.bytes * scale) for b in memory.buffers]
    assert [value for place in places for value in place] == pytest.approx([value for row in expected for value in row])


def test_clicking_an_op_shows_what_it_is(opened: Any, estimated: Made) -> None:
    view, plan, data = opened(estimated), estimated.plan, estimated.inspection
    launches = plan.buckets[0].launches
    (index,) = (number for number, launch in enumerate(launches) if launch.op == "linear:lm_head")
    launch, report = launches[index], data.launches[index]
    assert view.page.locator("#details").is_hidden()
    view.page.locator(".op", has_text="lm_head").filter(has_text="linear").click()
    assert f"launch {index} of {len(launches)}, after the layers" in view.text("#details .where")
    assert view.figure("roofline") == f"{duration(report.seconds)}, bound by memory"
    assert view.figure("share") == f"{100 * report.seconds / data.seconds:.2f}% of the step"
    assert view.figure("reads") == f"{size(report.bytes)} ({report.bytes:,})"
    assert view.figure("operations").startswith(f"{report.flops:,}, ")
    details = view.text("#details")
    weight = plan.weights["model.embed_tokens.weight"]
    for text in (
        launch.kernel,
        "model.embed_tokens.weight",
        weight.encoding.name,
        size(weight.bytes),
        "Reads the results of",
    ):
        assert text in details
    names = view.page.locator("#details tbody th").all_inner_texts()
    assert names == ["x", "weight", "out", "rows", "N", "K"]
    assert view.page.url.endswith(f"#launch-{index}")


def test_merged_weights_name_their_sources(opened: Any, estimated: Made) -> None:
    view = opened(estimated)
    view.page.locator(".op", has_text="q_proj + k_proj + v_proj").first.click()
    for source in "qkv":
        assert f"from model.layers.0.self_attn.{source}_proj.weight" in view.text("#details")


def test_what_was_fused_into_a_layer_is_said(opened: Any, estimated: Made) -> None:
    plan = estimated.plan
    epilogues = {plan.kernels[launch.kernel].params.get("epilogue") for launch in plan.buckets[0].forward} - {"", None}
    text = opened(estimated).text("#parts")
    assert epilogues
    assert all(f"linear · {epilogue} · a4g32m" in text for epilogue in epilogues)


def test_layers_that_are_alike_can_be_stepped_through(opened: Any, estimated: Made) -> None:
    view = opened(estimated, part="#launch-50")
    expect(view.page.locator("#details .where")).to_contain_text("launch 50 of")
    layer = int(view.text("#details .where").split("layer ")[1].split()[0])
    op = view.text("#details h2")
    view.page.get_by_role("button", name="The same op in the layer after").click()
    assert view.text("#details h2") == op
    assert f"layer {layer + 1}" in view.text("#details .where")
    assert view.page.locator("#strip i.on").get_attribute("data-layer") == str(layer + 1)
    assert view.page.locator(".op[aria-pressed=true]").count() == 1


def test_the_data_can_be_followed_to_its_readers(opened: Any, estimated: Made) -> None:
    view = opened(estimated)
    view.page.locator(".op", has_text="rope_kv_write").first.click()
    view.page.locator("#details .links button", has_text="paged_attention").click()
    assert view.text("#details h2") == "paged_attention"
    launch = next(each for each in estimated.plan.buckets[0].launches if each.op.startswith("paged_attention"))
    touched = {arg.value for arg in launch.args if isinstance(arg, ArenaArg)}
    assert view.page.locator("#arena rect.touched").count() == len(touched)


def test_it_works_by_keyboard(opened: Any, estimated: Made) -> None:
    page = opened(estimated).page
    page.locator(".op").nth(4).focus()
    page.keyboard.press("Enter")
    where = page.locator("#details .where")
    expect(where).to_contain_text("launch 4 of")
    page.locator("#timeline").focus()
    page.keyboard.press("ArrowRight")
    expect(where).to_contain_text("launch 5 of")
    page.keyboard.press("End")
    expect(where).to_contain_text(f"launch {len(estimated.plan.buckets[0].launches) - 1} of")
    page.keyboard.press("Escape")
    assert page.locator("#details").is_hidden()
    unnamed = page.evaluate(
        "[...document.querySelectorAll('button, input')].filter((each) => !each.textContent.trim() && "
        "!each.getAttribute('aria-label') && !each.labels?.length).length"
    )
    assert unnamed == 0


def test_pictures_zoom_and_say_what_is_under_the_pointer(opened: Any, estimated: Made) -> None:
    page = opened(estimated).page
    inner = page.locator("#timeline > div")
    before = inner.evaluate("(each) => each.clientWidth")
    page.locator(".zoom[data-for=timeline]").get_by_role("button", name="Zoom in").click()
    assert inner.evaluate("(each) => each.clientWidth") == pytest.approx(2 * before, abs=2)
    page.locator(".zoom[data-for=timeline]").get_by_role("button", name="Show all").click()
    assert inner.evaluate("(each) => each.clientWidth") == before
    page.locator("#timeline rect.fill").last.scroll_into_view_if_needed()
    box = page.locator("#timeline").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.8 * box["width"], box["y"] + 40)
    expect(page.locator("#tip")).to_contain_text("of the step")
    page.mouse.move(box["x"], box["y"] - 80)
    expect(page.locator("#tip")).to_be_hidden()


def test_a_layer_can_be_looked_at_closely(opened: Any, estimated: Made) -> None:
    view, memory = opened(estimated, part="#launch-20"), estimated.plan.memory
    assert view.text("#arena-range") == f"0 to {size(memory.arena)} of the arena"
    for name in ("timeline", "arena"):
        view.page.locator(f".zoom[data-for={name}]").get_by_role("button", name="Zoom to the selected layer").click()
    expect(view.page.locator("#timeline .tags span", has_text="gate_proj + up_proj").first).to_be_visible()
    shown = set(view.page.locator("#arena .tags span").all_inner_texts())
    assert len(shown & {buffer.value for buffer in memory.buffers}) > 3
    assert view.text("#arena-range") != f"0 to {size(memory.arena)} of the arena"


def test_weights_can_be_searched(opened: Any, estimated: Made) -> None:
    view, weights = opened(estimated), estimated.plan.weights
    view.page.get_by_label("Search names").fill("layers.7. a4g32m")
    found = [entry for name, entry in weights.items() if "layers.7." in name and entry.encoding.name == "a4g32m"]
    assert view.text("#found") == f"{len(found)} tensors, {size(sum(entry.bytes for entry in found))}"
    assert view.page.locator("#tensors tbody tr").count() == len(found)
    view.page.get_by_label("Search names").fill("")
    view.page.locator("#more").click()
    assert view.page.locator("#tensors tbody tr").count() == len(weights)


def test_the_cache_grows_with_its_tokens(opened: Any, estimated: Made) -> None:
    view, plan = opened(estimated), estimated.plan
    longest = plan.model.max_context
    assert f"{longest:,} tokens" in view.text("#tokens-shown")
    assert size(longest * plan.kv_bytes_per_token) in view.text("#tokens-shown")
    view.page.locator("#tokens").focus()
    view.page.keyboard.press("End")
    most = longest * plan.max_batch
    memory = plan.memory
    total = most * plan.kv_bytes_per_token + memory.weights + memory.arena + memory.host
    assert view.text("#tokens-shown") == (
        f"{most:,} tokens ({plan.max_batch}.0 sequences of {longest:,}): {size(most * plan.kv_bytes_per_token)}, "
        f"{size(total)} in all"
    )


def test_measured_times_and_the_gap_to_the_roofline(opened: Any, measured: Made) -> None:
    view, data = opened(measured, part="#launch-10"), measured.inspection
    assert view.text("#step-time") == duration(data.time)
    assert "2 sequences × 3 new tokens, context 100" in view.text("#step")
    report = data.launches[10]
    assert report.measured is not None
    assert view.figure("measured") == duration(report.measured)
    assert view.figure("reached") == f"{100 * report.seconds / report.measured:.0f}% of the roofline"
    assert view.figure("threads") == "75% of the time at work"
    ratios = view.page.evaluate(
        "[...document.querySelectorAll('#timeline rect.gap')].map((each) => "
        "each.nextElementSibling.getAttribute('width') / each.getAttribute('width'))"
    )
    assert ratios == pytest.approx([each.seconds / (each.measured or 1) for each in data.launches], rel=1e-3)
    assert view.page.locator("#timeline rect.busy").count() == len(data.launches)


def test_names_are_only_text(opened: Any, estimated: Made, tmp_path: Path) -> None:
    plan = estimated.plan
    evil = "<img src=x onerror=alert(1)></script><script>alert(2)</script>"
    bucket = plan.buckets[0]
    launches = tuple(msgspec.structs.replace(each, op=f"{each.op}.{evil}") for each in bucket.forward)
    model = msgspec.structs.replace(plan.model, name=evil)
    plan = msgspec.structs.replace(plan, model=model, buckets=(msgspec.structs.replace(bucket, forward=launches),))
    view = opened(make(plan, examine(plan, MACHINE, StepSize()), None, tmp_path), part="#launch-10")
    assert view.text("h1") == evil
    assert evil in view.text("#details .where")
