"""Statistics of many sites' data: exact against numpy, the same under masks, and nothing of few examples."""

import asyncio
import json
import math
from contextlib import suppress
from fractions import Fraction
from itertools import pairwise

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import fedtrain
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.errors import BadUpdate, ConfigError, Damaged, TaskError, TooFewSites
from fedtrain.events import silent
from fedtrain.messages import Evaluation, Failure, summed
from fedtrain.pki import issue
from fedtrain.questions import Cells, Column, Describe, Described, Powers, Question, Tally
from fedtrain.runtime.sites import site
from fedtrain.runtime.sites.gate import Gate, bounded
from fedtrain.runtime.sites.statistics import DataStatistics
from fedtrain.runtime.star import aggregator, statistics
from fedtrain.statistics import small, survey
from fedtrain.statistics.report import report, roundest, stricter
from fedtrain.statistics.sums import VALUE_BITS, Moments, Tallies, power_sums, read
from fedtrain.training.columns import ColumnSource
from fedtrain.transport.memory import LocalCohort
from tests.allowed import allowed
from tests.inline import SITES, project

# --- sums and surveys against numpy

COLUMNS = (
    Column("shifted", "float32"), Column("tiny", "float64"), Column("cauchy", "float64"),
    Column("constant", "float64"), Column("codes", "int64"), Column("wide", "int64"),
    Column("huge", "float64"), Column("absent", "float64"), Column("kind", "category", 1, ("x", "y", "z")),
)  # fmt: skip


def made(seed, rows):
    """A site's values, a row a column, with NaN and infinite ones."""
    draw = np.random.default_rng(seed)
    values = np.stack([
        draw.normal(1e6, 1, rows).astype(np.float32).astype(float), draw.exponential(3e-9, rows),
        draw.standard_cauchy(rows), np.full(rows, 0.1), draw.integers(0, 5, rows).astype(float),
        draw.integers(-300, 900, rows).astype(float), draw.normal(0, 1, rows) ** 9 * 1e20,
        np.full(rows, np.nan), draw.integers(0, 3, rows).astype(float),
    ])  # fmt: skip
    gone = draw.random(values.shape) < 0.15
    values[gone] = draw.choice([np.nan, np.inf, -np.inf], gone.sum())
    return values


def answered(question, values, least=0):
    tallies = Tallies(question)
    for part in np.array_split(values, 3, axis=1):  # three batches
        tallies.add(COLUMNS, list(part), part.shape[1])
    return tallies.metrics(least)


def surveyed(sites, openly, least=0, bins=20):
    asking = survey.surveys(COLUMNS, sorted(sites), bins, openly=openly)
    asked, questions = next(asking), 0
    while True:
        questions += 1
        found = {name: answered(asked[name if openly else ""], sites[name], least) for name in sorted(sites)}
        try:
            asked = asking.send(found if openly else {"": summed(found)})
        except StopIteration as end:
            assert questions == survey.rounds(len(COLUMNS))
            return end.value


@pytest.fixture(scope="module")
def ragged():
    return {"a": made(1, 700), "b": made(2, 31), "c": made(3, 2600)}


def test_counts_are_exact_moments_to_1e_12_and_quantiles_within_a_thousandth_of_the_sd(ragged):
    for name, found in surveyed(ragged, openly=True).items():
        values = np.concatenate(list(ragged.values()), axis=1) if name == "" else ragged[name]
        assert [sums.column for sums in found] == list(COLUMNS)
        for sums, column in zip(found, values, strict=True):
            there = np.sort(column[np.isfinite(column)])
            assert (sums.rows, sums.n, sums.missing) == (len(column), len(there), len(column) - len(there))
            if sums.column.name in ("codes", "kind"):
                count = np.bincount(there.astype(int), minlength=len(sums.classes))
                assert sums.classes == count.tolist()
            if sums.column.name in ("absent", "kind"):
                assert (sums.moments, sums.quantiles) == (None, {})
                continue
            exact = [Fraction(value) for value in there.tolist()]
            mean = sum(exact) / len(exact)
            square = sum((value - mean) ** 2 for value in exact) / (len(exact) - 1)
            assert sums.moments.mean == pytest.approx(float(mean), rel=1e-12)
            assert sums.moments.sd == pytest.approx(math.sqrt(square), rel=1e-12, abs=1e-17)
            assert sums.moments.sd == pytest.approx(there.std(ddof=1), rel=1e-9, abs=1e-16)
            for percent, (low, high) in sums.quantiles.items():
                quantile = np.quantile(there, percent / 100, method="inverted_cdf")
                assert low <= quantile <= high
                assert high - low <= 1e-3 * sums.moments.spread + 1e-15 * abs(quantile)
            assert set(sums.quantiles) == {5, 25, 50, 75, 95}
            if sums.edges:
                ends = pairwise([-np.inf, *sums.edges, np.inf])
                assert sums.counts == [int(((there >= a) & (there < b)).sum()) for a, b in ends]


def test_sums_over_all_sites_alone_give_the_same_bits_as_each_sites_own_answers(ragged):
    openly, masked = surveyed(ragged, openly=True), surveyed(ragged, openly=False)
    assert list(masked) == [""]
    assert masked[""] == openly[""]


