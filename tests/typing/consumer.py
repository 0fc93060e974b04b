"""A program that uses topkd, for mypy: the types that a user's program sees. It is never run."""

from typing import assert_type

import numpy as np
import torch

import topkd
from topkd import kernels
from topkd.v1 import selection_pb2


def remote(scores: torch.Tensor, lengths: torch.Tensor) -> int:
    with topkd.Client(timeout=1.0) as client:
        assert_type(client.info().device.backend, topkd.Backend)
        result = client.select_topk(scores, 2048, lengths=lengths, order="index", ties="lowest", values=True)
        assert_type(result, topkd.SelectResult)
        several = client.select_topk_batch([topkd.Selection(scores, 512), topkd.Selection(scores, 64, largest=False)])
        assert_type(several, list[topkd.SelectResult])
        with client.plan(scores, 2048) as plan:
            assert_type(plan, topkd.Plan)
            plan()
    return len(several)


async def asynchronous(scores: "np.ndarray[tuple[int, int], np.dtype[np.float32]]") -> topkd.SelectResult:
    async with topkd.AsyncClient() as client:
        return await client.select_topk(scores, 16)


def in_process(scores: torch.Tensor) -> torch.Tensor:
    result = kernels.select_topk(scores, 8, values=True)
    return result.indices


def failures(error: topkd.ResourceExhaustedError) -> float:
    return error.retry_after or 0.0


def wrong(client: topkd.Client, scores: torch.Tensor) -> None:
    client.select_topk(scores, "2048")  # type: ignore[arg-type]
    client.select_topk(scores, 2048, order="sorted")  # type: ignore[arg-type]
    client.select_topk(scores, 2048, sorted=True)  # type: ignore[call-arg]


def message() -> int:
    return selection_pb2.Selection(k=1).k
