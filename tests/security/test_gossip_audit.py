"""S27 between peers: each keeps the heads of the others' audit logs, so that none rewrites its past."""

import asyncio
import shutil

from fedtrain.config import Config
from fedtrain.events import ActionApproved, HeadWitnessed, silent
from fedtrain.pki import Credentials
from fedtrain.runtime.auditing import audited, root_of, verify
from fedtrain.tracking.audit import audit_file, lines_of
from tests.peers import village

NAMES = "abc"


def kept_by(config, name):
    """Whose heads are in a peer's log."""
    return {line.entry.of for line in lines_of(audit_file(config, name)) if type(line.entry) is HeadWitnessed}


def test_s27_no_peer_rewrites_its_past_though_it_has_its_key(tmp_path):
    """Over real ZeroMQ. One peer then writes its log anew, sealed and signed with its own key."""

    async def run():
        async with village(tmp_path / "v", NAMES) as v:
            for name in NAMES:
                v.start(name, pace_s=0.05)
            logs = [audit_file(v.config(), name) for name in NAMES]
            await v.until(lambda: all(log.exists() for log in logs))
            await v.until(lambda: all(kept_by(v.config(), n) == {*NAMES} - {n} for n in NAMES))
            return v.config()

    config = asyncio.run(run())
    root, mine = root_of(config), audit_file(config, "a")
    others = [audit_file(config, name) for name in "bc"]
    found = verify(mine, root, others)
    assert found.problems == []
    assert found.disputes == []
    assert set(found.witnessed) == {"b", "c"}

    shutil.copytree(config.root / "certs", tmp_path / "forged/certs")
    again = Config.of(config.table(), tmp_path / "forged")
    forged = audited(again, "a", silent, Credentials.load(config.root / "certs/sites/a"))
    for line in lines_of(mine):
        if line.entry.kind not in ("reply_sent", "approved"):
            forged.emit(line.entry)
    forged.close()
    assert verify(audit_file(again, "a"), root).problems == []  # by itself it is a log like any other
    for other in others:
        problems = verify(audit_file(again, "a"), root, [other]).problems
        assert any("the log was rewritten, or cut" in line for line in problems)


def test_s27_a_peer_that_floods_others_with_heads_fills_no_log(tmp_path):
    """Of each peer one head counts for each own round, whatever it sends."""

    async def run():
        async with village(tmp_path / "v", "ab") as v:
            load = lambda name: Credentials.load(v.root / "certs/sites" / name)
            mine, other = logs = [audited(v.config(), name, silent, load(name)) for name in "ab"]
            mine.state_after_rounds(lambda head: None)
            for _ in range(50):
                other.emit(ActionApproved(who="b", what="a line"))
                mine.overheard("b", other.statement())
            mine.after_round()
            mine.overheard("b", other.statement())
            await mine.stated()
            for log in logs:
                log.close()
            return v.config()

    config = asyncio.run(run())
    assert len([line for line in lines_of(audit_file(config, "a")) if type(line.entry) is HeadWitnessed]) == 2
