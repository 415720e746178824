"""`fedtrain new`: from nothing to a project that trains, without a network."""

import ast
import contextlib
import re
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

import fedtrain
from fedtrain import Config
from fedtrain.cli import cli
from tests.limits import WAIT_S
from tests.ports import free_port
from tests.processes import fedtrain as fedtrain_command
from tests.worlds import Command

ROOT = Path(fedtrain.__file__).parent.parent
FILES = {"task.py", "fedtrain.toml", "README.md", ".gitignore", "certs"}


def new(name, *options):
    return CliRunner().invoke(cli, ["new", str(name), *options])


def until(condition):
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def project(tmp_path):
    assert new(tmp_path / "heart").exit_code == 0
    return tmp_path / "heart"


def test_a_new_project_has_its_four_files_its_certificates_and_its_name(project):
    assert {path.name for path in project.iterdir()} == FILES
    assert Config.load(project / "fedtrain.toml", env={}).run.name == "heart"
    assert not any("PROJECT" in path.read_text() for path in project.iterdir() if path.is_file())


def test_the_new_config_is_short_and_right_for_two_sites(project):
    config = Config.load(project / "fedtrain.toml", env={})
    assert (config.strategy.min_sites, config.run.rounds) == (3, 5)
    assert len((project / "fedtrain.toml").read_text().splitlines()) <= 30


def test_the_new_task_is_at_most_forty_lines_and_trains_as_it_is(project):
    import torch

    from fedtrain.training.task import load_task

    source = (project / "task.py").read_text()
    assert len(source.splitlines()) <= 40
    assert ast.get_docstring(ast.parse(source))
    config = Config.load(project / "fedtrain.toml", env={})
    task = load_task(config.run.task, project)
    assert task.sites() == ["site-1", "site-2", "site-3"]
    data = {site: task.data(site) for site in task.sites()}
    assert not torch.equal(data["site-1"][0], data["site-2"][0])
    assert torch.equal(data["site-1"][0], task.data("site-1")[0])  # the same in every process
    model = task.model()
    optimizer = torch.optim.Adam(model.parameters(), lr=config.train.lr)
    before = task.loss(model, data["site-1"]).item()
    for _ in range(50):
        optimizer.zero_grad()
        task.loss(model, data["site-1"]).backward()
        optimizer.step()
    assert task.loss(model, data["site-1"]).item() < 0.8 * before
    correct, count = task.evaluate(model, task.eval_data("site-2"))["accuracy"]
    assert 0 <= correct <= count == 200


@pytest.mark.slow(4)
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing")  # of transformers
@pytest.mark.parametrize("template", ["vision", "text", "lora", "gossip"])
def test_each_template_trains_as_it_is(tmp_path, template):
    if template == "lora":
        pytest.importorskip("peft", reason="needs the extra hf")
    assert new(tmp_path / "p", "--template", template).exit_code == 0
    assert not any("PROJECT" in path.read_text() for path in (tmp_path / "p").iterdir() if path.is_file())
    gossip = template == "gossip"
    settings = {"run.rounds": 5} if gossip else {"simulate.workers": 0}
    run = fedtrain.simulate(tmp_path / "p", settings, mode="gossip" if gossip else "federated")
    assert run.metrics["accuracy"] > 0.6


@pytest.mark.slow(40)
@pytest.mark.parametrize("template", ["tabular", "gossip"])  # the others have the first one's README
def test_every_command_of_a_templates_readme_works_as_it_stands_there(tmp_path, template):
    """In its order; but for the ports, which are free ones, and CODE, which is what was printed before."""
    root = tmp_path / "demo"
    assert new(root, "--template", template).exit_code == 0
    ports = {port: str(free_port()) for port in ("8440", "8441", "8442", "8443")}
    for file in (root / "README.md", root / "fedtrain.toml"):
        file.write_text(re.sub("|".join(ports), lambda found: ports[found[0]], file.read_text()))
    typed = re.findall(r"^fedtrain (.+)$", (root / "README.md").read_text(), re.M)
    codes, running, started = [], {}, []
    with contextlib.ExitStack() as stack:
        for number, line in enumerate(typed):
            if line == "watch":  # from here on it looks at what those above have done
                assert all(each.wait(WAIT_S) == 0 for each in running.values()), started
            words = [codes.pop(0) if word == "CODE" else word for word in line.split()]
            log = tmp_path / f"{number}.log"
            log.touch()
            started.append((line, log))
            process = Command(fedtrain_command, words, folder=root, log=log, env={})
            stack.callback(lambda process=process: (process.kill(), process.wait(30)))
            if words[0] in ("aggregator", "site", "peer"):
                running[line] = process
            elif words[:2] == ["certs", "invite"]:  # it waits for who joins
                until(lambda log=log: "fedtrain join fl.example.org" in log.read_text())
            else:
                assert process.wait(WAIT_S) == 0, (line, log.read_text())
            if words[0] == "invite":
                codes.append(log.read_text().split()[0])


def test_the_lora_template_is_the_example_with_sites_of_its_own():
    example = (ROOT / "examples/lora/task.py").read_text()
    template = (ROOT / "fedtrain/templates/lora/task.py").read_text()
    renamed = example.replace("class Notes(", "class Task(")
    assert template == renamed.replace('"basel", "bern", "geneva"', '"site-1", "site-2", "site-3"')


def test_an_unknown_template_is_refused_with_those_that_there_are(tmp_path):
    result = new(tmp_path / "p", "--template", "audio")
    assert result.exit_code == 2
    assert "'tabular', 'vision', 'text', 'lora', 'gossip'" in result.output
    assert not (tmp_path / "p").exists()


def test_the_readme_names_every_command_that_a_run_needs(project):
    readme = (project / "README.md").read_text()
    for command in (
        "simulate", "task approve", "aggregator", "site site-1", "certs invite",
        "site site-2", "site site-3", "watch", "export heart",
    ):  # fmt: skip
        assert f"\nfedtrain {command}" in readme


def test_the_keys_of_the_new_project_never_get_into_git(project):
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    for secret in (
        "certs/ca/root.key.pem",
        "certs/sites/site-1/key.pem",
        "certs/sites/site-1/policy.toml",
        "data/patients.csv",
        "runs/heart/run.db",
    ):
        subprocess.run(["git", "check-ignore", "-q", secret], cwd=project, check=True)


def test_a_folder_with_something_in_it_is_left_alone(tmp_path):
    (tmp_path / "heart").mkdir()
    (tmp_path / "heart" / "task.py").write_text("mine")
    result = new(tmp_path / "heart")
    assert result.exit_code == 1
    assert "exists and is not empty" in result.stderr
    assert (tmp_path / "heart" / "task.py").read_text() == "mine"


def test_an_empty_folder_is_filled(tmp_path):
    (tmp_path / "heart").mkdir()
    assert new(tmp_path / "heart").exit_code == 0


@pytest.mark.parametrize("name", ["-x", "my project", "a@b", "x" * 65])
def test_a_name_that_cannot_be_a_runs_is_refused(tmp_path, name):
    result = CliRunner().invoke(cli, ["new", "--", str(tmp_path / name)])
    assert result.exit_code == 1
    assert "letters, digits" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_wheel_carries_the_template(tmp_path):
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, check=True, capture_output=True,
    )  # fmt: skip
    (wheel,) = tmp_path.glob("*.whl")
    there = {name for name in zipfile.ZipFile(wheel).namelist() if "templates/" in name}
    assert {Path(name).name for name in there} == {name.removeprefix(".") for name in FILES - {"certs"}}
    assert {Path(name).parent.name for name in there} == {"tabular", "vision", "text", "lora", "gossip"}
