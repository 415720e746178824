"""`fedtrain doctor`: each fault is found, with what to do about it."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import socketserver
import sys
import threading
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import zmq
from click.testing import CliRunner

from fedtrain import pki
from fedtrain.cli import cli
from fedtrain.config import Config, keep_policy, policy_from
from fedtrain.config.policy import changed
from fedtrain.events import SiteRefused, silent
from fedtrain.pki import fingerprint, revoke
from fedtrain.pki.identity import Credentials
from fedtrain.pki.roster import Claim, enrol, save
from fedtrain.pki.signing import Signer
from fedtrain.runtime import doctor
from fedtrain.runtime.sites.approval import approve
from fedtrain.runtime.trainers import workbench
from fedtrain.runtime.trainers.boundary import Limit
from fedtrain.schema import Schema
from fedtrain.transport import port
from tests.federation import aggregator
from tests.folders import on_disk
from tests.limits import WAIT_S
from tests.ports import free_port, serving
from tests.test_compare import TASK

tmp_path = on_disk

SETTINGS = '[run]\ntask = "task:Line"\nrounds = 3\n[simulate]\nsites = 3\n[network]\nlisten = "127.0.0.1:0"\n'
GOSSIP = '[gossip]\ntopology = "complete"\n'


@pytest.fixture(scope="module")
def issued(tmp_path_factory):
    """Certificates of an aggregator and a site, made once."""
    folder = tmp_path_factory.mktemp("certs")
    (folder / "fedtrain.toml").write_text(SETTINGS)
    done = CliRunner().invoke(
        cli, ["certs", "init", "aggregator", "north", "--config", str(folder / "fedtrain.toml")]
    )
    assert done.exit_code == 0, done.output
    return folder / "certs"


@pytest.fixture
def confined(tmp_path, monkeypatch, issued):
    """A project whose tasks run in a trainer process."""
    (tmp_path / "task.py").write_text(TASK)
    (tmp_path / "fedtrain.toml").write_text(SETTINGS)
    shutil.copytree(issued, tmp_path / "certs")
    approve(Config.load(tmp_path / "fedtrain.toml"))
    monkeypatch.chdir(tmp_path)
    for name in ("grpc_proxy", "https_proxy", "http_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    return tmp_path


@pytest.fixture
def project(confined, inline):
    """The same, where the trainer is in this process."""
    return confined


def ask(*arguments):
    done = CliRunner().invoke(cli, ["doctor", *arguments, "--json"], prog_name="fedtrain")
    return done.exit_code, {found["check"]: found for found in map(json.loads, done.stdout.splitlines())}


@contextmanager
def answering(answer):
    """A server on loopback that deals with its callers, one after the other; its address."""
    kind = type("Handler", (socketserver.BaseRequestHandler,), {"handle": lambda one: answer(one.request)})
    with serving(socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind)) as address:
        yield address


@contextmanager
def aggregating(certs, holder="aggregator", told=None):
    """An aggregator with the certificate of `holder`, in a thread; its address."""
    loop, over, at = asyncio.new_event_loop(), asyncio.Event(), Future()

    async def main():
        if holder != "aggregator":
            shutil.rmtree(certs / "aggregator")
            shutil.copytree(certs / holder, certs / "aggregator")
        emit = silent if told is None else told.append
        async with aggregator(certs, certs.parent / "inbox", Schema(()), emit=emit) as agg:
            at.set_result(f"127.0.0.1:{agg.cohort.port}")
            await over.wait()

    thread = threading.Thread(target=loop.run_until_complete, args=[main()])
    thread.start()
    try:
        yield at.result(WAIT_S)
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


def tunnelled(line, address):
    """Pass bytes on, both ways, until one end has closed."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as other:
        back = threading.Thread(target=pump, args=[other, line])
        back.start()
        pump(line, other)
        back.join()


def pump(source, to):
    try:
        while data := source.recv(1 << 16):
            to.sendall(data)
        to.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def test_a_machine_in_order_is_told_so_and_one_step_is_taken(project):
    code, found = ask()
    assert code == 0
    assert found.keys() >= {
        "versions",
        "cores",
        "GPU",
        "disk",
        "writing",
        "certificate",
        "port",
        "task",
        "data",
    }
    assert all(each["state"] != "bad" for each in found.values())
    assert "2 parameters" in found["task"]["said"]
    assert "one step at" in found["data"]["said"]


