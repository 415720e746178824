"""S8 and S9: a site gets its certificate by a one-time code, over TLS, and its key never leaves it."""

import asyncio
import contextlib
import re
import shutil
import subprocess
import sys
from datetime import timedelta

import msgspec
import pytest
from click.testing import CliRunner

from fedtrain import pki
from fedtrain.cli import cli
from fedtrain.cli.certificates import _next
from fedtrain.config import Config
from fedtrain.errors import CertificateError, ConfigError, JoinRefused
from fedtrain.pki import Credentials, Verifier, init, issue
from fedtrain.pki.enrolment import (
    FAULTS,
    VERSION,
    Code,
    Codes,
    commitment,
    keep,
    number_of,
    request,
    root_digest,
    settle,
    spoken_of,
    words,
)
from fedtrain.runtime.enrolling import ENROL, Commit, Host, Number, Wish, join
from fedtrain.runtime.sites.approval import approve
from fedtrain.transport.grpc import AggregatorStream, GrpcTransport
from fedtrain.transport.tls import Tls
from fedtrain.wire.codec import decode, encode
from fedtrain.wire.frames import Refused
from tests.limits import bounded
from tests.ports import free_port
from tests.security.test_proxy import Proxy

WEEK = timedelta(days=7)


def said(line):
    """The three words in what `join` shows."""
    return re.match("Three words: ([a-z]{5} [a-z]{5} [a-z]{5})\n", line)[1]


@pytest.fixture
def certs(tmp_path):
    pki.init(tmp_path / "ca-host", "ward")
    return tmp_path / "ca-host"


class Invites:
    """A host that serves, and what it showed and was asked."""

    def __init__(self, certs, answer=True):
        self.codes, self.told, self.asked = Codes(certs), [], []
        self.answer, self.port = answer, free_port()
        self.address = f"127.0.0.1:{self.port}"

    async def approve(self, name, spoken):
        self.asked.append((name, spoken))
        return self.answer

    @contextlib.asynccontextmanager
    async def serving(self):
        host = Host(self.codes, 30, self.approve, lambda event: self.told.append(event.text))
        task = asyncio.create_task(host.run(self.address))
        try:
            yield task
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def test_s08_s09_a_site_gets_its_certificate_by_a_code_and_its_key_stays_there(certs, tmp_path):
    async def main():
        invites, shown = Invites(certs), []
        code = Code.read(str(invites.codes.invite("north", WEEK)))
        async with invites.serving() as host:
            folder = await join(tmp_path / "site", invites.address, code, shown.append)
            await host  # all that were invited have theirs: it ends
        return invites, folder, shown

    invites, folder, shown = bounded(main())
    assert Credentials.load(folder).identity.name == "north"
    assert (folder / "key.pem").stat().st_mode & 0o777 == 0o600
    key = (folder / "key.pem").read_bytes()
    assert not [path for path in certs.rglob("*") if path.is_file() and key in path.read_bytes()]
    assert sorted(path.name for path in (certs / "sites" / "north").iterdir()) == ["cert.pem", "root.pem"]
    (line,) = shown
    assert invites.asked == [("north", said(line))]  # both screens show the same words
    assert "Tell them on the telephone to the person who sent you the code" in line


def test_a_host_hears_that_a_site_has_its_certificate_however_late_it_reads(certs, tmp_path, monkeypatch):
    write = AggregatorStream.write

    async def late(self, message):
        await write(self, message)
        await asyncio.sleep(0.5)  # as where the host's processor is busy

    monkeypatch.setattr(AggregatorStream, "write", late)

    async def main():
        invites = Invites(certs)
        code = invites.codes.invite("north", WEEK)
        async with invites.serving() as host:
            await join(tmp_path / "site", invites.address, code, lambda line: None)
            await host
        return invites.told

    assert "north has its certificate" in bounded(main())


def test_s09_a_code_works_for_one_key_alone_and_still_after_a_restart(certs, tmp_path):
    async def main():
        invites = Invites(certs)
        code, other = invites.codes.invite("north", WEEK), invites.codes.invite("south", WEEK)
        async with invites.serving():
            await join(tmp_path / "first", invites.address, code, lambda line: None)
            with pytest.raises(JoinRefused, match=r"north: this code was used on 20.*Ask for another"):
                await join(tmp_path / "thief", invites.address, code, lambda line: None)
        again = Invites(certs)  # nothing but files is left
        lost = next(path for path, _ in again.codes._all() if path.name == code.id)
        lost.write_text(lost.read_text().replace('"done":true', '"done":false'))  # its answer was lost, say
        async with again.serving():
            with pytest.raises(JoinRefused, match="was used on"):
                await join(tmp_path / "thief", again.address, code, lambda line: None)
            await join(tmp_path / "first", again.address, code, lambda line: None)
            await join(tmp_path / "south", again.address, other, lambda line: None)
        return invites.asked + again.asked, again.told

    asked, told = bounded(main())
    assert [name for name, _ in asked] == ["north", "south"]
    assert any("north is refused: this code was used" in line for line in told)
    assert not (tmp_path / "thief" / "sites" / "north" / "cert.pem").exists()


