"""fedtrain.toml: what it may say, what overrides it, and what everyone must have alike."""

import dataclasses
import re
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedtrain.config import UNITS, Config, EvaluateConfig, Seconds
from fedtrain.errors import ConfigError


def load(tmp_path, text="", sets=(), env=None):
    path = tmp_path / "fedtrain.toml"
    path.write_text(text)
    return Config.load(path, sets, env or {})


# --- what the file says


@pytest.mark.parametrize("number", ["1" * 400, "-" + "1" * 5000, "0x" + "f" * 5000, str(1 << 64)])
@pytest.mark.parametrize("key", ["train.lr", "run.rounds", "evaluate.every", "network.idle", "strategy.mu"])
def test_an_integer_that_no_setting_can_hold_is_an_error_of_the_file_and_a_word_elsewhere(
    tmp_path, key, number
):
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=r"fedtrain\.toml"):
        load(tmp_path, f"[{section}]\n{name} = {number}\n")
    if key == "train.lr":
        with pytest.raises(ConfigError, match=key):
            load(tmp_path, sets=[f"{key}={number}"])


@pytest.mark.parametrize("text", ["a" + ".a" * 4_000 + " = 1", "a = " + "[" * 200 + "]" * 200])
def test_a_file_whose_tables_or_lists_are_too_deep_is_an_error_that_names_it(tmp_path, text):
    with pytest.raises(ConfigError, match=r"fedtrain\.toml"):
        load(tmp_path, f"[strategy]\n{text}\n")


def test_an_empty_file_is_a_whole_config():
    assert Config.of({}) == dataclasses.replace(Config(), root=Path.cwd())


def test_the_file_sets_what_it_names_and_nothing_else(tmp_path):
    config = load(tmp_path, '[run]\nname = "heart"\n[train]\nlr = 1\n')
    assert (config.run.name, config.train.lr) == ("heart", 1.0)
    assert isinstance(config.train.lr, float)
    assert config.train == dataclasses.replace(Config().train, lr=1.0)
    assert config.root == tmp_path


def test_keys_of_a_strategy_of_its_own_are_its_options():
    config = Config.of({"strategy": {"kind": "fedprox", "mu": 0.1, "min_sites": 3}})
    assert (config.strategy.options, config.strategy.min_sites) == ({"mu": 0.1}, 3)


def test_the_table_given_is_left_as_it_was():
    table = {"strategy": {"mu": 0.1}}
    Config.of(table)
    assert table == {"strategy": {"mu": 0.1}}


def test_a_config_is_read_back_from_its_table():
    config = Config.of({"strategy": {"mu": 0.1, "round_deadline": "10m"}, "train": {"lr": 0.5}})
    assert Config.of(config.table(), root=config.root) == config


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"trian": {}}, "trian: unknown section. Did you mean train?"),
        ({"train": {"batchsize": 4}}, "train.batchsize: unknown key. Did you mean train.batch_size?"),
        ({"run": {"rouns": 4}}, "run.rouns: unknown key. Did you mean run.rounds?"),
        ({"limits": {"zzz": 1}}, "limits.zzz: unknown key. Known here: max_examples, max_norm, max_ratio."),
        ({"root": "/"}, "root: unknown section"),
    ],
)
def test_a_key_that_nobody_reads_is_an_error_that_names_the_nearest(table, message):
    with pytest.raises(ConfigError) as e:
        Config.of(table)
    assert message in str(e.value)


@pytest.mark.parametrize(
    "table",
    [
        {"train": 3},
        {"strategy": 3},
        {"train": {"lr": "0.1"}},
        {"train": {"lr": True}},
        {"run": {"rounds": 2.5}},
        {"run": {"rounds": True}},
        {"run": {"name": 7}},
        {"train": {"drop_last": 1}},
        {"strategy": {"round_deadline": "soon"}},
        {"strategy": {"round_deadline": [1]}},
        {"network": {"idle": "1.2.3s"}},
    ],
)
def test_a_value_of_the_wrong_type_is_an_error_that_names_its_key(table):
    with pytest.raises(ConfigError, match=next(iter(table))):
        Config.of(table)


