"""Several stages on one GPU: CUDA tensors staged through pinned host memory over gloo."""

import pytest
import torch


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_stages_that_share_a_gpu_match_the_emulator(pool, stages):
    results = pool.run("pipeline.jobs:on_gpu", ranks=stages)
    assert results[-1][0] == pytest.approx(results[0][1], rel=1e-6)
