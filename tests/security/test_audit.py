"""S26 to S28: each role's audit log says who, what and when; a line that was changed, left out, moved or cut
off is found; and what one end rewrites with its own key, the other end's log shows."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import closing

import msgspec
import pytest
from click.testing import CliRunner

from fedtrain import events
from fedtrain.cli import cli
from fedtrain.config import Config
from fedtrain.errors import Damaged, StoreError, Unreadable
from fedtrain.events import silent
from fedtrain.pki import Credentials, issue
from fedtrain.pki.signing import Signed
from fedtrain.runtime.auditing import audited, datacenter_credentials, root_of, verify
from fedtrain.tracking import audit
from fedtrain.tracking.audit import AuditLog, LogHead, audit_file, head_file, lines_of
from tests import toy
from tests.inprocess import certify, federation, with_port

SITES = toy.SITES[:3]
APPROVED = [events.ActionApproved(who="ann", what=f"task {n}", digest=f"{n}" * 8) for n in range(5)]


def config_of(root, **sections):
    strategy = {"min_sites": 3, "fraction": 1.0, "attempts": 1, "round_deadline": "60s"}
    found = toy.config(
        root, "fedavg", strategy, run={"rounds": 2, "name": "r"}, secagg={"enabled": True}, **sections
    ).table()
    return Config.of(with_port(found), root)


@pytest.fixture(scope="module")
def certified(tmp_path_factory):
    config = config_of(tmp_path_factory.mktemp("audit"))
    certify(config, ["a", "b"])
    return config


@pytest.fixture
def log(certified, tmp_path):
    """The config, and the path of site a's log with five approvals, signed."""
    shutil.copytree(certified.root / "certs", tmp_path / "certs")
    config = Config.of(certified.table(), tmp_path)
    (tmp_path / "fedtrain.toml").touch()
    opened = audited(config, "a", silent, Credentials.load(tmp_path / "certs/sites/a"))
    for event in APPROVED:
        opened.emit(event)
    opened.close()
    return config, audit_file(config, "a")


def rewrite(path, change):
    path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))


def sealed(lines):
    """What who has no key can do: lines of any content, sealed as they should be."""
    from fedtrain.store.chain import seal_of

    seal = b""
    for line in lines:
        body = line.partition(b" ")[2].removesuffix(b"\n")
        seal = seal_of(seal, body)
        yield seal + b" " + body + b"\n"


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda lines: [*lines[:2], lines[2].replace(b"ann", b"bob"), *lines[3:]], "line 3 was changed"),
        (lambda lines: [*lines[:2], *lines[3:]], "line 3 was changed, or one before it is missing"),
        (lambda lines: [lines[1], lines[0], *lines[2:]], "line 1 was changed"),
        (lambda lines: lines[1:], "line 1 was changed, or one before it is missing"),
        (lambda lines: lines[:3], "2 lines were cut off at its end"),
        (lambda lines: [], "5 lines were cut off at its end"),
        (lambda lines: sealed([line.replace(b"ann", b"bob") for line in lines]), "was rewritten"),
        (lambda lines: [*lines[:3], b"no line at all\n", *lines[3:]], "line 4 was changed"),
    ],
    ids=["edited", "left out", "moved", "first left out", "cut", "emptied", "sealed anew", "put in"],
)
def test_s27_a_changed_left_out_moved_or_cut_line_is_found(log, change, found):
    config, path = log
    assert verify(path, root_of(config)).problems == []
    rewrite(path, change)
    assert any(found in line for line in verify(path, root_of(config)).problems)
    done = CliRunner().invoke(cli, ["audit", "verify", "a", "--config", str(config.root / "fedtrain.toml")])
    assert done.exit_code == 1
    assert found in done.output


def test_s27_a_log_without_its_head_or_with_anothers_is_found(log, certified):
    config, path = log
    other = audited(config, "b", silent, Credentials.load(config.root / "certs/sites/b"))
    other.emit(APPROVED[0])
    other.close()
    shutil.copy(head_file(audit_file(config, "b")), head_file(path))
    assert "a.head is not signed by a" in verify(path, root_of(config)).problems[0]
    head_file(path).unlink()
    assert verify(path, root_of(config)).problems == [
        "a.head is missing: nothing says how long the log must be"
    ]


def test_s27_a_log_that_was_changed_is_not_added_to(log):
    _, path = log
    rewrite(path, lambda lines: [lines[0], *lines[2:]])
    with pytest.raises(Damaged, match=r"line 2 was changed, or one before it is missing.*audit verify"):
        AuditLog(path)