def test_s09_a_thief_of_a_code_shows_other_words_and_a_no_voids_the_code(certs, tmp_path):
    async def main():
        invites, shown = Invites(certs, answer=False), []
        code = invites.codes.invite("north", WEEK)
        async with invites.serving():
            with pytest.raises(JoinRefused, match="refuses north: whoever invited it says no"):
                await join(tmp_path / "thief", invites.address, code, shown.append)
        assert invites.codes.open() == []
        _, key = request(tmp_path / "north")
        return invites.asked[0][1], said(shown[0]), words(code.root, "north", key, bytes(64))

    asked, thief, honest = bounded(main())
    assert asked == thief != honest
    assert not (certs / "sites").exists()


def test_s09_nobody_without_a_code_gets_through_the_handshake(certs, tmp_path):
    async def main():
        invites = Invites(certs)
        code = invites.codes.invite("north", WEEK)
        guess = msgspec.structs.replace(code, secret=bytes(16))
        async with invites.serving():
            tried = asyncio.Queue()
            joining = asyncio.create_task(join(tmp_path / "site", invites.address, guess, tried.put_nowait))
            line = await tried.get()
            joining.cancel()
            await asyncio.gather(joining, return_exceptions=True)
        return line, invites

    line, invites = bounded(main())
    assert "waiting: " in line
    assert "certificate" in line
    assert invites.asked == []
    assert [told for told in invites.told if "listening" not in told] == []


def test_s09_the_holder_of_one_code_is_not_taken_for_another(certs):
    codes = Codes(certs)
    north, south = codes.invite("north", WEEK), codes.invite("south", WEEK)

    class Forged(Code):
        target = south.target

    forged = Forged(*msgspec.structs.astuple(north))
    _, chain = forged.leaf("site")
    assert codes.caller(chain) == north
    codes.void(north)
    with pytest.raises(CertificateError, match="good no more"):
        codes.caller(chain)


def test_s09_an_expired_code_is_refused(certs, tmp_path):
    codes = Codes(certs)
    code = codes.invite("north", timedelta(seconds=-1))
    assert codes.open() == []
    with pytest.raises(CertificateError, match="has expired"):
        codes.commit(code, bytes(32))
    with pytest.raises(CertificateError, match="good no more"):
        codes.caller(code.leaf("site")[1])


def test_s09_a_new_code_for_a_name_voids_the_one_before(certs, tmp_path):
    codes = Codes(certs)
    first, second = codes.invite("north", WEEK), codes.invite("north", WEEK)
    assert codes.open() == [second]
    with pytest.raises(CertificateError, match="good no more"):
        codes.commit(first, bytes(32))


def test_s09_a_code_is_void_after_five_requests_that_are_none(certs):
    async def main():
        invites = Invites(certs)
        code = invites.codes.invite("north", WEEK)
        key, chain = code.leaf("site")
        transport = GrpcTransport(Tls(key, chain, pki.authority.pem(code.authority.certificate)), 5.0)
        answers = []
        async with invites.serving():
            for _ in range(FAULTS):
                async with (
                    transport.connect(invites.address, code.target) as call, call(ENROL) as stream,
                ):  # fmt: skip
                    await stream.write(encode(Commit(version=VERSION, commitment=bytes(32))))
                    decode(await stream.read(), Number)
                    await stream.write(encode(Wish(csr=b"none", number=bytes(32))))
                    answers.append(decode(await stream.read(), Refused))
        return invites, answers

    invites, answers = bounded(main())
    assert {answer.reason for answer in answers} == {"csr: not a PEM certificate signing request"}
    assert invites.codes.open() == []


def test_s08_a_request_is_signed_where_the_issuing_key_lives_offline(certs, tmp_path):
    stick = tmp_path / "stick" / "certs"
    shutil.copytree(certs, stick)
    for secret in ("root.key.pem", "issuing.key.pem"):
        (certs / "ca" / secret).unlink()

    async def main():
        invites, shown = Invites(certs, answer=None), []
        code = invites.codes.invite("north", WEEK)
        async with invites.serving():
            joining = asyncio.create_task(join(tmp_path / "site", invites.address, code, shown.append))
            while not invites.asked:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            csr = (certs / "requests" / "north.csr").read_bytes()
            signed = pki.issue(stick, "site", "north", csr=csr)
            (certs / "sites" / "north").mkdir(parents=True)
            shutil.copy(signed / "cert.pem", certs / "sites" / "north")
            return await joining

    assert Credentials.load(bounded(main())).identity.name == "north"


