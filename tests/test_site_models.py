"""Models of simulated sites: what is drawn, what is measured, and when an update is there."""

import math
import statistics

import pytest

from fedtrain.config import Config
from fedtrain.errors import ConfigError
from fedtrain.runtime.simulations.site_models import (
    DAY_S,
    HOUR_S,
    Chance,
    Load,
    SiteModel,
    SiteModels,
    Windows,
    daily,
)

NOTHING = Load(0, 0)
MANY = [f"site-{i:04d}" for i in range(2000)]


def models(tmp_path, sites=MANY, seed=1, **keys):
    return SiteModels(Config.of({"run": {"seed": seed}, "simulate": keys}, tmp_path), sites)


# --- how long a training takes


def test_a_training_takes_its_compute_its_bytes_and_its_messages():
    model = SiteModel(training_s=1.0, example_s=0.5, down_mbit=8.0, up_mbit=2.0, latency_s=0.1)
    load = Load(down_bytes=3_000_000, up_bytes=1_000_000, messages=6, examples=10)
    assert model.seconds(load) == pytest.approx(1 + 5 + 3 + 4 + 0.6)
    assert model.arrives(100.0, load) == pytest.approx(113.6)
    assert model.arrives(100.0, load, until_s=113.0) == math.inf


def test_without_any_key_a_training_takes_one_second_and_everybody_is_there(tmp_path):
    assert models(tmp_path)[MANY[0]] == SiteModel(training_s=1.0)


def test_speeds_multiply_the_time_of_an_example(tmp_path):
    found = models(tmp_path, ["a", "b"], speeds="straggler:10", example_time="5ms")
    assert [found[site].seconds(Load(0, 0, examples=100)) for site in "ab"] == pytest.approx([0.5, 5.0])


@pytest.mark.parametrize(
    ("text", "median", "spread"),
    [(20, 20, 0), ("20", 20, 0), ("lognormal:20,0.5", 20, 0.5), ("uniform:5,50", 27.5, None)],
)
def test_bandwidths_are_drawn_as_their_key_says(tmp_path, text, median, spread):
    found = models(tmp_path, up_mbit=text, down_mbit=text)
    drawn = [found[site].up_mbit for site in MANY]
    assert statistics.median(drawn) == pytest.approx(median, rel=0.07)
    if spread is not None:
        assert statistics.pstdev(map(math.log, drawn)) == pytest.approx(spread, rel=0.07)
    else:
        assert 5 <= min(drawn) < 7
        assert 48 < max(drawn) <= 50
    if spread != 0:
        assert [found[site].down_mbit for site in MANY] != drawn


def test_a_model_depends_on_seed_and_name_alone(tmp_path):
    keys = {"speeds": "lognormal:1", "up_mbit": "uniform:1,9", "availability": "daily:0.4", "dropout": 0.1}
    a, b = models(tmp_path, **keys), models(tmp_path, MANY[::-1], **keys)
    assert [a[site] for site in MANY[:9]] == [b[site] for site in MANY[:9]]
    assert models(tmp_path, seed=2, **keys)[MANY[0]] != a[MANY[0]]


def test_a_site_drops_out_as_often_as_it_should(tmp_path):
    found = models(tmp_path, dropout=0.3)
    dropped = sum(found.drops_out(site, round) for site in MANY for round in range(3))
    assert dropped / 6000 == pytest.approx(0.3, abs=0.03)
    assert [found.drops_out(site, 1) for site in MANY] != [found.drops_out(site, 2) for site in MANY]


# --- when a site is there


def there(availability, at_s):
    return availability.comes(at_s) == at_s


def by_hand(windows, period, at_s):
    """The next moment at which it is there, and when it leaves then, second by second."""
    inside = [any(b <= s < e for b, e in windows) for s in range(int(period))]
    comes = next(t for t in range(at_s, at_s + 2 * int(period)) if inside[t % int(period)])
    leaves = next((t for t in range(comes, comes + int(period)) if not inside[t % int(period)]), math.inf)
    return comes, leaves


