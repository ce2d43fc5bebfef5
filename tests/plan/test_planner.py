"""The search: what it returns always fits and adds up; bad input gets the nearest layout that works."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from itertools import pairwise

import pytest

from slipstream.errors import UserError
from slipstream.models.cut import Layers
from slipstream.models.sizes import preset
from slipstream.plan import planner
from slipstream.plan.candidates import Fitter, shapes
from slipstream.plan.devices import GIB, Cluster, find_device
from slipstream.plan.explain import explain, losses, parse_count, paying_batches
from slipstream.plan.layout import Job, why_not
from slipstream.plan.penalty import Penalty, load_penalties, penalty_at
from slipstream.plan.planner import plan
from slipstream.plan.price import Price
from slipstream.plan.throughput import Speed
from slipstream.plan.written import to_json, to_toml


def job(
    model: str = "smollm2-1.7b", devices: int = 8, device: str = "a100-40g", batch: int = 2**20, **rest
) -> Job:
    return Job(preset(model), Cluster(find_device(device), devices), batch, 2048, **rest)


@pytest.fixture(scope="module")
def result():
    return plan(job())


@pytest.mark.bench
def test_the_10b_moe_on_64_devices_is_planned_in_under_ten_seconds():
    began = time.process_time()  # one thread, nothing to wait for: what others do on the machine is left out
    found = plan(job("moe-10b", 64, "h100", 4 * 2**20))
    assert time.process_time() - began < 10
    assert found.considered > 500


def test_every_layout_fits_keeps_the_batch_and_uses_all_devices(result):
    room = result.job.cluster.device.room_bytes
    for layout in result.layouts:
        shape = layout.shape
        assert shape.stages * shape.data_ranks == 8
        assert shape.data_ranks * shape.microbatches * shape.microbatch_size == result.job.sequences
        assert layout.memory_bytes <= room
        edges = [0, *(part.stop for part in layout.cut)]
        assert edges[-1] == 24
        assert list(layout.cut) == [Layers(*edge) for edge in pairwise(edges)]
        assert len(layout.cut) == shape.model_stages
        assert shape.stages == 1 or shape.microbatches >= shape.stages


def test_ranking_is_by_time_to_loss_and_both_kinds_are_there(result):
    scores = [layout.score for layout in result.layouts]
    assert scores == sorted(scores, reverse=True)
    assert {layout.delay for layout in result.layouts} == {0, 1}
    assert result.net_gain(result.best_synchronous) == 1.0
    asynchronous = result.best_asynchronous
    shape = asynchronous.shape
    assert shape.old == shape.cutover / shape.microbatches < 1, "only what must be old is"
    penalty = penalty_at(result.job.penalties, result.price.plain, shape.old)
    assert 1 < penalty < result.price.plain.penalty
    assert asynchronous.score == pytest.approx(asynchronous.tokens_per_second / penalty)


def test_a_larger_penalty_never_helps_asynchrony(result):
    table = (Penalty("muon", "error_feedback", 20.0, 1e6, 1e9),)
    worse = plan(job(penalties=table))
    assert not worse.best.shape.asynchronous
    assert "does not pay" in explain(worse)[0]
    late = worse.best_asynchronous
    assert late.penalty == pytest.approx(1 + 19 * late.shape.old)
    assert worse.net_gain(late) < result.net_gain(result.best_asynchronous)


def test_a_synchronous_schedule_needs_no_token_penalty():
    """AdEMAMix's delay has not been measured where it trains, which says nothing about its 1F1B."""
    found = plan(job(optimizer="ademamix", schedule="1f1b", stages=4))
    assert "Only synchronous" in explain(found)[0]
    assert to_json(found, "smollm2-1.7b")["penalty"] is None
    with pytest.raises(UserError, match=r"5 stages do not divide 8 devices.*works: 1f1b"):
        plan(job(optimizer="ademamix", schedule="1f1b", stages=5))
    for free in ({}, {"schedule": "2bw"}):
        with pytest.raises(
            UserError, match=r"does not know the optimizer 'ademamx'. Did you mean 'ademamix'"
        ):
            plan(job(optimizer="ademamx", stages=4, **free))
        with pytest.raises(UserError, match="no entry for ademamix"):
            plan(job(optimizer="ademamix", stages=4, **free))