def test_however_the_examples_are_dealt_to_sites_the_statistics_are_the_same_bits(ragged):
    pooled = np.concatenate(list(ragged.values()), axis=1)
    mixed = pooled[:, np.random.default_rng(0).permutation(pooled.shape[1])]
    dealt = {f"s{i}": part for i, part in enumerate(np.array_split(mixed, 9, axis=1))}
    assert surveyed(dealt, openly=False) == surveyed({"one": pooled}, openly=False)


def test_more_columns_than_one_question_holds_are_asked_group_by_group():
    columns = [Column(f"c{i}", "float64") for i in range(survey.GROUP + 3)]
    values = list(np.random.default_rng(1).normal(size=(len(columns), 50)))
    sizes, found = [], []

    def asked():
        found.extend((yield from survey.survey(columns, 64)))

    asking = asked()
    with suppress(StopIteration):
        question = next(asking)
        while True:
            tallies = Tallies(question)
            tallies.add(columns, values, 50)
            metrics = tallies.metrics()
            sizes.append(sum(len(total) for total, _ in metrics.values() if isinstance(total, list)))
            question = asking.send(read(question, metrics))
    assert len(sizes) == survey.rounds(len(columns)) == 8
    assert max(sizes) <= fedtrain.messages.MAX_SUMS
    means = [sums.moments.mean for sums in found]
    assert means == pytest.approx([each.mean() for each in values], rel=1e-12)


FLOATS = st.floats(-(2.0**9), 2.0**9, allow_subnormal=True)


@given(hnp.arrays(np.float64, st.integers(1, 40), elements=FLOATS))
def test_sums_of_values_and_squares_are_those_of_whole_units(values):
    unit = Fraction(2) ** (9 - VALUE_BITS)
    whole = [round(Fraction(value) / unit) for value in values.tolist()]
    assert power_sums(values, 9) == (sum(whole), sum(q * q for q in whole))


def test_sums_stay_exact_over_many_chunks():
    values = np.full(300_001, np.nextafter(2.0, 0))
    first, second = power_sums(values, 1)
    assert (first, second) == (300_001 * (2**54 - 2), 300_001 * (2**54 - 2) ** 2)
    assert Moments.of(Powers(0, 1), (first, second), 300_001).sd == 0


@given(hnp.arrays(np.float64, st.integers(2, 60), elements=st.floats(-1e3, 1e3)))
@example(np.array([-4.83178413e-08, 0.0]))  # far smaller than what the sums are counted for
def test_a_quantile_lies_where_cantellis_inequality_says(values):
    moments = Moments.of(Powers(0, 10), power_sums(values, 10), len(values))
    for percent in survey.PERCENT:
        edges = survey.edges_around(moments, percent)
        assert edges[0] <= np.sort(values)[survey.rank(percent, len(values)) - 1] <= edges[-1] or (
            moments.spread == 0
        )


@given(FLOATS, st.floats(1e-9, 10))
def test_the_number_shown_of_a_quantile_is_in_its_interval_with_the_fewest_digits(low, width):
    high = low + width
    found = roundest(low, high)
    assert low <= found <= high
    digits = max(0, -math.floor(math.log10(width)))  # a step of a tenth of the width is always in it
    assert found == pytest.approx(round(found, digits + 1), abs=1e-12)


@pytest.mark.parametrize(
    "numbers",
    [
        {"rows": (3.0, 0.0)},
        {"rows": (3.0, 0.0), "counts": ([1.0, 2.0, 0.0], 0.0)},
        {"rows": (3.0, 0.0), "counts": ([1.0, 2.5, 0.0, 0.0], 0.0)},
        {"rows": (3.0, 0.0), "counts": ([1.0, -2.0, 0.0, 0.0], 0.0)},
        {"rows": (-3.0, 0.0), "counts": ([1.0, 2.0, 0.0, 0.0], 0.0)},
        {"rows": (math.nan, 0.0), "counts": ([1.0, 2.0, 0.0, 0.0], 0.0)},
        {"rows": (3.0, 0.0), "counts": ([1.0, 2.0, 0.0, 0.0], 0.0), "sums": ([1.0], 0.0)},
    ],
)
def test_what_is_no_answer_is_refused(numbers):
    question = Question(cells=(Cells(0, (0.5,)),))
    assert read(question, {"rows": (3.0, 0.0), "counts": ([1.0, 2.0, 0.0, 0.0], 0.0)}).rows == 3
    with pytest.raises(BadUpdate):
        read(question, numbers)


# --- what is not shown

TABLES = hnp.arrays(
    np.int64, hnp.array_shapes(min_dims=2, max_dims=2, max_side=5), elements=st.integers(0, 12)
)


@given(TABLES, st.integers(1, 8))
def test_no_line_has_a_hidden_count_that_follows_from_the_others(sites, least):
    sites = sites.tolist()
    table = sites if len(sites) == 1 else [[sum(column) for column in zip(*sites, strict=True)], *sites]
    hide = small.hidden(table, least)
    lines = [(row, marks) for row, marks in zip(table, hide, strict=True)]
    if len(table) > 1:
        lines += zip(zip(*table, strict=True), zip(*hide, strict=True), strict=True)
    for counts, marks in lines:
        gone = [count for count, mark in zip(counts, marks, strict=True) if mark]
        left = [count for count, mark in zip(counts, marks, strict=True) if not mark]
        assert all(count == 0 or count >= least for count in left)
        assert not gone or not any(left) or (len(gone) > 1 and sum(gone) >= least)


