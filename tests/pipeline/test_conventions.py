"""Torch's calling conventions: chunk specs, ready-made microbatches, hooks, schedulers, what is refused by name."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.microbatch import TensorChunkSpec

from pipeline import tiny
from slipstream import CheckpointError, Emulator, Schedule2BW, UserError, cloned_state
from slipstream.pipeline.peers import buckets

M = 4


@pytest.fixture(scope="module", autouse=True)
def process_group(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "file"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Masked(nn.Module):
    """Mixes the columns of each row by a table that is the same for all rows."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(8, 8)

    def forward(self, x, mask=None):
        return self.layer(x if mask is None else x @ mask)


def mean_square(output, target, weight=1.0):
    return (output - target).square().mean() * weight


def schedule(module=None, m=M, loss_fn=mean_square, optimizer=tiny.adamw, **options):
    stage = PipelineStage(module or Masked(), 0, 1, torch.device("cpu"))
    return Schedule2BW(stage, m, loss_fn, optimizer, **{"timeout": 20, "cutover": m, **options})


def rows(group, count=8):
    return torch.rand(count, 8, generator=torch.Generator().manual_seed(group))


def weights(engine):
    engine.drain()
    return [p.detach().clone() for p in engine.master.parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_a_table_for_all_rows_is_not_cut_without_a_word():
    """An [8, 8] mask became four of [2, 8]."""
    mask = torch.eye(8)
    with pytest.raises(UserError, match=r"'mask' has shape \(8, 8\) in a group of 8 rows"):
        schedule().step(rows(0), target=rows(1), mask=mask)
    with pytest.raises(UserError, match=r"'mask' has shape"):
        Emulator(Masked(), M, mean_square, tiny.adamw).step(rows(0), rows(1), mask=mask)
    told = schedule(kwargs_chunk_spec={"mask": None})
    by_position = schedule(args_chunk_spec=(TensorChunkSpec(0), None))
    emulator = Emulator(Masked(), M, mean_square, tiny.adamw, kwargs_chunk_spec={"mask": None})
    for group in range(3):
        told.step(rows(group), target=rows(group + 9), mask=mask)
        by_position.step(rows(group), mask, target=rows(group + 9))
        emulator.step(rows(group), rows(group + 9), mask=mask)
    assert same(weights(told), weights(emulator))
    assert same(weights(by_position), weights(emulator))


def test_a_chunk_spec_cuts_where_it_says():
    turned = nn.Sequential(nn.Linear(8, 8))
    one = schedule(copy.deepcopy(turned), args_chunk_spec=(TensorChunkSpec(0),))
    plain = schedule(copy.deepcopy(turned))
    one.step(rows(0), target=rows(1))
    plain.step(rows(0), target=rows(1))
    assert same(weights(one), weights(plain))

    class Turned(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(turned)

        def forward(self, x):
            return self.inner(x.T)

    other = schedule(Turned(), args_chunk_spec=(TensorChunkSpec(1),))
    other.step(rows(0).T, target=rows(1))
    assert same(weights(other), weights(plain))
    with pytest.raises(UserError, match="cuts dimension 2"):
        schedule(args_chunk_spec=(TensorChunkSpec(2),)).step(rows(0), target=rows(1))
    with pytest.raises(UserError, match="2 entries for 1 positional"):
        schedule(args_chunk_spec=(None, None)).step(rows(0), target=rows(1))


def test_lists_of_microbatches_equal_whole_batches():
    whole, listed = schedule(kwargs_chunk_spec={"mask": None}), schedule()
    mask = torch.eye(8)
    for group in range(3):
        x, y = rows(group), rows(group + 9)
        first, second = [], []
        out = whole.step(x, target=y, losses=first, mask=mask)
        again = listed.step(
            arg_mbs=[(part,) for part in x.chunk(M)],
            kwarg_mbs=[{"mask": mask}] * M,
            target_mbs=list(y.chunk(M)),
            losses=second,
        )
        assert torch.equal(out, again)
        assert first == second
    assert same(weights(whole), weights(listed))
    found = listed.eval(arg_mbs=[(part,) for part in x.chunk(M)], kwarg_mbs=[{}] * M)
    assert torch.equal(found, listed.eval(x))
    assert listed.eval(x, target=y, losses=first, return_outputs=False) is None
    assert torch.equal(listed.eval(x, target=y), found)
    with pytest.raises(UserError, match="must be a list of 4"):
        listed.step(arg_mbs=[(x,)], target_mbs=[y])


def test_one_loop_drives_the_emulator_and_the_schedule():
    """The same calls, hook and state: what the trainer's loop does with either."""
    followed = []
    for engine in (schedule(cutover=2), Emulator(Masked(), M, mean_square, tiny.adamw, cutover=2)):
        boundaries, losses, seen = {}, [], []

        def hook(group, engine=engine, boundaries=boundaries):
            boundaries[group] = cloned_state(engine.capture())

        engine.after_update = hook
        for group in range(4):
            assert not engine.stopping()
            engine.step(rows(group), target=rows(group + 9), losses=losses, return_outputs=False)
            seen += [loss.item() for loss in losses]
        engine.drain()
        engine.eval(rows(0), target=rows(9), losses=losses, return_outputs=False)
        engine.request_stop()
        assert engine.stopping() or isinstance(engine, Schedule2BW)  # there it travels with an update
        assert sorted(boundaries) == sorted(engine.grad_norms) == [0, 1, 2, 3]
        assert all(state["group"] == group + 1 for group, state in boundaries.items())
        followed.append((seen, [loss.item() for loss in losses], engine.grad_norms, boundaries))
    (*numbers, states), (*others, same_states) = followed
    assert numbers == others
    for group, state in states.items():
        for section in ("master", *(f"banks/{name}" for name in state["banks"])):
            one, other = state, same_states[group]
            for key in section.split("/"):
                one, other = one[key], other[key]
            assert one.keys() == other.keys()
            assert same(one.values(), other.values()), (group, section)


def test_what_an_emulator_cannot_do_is_refused_by_name():
    emulator = Emulator(Masked(), M, mean_square, tiny.adamw)
    with pytest.raises(UserError, match="keeps no outputs"):
        emulator.step(rows(0), target=rows(1), return_outputs=True)
    with pytest.raises(UserError, match="Give the target once"):
        emulator.step(rows(0), rows(1), target=rows(1))
    emulator.after_update = lambda group: emulator.drain()
    with pytest.raises(UserError, match=r"use capture\(\) there"):
        emulator.step(rows(0), rows(1))


def test_a_step_returns_outputs_unless_told_not_to():
    engine = schedule()
    assert engine.step(rows(0), target=rows(1)).shape == (8, 8)
    assert engine.step(rows(0), target=rows(1), return_outputs=False) is None


def test_loss_kwargs_and_summed_gradients():
    """A sum over microbatches of a loss that is divided already is the mean of one that is not."""
    mean = schedule(max_grad_norm=0.1)
    summed = schedule(max_grad_norm=0.1, scale_grads=False)
    emulated = Emulator(
        Masked(), M, lambda o, y: mean_square(o, y, 0.25), tiny.adamw, max_grad_norm=0.1, scale_grads=False
    )
    for group in range(3):
        x, y = rows(group), rows(group + 9)
        mean.step(x, target=y)
        summed.step(x, target=y, loss_kwargs={"weight": 0.25})
        emulated.step(x, y)
    for one, other in zip(weights(mean), weights(summed), strict=True):
        torch.testing.assert_close(one, other)
    assert same(weights(summed), weights(emulated))


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_hooks_of_an_optimizer_fire_once_for_each_update(name):
    from pipeline.citizen_jobs import optimizer

    engine = schedule(optimizer=lambda module: optimizer(name, module))
    fired = []
    engine.optimizer.register_step_pre_hook(lambda *_: fired.append("before"))
    engine.optimizer.register_step_post_hook(lambda *_: fired.append("after"))
    for group in range(3):
        engine.step(rows(group), target=rows(group + 9))
    engine.drain()
    assert fired == ["before", "after"] * 3


def test_a_scheduler_over_several_parameter_groups():
    def two_groups(module):
        weight, bias = module.layer.weight, module.layer.bias
        return torch.optim.AdamW([{"params": [weight], "lr": 1e-2}, {"params": [bias], "lr": 1e-3}])

    engine = schedule(optimizer=two_groups, correction="none", synchronous=100)
    plain = Masked()
    reference = two_groups(plain)
    lambdas = [lambda g: 1 / (1 + g), lambda g: 0.5**g]
    schedulers = [torch.optim.lr_scheduler.LambdaLR(o, lambdas) for o in (engine.optimizer, reference)]
    for group in range(4):
        x, y = rows(group), rows(group + 9)
        engine.step(x, target=y)
        reference.zero_grad()
        for part, aim in zip(x.chunk(M), y.chunk(M), strict=True):
            (mean_square(plain(part), aim) * 0.25).backward()
        reference.step()
        for scheduler in schedulers:
            scheduler.step()
    assert same(weights(engine), [p.detach() for p in plain.parameters()])


def test_a_master_changed_from_outside_is_spread():
    engine = schedule(correction="none")
    engine.step(rows(0), target=rows(1))
    engine.drain()
    with torch.no_grad():
        engine.master.layer.weight.zero_()
        engine.master.layer.bias.zero_()
    engine.spread_master()
    for _ in range(2):
        losses = []
        engine.step(rows(0), target=torch.zeros(8, 8), losses=losses)
        assert [loss.item() for loss in losses] == [0.0] * M


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (Masked().half(), {}, "'layer.weight' in float16 needs a gradient scaler"),
        (Masked(), {"bank_dtype": torch.float16}, "bank_dtype=torch.float16 needs a gradient scaler"),
        (Masked(), {"data_reduction": "max"}, "a 'mean' or a 'sum'"),
        (Masked(), {"replicas": [Masked()]}, "1 ready replicas; .* call for 2"),
        (Masked(), {"replicas": [], "prepare": lambda m: None}, "not both"),
        (Masked().to("meta"), {}, "'layer.weight' is on the meta device still"),
    ],
)
def test_refused_by_name(module, options, message):
    with pytest.raises(UserError, match=message):
        schedule(module, **options)


