"""Rule 1 of the method, written down independently of the package: the oracle of every exactness test.

z_0 initial, b_0 = z_0
G_g = mean gradient over the m microbatches of group g at z_g (flushed) or b_max(g-d, 0)
z_{g+1} = Optimizer(z_g, G_g);  b_{g+1} = z_{g+1} + lam d (z_{g+1} - z_g)
"""

import copy

import torch


def train(
    module, batches, m, loss_fn, make_optimizer, lam=0.0, clip=None, delay=1, synchronous=lambda g: False
):
    """Returns the losses of every microbatch and the final master."""
    master, worker = copy.deepcopy(module), copy.deepcopy(module)
    optimizer = make_optimizer(master)
    z = [p.detach().clone() for p in master.parameters()]
    banks, losses = {0: z}, []
    for g, (x, y) in enumerate(batches):
        flushed = g == 0 or delay == 0 or synchronous(g) or synchronous(g - 1)
        read = [p.detach() for p in master.parameters()] if flushed else banks[max(g - delay, 0)]
        for p, b in zip(worker.parameters(), read, strict=True):
            p.data.copy_(b)
            p.grad = None
        for xk, yk in zip(x.chunk(m), y.chunk(m), strict=True):
            loss = loss_fn(worker(xk), yk)
            (loss * (1.0 / m)).backward()
            losses.append(loss.item())
        old = [p.detach().clone() for p in master.parameters()]
        for p, w in zip(master.parameters(), worker.parameters(), strict=True):
            p.grad = None if w.grad is None else w.grad.clone()
        if clip is not None:
            torch.nn.utils.clip_grad_norm_(master.parameters(), clip)
        optimizer.step()
        banks[g + 1] = [
            p.detach() + lam * max(delay, 1) * (p.detach() - o)
            for p, o in zip(master.parameters(), old, strict=True)
        ]
    return losses, master
