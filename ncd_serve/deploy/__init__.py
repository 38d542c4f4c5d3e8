"""Deployment of a bundle: `facts` collects the values, `render` fills the templates in `files/`."""

from enum import Enum


class Target(str, Enum):
    """Platform that runs the servers."""

    COMPOSE = "compose"
    HELM = "helm"
    KSERVE = "kserve"