def sums_of(name, n, classes=(), **fields):
    moments = fields.pop("moments", None)
    return survey.ColumnSums(Column(name, "int64"), n, n, 0, moments, list(classes), **fields)


def shown(found, min_cell=5, masks=False):
    return report("r", found, sorted(set(found) - {""}), min_cell, 20, masks=masks, left_out={})


def test_small_counts_and_what_would_tell_them_are_not_shown():
    moments = Moments(30, 0.1, 0.3, 0.3)
    every = {
        "": [sums_of("ill", 90, (60, 30), moments=moments)],
        "a": [sums_of("ill", 30, (28, 2), moments=moments)],
        "b": [sums_of("ill", 30, (20, 10), moments=moments)],
        "c": [sums_of("ill", 30, (12, 18), moments=moments)],
    }
    found = shown(every)
    ill = {name: columns[0] for name, columns in found.by_site.items()}
    assert found["ill"].frequencies == {"0": 60, "1": 30}
    assert ill["a"].frequencies == {"0": None, "1": None}  # 28 is 30 - 2
    hidden = [name for name in "abc" if None in ill[name].frequencies.values()]
    assert len(hidden) == 2  # of one alone it would be 30 less the others
    assert all(ill[name].mean is None for name in hidden)  # n times the mean is the count
    assert all(ill[name].n == 30 for name in "abc")
    assert shown(every, min_cell=1).by_site["a"][0].frequencies == {"0": 28, "1": 2}


def test_of_too_few_values_nothing_is_shown_and_of_quantiles_none_near_an_end():
    moments = Moments(40, 5.0, 2.0, 2.0)
    quantiles = {5: (1.0, 1.0), 25: (3.0, 3.0), 50: (5.0, 5.0), 95: (9.0, 9.0)}
    full = survey.ColumnSums(Column("x", "float64"), 40, 40, 0, moments, quantiles=quantiles)
    few = survey.ColumnSums(Column("y", "float64"), 40, 3, 37, moments, quantiles=quantiles)
    found = shown({"": [full, few]}, masks=True)
    assert found["x"].quantiles == {"5%": None, "25%": 3.0, "50%": 5.0, "95%": None}
    assert found["x"].mean == 5.0
    assert (found["y"].n, found["y"].missing, found["y"].mean, found["y"].quantiles) == (None, None, None, {})


def test_a_column_with_several_values_an_example_needs_as_many_examples():
    column = Column("pixels", "float32", width=100)
    found = shown({"": [survey.ColumnSums(column, 4, 400, 0, Moments(400, 0.5, 0.1, 0.1))]})
    assert (found["pixels"].n, found["pixels"].mean) == (None, None)


def of_counts(sites):
    """A column of categories with these counts at each site, and one of numbers, of which the first count is
    missing and the others are the histogram."""
    table = [[sum(column) for column in zip(*sites, strict=True)], *sites]
    found = {}
    for name, (missing, *bars) in zip(("", *map(str, range(len(sites)))), table, strict=True):
        n, moments = sum(bars), Moments(missing + sum(bars), 1.5, 1.0, 1.0)
        numbers = survey.ColumnSums(
            Column("x", "float64"), n + missing, n, missing, moments if n else None,
            edges=tuple(map(float, bars[1:])), counts=bars,
            quantiles={5: (0.0, 0.0), 50: (1.0, 1.0)} if n else {},
        )  # fmt: skip
        found[name] = [sums_of("ill", moments.n, (missing, *bars), moments=moments), numbers]
    return found


@given(TABLES, st.integers(1, 6), st.integers(1, 6))
def test_a_larger_min_cell_hides_of_shown_statistics_what_it_hides_of_sums(sites, before, more):
    every = of_counts(sites.tolist())
    first = shown(every, before)
    found = stricter(first, before + more)
    assert found.min_cell == before + more
    for old, new in zip(table_of(first), table_of(found), strict=True):
        assert all(b in (None, a) for a, b in zip(old, new, strict=True))  # nothing comes back, or changes
    if before == 1:  # nothing was hidden
        assert found == shown(every, before + more)
    rows = [(columns[k], every[name][k]) for k in (0, 1) for name, columns in by_name(found)]
    for part, sums in rows:
        check_line(counts_of(part), sums.classes or sums.counts, before + more)
    categories, numbers = rows[: len(every)], rows[len(every) :]
    for column in (categories, numbers):
        check_line([part.n for part, _ in column], [sums.n for _, sums in column], before + more)
    if all(part.frequencies for part, _ in categories):
        lines = zip(*(counts_of(part) for part, _ in categories), strict=True)
        for line, truth in zip(
            lines, zip(*(sums.classes for _, sums in categories), strict=True), strict=False
        ):
            check_line(line, truth, before + more)


def by_name(found):
    return [("", found.columns), *found.by_site.items()]


def counts_of(part):
    return part.histogram.counts if part.histogram else [*part.frequencies.values()]