def test_s08_a_certificate_of_another_root_name_or_key_is_not_kept(certs, tmp_path):
    codes, folder = Codes(certs), tmp_path / "north"
    code = codes.invite("north", WEEK)
    csr, _ = request(folder)
    root = (certs / "ca" / "root.pem").read_bytes()
    other = tmp_path / "other"
    pki.init(other, "ward")
    for made, at, why in (
        (pki.issue(other, "site", "north", csr=csr), other, "not the one in the code"),
        (pki.issue(certs, "site", "south", csr=csr), certs, "another name or key"),
        (pki.issue(certs, "site", "north"), certs, "another name or key"),
    ):
        with pytest.raises(CertificateError, match=why):
            keep(folder, code, (made / "cert.pem").read_bytes(), (at / "ca" / "root.pem").read_bytes())
    assert not (folder / "cert.pem").exists()
    assert root_digest(root) == code.root
    assert isinstance(Verifier(root, "ward"), Verifier)


@contextlib.asynccontextmanager
async def calling(code, address):
    """A guest's call by hand."""
    key, chain = code.leaf("site")
    transport = GrpcTransport(Tls(key, chain, pki.authority.pem(code.authority.certificate)), 5.0)
    async with transport.connect(address, code.target) as call, call(ENROL) as stream:
        yield stream


def test_e2_between_both_ends_a_thief_has_one_guess(certs, tmp_path):
    """With the code he may try any number of keys: the host takes the first commitment alone, before the
    thief knows the host's number, and the guest one number, before the thief knows the guest's."""
    codes = Codes(certs)
    code = codes.invite("north", WEEK)
    folder, thief = tmp_path / "north", tmp_path / "thief"
    csr, public = request(folder)
    own = number_of(folder, code)
    evil, key = request(thief)

    # towards the host: a second commitment, by which he could wait for a number that suits him
    number = codes.commit(code, commitment(bytes(32), key))
    assert codes.commit(code, commitment(bytes(32), key)) == number
    for guess in range(3):
        with pytest.raises(CertificateError, match="was used on"):
            codes.commit(code, commitment(bytes([guess + 1]) * 32, key))
    # and with the number known, another key or number than he committed to
    for at, other in ((csr, bytes(32)), (evil, bytes([1]) * 32)):
        with pytest.raises(CertificateError, match="committed to another key or number"):
            codes.ask(code, at, other)

    # towards the guest: a second number, when the guest has revealed its own
    settle(folder, code, number)
    settle(folder, code, number)
    with pytest.raises(CertificateError, match="somebody may sit in between"):
        settle(folder, code, bytes(32))
    assert number_of(folder, code) == own  # also in the next start of `join`
    assert words(code.root, "north", public, own + number) != codes.ask(code, evil, bytes(32))


def test_e2_an_end_of_the_former_protocol_is_refused_with_both_versions(certs, tmp_path):
    async def main():
        invites = Invites(certs)
        code = invites.codes.invite("north", WEEK)
        async with invites.serving(), calling(code, invites.address) as stream:
            await stream.write(encode(Wish(csr=request(tmp_path / "north")[0])))
            return decode(await stream.read(), Refused)

    refused = bounded(main())
    assert refused.final
    assert "enrols by version 1, the authority by version 2" in refused.reason


def test_e2_a_site_says_at_once_that_its_authority_has_a_former_fedtrain(certs, tmp_path, monkeypatch):
    """Such a host can't read the site's first frame. Before, the site waited for ever."""

    async def former(self, chain, stream):
        decode(await stream.read(), Wish)

    monkeypatch.setattr(Host, "_serve", former)

    async def main():
        invites = Invites(certs)
        code = invites.codes.invite("north", WEEK)
        async with invites.serving():
            with pytest.raises(JoinRefused, match=r"the authority has an older fedtrain.*invite north"):
                await join(tmp_path / "site", invites.address, code, lambda line: None)

    bounded(main())


def test_e2_a_request_on_a_stick_shows_the_same_words_there(certs, tmp_path):
    codes = Codes(certs)
    code = codes.invite("north", WEEK)
    csr, public = request(tmp_path / "north")
    own = number_of(tmp_path / "north", code)
    codes.commit(code, commitment(own, public))
    spoken = codes.ask(code, csr + b"numbers: " + b"0" * 128, own)  # the guest's own line is not taken over
    assert spoken_of(code.root, "north", (certs / "requests/north.csr").read_bytes()) == spoken
    assert re.fullmatch("[0-9a-f]{64}", spoken_of(code.root, "north", csr))  # openssl's: no code, no words


