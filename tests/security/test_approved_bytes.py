"""S22: at a site only the bytes that its people approved run (findings A1 to A4), whatever lies beside the
task, in its project, or comes there later."""

import asyncio
import json
import os
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from fedtrain.arena import Arena
from fedtrain.config import Config
from fedtrain.config.project import load_only
from fedtrain.errors import ConfigError, TaskError
from fedtrain.runtime.sites import site
from fedtrain.runtime.sites.approval import Approvals, approve, files_of
from fedtrain.runtime.trainers.trainer import Trainer
from fedtrain.runtime.trainers.workbench import Workbench
from fedtrain.training.task import load_task
from tests.federation import certificates
from tests.inprocess import Events

RAN = "open('ran', 'a').write(__name__ + ' ')\n"  # what an attacker's file does
TOY = """
class Toy(fedtrain.Task):
    def model(self): ...
    def data(self, site): ...
    def loss(self, model, batch): ...
"""
# What of these modules can be imported in a trainer, written to a file.
TRIED = """
import importlib, json, sys
import fedtrain, helper
%s
def tried(name):
    try:
        return getattr(importlib.import_module(name), "found", "theirs")
    except ImportError:
        return "none"
json.dump({name: tried(name) for name in json.load(open("names.json"))}, open("found.json", "w"))
"""
OWN = """
import colorsys, helper
try:
    __import__("optional"[:])
except ImportError:
    open("good", "a").write("x")
"""
COPY = "cp {weights} {out} && echo '{\"examples\": 3}' > {report}"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A site's project, with the key and certificate of the site north, and with three modules."""
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "fedtrain.toml", '[run]\ntask = "task:Toy"\n')
    write(tmp_path, "task.py", "import fedtrain, helper, colorsys\n" + TOY)
    write(tmp_path, "helper.py", "found = 'approved'\n")
    certificates(tmp_path / "certs", "north")
    return tmp_path


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def config_of(folder: Path, **train: str) -> Config:
    table = {"run": {"task": "task:Toy"}, "network": {"certs": "certs"}, "train": {"device": "cpu", **train}}
    return Config.of(table, folder)


def typed(folder: Path, *words: str, python: tuple[str, ...] = ()) -> str:
    """What a command says, typed in the project's folder: the script `fedtrain`, or `python ... `."""
    command = [str(Path(sys.executable).with_name("fedtrain"))] if not python else [sys.executable, *python]
    done = subprocess.run(
        [*command, *words], cwd=folder, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL
    )
    return done.stdout + done.stderr


def trained(folder: Path, approved: dict[str, str] | None) -> str:
    """How a trainer process begins that may load these files: "" where it has loaded the task."""

    async def run() -> None:
        options = {"scratch": folder, "metrics_only": True, "log": folder / "log"}
        async with await Trainer.start(config_of(folder), approved=approved, **options):
            pass

    try:
        asyncio.run(run())
    except (ConfigError, TaskError) as e:
        return str(e)
    return ""


def found_by(folder: Path, names: list[str], before: str = "", approved: bool = True) -> dict[str, str]:
    """Name -> what a task in a trainer process finds when it imports the module."""
    (folder / "names.json").write_text(json.dumps(names))
    write(folder, "task.py", TRIED % before + TOY)
    assert trained(folder, files_of(config_of(folder)) if approved else None) == ""
    return json.loads((folder / "found.json").read_text())


# --- A1, A2: names of modules that are not the project's


@pytest.mark.slow(5)  # commands
def test_a1_a_file_named_like_the_standard_library_does_not_run(project):
    """By the real commands: it is refused at the site's start, and at its approval, and runs at neither."""
    assert "task:Toy may run at north" in typed(project, "task", "approve")
    write(project, "colorsys.py", RAN)
    for words in (["site", "north"], ["task", "approve"]):
        said = typed(project, *words)
        assert "colorsys.py has the name of one of Python's own modules. Rename it" in said
    assert not (project / "ran").exists()


