"""The page that a server has at `/`, in a real browser."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from e2e.serving import ServerProcess
from playwright.sync_api import Browser, Page, expect
from unit.runtime.server.fakes import http_server

from toolkit.runtime.layers import split_layers
from toolkit.runtime.load import read_plan
from toolkit.runtime.server.options import HttpOptions

PHONE, DESKTOP = (390, 844), (1440, 900)
SECONDS = 30_000.0


@dataclass
class Opened:
    """A page in the browser, with everything that went wrong or over the network."""

    page: Page
    url: str
    trouble: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    bodies: list[dict[str, Any]] = field(default_factory=list)

    def say(self, text: str) -> None:
        self.page.get_by_label("Your message").fill(text)
        self.page.keyboard.press("Enter")

    def answer(self, number: int = 0) -> str:
        """The text of an answer, once it has ended."""
        answer = self.page.locator(".message.assistant").nth(number)
        expect(answer.locator(".figures")).not_to_be_empty(timeout=SECONDS)
        return answer.locator(".text").inner_text()

    def see(self, name: str) -> None:
        self.page.get_by_role("tab", name=name).click()


@pytest.fixture
def opened(browser: Browser) -> Iterator[Any]:
    """Opens pages, and says at the end whether any of them complained or asked others for anything."""
    found: list[Opened] = []

    def open_page(url: str, viewport: tuple[int, int] = DESKTOP, scheme: Any = "light") -> Opened:
        page = browser.new_page(
            viewport={"width": viewport[0], "height": viewport[1]}, color_scheme=scheme, reduced_motion="reduce"
        )
        each = Opened(page, url)
        page.on("console", lambda message: each.trouble.append(message.text))
        page.on("pageerror", lambda error: each.trouble.append(str(error)))
        page.on("dialog", lambda dialog: each.trouble.append(dialog.message))
        page.on("request", lambda request: each.requests.append(request.url))
        page.on("request", lambda request: each.bodies.append(json.loads(request.post_data or "{}")))
        page.goto(f"{url}/")
        found.append(each)
        return each

    yield open_page
    for each in found:
        each.page.close()
        assert each.trouble == []
        assert all(request.startswith((f"{each.url}/", "data:")) for request in each.requests)


def ready(view: Opened) -> Opened:
    expect(view.page.locator("#state")).to_have_text("ready")
    return view


# --- over a scripted engine -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("viewport", [PHONE, DESKTOP])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_opens_without_complaint_and_fits(opened: Any, viewport: tuple[int, int], scheme: str) -> None:
    with http_server() as (url, _):
        view = ready(opened(url, viewport, scheme))
        for tab in ("Chat", "Load", "Plan"):
            view.see(tab)
            assert view.page.evaluate("document.documentElement.scrollWidth") <= viewport[0]
            assert view.page.locator("main:visible").count() == 1
            small = view.page.evaluate(
                "[...document.querySelectorAll('main:not([hidden]) *')]"
                ".filter((each) => each.clientWidth && each.scrollWidth > each.clientWidth + 1)"
                ".filter((each) => getComputedStyle(each).overflowX === 'visible').map((each) => each.outerHTML)"
            )
            assert small == [], "something is cut off"
        background = view.page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", background))) > 384) == (scheme == "light")
        view.page.get_by_role("button", name="Switch between light and dark").click()
        assert view.page.evaluate("getComputedStyle(document.body).backgroundColor") != background
        view.page.close()


def test_everything_has_a_name_and_works_by_keyboard(opened: Any) -> None:
    with http_server() as (url, _):
        page = ready(opened(url)).page
        unnamed = page.evaluate(
            "[...document.querySelectorAll('button, input, textarea, [role=img]')]"
            ".filter((each) => !each.textContent.trim() && !each.getAttribute('aria-label') && !each.labels?.length)"
            ".map((each) => each.outerHTML)"
        )
        assert unnamed == []
        page.get_by_role("tab", name="Chat").focus()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tabpanel", name="Load")).to_be_visible()
        page.keyboard.press("ArrowRight")
        expect(page.get_by_role("tabpanel", name="Plan")).to_be_visible()
        page.go_back()
        expect(page.get_by_role("tabpanel", name="Load")).to_be_visible()
        page.close()


def test_parameters_and_history_are_sent(opened: Any) -> None:
    with http_server(reply="Hello") as (url, _):
        view = ready(opened(url))
        given = {
            "Temperature": ("temperature", 0.5),
            "Max tokens": ("max_tokens", 3),
            "Top p": ("top_p", 0.9),
            "Top k": ("top_k", 7),
            "Min p": ("min_p", 0.1),
            "Repetition penalty": ("repetition_penalty", 1.5),
            "Seed": ("seed", 11),
        }
        view.page.get_by_label("System prompt").fill("Be brief.")
        view.page.get_by_label("Stop at").fill("zz")
        for label, (_, value) in given.items():
            view.page.get_by_label(label, exact=True).fill(str(value))
        view.say("one")
        assert view.answer() == "Hel"
        expect(view.page.locator(".figures").first).to_contain_text("3 tokens")
        expect(view.page.locator(".figures").first).to_contain_text("cut at the limit")
        view.page.get_by_label("Max tokens").fill("")
        view.say("two")
        assert view.answer(1) == "Hello"
        first, second = (body for body in view.bodies if "messages" in body)
        assert first == {
            "messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "one"}],
            "stop": ["zz"],
            "stream": True,
            "stream_options": {"include_usage": True},
            **dict(given.values()),
        }
        assert second["messages"][1:] == [
            {"role": "user", "content": "one"},
            {"role": "assistant", "content": "Hel"},
            {"role": "user", "content": "two"},
        ]
        assert "max_tokens" not in second
        view.page.get_by_role("button", name="New conversation").click()
        view.say("three")
        assert view.answer() == "Hello"
        assert [message["content"] for message in view.bodies[-1].get("messages", [])][1:] in (["three"], [])
        view.page.close()


def test_what_a_model_writes_is_only_text(opened: Any) -> None:
    evil = "<img src=x onerror=alert(1)> a `b<i>` **<u>c**\n```html\n<script>alert(2)</script>\n```\nend"
    with http_server(reply=evil) as (url, _):
        view = ready(opened(url))
        view.say("<b>me</b>")
        text = view.answer()
        assert "<img src=x onerror=alert(1)>" in text
        assert "<script>alert(2)</script>" in text
        assert view.page.locator("#messages pre code").inner_text().strip() == "<script>alert(2)</script>"
        assert view.page.locator("#messages p code").inner_text() == "b<i>"
        assert view.page.locator("#messages strong").inner_text() == "<u>c"
        assert view.page.locator("#messages img, #messages script, #messages b, #messages u").count() == 0
        assert view.page.locator(".message.user").inner_text() == "<b>me</b>"
        view.page.close()


def test_errors_are_shown_and_the_chat_goes_on(opened: Any) -> None:
    with http_server(reply="Hello") as (url, _):
        view = ready(opened(url))
        view.page.get_by_label("Top p").fill("5")
        view.say("one")
        error = view.page.locator(".message.assistant .error")
        expect(error).to_contain_text("top_p must be above 0 and at most 1")
        view.page.get_by_label("Top p").fill("")
        view.say("two")
        assert view.answer(1) == "Hello"
        (complaint,) = view.trouble
        assert "400" in complaint
        view.trouble.clear()
        sent = [body["messages"] for body in view.bodies if "messages" in body]
        assert sent[-1] == [{"role": "user", "content": "two"}]
        view.page.close()


def test_a_key_is_asked_for_and_used(opened: Any) -> None:
    with http_server(HttpOptions(api_keys=("opensesame",)), reply="Hello") as (url, _):
        view = opened(url)
        expect(view.page.locator("#notice")).to_contain_text("API key")
        asked = len(view.requests)
        view.page.wait_for_timeout(1500)
        assert len(view.requests) == asked, "it goes on asking without a key"
        view.page.get_by_label("API key").fill("opensesame")
        ready(view)
        expect(view.page.locator("#notice")).to_be_hidden()
        view.say("hi")
        assert view.answer() == "Hello"
        view.page.reload()
        ready(view)
        assert all("401" in each for each in view.trouble)
        view.trouble.clear()
        view.page.close()


# --- over a real model ------------------------------------------------------------------------------------------------


def metric(url: str, name: str) -> float:
    text = httpx.get(f"{url}/metrics").text
    return sum(float(line.rsplit(" ", 1)[1]) for line in text.splitlines() if line.startswith(f"toolkit:{name}{{"))


def test_an_answer_is_the_servers_and_can_be_stopped(opened: Any, server: ServerProcess) -> None:
    view = ready(opened(server.url))
    page = view.page
    page.get_by_label("Temperature").fill("0")
    page.get_by_label("Max tokens").fill("12")
    question = [{"role": "user", "content": "What is the capital of France?"}]
    body = {"messages": question, "temperature": 0, "max_tokens": 12}
    expected = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=60).json()
    view.say(question[0]["content"])
    assert view.answer() == expected["choices"][0]["message"]["content"].strip()
    page.get_by_label("Max tokens").fill("800")
    view.say("Tell me a very long story about a ship.")
    second = page.locator(".message.assistant").nth(1)
    expect(second.locator(".text")).not_to_be_empty(timeout=SECONDS)
    page.get_by_role("tab", name="Load").click()
    expect(page.locator("#tile-running")).to_have_text("1", timeout=SECONDS)
    expect(page.locator("#tile-throughput")).to_have_text(re.compile(r"[1-9]"), timeout=SECONDS)
    expect(page.locator("#plot-requests path.line").first).to_have_attribute("d", re.compile(r"M.*L"))
    assert "running 1" in (page.locator("#plot-requests svg").get_attribute("aria-label") or "")
    page.locator("#plot-tokens .area").hover()
    expect(page.locator("#plot-tokens .when")).to_contain_text("s ago")
    page.get_by_role("tab", name="Chat").click()
    page.get_by_role("button", name="Stop").click()
    expect(second.locator(".figures")).to_contain_text("stopped")
    expect(page.get_by_role("button", name="Send")).to_be_visible()
    page.get_by_role("tab", name="Load").click()
    expect(page.locator("#tile-running")).to_have_text("0", timeout=SECONDS)
    assert metric(server.url, "num_requests_running") == 0
    expect(page.locator("#tile-first")).to_have_text(re.compile(r"\d+(\.\d+)? (µs|ms|s)"))


def test_the_plan_is_drawn(opened: Any, server: ServerProcess, smollm2_plan: Path) -> None:
    page, plan = ready(opened(server.url)).page, read_plan(smollm2_plan)
    page.get_by_role("tab", name="Plan").click()
    program = plan.buckets[0].launches
    parts = split_layers(plan, program)
    expect(page.locator(".part")).to_have_count(len(parts))
    assert page.locator(".op").count() == sum(len(part.launches[0]) for part in parts)
    assert page.locator("#strip i").count() == plan.model.layers
    assert page.locator("#encodings span").count() == len({each.encoding.name for each in plan.weights.values()})
    first = page.locator(".part").first.locator(".op b").first.inner_text()
    assert first == program[0].op.partition(":")[0]
    assert f"{plan.model.layers} layers × {plan.model.hidden_size}" in page.locator("#facts").inner_text()
