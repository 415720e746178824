"""The commands, as a user and as a program meet them."""

import asyncio
import json
import os
import re
import resource
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

import fedtrain
from fedtrain import events, pki
from fedtrain.cli import cli
from fedtrain.cli.output import RUN_COLUMNS, fitted, width_of
from fedtrain.errors import TooFewSites
from fedtrain.runtime.simulations import simulation
from fedtrain.runtime.sites import site
from fedtrain.runtime.star import aggregator
from fedtrain.tracking import EventLog
from fedtrain.tracking.log import read
from tests.signals import IN_TERMINAL

FEDTRAIN = [sys.executable, "-m", "fedtrain"]


@pytest.fixture
def project(tmp_path, monkeypatch):
    (tmp_path / "fedtrain.toml").write_text('[run]\nname = "heart"\nrounds = 2\n')
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*args, **kinds):
    return CliRunner().invoke(cli, [*args], prog_name="fedtrain", **kinds)


def write_run(folder, *, finished=True):
    with EventLog(folder) as log:
        log.emit(events.RunStarted(run="heart", mode="simulate", rounds=2, sites=2))
        log.emit(events.RoundStarted(round=1, sites=["a", "b"]))
        log.emit(events.RoundCommitted(round=1, loss=0.5, seconds=0.1, sites=2))
        log.emit(events.Evaluated(round=1, metrics={"accuracy": 0.75}))
        if finished:
            log.emit(events.RunFinished(round=1, reason="rounds done"))


# --- help, and what it costs


def test_help_lists_commands_as_a_user_meets_them_then_the_optional_ones():
    text = run("--help").output
    assert re.findall(r"^  (\w+)  ", text, re.M) == [
        "new", "simulate", "stats", "topology", "certs", "join", "task", "policy", "aggregator",
        "site", "peer", "invite", "datacenter", "plan", "watch", "runs", "doctor", "export",
        "evaluate", "audit", "verify", "compare", "dashboard", "report", "sweep", "track"]  # fmt: skip


def test_without_a_command_there_is_help_with_a_quick_start_of_five_lines():
    result = run()
    assert result.exit_code == 0
    assert len(result.output.split("Quick start:\n")[1].strip().splitlines()) == 5


COMMANDS = {name: cli.get_command(None, name) for name in cli.list_commands(None)}
GROUPS = {name: command.commands for name, command in COMMANDS.items() if hasattr(command, "commands")}
WITHIN = [f"{group} {name}" for group, commands in GROUPS.items() for name in commands]


@pytest.mark.parametrize("command", [*COMMANDS, *WITHIN])
def test_every_command_says_in_one_sentence_what_it_does(command):
    result = run(*command.split(), "--help")
    assert result.exit_code == 0
    about = result.output.split("\n\n")[1]
    assert about.strip().endswith(".")
    assert "..." not in run("--help").output.split("Commands:")[1]  # none is cut off in the list