def test_s27_a_line_torn_by_a_kill_is_named_and_the_log_goes_on(log):
    config, path = log
    with path.open("ab") as file:
        file.write(b'0123 {"time":1.0,"kin')
    found = verify(path, root_of(config))
    assert (found.torn_bytes, found.lines, found.problems) == (21, 5, [])
    opened = audited(config, "a", silent, Credentials.load(config.root / "certs/sites/a"))
    opened.emit(APPROVED[0])
    opened.close()
    found = verify(path, root_of(config))
    assert (found.torn_bytes, found.lines, found.signed, found.problems) == (0, 7, 7, [])
    assert [line.entry.kind for line in lines_of(path)][5:] == ["torn", "approved"]


def test_s27_killed_while_it_appends_a_log_keeps_every_line_that_was_told(tmp_path):
    """kill -9 in the middle of a flood of entries: what `append` returned for is there, sealed."""
    code = """
import sys
from pathlib import Path
from fedtrain.events import ActionApproved
from fedtrain.tracking.audit import AuditLog
log = AuditLog(Path(sys.argv[1]))
for n in range(10**6):
    log.append(ActionApproved(who="ann", what=str(n)))
    print(n, flush=True)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path / "a.jsonl")], stdout=subprocess.PIPE, text=True
    )
    told = [int(process.stdout.readline()) for _ in range(200)]
    process.send_signal(signal.SIGKILL)
    told += [int(line) for line in process.communicate()[0].split()]
    lines = list(lines_of(tmp_path / "a.jsonl"))
    assert all(line.good for line in lines)
    assert [line.entry.what for line in lines][: len(told)] == [str(n) for n in told]
    AuditLog(tmp_path / "a.jsonl").close()


# --- a power cut, which takes or tears what was not on the disk


def torn_tail(lines):
    return [*lines[:-2], lines[-2][:40] + b"\0" * 30 + b"\n", b"\0" * 50]


TAILS = {
    "torn": (torn_tail, 2),
    "lost": (lambda lines: lines[:-2], 2),
    "zeros": (lambda lines: [*lines[:-1], b"\0" * len(lines[-1])], 1),
}


@pytest.fixture
def unsynced(log, monkeypatch):
    """A log with two lines that were on the disk and five that were not; its path, and who opens it. The
    machine is started again when the test says so."""
    config, path = log
    load = lambda: Credentials.load(config.root / "certs/sites/a")
    monkeypatch.setattr(audit, "SYNC_S", 1e9)
    for file in (path, head_file(path)):
        file.unlink()
    first = audited(config, "a", silent, load())
    for event in APPROVED[:2]:
        first.emit(event)
    first.statement()
    for event in APPROVED:
        first.emit(event)
    return config, path, lambda: audited(config, "a", silent, load())


def start_again(monkeypatch, tmp_path):
    (tmp_path / "boot").write_text("another start of the machine")
    monkeypatch.setattr(audit, "BOOT", tmp_path / "boot")


@pytest.mark.parametrize("tail", TAILS)
def test_s27_a_tail_that_a_power_cut_tore_is_cut_off_and_named_and_the_log_goes_on(
    unsynced, monkeypatch, tmp_path, tail
):
    config, path, opened = unsynced
    change, gone = TAILS[tail]
    rewrite(path, change)
    with pytest.raises(Damaged, match=r"was changed|were cut off"):
        opened()  # nothing but a power cut does this, and there was none
    start_again(monkeypatch, tmp_path)
    again = opened()
    again.emit(APPROVED[0])
    again.close()
    assert verify(path, root_of(config)).problems == []
    *_, torn, _ = [line.entry for line in lines_of(path)]
    assert (torn.kind, torn.lines) == ("torn", gone)
    assert (torn.nbytes > 0) == (tail != "lost")


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [lines[0], lines[1].replace(b"ann", b"bob"), *lines[2:]],
        lambda lines: lines[:1],
        lambda lines: lines[1:],
        lambda lines: [],
    ],
    ids=["edited", "cut", "first left out", "emptied"],
)
def test_s27_a_power_cut_excuses_nothing_that_was_on_the_disk(unsynced, monkeypatch, tmp_path, change):
    _, path, opened = unsynced
    rewrite(path, change)
    start_again(monkeypatch, tmp_path)
    with pytest.raises(Damaged, match=r"was changed|were cut off"):
        opened()


def test_s27_who_has_no_key_makes_no_head_that_excuses_a_changed_line(unsynced, monkeypatch, tmp_path):
    _, path, opened = unsynced
    whole = msgspec.msgpack.decode(head_file(path).read_bytes().rstrip(b"\0"), type=Signed)
    claim = msgspec.msgpack.decode(whole.claim, type=audit.LogHead)
    early = msgspec.msgpack.encode(msgspec.structs.replace(claim, synced=(0, "")))
    head_file(path).write_bytes(msgspec.structs.replace(whole, claim=early).encode())
    rewrite(path, lambda lines: [lines[0].replace(b"ann", b"bob"), *lines[1:]])
    start_again(monkeypatch, tmp_path)
    with pytest.raises(Damaged, match="was changed"):
        opened()


def test_a_stated_head_is_of_lines_that_no_power_cut_takes(unsynced):
    _, path, _ = unsynced
    signed = msgspec.msgpack.decode(head_file(path).read_bytes().rstrip(b"\0"), type=Signed)
    head = msgspec.msgpack.decode(signed.claim, type=audit.LogHead)
    assert (head.lines, head.synced[0]) == (7, 2)


def test_s26_what_waits_for_the_next_line_is_in_the_file_before_a_reply_with_data_leaves(tmp_path):
    log = AuditLog(tmp_path / "a.jsonl")

    def kinds():
        return [getattr(line.entry, "what", "") for line in lines_of(log.path)]

    for what in ("Keys", "Shares"):
        log.append(events.ReplySent(request="q", what=what, nbytes=1))
    assert kinds() == []
    log.append(events.ReplySent(request="q", what="Masked", nbytes=1))
    assert kinds() == ["Keys", "Shares", "Masked"]
    log.append(events.ReplySent(request="q", what="Agreed", nbytes=1))
    for sent, what in enumerate(("Unmasked", "Update", "Evaluation", "Failure"), 5):
        log.append(events.ReplySent(request="q", what=what, nbytes=1))
        assert len(kinds()) == sent
    log.append(events.CohortAsked(round=1, what="train", cohort={}))
    log.close()
    assert len(kinds()) == 9


def test_a_full_disk_at_a_sync_is_told_with_the_logs_name_and_the_line_stays(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = AuditLog(tmp_path / "a.jsonl")
    log.append(events.CohortAsked(round=1, what="train", cohort={}))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", full)
        for sync in (log.stated, log.close):
            with pytest.raises(Unreadable, match=r"no room for .*a\.jsonl"):
                sync()
    log.close()
    assert len([*lines_of(log.path)]) == 1


def test_s27_a_datacenters_log_is_signed_where_the_authority_certified_it(certified, tmp_path):
    shutil.copytree(certified.root / "certs", tmp_path / "certs")
    config = Config.of(certified.table(), tmp_path)
    assert datacenter_credentials(config) is None

    def kept():
        with closing(audited(config, "datacenter", silent, datacenter_credentials(config))) as log:
            log.emit(APPROVED[0])
        return verify(audit_file(config, "datacenter"), root_of(config))

    assert (kept().signed, kept().problems) == (0, [])
    issue(tmp_path / "certs", "site", "datacenter")
    found = kept()
    assert (found.signed, found.problems) == (found.lines, [])
    rewrite(audit_file(config, "datacenter"), lambda lines: lines[:1])
    assert "were cut off" in verify(audit_file(config, "datacenter"), root_of(config)).problems[0]


def test_two_processes_add_to_one_log_by_turns(tmp_path):
    """As a site's, while its admin approves a task."""
    one, two = AuditLog(tmp_path / "a.jsonl"), AuditLog(tmp_path / "a.jsonl")
    for event in APPROVED:
        one.append(event)
        two.append(event)
    one.close()
    two.close()
    lines = list(lines_of(tmp_path / "a.jsonl"))
    assert len(lines) == 10
    assert all(line.good for line in lines)


