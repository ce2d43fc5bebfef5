"""studies/ladder_30m.py: what it starts is each run of its study, once."""

from scripts import loaded
from slipstream.study.only import matching
from slipstream.study.parse import load_study


def test_each_run_of_the_study_is_started_once():
    with loaded("ladder_30m") as script:
        study = load_study(script.STUDY)
        points = list(study.expand({}).points)
        labels = study.labels()
        asked = [*script.WHOLE.values(), *script.SHORT.values()]
        found = [matching(points, only, labels) for only in asked]
    assert [len(each) for each in found] == [1] * len(asked)
    assert {each[0].digest for each in found} == {point.digest for point in points}