def test_replicas_that_are_ready_and_stages_without_values():
    """A stage on the meta device, made real by `prepare`; and replicas that the caller made."""
    expected = schedule()

    def made(module):
        module.to_empty(device="cpu")
        module.load_state_dict(Masked().state_dict())

    with torch.device("meta"):
        bare = Masked()
    found = [
        schedule(bare, prepare=made),
        schedule(replicas=[Masked(), Masked()]),
    ]
    for group in range(4):
        for engine in (expected, *found):
            engine.step(rows(group), target=rows(group + 9))
    for engine in found:
        assert same(weights(engine), weights(expected))


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (("dp", "cp"), "context parallelism is not a layout"),
        (("ep",), "expert parallelism is not a layout"),
        (("rows",), "'rows' says nothing to the engine"),
        (None, "have no names"),
    ],
)
def test_mesh_dimensions_are_known_by_name_or_refused(names, message):
    mesh = init_device_mesh("cpu", (1,) * (len(names) if names else 1), mesh_dim_names=names)
    with pytest.raises(UserError, match=message):
        schedule(mesh=mesh)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": torch.optim.AdamW}, "optimizer must be a callable that takes the master module"),
        ({"optimizer": lambda module: None}, r"optimizer\(module\) returned NoneType"),
        ({"loss_fn": "mse"}, r"loss_fn='mse': give a function"),
        ({"max_grad_norm": "1"}, r"max_grad_norm='1': give a norm"),
        ({"bank_dtype": "bfloat16"}, r"bank_dtype='bfloat16': give a dtype"),
        ({"synchronous": [1]}, r"synchronous=\[1\]: give the number"),
        ({"tied": ["layer.weight"]}, r"tied=\['layer.weight'\]: give a dictionary"),
    ],
)
def test_what_an_argument_is_not(options, message):
    with pytest.raises(UserError, match=message):
        schedule(**options)
    if "tied" not in options:
        with pytest.raises(UserError, match=message):
            Emulator(Masked(), M, **{"loss_fn": mean_square, "optimizer": tiny.adamw, **options})