def check_line(line, truth, least):
    """No count of a line is small, and none that is hidden follows from the others."""
    gone = [count for given, count in zip(line, truth, strict=False) if given is None]
    left = [given for given in line if given is not None]
    assert all(count == 0 or count >= least for count in left)
    assert not gone or not any(left) or (len(gone) > 1 and sum(gone) >= least)


def table_of(found):
    """All that is shown, a line for each column of each site."""
    for part in (column for _, columns in by_name(found) for column in columns):
        cells = [*counts_of(part), *part.quantiles.values()]
        yield [part.n, part.missing, part.mean, part.sd, *cells, *[None] * (20 - len(cells))]


# --- what a task's columns are


def task_of(data=None, columns=None):
    class Given(fedtrain.Task):
        def data(self, site):
            return data

        def columns(self, site):
            return columns

    return Given()


def source(data=None, columns=None):
    return ColumnSource.at(task_of(data, columns), "a", lambda: data)


def batches(*ready):
    from torch.utils.data import DataLoader

    return DataLoader(list(ready), batch_size=None)


def test_tensors_give_a_column_for_each_of_theirs():
    import torch

    x = torch.arange(24, dtype=torch.float32).view(4, 3, 2)
    ((columns, values, rows),) = source((x, torch.tensor([0, 1, 1, 0]))).batches(2)
    assert columns == (
        Column("x[0]", "float32", 2), Column("x[1]", "float32", 2), Column("x[2]", "float32", 2),
        Column("y", "int64"),
    )  # fmt: skip
    assert rows == 4
    assert values[1].tolist() == [2, 3, 8, 9, 14, 15, 20, 21]
    nested = source(batches({"in": (x, [x[:, 0, 0]])}))
    assert [column.name for column in nested.described(2)] == ["in.x[0]", "in.x[1]", "in.x[2]", "in.y.0"]


def test_a_task_names_its_columns_and_categories():
    given = {"age": [54, np.nan], "sex": (["f", "?"], ("f", "m")), "stage": (np.array([1, 7]), ("I", "II"))}
    ((columns, values, _),) = source(columns=given).batches(1)
    assert columns == (
        Column("age", "float64"), Column("sex", "category", 1, ("f", "m")),
        Column("stage", "category", 1, ("I", "II")),
    )  # fmt: skip
    np.testing.assert_array_equal(values, [[54, np.nan], [0, np.nan], [1, np.nan]])


SECRET = "Mrs Miller"


@pytest.mark.parametrize(
    ("data", "columns", "message"),
    [
        (None, {"name": [SECRET, "b"]}, "column 'name' is a list of what is no number"),
        (None, {"a": [1.0], "b": [1.0, 2.0]}, "different lengths"),
        (None, {}, "columns.. gives a dict"),
        (None, [SECRET], "columns.. gives a list"),
        (None, {"a": ([0], ("x", "x"))}, "its labels must differ"),
        (None, {"": [1.0]}, "1 to 128 printable"),
        (None, {str(i): [1.0] for i in range(1025)}, "1025 columns, at most 1024"),
        (None, {"a": [[1.0], [1.0, 2.0]]}, "no number"),
        ([[SECRET]], None, "without tensors. Define columns"),
        ([], None, "no example"),
    ],
)
def test_what_are_no_columns_is_told_without_a_value(data, columns, message):
    with pytest.raises(TaskError, match=message) as refused:
        source(data, columns).described(8)
    assert SECRET not in str(refused.value)


def test_columns_that_change_from_batch_to_batch_are_refused():
    import torch

    with pytest.raises(TaskError, match="width of column 'x' is 12 and 15"):
        list(source(batches(torch.zeros(2, 1, 12), torch.zeros(2, 1, 15))).batches(2))


# --- fedtrain stats

TASK = """
import zlib

import numpy as np
import torch
from torch import nn

import fedtrain


class Ward(fedtrain.Task):
    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return nn.Linear(2, 1)

    def data(self, site):
        draw = np.random.default_rng(zlib.crc32(site.encode()))
        x = draw.normal(3, 2, (40 + 60 * (site == "b"), 2))
        x[draw.random(x.shape) < 0.1] = np.nan
        return torch.from_numpy(x).float(), torch.from_numpy(draw.integers(0, 3, len(x)))

    def loss(self, model, batch):
        return model(batch[0].nan_to_num()).square().mean()


class Pool(Ward):
    sites = fedtrain.Task.sites

    def columns(self, site):
        x, y = self.data(site)
        return {"first": x[:, 0], "group": (["xyz"[k] for k in y], "xyz")}
"""


def folder(tmp_path, **sections):
    config = project(tmp_path, TASK, run={"task": "ward_task:Ward", "rounds": 2}, **sections)
    table = {name: keys for name, keys in config.table().items() if name in ("run", "strategy", "network")}
    (tmp_path / "fedtrain.toml").write_text(
        "".join(f"[{name}]\n" + "".join(f"{k} = {toml(v)}\n" for k, v in keys.items() if k != "options")
                for name, keys in table.items())
    )  # fmt: skip
    return config


def toml(value):
    return json.dumps(value)


