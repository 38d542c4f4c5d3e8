"""The studio's HTTP interface: its page, pictures, and what the page asks for. Every answer needs the token."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from functools import cache
from importlib.resources import files
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from ncd_serve.errors import DataError, NcdError, UsageError
from ncd_serve.gallery.page import SCRIPTS, script_of, template_part
from ncd_serve.naming import Names
from ncd_serve.studio.candidates import NewImage
from ncd_serve.studio.commands import TrainingForm
from ncd_serve.studio.desk import Desk
from ncd_serve.studio.folders import look_into, suggest_folders
from ncd_serve.studio.guard import Guard
from ncd_serve.text import printable

STUDIO_SCRIPTS = ("api", "split", "new_images", "round", "folders", "training", "serving", "studio")
_MAX_JSON_BYTES, _MAX_IMAGE_BYTES = 16 << 20, 64 << 20
_KEPT = {"Cache-Control": "private, max-age=86400"}
Handler = Callable[[Request], Awaitable[Response]]


def make_app(desk: Desk, *, token: str, hosts: frozenset[str], cookie: str) -> Starlette:
    """Return the application."""
    routes = [
        Route("/", _answering(_page, desk)),
        Route("/studio.js", _answering(_script, desk)),
        Route("/studio.css", _answering(_style, desk)),
        Route("/p/{key}/sheets/{number:int}.jpg", _answering(_sheet, desk)),
        Route("/p/{key}/images/{number:int}", _answering(_image, desk)),
        Route("/forming.jpg", _answering(_forming, desk)),
        Route("/api/folders", _answering(_folders, desk)),
        Route("/api/browse", _answering(_browse, desk)),
        Route("/api/export", _answering(_export, desk), methods=["POST"]),
        Route("/api/apply", _answering(_apply, desk), methods=["POST"]),
        Route("/api/split", _answering(_split, desk), methods=["POST"]),
        Route("/api/category", _answering(_category, desk), methods=["POST"]),
        Route("/api/category", _answering(_forget, desk), methods=["DELETE"]),
        Route("/api/candidates", _answering(_candidates, desk)),
        Route("/api/round", _answering(_round, desk), methods=["GET", "POST"]),
        Route("/api/runs", _answering(_runs, desk)),
        Route("/api/open", _answering(_open, desk), methods=["POST"]),
        Route("/api/training", _answering(_training, desk)),
        Route("/api/training/{action}", _answering(_train, desk), methods=["POST"]),
        Route("/api/serving", _answering(_serving, desk)),
        Route("/api/serving/{action}", _answering(_serve, desk), methods=["POST"]),
        Route("/predict", _answering(_predict, desk), methods=["POST"]),
    ]
    guard = Middleware(Guard, token=token, hosts=hosts, cookie=cookie)
    return Starlette(routes=routes, middleware=[guard])


def _answering(handler: Callable[[Request, Desk], Awaitable[Response]], desk: Desk) -> Handler:
    """Return a handler whose errors are answers with the reason and a hint."""

    async def answer(request: Request) -> Response:
        try:
            return await handler(request, desk)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            return _error(DataError(f"{where}: {first['msg'].removeprefix('Value error, ')}"))
        except NcdError as error:
            return _error(error)
        except ClientDisconnect:
            return Response(status_code=400)

    return answer


def _error(error: NcdError) -> Response:
    status = 413 if isinstance(error, _TooLargeError) else 422
    return JSONResponse({"error": str(error), "hint": error.hint}, status)


class _TooLargeError(DataError):
    """A request whose body is too large."""


async def _body(request: Request, most: int) -> bytes:
    content = bytearray()
    async for chunk in request.stream():
        content += chunk
        if len(content) > most:
            raise _TooLargeError(f"more than {most >> 20} MB in one request")
    return bytes(content)


async def _page(_request: Request, desk: Desk) -> Response:
    return HTMLResponse(await run_in_threadpool(_render, desk))


def _render(desk: Desk) -> str:
    from jinja2 import ChoiceLoader, Environment, PackageLoader

    loader = ChoiceLoader([PackageLoader("ncd_serve.studio"), PackageLoader("ncd_serve.gallery")])
    template = Environment(loader=loader, autoescape=True, trim_blocks=True).get_template("studio.html.jinja")
    return template.render(data=desk.page_data(), sheets=[])


async def _script(_request: Request, _desk: Desk) -> Response:
    return Response(_all_scripts(), media_type="text/javascript", headers={"Cache-Control": "no-cache"})


@cache
def _all_scripts() -> str:
    *first, last = SCRIPTS
    return script_of(
        [template_part(f"{name}.js") for name in first], _own(STUDIO_SCRIPTS), [template_part(f"{last}.js")]
    )


def _own(names: tuple[str, ...]) -> list[str]:
    folder = files("ncd_serve.studio") / "templates"
    return [(folder / f"{name}.js").read_text(encoding="utf-8") for name in names]


async def _style(_request: Request, _desk: Desk) -> Response:
    own = (files("ncd_serve.studio") / "templates" / "studio.css").read_text(encoding="utf-8")
    return Response(template_part("gallery.css") + own, media_type="text/css", headers={"Cache-Control": "no-cache"})


async def _sheet(request: Request, desk: Desk) -> Response:
    project = desk.project_of(request.path_params["key"])
    content = await run_in_threadpool(project.sheet, request.path_params["number"])
    return Response(content, media_type="image/jpeg", headers=_KEPT)


async def _image(request: Request, desk: Desk) -> Response:
    file = desk.project_of(request.path_params["key"]).file(request.path_params["number"])
    if not file.is_file():
        raise DataError(f"{printable(file)} is gone")
    return FileResponse(file, headers=_KEPT)


async def _forming(_request: Request, desk: Desk) -> Response:
    content = await run_in_threadpool(desk.forming_sheet)
    return Response(content, media_type="image/jpeg", headers={"Cache-Control": "no-store"})


async def _folders(request: Request, _desk: Desk) -> Response:
    return JSONResponse(await run_in_threadpool(suggest_folders, request.query_params.get("path", "")))


async def _browse(request: Request, _desk: Desk) -> Response:
    return JSONResponse(await run_in_threadpool(look_into, request.query_params.get("path", "")))


async def _export(_request: Request, desk: Desk) -> Response:
    await run_in_threadpool(desk.export)
    return JSONResponse({})


async def _apply(request: Request, desk: Desk) -> Response:
    names = Names.model_validate_json(await _body(request, _MAX_JSON_BYTES))
    return JSONResponse(await run_in_threadpool(desk.apply, names))


class _Images(BaseModel):
    model_config = ConfigDict(extra="forbid")
    images: list[int]


class _Path(BaseModel):
    model_config = ConfigDict(extra="forbid")
    run: Path


async def _split(request: Request, desk: Desk) -> Response:
    asked = _Images.model_validate_json(await _body(request, _MAX_JSON_BYTES))
    return JSONResponse(await run_in_threadpool(desk.project.splits, asked.images))


async def _category(request: Request, desk: Desk) -> Response:
    content = await _body(request, _MAX_IMAGE_BYTES)
    names = (request.query_params.get("category", ""), request.query_params.get("name", ""))
    return JSONResponse({"path": await run_in_threadpool(desk.keep_image, content, *names)})


async def _forget(request: Request, desk: Desk) -> Response:
    await run_in_threadpool(desk.forget_category, request.query_params.get("category", ""))
    return JSONResponse({})


async def _candidates(request: Request, desk: Desk) -> Response:
    page = request.query_params.get("page", "")
    return JSONResponse(await run_in_threadpool(desk.project.candidates, page))


async def _round(request: Request, desk: Desk) -> Response:
    return JSONResponse(await run_in_threadpool(desk.next_round if request.method == "POST" else desk.waiting))


async def _runs(_request: Request, desk: Desk) -> Response:
    return JSONResponse(await run_in_threadpool(desk.runs))


async def _open(request: Request, desk: Desk) -> Response:
    asked = _Path.model_validate_json(await _body(request, _MAX_JSON_BYTES))
    await run_in_threadpool(desk.open, asked.run)
    return JSONResponse({})


async def _training(_request: Request, desk: Desk) -> Response:
    return JSONResponse(await run_in_threadpool(desk.training_state))


async def _train(request: Request, desk: Desk) -> Response:
    content = await _body(request, _MAX_JSON_BYTES)
    action = request.path_params["action"]
    if action == "plan":
        return JSONResponse({"plan": await run_in_threadpool(desk.plan, TrainingForm.model_validate_json(content))})
    if action == "start":
        await run_in_threadpool(desk.train, TrainingForm.model_validate_json(content))
    elif action == "resume":
        await run_in_threadpool(desk.resume, _Path.model_validate_json(content).run)
    elif action == "again":
        await run_in_threadpool(desk.train_again)
    elif action == "stop":
        await run_in_threadpool(desk.stop_training)
    else:
        raise UsageError(f"no such action: {printable(action)}")
    return JSONResponse(await run_in_threadpool(desk.training_state))


async def _serving(_request: Request, desk: Desk) -> Response:
    return JSONResponse(await run_in_threadpool(desk.serving_state))


async def _serve(request: Request, desk: Desk) -> Response:
    actions: Mapping[str, Callable[[], None]] = {"start": desk.start_serving, "stop": desk.stop_serving}
    if (action := actions.get(request.path_params["action"])) is None:
        raise UsageError("no such action")
    await run_in_threadpool(action)
    return JSONResponse(await run_in_threadpool(desk.serving_state))


async def _predict(request: Request, desk: Desk) -> Response:
    content = await _body(request, _MAX_IMAGE_BYTES)
    name = printable(request.query_params.get("name", "image"))
    page, number = request.query_params.get("page"), request.query_params.get("number", "")
    kept = NewImage(page, int(number)) if page and number.isdecimal() else None
    row = await run_in_threadpool(desk.project.predict, content, name, kept)
    return JSONResponse({**asdict(row), "top_k": [candidate._asdict() for candidate in row.top_k]})
