"""Small models and batches for the engine's tests; every tensor is a function of its global name or index."""

import torch
from torch import nn

WIDTH, ROWS, LAYERS, VOCAB = 12, 8, 4, 20


class Block(nn.Module):
    def __init__(self, bias=False):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, bias=bias)
        self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=bias)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=bias)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Model(nn.Module):
    """A pruned full model: any stage has the full model's names, with only its own layers."""

    def __init__(self, first=0, last=None, tied=True, dtype=torch.float32, bias=False, layers=LAYERS):
        super().__init__()
        last = layers if last is None else last
        self.embedding = nn.Embedding(VOCAB, WIDTH) if first == 0 else None
        self.layers = nn.ModuleDict({str(i): Block(bias) for i in range(first, last)})
        self.head = nn.Linear(WIDTH, VOCAB, bias=False) if last == layers else None
        with torch.no_grad():
            for name, p in self.named_parameters():
                name = "embedding.weight" if tied and name == "head.weight" else name
                seed = sum(ord(c) * 31**i for i, c in enumerate(name)) % 2**31
                p.copy_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.3)
        if tied and self.embedding is not None and self.head is not None:
            self.head.weight = self.embedding.weight
        self.to(dtype)

    def forward(self, x):
        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = layer(x)
        return x if self.head is None else self.head(x)


def loss_fn(logits, target):
    return nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())


def batch(group, rows=ROWS, length=5):
    generator = torch.Generator().manual_seed(1000 + group)
    tokens = torch.randint(0, VOCAB, (rows, length + 1), generator=generator)
    return tokens[:, :-1], tokens[:, 1:]


def cut(stage, stages, layers=LAYERS):
    """Layers [first, last) of a stage."""
    return stage * layers // stages, (stage + 1) * layers // stages


def adamw(module):
    return torch.optim.AdamW(module.parameters(), lr=3e-3, weight_decay=0.1)


def momentum(module):
    return torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9, nesterov=True)


def adadelta(module):
    return torch.optim.Adadelta(module.parameters())


OPTIMIZERS = {"adamw": adamw, "momentum": momentum}


def finish(group):
    return group >= 5  # of eight


def every_third(group):
    return group % 3 == 2


PREDICATES = {"finish": finish, "every third": every_third}