def test_a_site_reaches_its_aggregator_by_its_own_certificate(project):
    with aggregating(project / "certs") as address:
        code, found = ask("north", "--set", f"network.address={address}")
    assert (code, found["connection"]["state"], found["DNS"]["state"]) == (0, "good", "good")
    assert "it takes our certificate" in found["connection"]["said"]


def test_a_site_that_asks_the_doctor_is_no_refused_connection_at_its_aggregator(project, monkeypatch):
    """Who is refused in the handshake is told beside it: by this the port has looked at both."""
    monkeypatch.setattr(port, "WATCH_S", 3600)  # it looks at each handshake, and as it closes
    monkeypatch.setattr(port, "COSTS", 0)
    told, config = [], Config.load(project / "fedtrain.toml")
    with aggregating(project / "certs", told=told) as address:
        config = replace(config, network=replace(config.network, address=address))
        assert [found.state for found in doctor._network(config, "north")] == ["good", "good"]
        there, _, at = address.rpartition(":")
        with socket.create_connection((there, int(at))) as stranger:
            stranger.sendall(b"no TLS at all")
            assert stranger.recv(1) in (b"", b"\x15")  # it hangs up, or says so before
    refused = [event.reason for event in told if isinstance(event, SiteRefused)]
    assert [reason.partition(":")[0] for reason in refused] == ["1 connections from 127.0.0.1"]


def test_through_a_proxy_and_past_one_that_refuses(project, monkeypatch):
    with aggregating(project / "certs") as behind:

        def proxy(line):
            if asked := line.recv(4096).decode():
                assert asked.startswith("CONNECT fl.example.org:8440 ")
                assert "Proxy-Authorization: Basic dXNlcjpzZWNyZXQ=" in asked  # user:secret
                line.sendall(b"HTTP/1.1 200 Connection established\r\n\r\n")
                tunnelled(line, behind)

        with answering(proxy) as address:
            monkeypatch.setenv("https_proxy", f"http://user:secret@{address}")
            code, found = ask("north", "--set", "network.address=fl.example.org:8440")
    assert (code, found["connection"]["state"]) == (0, "good")
    assert "secret" not in json.dumps(found)

    def refusing(line):
        line.recv(4096)
        line.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")

    with answering(refusing) as address:
        monkeypatch.setenv("https_proxy", f"http://{address}")
        code, found = ask("north", "--set", "network.address=fl.example.org:8440")
    assert (code, found["connection"]["state"]) == (1, "bad")
    assert "answered 407. It must allow CONNECT" in found["connection"]["said"]


def test_who_answers_with_another_name_or_no_tls_is_no_aggregator(project):
    with aggregating(project / "certs", "sites/north") as address:
        code, found = ask("north", "--set", f"network.address={address}")
    assert (code, found["connection"]["state"]) == (1, "bad")
    assert "is not this federation's aggregator's" in found["connection"]["said"]

    def web(line):
        if line.recv(4096):
            line.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    with answering(web) as address:
        found = ask("north", "--set", f"network.address={address}")[1]
    assert found["connection"]["state"] == "bad"
    assert "no fedtrain aggregator" in found["connection"]["said"]


def test_nobody_there_no_name_and_no_certificate_say_what_to_change(project):
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    code, found = ask("north", "--set", f"network.address={address}")
    assert (code, found["connection"]["state"]) == (1, "bad")
    assert "Is the aggregator started?" in found["connection"]["said"]
    found = ask("north", "--set", "network.address=no-such-host.invalid:8440")[1]
    assert found["DNS"]["fix"] == "Check network.address, and this machine's DNS (/etc/resolv.conf)."
    code, found = ask("south", "--set", f"network.address={address}")
    assert (code, found["certificate"]["state"]) == (1, "bad")


