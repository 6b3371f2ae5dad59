"""The built-in page at `/`: chat, load and plan, in one HTML file that asks nobody else for anything."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from .service import Service

_FOLDER = Path(__file__).parent / "page"
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}


async def page(service: Service, request: Request) -> Response:
    """`GET /`. It is the same for everyone, so it needs no key; what it shows it asks for with the user's."""
    return Response(page_html(), media_type="text/html", headers=_HEADERS)


@cache
def page_html() -> str:
    """The page with its style and scripts put in."""
    text = (_FOLDER / "index.html").read_text(encoding="utf-8")
    return re.sub(r"\{\{ (\S+) \}\}", lambda found: (_FOLDER / found[1]).read_text(encoding="utf-8"), text)
