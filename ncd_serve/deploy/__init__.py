"""Bring a bundle to other machines: `facts` are about it, `render` writes files from what `files/` holds."""

from enum import Enum


class Target(str, Enum):
    """Platform that runs the servers."""

    COMPOSE = "compose"
    HELM = "helm"
    KSERVE = "kserve"