WRONG = [
    *(("run.name", name) for name in ("", ".x", "a/b", "a b", "a@b", "a+b", "x" * 65)),
    ("run.task", "task"), ("run.rounds", 0), ("run.seed", -1),
    ("train.local_epochs", 0), ("train.local_steps", -1), ("train.batch_size", -1), ("train.lr", 0.0),
    ("train.lr", float("nan")), ("train.accumulate", 0), ("train.clip_norm", -1.0), ("train.threads", 0),
    ("train.eval_batch_size", 0), ("train.precision", "fp8"), ("train.optimizer", "adamm"),
    ("strategy.min_sites", 0), ("strategy.fraction", 0.0), ("strategy.fraction", 1.01),
    ("strategy.round_deadline", 0), ("strategy.attempts", 0),
    ("checkpoint.every", -1), ("checkpoint.keep", 0), ("checkpoint.patience", 0),
    ("checkpoint.format", "zip"), ("checkpoint.dir", "gs://elsewhere"),
    ("evaluate.every", -1), ("evaluate.patience", -1), ("evaluate.mode", "maximum"),
    ("limits.max_examples", 0), ("limits.max_norm", -1.0),
    ("network.listen", "localhost"), ("network.address", "http://fl.example.org:8440"),
    ("network.address", "fl.example.org"), ("network.heartbeat", 0.5), ("network.idle", 0),
    ("simulate.sites", 0), ("simulate.workers", -1), ("simulate.engine", "fast"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value"), WRONG)
def test_a_value_out_of_range_is_an_error_that_names_its_key(key, value):
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=f"^{key}: "):
        Config.of({section: {name: value}})


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("train.local_epochs", 0, "0 must be 1 or more"),
        ("train.lr", -0.5, "-0.5 must be positive"),
        ("train.momentum", float("inf"), "inf must be a finite number"),
        ("strategy.fraction", 2.0, "2.0 must be in (0, 1]"),
        ("secagg.corrupt", 1.0, "1.0 must be in [0, 1)"),
        ("secagg.ring_bits", 24, "24 is not one of 16, 32, 64."),
        ("secagg.dropout", 0.9, "0.9 must be in [0, 1 - secagg.corrupt)"),
        ("network.listen", "a:65536", '\'a:65536\' must be "host:port" or "[ipv6]:port"'),
        ("strategy.round_deadline", "0s", "0.0 must be positive"),
    ],
)
def test_an_error_names_the_key_the_value_and_what_is_allowed(key, value, message):
    section, name = key.split(".")
    with pytest.raises(ConfigError, match=f"^{re.escape(f'{key}: {message}')}$"):
        Config.of({section: {name: value}})


def test_a_section_made_in_python_is_checked_like_one_of_the_file():
    with pytest.raises(ConfigError, match=r"^evaluate.every: -1 must be 0 or more$"):
        EvaluateConfig(every=-1)


@pytest.mark.parametrize("address", ["", "a:0", "a:65535", "[::1]:8440", "10.0.0.1:6000"])
def test_an_address_may_have_any_port(address):
    assert changed("network.address", address).network.address == address


@pytest.mark.parametrize("address", ["::1:8440", "[::1:8440", "::1]:8440", "[]:1", ":1", "a:65536"])
def test_an_ipv6_address_is_in_brackets(address):
    with pytest.raises(ConfigError, match=r'network.listen.* must be "host:port" or "\[ipv6\]:port"'):
        changed("network.listen", address)


def test_a_misspelt_choice_is_told_the_nearest():
    with pytest.raises(ConfigError, match=r"'adamm' is not one of sgd, adam, adamw. Did you mean 'adam'\?"):
        Config.of({"train": {"optimizer": "adamm"}})


def test_a_missing_file_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match="fedtrain new NAME"):
        Config.load(tmp_path / "fedtrain.toml")


@pytest.mark.parametrize("content", [b"[run", b"\xff\xfe", b"a = 1\na = 2"])
def test_a_file_that_is_not_toml_is_named(tmp_path, content):
    (tmp_path / "fedtrain.toml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"fedtrain\.toml"):
        Config.load(tmp_path / "fedtrain.toml", env={})


# --- durations


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("500ms", 0.5),
        ("30s", 30),
        ("10m", 600),
        ("1.5h", 5400),
        ("2d", 172_800),
        (" 3 s ", 3),
        (45, 45),
        (0.5, 0.5),
    ],
)
def test_durations_have_units(text, seconds):
    assert Seconds.parse(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "10", "m", "10 minutes", "-3s", "1e3s", True, None])
def test_what_is_no_duration_is_refused(text):
    with pytest.raises(ValueError):
        Seconds.parse(text)


@given(st.floats(0, 1e6).map(lambda s: round(s, 3)), st.sampled_from(sorted(UNITS)))
def test_a_duration_is_its_number_times_its_unit(number, unit):
    assert Seconds.parse(f"{number:f}{unit}") == pytest.approx(number * UNITS[unit], abs=1e-6)


# --- overrides