def test_a1_a_file_named_like_an_installed_package_is_refused_with_its_place(project):
    write(project, "task.py", "import fedtrain, msgspec\n" + TOY)
    write(project, "msgspec.py", RAN)
    for work in (lambda: load_task("task:Toy", project), lambda: approve(config_of(project))):
        with pytest.raises(ConfigError, match=r"msgspec\.py has the name of an installed package, .*Rename"):
            work()
    (project / "msgspec.py").unlink()
    assert approve(config_of(project))


def test_a2_a_file_that_an_installed_package_would_import_does_not_run(project, monkeypatch):
    """The package is on PYTHONPATH here, with the project's folder, and its optional import is caught, as
    pandas imports bottleneck."""
    beside = project.parent / "site-packages"
    write(
        beside,
        "theirs.py",
        "import fractions\ntry:\n    import optional\nexcept ImportError:\n    optional = None\n",
    )
    for name in ("optional.py", "fractions.py", "asyncio.py", "bottleneck.py", "opt_einsum.py"):
        write(project, name, RAN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([".", "", str(project), str(beside)]))
    found = found_by(project, ["optional", "bottleneck", "opt_einsum"], "import theirs")
    assert set(found.values()) == {"none"}
    assert not (project / "ran").exists()


# --- A3: between the check and the load


def test_a3_bytes_swapped_after_the_check_are_not_compiled(project, monkeypatch):
    """The site's own start, whose trainer process finds another file than was checked."""
    config, start = config_of(project), Trainer.start
    digest, events = approve(config)[0].digest, Events()

    async def swapped(cls: type[Trainer], config: Config, **options: object) -> Trainer:
        write(project, "helper.py", RAN + "import shutil\nshutil.copy('kept.py', 'helper.py')\n")
        return await start(config, metrics_only=True, **options)

    monkeypatch.setattr(Trainer, "start", classmethod(swapped))
    with pytest.raises(
        ConfigError, match=r"helper\.py changed since it was approved at this site, and no line"
    ):
        asyncio.run(site.run(config, "north", emit=events))
    assert not (project / "ran").exists()
    assert digest not in str(events.of("approved")), "no event says that the approved bytes run"


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("helper.py", RAN),
        ("helper/__init__.py", RAN),  # a package comes before the module of the same name
        ("extra.py", RAN),  # an optional module that was not there
    ],
)
def test_a3_a_file_that_was_not_there_at_the_check_is_not_loaded(project, name, text):
    write(project, "task.py", "import fedtrain, helper\ntry: import extra\nexcept ImportError: pass\n" + TOY)
    approved = files_of(config_of(project))
    assert trained(project, approved) == ""
    write(project, name, text)
    assert f"{name} changed since it was approved" in trained(project, approved)
    assert not (project / "ran").exists()


# --- what else may lie beside the task


def test_nothing_in_the_project_is_loaded_but_the_approved_sources(project):
    """Compiled files, an extension module, a package, a namespace package, site's hooks and .pth files."""
    names = [
        "compiled",
        "_core",
        "package",
        "space.inner",
        "plain",
        "helper",
        "sitecustomize",
        "usercustomize",
    ]
    for name in ("package/__init__.py", "space/inner.py", "plain.py", "sitecustomize.py", "usercustomize.py"):
        write(project, name, RAN + "found = 'theirs'\n")
    write(project, "x.pth", "import plain\n")
    py_compile.compile(str(project / "plain.py"), str(project / "compiled.pyc"))
    cached = project / "__pycache__" / f"helper.{sys.implementation.cache_tag}.pyc"
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    py_compile.compile(str(project / "plain.py"), str(cached), invalidation_mode=unchecked)
    extension = Path(msgspec.__file__).parent.glob("_core*.so")
    shutil.copy(next(extension), project)
    here = "sys.path[:0] = ['', '.', __file__.removesuffix('/task.py'), './package']"
    for before in ("", here):  # a task that names its own folder, as many do
        found = found_by(project, names, before)
        assert found.pop("helper") == "approved"
        assert {name for name in names if found.get(name) == "theirs"} <= {"sitecustomize", "usercustomize"}
    assert not (project / "ran").exists()
    alone = found_by(project, names, here, approved=False)
    assert alone["plain"] == alone["package"] == alone["_core"] == "none", "in a simulation it is the same"