def test_s28_no_path_and_no_metric_stands_in_an_entry(tmp_path):
    log = AuditLog(tmp_path / "a.jsonl")
    log.append(
        events.SiteRefused(site="a", reason="/home/ann/heart/key.pem: chmod 600 certs/sites/a/key.pem")
    )
    log.append(events.RoundCommitted(round=1, loss=0.5, metrics={"accuracy": 0.75}, bytes_out=7))
    log.append(events.RunFinished(round=1, reason="rounds done", model="/home/ann/runs/r/model"))
    log.append(events.Notice(text="/home/ann"))
    log.close()
    text = (tmp_path / "a.jsonl").read_text()
    entries = [json.loads(line.partition(" ")[2]) for line in text.splitlines()]
    assert entries[0]["reason"] == "key.pem: chmod 600 key.pem"
    assert {k: v for k, v in entries[1].items() if k != "time"} == {
        "kind": "round_committed", "round": 1, "bytes_out": 7,
    }  # fmt: skip
    assert "/home" not in text
    assert len(entries) == 3


def test_s28_what_a_sites_people_approve_and_change_is_in_its_log(log):
    config, path = log
    (config.root / "fedtrain.toml").write_text('[run]\ntask = "toy_task:Toy"\n')
    (config.root / "toy_task.py").write_text("from tests.toy import Toy\n")
    at = ["--config", str(config.root / "fedtrain.toml")]
    for command in (
        ["task", "approve", "a", *at],
        ["policy", "set", "min_cohort=4", "--site", "a", *at],
        ["policy", "pin", f"b={'0' * 64}", "--site", "a", *at],
    ):
        done = CliRunner().invoke(cli, command)
        assert done.exit_code == 0, done.output
    entered = [line.entry for line in lines_of(path)][5:]
    assert [e.what for e in entered] == [
        "toy_task:Toy may run", "policy: min_cohort=4", f"policy: members b={'0' * 64}",
    ]  # fmt: skip
    assert all(e.who for e in entered)
    assert len(entered[0].digest) == 64
    digest = entered[0].digest
    assert CliRunner().invoke(cli, ["task", "withdraw", digest, "--site", "a", *at]).exit_code == 0
    assert [line.entry.what for line in lines_of(path)][-1] == "toy_task:Toy may run no more"
    assert verify(path, root_of(config)).problems == []