def test_the_command_line_beats_the_environment_beats_the_file(tmp_path):
    text, env = "[train]\nlr = 0.1\n", {"FEDTRAIN_TRAIN__LR": "0.2"}
    assert load(tmp_path, text).train.lr == 0.1
    assert load(tmp_path, text, env=env).train.lr == 0.2
    assert load(tmp_path, text, ["train.lr=0.3"], env).train.lr == 0.3
    assert load(tmp_path, text, ["train.lr=0.3", "train.lr=0.4"], env).train.lr == 0.4


def test_the_process_environment_is_the_default(tmp_path, monkeypatch):
    monkeypatch.setenv("FEDTRAIN_RUN__ROUNDS", "77")
    (tmp_path / "fedtrain.toml").write_text("")
    assert Config.load(tmp_path / "fedtrain.toml").run.rounds == 77


def test_variables_of_others_are_left_alone(tmp_path):
    assert load(tmp_path, env={"FEDTRAIN_DEBUG": "1", "TRAIN__LR": "9", "FEDTRAINX__Y": "1"}).train.lr == 0.01


@pytest.mark.parametrize(
    ("item", "key", "value"),
    [
        ("run.rounds=3", "rounds", 3),
        ("run.name=heart", "name", "heart"),
        ('run.name="heart"', "name", "heart"),
        ("run.task = my.task:Heart ", "task", "my.task:Heart"),
    ],
)
def test_an_override_is_a_toml_value_or_else_text(tmp_path, item, key, value):
    assert getattr(load(tmp_path, sets=[item]).run, key) == value


def test_an_override_of_a_duration_and_of_an_option(tmp_path):
    strategy = load(tmp_path, sets=["strategy.round_deadline=30s", "strategy.mu=0.5"]).strategy
    assert (strategy.round_deadline, strategy.options) == (30.0, {"mu": 0.5})


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ("train.lr", "write --set section.key=value"),
        ("lr=3", "name a key as section.key"),
        ("train.lrr=3", "Did you mean train.lr?"),
        ("train.lr=fast", "train.lr must be a number, got 'fast'"),
    ],
)
def test_a_wrong_override_says_what_to_write(tmp_path, item, message):
    with pytest.raises(ConfigError) as e:
        load(tmp_path, sets=[item])
    assert message in str(e.value)


def test_a_wrong_variable_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"train\.lrr: unknown key"):
        load(tmp_path, env={"FEDTRAIN_TRAIN__LRR": "3"})


SECTIONS = list(Config().sections())
KEYS = [f"{s}.{f.name}" for s in SECTIONS for f in dataclasses.fields(getattr(Config(), s))]


@given(st.sampled_from(KEYS) | st.text(), st.text())
def test_any_override_either_works_or_is_a_config_error(tmp_path_factory, key, value):
    path = tmp_path_factory.getbasetemp() / "fedtrain.toml"
    path.write_text("")
    with suppress(ConfigError):
        Config.load(path, [f"{key}={value}"], {})


# --- what everyone must have alike


def changed(key, value):
    section, name = key.split(".")
    return Config.of({section: {name: value}})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.lr", 0.5), ("train.local_epochs", 2), ("train.batch_size", 1), ("train.precision", "bf16"),
        ("train.optimizer", "adam"), ("train.momentum", 0.9), ("run.seed", 1), ("run.name", "other"),
        ("run.task", "task:Other"), ("strategy.kind", "fedprox"), ("strategy.mu", 0.1),
    ],
)  # fmt: skip
def test_what_changes_the_numbers_changes_the_digest(key, value):
    assert changed(key, value).digest() != Config().digest()
    assert changed(key, value).agreed().keys() >= {key}


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("train.device", "cuda"), ("train.threads", 4), ("train.eval_batch_size", 7), ("run.rounds", 99),
        ("run.dir", "elsewhere"), ("network.address", "a:1"), ("simulate.workers", 3),
        ("strategy.min_sites", 5),
    ],
)  # fmt: skip
def test_what_is_each_ones_own_affair_leaves_the_digest(key, value):
    assert changed(key, value).digest() == Config().digest()


def test_the_digest_is_the_same_on_every_machine():
    assert Config().digest() == Config.of({}, root="/somewhere/else").digest()
    a = Config.of({"strategy": {"x": 1, "y": 2}})
    assert a.digest() == Config.of({"strategy": {"y": 2, "x": 1}}).digest()


@settings(deadline=None)
@given(st.floats(min_value=1e-300, max_value=1e300), st.floats(min_value=1e-300, max_value=1e300))
def test_two_floats_agree_only_when_they_are_equal(a, b):
    assert (changed("train.lr", a).agreed() == changed("train.lr", b).agreed()) == (a == b)


