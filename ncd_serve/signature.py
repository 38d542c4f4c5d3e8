"""Signature of a bundle: a file of minisign's format beside `bundle.json`, whose hashes cover all other files."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ncd_serve.errors import DataError, UsageError, needs_extra
from ncd_serve.text import printable

if TYPE_CHECKING:
    from collections.abc import Callable

SIGNATURE = "bundle.json.minisig"
_MAX_BYTES = 16 << 10  # minisign's own files have at most 9 KiB
_KEY_TEXT = re.compile(r"RW[A-Za-z0-9+/]{54}")


def check_signature(content: bytes, signature: Path, public_key: str) -> None:
    """Raise DataError unless a file is the signature of this content by the owner of a public key.

    The key is a file that `minisign -G` wrote, or the second line of one.
    """
    minisign = _minisign()
    key = _read_key(public_key, minisign)
    if not signature.is_file():
        raise DataError(f"{signature.parent} is not signed: it has no {SIGNATURE}", hint="ncd-serve sign BUNDLE")
    try:
        key.verify(content, minisign.Signature.from_bytes(_read(signature)))
    except (minisign.Error, ValueError) as error:
        raise DataError(
            f"{signature} is not a signature of this bundle with that key: {printable(error)}",
            hint="it was changed, or signed by somebody else: do not use it",
        ) from None


def copy_signature(bundle: Path, target: Path) -> None:
    """Copy the signature of a bundle, if it has one, into another folder."""
    if (bundle / SIGNATURE).is_file():
        shutil.copyfile(bundle / SIGNATURE, target / SIGNATURE)


def sign(content: bytes, key: Path, *, comment: str, password: Callable[[], str]) -> bytes:
    """Return the signature of a content by a secret key of minisign; `password` is asked if the key has one."""
    minisign = _minisign()
    if not key.is_file():
        raise UsageError(f"no secret key at {key}", hint="minisign -G -s KEY -p KEY.pub makes one")
    try:
        with minisign.SecretKey.from_bytes(_read(key)) as secret:
            if secret.is_encrypted():
                secret.decrypt(password())
            found: bytes = bytes(secret.sign(content, trusted_comment=comment)) + b"\n"
    except (minisign.Error, ValueError, MemoryError) as error:
        raise DataError(
            f"{key} cannot sign: {printable(error) or 'too little memory for its password'}",
            hint="give a secret key of minisign, and its password",
        ) from None
    return found


def _minisign() -> Any:
    with needs_extra("sign"):
        import minisign
    return minisign


def _read_key(public_key: str, minisign: Any) -> Any:
    try:
        if _KEY_TEXT.fullmatch(public_key):
            return minisign.PublicKey.from_base64(public_key)
        return minisign.PublicKey.from_bytes(_read(Path(public_key)))
    except (minisign.Error, ValueError) as error:
        raise DataError(
            f"{printable(public_key)} is not a public key of minisign: {printable(error)}",
            hint="give the file that minisign -G has written, or its second line",
        ) from None


def _read(file: Path) -> bytes:
    try:
        with file.open("rb") as stream:
            content = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise DataError(f"cannot read {file}: {error.strerror}", hint="check the path") from None
    if len(content) > _MAX_BYTES:
        raise DataError(f"{file} has more than {_MAX_BYTES:,} bytes", hint="it is not a file of minisign")
    return content