@pytest.mark.parametrize(
    "windows",
    [[(0, 5)], [(3, 7), (12, 20)], [(15, 20)], [(0, 4), (15, 20)], [(0, 20)], [(0, 1), (2, 3), (19, 20)]],
)
def test_windows_are_those_counted_second_by_second(windows):
    availability = Windows(tuple((float(b), float(e)) for b, e in windows), 20.0)
    for at_s in range(70):
        comes, leaves = by_hand(windows, 20.0, at_s)
        assert availability.comes(float(at_s)) == comes
        assert availability.leaves(float(comes)) == leaves


@pytest.mark.parametrize("begin_h", [0, 5, 20.25, -3])
def test_a_daily_window_over_midnight_is_one_stay(begin_h):
    window = daily(begin_h * HOUR_S, 8 * HOUR_S)
    comes = window.comes((begin_h % 24) * HOUR_S + 3 * DAY_S)
    assert window.leaves(comes) == comes + 8 * HOUR_S
    assert window.comes(comes + 8 * HOUR_S) == comes + DAY_S


@pytest.mark.parametrize("text", ["daily:0.5", "part:0.5", "part:0.5,0.25"])
def test_half_of_the_sites_are_there_at_any_time_of_day(tmp_path, text):
    found = models(tmp_path, availability=text)
    for hour in (0, 7.3, 12, 31):
        here = sum(there(found[site].there, hour * HOUR_S) for site in MANY)
        assert here / len(MANY) == pytest.approx(0.5, abs=0.05)


def test_with_a_spread_sites_are_there_at_night(tmp_path):
    found = models(tmp_path, availability="daily:0.3,2")
    at_night, at_noon = (sum(there(found[s].there, h * HOUR_S) for s in MANY) for h in (24, 36))
    assert at_night > 0.85 * len(MANY)
    assert at_noon < 0.01 * len(MANY)


def test_a_chance_is_drawn_slot_by_slot():
    chance = Chance(0.3, 60.0, seed=5)
    slots = [there(chance, slot * 60.0 + 1) for slot in range(5000)]
    assert sum(slots) / len(slots) == pytest.approx(0.3, abs=0.03)
    first = slots.index(True)
    assert chance.comes(0.0) == first * 60
    assert chance.leaves(first * 60.0 + 5) == (first + slots[first:].index(False)) * 60


def test_a_site_that_goes_away_begins_anew_when_it_is_back():
    model = SiteModel(training_s=30.0, there=Windows(((0.0, 20.0), (50.0, 90.0)), 100.0))
    assert model.arrives(0.0, NOTHING) == 80  # its first stay of 20 s is too short
    assert model.arrives(85.0, NOTHING) == 180
    assert model.arrives(0.0, NOTHING, until_s=79.0) == math.inf


def test_a_site_that_never_stays_long_enough_never_answers():
    assert SiteModel(training_s=30.0, there=Windows(((0.0, 20.0),), 100.0)).arrives(0.0, NOTHING) == math.inf


# --- traces

CSV = """site,seconds_per_example,down_mbit,up_mbit,latency_s,dropout,available,period_s
a,0.01,40,8,0.05,0.02,0-600 1200-1800.5,3600
b,0.02,,,,,,
"""
JSON = """{"site": "a", "seconds_per_example": 0.01, "down_mbit": 40, "up_mbit": 8, "latency_s": 0.05,\
 "dropout": 0.02, "available": [[0, 600], [1200, 1800.5]], "period_s": 3600}

{"site": "b", "seconds_per_example": 0.02}
"""


def traced(tmp_path, text, sites=("a", "b"), **keys):
    (tmp_path / "trace").write_text(text)
    return models(tmp_path, list(sites), trace="trace", **keys)


@pytest.mark.parametrize("text", [CSV, JSON], ids=["csv", "json"])
def test_a_trace_says_what_was_measured_and_leaves_the_rest_to_the_keys(tmp_path, text):
    found = traced(tmp_path, text)
    windows = Windows(((0.0, 600.0), (1200.0, 1800.5)), 3600.0)
    assert found["a"] == SiteModel(0.0, 0.01, 40.0, 8.0, 0.05, 0.02, windows)
    assert found["b"] == SiteModel(0.0, 0.02)
    assert found.by_examples
    assert not found.always
    only = traced(tmp_path, "site,up_mbit\na,3\nb,4\n", speeds="straggler:10", dropout=0.5)
    assert only["b"] == SiteModel(10.0, up_mbit=4.0, dropout=0.5)
    assert only.always


