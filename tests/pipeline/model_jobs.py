"""Jobs over models no one here wrote, and over the features that wrap a stage's module."""

import copy

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from pipeline import tiny
from slipstream import Emulator, Schedule2BW

M, GROUPS = 4, 6


class LlamaPart(nn.Module):
    """Layers [first, last) of a transformers Llama or Mixtral, with the full model's parameter names."""

    def __init__(self, full, first, last, start, end):
        super().__init__()
        inner = full.model
        self.model = nn.Module()
        if start:
            self.model.embed_tokens = inner.embed_tokens
        self.model.layers = nn.ModuleDict({str(i): inner.layers[i] for i in range(first, last)})
        self.rotary = inner.rotary_emb
        if end:
            self.model.norm = inner.norm
            self.lm_head = full.lm_head
        self.start, self.end = start, end

    def forward(self, x):
        hidden = self.model.embed_tokens(x) if self.start else x
        places = torch.arange(hidden.shape[1])[None]
        angles = self.rotary(hidden, places)
        length = hidden.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for layer in self.model.layers.values():
            out = layer(hidden, attention_mask=mask, position_embeddings=angles, position_ids=places)
            hidden = out[0] if isinstance(out, tuple) else out
        return self.lm_head(self.model.norm(hidden)) if self.end else hidden


class GPT2Part(nn.Module):
    def __init__(self, full, first, last, start, end):
        super().__init__()
        inner = full.transformer
        self.transformer = nn.Module()
        if start:
            self.transformer.wte, self.transformer.wpe = inner.wte, inner.wpe
        self.transformer.h = nn.ModuleDict({str(i): inner.h[i] for i in range(first, last)})
        if end:
            self.transformer.ln_f = inner.ln_f
            self.lm_head = full.lm_head
        self.start, self.end = start, end

    def forward(self, x):
        t = self.transformer
        hidden = t.wte(x) + t.wpe(torch.arange(x.shape[1])) if self.start else x
        length = hidden.shape[1]
        mask = torch.full((length, length), float("-inf")).triu(1)[None, None]
        for block in t.h.values():
            out = block(hidden, attention_mask=mask)
            hidden = out[0] if isinstance(out, tuple) else out
        return self.lm_head(t.ln_f(hidden)) if self.end else hidden


def _full(kind):
    import transformers

    torch.manual_seed(7)
    common = {"vocab_size": tiny.VOCAB, "attn_implementation": "eager"}
    llama = {
        **common, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": kind == "llama-tied",
    }  # fmt: skip
    if kind.startswith("llama"):
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**llama)), LlamaPart
    if kind == "mixtral":
        config = transformers.MixtralConfig(**llama, num_local_experts=4, num_experts_per_tok=2)
        return transformers.MixtralForCausalLM(config), LlamaPart
    config = transformers.GPT2Config(
        **common,
        n_embd=16,
        n_layer=4,
        n_head=4,
        n_positions=16,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config), GPT2Part


TIES = {
    "gpt2": {0: "transformer.wte.weight", -1: "lm_head.weight"},
    "llama-tied": {0: "model.embed_tokens.weight", -1: "lm_head.weight"},
}


def foreign(world, kind):
    """Train a transformers model cut over the ranks; with one rank, also in the emulator."""
    full, part = _full(kind)
    first, last = world.rank * 4 // world.size, (world.rank + 1) * 4 // world.size
    start, end = world.rank == 0, world.rank == world.size - 1
    module = part(full, first, last, start, end)
    emulated = copy.deepcopy(module)
    tied = {}
    if kind in TIES and world.size > 1 and (start or end):
        tied = {"embedding": TIES[kind][0 if start else -1]}
    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
    schedule = Schedule2BW(
        stage, M, tiny.loss_fn, tiny.adamw, max_grad_norm=0.5, tied=tied, timeout=120, cutover=2
    )
    found = run(world, schedule)
    if world.size == 1:
        emulator = Emulator(emulated, M, tiny.loss_fn, tiny.adamw, max_grad_norm=0.5, cutover=2)
        found["emulated"] = [loss.item() for g in range(GROUPS) for loss in emulator.step(*tiny.batch(g))]
    return found


def run(world, schedule, groups=GROUPS, **batch_options):
    losses = []
    for group in range(groups):
        x, y = tiny.batch(group, **batch_options)
        found = []
        last = world.rank == world.size - 1
        schedule.step(*((x,) if world.rank == 0 else ()), **({"target": y, "losses": found} if last else {}))
        losses += [loss.item() for loss in found]
    schedule.drain()
    weights = {name: p.detach().clone() for name, p in schedule.master.named_parameters()}
    return {"losses": losses, "weights": weights}


class Skipping(nn.Module):
    """Its last block reads what the first one made: a traced pipeline must carry it past the middle."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(tiny.VOCAB, tiny.WIDTH)
        self.layers = nn.ModuleList([tiny.Block() for _ in range(4)])
        self.head = nn.Linear(tiny.WIDTH, tiny.VOCAB)

    def forward(self, tokens):
        first = self.embedding(tokens)
        hidden = first
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden + first)


def traced(world):
    """A stage of torch's own tracer, from a model with a skip over all stages."""
    from torch.distributed.pipelining import SplitPoint, pipeline

    torch.manual_seed(3)
    model = Skipping()
    emulated = copy.deepcopy(model)
    points = {f"layers.{i * 4 // world.size}": SplitPoint.BEGINNING for i in range(1, world.size)}
    pipe = pipeline(model, mb_args=(tiny.batch(0, rows=2)[0],), split_spec=points)
    stage = pipe.build_stage(world.rank, torch.device("cpu"))
    found = run(
        world, Schedule2BW(stage, M, tiny.loss_fn, tiny.adamw, max_grad_norm=0.5, timeout=120, cutover=2)
    )
    emulator = Emulator(emulated, M, tiny.loss_fn, tiny.adamw, max_grad_norm=0.5, cutover=2)
    found["emulated"] = [loss.item() for g in range(GROUPS) for loss in emulator.step(*tiny.batch(g))]
    return found


