"""Errors in OpenAI's shape: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse


class ApiError(Exception):
    """Answered as it is; `message` is one sentence for the client."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_seconds: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code
        self.headers = {} if retry_after_seconds is None else {"Retry-After": str(retry_after_seconds)}


_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


def error_body(error: ApiError) -> dict[str, Any]:
    kind = _TYPES.get(error.status, "invalid_request_error" if error.status < 500 else "server_error")
    return {"error": {"message": error.message, "type": kind, "param": error.param, "code": error.code}}


def error_response(error: ApiError) -> JSONResponse:
    return JSONResponse(error_body(error), status_code=error.status, headers=error.headers)


def from_validation(error: RequestValidationError) -> ApiError:
    """The first thing wrong with a body, named by its field."""
    found = error.errors()
    param = _param(found[0]["loc"])
    same_field = [one for one in found if _param(one["loc"]).startswith(param)]
    # A field of several types complains once for each; the complaint that is not about the type is the one meant.
    first = next((one for one in same_field if not one["type"].endswith("_type")), found[0])
    param = _param(first["loc"])
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = "this option is not supported"
    elif first["type"] == "json_invalid":
        return ApiError(400, "The body is not valid JSON.", code="invalid_json")
    where = f"{param}: " if param else ""
    return ApiError(400, f"{where}{message}.", param=param or None, code="invalid_value")


def _param(location: tuple[int | str, ...]) -> str:
    """("body", "messages", 0, "content", "str") -> messages[0].content: branches of unions and line numbers are no fields."""
    param = ""
    for part in location[1:]:
        if isinstance(part, int):
            param += f"[{part}]" if param else ""
        elif part not in _UNION_BRANCHES and not part.startswith(("list[", "function-", "constrained-")):
            param += f".{part[:64]}" if param else part[:64]
    return param


_UNION_BRANCHES = {"str", "int", "float", "bool"}