def test_e6_who_has_a_certificate_is_not_served_again_and_the_order_is_the_names(certs, tmp_path):
    async def main():
        invites = Invites(certs)
        code, *_ = [invites.codes.invite(name, WEEK) for name in ("mid", "west", "east")]
        async with invites.serving():
            await join(tmp_path / "site", invites.address, code, lambda line: None)
            while "mid has its certificate" not in invites.told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        again = Invites(certs)
        async with again.serving():
            while not again.told:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        return again.told[0], [code.guest for code in again.codes.open()]

    line, names = bounded(main())
    assert line.endswith("for east, west")
    assert names == ["east", "west"]


@pytest.mark.parametrize("text", ["", "hello", "AAAA", "gaE"])
def test_a_damaged_code_is_a_readable_error(text):
    with pytest.raises(ConfigError, match="Paste all that"):
        Code.read(text)


def test_s11_a_site_joins_through_a_connect_proxy(certs, tmp_path, monkeypatch):
    for name in ("grpc_proxy", "http_proxy", "no_grpc_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)

    async def main():
        invites = Invites(certs)
        code = invites.codes.invite("north", WEEK)
        async with invites.serving(), Proxy(invites.port) as proxy:
            monkeypatch.setenv("https_proxy", proxy.url)
            await join(tmp_path / "site", "ca.example:8441", code, lambda line: None)
            return proxy

    proxy = bounded(main())
    assert proxy.asked == ["CONNECT ca.example:8441 HTTP/1.1"]
    assert [stream for stream in proxy.streams if b"north" in stream] == []


def fedtrain(folder, *arguments):
    command = [sys.executable, "-P", "-m", "fedtrain", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def test_a_site_that_has_its_certificate_is_told_what_is_missing_until_it_can_be_started(tmp_path):
    """In the order in which it is done; each goes when it is done."""
    folder = tmp_path / "certs/sites/north"
    issue(init(tmp_path / "certs").parent, "site", "north")
    config = Config.of({"run": {"name": "ward", "task": "task:T"}}, tmp_path)
    first = [*_next(config, folder, "ca.example:8441")]
    assert first[0].startswith("Set network.address in fedtrain.toml")
    assert first[0].endswith('as in "ca.example:8440".')
    assert first[1].startswith(f"run.task: {tmp_path / 'task'}.py does not exist")
    assert first[2] == "Next: fedtrain site north"
    (tmp_path / "task.py").write_text("")
    second = [*_next(config, folder, "127.0.0.1:8441")]  # where the aggregator may be here, too
    assert second[0] == (
        "task:T is not approved at this site. Read it (task.py), then: fedtrain task approve north"
    )
    approve(config, ["north"])
    assert [*_next(config, folder, "127.0.0.1:8441")] == ["Next: fedtrain site north"]


@pytest.mark.slow(4)
def test_two_commands_make_an_authority_and_enrol_a_site(tmp_path):
    """`certs invite` makes the authority where there is none; what it prints is what the site types."""
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "fedtrain.toml").write_text('[run]\nname = "ward"\ntask = "task:T"\n')
    invite = fedtrain(
        tmp_path / "here", "certs", "invite", "north", "--yes", "--listen", f"127.0.0.1:{free_port()}"
    )
    lines = iter(invite.stdout.readline, "")
    command = next(line for line in lines if "fedtrain join" in line).split()
    joined = fedtrain(tmp_path / "there", *command[1:])
    out, _ = joined.communicate(timeout=120)
    rest, _ = invite.communicate(timeout=120)
    assert joined.returncode == 0, out
    assert invite.returncode == 0, rest
    assert "task.py does not exist" in out
    assert "Next: fedtrain site north" in out
    assert Credentials.load(tmp_path / "there" / "certs" / "sites" / "north").identity.federation == "ward"
    assert Credentials.load(tmp_path / "here" / "certs" / "aggregator").identity.federation == "ward"


@pytest.mark.parametrize("words_", [["join", "h:1", "CODE"], ["certs", "invite", "north"]], ids=" ".join)
def test_e6_a_command_without_rounds_that_is_ended_promises_none(words_, tmp_path, monkeypatch):
    def ended(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("fedtrain.pki.enrolment.Code.read", ended)
    monkeypatch.setattr("fedtrain.pki.enrolment.Codes.invite", ended)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fedtrain.toml").write_text('[run]\nname = "ward"\ntask = "task:T"\n')
    said = CliRunner().invoke(cli, [*words_, *(["--address", "h:1"] if "invite" in words_ else [])])
    assert said.exit_code == 130
    assert "committed round" not in said.output
    assert "same words" in said.output or "codes stay good" in said.output
