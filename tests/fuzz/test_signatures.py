"""Damaged signatures and public keys: refused with a DataError, unless only the untrusted comment was changed."""

from __future__ import annotations

from pathlib import Path

import minisign
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncd_serve.errors import DataError
from ncd_serve.signature import check_signature
from tests.fuzz.test_fuzz import SEEDS, damaged

CONTENT = b'{"bundle_id": "x"}'
PAIR = minisign.KeyPair.generate()
GOOD = {
    "signature": bytes(PAIR.secret_key.sign(CONTENT, trusted_comment="bundle x")) + b"\n",
    "public": bytes(PAIR.public_key) + b"\n",
}
HOSTILE = st.sampled_from([b"", b"\n" * 4, b"\xff" * 300, b"untrusted comment: \n" * 4, b"x" * (1 << 20)])


@given(st.sampled_from(sorted(GOOD)), SEEDS | HOSTILE)
def test_signatures_and_keys(tmp_path: Path, which: str, change: int | bytes) -> None:
    changed = change if isinstance(change, bytes) else damaged(GOOD[which], change)
    for name, content in {**GOOD, which: changed}.items():
        (tmp_path / name).write_bytes(content)
    try:
        check_signature(CONTENT, tmp_path / "signature", str(tmp_path / "public"))
    except DataError:
        return
    assert changed.splitlines()[1:] == GOOD[which].splitlines()[1:]


def test_whole_ones_are_accepted(tmp_path: Path) -> None:
    for name, content in GOOD.items():
        (tmp_path / name).write_bytes(content)
    check_signature(CONTENT, tmp_path / "signature", str(tmp_path / "public"))
    with pytest.raises(DataError):
        check_signature(CONTENT + b" ", tmp_path / "signature", str(tmp_path / "public"))