def test_what_is_no_state_of_this_schedule():
    engine = schedule()
    with pytest.raises(CheckpointError, match=r"not a schedule's state: it has 'layer.weight'"):
        engine.load_state_dict(engine.master.state_dict())
    with pytest.raises(CheckpointError, match="has no dampening, momentum"):
        schedule(optimizer=tiny.momentum).load_state_dict(engine.state_dict())


def test_a_mesh_or_a_data_group():
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    with pytest.raises(UserError, match="not both"):
        schedule(mesh=mesh, data_group=dist.group.WORLD)


def test_a_capture_is_live_and_a_clone_is_not():
    engine = schedule()
    engine.step(rows(0), target=rows(1))
    engine.drain()
    live, kept = engine.capture(), cloned_state(engine.capture())
    weight = engine.master.layer.weight
    assert live["master"]["layer.weight"].data_ptr() == weight.data_ptr()
    assert live["optimizer"]["layer.weight"]["exp_avg"] is engine.optimizer.state[weight]["exp_avg"]
    before = weight.detach().clone()
    engine.step(rows(2), target=rows(3))
    engine.drain()
    assert torch.equal(kept["master"]["layer.weight"], before)
    assert not torch.equal(live["master"]["layer.weight"], before)


def test_a_state_of_the_first_format_is_read():
    """Banks went by the number of the group that reads them."""
    engine, again = schedule(), schedule()
    for group in range(3):
        engine.step(rows(group), target=rows(group + 9))
    state = cloned_state(engine.state_dict())
    state["banks"] = {"3": state["banks"]["current"], "4": state["banks"]["next"]}
    del state["fresh"], state["published"]
    state["format"] = 1
    again.load_state_dict(state)
    for group in range(3, 6):
        for each in (engine, again):
            each.step(rows(group), target=rows(group + 9))
    assert same(weights(engine), weights(again))
    with pytest.raises(CheckpointError, match="reads formats 1 and 2"):
        again.load_state_dict(state | {"format": 3})


