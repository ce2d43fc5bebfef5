"""torchtitan's Llama 3 without a pipeline flush, with our Muon. Two stages of two data ranks each, on four GPUs:

torchrun --nproc-per-node=4 examples/torchtitan/llama3_2bw.py --module llama3_2bw --config debug \
    --parallelism.pipeline_parallel_degree 2 --hf_assets_path ./assets/tokenizer

What torchtitan's command line sets for any config it sets here too; what is ours begins with `--slipstream.`:

    --slipstream.cutover 8          how many microbatches of a step read the weights of one update ago
    --slipstream.synchronous 100    flush the first 100 steps
"""

import sys

from torchtitan.models.llama3.config_registry import llama3_8b, llama3_debugmodel

from slipstream.torchtitan import Trainer2BW, with_2bw


def debug() -> Trainer2BW.Config:
    config = llama3_debugmodel()
    config.training.local_batch_size = 8  # 8 microbatches of one row on each data rank
    return with_2bw(config, optimizer="muon", lr=2e-3)


def large() -> Trainer2BW.Config:
    """torchtitan's own AdamW; error feedback matters more there than with Muon."""
    config = llama3_8b()
    config.training.local_batch_size = 16
    return with_2bw(config)


if __name__ == "__main__":
    from torchtitan.train import main

    sys.modules["llama3_2bw"] = sys.modules["__main__"]  # `--module` names a module that can be imported
    main()