def test_a_module_of_an_approved_package_that_no_import_names_is_not_loaded(project):
    write(project, "nets/__init__.py", "found = 'approved'\n")
    write(project, "nets/small.py", "found = 'approved'\n")
    write(project, "nets/evil.py", RAN)
    write(project, "open/wide.py", "found = 'approved'\n")
    write(project, "open/evil.py", RAN)
    shutil.copy(next(Path(msgspec.__file__).parent.glob("_core*.so")), project / "nets")
    names = ["nets", "nets.small", "open.wide", "nets.evil", "open.evil", "nets._core"]
    found = found_by(project, names, "import nets.small\nimportlib.import_module('open.wide')")
    assert found == dict.fromkeys(names[:3], "approved") | dict.fromkeys(names[3:], "none")
    assert not (project / "ran").exists()


def test_a_command_at_a_site_loads_no_other_module_of_an_approved_package(project):
    """In the process of `fedtrain stats --site`, whose sys.path is not closed."""
    write(project, "near/__init__.py", "")
    write(project, "near/evil.py", RAN)
    write(
        project,
        "task.py",
        "import fedtrain, near, importlib\nimportlib.import_module('near' + '.evil')\n" + TOY,
    )
    load_only(project, files_of(config_of(project)))
    try:
        with pytest.raises(TaskError, match=r"near\.evil|evil\.py is there"):
            load_task("task:Toy", project)
    finally:
        load_only(project, None)
    assert not (project / "ran").exists()


def test_a_link_that_leads_elsewhere_later_is_a_changed_file(project, tmp_path_factory):
    outside = tmp_path_factory.mktemp("outside")
    write(outside, "good.py", "found = 'approved'\n")
    write(outside, "evil.py", RAN)
    (project / "helper.py").unlink()
    (project / "helper.py").symlink_to(outside / "good.py")
    approve(config_of(project))
    approved = files_of(config_of(project))
    assert trained(project, approved) == ""
    (project / "helper.py").unlink()
    (project / "helper.py").symlink_to(outside / "evil.py")
    with pytest.raises(ConfigError, match=r"helper\.py changed since"):
        Approvals(project / "certs/sites/north").check(config_of(project))
    assert "helper.py changed since" in trained(project, approved)
    assert not (project / "ran").exists()


@pytest.mark.parametrize("line", ["importlib.import_module('far.away')", "__import__('far.away')"])
def test_a_module_imported_by_a_constant_name_is_approved_with_the_task(project, line):
    write(project, "far/away.py", "x = 1\n")
    write(project, "task.py", f"import fedtrain, importlib\ndef later():\n    {line}\n" + TOY)
    assert "far/away.py" in files_of(config_of(project))


def test_an_import_by_a_computed_name_says_what_to_do(project):
    write(project, "late.py", RAN)
    write(project, "task.py", "import fedtrain, importlib\nimportlib.import_module('la' + 'te')\n" + TOY)
    said = trained(project, files_of(config_of(project)))
    assert "late.py is there, but no import statement of the task's files names it: add one" in said
    assert not (project / "ran").exists()


# --- A4: train.command


@pytest.mark.slow(5)  # commands
def test_a4_a_command_that_was_never_approved_does_not_run(project):
    """By the real commands; and the approval names the command, in what is printed of it too."""
    command = ("--set", "train.command=python own.py {request}")
    write(project, "own.py", RAN)
    typed(project, "task", "approve")
    said = typed(project, "site", "north", *command)
    assert "train.command changed since task:Toy was approved" in said
    assert "own.py" in said
    said = typed(project, "task", "approve", *command)
    assert "own.py" in said
    assert "It trains by train.command: python own.py {request}" in said
    assert "python own.py {request}" in typed(project, "policy", "show")
    write(project, "own.py", RAN + "# a byte\n")
    assert "own.py changed since" in typed(project, "site", "north", *command)
    assert not (project / "ran").exists()