# --- what the other end keeps


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of three sites under masks, with all roles' logs in one folder."""
    config = config_of(tmp_path_factory.mktemp("run"), evaluate={"every": 1})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(toy, "SITES", SITES)
        federation(config, SITES)
    return config


def entries(config, name, kind):
    return [e for line in lines_of(audit_file(config, name)) if (e := line.entry) and e.kind == kind]


def test_s28_the_logs_of_a_run_say_who_took_part_in_what_and_verify_against_each_other(run):
    root = root_of(run)
    for name in ("aggregator", *SITES):
        others = [audit_file(run, each) for each in (SITES if name == "aggregator" else ["aggregator"])]
        found = verify(audit_file(run, name), root, others)
        assert found.problems == []
        assert found.disputes == []
        assert found.signed == found.lines
    assert {e.site for e in entries(run, "aggregator", "admitted")} == {*SITES}
    assert all(e.serial and e.task_digest and e.fingerprint for e in entries(run, "aggregator", "admitted"))
    assert [set(e.sites) for e in entries(run, "aggregator", "round_started")] == [{*SITES}] * 2
    assert [e.round for e in entries(run, "aggregator", "round_committed")] == [1, 2]
    for site in SITES:
        assert len(entries(run, site, "witnessed")) == 2  # of the aggregator, one a round
        assert len([e for e in entries(run, "aggregator", "witnessed") if e.of == site]) == 2
        assert [e.task_digest for e in entries(run, site, "admitted")] == [
            entries(run, "aggregator", "admitted")[0].task_digest
        ]


def test_s26_a_sites_log_has_the_bytes_of_each_reply_before_it_leaves(run):
    masked = [e for e in entries(run, SITES[0], "reply_sent") if e.what == "Masked"]
    assert len(masked) == 4  # two rounds, two evaluations
    assert all(e.nbytes > 0 and e.request.startswith("r/") for e in masked)


def test_s27_neither_end_can_rewrite_the_past_though_it_has_its_key(run, tmp_path):
    """The aggregator, and a site, write their log anew, sealed and signed with their own key."""
    root = root_of(run)
    for mine, other in (("aggregator", SITES[0]), (SITES[0], "aggregator")):
        kept = [audit_file(run, other)]
        shutil.copytree(run.root / "certs", tmp_path / mine / "certs")
        config = Config.of(run.table(), tmp_path / mine)
        folder = "aggregator" if mine == "aggregator" else f"sites/{mine}"
        forged = audited(config, mine, silent, Credentials.load(run.root / "certs" / folder))
        for line in lines_of(audit_file(run, mine)):
            if line.entry.kind not in ("admitted", "reply_sent", "witnessed"):
                forged.emit(line.entry)
        forged.close()
        path = audit_file(config, mine)
        assert verify(path, root).problems == []  # by itself it is a log like any other
        assert any("was rewritten, or cut" in line for line in verify(path, root, kept).problems)


