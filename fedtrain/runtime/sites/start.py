"""What must be in order at a site before its task is loaded: `fedtrain site` and `fedtrain doctor` ask here.

Its approval is the last of it: approval.Approvals.check. It is all that is asked by commands with which a
site's people look at their own data, such as `fedtrain stats --site`: these send nothing.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from ... import __version__
from ...config import Config, SitePolicy, policy_from
from ...config.project import load_only
from ...digest import package_digest
from ...errors import CertificateError
from ...events import Emit
from ...messages import SiteId
from ...pki import Credentials
from ...pki.identity import Current, aggregator_target
from ...pki.proof import AggregatorCheck
from ...questions import Column
from ...training.task import Task, load_task
from ...transport.endpoints import TRANSPORTS
from ...transport.site_link import SiteLink
from ...transport.streams import Files
from ...transport.tls import Tls
from ...wire.frames import PROTOCOL, Bounds, Hello
from ..own_code import check_beside_key
from ..trainers.trainer_messages import Description
from .approval import Approvals, policy_of
from .gate import check_policy


def folder_of(config: Config, name: SiteId) -> Path:
    """Where a site's key lies, with its certificate, its policy and its approvals."""
    return config.root / config.network.certs / "sites" / name


def credentials_of(config: Config, name: SiteId) -> Current:
    """The site's credentials; CertificateError where they are not in order, or another's."""
    current = Current(folder_of(config, name))
    identity = current().identity
    if identity.role != "site" or identity.name != name:
        raise CertificateError(
            f"the certificate is {identity.name}'s, not {name}'s. "
            f"Give the name {identity.name}, or issue one for {name}."
        )
    return current


def checked_policy(config: Config, name: SiteId, credentials: Credentials) -> SitePolicy:
    """The site's policy; ConfigError without one, or for settings under which it would refuse everything."""
    policy = policy_of(folder_of(config, name), credentials)
    check_policy(config, policy)
    check_beside_key(config, policy, peer=False)
    return policy


def hello_of(
    config: Config, about: Description, bounds: Bounds, columns: tuple[Column, ...], examples: float | None
) -> Hello:
    """What a site says as it joins. `examples`: how many it has; None: the aggregator is not to know."""
    return Hello(
        protocol=PROTOCOL,
        version=__version__,
        package=package_digest(),
        task_digest=about.task_digest,
        schema=about.schema,
        frozen=about.frozen.schema,
        agreed=config.agreed(),
        bounds=bounds,
        examples=examples,
        columns=columns,
    )


def link_of(
    config: Config, current: Current, trust: AggregatorCheck, inbox: Files, requests: Any,
    policy: SitePolicy, emit: Emit,
) -> SiteLink:  # fmt: skip
    """The site's connection to its aggregator, not yet made. `requests`: the message types it answers."""
    return SiteLink(
        TRANSPORTS["grpc"](lambda: Tls(*current.parts()), config.network.heartbeat),
        address=config.network.address or config.network.listen,
        target=aggregator_target(current().identity.federation),
        inbox=inbox,
        requests=requests,
        trust=trust,
        emit=emit,
        session_s=policy.session,
    )


def task_for(
    config: Config, name: SiteId | None, data_dir: Path | None = None, task: Task | None = None
) -> Task:
    """The task of run.task, loaded in this process to work as this site, or as none; or `task`, which a
    program has made already.

    ConfigError, before a line of it or of a strategy of one's own runs, where the site's key lies here and
    its people have not approved the task as it is now (S22). At the task's author, who has no key, and as no
    site nobody is asked."""
    if task is not None:
        return task
    if name is not None and os.path.exists((folder := folder_of(config, name)) / "key.pem"):
        policy_from(folder)  # nobody else may have written there
        load_only(config.root, Approvals(folder).check(config).files)
    else:
        load_only(config.root, None)
    return load_task(config.run.task, config.root, data_dir)
