"""fedtrain from Python: what the commands do, as functions, for scripts, notebooks and services."""

import asyncio
import json
import os
import random
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

import fedtrain
from fedtrain import api, events
from fedtrain.cli import cli
from fedtrain.errors import ConfigError, StoreError, TaskError
from fedtrain.runtime.own_code import source_digest
from fedtrain.tracking import log
from tests.allowed import allowed
from tests.inline import project as federation_of_three
from tests.ports import free_port
from tests.signals import IN_TERMINAL

TASK = """
import zlib
import torch
import fedtrain

class Heart(fedtrain.Task):
    def __init__(self, hidden=4):
        self.hidden = hidden

    def sites(self):
        return ["a", "b", "c"]

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, self.hidden), torch.nn.Linear(self.hidden, 2))

    def data(self, site):
        g = torch.Generator().manual_seed(zlib.crc32(site.encode()))
        x = torch.randn(40, 3, generator=g)
        return x, (x[:, 0] > 0).long()

    def loss(self, model, batch):
        return torch.nn.functional.cross_entropy(model(batch[0]), batch[1])

    def evaluate(self, model, batch):
        return {"accuracy": ((model(batch[0]).argmax(1) == batch[1]).sum(), len(batch[1]))}
"""
TOML = '[run]\nname = "heart"\ntask = "heart_task:Heart"\nrounds = 3\n[train]\nlr = 0.1\n'
HERE = {"simulate.workers": 0}  # in this process


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A project's folder, which is the current one."""
    (tmp_path / "heart_task.py").write_text(TASK)
    (tmp_path / "fedtrain.toml").write_text(TOML)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def heart(project, monkeypatch):
    """The class of the project's task, as a program imports it."""
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.delitem(sys.modules, "heart_task", raising=False)
    return __import__("heart_task").Heart


def digest(run):
    return json.loads((run.path / "model" / "model.json").read_text())["weights_digest"]


# --- what a call gives


def test_a_project_is_simulated_to_the_model_and_the_run_directory_of_the_command(project):
    run = fedtrain.simulate(project, HERE)
    assert run.path == project / "runs" / "heart+simulate"
    ours = digest(run)
    result = CliRunner().invoke(cli, ["simulate", "--fresh", "--set", "simulate.workers=0"])
    assert result.exit_code == 0, result.output
    assert digest(run) == ours
    about = json.loads((run.path / "model" / "model.json").read_text())
    assert about["task_digest"] == source_digest(run.config)


def test_an_imported_task_is_the_same_task_as_the_commands(project, heart):
    of_file = fedtrain.simulate(project, HERE)
    of_object = fedtrain.simulate(heart(), {"run.rounds": 3, "train.lr": 0.1, **HERE}, fresh=True)
    assert of_object.path == of_file.path
    assert digest(of_object) == digest(of_file)
    assert of_object.config.run.task == "heart_task:Heart"


def test_metrics_and_history_are_those_of_the_run_and_open_as_a_table(project):
    pandas = pytest.importorskip("pandas")
    run = fedtrain.simulate(project, HERE)
    over = {f"{name}/{how}" for name in ("accuracy", "loss") for how in ("uniform", "worst_decile", "std")}
    assert list(run.metrics)[:2] == ["accuracy", "loss"]
    assert run.metrics.keys() == {"accuracy", "loss", *over}
    table = pandas.DataFrame(run.history)
    assert list(table["round"]) == [1, 2, 3]
    assert table["accuracy"].iloc[-1] == run.metrics["accuracy"]
    assert table["accuracy/worst_decile"].iloc[-1] == run.metrics["accuracy/worst_decile"]
    assert {"training_loss", "seconds", "sites"} <= set(table)


def test_the_model_has_the_runs_weights_and_is_ready_to_predict(project):
    run = fedtrain.simulate(project, HERE)
    exported = fedtrain.load_model(run.path / "model")
    for model in (run.model(), fedtrain.load_model("heart"), fedtrain.load_model(run), exported):
        assert not model.training
        assert all(
            torch.equal(a, b) for a, b in zip(model.parameters(), run.model().parameters(), strict=True)
        )
    before = run.model(round=2)
    assert not torch.equal(next(before.parameters()), next(run.model().parameters()))


def test_an_evaluation_from_python_is_the_commands(project):
    run = fedtrain.simulate(project, HERE)
    found = fedtrain.evaluate(run)
    assert found.metrics == pytest.approx(run.metrics)
    result = CliRunner().invoke(cli, ["evaluate", "heart", "--json"])
    assert json.loads(result.output)["metrics"] == found.metrics