def test_asynchrony_pays_where_stages_are_many_and_microbatches_few():
    free = (Penalty("muon", "error_feedback", 1.0, 1e6, 1e9),)
    few = plan(job(stages=8, microbatch_size=1, batch=2**15, penalties=free))
    assert few.best.shape.asynchronous
    assert "Asynchrony pays" in explain(few)[0]
    many = plan(job(stages=8, microbatch_size=1, batch=2**21, penalties=free))
    gain = many.net_gain(many.best_asynchronous)
    level = "makes no difference" in explain(many)[0]
    assert level == (abs(gain - 1) < 0.002)
    assert few.net_gain(few.best_asynchronous) > many.net_gain(many.best_asynchronous)


def test_memory_per_device_falls_with_more_stages():
    held = [plan(job(schedule="1f1b", stages=p, microbatch_size=8 // p)).best.memory_bytes for p in (2, 4, 8)]
    assert held == sorted(held, reverse=True)


def test_more_jitter_is_slower():
    calm, rough = (
        plan(
            replace(
                job(schedule="2bw", stages=4, microbatch_size=2 * 2),
                cluster=Cluster(find_device("a100-40g"), 8, j),
            )
        )
        for j in (0.0, 0.3)
    )
    assert rough.best.tokens_per_second < calm.best.tokens_per_second


def test_lost_time_adds_up(result):
    for layout in result.layouts:
        spent = losses(layout)
        assert sum(spent.values()) == pytest.approx(layout.speed.seconds, rel=1e-9)
        assert min(spent.values()) >= 0


def test_break_even_batch_is_where_both_times_meet():
    found = plan(job(stages=8, batch=2**17))
    asynchronous, synchronous = found.best_asynchronous, found.best_synchronous
    ((least, batch),) = paying_batches(asynchronous, synchronous, 2**17, penalty=lambda old: 1.02)
    assert least == 0

    def seconds(layout, tokens):
        spent = losses(layout)
        fixed = spent["update"] + spent["waiting"]
        return fixed + (layout.speed.seconds - fixed) * tokens / 2**17

    assert 1.02 * seconds(asynchronous, batch) == pytest.approx(seconds(synchronous, batch))


OWN = tuple(entry for entry in load_penalties() if entry.source.startswith("study "))


def test_the_old_share_of_another_batch_is_what_its_plan_has():
    """Twice the batch: as many microbatches old, of twice as many, also where few of them were all old."""
    for device, old in (("a100-40g", 9), ("cpu", 13)):
        cluster = Cluster(find_device(device, memory_bytes=64e9), 8)
        given = job(devices=8, stages=8, microbatch_size=1, batch=2**14, penalties=OWN)
        found = plan(replace(given, cluster=cluster))
        layout = found.best_asynchronous
        assert (layout.shape.cutover, layout.shape.microbatches) == (8, 8)
        seen: list[float] = []
        paying_batches(layout, found.best_synchronous, 2**14, lambda old, to=seen: to.append(old) or 1.0)
        assert max(seen) == 1.0
        assert min(seen) == pytest.approx(old / 8 / 1e4), f"{old} of them, of ten thousand times as many"


def test_a_larger_batch_is_less_old_and_so_pays_where_a_smaller_one_does():
    """The sentence against plans of those batches: with the penalty as it is at one batch it would stop paying."""
    for batch in (2**16, 2**18, 2**20):
        found = plan(job(devices=16, stages=16, microbatch_size=1, batch=batch, penalties=OWN))
        assert found.net_gain(found.best_asynchronous) > 1
        (told,) = (line for line in explain(found) if line.startswith("Break-even"))
        assert told.endswith("less of each batch old the larger it is, it pays at every batch size.")


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (2**17, {}),
        (2**18, {"stages": 8}),
        (2**17, {"stages": 8, "penalties": OWN}),
        (2**18, {"stages": 8, "optimizer": "adamw"}),
    ],
)
def test_no_depth_is_lost_before_its_old_part_was_counted(batch, options, monkeypatch):
    """The search against one that simulates every shape that fits."""
    wanted = job(batch=batch, schedule="2bw", **options)
    found = plan(wanted).best

    def every(job, entries):
        return [planner._layout(job, entry) for entry in entries]

    monkeypatch.setattr(planner, "_simulated", every)
    best = plan(wanted).best
    assert found.score > 0.998 * best.score, (found.shape, best.shape)


@pytest.mark.parametrize(
    ("model", "device", "devices", "batch", "schedule"),
    [
        ("smollm2-1.7b", "a100-40g", 4, 2**18, "interleaved_1f1b"),
        # Of two depths the closed form puts the deeper one first, and the simulator the other.
        ("moe-10b", "h100", 16, 2**17, "2bw"),
    ],
)
def test_the_best_that_can_be_run_is_among_what_is_simulated(
    model, device, devices, batch, schedule, monkeypatch
):
    """The search against one that simulates every shape that fits."""

    def best_to_run():
        found = plan(job(model, devices, device, batch, schedule=schedule))
        return max(layout.score for layout in found.layouts if not why_not(found.job, layout.shape))

    score = best_to_run()

    def every(job, entries):
        return [planner._layout(job, entry) for entry in entries]

    monkeypatch.setattr(planner, "_simulated", every)
    assert score > 0.998 * best_to_run()


@pytest.mark.parametrize(
    ("ours", "theirs", "cutover", "penalties", "words"),
    [  # seconds of work, and of the update and waiting, at a batch of 1M tokens
        ((1.0, 0.0), (1.0, 0.1), None, {1.0: 1.05}, "stops paying at about 2.1M tokens"),
        ((1.0, 0.0), (1.0, 0.1), None, {1.0: 1.0}, "pays at every batch size"),
        ((1.0, 0.1), (1.05, 0.1), None, {1.0: 1.1}, "pays at no batch size"),
        ((1.0, 0.2), (1.25, 0.0), None, {1.0: 1.1}, "pays only above about 1.54M tokens"),
        # A small batch is mostly old, in a large one the slower layout counts: it pays between.
        (
            (1.02, 0.0),
            (1.0, 0.1),
            9,
            {0.1: 1.001, 1.0: 3.0},
            "pays only from about 1.12M to about 5.17M tokens a batch",
        ),
        (
            (0.98, 0.0),
            (1.0, 0.1),
            9,
            {0.05: 1.3, 1.0: 1.0},
            "pays only up to about 520k and above about 38.1M tokens a batch",
        ),
    ],
)
def test_the_break_even_sentence_agrees_with_the_verdict(result, ours, theirs, cutover, penalties, words):
    def layout(shown, schedule, seconds, penalty):
        work, waiting = seconds
        flat = (work / 128,) * 8
        shape = replace(shown.shape, schedule=schedule, stages=8, microbatches=64, checkpointing=False)
        return replace(
            shown,
            shape=replace(shape, cutover=None if schedule == "1f1b" else cutover, in_flight=None),
            times=replace(
                shown.times, forward=flat, backward=flat, update=(0.0,) * 8, reduction=(0.0,) * 8, norm=0.0
            ),
            speed=Speed(work + waiting, 0.0),
            tokens_per_second=2**20 / (work + waiting),
            penalty=penalty,
        )

    table = tuple(replace(result.price.plain, penalty=value, old=old) for old, value in penalties.items())
    here = penalty_at(table, table[-1], 1.0 if cutover is None else cutover / 64)
    asynchronous = layout(result.best_asynchronous, "pipedream_2bw", ours, here)
    synchronous = layout(result.best_synchronous, "1f1b", theirs, 1.0)
    made = replace(
        result,
        job=replace(result.job, penalties=table),
        price=Price(table, table[-1]),
        layouts=tuple(sorted((asynchronous, synchronous), key=lambda one: -one.score)),
    )
    assert words in next(line for line in explain(made) if line.startswith("Break-even"))


def test_the_toml_of_a_plan_is_a_valid_run(result, tmp_path):
    config = pytest.importorskip("slipstream.config")
    for layout in result.layouts:
        text = to_toml(result, layout, "smollm2-1.7b")
        if text is None:
            synchronous = not layout.shape.asynchronous
            assert layout.shape.schedule in ("zb_h1", "dualpipev") or (
                synchronous and layout.shape.shard_optimizer
            )
            continue
        path = tmp_path / "run.toml"
        path.write_text(text)
        loaded = config.load(path)
        assert loaded.tokens_per_step == result.job.batch_tokens
        assert loaded.pipeline.stages == layout.shape.stages
        spread = replace(layout, shape=replace(layout.shape, pipeline_inside=False))
        assert to_toml(result, spread, "smollm2-1.7b") is None  # ranks of one pipeline are neighbours


def test_train_has_no_experts_under_zbv(result):
    (shape, *_) = (
        one.shape
        for one in result.layouts
        if one.shape.schedule == "zbv" and not why_not(result.job, one.shape)
    )
    assert why_not(replace(result.job, config=preset("moe-94m")), shape)


def test_json_holds_every_figure(result):
    import json

    tree = json.loads(json.dumps(to_json(result, "smollm2-1.7b")))
    first = tree["layouts"][0]
    assert first["memory_bytes"] == max(rank["total"] for rank in first["memory"])
    for key in ("net_gain", "tokens_per_second", "mfu", "idle", "delay", "boundaries"):
        assert key in first


@pytest.mark.parametrize(
    ("forced", "nearest"),
    [
        ({"stages": 3}, "P=4"),
        ({"stages": 5}, "P=4"),
        ({"microbatches": 7}, "m=8"),
        ({"microbatches": 30}, "m=32"),
    ],
)
def test_the_nearest_layout_is_near(forced, nearest):
    with pytest.raises(UserError, match=rf"The nearest layout that works: .*\b{nearest},"):
        plan(job(**forced))


DELAY_COMPENSATION = (Penalty("muon", "delay_compensation", 1.1, 2**20, 1e9),)


@pytest.mark.parametrize(
    "given",
    [
        job("llama3-8b", 16, "rtx4090", 2**18),
        job("llama3-8b", 16, "rtx4090", 2**17, stages=16, microbatches=32, schedule="2bw"),
        job("llama3-8b", 4, "h100", 2**16, stages=2, microbatches=4, schedule="2bw"),
        job(schedule="2bw", correction="delay_compensation", penalties=DELAY_COMPENSATION),
    ],
)
def test_memory_is_that_of_the_cutover_which_is_run(given):
    """With everything old the master is whole, which takes more: such a layout fits with that, or is not there."""
    found, fitter = plan(given), Fitter(given)
    for layout in found.layouts:
        shape = layout.shape
        if shape.asynchronous:
            named = replace(shape, cutover=shape.cutover or shape.microbatches)
            assert fitter.memory(named, layout.cut) == layout.memory
            assert layout.memory_bytes <= given.cluster.device.room_bytes
    all_old = [layout for layout in found.layouts if layout.shape.old == 1]
    assert all_old
    if given.correction == "error_feedback":  # which takes other memory for what is fresh
        assert all(fitter.memory(replace(one.shape, cutover=1), one.cut) != one.memory for one in all_old)


def test_forced_m_below_p_names_the_law_and_a_layout_that_works():
    with pytest.raises(
        UserError, match=r"4 microbatches cannot fill 8 stages.*nearest layout that works: "
    ) as caught:
        plan(job(schedule="2bw", stages=8, microbatches=4))
    found = re.search(r"P=(\d+), D=(\d+), m=(\d+)", str(caught.value))
    assert found
    stages, ranks, microbatches = map(int, found.groups())
    assert stages * ranks == 8
    assert microbatches >= stages
    assert plan(job(stages=stages, microbatches=microbatches)).layouts


@pytest.mark.parametrize(
    ("forced", "words"),
    [
        ({"stages": 5}, "5 stages do not divide 8 devices"),
        ({"stages": 32, "schedule": "1f1b"}, "32 stages do not divide"),
        ({"microbatches": 7}, "nearest layout that works"),
        ({"microbatch_size": 3}, r"nearest layout that works.*\(--microbatch-size \d+\)"),
        ({"schedule": "1f1bb"}, "Did you mean '1f1b'"),
        ({"schedule": "pipedream", "stages": 4}, "does not rank 'pipedream'"),
        ({"schedule": "paci", "stages": 4, "microbatches": 4}, "does not rank 'paci'"),
    ],
)
def test_other_impossible_wishes(forced, words):
    with pytest.raises(UserError, match=words):
        plan(job(**forced))


def test_very_many_microbatches_are_planned_only_where_they_are_forced():
    short = replace(job(batch=2**18), sequence=2)
    assert max(shape.microbatches for shape in shapes(short)) == 4096
    assert {shape.microbatches for shape in shapes(replace(short, microbatches=8192))} == {8192}


def test_a_model_that_cannot_fit_says_what_it_needs_and_what_would_do():
    with pytest.raises(UserError, match=r"do not fit on 2 x a100-40g.*needs [\d.]+ GiB per device") as caught:
        plan(job("moe-10b", 2))
    devices = re.search(r"nearest that works: (\d+) devices", str(caught.value))
    assert devices
    assert plan(job("moe-10b", int(devices.group(1)))).layouts


def test_looking_for_what_would_do_searches_each_number_of_devices_once(monkeypatch):
    """A search that fails does not look for what would do in its turn: that took minutes."""
    searched = []
    monkeypatch.setattr(planner, "shapes", lambda one: searched.append(one.cluster.devices) or shapes(one))
    device = replace(find_device("h100"), memory_bytes=1.001 * GIB)
    with pytest.raises(UserError, match="Nor on 32 times as many"):
        plan(Job(preset("cpu-default"), Cluster(device, 2), 2**17, 128, stages=2, microbatch_size=1))
    assert len(searched) <= 12


def test_no_memory_figure_is_an_error():
    device = replace(find_device("h100"), memory_bytes=None)
    with pytest.raises(UserError, match="no memory figure"):
        plan(Job(preset("cpu-default"), Cluster(device, 2), 4096, 128))


def test_a_batch_that_is_no_whole_number_of_sequences_names_the_nearest():
    with pytest.raises(UserError, match="--batch-tokens 1048576"):
        Job(preset("cpu-default"), Cluster(find_device("h100"), 2), 1_048_000, 2048)


def test_a_tight_memory_shifts_layers_off_the_full_stage():
    roomy = plan(job(schedule="2bw", stages=4, microbatch_size=2, devices=4, device="h100"))
    tight_memory = roomy.best.memory_bytes * 0.97 / 0.94 + GIB
    tight = plan(replace(roomy.job, cluster=Cluster(find_device("h100", memory_bytes=tight_memory), 4)))
    assert tight.best.memory_bytes < roomy.best.memory_bytes


def test_a_stage_that_was_cut_again_fits_too():
    """Where the head's working set hides the update's, two layers do not tell what ten of them need."""
    device = replace(find_device("a100-40g"), memory_bytes=3.89 * GIB)
    tight = Job(preset("smollm2-135m"), Cluster(device, 3), 32 * 256, 256)
    fitter = Fitter(tight)
    found = {shape: fitter.fit(shape, device.room_bytes) for shape in shapes(tight)}
    assert any(
        entry and entry[0] != fitter.cut(shape) for shape, entry in found.items()
    )  # some were cut again
    for entry in filter(None, found.values()):
        assert max(rank.total for rank in entry[1]) <= device.room_bytes


@pytest.mark.parametrize(
    ("text", "value"), [("4M", 4 * 2**20), ("512k", 512 * 2**10), ("1_000", 1000), ("200B", 2 * 10**11)]
)
def test_parse_count(text, value):
    assert parse_count(text) == value


@pytest.mark.parametrize("text", ["", "M", "-4", "0", "nan", "1.5", "4X"])
def test_parse_count_refuses(text):
    with pytest.raises(UserError, match="not a number of tokens"):
        parse_count(text)
