"""A rank of a run whose stages are recorded, on a CPU."""

from unittest import mock

from pipeline.recorded import Made
from slipstream.train import build, session


def run_recorded(world, config):
    """How many forwards and backwards were replayed, and how many losses were computed by a replay."""
    made, losses = [], []
    loss_function = build.loss_function

    def preparation(_):
        made.append(Made())
        return made[-1].prepare

    def watched(given):
        loss = loss_function(given)

        def counted(output, target):
            losses.append(any(each.replaying for each in made))
            return loss(output, target)

        return counted

    with (
        mock.patch.object(build, "preparation", preparation),
        mock.patch.object(build, "loss_function", watched),
    ):
        session.run_rank(world, config)
    return sum(each.forwards for each in made), sum(each.backwards for each in made), sum(losses)
