"""What an aggregator may ask of a site's columns: no more than a survey asks."""

import asyncio

import numpy as np
import pytest

from fedtrain.config import Config
from fedtrain.messages import Evaluation, Failure
from fedtrain.questions import Cells, Column, Powers, Question
from fedtrain.runtime.sites.statistics import DataStatistics
from fedtrain.statistics import survey
from fedtrain.statistics.sums import read
from tests.test_statistics import COLUMNS, Data, made, tally


def site(folder, columns=COLUMNS, values=None):
    config = Config.of({"stats": {"allow": True}})
    return DataStatistics("a", Data(columns, made(1, 50) if values is None else values), config, folder)


def steps(column, many):
    return Cells(column, tuple(k / 1000 for k in range(many)))


@pytest.mark.parametrize("number", range(4))
def test_e5_a_question_for_every_float_of_a_column_is_refused(tmp_path, number):
    """80,000 edges in steps of 0.001 gave the sorted values of one column over all sites."""
    for cells in ((steps(0, 80_000),), tuple(steps(0, 70 + k) for k in range(40))):
        found = asyncio.run(site(tmp_path).answer(tally(number, Question(cells))))
        assert isinstance(found, Failure)
        assert f"question {number + 1} asks" in found.reason
        assert "of column 'shifted', and a survey asks" in found.reason
    several = Question(powers=tuple(Powers(0, k) for k in range(3)))
    assert isinstance(asyncio.run(site(tmp_path).answer(tally(number, several))), Failure)


def test_e5_the_largest_question_of_a_survey_is_answered(tmp_path):
    """In the open, with most bins, and a column of more categories than a survey looks for."""
    labels = tuple(f"k{k}" for k in range(200))
    columns = (*COLUMNS[:-1], Column("kind", "category", 1, labels))
    values = made(1, 900)
    values[3] = np.random.default_rng(2).normal(size=900)
    asking = survey.surveys(columns, ["a"], 64, openly=True)
    answers, asked, most = site(tmp_path, columns, values), next(asking), 0
    for number in range(survey.rounds(len(columns))):
        most = max(most, sum(len(cells.edges) + 1 for cells in asked["a"].cells if cells.column == 3))
        found = asyncio.run(answers.answer(tally(number, asked["a"], 5)))
        assert isinstance(found, Evaluation), found
        assert read(asked["a"], found.metrics).rows == 900
        try:
            asked = asking.send({"a": found.metrics})
        except StopIteration:
            break
    assert 500 < most <= survey.most_counts(2, columns[3], openly=True)