def test_the_command_prints_a_table_and_writes_what_python_gets(tmp_path, monkeypatch):
    config = folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    printed = CliRunner().invoke(cli, ["stats"])
    assert printed.exit_code == 0, printed.output
    lines = printed.output.splitlines()
    about = "180 examples of 3 sites, known only as sums over all of them; counts below 5 are not shown"
    assert lines[0] == f"r: {about}"
    assert lines[2].split()[:5] == ["COLUMN", "N", "MISSING", "MEAN", "SD"]
    assert lines[-1] == "written to runs/r+simulate/statistics.json"
    kept = json.loads((config.simulate_dir / "statistics.json").read_text())
    found = fedtrain.stats()
    assert (
        kept == json.loads(CliRunner().invoke(cli, ["stats", "--json"]).output) == msgspec.to_builtins(found)
    )
    assert repr(found) == "\n".join(lines[:-1])
    assert "<table>" in found._repr_html_()
    assert (found.masks, found.by_site, found.sites) == (True, {}, ["a", "b", "c"])
    assert found["x[0]"].n + found["x[0]"].missing == 180
    with pytest.raises(ConfigError, match=r"no column 'z'"):
        found["z"]


def test_an_aggregator_that_asks_for_statistics_trains_nothing(tmp_path, monkeypatch):
    config = folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = fedtrain.stats()
    asked = []

    async def asks(config, *, emit):
        asked.append(config.run.name)
        return found

    monkeypatch.setattr(aggregator, "survey", asks)
    printed = CliRunner().invoke(cli, ["aggregator", "--stats"])
    assert (printed.exit_code, asked) == (0, ["r"])
    assert printed.output.endswith(
        f"{found!r}\nwritten to {config.run_dir.relative_to(tmp_path)}/statistics.json\n"
    )
    refused = CliRunner().invoke(cli, ["aggregator", "--stats", "--from", "other"])
    assert refused.exit_code == 2
    assert "--stats trains nothing: leave --from and --data out." in refused.stderr


def test_in_the_open_each_site_has_its_own_statistics_and_a_site_alone_the_same(tmp_path, monkeypatch):
    allowed(folder(tmp_path))
    monkeypatch.chdir(tmp_path)
    found = fedtrain.stats(".", {"secagg.enabled": False, "stats.min_cell": 1})
    masked = fedtrain.stats(".", {"stats.min_cell": 1})
    assert (found.masks, set(found.by_site)) == (False, {"a", "b", "c"})
    assert found.columns == masked.columns
    for name in "abc":
        alone = fedtrain.stats(".", {"stats.min_cell": 1}, site=name)
        assert (alone.sites, alone.by_site) == ([name], {})
        assert alone.columns == found.by_site[name]
        assert (tmp_path / "runs" / f"r@{name}" / "statistics.json").exists()


def test_a_pool_dealt_to_simulated_sites_has_the_pools_statistics(tmp_path, monkeypatch):
    folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    few = {"run.task": "ward_task:Pool", "simulate.sites": 4, "secagg.enabled": False, "stats.min_cell": 1}
    found = fedtrain.stats(".", few | {"simulate.partition": "dirichlet:0.5"})
    whole = fedtrain.stats(".", few, site="site-1")
    assert found.columns == whole.columns
    assert sum(column.n for column in (found.by_site[name][0] for name in found.sites)) == whole["first"].n
    assert list(found["group"].frequencies) == ["x", "y", "z"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"stats.allow": True}, r"stats.allow = True .* read by"),
        ({"run.rounds": 3}, "stats does not read it"),
        ({"stats.bins": 1}, r"stats.bins: 1 must be in \[2, 64\]"),
        ({"stats.min_cell": 0}, "stats.min_cell: 0 must be 1 or more"),
        ({"privacy.noise_multiplier": 1.0}, "stats does not read it"),
    ],
)
def test_a_setting_that_would_do_nothing_or_cannot_be_is_refused(tmp_path, monkeypatch, settings, message):
    folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message):
        fedtrain.stats(".", settings)


def test_there_must_be_as_many_sites_as_the_smallest_sum_has(tmp_path, monkeypatch):
    folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(TooFewSites, match="statistics: 3 sites replied, 4 are needed"):
        fedtrain.stats(".", {"strategy.min_sites": 4})


def test_in_the_open_a_site_with_too_few_examples_is_left_out(tmp_path, monkeypatch):
    folder(tmp_path)
    monkeypatch.chdir(tmp_path)
    found = fedtrain.stats(".", {"secagg.enabled": False, "stats.min_cell": 50, "strategy.min_sites": 1})
    assert found.sites == ["b"]
    assert set(found.left_out) == {"a", "c"}
    assert "fewer than stats.min_cell = 50 examples" in found.left_out["a"]
    assert "a is left out" in repr(found)


# --- a site's half


class Data:
    """A trainer with data."""

    def __init__(self, columns=COLUMNS, values=None):
        self.known, self.values, self.asked = columns, values, []

    async def columns(self, site):
        return self.known

    async def tally(self, site, question, least):
        self.asked.append(question)
        return Evaluation(metrics=answered(question, self.values, least))


def tally(number=0, question=Question(cells=(Cells(0, (0.0,)),)), min_cell=5):
    return Tally(id=f"r/{number}/0/statistics", round=number, question=question, min_cell=min_cell)