def test_the_commands_load_nothing_heavy_until_they_run():
    code = "import sys, fedtrain.cli; print(*{m.split('.')[0] for m in sys.modules})"
    loaded = set(subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert not loaded & {
        "torch",
        "numpy",
        "grpc",
        "cryptography",
        "rich",
        "msgspec",
        "asyncio",
        "safetensors",
    }


def test_help_is_there_within_a_few_starts_of_a_bare_interpreter():
    def seconds(*args):
        """The processor's time, which others that work here don't lengthen."""

        def once():
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            subprocess.run([sys.executable, *args], check=True, stdout=subprocess.DEVNULL)
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

        return min(once() for _ in range(5))

    assert seconds("-m", "fedtrain", "--help") < 15 * seconds("-c", "pass")


@pytest.mark.parametrize("command", ["", *COMMANDS, *WITHIN])
def test_h_is_help_and_fits_80_columns(command):
    text = run(*command.split(), "-h", env={"COLUMNS": "80"}).output
    assert text == run(*command.split(), "--help", env={"COLUMNS": "80"}).output
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(("no_color", "colored"), [("", True), ("1", False)])
def test_no_color_is_honoured_on_a_terminal(project, no_color, colored):
    ours, theirs = os.openpty()
    env = {**os.environ, "NO_COLOR": no_color, "TERM": "xterm"}
    assert subprocess.run([*FEDTRAIN, "export"], stderr=theirs, env=env, check=False).returncode == 1
    assert (b"\x1b[31m" in os.read(ours, 4096)) is colored
    os.close(ours)
    os.close(theirs)


def test_the_version_is_the_packages():
    assert run("--version").output == f"fedtrain {fedtrain.__version__}\n"


# --- errors


def test_a_users_mistake_is_one_line_on_stderr_and_exit_code_1(project):
    result = run("runs", "--set", "train.lrr=1")
    assert (result.exit_code, result.stdout) == (1, "")
    assert result.stderr == "fedtrain: train.lrr: unknown key. Did you mean train.lr?\n"


def test_wrong_usage_is_exit_code_2(project):
    assert run("runs", "--jsn").exit_code == 2
    assert run("simulat").exit_code == 2
    assert run("site").exit_code == 2
    assert run("export", "--round", "last").exit_code == 2


def test_a_missing_project_says_how_to_make_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for command in (["simulate"], ["aggregator"], ["site", "bern"], ["runs"], ["watch"], ["certs", "init"]):
        result = run(*command)
        assert result.exit_code == 1
        assert "fedtrain new NAME" in result.stderr


def test_a_traceback_is_there_for_the_asking(project):
    def failing(*flags, **variables):
        env = {**os.environ, **variables}
        return subprocess.run(
            [*FEDTRAIN, "export", *flags], capture_output=True, text=True, check=False, env=env
        )

    quiet, by_flag, by_variable = failing(), failing("--traceback"), failing(FEDTRAIN_DEBUG="1")
    assert [r.returncode for r in (quiet, by_flag, by_variable)] == [1, 1, 1]
    assert "Traceback" not in quiet.stderr
    assert "Traceback" in by_flag.stderr
    assert "Traceback" in by_variable.stderr


def test_an_error_of_the_system_is_one_line_too(project, monkeypatch):
    async def simulate(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(simulation, "simulate", simulate)
    result = run("simulate")
    room = "Make room there, then start the same command again."
    assert (result.exit_code, result.stderr) == (1, f"fedtrain: [Errno 28] No space left on device. {room}\n")


@pytest.mark.parametrize("full", ["out/.model.json.new", "out/.MODEL_CARD.md.new"])
def test_a_full_disk_is_named_with_the_path(project, full):
    from .test_export import a_run

    a_run(project / "runs" / "heart")
    write_run(project / "runs" / "heart")
    (project / "out").mkdir()
    (project / full).symlink_to("/dev/full")
    error = run("export", "-o", "out").stderr
    assert error.startswith("fedtrain: [Errno 28] No space left on device: 'out/M".replace("M", full[5])), (
        error
    )
    assert len(error.splitlines()) == 1


def test_a_command_whose_events_find_the_disk_full_names_them(project, monkeypatch):
    monkeypatch.setattr(simulation, "simulate", a_mode([]))
    (project / "runs" / "heart+simulate").mkdir(parents=True)
    (project / "runs" / "heart+simulate" / "events.jsonl").symlink_to("/dev/full")
    result = run("simulate")
    assert result.exit_code == 1
    assert f"No space left on device: '{project}/runs/heart+simulate/events.jsonl'. Make" in result.stderr


def test_a_bug_of_ours_keeps_its_traceback(project, monkeypatch):
    async def simulate(*_, **__):
        raise KeyError("x")

    monkeypatch.setattr(simulation, "simulate", simulate)
    assert isinstance(run("simulate").exception, KeyError)


# --- simulate, aggregator, site: what they hand on


def a_mode(calls):
    """Stands for a mode of the runtime: notes what it is given, and emits a short run."""

    async def mode(config, *args, emit, **given):
        calls.append(SimpleNamespace(config=config, args=args, **given))
        emit(events.RunStarted(run=config.run.name, mode="simulate", rounds=config.run.rounds))
        emit(events.RoundCommitted(round=1, loss=0.5, sites=2))
        emit(events.RunFinished(round=1, reason="rounds done"))

    return mode


def test_simulate_writes_its_events_into_its_own_run_directory(project, monkeypatch):
    calls = []
    monkeypatch.setattr(simulation, "simulate", a_mode(calls))
    result = run("simulate", "--fresh", "--set", "train.lr=0.5")
    assert (result.exit_code, result.stderr) == (0, "")
    assert "round 1/2: done: 2 sites  loss 0.5000" in result.stdout
    assert (calls[0].fresh, calls[0].debug, calls[0].config.train.lr) == (True, None, 0.5)
    assert len(list(read(project / "runs" / "heart+simulate"))) == 3


def test_debug_names_the_site_to_train_in_this_process(project, monkeypatch):
    calls = []
    monkeypatch.setattr(simulation, "simulate", a_mode(calls))
    assert run("simulate", "--debug", "bern").exit_code == 0
    assert calls[0].debug == "bern"


def test_json_prints_the_events_one_a_line(project, monkeypatch):
    monkeypatch.setattr(simulation, "simulate", a_mode([]))
    lines = [json.loads(line) for line in run("simulate", "--json").stdout.splitlines()]
    assert [line["kind"] for line in lines] == ["run_started", "round_committed", "run_finished"]


def test_aggregator_and_site_use_run_directories_of_their_own(project, monkeypatch):
    calls = []
    monkeypatch.setattr(aggregator, "serve", a_mode(calls))
    monkeypatch.setattr(site, "run", a_mode(calls))
    (project / "d").mkdir()
    assert run("aggregator").exit_code == 0
    assert run("site", "bern", "--data", "d").exit_code == 0
    assert (calls[1].args, str(calls[1].data_dir)) == (("bern",), "d")
    assert sorted(path.name for path in (project / "runs").iterdir()) == ["heart", "heart@bern"]


def test_a_run_that_fails_says_why_here_and_in_its_events(project, monkeypatch):
    async def serve(config, *, emit, start, data_dir):
        emit(events.RunStarted(run="heart", mode="federated", rounds=2))
        raise TooFewSites("round 1", 1, 2)

    monkeypatch.setattr(aggregator, "serve", serve)
    result = run("aggregator")
    assert result.exit_code == 1
    assert result.stderr.startswith("fedtrain: round 1: 1 sites replied, 2 are needed.")
    assert "stopped: round 1" in list(read(project / "runs" / "heart"))[-1].text


LONG_RUN = """
import asyncio, sys
from fedtrain import cli, events
from fedtrain.runtime.star import aggregator

async def serve(config, *, emit, start, data_dir):
    emit(events.RunStarted(run="heart", mode="federated", rounds=2))
    try:
        await asyncio.sleep(600)
    finally:
        emit(events.Notice(text="cleaned up"))

aggregator.serve = serve
sys.argv = ["fedtrain", "aggregator"]
cli.main()
"""


@pytest.mark.parametrize(
    ("sent", "code", "line"),
    [
        (signal.SIGINT, 130, "Interrupted."),
        (signal.SIGTERM, 143, "Stopped."),
        (signal.SIGHUP, 129, "Stopped."),
    ],
)
def test_a_signal_ends_a_run_in_order_and_says_that_it_goes_on(project, sent, code, line):
    child = subprocess.Popen(
        [*IN_TERMINAL, sys.executable, "-c", textwrap.dedent(LONG_RUN)],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "run heart" in child.stdout.readline()
    child.send_signal(sent)
    out, err = child.communicate(timeout=60)
    assert "cleaned up" in out
    assert (child.returncode, err) == (
        code, f"{line} The same command goes on from the last committed round.\n")  # fmt: skip


def test_a_run_under_nohup_outlives_its_terminal(project):
    child = subprocess.Popen(
        ["nohup", sys.executable, "-c", textwrap.dedent(LONG_RUN)],
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "run heart" in child.stdout.readline()
    child.send_signal(signal.SIGHUP)
    child.send_signal(signal.SIGTERM)
    child.communicate(timeout=60)
    assert child.returncode == 143


# --- certs


def test_certs_init_and_issue_make_what_aggregator_and_sites_load(project):
    assert run("certs", "init").exit_code == 0
    result = run("certs", "issue", "aggregator", "site-1", "site-2")
    assert result.exit_code == 0
    assert len(result.output.splitlines()) == 3
    assert pki.Credentials.load(project / "certs" / "aggregator").identity.role == "aggregator"
    for name in ("site-1", "site-2"):
        identity = pki.Credentials.load(project / "certs" / "sites" / name).identity
        assert (identity.role, identity.name, identity.federation) == ("site", name, "heart")


def test_the_federations_name_is_the_runs_made_fit_or_the_one_given(project):
    result = run("certs", "init", "--set", "run.name=Heart_v2.1")
    assert "the authority of heart-v2-1" in result.output
    result = run("certs", "init", "--federation", "swiss", "--set", "network.certs=other")
    assert "the authority of swiss" in result.output
    assert (project / "other" / "ca" / "issuing.pem").exists()


def test_a_second_authority_never_replaces_the_first(project):
    run("certs", "init")
    result = run("certs", "init")
    assert result.exit_code == 1
    assert "never overwritten" in result.stderr


def test_a_signing_request_is_signed_in_the_name_of_its_file_after_a_yes_to_its_key(project):
    from fedtrain.pki.enrolment import request

    run("certs", "init")
    csr, _ = request(project / "elsewhere")
    (project / "north.csr").write_bytes(csr)
    result = run("certs", "sign", "north.csr", input="n\n")
    assert re.search(r"Does north read out the same SHA-256 of its public key, [0-9a-f]{64}\?", result.output)
    assert not (project / "certs" / "sites").exists()
    assert run("certs", "sign", "north.csr", input="y\n").exit_code == 0
    assert sorted(p.name for p in (project / "certs/sites/north").iterdir()) == ["cert.pem", "root.pem"]


# --- watch, runs, export


def test_watch_shows_a_finished_run_and_ends(project):
    write_run(project / "runs" / "heart+simulate")
    result = run("watch")
    assert result.exit_code == 0
    assert "round 1/2: done" in result.output
    assert "finished after round 1: rounds done" in result.output.splitlines()[-1]


def test_watch_follows_another_process_until_the_run_finishes(project):
    folder = project / "runs" / "heart"
    with EventLog(folder) as log:
        log.emit(events.RunStarted(run="heart", mode="federated", rounds=2))
        child = subprocess.Popen([*FEDTRAIN, "watch", "heart", "--json"], stdout=subprocess.PIPE, text=True)
        assert json.loads(child.stdout.readline())["kind"] == "run_started"
        log.emit(events.Notice(text="now"))
        assert json.loads(child.stdout.readline())["text"] == "now"
        log.emit(events.RunFinished(round=2))
        rest, _ = child.communicate(timeout=60)
    assert json.loads(rest)["kind"] == "run_finished"
    assert child.returncode == 0


def test_watch_says_when_no_process_works_on_the_run_and_ends_on_ctrl_c(project):
    write_run(project / "runs" / "heart", finished=False)
    child = subprocess.Popen(
        [*IN_TERMINAL, *FEDTRAIN, "watch"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    lines = iter(child.stdout.readline, "")
    said = any("no process works on this run" in line for line in lines)
    child.send_signal(signal.SIGINT)
    ended = *child.communicate(timeout=60), child.returncode
    assert said, ended
    assert child.returncode == 130, ended


def test_watch_goes_on_when_a_finished_run_was_started_again(project, monkeypatch):
    folder = project / "runs" / "heart"
    write_run(folder)
    with EventLog(folder) as log:
        log.emit(events.RunStarted(run="heart", mode="federated", rounds=4, resumed_from=1))
    monkeypatch.setattr("fedtrain.tracking.log.follow", lambda _: iter([*read(folder), None, None, None]))
    assert run("watch").output.splitlines()[-1].endswith("waiting for it to go on")


def test_runs_lists_what_there_is_for_people_and_for_programs(project):
    assert "No run in runs yet" in run("runs").output
    assert run("runs", "--json").output == ""
    write_run(project / "runs" / "heart+simulate")
    write_run(project / "runs" / "heart", finished=False)
    head, *rows = run("runs").output.splitlines()
    assert head.split() == ["RUN", "STATE", "ROUND", "LOSS", "EVALUATED", "BEST", "UPDATED"]
    assert [row.split()[:4] for row in rows] == [
        ["heart+simulate", "finished", "1/2", "0.5000"], ["heart", "stopped", "1/2", "0.5000"]]  # fmt: skip
    found = [json.loads(line) for line in run("runs", "--json").output.splitlines()]
    assert [(r["run"], r["state"]) for r in found] == [("heart+simulate", "finished"), ("heart", "stopped")]
    assert [r["metrics"] for r in found] == [{"accuracy": 0.75}] * 2


@pytest.mark.parametrize("name", ["heart+gossip@basel", "fashion-mnist-dirichlet-0.1+gossip@university-3"])
def test_runs_keeps_names_best_and_updated_at_80_columns(name):
    metrics = "loss 0.3012  accuracy 0.9011  f1 0.8800"
    rows = [
        RUN_COLUMNS,
        (name, "finished", "200/200", "0.3012", metrics, "0.9011 in round 112", "11-22 13:22"),
    ]
    lines = fitted(rows, 80)
    assert width_of(lines) <= 80
    assert lines[0] == (*RUN_COLUMNS[:4], *RUN_COLUMNS[5:])
    assert lines[1][-2:] == rows[1][-2:]
    assert (lines[1][0][:8], lines[1][0][-6:]) == (name[:8], name[-6:])
    assert fitted(rows, 200) == rows
    assert fitted(rows, width_of(rows) - 5)[1][4] == metrics[: -5 - 1] + "…"


def test_a_look_at_the_runs_opens_no_database(project):
    write_run(project / "runs" / "heart")
    (project / "runs" / "heart" / "run.db").write_bytes(b"not a database")
    assert run("runs").exit_code == 0
    assert run("watch").exit_code == 0


def test_export_writes_the_named_run_and_says_where(project):
    from .test_export import a_run

    a_run(project / "runs" / "heart")
    write_run(project / "runs" / "heart")
    assert run("export").output == "heart-model holds MODEL_CARD.md, model.json, model.safetensors\n"
    result = run("export", "heart", "-o", "out", "--round", "best", "--json")
    about = json.loads(result.output)
    assert about == json.loads((project / "out" / "model.json").read_text())
    assert about["round"] == 2


def test_an_unknown_run_is_told_the_nearest(project):
    write_run(project / "runs" / "heart")
    result = run("export", "hart")
    assert result.exit_code == 1
    assert "Did you mean heart?" in result.stderr


def test_a_reader_that_has_gone_is_no_error(project):
    write_run(project / "runs" / "heart")
    line = f"{sys.executable} -m fedtrain runs --json | true"
    result = subprocess.run(["sh", "-c", line], capture_output=True, text=True, check=False)
    assert "Traceback" not in result.stderr


def test_drive_passes_on_what_the_work_raises():
    from fedtrain.cli.arguments import drive

    async def cancelled_by_itself():
        raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        drive(cancelled_by_itself())


# --- the page that describes them

PAGE = (Path(fedtrain.__file__).parent.parent / "docs" / "cli.md").read_text()


@pytest.mark.parametrize("path", [*(c for c in COMMANDS if c not in GROUPS), *WITHIN])
def test_the_page_describes_every_command_with_its_options_and_an_example(path):
    name, *inner = path.split()
    command = GROUPS[name][inner[0]] if inner else COMMANDS[name]
    section = re.split(r"^## ", PAGE.split(f"\n## fedtrain {path}", 1)[1], maxsplit=1, flags=re.M)[0]
    assert f"\n```bash\nfedtrain {path}" in section
    common = {"--config", "--set", "--json", "--traceback"}
    for option in {o for p in command.params for o in p.opts if o.startswith("--")} - common - {"--out"}:
        assert f"`{option} " in section or f"`{option}`" in section


def test_the_page_lists_every_kind_of_event_with_its_fields():
    for name, kind in events.KINDS.items():
        fields = [field for field in kind.__struct_fields__ if field != "time"]
        assert f"| `{name}` | {', '.join(fields)} |" in PAGE
