"""The dashboard's page: static files of this folder, and the address the page listens to. No build step, and nothing that
comes from elsewhere."""

from __future__ import annotations

from importlib import resources

from fastapi import APIRouter, Response
from fastapi.responses import RedirectResponse, StreamingResponse

from livedraft.server.errors import ApiError
from livedraft.server.live import Live

_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml", "txt": "text/plain"}
PAGE = "index.html"
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}


def dashboard_routes(live: Live) -> APIRouter:
    """`/` and `/dashboard/FILE`, as open as /metrics; what changes anything goes through `/admin` and its key."""
    router = APIRouter(include_in_schema=False)
    files = {file.name: file.read_bytes() for file in resources.files(__name__).iterdir() if _type(file.name)}

    def file(name: str) -> Response:
        if name not in files:
            raise ApiError(404, f"There is no {name!r} here.")
        return Response(files[name], media_type=_type(name), headers=_HEADERS)

    @router.get("/")
    async def page() -> Response:
        return file(PAGE)

    @router.get("/dashboard")
    @router.get("/dashboard/")
    async def elsewhere() -> Response:
        return RedirectResponse("/")

    @router.get("/dashboard/live")
    async def events() -> Response:
        live.require_place()
        headers = _HEADERS | {"X-Accel-Buffering": "no"}
        return StreamingResponse(live.events(), media_type="text/event-stream", headers=headers)

    @router.get("/dashboard/{name}")
    async def asset(name: str) -> Response:
        return file(name)

    return router


def _type(name: str) -> str | None:
    return _TYPES.get(name.rpartition(".")[2])