def test_a_site_answers_each_question_of_a_run_once_also_after_a_restart(tmp_path):
    trainer, config = Data(values=made(1, 50)), Config.of({"stats": {"allow": True}})

    def asked(request):
        found = asyncio.run(DataStatistics("a", trainer, config, tmp_path).answer(request))
        return found.reason if isinstance(found, Failure) else found

    assert isinstance(asked(Describe(id="x")), Described)
    first = asked(tally())
    assert first == asked(tally())
    assert "question 1 of this run was another one before" in asked(tally(question=Question()))
    assert "4 questions in a run" in asked(tally(4))
    assert "4 questions in a run" in asked(tally(-1))
    assert "its own stats.min_cell is 5" in asked(tally(1, min_cell=4))
    for cells in (Cells(9, (0.0,)), Cells(-1, (0.0,)), Cells(0, (1.0, 1.0)), Cells(0, (math.nan, 1.0))):
        assert "does not fit" in asked(tally(1, question=Question(cells=(cells,))))
    assert len(trainer.asked) == 2


def test_a_value_of_few_is_given_as_missing_in_the_open():
    values = np.full((9, 40), np.nan)
    values[0, :4], values[1, :5] = 7.0, 7.0
    question = Question((Cells(0, (0.0,)), Cells(1, (0.0,))), (Powers(0, 3), Powers(1, 3)))
    few, enough = read(question, answered(question, values, 5)).counts
    assert few == [0, 0, 40, 0]
    assert enough == [0, 5, 35, 5]
    assert read(question, answered(question, values, 5)).sums[0] == (0, 0)
    assert read(question, answered(question, values)).counts[0] == [0, 4, 36, 4]


def test_a_site_with_noise_gives_no_statistics():
    config = Config.of({"stats": {"allow": True}, "privacy": {"noise_multiplier": 1.0}})
    with pytest.raises(ConfigError, match="statistics have no noise"):
        asyncio.run(site.run(allowed(config, "a"), "a", emit=silent))


# --- any cohort


def cohort(tmp_path, values, columns=None, loses=lambda site, request: False):
    config = Config.of({"stats": {"allow": True}})
    sites = {}
    for name in values:
        (tmp_path / name).mkdir(exist_ok=True)
        trainer = Data((columns or {}).get(name, COLUMNS), values[name])
        sites[name] = DataStatistics(name, trainer, config, tmp_path / name).answer
    return LocalCohort(sites, loses)


def collected(tmp_path, cohort, allowed=list, **sections):
    table = {
        "strategy": {"min_sites": 2, "attempts": 2},
        "network": {"idle": 0.1},
        "secagg": {"enabled": False},
    }
    config = Config.of(table | sections, tmp_path)
    config.run_dir.mkdir(parents=True, exist_ok=True)
    asks = statistics.OpenTallies(config, cohort, silent)
    return asyncio.run(statistics.collect(config, cohort, asks, config.run_dir, silent, allowed))


def test_sites_whose_columns_differ_from_most_are_left_out_with_the_first_difference(tmp_path, ragged):
    others = {
        "d": (*COLUMNS[:2], Column("cauchy", "float32"), *COLUMNS[3:]),
        "e": COLUMNS[:-1],
        "f": (Column("alter", "float32"), *COLUMNS[1:]),
        "g": (*COLUMNS[:-1], Column("kind", "category", 1, ("x", "y"))),
    }
    values = ragged | {name: made(9, 20) for name in others}
    sites = cohort(tmp_path, values, others)
    found = collected(tmp_path, sites)
    assert found.sites == ["a", "b", "c"]
    assert found.left_out == {
        "d": "the dtype of column 'cauchy' is float64 and float32 (at most sites, here)",
        "e": "there are 9 and 8 columns (at most sites, here)",
        "f": "a column is 'shifted' and 'alter' (at most sites, here)",
        "g": "the labels of column 'kind' are ('x', 'y', 'z') and ('x', 'y') (at most sites, here)",
    }
    assert ("d", f"statistics: this site is left out: {found.left_out['d']}") in sites.lines
    assert found.columns == shown(surveyed(ragged, openly=True, least=5)).columns


def test_a_survey_that_was_stopped_after_any_question_goes_on_to_the_same_statistics(tmp_path, ragged):
    class Stop(Exception):
        """The process dies."""

    whole = collected(tmp_path / "whole", cohort(made_dir(tmp_path / "whole"), ragged))
    for last in range(4):
        asked, here = [], made_dir(tmp_path / str(last))

        def dies(site, request, last=last, asked=asked):
            if isinstance(request, Tally) and request.round == last and site == "b":
                raise Stop
            asked.append((site, getattr(request, "round", None)))
            return False

        with pytest.raises(Stop):
            collected(here, cohort(here, ragged, loses=dies))
        assert not (here / "runs" / "run" / "statistics.json").exists()
        again = []
        found = collected(here, cohort(here, ragged, loses=lambda s, r, again=again: again.append(r)))
        assert found == whole
        assert {request.round for request in again if isinstance(request, Tally)} == set(range(last, 4))
        assert any(isinstance(request, Describe) for request in again) == (last == 0)
        assert [path.name for path in (here / "runs" / "run").iterdir()] == ["statistics.json"]


