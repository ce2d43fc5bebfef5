"""Rule 1 of the method, written down independently of the package: the oracle of every exactness test.

z_0 initial, b_0 = z_0
G_g = mean over the m microbatches of group g of their gradients, microbatch k at b_max(g-d, 0) if k < c_g, else at z_g
z_{g+1} = Optimizer(z_g, G_g);  b_{g+1} = z_{g+1} + lam d (z_{g+1} - z_g)

c_g is `cutover(g)`, m (all of them) by default, and 0 for a flushed group and the one after it.

`exact` rounds where the engine says that it does, so that losses and weights can be held against it bit by bit: the
norm is the exactly rounded sum of one square per parameter, and a bank is one interpolation past the newest weights.
"""

import copy
import math

import torch


def train(
    module,
    batches,
    m,
    loss_fn,
    make_optimizer,
    lam=0.0,
    clip=None,
    delay=1,
    synchronous=lambda g: False,
    cutover=None,
    exact=False,
):
    """Returns the losses of every microbatch and the final master. `m` may be a function of the group."""
    sizes = m if callable(m) else lambda g, m=m: m
    master, worker = copy.deepcopy(module), copy.deepcopy(module)
    optimizer = make_optimizer(master)
    z = [p.detach().clone() for p in master.parameters()]
    banks, losses = {0: z}, []
    for g, (x, y) in enumerate(batches):
        m = sizes(g)
        flushed = delay == 0 or synchronous(g) or synchronous(g - 1)
        old = 0 if flushed else m if cutover is None else cutover(g)
        newest = [p.detach() for p in master.parameters()]
        worker.zero_grad()
        for k, (xk, yk) in enumerate(zip(x.chunk(m), y.chunk(m), strict=True)):
            read = newest if g == 0 or k >= old else banks[max(g - delay, 0)]
            for p, b in zip(worker.parameters(), read, strict=True):
                p.data.copy_(b)
            loss = loss_fn(worker(xk), yk)
            (loss * (1.0 / m)).backward()
            losses.append(loss.item())
        before = [p.detach().clone() for p in master.parameters()]
        for p, w in zip(master.parameters(), worker.parameters(), strict=True):
            p.grad = None if w.grad is None else w.grad.clone()
        if clip is not None and exact:
            clip_exactly([p.grad for p in master.parameters()], clip)
        elif clip is not None:
            torch.nn.utils.clip_grad_norm_(master.parameters(), clip)
        optimizer.step()
        ahead = lam * max(delay, 1)
        after = [p.detach() for p in master.parameters()]
        if exact and ahead:
            banks[g + 1] = [torch.lerp(o, p, 1.0 + ahead) for p, o in zip(after, before, strict=True)]
        else:
            banks[g + 1] = [p + ahead * (p - o) for p, o in zip(after, before, strict=True)]
    return losses, master


def clip_exactly(grads, most):
    norm = math.sqrt(math.fsum(float(grad.norm()) ** 2 for grad in grads))
    factor = min(1.0, most / (norm + 1e-6))
    for grad in grads:
        grad.mul_(factor)
