"""A model, data and a callback of a user's own, as train takes them by name."""

import os
import time

import torch
from torch import nn

SEEN = []


class Mix(nn.Module):
    """A causal mean over what came before: enough to train through."""

    def __init__(self, width):
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        steps = torch.arange(1, x.shape[1] + 1, device=x.device).view(1, -1, 1)
        return x + self.down(torch.relu(self.up(x.cumsum(1) / steps)))


def layers(vocab):
    width = 16
    return nn.Sequential(nn.Embedding(vocab, width), *(Mix(width) for _ in range(4)), nn.Linear(width, vocab))


def tied(vocab):
    found = layers(vocab)
    found[-1] = nn.Linear(16, vocab, bias=False)
    found[-1].weight = found[0].weight
    return list(found)


class Scaled(nn.Module):
    """Scales by a saved buffer, which is another one each time the model is built."""

    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.tensor(float(os.environ["SCALE"])))

    def forward(self, x):
        return x * self.scale


def scaled(vocab):
    return nn.Sequential(*layers(vocab)[:-1], Scaled(), layers(vocab)[-1])


class Attend(nn.Module):
    """Attention whose causal mask is a saved buffer that holds -inf, as many write it."""

    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.register_buffer("mask", torch.triu(torch.full((64, 64), float("-inf")), 1))

    def forward(self, x):
        query, key, value = self.mix(x).chunk(3, -1)
        length = x.shape[1]
        return x + (query @ key.mT + self.mask[:length, :length]).softmax(-1) @ value


def masked(vocab):
    return nn.Sequential(nn.Embedding(vocab, 16), Attend(16), Attend(16), nn.Linear(16, vocab))


def whole(vocab):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = layers(vocab)

        def forward(self, x):
            return self.inner(x)

    return Model()


def too_narrow(vocab):
    return nn.Sequential(nn.Embedding(vocab, 16), nn.Linear(16, 3))


def counting(split, rows, sequence, seed):
    """Every token is the one before it plus one."""

    def batch(group):
        first = torch.arange(rows).view(-1, 1) * 7 + group + seed + (1000 if split == "valid" else 0)
        tokens = (first + torch.arange(sequence + 1)) % 64
        return tokens[:, :-1], tokens[:, 1:].numpy()

    return batch


def wrong_shape(split, rows, sequence, seed):
    return lambda group: (torch.zeros(rows, 3), torch.zeros(rows, 3))


def remember(event):
    SEEN.append(event)


def stop_at_five(event):
    return event["step"] == 5


def stall(event):
    """A callback that never comes back."""
    if event["step"] == 12:
        time.sleep(600)