def made_dir(path):
    path.mkdir(parents=True, exist_ok=True)
    return path


def test_other_settings_in_the_middle_of_a_survey_are_refused(tmp_path, ragged):
    lost = lambda site, request: isinstance(request, Tally) and request.round == 1
    with pytest.raises(TooFewSites):
        collected(tmp_path, cohort(tmp_path, ragged, loses=lost))
    with pytest.raises(ConfigError, match=r"stats.bins: .* begun with 20, and now it is 30"):
        collected(tmp_path, cohort(tmp_path, ragged), stats={"bins": 30})


def test_a_site_that_is_lost_before_the_first_question_is_left_out_and_later_it_is_needed(tmp_path, ragged):
    for name in ("first", "later"):
        made_dir(tmp_path / name)
    first = lambda site, request: site == "b" and isinstance(request, Tally)
    found = collected(tmp_path / "first", cohort(tmp_path / "first", ragged, loses=first))
    assert found.sites == ["a", "c"]
    later = lambda site, request: site == "b" and isinstance(request, Tally) and request.round == 2
    with pytest.raises(TooFewSites, match="statistics: 2 sites replied, 3 are needed"):
        collected(tmp_path / "later", cohort(tmp_path / "later", ragged, loses=later))
    assert collected(tmp_path / "later", cohort(tmp_path / "later", ragged)).sites == ["a", "b", "c"]


def test_without_enough_willing_sites_there_are_no_statistics(tmp_path, ragged):
    with pytest.raises(
        TooFewSites, match=r"1 of 3 sites .* b, c: it gives no statistics .its own stats.allow"
    ):
        collected(tmp_path, cohort(tmp_path, ragged), allowed=lambda members: ["a"])


def test_who_gives_no_statistics_is_told_before_anyone_is_waited_for_and_what_to_change(tmp_path, ragged):
    told = []

    class Late(LocalCohort):
        async def members(self, at_least):
            return ["a", "b", "c"][: 3 if told else 2]

        async def newcomer(self, known):
            self.heard = [event.text for event in told]  # until then
            if len(known) == 3:
                raise TimeoutError

    late = Late(dict.fromkeys(SITES))
    config = configured(tmp_path, strategy={"min_sites": 3})
    with pytest.raises(TooFewSites, match="1 of 3 sites"):
        asyncio.run(statistics._willing(config, late, told.append, lambda members: ["a"]))
    assert [text.partition(": it gives")[0] for text in late.heard] == [
        "statistics: b is left out",
        "statistics: c is left out",
        "statistics: 1 of 3 sites here give them, 3 are needed: waiting 20 s for others",
    ]
    assert "stats.allow = true in their fedtrain.toml, and start the site again" in late.heard[0]
    assert [site for site, _ in late.lines] == ["b", "c"]


def test_statistics_that_are_damaged_are_told(tmp_path):
    (tmp_path / "statistics.json").write_text("{")
    with pytest.raises(Damaged, match=r"statistics.json is damaged"):
        statistics.written(tmp_path)
    assert statistics.written(tmp_path / "elsewhere") is None


# --- real sites over mutual TLS, with trainers in this process


def configured(tmp_path, allow=True, **sections):
    sections = {"stats": {"allow": allow}, "run": {"task": "ward_task:Ward", "rounds": 2}} | sections
    return project(tmp_path, TASK, **sections)


async def served(config, work, own=None, names=SITES, **rules):
    """`work()` of the aggregator, with sites that run as long as it does, under policies with these rules."""
    own = own or {}
    ends = [
        asyncio.create_task(site.run(allowed(own.get(name, config), name, **rules), name, emit=silent))
        for name in names
    ]
    try:
        async with asyncio.timeout(60):
            return await work()
    finally:
        for end in ends:
            end.cancel()
        await asyncio.gather(*ends, return_exceptions=True)


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("masks", [True, False])
def test_real_sites_give_the_statistics_of_fedtrain_stats_and_then_train(tmp_path, monkeypatch, masks):
    config = configured(tmp_path, secagg={"enabled": masks})
    events = []

    async def first_statistics_then_training():
        found = await fedtrain.aggregate_stats(config, on_event=events.append)
        return found, await aggregator.serve(config, emit=silent)

    found, result = asyncio.run(served(config, first_statistics_then_training))
    here = fedtrain.stats(config)
    assert found == here
    assert found.masks == masks
    assert set(found.by_site) == (set() if masks else set(SITES))
    assert json.loads((config.run_dir / "statistics.json").read_text()) == msgspec.to_builtins(found)
    assert result.rounds == 2
    texts = [event.text for event in events if event.kind == "notice"]
    assert [text for text in texts if "question" in text] == [
        f"statistics: question {n} of 4" for n in (1, 2, 3, 4)
    ]
    assert not list(config.run_dir.glob("statistics.answers*"))
    assert asyncio.run(fedtrain.aggregate_stats(config)) == found  # no site is needed


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("masks", [True, False])
def test_statistics_that_are_there_are_shown_as_the_settings_say_now_or_not_at_all(tmp_path, masks):
    config = configured(tmp_path, secagg={"enabled": masks})
    fedtrain.stats(config)
    config.run_dir.mkdir(parents=True)
    file = config.run_dir / "statistics.json"
    file.write_bytes((config.simulate_dir / "statistics.json").read_bytes())

    def asked(**stats):
        other = Config.of(config.table() | {"stats": {"allow": True, **stats}}, config.root)
        return asyncio.run(fedtrain.aggregate_stats(other))

    before = file.read_bytes()
    for stats, words in (
        ({"min_cell": 4}, "stats.min_cell: .* begun with 5, and now it is 4"),
        ({"min_cell": 9, "bins": 7}, "stats.bins: .* begun with 20, and now it is 7"),
    ):
        with pytest.raises(ConfigError, match=words):
            asked(**stats)
    with pytest.raises(ConfigError, match=r"secagg.enabled: .* Set it back, or use another run.name"):
        asyncio.run(
            fedtrain.aggregate_stats(
                Config.of(config.table() | {"secagg": {"enabled": not masks}}, config.root)
            )
        )
    assert file.read_bytes() == before
    few = asked(min_cell=12)
    assert few.min_cell == 12
    small = [count for line in table_of(few) for count in line[:1] if count is not None and 0 < count < 12]
    assert small == []
    assert few != msgspec.json.decode(before, type=type(few))
    assert json.loads(file.read_text()) == msgspec.to_builtins(few)


