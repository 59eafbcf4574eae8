"""`/admin`: what an operator can see and do, over HTTP, under a key of its own. The same as `livedraft drafts`, `learn`,
`traces`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

from fastapi import APIRouter, Query
from starlette.concurrency import run_in_threadpool

from livedraft import operations
from livedraft.records import DEFAULT_ROUTE, UserError
from livedraft.server.errors import ApiError

_BY = "the admin API"


def admin_routes(state: Callable[[], Path | None]) -> APIRouter:
    """`state` gives the folder of drafts and traces, None while loading or where nothing is kept."""
    router = APIRouter(prefix="/admin")

    async def run(act: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Off the event loop: the folder's database may be busy. Raises ApiError."""
        folder = state()
        if folder is None:
            raise ApiError(409, "This server keeps no drafts and traces; start it with learning on.", code="no_state")
        try:
            return await run_in_threadpool(act, folder, *arguments, **options)
        except UserError as error:
            raise ApiError(404 if "There is no version" in str(error) else 409, str(error)) from error

    async def said(act: Callable[..., str], *arguments: Any) -> dict[str, str]:
        return {"message": await run(act, *arguments)}

    @router.get("/drafts")
    async def drafts() -> dict[str, Any]:
        return {"drafts": await run(operations.list_drafts)}

    @router.get("/drafts/{version_id}")
    async def draft(version_id: str) -> Any:
        return await run(operations.show_draft, version_id)

    @router.get("/drafts/{first_id}/diff/{second_id}")
    async def diff(first_id: str, second_id: str) -> Any:
        return await run(operations.diff_drafts, first_id, second_id)

    @router.post("/drafts/{version_id}/promote")
    async def promote(version_id: str) -> dict[str, str]:
        return await said(operations.promote_draft, version_id, _BY)

    @router.post("/rollback")
    async def rollback(route: str = DEFAULT_ROUTE) -> dict[str, str]:
        return await said(operations.roll_back, _BY, route)

    @router.get("/routes")
    async def routes() -> dict[str, Any]:
        return {"routes": await run(operations.list_routes)}

    @router.post("/routes/{route}/close")
    async def close_route(route: str) -> dict[str, str]:
        return await said(operations.close_route, route, _BY)

    @router.get("/learn")
    async def learn() -> Any:
        return await run(operations.learning_status)

    @router.post("/learn/pause")
    async def pause() -> dict[str, str]:
        return await said(operations.set_paused, True)

    @router.post("/learn/resume")
    async def resume() -> dict[str, str]:
        return await said(operations.set_paused, False)

    @router.post("/learn/now")
    async def now() -> dict[str, str]:
        return await said(operations.learn_now)

    @router.get("/events")
    async def events(
        after_id: Annotated[int, Query(ge=0, lt=2**63)] = 0, limit: Annotated[int, Query(ge=1, le=1000)] = 100
    ) -> dict[str, Any]:
        return {"events": await run(operations.list_events, after_id=after_id, limit=limit)}

    @router.get("/traces")
    async def traces(limit: Annotated[int, Query(ge=1, le=1000)] = 20) -> Any:
        return await run(operations.list_traces, limit=limit)

    @router.delete("/traces")
    async def delete(user: Annotated[str, Query(min_length=1)]) -> dict[str, str]:
        """Of one user; all of them only from the command line, on the machine itself."""
        return await said(operations.delete_traces, user)

    return router
