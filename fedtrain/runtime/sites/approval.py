"""What a site's people approved to run on its data: `fedtrain task approve` (S22).

An approval is of bytes: of each file of the task's source that lies in the project, and of the project's
requirements. One changed byte needs another approval. Approvals lie beside the site's key, where only its
people write: a line each, sealed with those before it, and a withdrawal is one more line.
"""

from __future__ import annotations

import getpass
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from ... import pki
from ...config import Config, SitePolicy, keep_policy, policy_from
from ...config.policy import FILE as POLICY
from ...digest import sha256_of
from ...errors import ConfigError, NotApproved, nearest
from ...events import ActionApproved
from ...messages import SiteId
from ...pki import members
from ...store.chain import Chain
from ...training.task import sources
from ..own_code import GRAPH, STAR, named_in

FILE = "approvals.jsonl"
REQUIREMENTS = ("requirements*.txt", "pyproject.toml", "*.lock")
REMEDY = "Move both away: then nothing is approved here. See who changed them, and approve anew."


class Approval(msgspec.Struct, frozen=True, kw_only=True):
    """A line: what was approved, or no longer is, when and by whom."""

    digest: str
    task: str  # run.task
    files: dict[str, str]  # in the project, each with its SHA-256
    by: str  # the user who typed it
    at: str  # UTC
    approved: bool = True

    @property
    def event(self) -> ActionApproved:
        """That a site runs the task under this approval."""
        return ActionApproved(who=self.by, what=f"runs {self.task}, {self.at}", digest=self.digest)


def files_of(config: Config) -> dict[str, str]:
    """The files that decide what runs at a site, each with its SHA-256. None of them is run."""
    root, specs = config.root.resolve(), {"run.task": config.run.task, **named_in(config, *STAR, *GRAPH)}
    found = {file for key, spec in specs.items() for file in sources(spec, root, key).values()}
    found |= {file for pattern in REQUIREMENTS for file in root.glob(pattern)}
    named = sorted((file.relative_to(root).as_posix(), file) for file in found)
    return {name: sha256_of(file) for name, file in named}


def digest_of(config: Config, files: dict[str, str]) -> str:
    """The SHA-256 that stands for these files, for what of them is the task, and with which arguments; and
    for what else of them the settings name, without its options."""
    others = {key: kind for key, kind in named_in(config, *STAR, *GRAPH).items() if key != "strategy.kind"}
    named = [config.run.task, config.strategy.kind, files, *([others] if others else [])]
    body = msgspec.json.encode(named)
    return hashlib.sha256(body).hexdigest()


class Approvals:
    """The approvals of one site."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the site's key and certificate. Damaged where a line was changed."""
        self.folder, self._chain = folder, Chain(folder / FILE, Approval, REMEDY)

    @property
    def valid(self) -> dict[str, Approval]:
        """Those that were not withdrawn, by their digest."""
        last: dict[str, Approval] = {each.digest: each for each in self._chain.values}
        return {digest: each for digest, each in last.items() if each.approved}

    def check(self, config: Config) -> Approval:
        """The approval of the task as its files are now; NotApproved without one."""
        files = files_of(config)
        if found := self.valid.get(digest_of(config, files)):
            return found
        here = f"fedtrain task approve {self.folder.name}"
        if not (before := [each for each in self.valid.values() if each.task == config.run.task]):
            raise NotApproved(
                f"{config.run.task} is not approved at this site. Read it ({', '.join(files)}), then: {here}"
            )
        old = before[-1].files
        changed = [name for name in sorted({*old, *files}) if old.get(name) != files.get(name)]
        what = ", ".join(changed) or ", ".join({"strategy.kind": "", **named_in(config, *STAR, *GRAPH)})
        raise NotApproved(
            f"{what} changed since {config.run.task} was approved at this site, {before[-1].at}. Read what "
            f"changed, then: {here}"
        )

    def approve(self, config: Config) -> Approval:
        """Approve the task as its files are now."""
        files = files_of(config)
        digest = digest_of(config, files)
        if digest not in self.valid:
            made = Approval(digest=digest, task=config.run.task, files=files, by=user(), at=now())
            self._chain.append(made)
        return self.valid[digest]

    def withdraw(self, digest: str) -> Approval:
        """Approve the task of this digest, or of the only one that begins so, no longer."""
        found = [each for each in self.valid.values() if each.digest.startswith(digest)]
        if len(found) != 1:
            raise ConfigError(f"{digest!r}: {len(found)} approvals of {self.folder.name} begin with it")
        self._chain.append(msgspec.structs.replace(found[0], by=user(), at=now(), approved=False))
        return found[0]