def test_an_opened_run_is_the_run(project):
    run = fedtrain.simulate(project, HERE)
    for name in ("heart", run.path):
        opened = fedtrain.open_run(name)
        assert (opened.path, opened.history) == (run.path, run.history)
    with pytest.raises(ConfigError, match="Did you mean heart"):
        fedtrain.open_run("hart+simulate")


def test_a_plot_draws_the_named_columns_by_round(project):
    run = fedtrain.simulate(project, HERE)
    axes = run.plot("accuracy", "training_loss")
    drawn = {line.get_label(): list(line.get_ydata()) for line in axes.get_lines()}
    assert drawn["heart: accuracy"] == [row["accuracy"] for row in run.history]
    with pytest.raises(ConfigError, match=r"no round has 'acuracy'. Did you mean accuracy\?"):
        run.plot("acuracy")


def test_without_matplotlib_a_plot_says_what_to_install(project, monkeypatch):
    run = fedtrain.simulate(project, HERE)
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)
    with pytest.raises(ConfigError, match="pip install matplotlib"):
        run.plot("accuracy")


def test_a_new_run_may_begin_with_the_model_of_another(project):
    first = fedtrain.simulate(project, HERE)
    second = fedtrain.simulate(project, {"run.name": "on", **HERE}, start=first)
    assert second.history[0]["training_loss"] < first.history[0]["training_loss"]


def test_peers_are_simulated_too(project):
    run = fedtrain.simulate(project, {"run.rounds": 2}, mode="gossip")
    assert run.path.name == "heart+gossip"
    assert [row["round"] for row in run.history] == [1, 2]
    with pytest.raises(ConfigError, match="gosip"):
        fedtrain.simulate(project, mode="gosip")


# --- settings and errors


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"run.round": 3}, r"run.round: unknown key. Did you mean run.rounds\?"),
        ({"runn.rounds": 3}, r"runn: unknown section. Did you mean run\?"),
        ({"rounds": 3}, "name a key as section.key"),
        ({"run.rounds": 0}, "run.rounds: 0 must be 1 or more"),
        ({"run.rounds": "many"}, "run.rounds must be a whole number, got 'many'"),
        ({"network.idle": 3}, r"network.idle = 3.* \(in settings\): simulate does not read it"),
        ({"strategy.kind": "fedadm"}, "Did you mean 'fedadam'"),
    ],
)
def test_settings_are_checked_like_the_file(project, settings, line):
    with pytest.raises(ConfigError, match=line):
        fedtrain.simulate(project, settings | HERE)


def test_settings_are_stronger_than_the_environment(project, monkeypatch):
    monkeypatch.setenv("FEDTRAIN_RUN__ROUNDS", "1")
    assert len(fedtrain.simulate(project, HERE).history) == 1
    assert len(fedtrain.simulate(project, {"run.rounds": 2, **HERE}).history) == 2


def test_a_folder_without_a_project_is_an_error_and_no_exit(tmp_path):
    with pytest.raises(ConfigError, match=r"fedtrain.toml does not exist"):
        fedtrain.simulate(tmp_path)


def test_what_the_task_raises_is_a_task_error_with_its_place(project, heart):
    (project / "heart_task.py").write_text(
        TASK.replace("return x,", "raise KeyError('secret')\n        return x,")
    )
    with pytest.raises(TaskError, match=r"^data\('a'\): KeyError: 'secret'\. \(heart_task.py:\d+\)$"):
        fedtrain.simulate(project, HERE)


def test_changed_settings_are_told_from_a_run_that_goes_on(project):
    done = fedtrain.simulate(project, HERE)
    assert fedtrain.simulate(project, HERE).history == done.history  # nothing is trained again
    with pytest.raises(StoreError, match=r"train.lr was 0.1, is 0.2"):
        fedtrain.simulate(project, {"train.lr": 0.2, **HERE})
    assert fedtrain.simulate(project, {"train.lr": 0.2, **HERE}, fresh=True).history != done.history


# --- in this process


@pytest.mark.usefixtures("forked")
@pytest.mark.slow(5)
def test_without_workers_no_process_is_started_and_the_bits_are_the_same(project, monkeypatch):
    with_workers = fedtrain.simulate(project, {"simulate.workers": 2})
    ours = digest(with_workers)

    async def never(*args, **kwargs):
        raise AssertionError("a process was started")

    monkeypatch.setattr(asyncio, "create_subprocess_exec", never)
    assert digest(fedtrain.simulate(project, HERE, fresh=True)) == ours


