"""A response as it comes to be: its output items, and the events of the Responses API that tell of each step."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..parsers.body import Call, Parts
from .blocks import Blocks, Event, Kind


class Items(Blocks):
    """Output items."""

    def __init__(self) -> None:
        super().__init__()
        self._logprobs: list[dict[str, Any]] = []

    def add(self, parts: Parts, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """What these parts change; the log-probabilities are those of the message's text."""
        self._logprobs = list(logprobs)
        return super().add(parts)

    def _begin(self, kind: Kind, call: Call | None) -> list[Event]:
        item, part = self.done[-1], _part(kind)
        if call is not None:
            item |= {"id": _name("fc"), "type": "function_call", "status": "in_progress"}
            item |= {"call_id": call.id or _name("call"), "name": call.name, "arguments": ""}
        elif kind == "reasoning":
            item |= {"id": _name("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
        else:
            item |= {"id": _name("msg"), "type": "message", "status": "in_progress", "role": "assistant", "content": []}
        added = self._item_event("added")
        if call is not None:
            return [added]
        item["content"] = [part]
        return [added, {"type": "response.content_part.added", **self._place(kind), "part": dict(part)}]

    def _extend(self, kind: Kind, text: str) -> list[Event]:
        item, delta = self.done[-1], {**self._place(kind), "delta": text}
        if kind == "call":
            item["arguments"] += text
            return [{"type": "response.function_call_arguments.delta", **delta}]
        part = item["content"][0]
        part["text"] += text
        if kind == "reasoning":
            return [{"type": "response.reasoning_text.delta", **delta}]
        part["logprobs"] += self._logprobs
        return [{"type": "response.output_text.delta", **delta, "logprobs": self._logprobs}]

    def _end(self, kind: Kind, block: dict[str, Any], status: str) -> list[Event]:
        block["status"] = status
        place, done = self._place(kind), self._item_event("done")
        if kind == "call":
            told = {"name": block["name"], "arguments": block["arguments"]}
            return [{"type": "response.function_call_arguments.done", **place, **told}, done]
        part = block["content"][0]
        part_done = {"type": "response.content_part.done", **place, "part": part}
        if kind == "reasoning":
            return [{"type": "response.reasoning_text.done", **place, "text": part["text"]}, part_done, done]
        told = {"text": part["text"], "logprobs": part["logprobs"]}
        return [{"type": "response.output_text.done", **place, **told}, part_done, done]

    def _place(self, kind: Kind) -> dict[str, Any]:
        place = {"item_id": self.done[-1]["id"], "output_index": len(self.done) - 1}
        return place if kind == "call" else place | {"content_index": 0}

    def _item_event(self, what: str) -> Event:
        place = {"output_index": len(self.done) - 1, "item": dict(self.done[-1])}
        return {"type": f"response.output_item.{what}", **place}


def _part(kind: Kind) -> dict[str, Any]:
    if kind == "reasoning":
        return {"type": "reasoning_text", "text": ""}
    return {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