@pytest.mark.usefixtures("inline")
def test_a_site_that_did_not_agree_is_asked_nothing_and_would_refuse(tmp_path):
    config = configured(tmp_path, strategy={"min_sites": 2, "attempts": 1}, secagg={"enabled": False})
    unwilling = configured(tmp_path, allow=False, secagg={"enabled": False})
    unwilling = Config.of(unwilling.table() | {"network": config.table()["network"]}, tmp_path)
    found = asyncio.run(served(config, lambda: fedtrain.aggregate_stats(config), {"b": unwilling}))
    assert found.sites == ["a", "c"]
    gate = Gate()
    bounded(gate, site.bounds_of(unwilling))
    bare = site.Site("b", None, None, None, gate=gate)
    for request in (Describe(id="x"), tally()):
        reply = asyncio.run(bare.answer(request))
        assert reply.reason == "b refuses: it gives no statistics (its own stats.allow = false)"


@pytest.mark.usefixtures("inline")
def test_under_masks_a_survey_that_was_stopped_as_a_sum_was_opened_goes_on(tmp_path, monkeypatch):
    config = configured(tmp_path)
    whole, session = fedtrain.stats(config), statistics.UnderMasks.session
    calls = []

    class Stop(Exception):
        """The process dies."""

    async def dies(self, plan, *rest, **named):
        calls.append((plan.round, named["whole"]))
        total = await session(self, plan, *rest, **named)
        if len(calls) in (1, 4):  # the sum is known to nobody: it was not written down
            raise Stop
        return total

    monkeypatch.setattr(statistics.UnderMasks, "session", dies)

    async def again_and_again():
        for _ in range(2):
            with pytest.raises(Stop):
                await fedtrain.aggregate_stats(config)
        return await fedtrain.aggregate_stats(config)

    assert asyncio.run(served(config, again_and_again)) == whole
    assert calls == [(0, False), (0, True), (1, True), (2, True), (2, True), (3, True)]


async def all_join(config, cohort, emit, allowed):
    while len(members := await cohort.members(0)) < 4:
        await cohort.newcomer(members)
    return members


@pytest.fixture
def four(tmp_path):
    """A configuration for four sites of which three are enough, and the names."""
    config = configured(tmp_path, strategy={"min_sites": 3, "attempts": 1})
    issue(config.root / config.network.certs, "site", "d")
    return config, (*SITES, "d")


@pytest.mark.usefixtures("inline")
def test_under_masks_a_site_that_refuses_the_first_question_is_left_out_of_all(four, monkeypatch):
    config, names = four
    strict = Config.of(config.table() | {"stats": {"allow": True, "min_cell": 9}}, config.root)
    monkeypatch.setattr(statistics, "_willing", all_join)
    found = asyncio.run(served(config, lambda: fedtrain.aggregate_stats(config), {"d": strict}, names))
    assert found.sites == ["a", "b", "c"]
    assert set(found.left_out) == {"d"}
    assert found.columns == fedtrain.stats(config).columns


@pytest.mark.usefixtures("inline")
@pytest.mark.parametrize("cohort_change", [3, 0])
def test_no_site_gives_statistics_into_a_sum_over_other_sites_than_the_first(
    four, monkeypatch, cohort_change
):
    """Two sums over sets that differ by one site would tell what that site has. It holds without the cohort
    guard, too."""
    config, names = four
    session = statistics.UnderMasks.session

    async def without_one(self, plan, sites, *rest, whole):
        if plan.round == 1:
            sites, whole = sites[:3], False
        return await session(self, plan, sites, *rest, whole=whole)

    monkeypatch.setattr(statistics.UnderMasks, "session", without_one)
    monkeypatch.setattr(statistics, "_willing", all_join)
    collect = lambda: fedtrain.aggregate_stats(config)
    with pytest.raises(TooFewSites, match="statistics over 4 sites were unmasked here"):
        asyncio.run(served(config, collect, names=names, cohort_change=cohort_change))
    assert not (config.run_dir / "statistics.json").exists()