def test_ranks_pack_alike_whatever_lies_how_in_memory():
    """Of an expert that got no tokens a rank sends zeros, where another has the transpose of something."""
    shapes = [(3, 2), (20, 10), (4, 4), (30, 9)]
    plain = [torch.zeros(shape) for shape in shapes]
    turned = [torch.randn(shape[::-1]).t() for shape in shapes]
    before = [tensor.clone() for tensor in turned]
    found, other = (buckets(tensors, small=400, limit=500) for tensors in (plain, turned))
    assert [bucket.flat.numel() for bucket in found] == [bucket.flat.numel() for bucket in other]
    for bucket in other:
        bucket.flat.mul_(2)
        bucket.unpack()
    assert all(torch.equal(tensor, 2 * old) for tensor, old in zip(turned, before, strict=True))


def test_messages_are_bounded_and_large_tensors_are_not_copied():
    tensors = [torch.randn(n) for n in (3, 100, 5, 60, 60, 7)] + [
        torch.randn(4, 4).T,
        torch.ones(2).bfloat16(),
    ]
    before = [tensor.clone() for tensor in tensors]
    found = buckets(tensors, small=400, limit=500)
    assert next(bucket.flat for bucket in found if not bucket.tensors) is tensors[1]
    assert all(bucket.flat.nbytes <= 500 for bucket in found if bucket.tensors)
    for bucket in found:
        bucket.flat.mul_(2)
        bucket.unpack()
    assert all(torch.equal(tensor, 2 * old) for tensor, old in zip(tensors, before, strict=True))
