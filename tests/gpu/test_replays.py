from __future__ import annotations

import gc
from functools import partial

import pytest

torch = pytest.importorskip("torch")

from tests.gpu.agree import skip_unless_served  # noqa: E402
from topkd.kernels import run_select, validate_select, warm_select  # noqa: E402
from topkd.server._replay_cuda import Replays  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]
UNIQUE = {"order": "index", "ties": "lowest"}


@pytest.mark.parametrize("kernel", ["cluster", "radix_register", "radix_wide", "small", "split_merge"])
@pytest.mark.parametrize("count", [1, 3, 64])
def test_a_replay_selects_from_what_the_rows_hold_now(kernel: str, count: int) -> None:
    skip_unless_served(kernel, 4096)
    device = torch.device("cuda", 0)
    with torch.cuda.stream(torch.cuda.Stream()):
        scores = torch.empty(count, 4096, dtype=torch.bfloat16, device=device)
        out = torch.empty(count, 512, dtype=torch.int32, device=device)
        requests = [
            validate_select(scores[at : at + 1], 512, **UNIQUE, kernel=kernel, out_indices=row[None])
            for at, row in enumerate(out)
        ]
        warm_select(requests[0])
        replays = Replays(device)
        replay = replays.capture([partial(run_select, request) for request in requests])
        for _ in range(5):
            scores.normal_()
            out.fill_(-7)
            replay()
            got = out.clone()
            for request in requests:
                run_select(request)
            torch.cuda.current_stream().synchronize()
            assert torch.equal(got, out)
            assert bool((got >= 0).all())
        del replay
        gc.collect()
        assert len(replays._given_up) == 1
        torch.cuda.current_stream().synchronize()
        kept = replays.capture([partial(run_select, request) for request in requests])
        assert not replays._given_up
        out.fill_(-7)
        kept()
        torch.cuda.current_stream().synchronize()
        assert torch.equal(got, out)
