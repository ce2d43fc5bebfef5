"""What one update of delay costs two optimizers, and what error feedback gives back, on one device.

python examples/delay_on_one_device.py
"""

import argparse

import torch
from torch import nn

from slipstream import Emulator
from slipstream.optim import build

VOCAB, CONTEXT, MICROBATCHES = 32, 8, 4


def text(rows: int, generator: torch.Generator) -> torch.Tensor:
    """Token streams in which every token follows from the two before it, with some noise."""
    tokens = torch.randint(0, VOCAB, (rows, CONTEXT + 1), generator=generator)
    for t in range(2, CONTEXT + 1):
        follows = (3 * tokens[:, t - 1] + 5 * tokens[:, t - 2]) % VOCAB
        keep = torch.rand(rows, generator=generator) < 0.9
        tokens[:, t] = torch.where(keep, follows, tokens[:, t])
    return tokens


def final_loss(optimizer: str, lr: float, delay: int, correction: str, steps: int) -> float:
    torch.manual_seed(0)
    data = torch.Generator().manual_seed(1)
    model = nn.Sequential(
        nn.Embedding(VOCAB, 32), nn.Flatten(), nn.Linear(64, 128), nn.GELU(), nn.Linear(128, VOCAB)
    )
    emulator = Emulator(
        model,
        MICROBATCHES,
        nn.functional.cross_entropy,
        lambda module: build(optimizer, module, lr=lr),
        correction,
        max_grad_norm=1.0,
        delay=delay,
    )
    losses = []
    for _ in range(steps):
        tokens = text(64, data)
        losses.append(torch.stack(emulator.step(tokens[:, -3:-1], tokens[:, -1])).mean().item())
    return sum(losses[-20:]) / len(losses[-20:])


def main(steps: int) -> None:
    print(f"{'optimizer':10}{'no delay':>10}{'delay 1':>10}{'delay 1 + error feedback':>27}")
    for optimizer, lr in (("muon", 0.02), ("adamw", 0.01)):
        cells = [(0, "none"), (1, "none"), (1, "error_feedback")]
        row = [final_loss(optimizer, lr, delay, correction, steps) for delay, correction in cells]
        print(f"{optimizer:10}{row[0]:10.4f}{row[1]:10.4f}{row[2]:27.4f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    main(parser.parse_args().steps)