@pytest.mark.slow(8)
def test_a_warm_call_in_process_takes_less_than_to_load_torch(project):
    """Of a processor's time: others are at work here too."""
    fedtrain.simulate(project, HERE)

    def processor_s(whose, work):
        before = resource.getrusage(whose)
        work()
        after = resource.getrusage(whose)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    bare = [sys.executable, "-c", "import torch"]
    bare_s = processor_s(resource.RUSAGE_CHILDREN, lambda: subprocess.run(bare, check=True))
    warm_s = processor_s(resource.RUSAGE_SELF, lambda: fedtrain.simulate(project, HERE, fresh=True))
    assert warm_s < bare_s


@pytest.mark.usefixtures("forked")
@pytest.mark.slow(3)
def test_what_a_task_raises_here_is_the_error_that_a_worker_would_tell(project):
    (project / "heart_task.py").write_text(
        TASK.replace("return torch.nn.functional", "raise OSError(7)\n        return torch.nn.functional")
    )
    told = []
    for workers in (0, 1):
        with pytest.raises(TaskError) as error:
            fedtrain.simulate(project, {"simulate.workers": workers})
        told.append(str(error.value))
    assert told[0] == told[1]
    assert told[0].startswith("loss() at site a, round 1: OSError: 7. (heart_task.py:")


def test_simulations_of_several_threads_here_don_t_draw_from_each_other(project):
    runs = {}

    def train(name):
        runs[name] = fedtrain.simulate(project, {"run.name": name, "secagg.enabled": False, **HERE})

    expected = digest(fedtrain.simulate(project, {"run.name": "open", "secagg.enabled": False, **HERE}))
    threads = [threading.Thread(target=train, args=(name,)) for name in "xyz"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {digest(run) for run in runs.values()} == {expected}


def test_the_generators_and_threads_of_the_caller_are_left_alone(project):
    torch.manual_seed(5)
    random.seed(5)
    expected, threads = (torch.rand(1), random.random()), torch.get_num_threads()
    torch.manual_seed(5)
    random.seed(5)
    fedtrain.simulate(project, HERE).model()
    assert (torch.rand(1), random.random()) == expected
    assert torch.get_num_threads() == threads


def test_a_changed_task_file_is_read_again(project):
    before = fedtrain.simulate(project, HERE)
    (project / "heart_task.py").write_text(TASK.replace("hidden=4", "hidden=12"))
    after = fedtrain.simulate(project, HERE, fresh=True)
    assert next(after.model().parameters()).shape == (12, 3)
    assert before.path == after.path


def test_a_task_may_hold_data_of_this_process_when_it_trains_here(heart, monkeypatch):
    class_with_data = type("Held", (heart,), {"__module__": "heart_task"})
    monkeypatch.setattr(sys.modules["heart_task"], "Held", class_with_data, raising=False)
    task = class_with_data()
    x = torch.randn(30, 3)
    task.data = lambda site: (x, (x[:, 0] > 0).long())
    run = fedtrain.simulate(task, {"run.rounds": 1, **HERE})
    assert run.metrics
    with pytest.raises(ConfigError, match=r"its data was set after it was made.*simulate.workers = 0"):
        fedtrain.simulate(task, {"run.rounds": 1, "simulate.workers": 1})


# --- where the caller's code lies


def test_a_running_event_loop_is_no_obstacle(project):
    async def inside():
        return fedtrain.simulate(project, HERE)

    assert asyncio.run(inside()).metrics


SCRIPT = (
    TASK
    + """
SCALE = 2
criterion = torch.nn.CrossEntropyLoss(label_smoothing=0.1)

def scaled(x):
    return SCALE * x

class Scaled(Heart):
    def loss(self, model, batch):
        return criterion(model(scaled(batch[0])), batch[1])

print("the script runs")
run = fedtrain.simulate(Scaled(hidden=5), {"run.rounds": 2, "simulate.workers": WORKERS})
print(run.path.name, run.config.run.task.partition(":")[2], next(run.model().parameters()).shape[0])
"""
)


def script(folder, text):
    (folder / "train.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": str(Path(fedtrain.__file__).parents[1])}
    return subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=env, capture_output=True, text=True, timeout=120
    )


