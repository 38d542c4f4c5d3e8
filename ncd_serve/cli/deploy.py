"""`deploy render`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from ncd_serve.cli.console import answer, messages
from ncd_serve.cli.help import Group, command
from ncd_serve.cli.options import Digest, PublicKey, PythonModels
from ncd_serve.deploy import Target
from ncd_serve.places import ExportPlace, export_place

if TYPE_CHECKING:
    from ncd_serve.deploy.facts import Deployment

app = typer.Typer(help="Deploy a bundle with Docker Compose or Kubernetes.", no_args_is_help=True, cls=Group)


@app.callback()
def _group() -> None:
    """Deploy a bundle with Docker Compose or Kubernetes."""


@command(app)
def render(
    target: Annotated[Target, typer.Argument(help="Platform that runs the servers.")],
    bundle: Annotated[Path, typer.Option(help="A bundle.")],
    folder: Annotated[Path, typer.Option("--out", help="Folder to write.")],
    digest: Digest = None,
    public_key: PublicKey = None,
    repository: Annotated[
        Path | None, typer.Option(help="Triton model repository that serves it; default: as it was exported.")
    ] = None,
    model_name: Annotated[str | None, typer.Option(help="The model's name there; default: as it was exported.")] = None,
    image: Annotated[str | None, typer.Option(help="The image to build and run; default MODEL:BUNDLE_ID.")] = None,
    repository_uri: Annotated[
        str,
        typer.Option(
            metavar="s3://|gs://|pvc://",
            help="Address of the repository for the servers; default: in the image (helm, kserve), mounted (compose).",
        ),
    ] = "",
    python_models: PythonModels = False,
) -> None:
    """Write image, manifests, dashboard and alerts for a bundle; a GPU is asked for if it was exported for one.

    Examples:
        ncd-serve deploy render compose --bundle runs/birds/bundle --out deployment
        ncd-serve deploy render helm --bundle runs/birds/bundle --repository-uri s3://models/birds --out deployment
    """
    from ncd_serve.bundle import Bundle
    from ncd_serve.deploy.facts import collect_facts
    from ncd_serve.deploy.render import check_untouched
    from ncd_serve.deploy.render import render as write

    check_untouched(folder)
    place = export_place(bundle)
    place = ExportPlace(repository or place.repository, model_name or place.model)
    with messages.status("measuring how much memory the model needs"):
        facts = collect_facts(
            Bundle.read(bundle, digest=digest, public_key=public_key),
            place.repository,
            model=place.model,
            image=image,
            repository_uri=repository_uri,
            python_models=python_models,
            public_key=public_key,
        )
    write(facts, target, folder)
    device = "1 GPU" if facts.gpu else f"{facts.cpus} CPUs"
    lines = [
        f"{facts.model}, bundle {facts.bundle_id}: {device} and {facts.memory_mib} MiB for each server",
        f"files: {folder}",
        *(f"next:  {line}" for line in _next(facts, target, folder)),
    ]
    answer("\n".join(lines))


def _next(facts: Deployment, target: Target, folder: Path) -> list[str]:
    """Return the commands that start the deployment."""
    place, repository = shlex.quote(str(folder)), shlex.quote(str(facts.repository))
    upload = [f"copy {repository} to {facts.repository_uri}"] if facts.repository_uri else []
    if target == Target.COMPOSE:
        return [*upload, f"docker compose --file {place}/compose.yaml up --build --detach"]
    if target == Target.KSERVE and facts.storage in ("s3", "gs"):
        upload.append(f"make the service account {facts.name}, with the Secret from which KServe reads credentials")
    models = "--target server" if facts.repository_uri else f"--target baked --build-context repository={repository}"
    anywhere = "" if "/" in facts.image else "    (--image REGISTRY/NAME:TAG if the cluster has another registry)"
    install = {
        Target.HELM: f"helm install {facts.name} {place}/chart",
        Target.KSERVE: f"kubectl apply --filename {place}/inferenceservice.yaml",
    }
    return [
        *upload,
        f"docker build {models} --tag {facts.image} {place}/image",
        f"docker push {facts.image}{anywhere}",
        install[target],
    ]