def test_a4_another_text_of_a_command_needs_another_approval(project):
    approvals = Approvals(approve(config_of(project, command=COPY))[1][0])
    assert approvals.check(config_of(project, command=COPY)).command == COPY
    for command in ("", COPY + ";"):
        with pytest.raises(ConfigError, match=r"train\.command changed since task:Toy was approved"):
            approvals.check(config_of(project, command=command))


def test_a4_a_commands_files_and_their_imports_are_in_the_digest(project):
    for name in ("own.py", "sub/run.sh", "sub/deep.py", "sub/near.py", "far.py", "conf.yaml", "log"):
        write(project, name, "")
    write(project, "sub/deep.py", "import near\n")
    command = (
        "sh ./sub/run.sh --c=conf.yaml {out}; python sub/deep.py >> log; python -um far && (python own.py)"
    )
    found = files_of(config_of(project, command=command))
    assert found.keys() >= {"own.py", "sub/run.sh", "sub/deep.py", "sub/near.py", "far.py", "conf.yaml"}
    assert "log" not in found, "the command writes it"


CALLS = [
    "cd sub && python deep.py",
    "python 'my file.py'",
    "python $PWD/sub/deep.py",
    "python ../own.py",
    "sh *.sh",
]


@pytest.mark.parametrize("command", CALLS)
def test_a4_a_script_that_is_named_in_another_way_is_refused(project, command):
    write(project, "sub/deep.py", RAN)
    write(project, "my file.py", RAN)
    with pytest.raises(ConfigError, match=r"train\.command: .* is no file in .*by its path from there"):
        files_of(config_of(project, command=command + " {out}"))


def test_a4_a_command_runs_the_approved_bytes_and_no_module_beside_them(project):
    """At its moment of use: swapped bytes, and what has the name of a module that it imports."""
    write(
        project,
        "task.py",
        "import fedtrain, torch\n"
        + TOY.replace("model(self): ...", "model(self): return torch.nn.Linear(1, 1)"),
    )
    write(project, "own.py", OWN)
    command = f"python own.py && python -m own && python -c 'import own' && {COPY}"
    approved = files_of(config_of(project, command=command))
    for name in ("colorsys.py", "optional.py"):
        write(project, name, RAN)
    with pytest.raises(ConfigError, match=r"colorsys\.py has the name"):
        files_of(config_of(project, command=command))
    (project / "colorsys.py").unlink()
    bench = Workbench(config_of(project, command=command), simulated=False)
    load_only(project, approved)
    try:
        arenas = bench.initial(), Arena.zeros(bench.description.update)
        bench.train("north", 0, *arenas)
        assert (project / "good").read_text() == "xxx"
        write(project, "own.py", RAN)
        with pytest.raises(ConfigError, match=r"own\.py changed since it was approved"):
            bench.train("north", 0, *arenas)
    finally:
        load_only(project, None)
    assert not (project / "ran").exists()


# --- the process that holds the key


@pytest.mark.slow(3)  # commands
def test_python_m_fedtrain_runs_nothing_of_the_folder_that_it_is_typed_in(project):
    """Python puts the folder first on the path of the process that holds the key."""
    for name in ("gettext", "typing", "signal", "ssl", "json", "click", "asyncio", "grpc", "msgspec"):
        write(project, f"{name}.py", RAN)
    for python in (("-m", "fedtrain"), ("-mfedtrain",), ("-P", "-m", "fedtrain")):
        assert "fedtrain task approve north" in typed(project, "site", "north", python=python)
    assert not (project / "ran").exists()