def test_a_port_that_is_taken_and_a_network_disk_are_told(project, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = ask("--set", f"network.listen=127.0.0.1:{taken.getsockname()[1]}")[1]
    assert (found["port"]["state"], "Another process has it" in found["port"]["fix"]) == ("look", True)

    def nfs(path):
        from fedtrain.errors import StoreError

        raise StoreError(f"{path} is on nfs")

    monkeypatch.setattr(doctor, "refuse_network_disk", nfs)
    (disk,) = doctor._disk(Config.load(project / "fedtrain.toml"))
    assert (disk.state, "is on nfs" in disk.said) == ("bad", True)


def test_data_that_does_not_train_fails_like_a_run_would(project):
    (project / "task.py").write_text(TASK.replace("return x, 2 * x", "return x, x[:, :0].sum(1) / 0 * x[:3]"))
    code, found = ask()
    assert code == 1
    bad = [each for each in found.values() if each["state"] == "bad"]
    assert bad[-1]["said"].startswith("data() returned columns of different lengths: x has 8, y has 3.")


# --- at a site, what its own start would refuse

LOUD = "open('ran', 'w').close()\n" + TASK


def is_bad(found, check, *words):
    """The only one that is bad, besides the connection, as nobody listens here."""
    bad = {name: each["said"] for name, each in found.items() if each["state"] == "bad"}
    assert bad.keys() - {"connection"} == {check}
    assert [word for word in words if word not in bad[check]] == []


def test_s22_no_line_of_a_task_runs_before_its_people_approved_it_nor_after_a_change(project):
    folder = project / "certs" / "sites" / "north"
    for file in folder.glob("approvals.jsonl*"):
        file.unlink()
    (project / "task.py").write_text(LOUD)
    code, found = ask("north")
    is_bad(found, "approval", "task:Line is not approved", "fedtrain task approve north")
    assert (code, found.keys() & {"task", "data"}) == (1, set())
    approve(Config.load(project / "fedtrain.toml"))
    (project / "task.py").write_text(LOUD + "# one more byte\n")
    is_bad(ask("north")[1], "approval", "task.py changed since", "fedtrain task approve north")
    assert not (project / "ran").exists()
    approve(Config.load(project / "fedtrain.toml"))
    assert ask("north")[1]["data"]["state"] == "good"
    assert (project / "ran").exists()


def test_where_nobody_is_enrolled_a_simulation_needs_no_approval(project):
    shutil.rmtree(project / "certs")
    code, found = ask()
    assert (code, found["data"]["state"]) == (0, "good")


def others_may_write(folder):
    (folder / "policy.toml").chmod(0o660)


@pytest.mark.parametrize(
    ("spoil", "check", "words"),
    [
        (lambda folder: (folder / "policy.toml").unlink(), "policy",
         ("policy.toml does not exist", "fedtrain task approve north")),
        (lambda folder: (folder / "policy.toml").write_text("min_cohort = 2"), "policy",
         ("policy.min_cohort: 2 must be 3 or more",)),
        (others_may_write, "policy", ("can be written by others", "chmod go-w")),
        (lambda folder: revoke(folder.parent.parent, ["north"]), "certificate", ("revoked",)),
        (lambda folder: folder.rename(folder.with_name("south")), "certificate", ("does not exist",)),
    ],
)  # fmt: skip
def test_what_a_site_would_not_start_with_is_bad_and_its_task_is_not_loaded(project, spoil, check, words):
    (project / "task.py").write_text(LOUD)
    approve(Config.load(project / "fedtrain.toml"))
    spoil(project / "certs" / "sites" / "north")
    code, found = ask("north")
    is_bad(found, check, *words)
    assert code == 1
    assert not (project / "ran").exists()


def test_another_sites_certificate_and_settings_that_its_policy_denies_are_bad(project):
    is_bad(ask("north", "--set", "secagg.enabled=false")[1], "policy", "policy.secure_sums")
    sites = project / "certs" / "sites"
    shutil.copytree(sites / "north", sites / "south")
    is_bad(ask("south")[1], "certificate", "the certificate is north's, not south's")


def test_a_check_that_fails_has_a_name_that_says_what_was_checked(project, monkeypatch):
    def fails(*_):
        raise OSError("no")

    for name in ("_machine", "_disk", "listening", "_training"):
        monkeypatch.setattr(doctor, name, fails)
    found = ask()[1]
    assert {name for name, each in found.items() if each["said"] == "no"} == {
        "versions",
        "disk",
        "port",
        "training",
    }


LOADER = """
class Loader(Line):
    def data(self, site):
        data = torch.utils.data.TensorDataset(*super().data(site))
        return torch.utils.data.DataLoader(data, batch_size=4)

class Broken(Loader):
    def loss(self, model, batch):
        raise KeyError("label")
"""


def test_data_that_a_datacenter_trains_on_and_no_simulation_can_deal_is_no_fault(project):
    (project / "task.py").write_text(TASK + LOADER)
    code, found = ask("--set", "run.task=task:Loader")
    assert code == 0
    assert found["data"]["state"] == "good"
    assert found["simulation"]["state"] == "look"
    assert "can't be dealt to 3 sites" in found["simulation"]["said"]
    assert "fedtrain datacenter" in found["simulation"]["fix"]
    assert ask("--set", "run.task=task:Broken")[0] == 1


# --- the step at a site is the site's: as shut in, and it leaves nothing

CURIOUS = """
import sys
from pathlib import Path

HERE = Path(__file__).parent
try:
    found = (HERE / "certs" / "sites" / "north" / "key.pem").read_text()
except OSError as e:
    found = type(e).__name__
print("found:", found, file=sys.stderr)
"""


def curious(project, capfd, **rules):
    """What the task finds in place of the site's key, and what the doctor says of how the task is shut in."""
    (project / "task.py").write_text(CURIOUS + TASK)
    folder = project / "certs" / "sites" / "north"
    approve(Config.load(project / "fedtrain.toml"))
    keep_policy(folder, changed(policy_from(folder), rules))
    found = ask("north")[1]
    assert found["data"]["state"] == "good"
    said = {check: line for check, line in found.items() if check.startswith("confinement")}
    return capfd.readouterr().err, said


@pytest.mark.slow(5)
def test_s10_the_doctors_step_at_a_site_is_shut_in_as_the_sites_own_training_and_it_says_so(confined, capfd):
    found, said = curious(confined, capfd)
    if "CAN READ" in said["confinement: key"]["said"]:
        pytest.skip(said["confinement: key"]["said"])
    assert "found:" in found
    assert "PRIVATE KEY" not in found
    assert [*said] == [f"confinement: {what}" for what in ("key", "files", "network", "sockets", "calls")]
    assert {line["state"] for line in said.values()} == {"good"}
    assert "files tried" in said["confinement: key"]["said"]


@pytest.mark.slow(5)
def test_s10_where_the_policy_shuts_nothing_in_the_doctor_says_so(confined, capfd):
    found, said = curious(confined, capfd, confine="off")
    assert "PRIVATE KEY" in found
    line = said["confinement"]
    assert (line["state"], "policy.confine" in line["said"]) == ("look", True)


def test_a_task_that_is_shut_in_by_less_than_was_asked_for_is_one_to_look_at(project, monkeypatch):
    def less(*arguments, **keys):
        bench = made(*arguments, **keys)
        bench.description.limits = [
            Limit("key", False, "CAN READ key.pem"), Limit("network", False, "the network is open to it"),
        ]  # fmt: skip
        return bench

    made = workbench.Workbench
    monkeypatch.setattr(sys.modules["tests.inline"], "Workbench", less)
    code, found = ask("north")
    assert (code, found["confinement: key"]["state"]) == (1, "bad")
    assert found["confinement: network"]["state"] == "look"
    assert "confine=require" in found["confinement: network"]["fix"]


@pytest.mark.slow(5)
@pytest.mark.parametrize("site", ["north", None])
def test_the_step_touches_nothing_of_a_run_that_is_under_way(confined, site):
    project = confined
    (project / "fedtrain.toml").write_text(SETTINGS + '[strategy]\nkind = "scaffold"\n')
    config = Config.load(project / "fedtrain.toml")
    approve(config)
    own = config.site_dir(site) if site else config.simulate_dir
    memory = own / "memory" / "north"
    memory.mkdir(parents=True)
    for number in (5, 6):
        (memory / f"{number}-digest").write_text("what the site kept")
    before = sorted(project.rglob("*"))
    found = ask(*([site] if site else []))[1]
    assert found["data"]["state"] == "good"
    kept = [path for path in sorted(project.rglob("*")) if "__pycache__" not in path.parts]
    assert kept == before


# --- a peer


@pytest.fixture
def peers(project):
    """A project of peers, north's; and a function that enters south, of another folder, on its roster."""
    shutil.rmtree(project / "certs" / "aggregator")
    settings = SETTINGS.replace("127.0.0.1:0", f"127.0.0.1:{free_port()}") + GOSSIP
    (project / "fedtrain.toml").write_text(settings)
    config = Config.load(project / "fedtrain.toml")
    approve(config)
    pki.issue(project / "certs", "site", "south")
    shutil.copytree(project / "certs" / "sites" / "south", project / "elsewhere")
    shutil.rmtree(project / "certs" / "sites" / "south")
    south = Credentials.load(project / "elsewhere")

    def enter(address):
        key = zmq.curve_keypair()[0]
        claim = Claim(peer="south", federation=south.identity.federation, key=key, address=address)
        save(config.root / "roster", "south", enrol(Signer.of(south), claim).encode())
        return f"south={fingerprint(south.chain).hex()}"

    return enter


def test_a_peer_is_checked_as_a_peer_and_asked_for_no_aggregator(peers):
    code, found = ask("north")
    assert code == 1
    is_bad(found, "policy", "policy.secure_sums: gossip.masks = false shows this peer's model")
    assert not {"connection", "DNS", "TLS", "proxy"} & found.keys()
    assert found["port"]["state"] == "good"
    assert CliRunner().invoke(cli, ["policy", "set", "secure_sums=false"]).exit_code == 0
    code, found = ask("north")
    assert code == 0, found
    assert {found[check]["state"] for check in ("settings", "policy", "approval", "data")} == {"good"}
    assert (found["roster"]["state"], "--invitation CODE" in found["roster"]["fix"]) == ("look", True)
    assert not (Path("roster")).exists()  # it looks, and leaves nothing


def test_a_peers_roster_is_told_with_who_lacks_a_pin_and_who_can_not_be_called(peers):
    assert CliRunner().invoke(cli, ["policy", "set", "secure_sums=false"]).exit_code == 0
    pin = peers(f"127.0.0.1:{free_port()}")
    done = CliRunner().invoke(cli, ["doctor", "north"])
    assert "south.peer is refused\n      south is not pinned here with its key" in done.output
    assert f"run here: fedtrain policy pin {pin}" in done.output
    assert CliRunner().invoke(cli, ["policy", "pin", pin]).exit_code == 0
    code, found = ask("north")
    assert (code, found["roster"]["said"], found["neighbour"]["state"]) == (0, "south", "look")
    assert "Is `fedtrain peer south` running there" in found["neighbour"]["fix"]
    with answering(lambda line: None) as address:
        peers(address)
        found = ask("north")[1]
    assert found["neighbour"]["said"] == f"south answers at {address}"
    choco = ("gossip.algorithm=choco", "gossip.topology=base:1")
    is_bad(ask("north", "--set", choco[0], "--set", choco[1])[1], "settings", "needs neighbours that stay")
    found = ask("north", "--set", "network.listen=0.0.0.0:8441")[1]
    is_bad(found, "port", "network.address: nobody can call")


def test_a_new_project_of_peers_has_no_aggregator_and_its_doctor_asks_for_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(cli, ["new", "p", "--template", "gossip"]).exit_code == 0
    assert sorted(path.name for path in Path("p/certs").iterdir()) == ["ca", "sites"]
    monkeypatch.chdir(tmp_path / "p")
    assert {"settings", "port"} <= ask("site-1")[1].keys()


def test_an_authority_of_peers_is_not_told_to_issue_an_aggregators_certificate(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for table, following in (
        ("", "certs issue aggregator; fedtrain certs invite site-1"),
        (GOSSIP, "certs issue site-1"),
    ):
        Path("fedtrain.toml").write_text(SETTINGS + table)
        shutil.rmtree("certs", ignore_errors=True)
        done = CliRunner().invoke(cli, ["certs", "init"])
        assert f"Next: fedtrain {following}" in done.output