def user() -> str:
    """Who works here, by the machine's own account."""
    return getpass.getuser()


def now() -> str:
    return f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ}"


def policy_of(folder: Path, credentials: pki.Credentials, *, signed: bool = False) -> SitePolicy:
    """The policy of the site with these credentials; CertificateError where its members should have signed a
    list of them (`signed`: whatever the file says), and have not."""
    policy, identity = policy_from(folder), credentials.identity
    if policy.signed_members or signed:
        own = {identity.name: pki.fingerprint(credentials.chain).hex()}
        members.check(folder, identity.federation, {**policy.members, **own})
    return policy


def sign_members(folder: Path, path: Path, agree: Callable[[Mapping[SiteId, str]], bool]) -> list[SiteId]:
    """Sign the list of members in a file, which is made of this site's pins where there is none; who has not
    signed yet. When all have, the site holds to it. `agree` asks a person about members that are not pinned
    here."""
    credentials, policy = pki.Credentials.load(folder), policy_from(folder)
    me, federation = credentials.identity.name, credentials.identity.federation
    mine = {**policy.members, me: key_in(folder)}
    try:
        found = members.Members.read(path)
    except FileNotFoundError:
        found = members.Members(federation=federation, members=dict(sorted(mine.items())))
    if found.federation != federation:
        raise ConfigError(f"{path} is of the federation {found.federation[:80]!r}, not of {federation}")
    new = {name: key for name, key in found.members.items() if mine.get(name) != key}
    if found.missing() and new and not agree(new):
        raise ConfigError(f"{me} signs nothing: see to it that {path} has the members that you know")
    if me not in found.signatures:
        found = found.signed_by(me, pki.Signer.of(credentials))
        found.write(path)
    if not (missing := found.missing()):
        found.write(folder / members.FILE)
        keep_policy(folder, replace(policy, members=found.members, signed_members=True))
    return missing


def folders_of(config: Config, sites: Sequence[SiteId] = ()) -> list[Path]:
    """The folders of these sites' keys, or of all sites whose keys lie here; ConfigError without any."""
    every = config.root / config.network.certs / "sites"
    here = sorted(path.parent for path in every.glob("*/key.pem") if (path.parent / "cert.pem").exists())
    found = [folder for folder in here if not sites or folder.name in sites]
    if missing := [site for site in sites if site not in [folder.name for folder in found]]:
        near = nearest(missing[0], [folder.name for folder in here])
        raise ConfigError(f"{every / missing[0]} holds no key of a site.{near}")
    if not found:
        raise ConfigError(f"{every} holds no key of a site. A site's certificate comes first.")
    return found


def key_in(folder: Path) -> str:
    """The fingerprint of the key of the site whose folder this is, in hex."""
    return pki.fingerprint((folder / "cert.pem").read_bytes()).hex()


def approve(config: Config, sites: Sequence[SiteId] = ()) -> tuple[Approval, list[Path]]:
    """Let the task run at these sites, or at all whose keys lie here; (the approval, the sites' folders).

    A site without a policy gets one. Sites whose keys lie here belong to the same people: each pins the
    others.
    """
    found = folders_of(config, sites)
    keys = {folder.name: key_in(folder) for folder in folders_of(config)}
    approval = None
    for folder in found:
        policy = policy_from(folder) if (folder / POLICY).exists() else SitePolicy()
        pinned = replace(policy, members={**policy.members, **keys})
        if pinned != policy or not (folder / POLICY).exists():
            keep_policy(folder, pinned)
        approval = Approvals(folder).approve(config)
    assert approval is not None
    return approval, found
