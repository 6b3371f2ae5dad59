"""A response as it comes to be: its output items, and the events of the Responses API that tell of each step."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any

from ..parsers.core import Call, Parts

Event = dict[str, Any]


class Items:
    """Output items made of an answer's parts. One is open at a time: reasoning, then the message, then calls."""

    def __init__(self) -> None:
        self.output: list[dict[str, Any]] = []
        self._open: str = ""

    def add(self, parts: Parts, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        """What these parts change."""
        events: list[Event] = []
        if parts.reasoning:
            events += self._extend("reasoning", parts.reasoning)
        if parts.content:
            events += self._extend("message", parts.content, logprobs)
        for call in parts.calls:
            events += [*self.close(), *self._call(call)]
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """The open item is done, or cut off."""
        if not self._open:
            return []
        kind, self._open = self._open, ""
        item, place = self.output[-1], self._place()
        item["status"] = status
        part = item["content"][0]
        done: Event
        if kind == "reasoning":
            done = {"type": "response.reasoning_text.done", **place, "text": part["text"]}
        else:
            logprobs = part["logprobs"]
            done = {"type": "response.output_text.done", **place, "text": part["text"], "logprobs": logprobs}
        part_done = {"type": "response.content_part.done", **place, "part": part}
        return [done, part_done, self._item_event("done")]

    def _extend(self, kind: str, text: str, logprobs: Sequence[dict[str, Any]] = ()) -> list[Event]:
        events: list[Event] = []
        if self._open != kind:
            events += [*self.close(), *self._begin(kind)]
        part, place = self.output[-1]["content"][0], self._place()
        part["text"] += text
        if kind == "reasoning":
            return [*events, {"type": "response.reasoning_text.delta", **place, "delta": text}]
        part["logprobs"] += logprobs
        return [*events, {"type": "response.output_text.delta", **place, "delta": text, "logprobs": list(logprobs)}]

    def _begin(self, kind: str) -> list[Event]:
        self._open = kind
        item: dict[str, Any]
        part: dict[str, Any]
        if kind == "reasoning":
            item = {"id": _name("rs"), "type": kind, "status": "in_progress", "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        else:
            item = {"id": _name("msg"), "type": kind, "status": "in_progress", "role": "assistant", "content": []}
            part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        self.output.append(item)
        added = self._item_event("added")
        item["content"] = [part]
        return [added, {"type": "response.content_part.added", **self._place(), "part": dict(part)}]

    def _call(self, call: Call) -> list[Event]:
        identity = call.id or _name("call")
        item = {"id": _name("fc"), "type": "function_call", "status": "in_progress", "call_id": identity}
        item |= {"name": call.name, "arguments": ""}
        self.output.append(item)
        added = self._item_event("added")
        place = {"item_id": item["id"], "output_index": len(self.output) - 1}
        item |= {"arguments": call.arguments, "status": "completed"}
        delta = {"type": "response.function_call_arguments.delta", **place, "delta": call.arguments}
        done = {"type": "response.function_call_arguments.done", **place}
        return [added, delta, {**done, "name": call.name, "arguments": call.arguments}, self._item_event("done")]

    def _place(self) -> dict[str, Any]:
        return {"item_id": self.output[-1]["id"], "output_index": len(self.output) - 1, "content_index": 0}

    def _item_event(self, what: str) -> Event:
        place = {"output_index": len(self.output) - 1, "item": dict(self.output[-1])}
        return {"type": f"response.output_item.{what}", **place}


def _name(kind: str) -> str:
    return f"{kind}_{uuid.uuid4().hex}"
