"""What every request passes before a route sees it: an id, the API key, the size limit; and one access-log line after.

Pure ASGI, because wrappers that buffer would delay streamed tokens and hide a client's going away.
"""

from __future__ import annotations

import hmac
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from livedraft.server.errors import ApiError, error_response

logger = logging.getLogger("livedraft")
access_logger = logging.getLogger("livedraft.access")
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
_MAX_ID_CHARACTERS = 64
_WRONG_KEY = "The {} key is missing or wrong; send it as 'Authorization: Bearer KEY'."


class Gate:
    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        *,
        api_keys: tuple[str, ...],
        admin_key: str | None,
        max_bytes: int,
    ) -> None:
        self._app = app
        self._api_keys = [key.encode() for key in api_keys]
        self._admin_keys = [admin_key.encode()] if admin_key else []
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = dict(scope["headers"])
        request_id = _request_id(headers.get(b"x-request-id"))
        scope.setdefault("state", {}).update(request_id=request_id, api_key="")
        started, status, num_bytes = time.perf_counter(), 0, 0

        async def receive_limited() -> MutableMapping[str, Any]:
            """For bodies that come in pieces without saying how long they are: past the limit nothing more is read."""
            nonlocal num_bytes
            message = await receive()
            num_bytes += len(message.get("body", b""))
            return {"type": "http.disconnect"} if num_bytes > self._max_bytes else message

        async def send_with_id(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", request_id.encode())]
            await send(message)

        async def send_unless_too_large(message: MutableMapping[str, Any]) -> None:
            if num_bytes <= self._max_bytes:
                await send_with_id(message)

        error = self._refusal(scope, headers)
        if error is None and self._api_keys:
            scope["state"]["api_key"] = _bearer(headers.get(b"authorization", b"")).decode("latin-1")
        try:
            if error is None:
                try:
                    await self._app(scope, receive_limited, send_unless_too_large)
                except Exception:
                    logger.exception("Request %s met an unexpected error.", request_id)
                    if status:
                        raise  # half an answer is out; the connection has to end
                    message = f"The server failed on this request; report it with its x-request-id {request_id}."
                    error = ApiError(500, message)
                if num_bytes > self._max_bytes:
                    error = self._too_large()
            if error is not None:
                await error_response(error)(scope, receive, send_with_id)
        finally:
            # Paths, never bodies: prompts do not belong in a log.
            milliseconds = 1000 * (time.perf_counter() - started)
            access_logger.info("%s %s %s %d %.0f ms", request_id, scope["method"], scope["path"], status, milliseconds)

    def _refusal(self, scope: Scope, headers: dict[bytes, bytes]) -> ApiError | None:
        given = headers.get(b"authorization", b"")
        if scope["path"].startswith("/admin"):
            if not self._admin_keys:
                return ApiError(403, "/admin is closed; start the server with --admin-key.", code="admin_closed")
            if not _has_key(given, self._admin_keys):
                return ApiError(401, _WRONG_KEY.format("admin"), code="invalid_admin_key")
        elif self._api_keys and scope["path"].startswith("/v1/") and not _has_key(given, self._api_keys):
            return ApiError(401, _WRONG_KEY.format("API"), code="invalid_api_key")
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length[:18]) > self._max_bytes:
            return self._too_large()
        return None

    def _too_large(self) -> ApiError:
        return ApiError(413, f"The body is larger than {self._max_bytes} bytes, which is this server's limit.")


def _bearer(authorization: bytes) -> bytes:
    scheme, _, given = authorization.partition(b" ")
    return given.strip() if scheme.lower() == b"bearer" else b""


def _has_key(authorization: bytes, keys: list[bytes]) -> bool:
    # Every key is compared, in constant time, so the time taken tells nothing.
    given = _bearer(authorization)
    matches = [hmac.compare_digest(given, key) for key in keys]
    return any(matches)


def _request_id(given: bytes | None) -> str:
    """The client's own, if it is short and plain; a new one otherwise."""
    text = (given or b"").decode("latin-1")
    is_plain = 0 < len(text) <= _MAX_ID_CHARACTERS and text.isascii() and all(c.isalnum() or c in "-_." for c in text)
    return text if is_plain else uuid.uuid4().hex
