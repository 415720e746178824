"""Calls of the disk and of sockets that fail in each role: it says so in one correct line, soon, and with the
disk well again the same command makes the same bits."""

import errno
import json
import random
import re
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from fedtrain.store import RunStore
from tests.faults.injected import SITES, Fault, Injector, possible
from tests.ports import free_port
from tests.processes import Project
from tests.soaking import taken

pytestmark = [
    pytest.mark.slow(10),
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not possible(), reason="needs a C compiler"),
]
SOON_S = 5.0
HARMFUL = ("damaged", "ove it away", "anew", "--fresh", "min_sites", "elete", "certs revoke")
SAID = {
    "ENOSPC": "No space left", "EIO": "Input/output error", "EMFILE": "oo many open files",
    "EROFS": "Read-only",
}  # fmt: skip
SQLITE = ("can't be read or written: disk I/O error;", "unable to open database file;", "disk is full;")
ERRORS = {  # of calls about files: what they fail with
    "open": ["EMFILE", "EROFS", "EIO", "ENOSPC"],
    "write": ["ENOSPC", "EIO"],
    "sync": ["EIO", "ENOSPC"],
    "truncate": ["EIO", "ENOSPC"],
    "rename": ["EROFS", "EIO", "ENOSPC"],
    "unlink": ["EROFS", "EIO"],
    "mkdir": ["EROFS", "ENOSPC"],
    "read": ["EIO"],
}
SOCKETS = {"socket": ["EMFILE"], "accept": ["EMFILE"], "connect": ["EIO"], "send": ["EIO"], "recv": ["EIO"]}
ROLES = {  # of whose files calls fail -> (what runs, their folders, the run whose model is compared)
    "simulation": ("simulate --set simulate.workers=0", ("r+simulate",), "r+simulate"),
    "gossip simulation": ("simulate --mode gossip", ("r+gossip",), "r+gossip"),
    "datacenter rank": ("datacenter", ("r+datacenter",), "r+datacenter"),
    "aggregator": ("federation", ("r", "audit"), "r"),
    "site": ("federation", ("r@a", "@a", "audit"), "r"),
    "aggregator under masks": ("masks", ("r", "audit"), "r"),
    "site under masks": ("masks", ("r@a", "@a", "audit"), "r"),
    "peer": ("peers", ("r+gossip@b", "@b", "audit"), "r+gossip@b"),
}


@pytest.fixture(scope="module")
def injector(tmp_path_factory):
    made = Injector(tmp_path_factory.mktemp("inject"))
    yield made
    made.close()


@pytest.fixture(scope="module")
def memory():
    shared = Path("/dev/shm")
    with TemporaryDirectory(dir=shared if shared.is_dir() else None) as folder:
        yield Path(folder)


