"""Errors in the form of the OpenAI API."""

from __future__ import annotations

from typing import Any


class ApiError(Exception):
    """An error that the program gets as an answer. The sample goes on."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = "authentication_error" if self.status == 401 else "invalid_request_error"
        kind = "server_error" if self.status >= 500 else kind
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}


def invalid(param: str, value: Any, allowed: str) -> ApiError:
    """A field has a value that is not allowed."""
    return ApiError(400, f"{param} is {value!r:.100}; allowed: {allowed}", param, "invalid_value")
