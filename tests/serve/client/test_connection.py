"""The loop that talks to servers: what it says of failures that belong to no request."""

from __future__ import annotations

import asyncio
import errno

import pytest

from ncd_serve.client.connection import in_background


@pytest.mark.parametrize(("number", "said"), [(errno.EBADF, False), (errno.EIO, True)])
def test_a_queue_that_grpc_has_closed_is_not_reported(
    number: int, said: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_beside() -> None:
        def fail() -> None:
            raise OSError(number, "in a callback")

        asyncio.get_running_loop().call_soon(fail)
        await asyncio.sleep(0.01)

    in_background(fail_beside()).result()
    assert bool(caplog.records) == said