@pytest.mark.slow(10)
def test_a_task_of_a_script_trains_in_workers_which_do_not_run_the_script(tmp_path):
    done = script(tmp_path, SCRIPT.replace("WORKERS", "2"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["the script runs", "scaled+simulate Scaled(hidden=5) 5"]
    about = json.loads((tmp_path / "runs" / "scaled+simulate" / "model" / "model.json").read_text())
    (tmp_path / "runs").rename(tmp_path / "with-workers")
    done = script(tmp_path, SCRIPT.replace("WORKERS", "0"))
    assert done.returncode == 0, done.stderr
    again = json.loads((tmp_path / "runs" / "scaled+simulate" / "model" / "model.json").read_text())
    assert (again["weights_digest"], again["task_digest"]) == (about["weights_digest"], about["task_digest"])


HELD = (
    TASK
    + """
import threading
lock = [threading.Lock()][0]

class Locked(Heart):
    def loss(self, model, batch):
        with lock:
            return super().loss(model, batch)

try:
    fedtrain.simulate(Locked(), {"run.rounds": 1, "simulate.workers": 1})
except fedtrain.FedtrainError as e:
    print(e)
print(fedtrain.simulate(Locked(), {"run.rounds": 1, "simulate.workers": 0}).path.name)
"""
)


@pytest.mark.slow(5)
def test_what_only_this_process_has_is_refused_for_workers_and_works_without(tmp_path):
    done = script(tmp_path, HELD)
    assert done.returncode == 0, done.stderr
    refused, name = done.stdout.splitlines()
    assert "it uses lock, a lock that only this process has" in refused
    assert name == "locked+simulate"


def test_an_argument_that_is_no_constant_is_refused_for_workers(heart):
    with pytest.raises(ConfigError, match="more than constants"):
        fedtrain.simulate(heart(torch.ones(3)), {"simulate.workers": 1})


def test_constants_for_the_constructor_stand_in_run_task(heart):
    run = fedtrain.simulate(heart(hidden=6), {"run.rounds": 1, **HERE})
    assert run.config.run.task == "heart_task:Heart(hidden=6)"
    by_key = fedtrain.simulate(".", {"run.task": "heart_task:Heart(hidden=6)", "run.name": "six", **HERE})
    assert next(by_key.model().parameters()).shape == next(run.model().parameters()).shape == (6, 3)
    with pytest.raises(ConfigError, match='must be "module:Class"'):
        fedtrain.simulate(".", {"run.task": "heart_task:Heart(hidden=print())", **HERE})


def test_a_class_inside_a_function_is_told_to_move(heart):
    class Inner(heart):
        pass

    with pytest.raises(ConfigError, match="is defined inside a function or class"):
        fedtrain.simulate(Inner(), {"simulate.workers": 1})


def test_a_strategy_of_ones_own_is_a_class_among_the_settings(project, heart, monkeypatch):
    (project / "mine.py").write_text(
        "from dataclasses import dataclass\nimport fedtrain\n\n\n@dataclass(frozen=True)\n"
        "class Half(fedtrain.Strategy):\n    part: float = 0.5\n\n"
        "    def step(self, weights, state, round):\n"
        "        return weights + self.part * round.mean, state\n"
    )
    mine = __import__("mine")
    run = fedtrain.simulate(
        heart(), {"strategy.kind": mine.Half, "strategy.part": 0.25, "run.rounds": 1, **HERE}
    )
    assert run.config.strategy.kind == "mine:Half"


# --- stopping


INTERRUPTED = (
    TASK.replace("return x, (", "import time\n        time.sleep(PAUSE)\n        return x, (")
    + """
import sys
print("begun", flush=True)
try:
    run = fedtrain.simulate(Heart(), {"run.rounds": ROUNDS, "evaluate.every": 0, "simulate.workers": 1})
    print(len(run.history))
except KeyboardInterrupt:
    print("interrupted")
"""
)


@pytest.mark.slow(15)
def test_ctrl_c_ends_cleanly_and_the_same_call_goes_on(tmp_path):
    text = INTERRUPTED.replace("PAUSE", "0").replace("ROUNDS", "100000")
    (tmp_path / "train.py").write_text(text)
    env = {**os.environ, "PYTHONPATH": str(Path(fedtrain.__file__).parents[1])}
    child = subprocess.Popen(
        [*IN_TERMINAL, sys.executable, "train.py"], cwd=tmp_path, env=env, stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    run_dir, until = tmp_path / "runs" / "heart+simulate", time.monotonic() + 60
    while not (run_dir / "events.jsonl").exists() or not any(
        isinstance(event, events.RoundCommitted) for event in log.read(run_dir)
    ):
        assert time.monotonic() < until
        time.sleep(0.02)
    child.send_signal(signal.SIGINT)
    out, _ = child.communicate(timeout=60)
    assert (child.returncode, out.split()) == (0, ["begun", "interrupted"])
    assert not log.running(run_dir)
    done = max(e.round for e in log.read(run_dir) if isinstance(e, events.RoundCommitted))
    result = script(tmp_path, text.replace("100000", str(done + 2)))
    assert result.stdout.split() == ["begun", str(done + 2)], result.stderr
    (began, again) = [e for e in log.read(run_dir) if isinstance(e, events.RunStarted)]
    assert (began.resumed_from, again.resumed_from) == (None, done)


def test_an_error_of_the_callers_own_display_ends_the_run(project, monkeypatch):
    class Broken:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def __call__(self, event):
            raise RuntimeError("no screen")

    monkeypatch.setattr(api, "_screen", lambda progress: Broken())
    with pytest.raises(RuntimeError, match="no screen"):
        fedtrain.simulate(project, {"run.rounds": 1000, **HERE})
    assert "fedtrain" not in {thread.name for thread in threading.enumerate()}
    assert not log.running(project / "runs" / "heart+simulate")


# --- in a service


def test_peers_are_awaited_in_one_program_and_each_gives_its_run(tmp_path, inline):
    config = federation_of_three(tmp_path)
    (tmp_path / "fedtrain.toml").write_text('[run]\nname = "r"\ntask = "blobs_task:Blobs"\nrounds = 2\n')
    allowed(config, masks=False)

    async def service():
        heard = []
        listen = {name: {"network.listen": f"127.0.0.1:{free_port()}"} for name in "abc"}
        works = [fedtrain.peer(name, tmp_path, listen[name], on_event=heard.append) for name in "abc"]
        return heard, await asyncio.gather(*works)

    heard, runs = asyncio.run(asyncio.wait_for(service(), 60))
    assert [run.path.name for run in runs] == ["r+gossip@a", "r+gossip@b", "r+gossip@c"]
    assert len({event.digest for event in heard if isinstance(event, events.PeersAgreed)}) == 1
    assert all([row["round"] for row in run.history] == [1, 2] for run in runs)
    with pytest.raises(ConfigError, match="--invitation: this is no invitation"):
        asyncio.run(fedtrain.peer("a", tmp_path, invitation="?"))


def test_an_aggregator_and_sites_are_awaited_in_one_program_without_taking_its_signals(tmp_path, inline):
    config = federation_of_three(
        tmp_path, run={"name": "r", "task": "blobs_task:Blobs", "rounds": 2, "seed": 5}
    )
    table = "\n".join(
        f"[{section}]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in keys.items())
        for section, keys in {
            "run": {"name": "r", "task": "blobs_task:Blobs", "rounds": 2},
            "network": {"listen": config.network.listen},
        }.items()
    )
    (tmp_path / "fedtrain.toml").write_text(table)
    heard = []

    async def service():
        handlers = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
        allowed(config)
        sites = [asyncio.create_task(fedtrain.site(name, tmp_path)) for name in "abc"]
        run = await fedtrain.aggregate(tmp_path, on_event=heard.append)
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == handlers
        return run, await asyncio.gather(*sites)

    run, reasons = asyncio.run(asyncio.wait_for(service(), 60))
    assert [row["round"] for row in run.history] == [1, 2]
    assert len(set(reasons)) == 1
    assert any(isinstance(event, events.RunFinished) for event in heard)


def test_a_cancelled_aggregator_stops_cleanly_and_may_be_called_again(tmp_path, inline):
    config = federation_of_three(tmp_path)
    listening = asyncio.Event

    async def cancelled_once_it_listens():
        ready = listening()
        work = asyncio.create_task(
            fedtrain.aggregate(
                config, on_event=lambda e: ready.set() if isinstance(e, events.Waiting) else None
            )
        )
        await asyncio.wait_for(ready.wait(), 60)
        work.cancel()
        with pytest.raises(asyncio.CancelledError):
            await work

    for _ in range(2):  # the port and the run directory are free again
        asyncio.run(cancelled_once_it_listens())
    assert not log.running(config.run_dir)


# --- what it costs to have


def test_the_names_are_listed_and_cost_nothing_until_they_are_used():
    code = "import sys, fedtrain; print(*dir(fedtrain)); print(*{m.split('.')[0] for m in sys.modules})"
    names, loaded = subprocess.check_output([sys.executable, "-c", code], text=True).splitlines()
    assert set(fedtrain.__all__) < set(names.split())
    assert not {"torch", "numpy", "grpc", "msgspec", "asyncio", "IPython", "matplotlib"} & set(loaded.split())
    code = "import sys, fedtrain; fedtrain.site; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = subprocess.check_output([sys.executable, "-c", textwrap.dedent(code)], text=True)
    assert not {"torch", "grpc", "IPython", "matplotlib", "click"} & set(loaded.split())