def test_lines_without_names_are_dealt_to_the_sites_by_seed(tmp_path):
    found = traced(tmp_path, "up_mbit\n1\n2\n3\n4\n", sites=MANY)
    drawn = [found[site].up_mbit for site in MANY]
    assert all(drawn.count(value) > 400 for value in (1, 2, 3, 4))
    again = traced(tmp_path, "up_mbit\n1\n2\n3\n4\n", sites=MANY)
    assert drawn == [again[site].up_mbit for site in MANY]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("site,up_mbits\na,1\n", r"trace, line 1: unknown column 'up_mbits'. Did you mean up_mbit\?"),
        ("site,up_mbit\na,1\nb,fast\n", r"line 3: Expected `float . null`, got `str` - at `\$.up_mbit`"),
        ("site,up_mbit\na,0\n", r"line 2: Expected `float` > 0"),
        ("site,up_mbit\na,inf\n", "line 2: numbers must be finite"),
        ("site,up_mbit\na,1,2\n", "line 2: it must have 2 cells"),
        ("site,up_mbit\na\n", "line 2: it must have 2 cells"),
        ("site,up_mbit\na,1\na,2\n", "line 3: the site a has a line already"),
        ("site,up_mbit\na,1\n,2\n", "line 3: either all lines name a site, or none does"),
        ("site,up_mbit\na,1\n", "no line for the site b. Found here: a. Without the column site, lines"),
        ("site,up_mbit\n", "has no line for any site"),
        ("site,available\na,5-3\n", "line 2: the window 5-3 must begin before its end"),
        ("site,available,period_s\na,5-30,20\n", "line 2: the window 5-30 .* within period_s = 20"),
        ("site,available\na,5-8 7-9\n", "line 2: the window from 7 must begin after 8"),
        ("site,available\na,5\n", "line 2: Expected `array` of length 2"),
        ('{"site": "a"}\n{"site": \n', "line 2: no JSON"),
        ('{"site": "a", "speed": 1}', "line 1: Object contains unknown field `speed`"),
        ('{"available": []}', "line 1: available is empty"),
    ],
)
def test_a_mistake_in_a_trace_is_told_with_its_line(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        traced(tmp_path, text)


def test_a_trace_and_a_key_that_say_the_same_thing_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"^simulate.up_mbit: the trace .* its column up_mbit. Leave one"):
        traced(tmp_path, "up_mbit\n1\n", up_mbit="20")
    with pytest.raises(ConfigError, match=r"simulate.speeds: .* column seconds_per_example"):
        traced(tmp_path, "seconds_per_example\n1\n", speeds="lognormal:1")
    with pytest.raises(ConfigError, match=r"simulate.trace: .*nowhere can't be read"):
        models(tmp_path, trace="nowhere")


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("up_mbit", 0, "'0' must be above 0; leave it empty for no limit"),
        ("down_mbit", "uniform:5,2", "5 is above 2"),
        ("latency", "soon", 'must be a number, "lognormal:20,1"'),
        ("availability", "daily:1.5", 'must be "always", "daily:0.3" or "part:0.5"'),
        ("availability", "part:0.5,0", "hours between two draws must be above 0"),
        ("availability", "daily:0.0", "between 0 and 1 of the time"),
        ("dropout", 1.0, r"1.0 must be in \[0, 1\)"),
        ("example_time", -1, "must be 0 or more"),
        ("speeds", "fast", 'must be "equal", "lognormal:1" or "straggler:10"'),
    ],
)
def test_a_key_that_says_nothing_possible_is_refused(key, value, message):
    with pytest.raises(ConfigError, match=f"simulate.{key}: .*{message}"):
        Config.of({"simulate": {key: value}})
