"""Routes that manage a server: whether it is ready, what it is, what it does, and stopping some of that."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from ... import __version__
from ..request import MAX_PROFILE_STEPS, SLEEP_TAGS
from .errors import ApiError
from .openai import parse
from .render import json_response
from .service import Service

PROFILE_STEPS = 100
"""Steps of a profile that says no number."""
EMBEDDING_ROUTES = ("/v1/embeddings", "/pooling", "/classify", "/score", "/v1/score", "/rerank", "/v1/rerank")


async def ready(service: Service, request: Request) -> Response:
    """`GET /ready`: 200 if a request would be answered now: all is loaded and nothing paused."""
    problem = service.heart.problem
    if not problem and service.gate.paused:
        problem = "The server is paused."
    if problem:
        raise ApiError(503, problem)
    await service.prompts()
    return json_response({"status": "ready"})


async def load(service: Service, request: Request) -> Response:
    """`GET /load`: the requests being answered, and those of them that the engine runs or lets wait."""
    stats = await service.heart.stats()
    counts = {"running": stats.running, "waiting": stats.waiting, "kv_usage": stats.kv_usage} if stats else {}
    return json_response({"server_load": len(service.gate), **counts})


async def server_info(service: Service, request: Request) -> Response:
    """`GET /server_info`: the plan that is served, and where its memory goes in bytes."""
    plan, stats = service.plan, await service.heart.stats()
    prompts = await service.prompts()
    return json_response(
        {
            "version": __version__,
            "model": service.model,
            "target": plan.target,
            "fingerprint": service.fingerprint,
            "max_model_len": plan.model.max_context,
            "vocab_size": plan.model.vocab_size,
            "kv_bytes_per_token": plan.kv_bytes_per_token,
            "max_batch": plan.max_batch,
            "tokenizer": prompts.tokenizer is not None,
            "chat_template": prompts.template is not None,
            "default_sampling_params": prompts.defaults,
            "memory": stats.memory if stats else {},
            "model_info": {
                "architecture": plan.model.architecture,
                "layers": plan.model.layers,
                "hidden_size": plan.model.hidden_size,
                "quantization": plan.model.quantization,
            },
            **service.picture,
        }
    )


class AbortRequests(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /abort_requests`."""

    request_ids: list[str] | None = None
    """The ids in answers; left out: all requests."""


async def abort_requests(service: Service, data: dict[str, Any]) -> dict[str, Any]:
    """`POST /abort_requests`: their answers end with the finish reason "abort"."""
    return {"aborted": service.gate.abort(parse(data, AbortRequests).request_ids)}


async def reset_prefix_cache(service: Service, request: Request) -> Response:
    """`POST /reset_prefix_cache`: forget every cached prefix that no running request uses."""
    await service.engine.reset_prefix_cache()
    return json_response({"status": "ok"})


async def start_profile(service: Service, request: Request) -> Response:
    """`POST /start_profile?steps=100`: record the engine's next steps, launch by launch."""
    given = request.query_params.get("steps", str(PROFILE_STEPS))
    if not given.isdecimal() or len(given) > 9 or not 1 <= int(given) <= MAX_PROFILE_STEPS:
        raise ApiError(400, f"steps must be 1 to {MAX_PROFILE_STEPS}, not {given!r}.", param="steps")
    await service.engine.profile(int(given))
    return json_response({"status": "profiling", "steps": int(given)})


async def stop_profile(service: Service, request: Request) -> Response:
    """`POST /stop_profile`: what was recorded, as a trace for Chrome or Perfetto."""
    trace = await service.engine.profile(0)
    return Response(trace, media_type="application/json")


async def pause(service: Service, request: Request) -> Response:
    """`POST /pause?mode=abort|wait&clear_cache=true|false`: end what runs, or wait for its end.

    New requests wait until `/resume`.
    """
    mode = request.query_params.get("mode", "abort")
    clear = request.query_params.get("clear_cache", "true")
    if mode not in ("abort", "wait"):
        raise ApiError(400, f"mode must be abort or wait, not {mode!r}", param="mode")
    if clear not in ("true", "false"):
        raise ApiError(400, f"clear_cache must be true or false, not {clear!r}", param="clear_cache")
    await service.gate.pause(abort=mode == "abort")
    if clear == "true":
        await service.engine.reset_prefix_cache()
    return json_response({"status": "paused"})


async def resume(service: Service, request: Request) -> Response:
    """`POST /resume`: let requests start again."""
    service.gate.resume()
    return json_response({"status": "resumed"})


async def sleep(service: Service, request: Request) -> Response:
    """`POST /sleep?level=1|2&mode=abort|wait`: end what runs, or wait for its end, and give back the memory of weights
    and caches. New requests wait until `/wake_up`. Both levels are the same: weights are read from the plan again."""
    level, mode = request.query_params.get("level", "1"), request.query_params.get("mode", "abort")
    if level not in ("1", "2"):
        raise ApiError(400, f"level must be 1 or 2, not {level!r}", param="level")
    if mode not in ("abort", "wait"):
        raise ApiError(400, f"mode must be abort or wait, not {mode!r}", param="mode")
    await service.gate.pause(abort=mode == "abort")
    await service.engine.sleep()
    return json_response({"status": "asleep"})


async def wake_up(service: Service, request: Request) -> Response:
    """`POST /wake_up?tags=weights&tags=kv_cache`: take the memory back once both parts are awake; requests go on."""
    tags = [tag for tag in SLEEP_TAGS if tag in request.query_params.getlist("tags")]
    wrong = sorted(set(request.query_params.getlist("tags")) - set(tags))
    if wrong:
        raise ApiError(400, f"tags must be {' or '.join(SLEEP_TAGS)}, not {wrong[0]!r}", param="tags")
    await service.engine.wake_up(tags or SLEEP_TAGS)
    if not (await service.engine.stats()).asleep:
        service.gate.resume()
    return json_response({"status": "awake"})


async def is_sleeping(service: Service, request: Request) -> Response:
    """`GET /is_sleeping`."""
    return json_response({"is_sleeping": bool((await service.engine.stats()).asleep)})


async def is_paused(service: Service, request: Request) -> Response:
    """`GET /is_paused`."""
    return json_response({"is_paused": service.gate.paused})


async def no_embeddings(service: Service, data: dict[str, Any]) -> dict[str, Any]:
    """Routes of models that embed, rank or classify, which the served model does not."""
    name = data.get("model")
    service.check_model(name if isinstance(name, str) else None)
    message = f"The model {service.model!r} generates text: it can't embed, score, rank or classify."
    raise ApiError(400, message, param="model", code="unsupported_model")