# --- the best model


@pytest.mark.parametrize(
    ("metric", "mode", "new", "old", "better"),
    [
        ("loss", "auto", 0.4, 0.5, True), ("loss", "auto", 0.5, 0.5, False),
        ("val_error", "auto", 1, 2, True),
        ("accuracy", "auto", 0.6, 0.5, True), ("accuracy", "auto", 0.4, 0.5, False),
        ("mae", "auto", 1, 2, True), ("val_RMSE", "auto", 2, 1, False), ("maestro", "max", 2, 1, True),
        ("loss", "max", 0.6, 0.5, True), ("accuracy", "min", 0.4, 0.5, True),
        ("loss", "auto", 9.0, None, True), ("loss", "auto", float("nan"), None, False),
    ],
)  # fmt: skip
def test_better_is_lower_for_losses_and_higher_for_the_rest(metric, mode, new, old, better):
    assert EvaluateConfig(metric=metric, mode=mode).better(new, old) is better


def test_an_improvement_must_exceed_min_delta():
    evaluate = EvaluateConfig(metric="accuracy", min_delta=0.1)
    assert not evaluate.better(0.59, 0.5)
    assert evaluate.better(0.61, 0.5)


# --- where things lie


def test_the_run_directories_of_the_roles_never_meet(tmp_path):
    config = load(tmp_path, '[run]\nname = "heart"\ndir = "out"\n')
    assert config.run_dir == tmp_path / "out" / "heart"
    assert config.simulate_dir == tmp_path / "out" / "heart+simulate"
    assert config.site_dir("bern") == tmp_path / "out" / "heart@bern"


# --- the page that describes it

PAGE = (Path(__file__).parent.parent / "docs" / "configuration.md").read_text()
ROWS = {
    key: (agreed, default)
    for key, agreed, default in re.findall(r"^\| `(\w+\.\w+)`( ●)? \| `(.*?)` \|", PAGE, re.M)
}


def test_the_page_describes_every_key_and_no_other():
    assert list(ROWS) == KEYS


@pytest.mark.parametrize("key", KEYS)
def test_a_default_on_the_page_is_the_default(key):
    value = tomllib.loads(f"value = {ROWS[key][1]}")["value"]
    assert changed(key, value) == Config.of({})


def test_the_page_marks_the_keys_that_all_must_have_alike():
    marked = {key for key, (agreed, _) in ROWS.items() if agreed}
    assert marked == {*Config().agreed(), "strategy.options", "aggregation.options"}


def test_the_page_names_every_strategy_with_its_keys():
    from fedtrain.strategies import STRATEGIES, Strategy

    every = {f.name for f in dataclasses.fields(Strategy)}
    assert all(f"| `{name}` |" in PAGE for name in every)
    for kind, strategy in STRATEGIES.items():
        row = next(
            line for line in PAGE.splitlines() if line.startswith("| ") and f"`{kind}`" in line.split("|")[1]
        )
        assert all(f"`{f.name} = " in row for f in dataclasses.fields(strategy) if f.name not in every)


def test_the_page_names_every_rule_with_its_keys():
    from fedtrain.aggregation import RULES

    for kind, rule in RULES.items():
        row = next(line for line in PAGE.splitlines() if line.startswith(f"| `{kind}` |"))
        assert all(f"`{f.name} = " in row for f in dataclasses.fields(rule))


@pytest.mark.parametrize("text", ["nan", "7", "1e5"])
def test_text_that_looks_like_a_number_is_told_to_stand_in_quotes(tmp_path, text):
    sets = ["run.task=t:T", f"run.name={text}"]
    with pytest.raises(ConfigError, match=r"run\.name must be text, .* quotes: run\.name = \""):
        Config.load(None, sets, {}, root=tmp_path)
    sets[-1] = f'run.name="{text}"'
    assert Config.load(None, sets, {}, root=tmp_path).run.name == text


def test_checkpoints_lie_in_the_run_directory_unless_a_folder_or_bucket_is_named(tmp_path):
    def where(**keys):
        return Config.of({"run": {"name": "r"}, "checkpoint": keys}, root=tmp_path).checkpoint_dir

    assert where() == tmp_path / "runs" / "r+datacenter" / "checkpoints"
    assert where(dir="shared") == tmp_path / "shared" / "r"
    assert where(dir="/mnt/shared") == Path("/mnt/shared/r")
    assert where(dir="s3://bucket/runs/") == "s3://bucket/runs/r"