class Carrier(nn.Module):
    """Passes a tuple on: hidden states, an integer tensor, a boolean one, and a constant float."""

    def __init__(self, first, last):
        super().__init__()
        torch.manual_seed(11 + first)
        self.embedding = nn.Embedding(tiny.VOCAB, tiny.WIDTH) if first else None
        self.block = tiny.Block()
        self.head = nn.Linear(tiny.WIDTH, tiny.VOCAB) if last else None

    def forward(self, x, places=None, even=None, scale=None):
        if self.embedding is not None:
            places, even, scale = x % 5, x % 2 == 0, torch.full((x.shape[0], 1, 1), 0.5)
            x = self.embedding(x)
        x = self.block(x + places[..., None].float() * scale) * torch.where(even[..., None], 1.0, 0.9)
        return self.head(x) if self.head is not None else (x, places, even, scale)


def tuples(world):
    stage = PipelineStage(
        Carrier(world.rank == 0, world.rank == world.size - 1), world.rank, world.size, "cpu"
    )
    schedule = Schedule2BW(stage, M, tiny.loss_fn, tiny.momentum, timeout=120, cutover=M)
    found = run(world, schedule)
    parts = [Carrier(rank == 0, rank == world.size - 1) for rank in range(world.size)]
    emulator = Emulator(
        stages=parts,
        n_microbatches=M,
        loss_fn=tiny.loss_fn,
        optimizer=tiny.momentum,
        correction="error_feedback",
    )
    found["emulated"] = [loss.item() for g in range(GROUPS) for loss in emulator.step(*tiny.batch(g))]
    return found


class Checkpointed(tiny.Model):
    def forward(self, x):
        from torch.utils.checkpoint import checkpoint

        if self.embedding is not None:
            x = self.embedding(x)
        for layer in self.layers.values():
            x = checkpoint(layer, x, use_reentrant=False)
        return x if self.head is None else self.head(x)


def wrapped(world, how):
    """Activation checkpointing, torch.compile or autocast around the same stage."""
    kind = Checkpointed if how == "checkpoint" else tiny.Model
    module = kind(*tiny.cut(world.rank, world.size), tied=False)
    prepare = None
    if how == "compile":
        prepare = lambda m: torch.compile(m, backend="aot_eager")  # noqa: E731
    elif how == "autocast":

        def prepare(m):
            plain = m.forward
            m.forward = torch.autocast("cpu", torch.bfloat16)(plain)

    stage = PipelineStage(module, world.rank, world.size, torch.device("cpu"))
    return run(
        world, Schedule2BW(stage, M, tiny.loss_fn, tiny.adamw, prepare=prepare, timeout=120, cutover=M)
    )


def bare(world):
    """The middle stage of three has no parameters at all."""

    def parts():
        torch.manual_seed(1)
        return [nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)]

    def loss(output, target):
        return (output - target).square().mean()

    stage = PipelineStage(parts()[world.rank], world.rank, world.size, torch.device("cpu"))
    schedule = Schedule2BW(stage, M, loss, tiny.adamw, max_grad_norm=0.5, timeout=120, cutover=2)
    emulator = Emulator(nn.Sequential(*parts()), M, loss, tiny.adamw, max_grad_norm=0.5, cutover=2)
    losses, emulated = [], []
    for group in range(GROUPS):
        x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(group))
        found = []
        last = world.rank == world.size - 1
        schedule.step(*((x,) if world.rank == 0 else ()), **({"target": y, "losses": found} if last else {}))
        losses += [each.item() for each in found]
        emulated += [each.item() for each in emulator.step(x, y)]
        if group == 2:
            schedule.load_state_dict(schedule.state_dict())
    schedule.drain()
    return losses, emulated


class Twice(nn.Module):
    """Two layers with one weight; every stage calls it by the same name."""

    def __init__(self, seed):
        super().__init__()
        torch.manual_seed(seed)
        self.up, self.down = nn.Linear(3, 3), nn.Linear(3, 3)
        self.down.weight = self.up.weight

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


def shared_inside(world):
    """Each stage shares a weight of its own between two layers; returns losses of the engine and of the emulator."""

    def loss(output, target):
        return (output - target).square().mean()

    stage = PipelineStage(Twice(world.rank), world.rank, world.size, torch.device("cpu"))
    schedule = Schedule2BW(stage, M, loss, tiny.momentum, timeout=120, cutover=M)
    parts = [Twice(rank) for rank in range(world.size)]
    emulator = Emulator(stages=parts, n_microbatches=M, loss_fn=loss, optimizer=tiny.momentum)
    losses, emulated = [], []
    for group in range(GROUPS):
        x, y = torch.randn(2, 8, 3, generator=torch.Generator().manual_seed(group)) * 0.5
        found = []
        last = world.rank == world.size - 1
        schedule.step(*((x,) if world.rank == 0 else ()), **({"target": y, "losses": found} if last else {}))
        losses += [each.item() for each in found]
        emulated += [each.item() for each in emulator.step(x, y)]
    schedule.drain()
    return losses, emulated