class Role:
    """A project in memory in which a role runs again and again, each time from the start."""

    def __init__(self, injector, folder, name):
        self.what, self.folders, self.run_name = ROLES[name]
        self.injector, self.root, self.log, self.mark = injector, folder, folder / "log", folder / "mark"
        Project(folder, rounds=3, strategy='kind = "fedadam"')
        text = (folder / "fedtrain.toml").read_text().replace('kind = "fedadam"\n', "")
        if name != "peer" and "gossip" not in name:
            text = text.replace("[strategy]", '[strategy]\nkind = "fedadam"')
        (folder / "fedtrain.toml").write_text(text)
        (folder / "ports").write_text(json.dumps({s: f"127.0.0.1:{free_port()}" for s in SITES}))

    def start(self, fault=None, timeout_s=60.0):
        """Its exit code, when it ended, and what it wrote."""
        self.log.unlink(missing_ok=True)
        code, at = self.injector.run(self.what, self.root, self.log, fault, timeout_s)
        return code, at, self.log.read_text()

    def fresh(self):
        shutil.rmtree(self.root / "runs", ignore_errors=True)
        self.mark.unlink(missing_ok=True)

    def final(self):
        store = RunStore(self.root / "runs" / self.run_name, read_only=True)
        try:
            return store.latest().weights.digest
        finally:
            store.close()

    def whole(self):
        """The model without a fault, and the calls that make it: {(call, file): how many}."""
        self.fresh()
        code, _, text = self.start(Fault(0, "*", prefix=str(self.root / "runs"), mark=str(self.mark)))
        assert code == 0, text
        calls = {}
        for line in self.mark.read_text().splitlines():
            call, _, path = line.partition(" ")
            if path != "socket":
                path = re.sub(r"[0-9a-f]{32}", "*", path.removeprefix(f"{self.root}/runs/"))
                if not path.startswith(tuple(f"{f}/" for f in self.folders)):
                    continue
            calls[call, path] = calls.get((call, path), 0) + 1
        return self.final(), calls

    def wrong(self, name, call, path, after, whole):
        """What goes wrong where this call fails; "" where nothing does, or it never came."""
        self.fresh()
        files = path != "socket"
        fault = Fault(
            getattr(errno, name), call, after, -1 if files else 3, str(self.root / "runs"),
            max(path.split("*"), key=len) if files else "", str(self.mark),
        )  # fmt: skip
        code, at, text = self.start(fault)
        here = f"{name} at {call} {after} of {path}"
        if code is None:
            return f"{here}: it goes on for a minute\n{text}"
        if code:
            if found := wrong_line(text, code, name):
                return f"{here}: {found}"
            if self.mark.exists() and at - self.mark.stat().st_mtime > SOON_S:
                return f"{here}: told {at - self.mark.stat().st_mtime:.1f} s later"
        code, _, text = self.start()
        if code:
            return f"{here}: with the disk well, exit {code}\n{text}"
        same = self.what == "peers" or self.final() == whole  # peers may go on without one that fails
        return "" if same else f"{here}: another model"


def wrong_line(text, code, name):
    """Of what a command wrote that failed."""
    lines = [line for line in text.splitlines() if line.startswith("fedtrain: ")]
    if code != 1 or "Traceback" in text or len(lines) != 1:
        return f"exit {code}\n{text}"
    if not any(words in lines[0] for words in (SAID[name], *SQLITE)):
        return f"it does not say what fails\n{lines[0]}"
    if harm := [word for word in HARMFUL if word in lines[0]]:
        return f"{harm} harms\n{lines[0]}"
    return ""


def places(calls, seed):
    """Of each kind of call about each file the first, and one that is drawn, with each error."""
    draw = random.Random(seed)
    for (call, path), count in sorted(calls.items()):
        for name in (SOCKETS if path == "socket" else ERRORS)[call]:
            for after in sorted({0, draw.randrange(count)}):
                yield name, call, path, after


SAMPLE = 2  # places of a role
FOUND = {  # places that once were told wrongly, or not at all
    "simulation": [("EIO", "write", "r+simulate/run.db-shm", 0)],
    "aggregator under masks": [("ENOSPC", "write", "audit/aggregator.head", 4)],
    "site": [("EIO", "write", "audit/aggregator.head", 1)],
}


@pytest.mark.parametrize("name", ROLES)
def test_some_calls_that_fail_are_told_in_one_line_and_the_same_command_goes_on(injector, memory, name):
    role = Role(injector, memory / name.replace(" ", "-"), name)
    whole, calls = role.whole()
    drawn = [*FOUND.get(name, []), *random.Random(name).sample([*places(calls, name)], SAMPLE)]
    assert not [wrong for place in drawn if (wrong := role.wrong(*place, whole))]


@pytest.mark.soak(part=0.02)
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ROLES)
def test_each_call_that_fails_is_told_in_one_line_and_the_same_command_goes_on(
    injector, memory, name, request
):
    role = Role(injector, memory / f"all-{name.replace(' ', '-')}", name)
    whole, calls = role.whole()
    every = taken(places(calls, name), request)
    found = [wrong for place in every if (wrong := role.wrong(*place, whole))]
    assert not found, f"{len(found)}\n" + "\n".join(found)
