"""Corrections: their equations, the paper's form of error feedback, memory, checkpoints, refusals."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from slipstream import optimizers
from slipstream.errors import UserError
from slipstream.optim import (
    CORRECTIONS,
    RECIPES,
    Publication,
    build,
    build_correction,
    schedule,
    synchronous_groups,
)
from slipstream.pipeline.emulator import Emulator

WIDTH, ROWS = 10, 12


class Network(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, WIDTH)
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(2)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 3)
        self.to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return self.head(self.norm(x))


def batch(group: int, dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(group)
    x = torch.randn(ROWS, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.stack([x.sin().sum(1), x[:, 0] * x[:, 1], x.abs().sum(1)], 1).to(dtype)


def mean_square(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def gradient(module: nn.Module, weights: list[Tensor], group: int) -> list[Tensor]:
    """The gradient at `weights`, without an engine."""
    names = [name for name, _ in module.named_parameters()]
    leaves = [weight.clone().requires_grad_() for weight in weights]
    output = torch.func.functional_call(module, dict(zip(names, leaves, strict=True)), batch(group)[0])
    return list(torch.autograd.grad(mean_square(output, batch(group)[1]), leaves))


def paper_form(name: str, steps: int, rate, **options) -> list[Tensor]:
    """x_{t+1} = x_t - 2 u_t + u_{t-1}, u_t the whole step from the gradient at x_{t-1}. Returns z."""
    module = Network()
    params = list(module.parameters())
    optimizer = build(name, module, **options)
    x = [p.detach().clone() for p in params]
    x_before, u_before = x, [torch.zeros_like(w) for w in x]
    for t in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate(t)
        for p, weight, grad in zip(params, x, gradient(module, x_before, t), strict=True):
            p.data.copy_(weight)
            p.grad = grad
        optimizer.step()
        u = [weight - p.detach() for weight, p in zip(x, params, strict=True)]
        x, x_before = [w - 2 * now + then for w, now, then in zip(x, u, u_before, strict=True)], x
        u_before = u
    return [w + u for w, u in zip(x, u_before, strict=True)]


def emulate(name: str, steps: int, rate, correction="error_feedback", **options) -> Emulator:
    clip = options.pop("max_grad_norm", None)
    delay = options.pop("delay", 1)
    emulator = Emulator(
        Network(), 1, mean_square, lambda m: build(name, m, **options), correction, clip, delay=delay
    )
    for t in range(steps):
        for group in emulator.optimizer.param_groups:
            group["lr"] = group["initial_lr"] * rate(t)
        emulator.step(*batch(t))
    return emulator


def distance(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def weights(emulator: Emulator) -> list[Tensor]:
    return [p.detach() for p in emulator.master.parameters()]


COSINE = schedule("cosine", 1.0, 40, 5, 0.1)


@pytest.mark.parametrize(("name", "lr"), [("sgd", 0.02), ("muon", 0.01), ("adamw", 0.005), ("lion", 0.005)])
def test_the_papers_form_and_ours_are_one_trajectory(name, lr):
    """With momentum and a varying rate, without decay: equal to 1e-10 in float64 after 40 updates."""
    paper = paper_form(name, 40, COSINE, lr=lr, weight_decay=0.0)
    ours = weights(emulate(name, 40, COSINE, lr=lr, weight_decay=0.0))
    assert distance(ours, [p.detach() for p in Network().parameters()]) > 0.1
    assert distance(paper, ours) < 1e-10


def test_with_decay_the_forms_part_by_a_little():
    """Decay is taken at z here and at x there. Measured and stated: under 1 % of the distance travelled."""
    paper = paper_form("muon", 40, COSINE, lr=0.01, weight_decay=0.1)
    ours = weights(emulate("muon", 40, COSINE, lr=0.01, weight_decay=0.1))
    travelled = distance(ours, [p.detach() for p in Network().parameters()])
    assert 1e-8 < distance(paper, ours) < 0.01 * travelled


def by_hand(
    steps: int, correct, publish, delay: int = 1, lr: float = 0.05, momentum: float = 0.8
) -> list[Tensor]:
    """SGD with momentum under the rule of 2BW, the correction given as functions of plain lists."""
    module = Network()
    z = [p.detach().clone() for p in module.parameters()]
    m = [torch.zeros_like(w) for w in z]
    banks = [z]
    for g in range(steps):
        bank = banks[max(0, g - delay)]
        grads = correct(gradient(module, bank, g), z, bank)
        m = [momentum * a + b for a, b in zip(m, grads, strict=True)]
        old, z = z, [w - lr * a for w, a in zip(z, m, strict=True)]
        banks.append(publish(old, z, [-lr * a for a in m]))
    return z


KEEP = lambda grads, master, bank: grads  # noqa: E731
PLAIN = lambda old, new, step: new  # noqa: E731


@pytest.mark.parametrize(
    ("correction", "options", "correct", "publish"),
    [
        ("none", {}, KEEP, PLAIN),
        (
            "error_feedback",
            {"lam": 0.7},
            KEEP,
            lambda old, new, step: [n + 0.7 * (n - o) for o, n in zip(old, new, strict=True)],
        ),
        (
            "momentum_prediction",
            {"lam": 1.3},
            KEEP,
            lambda old, new, step: [n + 1.3 * s for n, s in zip(new, step, strict=True)],
        ),
        (
            "delay_compensation",
            {"lam": 0.5},
            lambda grads, z, b: [g + 0.5 * g * g * (p - q) for g, p, q in zip(grads, z, b, strict=True)],
            PLAIN,
        ),
    ],
)
def test_equations(correction, options, correct, publish):
    expected = by_hand(20, correct, publish)
    emulator = emulate(
        "sgd", 20, lambda t: 1.0, build_correction(correction, **options), lr=0.05, momentum=0.8
    )
    assert distance(expected, weights(emulator)) < 1e-12


def test_longer_delays_extrapolate_further():
    def publish(old, new, step):
        return [n + 3 * (n - o) for o, n in zip(old, new, strict=True)]

    expected = by_hand(20, KEEP, publish, delay=3, lr=0.01)
    emulator = emulate("sgd", 20, lambda t: 1.0, "error_feedback", delay=3, lr=0.01, momentum=0.8)
    assert distance(expected, weights(emulator)) < 1e-12


def test_lr_scaling_equals_a_scaled_rate():
    scaled = emulate("muon", 12, lambda t: 1.0, build_correction("lr_scaling", steps=8, start=2), lr=0.01)
    factors = [1.0, 1.0] + [2.0 ** -(1 - min(1.0, t / 8)) for t in range(10)]
    plain = emulate("muon", 12, lambda t: factors[t], "none", lr=0.01)
    assert distance(weights(scaled), weights(plain)) < 1e-12


def test_gradients_are_corrected_before_the_norm():
    """Clipping sees the compensated gradient: the norm differs from the first delayed group on."""
    correction = build_correction("delay_compensation", lam=5.0)
    plain = emulate("sgd", 6, lambda t: 1.0, "none", lr=0.05, max_grad_norm=0.5)
    compensated = emulate("sgd", 6, lambda t: 1.0, correction, lr=0.05, max_grad_norm=0.5)
    assert plain.grad_norms[0] == compensated.grad_norms[0]
    assert plain.grad_norms[1] != compensated.grad_norms[1]


@pytest.mark.parametrize("name", ["sgd", "adamw", "nadamw", "lion", "muon", "normuon", "scion"])
def test_momentum_prediction_looks_one_step_ahead(name):
    """The bank lies where the optimizer goes next if the gradient is zero, or the momentum again."""
    module = Network()
    params = list(module.parameters())
    optimizer = build(name, module, lr=0.01, weight_decay=0.0)
    for group in range(3):
        for p, grad in zip(params, gradient(module, [p.detach() for p in params], group), strict=True):
            p.grad = grad
        optimizer.step()
    new = [p.detach().clone() for p in params]
    banks = [torch.empty_like(w) for w in new]
    build_correction("momentum_prediction").publish(Publication(banks, new, None, optimizer, params, 1))
    for p in params:
        state = optimizer.state[p]
        momentum = state["exp_avg"] if "exp_avg" in state else state["momentum_buffer"]
        p.grad = torch.zeros_like(p) if name in ("sgd", "nadamw", "lion") else momentum.clone()
    optimizer.step()
    for bank, before, p in zip(banks, new, params, strict=True):
        ahead, step = bank - before, p.detach() - before
        assert float((ahead * step).sum() / (ahead.norm() * step.norm())) > 0.97, tuple(p.shape)
        assert 0.8 < float(ahead.norm() / step.norm()) < 1.25, tuple(p.shape)


def test_momentum_prediction_takes_the_steps_of_muons_own_iteration():
    weight = torch.nn.Parameter(torch.randn(16, 8, generator=torch.Generator().manual_seed(0)))
    module = torch.nn.ParameterDict({"weight": weight})
    optimizer = build("muon", module, steps=1, momentum=0.0, weight_decay=0.0)
    weight.grad = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    before, banks = weight.detach().clone(), [torch.empty_like(weight)]
    optimizer.step()
    taken = weight.detach() - before  # without momentum the next step repeats it
    new = [weight.detach().clone()]
    build_correction("momentum_prediction").publish(Publication(banks, new, None, optimizer, [weight], 1))
    assert torch.allclose(banks[0] - new[0], taken, atol=1e-6)


def test_banks_of_another_dtype():
    correction = build_correction("error_feedback")
    old, new = [torch.zeros(5)], [torch.full((5,), 0.25)]
    banks = [torch.zeros(5, dtype=torch.bfloat16)]
    correction.publish(Publication(banks, new, old, None, [], 1))
    assert torch.equal(banks[0], torch.full((5,), 0.5, dtype=torch.bfloat16))
    assert torch.equal(new[0], torch.full((5,), 0.25))


def test_error_feedback_writes_into_the_dying_bank():
    """z_g lies in the bank: nothing is allocated that lives on, and z_{g+1} is left alone."""
    correction = build_correction("error_feedback", lam=1.0)
    bank, new = torch.tensor([1.0, 2.0]), torch.tensor([1.5, 1.0])
    where = bank.data_ptr()
    correction.publish(Publication([bank], [new], [bank], None, [], 1))
    assert bank.data_ptr() == where
    assert torch.equal(bank, torch.tensor([2.0, 0.0]))
    assert torch.equal(new, torch.tensor([1.5, 1.0]))


def test_a_run_may_name_every_correction_there_is():
    assert list(CORRECTIONS) == list(optimizers.CORRECTION_NAMES)


@pytest.mark.parametrize("name", sorted(CORRECTIONS))
def test_stages_without_parameters(name):
    correction = build_correction(name, **({"steps": 3} if name == "lr_scaling" else {}))
    optimizer = build("muon", nn.Identity())
    correction.publish(Publication([], [], [], optimizer, [], 1))
    correction.gradient([], [], [])


@pytest.mark.parametrize("correction", sorted(CORRECTIONS))
def test_checkpoints_are_exact(correction):
    make = lambda: build_correction(correction, **({"steps": 9} if correction == "lr_scaling" else {}))  # noqa: E731
    resume("muon", make, clip=0.5)


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_any_optimizer_resumes_exactly_under_error_feedback(name):
    resume(name, lambda: build_correction("error_feedback"), clip=1.0)


def resume(name: str, make_correction, clip: float) -> None:
    """Through a checkpoint, with clipping, decay and a schedule: the same bits as without a stop."""

    def emulator() -> Emulator:
        return Emulator(
            Network(torch.float32), 2, mean_square, lambda m: build(name, m), make_correction(), clip
        )

    def run(emulator: Emulator, steps: range) -> None:
        for t in steps:
            for group in emulator.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * COSINE(t)
            emulator.step(*batch(t, torch.float32))

    straight, first, second = emulator(), emulator(), emulator()
    run(straight, range(9))
    run(first, range(5))
    second.load_state_dict(first.state_dict())
    run(second, range(5, 9))
    moved = distance(weights(straight), [p.detach() for p in Network(torch.float32).parameters()])
    assert moved > 1e-4
    assert distance(weights(straight), weights(second)) == 0.0


def test_synchronous_groups():
    flushed = synchronous_groups(2, 1, 6)
    assert [flushed(g) for g in range(6)] == [True, True, False, False, False, True]
    with pytest.raises(UserError, match="do not fit into a run of 3"):
        synchronous_groups(2, 2, 3)


def test_a_fully_synchronous_run_is_the_undelayed_one():
    delayed = Emulator(
        Network(),
        1,
        mean_square,
        lambda m: build("muon", m),
        "error_feedback",
        synchronous=synchronous_groups(8, 0, 8),
    )
    undelayed = Emulator(Network(), 1, mean_square, lambda m: build("muon", m), "none", delay=0)
    for t in range(8):
        delayed.step(*batch(t))
        undelayed.step(*batch(t))
    assert distance(weights(delayed), weights(undelayed)) == 0.0


def test_refusals():
    with pytest.raises(UserError, match=r"'error_feedbak'.*'error_feedback'"):
        build_correction("error_feedbak")
    with pytest.raises(UserError, match="nadamw"):
        build_correction("nesterov")
    with pytest.raises(UserError, match="'none' cannot be made with lam=1"):
        build_correction("none", lam=1.0)
    with pytest.raises(UserError, match="steps"):
        build_correction("lr_scaling")
    with pytest.raises(UserError, match="above 0"):
        build_correction("error_feedback", lam=0.0)
    with pytest.raises(UserError, match="ready correction"):
        build_correction(build_correction("none"), lam=1.0)
    parameter = nn.Parameter(torch.zeros(2))
    adagrad = torch.optim.Adagrad([parameter])
    with pytest.raises(UserError, match="momentum of Adagrad"):
        build_correction("momentum_prediction").publish(
            Publication([torch.zeros(2)], [torch.zeros(2)], None, adagrad, [parameter], 1)
        )
    still = torch.optim.SGD([parameter], lr=0.1)
    parameter.grad = torch.ones(2)
    still.step()
    with pytest.raises(UserError, match="momentum"):
        build_correction("momentum_prediction").publish(
            Publication([torch.zeros(2)], [torch.zeros(2)], None, still, [parameter], 1)
        )