def test_s27_an_end_whose_log_was_cut_is_told_when_it_meets_the_other_one(certified, tmp_path):
    """A site's log, and its head, are put back to an earlier state: the aggregator knows of a later one."""
    shutil.copytree(certified.root / "certs", tmp_path / "certs")
    config, told = Config.of(certified.table(), tmp_path), []

    def opened(name, folder, emit=silent):
        return audited(config, name, emit, Credentials.load(tmp_path / "certs" / folder))

    aggregator, site = opened("aggregator", "aggregator"), opened("a", "sites/a")
    for event in APPROVED:
        site.emit(event)
    path = audit_file(config, "a")
    earlier = [file.read_bytes() for file in (path, head_file(path))]

    def meet():
        answer = site.answer(msgspec.structs.replace(aggregator.statement(), seen=aggregator.place_of("a")))
        aggregator.witness("a", answer)

    meet()
    site.close()
    for file, data in zip((path, head_file(path)), earlier, strict=True):
        file.write_bytes(data)
    assert verify(path, root_of(config)).problems == []  # alone, it can't be seen
    site = opened("a", "sites/a", told.append)
    meet()
    assert "aggregator has seen a line 6 of this log that is not in it" in told[0].text
    site.close()
    aggregator.close()
    assert verify(path, root_of(config)).disputes == [
        "aggregator has seen a line 6 of this log that is not in it"
    ]
    found = verify(path, root_of(config), [audit_file(config, "aggregator")])
    assert "aggregator keeps 1 signed heads of this log that are not in it" in found.problems[0]


def test_s27_a_head_that_another_has_signed_is_not_kept(certified, tmp_path):
    shutil.copytree(certified.root / "certs", tmp_path / "certs")
    config, told = Config.of(certified.table(), tmp_path), []
    load = Credentials.load
    aggregator = audited(config, "aggregator", told.append, load(tmp_path / "certs/aggregator"))
    b = audited(config, "b", silent, load(tmp_path / "certs/sites/b"))
    b.emit(APPROVED[0])
    whole = b.statement()
    for bad in (whole.signed, b"", whole.signed[:-1], whole.signed.replace(b"b", b"a")):
        aggregator.witness("a", msgspec.structs.replace(whole, signed=bad))
    assert len(told) == 4
    assert aggregator.place_of("a") is None
    assert "b has signed a head of b's log, not a" in told[0].text
    b.close()
    aggregator.close()


def test_a_head_from_long_ago_is_looked_up_in_the_file_and_memory_is_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "REMEMBERED", 3)
    log = AuditLog(tmp_path / "a.jsonl")
    for event in APPROVED * 2:
        log.append(event)
    seals = [line.seal for line in lines_of(log.path)]
    assert len(log._seals) == 3
    assert all(log.holds((number, seal)) for number, seal in enumerate(seals, 1))
    assert not any(log.holds((number, seals[number - 2])) for number in range(1, 11))
    assert not log.holds((11, seals[-1]))
    log.close()


def test_sites_that_were_told_one_head_need_no_look_into_the_file_however_many(tmp_path, monkeypatch):
    monkeypatch.setattr(audit, "REMEMBERED", 3)
    looks = []
    monkeypatch.setattr(audit, "lines_of", lambda path: looks.append(path) or lines_of(path))
    log = AuditLog(tmp_path / "a.jsonl", sign=lambda head: head.seal.encode())
    log.append(APPROVED[0])
    log.stated()
    told = log._place
    sites = [events.HeadWitnessed(of=f"s{n}", claim="", signature="", certificate="") for n in range(9)]
    for answer in sites:  # each adds a line, and asks for the head that all were told
        assert log.holds(told)
        log.append(answer)
    assert not looks
    log.close()
    again = AuditLog(log.path, sign=log._sign, known=LogHead(log="a", lines=told[0], seal=told[1]))
    assert all(again.holds(told) for _ in sites)
    assert len(looks) == 1  # the newest lines alone are in memory, and one look tells all sites
    again.close()


def test_a_line_of_which_the_disk_takes_a_part_is_no_line_and_the_log_goes_on(tmp_path, monkeypatch):
    log, write = AuditLog(tmp_path / "a.jsonl"), os.pwrite
    log.append(APPROVED[0])

    def full(fd, data, at):
        if len(data) < 20:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(fd, data[: len(data) // 2], at)

    with monkeypatch.context() as patch:
        patch.setattr(os, "pwrite", full)
        with pytest.raises(StoreError, match="no room for"):
            log.append(APPROVED[1])
    log.append(APPROVED[2])
    log.close()
    lines = [*lines_of(log.path)]
    assert all(line.good for line in lines)
    assert [type(line.entry).__name__ for line in lines] == ["ActionApproved", "LineTorn", "ActionApproved"]
