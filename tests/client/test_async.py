from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import numpy as np
import pytest

import topkd
from tests.client.conftest import Harmed, halt
from tests.client.test_loss import worker_of
from tests.conftest import Server


def test_calls_plans_batches_and_merges(server: Server) -> None:
    async def main() -> None:
        async with topkd.AsyncClient(server.socket_dir) as client:
            array = await client.empty((2, 50), "float32")
            array[:] = 0
            array[0, 5] = array[1, 9] = 1
            results = await asyncio.gather(*(client.select_topk(array, 1) for _ in range(20)))
            assert all(result.indices.tolist() == [[5], [9]] for result in results)
            plan = await client.plan(array, 1)
            assert (await plan()).indices.tolist() == [[5], [9]]
            batch = await client.select_topk_batch([topkd.Selection(array.copy(), 1), plan])
            assert [entry.indices.tolist() for entry in batch] == [[[5], [9]]] * 2
            merged = await client.merge_topk(np.ones((1, 2), np.float32), np.array([[3, 4]], np.int32), 2)
            assert sorted(merged.indices[0].tolist()) == [3, 4]
            with pytest.raises(topkd.ArgumentValueError, match="k is 0"):
                await client.select_topk(array, 0)
            assert (await client.info()).device.uuid == "CPU"
            plan.close()
        with pytest.raises(topkd.ClientClosedError):
            await client.info()

    asyncio.run(main())


def test_one_client_serves_several_loops(server: Server) -> None:
    client = topkd.AsyncClient(server.socket_dir)
    for _ in range(3):
        assert asyncio.run(client.select_topk(np.eye(3, dtype=np.float32), 1)).indices.tolist() == [[0], [1], [2]]
    asyncio.run(client.close())


def test_cancellation_and_loss(harmed: Harmed) -> None:
    async def main() -> None:
        async with topkd.AsyncClient(harmed.socket_dir) as client:
            array: Any = await client.empty((1, 50), "float32")
            array[:] = range(50)
            assert (await client.select_topk(array, 1)).indices.tolist() == [[49]]
            pid = worker_of(client, harmed)
            halt(pid)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(client.select_topk(array, 1), 0.2)
            with pytest.raises(topkd.DeadlineExceededError):
                await client.select_topk(array, 1, timeout=0.2)
            call = asyncio.create_task(client.select_topk(array, 1))
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(topkd.SessionLostError):
                await call
            assert (await client.select_topk(array, 1)).indices.tolist() == [[49]]

    asyncio.run(main())
