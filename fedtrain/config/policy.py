"""A site's policy: what the site lets itself be asked, whatever fedtrain.toml and the aggregator say.

The file lies beside the site's key, certs/sites/NAME/policy.toml, where only the site's own people write and
no trainer looks. `fedtrain task approve` makes it; a site without one takes part in nothing.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from msgspec import Meta

from ..errors import ConfigError, writing
from .load import build, table_of
from .values import AtLeastOne, Count, Duration, Inner, NotNegative, Seconds, Settings, plain, require

FILE = "policy.toml"
KEY = r"[0-9a-f]{64}"  # SHA-256 of a public key (pki.fingerprint), in hex
HEAD = """# The policy of a site: what it lets itself be asked, whatever fedtrain.toml and the aggregator say.
# Edit the values, or use `fedtrain policy set`; they count from the next start, [members] at once. Only this
# site's people may write here.
"""


def said(default: Any, words: str) -> Any:
    """A field with a default, and the words that stand beside its key in the file."""
    return field(default=default, metadata={"words": words})


@dataclass(frozen=True)
class SitePolicy(Settings):
    """The rules of one site. A rule is denied by its name, policy.KEY, at both ends."""

    section: ClassVar[str] = "policy"

    secure_sums: bool = said(True, "results leave this site in secure sums only")
    pin_members: bool = said(True, "only sites listed under [members] may be in its cohort")
    signed_members: bool = said(False, "and only while all of them have signed one list of them: policy sign")
    min_cohort: Annotated[int, Meta(ge=3)] = said(3, "fewest sites in a secure sum")
    cohort_change: Count = said(3, "fewest sites by which two sums of near models may differ; 0: any number")
    cohort_near: NotNegative = said(0.01, "how near models are, as a part of the norm of an own update")
    min_examples: AtLeastOne = said(1, "fewest own examples behind a result")
    rounds: AtLeastOne = said(1000, "most rounds that it trains in one run")
    evaluate_every: Count = said(1, "fewest rounds between evaluations; 0: it evaluates nothing")
    metrics: tuple[str, ...] = said(("*",), "names of metrics that may leave; * is any letters")
    noise: Literal["none", "example", "site"] = said(
        "none", "what noise must protect in all that leaves: each example, all data of the site, or none"
    )
    epsilon: NotNegative = said(0.0, "most that its noised releases may cost, over all runs; 0: no bound")
    delta: Inner = said(1e-5, "at which epsilon counts")
    bytes_out: Count = said(0, "most bytes that leave in a round; 0: they are only logged")
    confine: Literal["auto", "require", "keys", "off"] = said(
        "auto", "the task's code has no network and sees no keys; require: or it does not run; keys: no keys"
    )
    initial: str = said("own", "model that a run may begin with: own, that of the task; any; or its SHA-256")
    session: Duration = said(Seconds(86400), "longest life of a connection, which is then made anew")
    # name -> key fingerprint; `fedtrain policy pin NAME=KEY` adds one
    members: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        named, wrong = re.fullmatch(f"own|any|{KEY}", self.initial), f"{self.initial[:80]!r} must be own, any"
        require(named, "policy.initial", f"{wrong}, or the 64 hex digits of a SHA-256")
        for name, key in self.members.items():
            require(re.fullmatch(KEY, key), f"policy.members.{name}",
                    f"{key[:80]!r} must be 64 hex digits, as "
                    f"`fedtrain policy show` prints them at {name}")  # fmt: skip

    def pinned(self, me: str, key: bytes) -> Mapping[str, str] | None:
        """The only sites that this one, `me` with this key, sums or speaks with; None: all that the
        federation's authority certifies."""
        return {**self.members, me: key.hex()} if self.pin_members else None

    def text(self) -> str:
        """The file."""
        lines = [HEAD]
        for f in fields(self):
            if f.name != "members":
                value = json.dumps(plain(getattr(self, f.name)), ensure_ascii=False)
                lines.append(f"{f.name} = {value}  # {f.metadata['words']}")
        lines += ["", "[members]  # NAME = SHA-256 of its public key, as `fedtrain policy show` says there"]
        lines += [f"{json.dumps(name)} = {json.dumps(key)}" for name, key in sorted(self.members.items())]
        return "\n".join(lines) + "\n"


def policy_from(folder: Path) -> SitePolicy:
    """The policy in a site's folder of certificates; ConfigError without one, or with one that others may
    write."""
    path = folder / FILE
    try:
        table = table_of(path.read_bytes(), path)
        mode = stat.S_IMODE(path.stat().st_mode) | stat.S_IMODE(folder.stat().st_mode)
    except FileNotFoundError:
        raise ConfigError(
            f"{path} does not exist: without a policy this site takes part in nothing. Read what the task "
            f"does, then let it run here: fedtrain task approve {folder.name}"
        ) from None
    if mode & 0o022:
        raise ConfigError(
            f"{path} can be written by others than this site's people (mode {mode:04o} of it or its folder): "
            f"chmod go-w {folder} {path}"
        )
    return build(SitePolicy, table, "policy")


def changed(policy: SitePolicy, values: Mapping[str, Any]) -> SitePolicy:
    """The policy with these values; ConfigError for what is no rule, or no value of it."""
    return build(SitePolicy, vars(policy) | dict(values), "policy")


def keep_policy(folder: Path, policy: SitePolicy) -> None:
    """Write a site's policy in one step, for its own people only."""
    path, partial = folder / FILE, folder / f".{FILE}.{os.getpid()}"
    with writing(path):
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(policy.text())
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
