"""Guard of the studio: who may ask, and what every answer says about itself.

A browser gets the token by the address that the command prints, and keeps it in a cookie that no other site can send;
programs send it as `Authorization: Bearer`. Requests to other names of this machine, or from other pages, are refused.
"""

from __future__ import annotations

import secrets
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}
_GO_ON = '<!doctype html><title>studio</title><meta http-equiv="refresh" content="0;url=/">'


class Guard:
    """Middleware that lets requests pass which carry the token and come from the studio's own page or from no page."""

    def __init__(self, app: ASGIApp, *, token: str, hosts: frozenset[str], cookie: str) -> None:
        self._app, self._token, self._hosts, self._cookie = app, token, hosts, cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or answer it with a refusal that says nothing about what is here."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        if refused := self._refusal(request):
            await refused(scope, receive, send)
        else:
            await self._app(scope, receive, partial(_send_with_headers, send))

    def _refusal(self, request: Request) -> Response | None:
        host, origin = request.headers.get("host", ""), request.headers.get("origin")
        foreign = origin is not None and origin.partition("://")[2] not in self._hosts
        enters = self._is_token(request.query_params.get("token")) and request.url.path == "/"
        linked = request.headers.get("sec-fetch-site") in ("cross-site", "same-site")  # another port is another site
        if host not in self._hosts or foreign or (linked and not enters):
            return Response("not here\n", 403, headers=HEADERS)
        if enters:
            # After a click in another page, as a notebook's, a redirection would be that page's, and get no cookie.
            response = HTMLResponse(_GO_ON, headers=HEADERS) if linked else RedirectResponse("/", 303, headers=HEADERS)
            response.set_cookie(self._cookie, self._token, httponly=True, samesite="strict", path="/")
            return response
        bearer = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._is_token(bearer) or self._is_token(request.cookies.get(self._cookie)):
            return None
        return Response("open the address that `ncd-serve studio` printed\n", 401, headers=HEADERS)

    def _is_token(self, given: str | None) -> bool:
        return given is not None and secrets.compare_digest(given.encode(), self._token.encode())


async def _send_with_headers(send: Send, message: Any) -> None:
    if message["type"] == "http.response.start":
        present = {name.lower() for name, _ in message["headers"]}
        extra = [(name.lower().encode(), value.encode()) for name, value in HEADERS.items()]
        message["headers"] = [*message["headers"], *(pair for pair in extra if pair[0] not in present)]
    await send(message)
